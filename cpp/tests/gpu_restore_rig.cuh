// SPDX-License-Identifier: Apache-2.0
// Everything that a restore on a GPU works between: a store and its mirror, a session over it with its queue pairs on
// the device, index and block table, pools in HBM, pinned objects.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gpu_gstore_blocks_support.cuh"
#include "gpu_restore_store.h"
#include "gstore/restore.h"
#include "tests/gpu_gio_support.cuh"

namespace tardis::gstore::testing {

struct RestoreRigOptions {
  std::string parent = "/dev/shm";
  ObjectShape shape;
  std::uint64_t objects = 1000;
  std::uint32_t hbm = 600, dram = 200, rows = 8000, max_pages = 200;
  std::uint32_t command_bytes = 32 << 10;
  std::uint32_t queues = 4, entries = 256, controller_threads = 4, ctas = 4;
  bool digests = true;
  bool raw = false;  // no store: a namespace in memory, that rings write
};

class RestoreRig {
 public:
  static constexpr std::uint64_t kDeadlineNs = 10'000'000'000;
  static constexpr std::uint32_t kBlockShift = 12;

  explicit RestoreRig(const RestoreRigOptions& o)
      : options(o),
        store(o.raw ? nullptr : RestoreStore::open(o.parent, o.shape, o.objects)),
        files(static_cast<std::uint32_t>(o.objects)),
        blocks(o.hbm, o.dram, files, o.rows),
        table(2 * o.objects + o.rows),
        page_blocks(mapped_array<std::uint64_t>(files)),
        digests(mapped_array<std::uint64_t>(std::size_t{files} * o.shape.digests())),
        pools(device_array<std::uint8_t>(o.shape.bytes() * o.hbm, 0xA5)),
        dram(mapped_array<std::uint8_t>(o.shape.bytes() * o.dram)),
        key_layers(mapped_array<std::uint64_t>(o.shape.layers)),
        value_layers(mapped_array<std::uint64_t>(o.shape.layers)),
        names(device_array<tardis_gpu_index_entry>(o.rows)) {
    std::memset(dram.get(), 0x5A, o.shape.bytes() * o.dram);
    gio::testing::GpuRigOptions session;
    if (o.raw) {
      session.bytes = o.shape.bytes() * files;
      for (std::uint32_t file = 0; file < files; ++file) page_blocks[file] = file * o.shape.bytes() >> kBlockShift;
    } else {
      store->start_mirror(files, kBlockShift, page_blocks.get(), o.digests ? digests.get() : nullptr);
      session.store = store->store();
    }
    session.block_shift = kBlockShift;
    session.controller_threads = o.controller_threads;
    session.queues = o.queues;
    session.entries = o.entries;
    session.slot_bytes = o.command_bytes;
    session.ctas = o.ctas;
    gpu = std::make_unique<gio::testing::GpuRig>(session);

    const std::uint64_t pool = std::uint64_t{o.hbm} * o.shape.page_bytes;
    for (std::uint32_t layer = 0; layer < o.shape.layers; ++layer) {
      key_layers[layer] = reinterpret_cast<std::uint64_t>(pools.get()) + layer * o.shape.sides * pool;
      value_layers[layer] = key_layers[layer] + pool;
    }
    restore.shape = {o.max_pages,
                     o.shape.layers,
                     o.shape.sides,
                     o.shape.page_bytes,
                     o.command_bytes,
                     kBlockShift,
                     o.digests ? o.shape.layer_digests() : 0,
                     0};
    const std::uint64_t bytes = tardis_gpu_restore_memory_bytes(&restore.shape);
    if (bytes == 0) {
      std::fprintf(stderr, "expected a shape of a restore that makes sense\n");
      std::_Exit(1);
    }
    memory = device_array<std::uint8_t>(bytes);
    restore.memory = memory.get();
    restore.places = {table.index,
                      blocks.table,
                      key_layers.get(),
                      o.shape.sides == 2 ? value_layers.get() : nullptr,
                      reinterpret_cast<std::uint64_t>(dram.get()),
                      o.shape.bytes(),
                      o.shape.layer_bytes(),
                      page_blocks.get(),
                      o.digests ? digests.get() : nullptr,
                      names.get(),
                      0,
                      0};
    check(tardis_gpu_restore_load(), "tardis_gpu_restore_load");
  }

