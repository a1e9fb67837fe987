// SPDX-License-Identifier: Apache-2.0
// The order in which a restore's kernels are enqueued.
#include "gstore/restore.h"

#include <cuda_runtime.h>

#include "gio/prepare_kernel.h"
#include "gio/ring_kernel.h"
#include "gstore/restore_work.h"

namespace tardis::gstore {
namespace {

bool sane(const tardis_gpu_restore_shape& s) {
  if (s.max_pages == 0 || s.layers == 0 || s.sides == 0 || s.sides > gio::kPieces || s.page_bytes == 0 ||
      s.page_bytes % 16 != 0 || s.command_bytes == 0 || s.block_shift < 9 || s.block_shift > 12) {
    return false;
  }
  const std::uint64_t layer = std::uint64_t{s.sides} * s.page_bytes, block = std::uint64_t{1} << s.block_shift;
  const std::uint64_t digests = (layer + gio::kDigestedBytes - 1) / gio::kDigestedBytes;
  if (layer % block != 0 || s.command_bytes % block != 0 || (s.layer_digests != 0 && s.layer_digests != digests)) {
    return false;
  }
  if (s.layer_digests != 0 && s.command_bytes < layer && s.command_bytes % gio::kDigestedBytes != 0) return false;
  return std::uint64_t{s.max_pages} * commands_per_page(s) <= gio::kMostContexts;
}

// The first error of a sequence; what follows it is not tried.
class Sequence {
 public:
  template <class Call>
  Sequence& then(Call call) {
    if (error_ == cudaSuccess) error_ = call();
    return *this;
  }
  int error() const { return error_; }

 private:
  int error_ = cudaSuccess;
};

struct Restore {
  explicit Restore(const tardis_gpu_restore& given, void* cuda_stream)
      : restore(given),
        work(RestoreWork::of(given.shape, given.memory)),
        stream(static_cast<cudaStream_t>(cuda_stream)) {}

  const tardis_gpu_restore& restore;
  const RestoreWork work;
  const cudaStream_t stream;
  const std::uint32_t most = restore.shape.max_pages;
  const tardis_gpu_blocks& blocks = restore.places.blocks;

  template <class T>
  T* list_of(T* lists, std::uint32_t source) const {
    return lists + std::uint64_t{source} * most;
  }
  // Pieces of one layer between pages of the pools and objects, and their move.
  int move(std::uint32_t layer, const std::uint32_t* pages, const std::uint32_t* count, const std::uint64_t* objects,
           std::uint64_t base, std::uint64_t stride, tardis_gpu_direction direction, std::uint32_t ctas) const {
    tardis_gpu_page_args args{};
    args.page_ids = pages;
    args.page_count = count;
    args.max_pages = most;
    args.id_bytes = sizeof *pages;
    args.tokens_per_id = 1;  // a page as one token
    args.page_tokens = 1;
    args.pool_tokens = blocks.pool[TARDIS_GPU_HBM].size;
    args.token_bytes = restore.shape.page_bytes;
    args.key_layers = restore.places.key_layers;
    args.value_layers = restore.places.value_layers;
    args.layer = layer;
    args.direction = direction;
    args.objects = objects;
    args.object_base = base;
    args.object_stride = stride;
    args.part_offset = layer * restore.places.layer_stride;
    args.pieces = work.pieces;
    args.piece_count = &work.counts->pieces;
    args.errors = &work.counts->errors;
    const tardis_gpu_move_args moved{work.pieces, &work.counts->pieces, most * restore.shape.sides, ctas};
    return Sequence()
        .then([&] { return tardis_gpu_page_pieces(&args, stream); })
        .then([&] { return tardis_gpu_move(&moved, stream); })
        .error();
  }
  gio::LayerPages layer_pages(std::uint32_t layer) const {
    gio::LayerPages pages{};
    pages.memory_pages = work.file_pages;
    pages.file_pages = work.file_blocks;
    pages.count = &work.counts->files;
    const std::uint64_t* const pools[] = {restore.places.key_layers, restore.places.value_layers};
    for (std::uint32_t side = 0; side < restore.shape.sides; ++side) {
      pages.pools[side] = pools[side][layer];
      pages.page_stride[side] = restore.shape.page_bytes;
      pages.page_bytes[side] = restore.shape.page_bytes;
    }
    pages.first_block = layer * restore.places.layer_stride >> restore.shape.block_shift;
    pages.page_blocks = restore.places.page_blocks;
    const std::uint64_t each = sizeof(std::uint64_t) * restore.shape.layer_digests;
    if (each != 0) pages.digests = reinterpret_cast<std::uint64_t>(work.digests) + layer * each;
    pages.digest_stride = restore.shape.layers * each;
    pages.block_shift = restore.shape.block_shift;
    pages.most_bytes = restore.shape.command_bytes;
    pages.op = gio::IoOp::kRead;
    return pages;
  }
  gio::IoControlBlock iocb(std::uint32_t layer, std::uint64_t deadline_ns) const {
    return {work.contexts,
            &work.counts->contexts,
            work.statuses + std::uint64_t{layer} * gio::kMostContexts,
            work.reports + std::uint64_t{layer} * gio::kMostQueues,
            work.ended + layer,
            work.flags + layer,
            deadline_ns,
            nullptr,
            restore.shape.layer_digests != 0};
  }
};

bool usable(const tardis_gpu_restore* restore) {
  if (restore == nullptr || !sane(restore->shape) || restore->memory == nullptr) return false;
  const tardis_gpu_restore_places& places = restore->places;
  return places.key_layers != nullptr && (places.value_layers != nullptr) == (restore->shape.sides == 2) &&
         places.page_blocks != nullptr && (places.digests != nullptr) == (restore->shape.layer_digests != 0) &&
         places.names != nullptr && places.layer_stride % (std::uint64_t{1} << restore->shape.block_shift) == 0 &&
         places.space <= 0xFFFF;
}

}  // namespace
}  // namespace tardis::gstore

