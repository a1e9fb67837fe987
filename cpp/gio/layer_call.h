// SPDX-License-Identifier: Apache-2.0
// From the struct of the C ABI to what prepare and the ring take, for both libraries. For host code (C++17).
#pragma once

#include <cstddef>
#include <cstdint>

#include "gio/granted_queue.h"
#include "gio/prepare.h"
#include "tardis/gio_layer.h"

namespace tardis::gio {

inline constexpr std::uint64_t kMostLayerDeadlineNs = 15'000'000'000;
static_assert(sizeof(tardis_gio_layer) == 208 && offsetof(tardis_gio_layer, pools) == 32 &&
              offsetof(tardis_gio_layer, first_block) == 88 && offsetof(tardis_gio_layer, contexts) == 128 &&
              offsetof(tardis_gio_layer, statuses) == 160 && offsetof(tardis_gio_layer, ctas) == 204);

// Null: the struct can be run; else what is expected of it.
inline const char* complaint_of(const tardis_gio_layer& layer) {
  for (const void* pointer : {static_cast<const void*>(layer.pool_pages), static_cast<const void*>(layer.slots),
                              static_cast<const void*>(layer.count), static_cast<const void*>(layer.contexts),
                              static_cast<const void*>(layer.context_count), static_cast<const void*>(layer.ended),
                              static_cast<const void*>(layer.statuses), static_cast<const void*>(layer.reports),
                              static_cast<const void*>(layer.flag), layer.queues}) {
    if (pointer == nullptr) return "expected ids, a count, working memory, room for the outcome and queues; found NULL";
  }
  if (layer.most_pages == 0 || layer.pool_page_count == 0 || layer.slot_count == 0) {
    return "expected most_pages, pool_page_count and slot_count above 0";
  }
  if (layer.op != TARDIS_GIO_WRITE && layer.op != TARDIS_GIO_READ) return "expected op 1 (write) or 2 (read)";
  if (layer.block_bytes != 512 && layer.block_bytes != 4096) return "expected blocks of 512 or 4096 bytes";
  if (layer.most_bytes == 0 || layer.most_bytes % layer.block_bytes != 0) return "expected most_bytes of whole blocks";
  const bool several = std::uint64_t{layer.page_bytes[0]} + layer.page_bytes[1] > layer.most_bytes;
  if (layer.digests % 8 != 0 || (layer.digests != 0 && several && layer.most_bytes % kDigestedBytes != 0)) {
    return "expected digests at a multiple of 8, and most_bytes of whole 16 KiB or K and V of a page";
  }
  if (layer.pools[0] == 0 || layer.page_bytes[0] == 0 || (layer.pools[1] == 0) != (layer.page_bytes[1] == 0)) {
    return "expected a pool of pages, and a second one with page_bytes[1] or neither";
  }
  if (layer.deadline_ns == 0 || layer.deadline_ns > kMostLayerDeadlineNs) return "expected a deadline of up to 15 s";
  if (layer.rings == 0 || layer.rings > kMostQueues) return "expected 1 to 16 queues";
  if (layer.digests != 0 && some_land_directly(static_cast<const GrantedQueue*>(layer.queues), layer.rings)) {
    return "expected queues that do not land directly, or no digests: they would not be compared or made";
  }
  return nullptr;
}

inline LayerPages pages_of(const tardis_gio_layer& layer) {
  LayerPages pages{};
  pages.memory_pages = layer.pool_pages;
  pages.file_pages = layer.slots;
  pages.count = layer.count;
  for (std::uint32_t i = 0; i < kPieces; ++i) {
    pages.pools[i] = layer.pools[i];
    pages.page_stride[i] = layer.page_stride[i];
    pages.page_bytes[i] = layer.page_bytes[i];
  }
  pages.first_block = layer.first_block;
  pages.blocks_per_page = layer.blocks_per_slot;
  pages.page_blocks = layer.slot_blocks;
  pages.digests = layer.digests;
  pages.digest_stride = layer.digest_stride;
  pages.block_shift = layer.block_bytes == 512 ? 9 : 12;
  pages.most_bytes = layer.most_bytes;
  pages.op = static_cast<IoOp>(layer.op);
  pages.memory_page_count = layer.pool_page_count;
  pages.file_page_count = layer.slot_count;
  pages.most_pages = layer.most_pages;
  return pages;
}

inline IoControlBlock control_block_of(const tardis_gio_layer& layer) {
  IoControlBlock iocb{};
  iocb.contexts = static_cast<const IoContext*>(layer.contexts);
  iocb.count = layer.context_count;
  iocb.statuses = layer.statuses;
  iocb.reports = static_cast<RingReport*>(layer.reports);
  iocb.ended = layer.ended;
  iocb.flag = layer.flag;
  iocb.deadline_ns = layer.deadline_ns;
  iocb.digested = layer.digests != 0 ? 1 : 0;
  return iocb;
}

inline tardis_gio_sizes layer_sizes() {
  constexpr std::uint32_t kStateBytes = 32;  // as tardis_gio_queues() lays them out
  static_assert(sizeof(RingState) <= kStateBytes);
  return {sizeof(tardis_gio_layer),
          offsetof(tardis_gio_layer, statuses),
          offsetof(tardis_gio_layer, ctas),
          sizeof(IoContext),
          sizeof(RingReport),
          sizeof(GrantedQueue),
          kStateBytes,
          kMostContexts,
          kMostQueues};
}

}  // namespace tardis::gio
