// SPDX-License-Identifier: Apache-2.0
// The order in which a restore's kernels are enqueued.
#include "gstore/restore.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "gio/ring_kernel.h"
#include "gio/sequence.h"
#include "gstore/restore_work.h"

namespace tardis::gstore {
namespace {

using gio::Sequence;

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
  // One layer of pages to their objects in pinned memory.
  int take_out(std::uint32_t layer, const std::uint32_t* pages, const std::uint32_t* count,
               const std::uint64_t* objects, std::uint64_t base, std::uint64_t stride, std::uint32_t ctas) const {
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
    args.direction = TARDIS_GPU_FROM_POOL;
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
  gio::IoControlBlock iocb(std::uint32_t layer, gio::IoOp op, std::uint64_t deadline_ns) const {
    const bool reads = op == gio::IoOp::kRead;
    gio::IoControlBlock iocb{};
    iocb.contexts = work.contexts + std::uint64_t{layer} * gio::kMostContexts;
    iocb.count = &work.counts->contexts;
    iocb.statuses = (reads ? work.statuses : work.write_statuses) + std::uint64_t{layer} * gio::kMostContexts;
    iocb.reports = (reads ? work.reports : work.write_reports) + std::uint64_t{layer} * gio::kMostQueues;
    iocb.ended = (reads ? work.ended : work.write_ended) + layer;
    iocb.flag = (reads ? work.flags : work.write_flags) + layer;
    iocb.deadline_ns = deadline_ns;
    iocb.digested = restore.shape.layer_digests != 0;
    return iocb;
  }
  // The rings that carry out a layer's commands.
  int run(std::uint32_t layer, gio::IoOp op, const void* queues, std::uint32_t rings, std::uint32_t ctas,
          std::uint64_t deadline_ns) const {
    const gio::IoControlBlock block = iocb(layer, op, deadline_ns);
    return tardis_gpu_gio_run(static_cast<const gio::GrantedQueue*>(queues), rings, &block, ctas, stream);
  }
  // A layer's pages from pinned memory.
  int land(std::uint32_t layer, std::uint32_t ctas) const {
    const std::uint32_t pieces = most * restore.shape.sides;
    const tardis_gpu_move_args moved{work.pieces + std::uint64_t{layer} * pieces, &work.counts->pieces, pieces, ctas};
    return tardis_gpu_move(&moved, stream);
  }
  // No ring has ended, and no command has the status of an earlier one.
  int clear(std::uint32_t* flags, std::uint32_t* statuses) const {
    const std::uint64_t layers = restore.shape.layers;
    return Sequence()
        .then([&] { return cudaMemsetAsync(flags, 0, layers * sizeof *flags, stream); })
        .then([&] { return cudaMemsetAsync(statuses, 0, layers * gio::kMostContexts * sizeof *statuses, stream); })
        .error();
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

// The queue pairs can carry a layer's commands. Not directly: nobody would compare what lands, and what is late could
// land in a page that has been given to somebody else.
bool fits(const tardis_gpu_restore& restore, std::uint32_t layer, const void* queues, std::uint32_t rings) {
  if (layer >= restore.shape.layers || queues == nullptr || rings == 0 || rings > gio::kMostQueues) return false;
  const auto* const granted = static_cast<const gio::GrantedQueue*>(queues);
  return std::all_of(granted, granted + rings, [&](const gio::GrantedQueue& queue) {
    return queue.direct.count == 0 && queue.block_shift == restore.shape.block_shift &&
           queue.slot_bytes >= restore.shape.command_bytes && queue.most_bytes >= restore.shape.command_bytes;
  });
}

}  // namespace
}  // namespace tardis::gstore

using tardis::gio::Sequence;
using tardis::gstore::Restore;
using tardis::gstore::RestoreWork;
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
      .then(load_restore_plan)
      .then(load_restore_digests)
      .then(load_restore_commands)
      .then(load_restore_judge)
      .then(load_restore_insert)
      .then(load_restore_moves)
      .then(load_restore_leave)
      .then(load_restore_homes)
      .then(load_restore_written)
      .error();
}

int tardis_gpu_restore_begin(const tardis_gpu_restore* restore, const void* keys, const uint32_t* count,
                             tardis_gpu_restore_result* results, void* cuda_stream) {
  using namespace tardis::gstore;
  if (!usable(restore) || keys == nullptr || count == nullptr || results == nullptr) return cudaErrorInvalidValue;
  const Restore r(*restore, cuda_stream);
  const RestoreWork& w = r.work;
  std::uint32_t* const counts = w.counts->sources;
  return Sequence()
      .then([&] { return r.clear(w.flags, w.statuses); })
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
      .then([&] { return launch_restore_commands(*restore, w, tardis::gio::IoOp::kRead, r.stream); })
      .error();
}

int tardis_gpu_restore_layer(const tardis_gpu_restore* restore, uint32_t layer, const void* queues, uint32_t rings,
                             uint32_t mover_ctas, uint64_t deadline_ns, void* cuda_stream) {
  if (!usable(restore) || !tardis::gstore::fits(*restore, layer, queues, rings)) return cudaErrorInvalidValue;
  const Restore r(*restore, cuda_stream);
  return Sequence()
      .then([&] { return r.land(layer, mover_ctas); })
      .then([&] { return r.run(layer, tardis::gio::IoOp::kRead, queues, rings, mover_ctas, deadline_ns); })
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
        return tardis_gpu_blocks_swap_end(&r.blocks, r.list_of(w.taken, TARDIS_GPU_SOURCE_DRAM), w.dram_to, w.dram_good,
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
  return r.take_out(layer, r.work.new_pages, &r.work.counts->news, nullptr, staging, stride, mover_ctas);
}

int tardis_gpu_restore_write_begin(const tardis_gpu_restore* restore, void* cuda_stream) {
  if (!usable(restore)) return cudaErrorInvalidValue;
  const Restore r(*restore, cuda_stream);
  return Sequence()
      .then([&] { return r.clear(r.work.write_flags, r.work.write_statuses); })
      .then([&] { return tardis::gstore::launch_restore_homes(*restore, r.work, r.stream); })
      .then([&] {
        return tardis::gstore::launch_restore_commands(*restore, r.work, tardis::gio::IoOp::kWrite, r.stream);
      })
      .error();
}

int tardis_gpu_restore_write_layer(const tardis_gpu_restore* restore, uint32_t layer, const void* queues,
                                   uint32_t rings, uint32_t mover_ctas, uint64_t deadline_ns, void* cuda_stream) {
  if (!usable(restore) || !tardis::gstore::fits(*restore, layer, queues, rings)) return cudaErrorInvalidValue;
  return Restore(*restore, cuda_stream).run(layer, tardis::gio::IoOp::kWrite, queues, rings, mover_ctas, deadline_ns);
}

int tardis_gpu_restore_write_end(const tardis_gpu_restore* restore, void* cuda_stream) {
  if (!usable(restore)) return cudaErrorInvalidValue;
  const Restore r(*restore, cuda_stream);
  return tardis::gstore::launch_restore_written(*restore, r.work, r.stream);
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
    sequence.then([&] { return r.take_out(layer, w.dram_pages, &w.counts->moves, w.dram_objects, 0, 0, mover_ctas); });
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
