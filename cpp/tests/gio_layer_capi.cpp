// SPDX-License-Identifier: Apache-2.0
// Layers of KV pages through the C ABI, by the host's ring: bytes, bounds of ids and counts, deadlines, refusals.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/checksum.h"
#include "gio/iocb.h"
#include "tardis/gio_layer.h"

namespace tardis::gio {
namespace {

constexpr std::uint32_t kPages = 12, kSlots = 20, kHalf = 8192, kObjectBlocks = 2 * kHalf / 4096;
constexpr std::byte kPoison{0xa5};

// A session and pools of K and V of one layer, each between guards of a page.
class LayerRig {
 public:
  LayerRig() : pools_{AlignedBuffer((kPages + 2) * kHalf), AlignedBuffer((kPages + 2) * kHalf)} {
    tardis_gio_options options{};
    options.bytes = std::uint64_t{kSlots + 1} * kObjectBlocks * 4096;
    options.block_bytes = 4096;
    options.controller_threads = 1;
    options.queues = 2;
    options.entries = 8;
    options.slot_bytes = 2 * kHalf;
    memory_ = AlignedBuffer(tardis_gio_memory_bytes(&options));
    char* error = nullptr;
    EXPECT_EQ(tardis_gio_open(&options, memory_.data(), &session_, &error), TARDIS_OK) << error;
    const void *prp = nullptr, *sgl = nullptr;
    std::size_t prp_bytes = 0, sgl_bytes = 0;
    EXPECT_EQ(tardis_gio_tables(session_, &prp, &prp_bytes, &sgl, &sgl_bytes, &error), TARDIS_OK);
    prp_ = AlignedBuffer(prp_bytes);
    sgl_ = AlignedBuffer(sgl_bytes);
    std::memcpy(prp_.data(), prp, prp_bytes);
    std::memcpy(sgl_.data(), sgl, sgl_bytes);
    tardis_gio_sizes sizes{};
    tardis_gio_layer_sizes(&sizes);
    EXPECT_EQ(sizes.layer, sizeof(tardis_gio_layer));
    EXPECT_EQ(sizes.most_contexts, kMostContexts);
    state_ = AlignedBuffer(options.queues * sizes.state);
    uses_ = AlignedBuffer(options.queues * options.entries * 2);
    queues_ = AlignedBuffer(options.queues * sizes.queue);
    EXPECT_EQ(
        tardis_gio_queues(session_, state_.data(), uses_.data(), prp_.data(), sgl_.data(), queues_.data(), &error),
        TARDIS_OK);
    EXPECT_EQ(tardis_gio_host_start(queues_.data(), options.queues, &error), TARDIS_OK);
    work_ = AlignedBuffer(tardis_gio_host_work_bytes(queues_.data(), options.queues), 64);
    contexts_ = AlignedBuffer(std::size_t{sizes.most_contexts} * sizes.context);
    statuses_.assign(sizes.most_contexts, 0);
    reports_ = AlignedBuffer(options.queues * sizes.report);
    for (AlignedBuffer& pool : pools_) std::memset(pool.data(), static_cast<int>(kPoison), pool.size());
  }
  ~LayerRig() { tardis_gio_close(session_); }
  LayerRig(const LayerRig&) = delete;
  LayerRig& operator=(const LayerRig&) = delete;

  std::byte* page(int half, std::uint32_t number) { return pools_[half].data() + (number + 1) * kHalf; }
  AlignedBuffer& pool(int half) { return pools_[half]; }

