// SPDX-License-Identifier: Apache-2.0
// Everything that loads and offloads work between: a store and a session over it with its queue pairs on the device,
// pools in HBM, objects in pinned memory, a board, events, and the loader.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "gio/layer_call.h"
#include "gio/load_launch.h"
#include "gpu_gstore_blocks_support.cuh"
#include "gpu_restore_store.h"
#include "tests/gpu_gio_support.cuh"

namespace tardis::gstore::testing {

constexpr std::uint64_t kNobody = ~std::uint64_t{0};        // a page that holds poison
constexpr std::uint64_t kOrZeros = std::uint64_t{1} << 62;  // with a number: of a load that may be bad
constexpr int kPoison = 0xA5;
constexpr std::uint64_t kPoisonWord = 0xA5A5A5A5A5A5A5A5u;

struct LoadRigOptions {
  std::string parent = "/dev/shm";
  ObjectShape shape;
  std::uint32_t stored = 64;  // objects in the store: numbers 0, 1, 2 ...; 0: no store, and no pages from files
  std::uint32_t pinned = 64;  // objects in pinned memory
  std::uint32_t pool_pages = 96;
  std::uint32_t most_pages = 48;  // of a load, of each kind
  std::uint32_t command_bytes = 256 << 10;
  std::uint32_t queues = 4, entries = 64, controller_threads = 4, ctas = 2, ring_ctas = 4;
  std::uint32_t commands = 0;  // in flight, of a queue; 0: entries - 1
  std::uint64_t deadline_ns = 10'000'000'000;
};

// Pools of some pages, [layer][side][page].
class Pools {
 public:
  Pools(const ObjectShape& shape, std::uint32_t pages)
      : shape_(shape),
        memory_(device_array<std::uint8_t>(shape.bytes() * pages)),
        device_layers_(device_array<std::uint64_t>(std::size_t{2} * shape.layers)) {
    const std::uint64_t pool = std::uint64_t{pages} * shape.page_bytes;
    for (std::uint32_t side = 0; side < shape.sides; ++side) {
      for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
        layers_[side].push_back(reinterpret_cast<std::uint64_t>(memory_.get()) +
                                (std::uint64_t{layer} * shape.sides + side) * pool);
      }
      std::uint64_t* const on_device = device_layers_.get() + side * shape.layers;
      check(cudaMemcpy(on_device, layers_[side].data(), shape.layers * sizeof *on_device, cudaMemcpyHostToDevice),
            "addresses of layers");
      args.layers[side] = on_device;
      args.host_layers[side] = layers_[side].data();
      args.page_bytes[side] = shape.page_bytes;
    }
    args.layer_count = shape.layers;
    args.page_count = pages;
  }
  void poison(cudaStream_t stream) const {
    check(cudaMemsetAsync(memory_.get(), kPoison, shape_.bytes() * args.page_count, stream), "poison");
  }
  std::uint8_t* memory() const { return memory_.get(); }

  tardis_gpu_pools args{};

 private:
  const ObjectShape shape_;
  DeviceArray<std::uint8_t> memory_;
  DeviceArray<std::uint64_t> device_layers_;
  std::vector<std::uint64_t> layers_[2];
};

struct TransferWork {
  TransferWork(const ObjectShape& shape, std::uint32_t most)
      : pieces(device_array<tardis_gpu_piece>(std::size_t{shape.layers + 1} * 2 * most, 0xEE)),
        counts(device_array<std::uint32_t>(shape.layers + 1, 0xEE)),
        digests(device_array<std::uint64_t>(std::size_t{most} * shape.digests(), 0xEE)),
        flags(device_array<std::uint32_t>(shape.layers, 0xEE)),
        args{pieces.get(), counts.get(), digests.get(), flags.get(), most, 0} {}
  DeviceArray<tardis_gpu_piece> pieces;
  DeviceArray<std::uint32_t> counts;
  DeviceArray<std::uint64_t> digests;
  DeviceArray<std::uint32_t> flags;
  tardis_gpu_transfer_work args;
};

class LoadRig {
 public:
  static constexpr std::uint64_t kPinnedNumbers = 1u << 20;  // pinned object i has the words of kPinnedNumbers + i