using tardis::gstore::Restore;
using tardis::gstore::RestoreWork;
using tardis::gstore::Sequence;
using tardis::gstore::usable;

uint64_t tardis_gpu_restore_memory_bytes(const tardis_gpu_restore_shape* shape) {
  if (shape == nullptr || !tardis::gstore::sane(*shape)) return 0;
  return RestoreWork::of(*shape, nullptr).bytes;
}

tardis_gpu_restore_counts* tardis_gpu_restore_counts_of(const tardis_gpu_restore* restore) {
  return usable(restore) ? RestoreWork::of(restore->shape, restore->memory).totals : nullptr;
}

uint32_t* tardis_gpu_restore_flag(const tardis_gpu_restore* restore, uint32_t layer) {
  if (!usable(restore) || layer >= restore->shape.layers) return nullptr;
  return RestoreWork::of(restore->shape, restore->memory).flags + layer;
}

void* tardis_gpu_restore_reports(const tardis_gpu_restore* restore, uint32_t layer) {
  if (!usable(restore) || layer >= restore->shape.layers) return nullptr;
  return RestoreWork::of(restore->shape, restore->memory).reports + std::uint64_t{layer} * tardis::gio::kMostQueues;
}

int tardis_gpu_restore_load(void) {
  using namespace tardis::gstore;
  return Sequence()
      .then(tardis_gpu_mover_prepare)
      .then(tardis_gpu_gio_load)
      .then(tardis_gpu_gio_prepare_load)
      .then(load_restore_plan)
      .then(load_restore_digests)
      .then(load_restore_judge)
      .then(load_restore_insert)
      .then(load_restore_moves)
      .then(load_restore_leave)
      .error();
}

int tardis_gpu_restore_begin(const tardis_gpu_restore* restore, const void* keys, const uint32_t* count,
                             tardis_gpu_restore_result* results, void* cuda_stream) {
  using namespace tardis::gstore;
  if (!usable(restore) || keys == nullptr || count == nullptr || results == nullptr) return cudaErrorInvalidValue;
  const Restore r(*restore, cuda_stream);
  const RestoreWork& w = r.work;
  const std::uint64_t layers = restore->shape.layers;
  std::uint32_t* const counts = w.counts->sources;
  return Sequence()
      .then([&] { return cudaMemsetAsync(w.flags, 0, layers * sizeof *w.flags, r.stream); })
      // A ring may end before it has taken every command: those must not have the status of an earlier restore.
      .then([&] {
        return cudaMemsetAsync(w.statuses, 0, layers * tardis::gio::kMostContexts * sizeof *w.statuses, r.stream);
      })
      .then([&] {
        return tardis_gpu_index_lookup(&restore->places.index, keys, count, r.most,
                                       static_cast<std::uint16_t>(restore->places.space), w.answers,
                                       w.tickets + kLookupTicket, nullptr, 0, r.stream);
      })
      .then([&] {
        return tardis_gpu_blocks_classify(&r.blocks, w.answers, count, r.most, w.ids, w.lists, w.taken, counts,
                                          w.totals->sources, r.stream);
      })
      .then([&] {
        return tardis_gpu_blocks_swap_begin(&r.blocks, TARDIS_GPU_HBM, 1, r.list_of(w.taken, TARDIS_GPU_SOURCE_DRAM),
                                            counts + TARDIS_GPU_SOURCE_DRAM, r.most, w.dram_from, w.dram_to,
                                            w.dram_statuses, w.tickets + kDramTicket, nullptr, r.stream);
      })
      .then([&] {
        return tardis_gpu_blocks_swap_begin(&r.blocks, TARDIS_GPU_HBM, 1, r.list_of(w.taken, TARDIS_GPU_SOURCE_FILE),
                                            counts + TARDIS_GPU_SOURCE_FILE, r.most, w.file_from, w.file_to,
                                            w.file_statuses, w.tickets + kFileTicket, nullptr, r.stream);
      })
      .then([&] {
        return tardis_gpu_blocks_alloc(&r.blocks, TARDIS_GPU_HBM, counts + TARDIS_GPU_SOURCE_MISS, r.most,
                                       w.new_handles, w.new_ids, w.new_statuses, w.tickets + kNewTicket, nullptr,
                                       r.stream);
      })
      .then([&] { return launch_restore_plan(*restore, w, count, results, r.stream); })
      .then([&] {
        return restore->shape.layer_digests == 0 ? cudaSuccess : launch_restore_digests(*restore, w, r.stream);
      })
      .error();
}