  tardis_gio_layer layer(std::uint32_t op) {
    flag_ = 0;
    tardis_gio_layer layer{};
    layer.pool_pages = ids.data();
    layer.slots = slots.data();
    layer.count = &count;
    for (int half = 0; half < 2; ++half) {
      layer.pools[half] = reinterpret_cast<std::uintptr_t>(page(half, 0));
      layer.page_stride[half] = layer.page_bytes[half] = kHalf;
    }
    layer.most_pages = static_cast<std::uint32_t>(ids.size());
    layer.pool_page_count = kPages;
    layer.slot_count = kSlots;
    layer.op = op;
    layer.blocks_per_slot = kObjectBlocks;
    layer.block_bytes = 4096;
    layer.most_bytes = 2 * kHalf;
    layer.contexts = contexts_.data();
    layer.context_count = &context_count_;
    layer.ended = &ended_;
    layer.work = work_.data();
    layer.statuses = statuses_.data();
    layer.reports = reports_.data();
    layer.flag = &flag_;
    layer.deadline_ns = 10'000'000'000;
    layer.queues = queues_.data();
    layer.rings = 2;
    return layer;
  }
  std::uint32_t run(const tardis_gio_layer& layer) {
    char* error = nullptr;
    EXPECT_EQ(tardis_gio_host_layer(&layer, &error), TARDIS_OK) << error;
    return flag_;
  }
  std::string refusal(const tardis_gio_layer& layer) {
    char* error = nullptr;
    EXPECT_EQ(tardis_gio_host_layer(&layer, &error), TARDIS_INVALID_ARGUMENT);
    const std::string text = error == nullptr ? "" : error;
    tardis_free(error);
    EXPECT_EQ(flag_, kIoPending);
    return text;
  }
  IoEnd end(std::uint32_t i) const { return IoStatus{statuses_[i]}.end(); }
  RingError error(std::uint32_t ring) { return reinterpret_cast<RingReport*>(reports_.data())[ring].error; }
  tardis_gio_session* session() { return session_; }

  std::vector<std::uint32_t> ids, slots;
  std::uint32_t count = 0;