  // Applies what changed in the store, in batches; `stream` has passed when this returns.
  MirrorBatch update(cudaStream_t stream) {
    MirrorBatch changes;
    store->scan(changes);
    each(changes.erases.size(),
         [&](std::size_t first, std::uint32_t n) { apply(changes.erases.data() + first, n, stream); });
    std::vector<std::uint8_t> statuses(changes.leaves.size());
    each(changes.leaves.size(), [&](std::size_t first, std::uint32_t n) {
      std::copy_n(changes.leaves.data() + first, n, batch.handles.get());
      batch.count[0] = n;
      check(tardis_gpu_blocks_free(&blocks.table, batch.handles.get(), batch.count.get(), kRoom, batch.statuses.get(),
                                   batch.ticket.get(), nullptr, stream),
            "tardis_gpu_blocks_free");
      check(cudaStreamSynchronize(stream), "free");
      std::copy_n(batch.statuses.get(), n, statuses.data() + first);
    });
    store->left(changes, statuses.data());
    statuses.assign(changes.attach_blocks.size(), 0);
    each(changes.attach_blocks.size(), [&](std::size_t first, std::uint32_t n) {
      std::copy_n(changes.attach_handles.data() + first, n, batch.handles.get());
      std::copy_n(changes.attach_blocks.data() + first, n, batch.files.get());
      batch.count[0] = n;
      check(tardis_gpu_blocks_attach(&blocks.table, batch.handles.get(), batch.files.get(), batch.count.get(), kRoom,
                                     batch.statuses.get(), batch.ticket.get(), nullptr, stream),
            "tardis_gpu_blocks_attach");
      check(cudaStreamSynchronize(stream), "attach");
      std::copy_n(batch.statuses.get(), n, statuses.data() + first);
      for (std::uint32_t i = 0; i < n; ++i) attached += batch.statuses[i] == 0;
    });
    store->attached(changes, statuses.data());
    std::vector<std::uint64_t> handles(changes.adopts.size());
    each(changes.adopts.size(), [&](std::size_t first, std::uint32_t n) {
      std::copy_n(changes.adopts.data() + first, n, batch.files.get());
      batch.count[0] = n;
      check(tardis_gpu_blocks_adopt(&blocks.table, batch.files.get(), batch.count.get(), kRoom, batch.handles.get(),
                                    batch.statuses.get(), batch.ticket.get(), nullptr, stream),
            "tardis_gpu_blocks_adopt");
      check(cudaStreamSynchronize(stream), "adopt");
      std::copy_n(batch.handles.get(), n, handles.data() + first);
    });
    store->adopted(changes, handles.data());
    each(changes.puts.size(),
         [&](std::size_t first, std::uint32_t n) { apply(changes.puts.data() + first, n, stream); });
    return changes;
  }

  void unref(const std::vector<std::uint64_t>& handles, cudaStream_t stream) {
    each(handles.size(), [&](std::size_t first, std::uint32_t n) {
      std::copy_n(handles.data() + first, n, batch.handles.get());
      batch.count[0] = n;
      check(tardis_gpu_blocks_use(&blocks.table, TARDIS_GPU_UNREF, batch.handles.get(), batch.count.get(), kRoom,
                                  nullptr, batch.statuses.get(), batch.ticket.get(), nullptr, stream),
            "tardis_gpu_blocks_use");
      check(cudaStreamSynchronize(stream), "unref");
      for (std::uint32_t i = 0; i < n; ++i) expect(batch.statuses[i] == 0, "a reference given back", batch.statuses[i]);
    });
  }

  void layers(cudaStream_t stream) { layers(stream, options.shape.layers); }
  void layers(cudaStream_t stream, std::uint32_t count) {
    for (std::uint32_t layer = 0; layer < count; ++layer) {
      check(tardis_gpu_restore_layer(&restore, layer, gpu->queues().data(), gpu->rings(), options.ctas, kDeadlineNs,
                                     stream),
            "tardis_gpu_restore_layer");
    }
  }