int tardis_gpu_restore_layer(const tardis_gpu_restore* restore, uint32_t layer, const void* queues, uint32_t rings,
                             uint32_t mover_ctas, uint64_t deadline_ns, void* cuda_stream) {
  if (!usable(restore) || layer >= restore->shape.layers || queues == nullptr) return cudaErrorInvalidValue;
  const auto* const granted = static_cast<const tardis::gio::GrantedQueue*>(queues);
  if (rings == 0 || granted->block_shift != restore->shape.block_shift ||
      granted->slot_bytes < restore->shape.command_bytes || granted->most_bytes < restore->shape.command_bytes) {
    return cudaErrorInvalidValue;
  }
  const Restore r(*restore, cuda_stream);
  const tardis::gio::LayerPages pages = r.layer_pages(layer);
  const tardis::gio::IoControlBlock iocb = r.iocb(layer, deadline_ns);
  return Sequence()
      .then([&] {
        return r.move(layer, r.work.dram_pages, &r.work.counts->drams, r.work.dram_objects, 0, 0, TARDIS_GPU_TO_POOL,
                      mover_ctas);
      })
      .then([&] { return tardis_gpu_gio_prepare(&pages, r.work.contexts, &r.work.counts->contexts, r.stream); })
      .then([&] { return tardis_gpu_gio_run(granted, rings, &iocb, mover_ctas, r.stream); })
      .error();
}

int tardis_gpu_restore_end(const tardis_gpu_restore* restore, const void* keys, const uint32_t* count,
                           tardis_gpu_restore_result* results, void* cuda_stream) {
  using namespace tardis::gstore;
  if (!usable(restore) || keys == nullptr || count == nullptr || results == nullptr) return cudaErrorInvalidValue;
  const Restore r(*restore, cuda_stream);
  const RestoreWork& w = r.work;
  std::uint32_t* const counts = w.counts->sources;
  tardis_gpu_ticket* const ticket = w.tickets + kEndTicket;
  return Sequence()
      .then([&] { return launch_restore_judge(*restore, w, keys, count, results, r.stream); })
      .then([&] {
        return tardis_gpu_blocks_swap_end(&r.blocks, r.list_of(w.taken, TARDIS_GPU_SOURCE_DRAM), w.dram_to, nullptr,
                                          counts + TARDIS_GPU_SOURCE_DRAM, r.most, nullptr, ticket, nullptr, r.stream);
      })
      .then([&] {
        return tardis_gpu_blocks_swap_end(&r.blocks, r.list_of(w.taken, TARDIS_GPU_SOURCE_FILE), w.file_to, w.file_good,
                                          counts + TARDIS_GPU_SOURCE_FILE, r.most, nullptr, ticket, nullptr, r.stream);
      })
      .then([&] {
        return tardis_gpu_index_apply(&restore->places.index, w.entries, &w.counts->drop, r.most, nullptr,
                                      w.tickets + kApplyTicket, nullptr, 0, r.stream);
      })
      .then([&] {
        return tardis_gpu_blocks_use(&r.blocks, TARDIS_GPU_UNREF, w.undo, &w.counts->undo, r.most, nullptr, nullptr,
                                     ticket, nullptr, r.stream);
      })
      .then([&] {
        return tardis_gpu_blocks_free(&r.blocks, w.drop, &w.counts->drop, r.most, nullptr, ticket, nullptr, r.stream);
      })
      .error();
}

