// SPDX-License-Identifier: Apache-2.0
// The workspace of a restore, and the kernels of one (C++17). Each launcher has its own file.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "gio/iocb.h"
#include "gio/mover.h"
#include "gstore/restore.h"

namespace tardis::gstore {

enum RestoreTicket { kLookupTicket, kFileTicket, kDramTicket, kNewTicket, kEndTicket, kApplyTicket, kTickets };

// A list that a kernel fills and later ones read.
struct RestoreCounts {
  std::uint32_t sources[8];  // list_counts of classify
  std::uint32_t files, drams, news, undo, drop, moves, pieces, contexts, homes, lost, found, writes;
  std::uint32_t errors;
};

// Where the parts of a workspace lie: all in one piece of device memory.
struct RestoreWork {
  tardis_gpu_restore_counts* totals;
  RestoreCounts* counts;
  tardis_gpu_ticket* tickets;
  // [max_pages], by key
  tardis_gpu_index_answer* answers;
  std::uint64_t* ids;
  std::uint32_t* places;  // source << 24 | position in its list
  // of classify [source][max_pages]
  std::uint32_t* lists;
  std::uint64_t* taken;
  // of swap_begin and alloc, by position in a list
  std::uint64_t *file_from, *file_to, *dram_from, *dram_to, *new_handles, *new_ids;
  std::uint8_t *file_statuses, *dram_statuses, *new_statuses, *file_good, *dram_good;
  // in the order of the keys, and only what is really moved: page, and where from or for whom
  std::uint32_t *file_pages, *file_blocks, *file_keys;
  std::uint32_t *dram_pages, *dram_keys;
  std::uint64_t* dram_objects;
  std::uint32_t *new_pages, *new_keys;
  std::uint64_t* file_firsts;  // first block on the drive
  std::uint64_t* pools;        // [side][layer]; copies, since every thread that makes commands wants them
  std::uint64_t* digests;      // [file][layer][digest]
  std::uint64_t *undo, *drop;
  tardis_gpu_index_entry* entries;
  // of movers and rings
  tardis_gpu_piece* pieces;                 // [layer][sides * max_pages]
  gio::IoContext* contexts;                 // [layer][kMostContexts]
  std::uint32_t *statuses, *ended, *flags;  // [layer][kMostContexts], [layer], [layer]
  gio::RingReport* reports;                 // [layer][kMostQueues]
  // of writes: by position in their list, and as above
  std::uint32_t *write_pages, *write_blocks;
  std::uint64_t *write_firsts, *write_handles, *write_digests;
  std::uint32_t *write_statuses, *write_ended, *write_flags;
  gio::RingReport* write_reports;

  std::uint64_t bytes;

  static RestoreWork of(const tardis_gpu_restore_shape& shape, void* memory) {
    RestoreWork work{};
    Cursor at{reinterpret_cast<std::uintptr_t>(memory), 0};
    const std::uint64_t n = shape.max_pages, layers = shape.layers;
    at.take(work.totals, 1);
    at.take(work.counts, 1);
    at.take(work.tickets, kTickets);
    at.take(work.answers, n);
    at.take(work.ids, n);
    at.take(work.places, n);
    at.take(work.lists, n * TARDIS_GPU_SOURCES);
    at.take(work.taken, n * TARDIS_GPU_SOURCES);
    for (auto** array : {&work.file_from, &work.file_to, &work.dram_from, &work.dram_to, &work.new_handles,
                         &work.new_ids, &work.dram_objects, &work.undo, &work.drop}) {
      at.take(*array, n);
    }
    for (auto** array :
         {&work.file_statuses, &work.dram_statuses, &work.new_statuses, &work.file_good, &work.dram_good}) {
      at.take(*array, n);
    }
    for (auto** array : {&work.file_pages, &work.file_blocks, &work.file_keys, &work.dram_pages, &work.dram_keys,
                         &work.new_pages, &work.new_keys}) {
      at.take(*array, n);
    }
    at.take(work.file_firsts, n);
    at.take(work.pools, layers * 2);
    at.take(work.digests, n * layers * shape.layer_digests);
    at.take(work.entries, n);
    at.take(work.pieces, layers * shape.sides * n);
    at.take(work.contexts, layers * gio::kMostContexts);
    at.take(work.statuses, layers * gio::kMostContexts);
    at.take(work.ended, layers);
    at.take(work.flags, layers);
    at.take(work.reports, layers * gio::kMostQueues);
    at.take(work.write_pages, n);
    at.take(work.write_blocks, n);
    at.take(work.write_firsts, n);
    at.take(work.write_handles, n);
    at.take(work.write_digests, n * layers * shape.layer_digests);
    at.take(work.write_statuses, layers * gio::kMostContexts);
    at.take(work.write_ended, layers);
    at.take(work.write_flags, layers);
    at.take(work.write_reports, layers * gio::kMostQueues);
    work.bytes = at.used;
    return work;
  }

 private:
  struct Cursor {
    std::uintptr_t base;
    std::uint64_t used;
    template <class T>
    void take(T*& array, std::uint64_t count) {
      array = reinterpret_cast<T*>(base + used);
      used += (count * sizeof(T) + 255) / 256 * 256;
    }
  };
};

inline std::uint32_t commands_per_page(const tardis_gpu_restore_shape& shape) {
  const std::uint64_t bytes = std::uint64_t{shape.sides} * shape.page_bytes;
  return static_cast<std::uint32_t>((bytes + shape.command_bytes - 1) / shape.command_bytes);
}

// What was found and taken, in the order of the keys.
int launch_restore_plan(const tardis_gpu_restore& restore, const RestoreWork& work, const std::uint32_t* count,
                        tardis_gpu_restore_result* results, cudaStream_t stream);
// The digests that pages from files must have.
int launch_restore_digests(const tardis_gpu_restore& restore, const RestoreWork& work, cudaStream_t stream);
// What rings and movers have to do for every layer.
int launch_restore_commands(const tardis_gpu_restore& restore, const RestoreWork& work, gio::IoOp op,
                            cudaStream_t stream);
// What became of pages from files, and of every key.
int launch_restore_judge(const tardis_gpu_restore& restore, const RestoreWork& work, const void* keys,
                         const std::uint32_t* count, tardis_gpu_restore_result* results, cudaStream_t stream);
// Entries of the new pages, for the index.
int launch_restore_insert(const tardis_gpu_restore& restore, const RestoreWork& work, const void* keys,
                          cudaStream_t stream);
// Moves that have begun between HBM and pinned memory, as pages and objects.
int launch_restore_moves(const tardis_gpu_restore& restore, const RestoreWork& work, const std::uint32_t* count,
                         cudaStream_t stream);
// Candidates apart: which have a file block, and which would be lost.
int launch_restore_leave(const tardis_gpu_restore& restore, const RestoreWork& work, cudaStream_t stream);
// File blocks for the new pages, and what became of their writes.
int launch_restore_homes(const tardis_gpu_restore& restore, const RestoreWork& work, cudaStream_t stream);
int launch_restore_written(const tardis_gpu_restore& restore, const RestoreWork& work, cudaStream_t stream);
// Loads the kernel.
int load_restore_plan();
int load_restore_digests();
int load_restore_commands();
int load_restore_judge();
int load_restore_insert();
int load_restore_moves();
int load_restore_leave();
int load_restore_homes();
int load_restore_written();

}  // namespace tardis::gstore
