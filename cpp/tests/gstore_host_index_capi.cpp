// SPDX-License-Identifier: Apache-2.0
// The index in host memory through its C ABI.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "base/aligned_buffer.h"
#include "gstore/index.h"
#include "tardis/host_index.h"

namespace tardis::gstore {
namespace {

TEST(GstoreHostIndex, FindsWhatWasPutAndNothingElse) {
  constexpr std::uint32_t kEntries = 2000;
  AlignedBuffer memory(tardis_index_memory_bytes(kEntries));
  tardis_gpu_index index{};
  char* error = nullptr;
  ASSERT_EQ(tardis_index_place(&index, memory.data(), memory.size(), &error), TARDIS_OK) << error;
  std::mt19937_64 random(7);
  std::vector<tardis_gpu_index_entry> entries(kEntries);
  std::vector<std::uint64_t> keys(4 * 2 * kEntries);  // every other one is not there
  for (std::uint64_t& word : keys) word = random();
  for (std::uint32_t i = 0; i < kEntries; ++i) {
    std::memcpy(entries[i].key, &keys[8 * i], 32);
    entries[i].location = i;
    entries[i].generation = 1;
    entries[i].root = i * 3;
    entries[i].payload_bytes = 4096;
    entries[i].space = 5;
  }
  std::vector<std::uint8_t> statuses(kEntries, 0xff);
  ASSERT_EQ(tardis_index_apply(&index, entries.data(), kEntries, statuses.data(), &error), TARDIS_OK) << error;
  for (const std::uint8_t status : statuses) ASSERT_EQ(status, TARDIS_GPU_INDEX_INSERTED);
  std::vector<tardis_gpu_index_answer> answers(2 * kEntries);
  std::memset(answers.data(), 0xee, answers.size() * sizeof answers[0]);
  const std::uint32_t count = 2 * kEntries - 10;
  ASSERT_EQ(tardis_index_lookup(&index, keys.data(), &count, 2 * kEntries, 5, answers.data(), &error), TARDIS_OK);
  for (std::uint32_t i = 0; i < 2 * kEntries; ++i) {
    if (i >= count) {
      EXPECT_EQ(answers[i].status, 0xeeeeeeeeu);
    } else if (i % 2 == 0) {
      EXPECT_EQ(answers[i].status, static_cast<std::uint32_t>(TARDIS_GPU_INDEX_FOUND));
      EXPECT_EQ(answers[i].location, i / 2);
      EXPECT_EQ(answers[i].root, i / 2 * 3);
    } else {
      EXPECT_EQ(answers[i].status, static_cast<std::uint32_t>(TARDIS_GPU_INDEX_MISS));
    }
  }
  ASSERT_EQ(tardis_index_lookup(&index, keys.data(), &count, 10, 6, answers.data(), &error), TARDIS_OK);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(answers[i].status, static_cast<std::uint32_t>(TARDIS_GPU_INDEX_MISS));
}

TEST(GstoreHostIndex, RefusesWhatIsNoIndex) {
  alignas(256) unsigned char memory[8192]{};
  tardis_gpu_index index{};
  char* error = nullptr;
  EXPECT_EQ(tardis_index_place(&index, memory + 8, 8000, &error), TARDIS_INVALID_ARGUMENT);
  tardis_free(error);
  EXPECT_EQ(tardis_index_place(&index, memory, 256, &error), TARDIS_INVALID_ARGUMENT);
  tardis_free(error);
  const std::uint32_t count = 1;
  tardis_gpu_index_answer answer{};
  EXPECT_EQ(tardis_index_lookup(&index, memory, &count, 1, 0, &answer, &error), TARDIS_INVALID_ARGUMENT);
  tardis_free(error);
  EXPECT_EQ(tardis_index_apply(&index, nullptr, 1, nullptr, &error), TARDIS_INVALID_ARGUMENT);
  tardis_free(error);
}

}  // namespace
}  // namespace tardis::gstore