int tardis_gpu_restore_commit(const tardis_gpu_restore* restore, const void* keys, void* cuda_stream) {
  using namespace tardis::gstore;
  if (!usable(restore) || keys == nullptr) return cudaErrorInvalidValue;
  const Restore r(*restore, cuda_stream);
  return Sequence()
      .then([&] { return launch_restore_insert(*restore, r.work, keys, r.stream); })
      .then([&] {
        return tardis_gpu_index_apply(&restore->places.index, r.work.entries, &r.work.counts->news, r.most, nullptr,
                                      r.work.tickets + kApplyTicket, nullptr, 0, r.stream);
      })
      .error();
}

int tardis_gpu_restore_copy_new(const tardis_gpu_restore* restore, uint32_t layer, uint64_t staging, uint64_t stride,
                                uint32_t mover_ctas, void* cuda_stream) {
  if (!usable(restore) || layer >= restore->shape.layers || staging == 0) return cudaErrorInvalidValue;
  const Restore r(*restore, cuda_stream);
  return r.move(layer, r.work.new_pages, &r.work.counts->news, nullptr, staging, stride, TARDIS_GPU_FROM_POOL,
                mover_ctas);
}

int tardis_gpu_restore_to_dram(const tardis_gpu_restore* restore, const uint32_t* want, uint32_t bonus, void* scratch,
                               uint32_t mover_ctas, void* cuda_stream) {
  using namespace tardis::gstore;
  if (!usable(restore) || want == nullptr || scratch == nullptr) return cudaErrorInvalidValue;
  const Restore r(*restore, cuda_stream);
  const RestoreWork& w = r.work;
  Sequence sequence;
  sequence
      .then([&] {
        return tardis_gpu_blocks_candidates(&r.blocks, TARDIS_GPU_HBM, bonus, want, r.most, w.taken, &w.counts->found,
                                            scratch, r.stream);
      })
      .then([&] {
        return tardis_gpu_blocks_swap_begin(&r.blocks, TARDIS_GPU_DRAM, 0, w.taken, &w.counts->found, r.most,
                                            w.dram_from, w.dram_to, nullptr, w.tickets + kDramTicket, nullptr,
                                            r.stream);
      })
      .then([&] { return launch_restore_moves(*restore, w, &w.counts->found, r.stream); });
  for (std::uint32_t layer = 0; layer < restore->shape.layers; ++layer) {
    sequence.then([&] {
      return r.move(layer, w.dram_pages, &w.counts->moves, w.dram_objects, 0, 0, TARDIS_GPU_FROM_POOL, mover_ctas);
    });
  }
  return sequence
      .then([&] {
        return tardis_gpu_blocks_swap_end(&r.blocks, w.taken, w.dram_to, nullptr, &w.counts->found, r.most, nullptr,
                                          w.tickets + kEndTicket, nullptr, r.stream);
      })
      .error();
}

int tardis_gpu_restore_to_files(const tardis_gpu_restore* restore, uint32_t tier, const uint32_t* want, uint32_t bonus,
                                void* scratch, void* cuda_stream) {
  using namespace tardis::gstore;
  if (!usable(restore) || tier >= TARDIS_GPU_FILE || want == nullptr || scratch == nullptr) {
    return cudaErrorInvalidValue;
  }
  const Restore r(*restore, cuda_stream);
  const RestoreWork& w = r.work;
  return Sequence()
      .then([&] {
        return tardis_gpu_blocks_candidates(&r.blocks, tier, bonus, want, r.most, w.taken, &w.counts->found, scratch,
                                            r.stream);
      })
      .then([&] { return launch_restore_leave(*restore, w, r.stream); })
      .then([&] {
        return tardis_gpu_blocks_swap_begin(&r.blocks, TARDIS_GPU_FILE, 0, w.undo, &w.counts->homes, r.most,
                                            w.file_from, w.file_to, nullptr, w.tickets + kFileTicket, nullptr,
                                            r.stream);
      })
      .then([&] {
        return tardis_gpu_blocks_swap_end(&r.blocks, w.undo, w.file_to, nullptr, &w.counts->homes, r.most, nullptr,
                                          w.tickets + kEndTicket, nullptr, r.stream);
      })
      .then([&] {
        return tardis_gpu_blocks_free(&r.blocks, w.drop, &w.counts->lost, r.most, nullptr, w.tickets + kEndTicket,
                                      nullptr, r.stream);
      })
      .then([&] {
        return tardis_gpu_index_apply(&restore->places.index, w.entries, &w.counts->lost, r.most, nullptr,
                                      w.tickets + kApplyTicket, nullptr, 0, r.stream);
      })
      .error();
}