  explicit LoadRig(const LoadRigOptions& o)
      : options(o),
        pools(o.shape, o.pool_pages),
        work(o.shape, o.most_pages),
        pinned(mapped_array<std::uint8_t>(o.shape.bytes() * std::max(1u, o.pinned))),
        pinned_ids(mapped_array<std::uint32_t>(o.most_pages)),
        file_ids(mapped_array<std::uint32_t>(o.most_pages)),
        slots(device_array<std::uint32_t>(o.most_pages)),
        pinned_objects(mapped_array<std::uint64_t>(o.most_pages)),
        events(o.shape.layers) {
    check(tardis_gpu_load_prepare(), "tardis_gpu_load_prepare");
    std::vector<std::uint32_t> numbers(o.most_pages);
    for (std::uint32_t i = 0; i < o.most_pages; ++i) numbers[i] = i;
    check(cudaMemcpy(slots.get(), numbers.data(), numbers.size() * 4, cudaMemcpyHostToDevice), "slots");
    for (cudaEvent_t& event : events) check(cudaEventCreate(&event), "cudaEventCreate");
    open_board();
    if (o.stored == 0) return;
    store = RestoreStore::open(o.parent, o.shape, o.stored + 8);
    std::vector<std::uint64_t> stored(o.stored);
    for (std::uint32_t i = 0; i < o.stored; ++i) stored[i] = i;
    store->set(stored);
    open_session();
  }
  ~LoadRig() {
    close_session();
    for (cudaEvent_t event : events) cudaEventDestroy(event);
  }
  LoadRig(const LoadRig&) = delete;
  LoadRig& operator=(const LoadRig&) = delete;

  std::uint64_t pinned_address(std::uint32_t object) const {
    return reinterpret_cast<std::uint64_t>(pinned.get()) + object * options.shape.bytes();
  }
  tardis_load_board* board() const { return reinterpret_cast<tardis_load_board*>(board_memory.get()); }
  const std::uint32_t* board_words(std::uint64_t offset) const {
    return reinterpret_cast<const std::uint32_t*>(board_memory.get() + offset);
  }
  // Of the pages whose ids are in pinned_ids and file_ids.
  struct tardis_gpu_load load_of(std::uint32_t pinned_pages, std::uint32_t file_pages) {
    struct tardis_gpu_load load {};
    load.pools = pools.args;
    load.work = work.args;
    load.pinned_ids = pinned_ids.get();
    load.pinned_objects = pinned_objects.get();
    load.pinned_pages = pinned_pages;
    load.file_pages = file_pages;
    load.file_ids = file_ids.get();
    load.ring = store == nullptr ? nullptr : &ring;
    load.slots = slots.get();
    load.layer_blocks = options.shape.layer_bytes() >> 12;
    load.board = board_memory.get();
    load.layout = layout;
    load.shape = shape;
    load.patience_ns = 5'000'000'000;
    load.traffic.link_class = TARDIS_GPU_LINK_RESTORE;
    load.traffic.direction = TARDIS_GPU_LINK_IN;
    load.ctas = options.ctas;
    load.events = reinterpret_cast<void* const*>(events.data());
    return load;
  }
  void clear_board() { std::memset(board_memory.get(), 0, layout.bytes); }
  // After a ring that ended its queue pair.
  void renew() {
    gpu->rig().faults().clear();
    const Status renewed = gpu->rig().renew();
    expect(static_cast<bool>(renewed), "queue pairs made anew");
    gpu->start();
    point_ring();
  }

  void close_session() {
    if (loader != nullptr) tardis_loader_close(loader);
    loader = nullptr;
    gpu.reset();
  }
  // With other queue pairs over the same store. No load is under way.
  void use_session(std::uint32_t threads, std::uint32_t queues, std::uint32_t commands) {
    close_session();
    options.controller_threads = threads;
    options.queues = queues;
    options.commands = commands;
    while (options.entries <= commands) options.entries *= 2;
    open_board();
    open_session();
  }

