// SPDX-License-Identifier: Apache-2.0
// The C ABI of the index in host memory.
#include "tardis/host_index.h"

#include <algorithm>
#include <string>

#include "capi/guarded.h"
#include "gstore/host_index.h"

namespace {

using namespace tardis;
using capi::guarded;

bool is_placed(const tardis_gpu_index* index) {
  return index != nullptr && index->words != nullptr && index->records != nullptr && index->buckets >= 2;
}

Status refuse(const char* call, const char* why) {
  return Error{Code::kInvalidArgument, std::string(call) + ": " + why};
}

}  // namespace

uint64_t tardis_index_memory_bytes(uint64_t entries) { return gstore::buckets_for(entries) * gstore::kBucketBytes; }

tardis_code tardis_index_place(tardis_gpu_index* index, void* memory, uint64_t bytes, char** error) {
  return guarded(error, [&]() -> Status {
    const std::uint64_t buckets = bytes / gstore::kBucketBytes;
    if (index == nullptr || memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % 256 != 0 || buckets < 2 ||
        buckets > 0xFFFFFFFFu) {
      return refuse("tardis_index_place",
                    "expected a place for the index and memory of tardis_index_memory_bytes() at "
                    "a multiple of 256");
    }
    index->words = static_cast<std::uint64_t*>(memory);
    index->records = index->words + buckets * gstore::kLanes;
    index->buckets = static_cast<std::uint32_t>(buckets);
    index->patience = 0;
    return {};
  });
}

tardis_code tardis_index_lookup(const tardis_gpu_index* index, const void* keys, const uint32_t* count,
                                uint32_t max_count, uint16_t space, tardis_gpu_index_answer* answers, char** error) {
  return guarded(error, [&]() -> Status {
    if (!is_placed(index) || keys == nullptr || count == nullptr || answers == nullptr) {
      return refuse("tardis_index_lookup", "expected an index, keys, a count and room for answers");
    }
    const auto* const key = static_cast<const gstore::Key*>(keys);
    const std::uint32_t asked = std::min(*count, max_count);
    for (std::uint32_t i = 0; i < asked; ++i) answers[i] = gstore::find_on_host(*index, key[i], space);
    return {};
  });
}

tardis_code tardis_index_apply(const tardis_gpu_index* index, const tardis_gpu_index_entry* changes, uint32_t count,
                               uint8_t* statuses, char** error) {
  return guarded(error, [&]() -> Status {
    if (!is_placed(index) || (changes == nullptr && count != 0)) {
      return refuse("tardis_index_apply", "expected an index and changes");
    }
    gstore::HostWarp warp;
    for (std::uint32_t i = 0; i < count; ++i) {
      const gstore::Status status = gstore::IndexWriter<gstore::HostWarp>(warp, *index).apply(changes + i);
      if (statuses != nullptr) statuses[i] = static_cast<std::uint8_t>(status);
    }
    return {};
  });
}
