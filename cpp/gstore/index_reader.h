// SPDX-License-Identifier: Apache-2.0
// What one thread does with an entry's word that may lead to its key.
#pragma once

#include "gstore/index_layout.h"

namespace tardis::gstore {

enum class Found : std::uint32_t {
  kMiss = TARDIS_GPU_INDEX_MISS,
  kFound = TARDIS_GPU_INDEX_FOUND,
  kUnknown = TARDIS_GPU_INDEX_UNKNOWN,
};

TARDIS_GSTORE_FUNCTION tardis_gpu_index_answer miss() {
  return {kNowhere, 0, 0, 0, static_cast<std::uint32_t>(Found::kMiss)};
}

// Loads four words of a record that may be written meanwhile: in halves of 16 bytes on a device.
TARDIS_GSTORE_FUNCTION void load_half(const std::uint64_t* from, std::uint64_t* to) {
#if defined(__CUDA_ARCH__)
  const auto at = __cvta_generic_to_global(from);
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(to[0]), "=l"(to[1]) : "l"(at) : "memory");
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(to[2]), "=l"(to[3]) : "l"(at + 16) : "memory");
#else
  for (int i = 0; i < 4; ++i) to[i] = load(from + i);
#endif
}

// `seen`: the entry's word, read before now and followed by a fence. Whether this entry is the key's.
TARDIS_GSTORE_FUNCTION Found examine(const std::uint64_t* word, const std::uint64_t* record, std::uint64_t seen,
                                     std::uint32_t tag, const Key& key, std::uint32_t space,
                                     tardis_gpu_index_answer& answer,
                                     std::uint64_t patience = Deadline::kReaderPatience) {
  Deadline deadline;
  for (;;) {
    if (!leads_to(seen, tag)) return Found::kMiss;  // taken away
    if (state_of(seen) == EntryState::kLive) {
      std::uint64_t found[kRecordWords];
      load_half(record, found);
      load_half(record + 4, found + 4);
      bool same = space_of(found[kIdentity]) == space;
      for (int i = 0; i < 4; ++i) same = same && found[kKey + i] == key.word[i];
      // Another key's record, or one that is being written for another key: ours is not here, or was just taken away.
      if (!same) return Found::kMiss;
      acquire_fence();  // forbids that the second look at the word is done before the record is read
      const std::uint64_t again = load(word);
      if (again == seen) {
        answer.location = found[kLocation];
        answer.generation = found[kGeneration];
        answer.root = found[kRoot];
        answer.payload_bytes = static_cast<std::uint32_t>(found[kIdentity]);
        answer.status = static_cast<std::uint32_t>(Found::kFound);
        return Found::kFound;
      }
      seen = again;
    } else {
      relax();
      seen = load(word);
    }
    if (deadline.passed(patience)) return Found::kUnknown;
    acquire_fence();  // forbids that the record is read before the word that leads to it
  }
}

}  // namespace tardis::gstore