 private:
  AlignedBuffer pools_[2];
  AlignedBuffer memory_, prp_, sgl_, state_, uses_, queues_, work_, contexts_, reports_;
  std::vector<std::uint32_t> statuses_;
  std::uint32_t context_count_ = 0, ended_ = 0, flag_ = 0;
  tardis_gio_session* session_ = nullptr;
};

std::byte byte_of(std::uint32_t page, int half, std::uint32_t at) {
  return static_cast<std::byte>(page * 31 + half * 101 + at * 7 + at / 256);
}

void fill(LayerRig& rig) {
  for (int half = 0; half < 2; ++half) {
    for (std::uint32_t page = 0; page < kPages; ++page) {
      for (std::uint32_t at = 0; at < kHalf; ++at) rig.page(half, page)[at] = byte_of(page, half, at);
    }
  }
}
bool holds(LayerRig& rig, std::uint32_t page, const std::function<std::byte(int, std::uint32_t)>& wanted) {
  for (int half = 0; half < 2; ++half) {
    for (std::uint32_t at = 0; at < kHalf; ++at) {
      if (rig.page(half, page)[at] != wanted(half, at)) return false;
    }
  }
  return true;
}
bool poisoned(LayerRig& rig, std::uint32_t page) {
  return holds(rig, page, [](int, std::uint32_t) { return kPoison; });
}
bool guards_are_whole(LayerRig& rig) {
  for (int half = 0; half < 2; ++half) {
    for (std::uint32_t at = 0; at < kHalf; ++at) {
      if (rig.page(half, 0)[static_cast<std::ptrdiff_t>(at) - kHalf] != kPoison) return false;
      if (rig.page(half, kPages)[at] != kPoison) return false;
    }
  }
  return true;
}
void poison(LayerRig& rig) {
  for (int half = 0; half < 2; ++half) {
    std::memset(rig.pool(half).data(), static_cast<int>(kPoison), rig.pool(half).size());
  }
}

TEST(GioLayer, PutAndGetToOtherPages) {
  for (const std::uint32_t most_bytes : {2 * kHalf, 4096u}) {  // one command a page, or four
    LayerRig rig;
    fill(rig);
    rig.ids = {7, 0, 11, 3, 5};
    rig.slots = {19, 2, 0, 7, 8};
    rig.count = 4;
    tardis_gio_layer put = rig.layer(TARDIS_GIO_WRITE);
    put.most_bytes = most_bytes;
    ASSERT_EQ(rig.run(put), kIoDone);
    poison(rig);
    rig.ids = {1, 4, 9, 2, 5};
    tardis_gio_layer get = rig.layer(TARDIS_GIO_READ);
    get.most_bytes = most_bytes;
    ASSERT_EQ(rig.run(get), kIoDone);
    const std::uint32_t from[] = {7, 0, 11, 3};
    for (std::uint32_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(holds(rig, rig.ids[i], [&](int h, std::uint32_t at) { return byte_of(from[i], h, at); })) << i;
    }
    for (const std::uint32_t page : {0u, 3u, 5u, 6u, 7u, 8u, 10u, 11u}) EXPECT_TRUE(poisoned(rig, page)) << page;
    EXPECT_TRUE(guards_are_whole(rig));
    rig.count = 0;
    EXPECT_EQ(rig.run(rig.layer(TARDIS_GIO_READ)), kIoDone);
  }
}

TEST(GioLayer, SlotsByTheirFirstBlocks) {
  LayerRig rig;
  fill(rig);
  const std::vector<std::uint64_t> blocks{40, 1, 9, ~std::uint64_t{0}};
  rig.ids = {2, 6};
  rig.slots = {2, 0};
  rig.count = 2;
  tardis_gio_layer put = rig.layer(TARDIS_GIO_WRITE);
  put.slot_blocks = blocks.data();
  put.slot_count = 3;
  put.first_block = 3;
  ASSERT_EQ(rig.run(put), kIoDone);
  std::vector<std::byte> found(2 * kHalf);
  char* error = nullptr;
  ASSERT_EQ(tardis_gio_read(rig.session(), (9 + 3) * 4096, found.data(), found.size(), &error), TARDIS_OK) << error;
  EXPECT_EQ(std::memcmp(found.data(), rig.page(0, 2), kHalf), 0);
  EXPECT_EQ(std::memcmp(found.data() + kHalf, rig.page(1, 2), kHalf), 0);
  rig.ids = {2, 6, 7};
  rig.slots = {2, 4, 3};  // the table has no such entry; it has one that is nowhere
  rig.count = 3;
  tardis_gio_layer get = rig.layer(TARDIS_GIO_READ);
  get.slot_blocks = blocks.data();
  get.slot_count = 4;
  get.first_block = 3;
  EXPECT_EQ(rig.run(get), kIoError);
  EXPECT_EQ(rig.end(0), IoEnd::kDone);
  EXPECT_EQ(rig.end(1), IoEnd::kRefused);
  EXPECT_EQ(rig.end(2), IoEnd::kRefused);
}

TEST(GioLayer, DigestsAreMadeAndCompared) {
  for (const std::uint32_t most_bytes : {2 * kHalf, kHalf}) {
    LayerRig rig;
    fill(rig);
    rig.ids = {3, 8};
    rig.slots = {1, 2};
    rig.count = 2;
    std::vector<std::uint64_t> digests(2 * 3, 0);  // a page has three words, of which this layer's is the second
    const auto with_digests = [&](std::uint32_t op) {
      tardis_gio_layer layer = rig.layer(op);
      layer.most_bytes = most_bytes;
      layer.digests = reinterpret_cast<std::uintptr_t>(&digests[1]);
      layer.digest_stride = 3 * sizeof(std::uint64_t);
      return layer;
    };
    if (most_bytes % kDigestedBytes != 0) {  // a command would begin within a digest
      EXPECT_NE(rig.refusal(with_digests(TARDIS_GIO_WRITE)).find("16 KiB"), std::string::npos);
      continue;
    }
    ASSERT_EQ(rig.run(with_digests(TARDIS_GIO_WRITE)), kIoDone);
    for (std::uint32_t i = 0; i < 2; ++i) {
      std::vector<std::byte> object(rig.page(0, rig.ids[i]), rig.page(0, rig.ids[i]) + kHalf);
      object.insert(object.end(), rig.page(1, rig.ids[i]), rig.page(1, rig.ids[i]) + kHalf);
      EXPECT_EQ(digests[3 * i + 1], xxh3_64(object.data(), object.size()));
      EXPECT_EQ(digests[3 * i] | digests[3 * i + 2], 0u);
    }
    EXPECT_EQ(rig.run(with_digests(TARDIS_GIO_READ)), kIoDone);
    digests[4] ^= 1;
    EXPECT_EQ(rig.run(with_digests(TARDIS_GIO_READ)), kIoError);
    EXPECT_EQ(rig.end(0), IoEnd::kDone);
    EXPECT_EQ(rig.end(1), IoEnd::kDamaged);
  }
}

TEST(GioLayer, IdsOutsideAreRefusedAndTheOthersLand) {
  LayerRig rig;
  fill(rig);
  rig.ids = {0, 1};
  rig.slots = {0, 1};
  rig.count = 2;
  ASSERT_EQ(rig.run(rig.layer(TARDIS_GIO_WRITE)), kIoDone);
  poison(rig);
  rig.ids = {4, kPages, 0xffffffffu, 5, 6};
  rig.slots = {0, 1, 0, kSlots, 1};
  rig.count = 5;
  EXPECT_EQ(rig.run(rig.layer(TARDIS_GIO_READ)), kIoError);
  const IoEnd wanted[] = {IoEnd::kDone, IoEnd::kRefused, IoEnd::kRefused, IoEnd::kRefused, IoEnd::kDone};
  for (std::uint32_t i = 0; i < 5; ++i) EXPECT_EQ(rig.end(i), wanted[i]) << i;
  EXPECT_TRUE(holds(rig, 4, [](int h, std::uint32_t at) { return byte_of(0, h, at); }));
  EXPECT_TRUE(holds(rig, 6, [](int h, std::uint32_t at) { return byte_of(1, h, at); }));
  EXPECT_TRUE(poisoned(rig, 5));
  EXPECT_TRUE(guards_are_whole(rig));
  // The queue pairs are as good as before.
  rig.ids = {9};
  rig.slots = {1};
  rig.count = 1;
  EXPECT_EQ(rig.run(rig.layer(TARDIS_GIO_READ)), kIoDone);
}

TEST(GioLayer, ACountAboveTheIdsIsRefusedAsAWhole) {
  LayerRig rig;
  rig.ids = {0, 1};
  rig.slots = {0, 1};
  for (const std::uint32_t count : {3u, 2049u, 0xffffffffu}) {
    rig.count = count;
    EXPECT_EQ(rig.run(rig.layer(TARDIS_GIO_READ)), kIoError);
    EXPECT_EQ(rig.error(0), RingError::kTooMany);
  }
  for (std::uint32_t page = 0; page < kPages; ++page) EXPECT_TRUE(poisoned(rig, page));
}

TEST(GioLayer, ADeadlineThatPassesEndsTheQueues) {
  LayerRig rig;
  rig.ids = {0, 1, 2, 3, 4, 5, 6, 7};
  rig.slots = rig.ids;
  rig.count = 8;
  tardis_gio_layer get = rig.layer(TARDIS_GIO_READ);
  get.deadline_ns = 1;
  EXPECT_EQ(rig.run(get), kIoError);
  EXPECT_EQ(rig.error(1), RingError::kDeadline);
  EXPECT_EQ(rig.run(rig.layer(TARDIS_GIO_READ)), kIoError);
  EXPECT_EQ(rig.error(1), RingError::kQueueDown);
}

TEST(GioLayer, WhatCannotBeRunIsSaid) {
  LayerRig rig;
  rig.ids = {0};
  rig.slots = {0};
  rig.count = 1;
  const auto refusal = [&](auto change) {
    tardis_gio_layer layer = rig.layer(TARDIS_GIO_READ);
    change(layer);
    return rig.refusal(layer);
  };
  EXPECT_NE(refusal([](tardis_gio_layer& l) { l.queues = nullptr; }).find("NULL"), std::string::npos);
  EXPECT_NE(refusal([](tardis_gio_layer& l) { l.work = nullptr; }).find("working memory"), std::string::npos);
  EXPECT_NE(refusal([](tardis_gio_layer& l) { l.pool_page_count = 0; }).find("pool_page_count"), std::string::npos);
  EXPECT_NE(refusal([](tardis_gio_layer& l) { l.op = 3; }).find("op"), std::string::npos);
  EXPECT_NE(refusal([](tardis_gio_layer& l) { l.block_bytes = 1024; }).find("blocks"), std::string::npos);
  EXPECT_NE(refusal([](tardis_gio_layer& l) { l.most_bytes = 1000; }).find("most_bytes"), std::string::npos);
  EXPECT_NE(refusal([](tardis_gio_layer& l) { l.page_bytes[1] = 0; }).find("second"), std::string::npos);
  EXPECT_NE(refusal([](tardis_gio_layer& l) { l.deadline_ns = 16'000'000'000; }).find("15 s"), std::string::npos);
  EXPECT_NE(refusal([](tardis_gio_layer& l) { l.rings = 17; }).find("queues"), std::string::npos);
  char* error = nullptr;
  EXPECT_EQ(tardis_gio_host_layer(nullptr, &error), TARDIS_INVALID_ARGUMENT);
  tardis_free(error);
  EXPECT_EQ(tardis_gio_host_start(nullptr, 1, &error), TARDIS_INVALID_ARGUMENT);
  tardis_free(error);
  EXPECT_EQ(tardis_gio_host_work_bytes(nullptr, 1), 0u);
}

}  // namespace
}  // namespace tardis::gio