  LoadRigOptions options;               // changed by use_session() only
  std::unique_ptr<RestoreStore> store;  // outlives the session
  Pools pools;
  TransferWork work;
  MappedArray<std::uint8_t> pinned;
  MappedArray<std::uint32_t> pinned_ids, file_ids;
  DeviceArray<std::uint32_t> slots;
  MappedArray<std::uint64_t> pinned_objects;
  std::vector<cudaEvent_t> events;
  tardis_load_shape shape{};
  tardis_load_board_layout layout{};
  MappedArray<std::uint8_t> board_memory, staging_memory;
  std::uint8_t* staging = nullptr;
  std::unique_ptr<gio::testing::GpuRig> gpu;
  DeviceArray<gio::IoContext> contexts;
  DeviceArray<std::uint32_t> words;  // context_count, ended
  tardis_gio_layer ring{};
  tardis_loader* loader = nullptr;

  // Ends the program where the library refuses.
  void need(tardis_code code, const char* what) const {
    if (code == TARDIS_OK) return;
    std::fprintf(stderr, "%s: %s\n", what, error_ == nullptr ? "" : error_);
    std::fflush(stderr);
    std::_Exit(1);
  }
  tardis_load* begin(const std::vector<std::uint64_t>& numbers, bool use_rings = true) {
    std::vector<Key> keys(numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) keys[i] = key_of(numbers[i]);
    tardis_load* load = nullptr;
    need(tardis_load_begin(loader, reinterpret_cast<const std::uint8_t*>(keys.data()),
                           static_cast<std::uint32_t>(keys.size()), use_rings ? 1 : 0, board_memory.get(), &load,
                           &error_),
         "tardis_load_begin");
    return load;
  }
  // The stream has passed it.
  tardis_load_result end(tardis_load* load) {
    tardis_load_result result{};
    need(tardis_load_end(load, 0, &result, &error_), "tardis_load_end");
    return result;
  }

 private:
  void open_board() {
    const LoadRigOptions& o = options;
    shape.layers = o.shape.layers;
    shape.chunks = o.shape.layer_digests();
    shape.most_pages = shape.most_repairs = o.most_pages;
    shape.commands_per_page =
        static_cast<std::uint32_t>((o.shape.layer_bytes() + o.command_bytes - 1) / o.command_bytes);
    shape.rings = o.queues;
    need(tardis_load_board_layout_of(&shape, &layout, &error_), "tardis_load_board_layout_of");
    board_memory = mapped_array<std::uint8_t>(layout.bytes);
  }
  void open_session() {
    const LoadRigOptions& o = options;
    gio::testing::GpuRigOptions session;
    session.store = store->store();
    session.block_shift = 12;
    session.controller_threads = o.controller_threads;
    session.queues = o.queues;
    session.entries = o.entries;
    session.commands = o.commands;
    session.slot_bytes = o.command_bytes;
    session.ctas = o.ring_ctas;
    gpu = std::make_unique<gio::testing::GpuRig>(session);
    contexts = device_array<gio::IoContext>(gio::kMostContexts);
    words = device_array<std::uint32_t>(2);
    const std::uint64_t bytes = o.most_pages * ((o.shape.layer_bytes() + 4095) / 4096 * 4096);
    staging_memory = mapped_array<std::uint8_t>(bytes + 4096);  // which may begin anywhere
    staging = staging_memory.get() + (0 - reinterpret_cast<std::uintptr_t>(staging_memory.get())) % 4096;
    const tardis_loader_options loading{shape, store->space(), 4096, 1, staging, bytes};
    need(tardis_loader_open(store->handle(), &loading, &loader, &error_), "tardis_loader_open");
    point_ring();
  }
  void point_ring() {
    const LoadRigOptions& o = options;
    for (std::uint32_t side = 0; side < o.shape.sides; ++side) {
      ring.page_stride[side] = ring.page_bytes[side] = o.shape.page_bytes;
    }
    ring.pool_page_count = o.pool_pages;
    ring.op = TARDIS_GIO_READ;
    ring.block_bytes = 4096;
    ring.most_bytes = o.command_bytes;
    ring.contexts = contexts.get();
    ring.context_count = words.get();
    ring.ended = words.get() + 1;
    ring.deadline_ns = o.deadline_ns;
    ring.queues = gpu->queues().data();
    ring.rings = gpu->rings();
    ring.ctas = o.ring_ctas;
  }