  std::uint64_t attached = 0;  // pages that were in memory when the store got them
  const RestoreRigOptions options;
  std::unique_ptr<RestoreStore> store;  // outlives the session
  const std::uint32_t files;
  Blocks blocks;
  Table table;
  MappedArray<std::uint64_t> page_blocks, digests;
  DeviceArray<std::uint8_t> pools;
  MappedArray<std::uint8_t> dram;
  MappedArray<std::uint64_t> key_layers, value_layers;
  DeviceArray<tardis_gpu_index_entry> names;
  DeviceArray<std::uint8_t> memory;
  Batch batch;
  MappedArray<tardis_gpu_index_entry> entries = mapped_array<tardis_gpu_index_entry>(kRoom);
  tardis_gpu_restore restore{};
  std::unique_ptr<gio::testing::GpuRig> gpu;

 private:
  template <class Step>
  void each(std::size_t count, Step step) {
    for (std::size_t first = 0; first < count; first += kRoom) {
      step(first, static_cast<std::uint32_t>(std::min<std::size_t>(kRoom, count - first)));
    }
  }
  void apply(const tardis_gpu_index_entry* changes, std::uint32_t n, cudaStream_t stream) {
    std::copy_n(changes, n, entries.get());
    batch.count[0] = n;
    check(tardis_gpu_index_apply(&table.index, entries.get(), batch.count.get(), kRoom, batch.statuses.get(),
                                 batch.ticket.get(), nullptr, 0, stream),
          "tardis_gpu_index_apply");
    check(cudaStreamSynchronize(stream), "apply");
    for (std::uint32_t i = 0; i < n; ++i) {
      expect(batch.statuses[i] != TARDIS_GPU_INDEX_FULL && batch.statuses[i] != TARDIS_GPU_INDEX_BUSY,
             "a change that is applied", batch.statuses[i]);
    }
  }
};

// What the pools hold of the pages of a restore: for each key, `numbers[i]` is the object.
struct PageWords {
  const tardis_gpu_restore_result* results;
  const std::uint32_t* count;
  const std::uint64_t* numbers;
  const std::uint64_t *key_layers, *value_layers;
  ObjectShape shape;
};

// A page of each block in turn; word(at, object, word of the object).
template <class Word>
__device__ void for_each_word(const PageWords& pages, std::uint32_t outcomes, Word word) {
  const std::uint64_t words = pages.shape.page_bytes / 8;
  for (std::uint32_t i = blockIdx.x; i < *pages.count; i += gridDim.x) {
    const tardis_gpu_restore_result result = pages.results[i];
    if ((outcomes >> result.outcome & 1) == 0) continue;
    for (std::uint32_t layer = 0; layer < pages.shape.layers; ++layer) {
      for (std::uint32_t side = 0; side < pages.shape.sides; ++side) {
        const std::uint64_t base = side == 0 ? pages.key_layers[layer] : pages.value_layers[layer];
        auto* const at = reinterpret_cast<unsigned long long*>(base + result.page * pages.shape.page_bytes);
        const std::uint64_t first = (std::uint64_t{layer} * pages.shape.sides + side) * words;
        for (std::uint64_t w = threadIdx.x; w < words; w += blockDim.x) word(at + w, i, pages.numbers[i], first + w);
      }
    }
  }
}

constexpr std::uint32_t kLandedOrNew = 1u << TARDIS_GPU_RESTORE_LANDED | 1u << TARDIS_GPU_RESTORE_NEW;

// Before anything is landed.
static __global__ void poison_pages(const PageWords pages) {
  for_each_word(pages, kLandedOrNew,
                [](unsigned long long* at, std::uint32_t, std::uint64_t, std::uint64_t) { *at = 0xA5A5A5A5A5A5A5A5u; });
}
// What a model would do.
static __global__ void compute_pages(const PageWords pages) {
  for_each_word(pages, 1u << TARDIS_GPU_RESTORE_NEW,
                [](unsigned long long* at, std::uint32_t, std::uint64_t number, std::uint64_t word) {
                  *at = object_word(number, word);
                });
}
// wrong[i]: words of key i's page that are not the object's.
static __global__ void compare_pages(const PageWords pages, std::uint32_t* wrong) {
  for_each_word(pages, kLandedOrNew | 1u << TARDIS_GPU_RESTORE_HIT,
                [&](unsigned long long* at, std::uint32_t i, std::uint64_t number, std::uint64_t word) {
                  if (__ldcg(at) != object_word(number, word)) atomicAdd(wrong + i, 1u);
                });
}

}  // namespace tardis::gstore::testing