  char* error_ = nullptr;
};

// Words of a layer's pages that are not those of the object that each page is to hold, or poison.
static __global__ void compare_layer(const tardis_gpu_pools pools, std::uint32_t layer, const std::uint64_t* expected,
                                     unsigned long long* wrong) {
  const std::uint32_t sides = pools.layers[1] != nullptr ? 2 : 1;
  const std::uint64_t words = pools.page_bytes[0] / 8;  // K and V alike
  __shared__ unsigned long long unlike, nonzero;
  for (std::uint32_t i = blockIdx.x; i < pools.page_count * sides; i += gridDim.x) {
    if (threadIdx.x == 0) unlike = nonzero = 0;
    __syncthreads();
    const std::uint32_t page = i / sides, side = i % sides;
    const bool or_zeros = expected[page] != kNobody && (expected[page] & kOrZeros) != 0;
    const std::uint64_t number = or_zeros ? expected[page] - kOrZeros : expected[page];
    unsigned long long others = 0, set = 0;
    const auto* const at = reinterpret_cast<const unsigned long long*>(
        (side == 0 ? pools.layers[0] : pools.layers[1])[layer] + std::uint64_t{page} * words * 8);
    const std::uint64_t first = (std::uint64_t{layer} * sides + side) * words;
    for (std::uint64_t w = threadIdx.x; w < words; w += blockDim.x) {
      const unsigned long long word = __ldcg(at + w);
      others += word != (number == kNobody ? kPoisonWord : object_word(number, first + w));
      set += word != 0;
    }
    if (others != 0) atomicAdd(&unlike, others);
    if (set != 0) atomicAdd(&nonzero, set);
    __syncthreads();
    const unsigned long long bad = or_zeros && nonzero == 0 ? 0 : unlike;
    if (threadIdx.x == 0 && bad != 0) atomicAdd(wrong, bad);
    __syncthreads();
  }
}

// Pages as a model would have filled them.
static __global__ void fill_layer(const tardis_gpu_pools pools, std::uint32_t layer, const std::uint64_t* numbers) {
  const std::uint32_t sides = pools.layers[1] != nullptr ? 2 : 1;
  const std::uint64_t words = pools.page_bytes[0] / 8;
  for (std::uint32_t i = blockIdx.x; i < pools.page_count * sides; i += gridDim.x) {
    const std::uint32_t page = i / sides, side = i % sides;
    auto* const at = reinterpret_cast<unsigned long long*>((side == 0 ? pools.layers[0] : pools.layers[1])[layer] +
                                                           std::uint64_t{page} * words * 8);
    const std::uint64_t first = (std::uint64_t{layer} * sides + side) * words;
    for (std::uint64_t w = threadIdx.x; w < words; w += blockDim.x) at[w] = object_word(numbers[page], first + w);
  }
}

// Objects one behind the other, in pinned memory: object i has the words of first + i.
static __global__ void fill_objects(unsigned long long* objects, std::uint64_t count, std::uint64_t words,
                                    std::uint64_t first) {
  for (std::uint64_t object = blockIdx.x; object < count; object += gridDim.x) {
    for (std::uint64_t w = threadIdx.x; w < words; w += blockDim.x) {
      objects[object * words + w] = object_word(first + object, w);
    }
  }
}
static __global__ void compare_objects(const unsigned long long* objects, std::uint64_t count, std::uint64_t words,
                                       const std::uint64_t* expected, unsigned long long* wrong) {
  unsigned long long bad = 0;
  for (std::uint64_t object = blockIdx.x; object < count; object += gridDim.x) {
    const std::uint64_t number = expected[object];
    for (std::uint64_t w = threadIdx.x; w < words; w += blockDim.x) {
      bad += objects[object * words + w] != (number == kNobody ? kPoisonWord : object_word(number, w));
    }
  }
  if (bad != 0) atomicAdd(wrong, bad);
}

}  // namespace tardis::gstore::testing
