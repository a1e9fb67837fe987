// SPDX-License-Identifier: Apache-2.0
// The order in which the kernels of loads and offloads are enqueued.
#include "gio/load_launch.h"

#include <cuda_runtime.h>

#include "gio/layer_call.h"
#include "gio/layer_launch.h"
#include "gio/load_kernels.h"
#include "gio/prepare_kernel.h"
#include "gio/ring_kernel.h"
#include "gio/sequence.h"

namespace tardis::gio {
namespace {

using LoadCall = struct tardis_gpu_load;  // there is a function of that name

static_assert(sizeof(tardis_gpu_pools) == 48 && sizeof(tardis_gpu_transfer_work) == 40 && sizeof(LoadCall) == 304 &&
              offsetof(LoadCall, pinned_ids) == 88 && offsetof(LoadCall, ring) == 120 &&
              offsetof(LoadCall, layout) == 152 && offsetof(LoadCall, patience_ns) == 256 &&
              offsetof(LoadCall, events) == 296);
static_assert(sizeof(tardis_gpu_offload) == 144 && offsetof(tardis_gpu_offload, errors) == 112);
static_assert(sizeof(tardis_load_board) == 64 && sizeof(tardis_load_repair) == 16 &&
              sizeof(tardis_load_board_layout) == 80 && sizeof(tardis_load_shape) == 24);

bool usable(const tardis_gpu_pools& pools, const tardis_gpu_transfer_work& work) {
  const bool two = pools.layers[1] != nullptr;
  return pools.layers[0] != nullptr && pools.host_layers[0] != nullptr && (pools.host_layers[1] != nullptr) == two &&
         pools.page_bytes[0] != 0 && (pools.page_bytes[1] != 0) == two && pools.layer_count != 0 &&
         pools.page_count != 0 && work.pieces != nullptr && work.counts != nullptr && work.most_pages != 0 &&
         std::uint64_t{pools.layer_count} * work.most_pages * sides_of(pools) <= UINT32_MAX;
}

bool usable(const tardis_gpu_link_traffic& traffic, std::uint32_t direction, std::uint32_t ctas) {
  return traffic.link_class < TARDIS_GPU_LINK_CLASSES && traffic.direction == direction && ctas >= 1 &&
         ctas <= TARDIS_GPU_MAX_MOVER_CTAS;
}

ObjectPieces pieces_of(const tardis_gpu_pools& pools, const tardis_gpu_transfer_work& work) {
  ObjectPieces pieces{};
  for (int side = 0; side < kMaxSegments; ++side) {
    pieces.layers[side] = pools.layers[side];
    pieces.page_bytes[side] = pools.page_bytes[side];
  }
  pieces.layer_count = pools.layer_count;
  pieces.page_count = pools.page_count;
  pieces.pieces = work.pieces;
  pieces.counts = work.counts;
  return pieces;
}

class Load {
 public:
  Load(const LoadCall& load, void* cuda_stream)
      : load_(load),
        stream_(static_cast<cudaStream_t>(cuda_stream)),
        row_(load.pinned_pages * sides_of(load.pools)),
        board_(static_cast<std::byte*>(load.board)),
        words_(reinterpret_cast<LoadWords*>(load.work.pieces +
                                            std::uint64_t{2} * load.pools.layer_count * load.work.most_pages)) {
    traffic_of_rings_.in_flight = 0;
  }

  bool is_valid() const {
    if (!usable(load_.pools, load_.work) || !usable(load_.traffic, TARDIS_GPU_LINK_IN, load_.ctas)) return false;
    if (load_.board == nullptr || load_.events == nullptr || load_.pinned_pages > load_.work.most_pages) return false;
    if (load_.pinned_pages != 0 && (load_.pinned_ids == nullptr || load_.pinned_objects == nullptr)) return false;
    return load_.file_pages == 0 || has_valid_files();
  }

  int enqueue() {
    Sequence sequence;
    if (load_.pinned_pages != 0) sequence.then([&] { return make_pieces(); });
    for (std::uint32_t layer = 0; layer < load_.pools.layer_count; ++layer) {
      if (load_.pinned_pages != 0) sequence.then([&] { return move_pinned(layer); });
      if (load_.file_pages != 0) {
        // Behind the first layer's pages from pinned memory: meanwhile the loader is at work.
        if (layer == 0) sequence.then([&] { return gate(); }).then([&] { return move_digests(); });
        sequence.then([&] { return run_rings(layer); }).then([&] { return settle(layer); });
      }
      sequence.then([&] { return cudaEventRecord(static_cast<cudaEvent_t>(load_.events[layer]), stream_); });
    }
    return sequence.error();
  }

 private:
  bool has_valid_files() const {
    const tardis_load_shape& shape = load_.shape;
    if (load_.ring == nullptr || load_.file_ids == nullptr || load_.slots == nullptr || load_.work.digests == nullptr ||
        load_.work.flags == nullptr || shape.layers != load_.pools.layer_count || shape.chunks == 0 ||
        load_.file_pages > shape.most_pages || load_.file_pages > load_.work.most_pages) {
      return false;
    }
    const tardis_gio_layer ring = ring_of(0);
    return complaint_of(ring) == nullptr && ring.op == TARDIS_GIO_READ && ring.rings == shape.rings &&
           ring.page_bytes[0] == load_.pools.page_bytes[0] && ring.page_bytes[1] == load_.pools.page_bytes[1] &&
           ring.page_stride[0] == ring.page_bytes[0] && ring.page_stride[1] == ring.page_bytes[1] &&
           pages_of(ring).commands_per_page() == shape.commands_per_page &&
           pages_of(ring).commands(load_.file_pages) <= kMostContexts;
  }
  template <class T>
  T* on_board(std::uint64_t offset) const {
    return reinterpret_cast<T*>(board_ + offset);
  }
  tardis_load_board* board() const { return on_board<tardis_load_board>(0); }

  int make_pieces() const {
    ObjectPieces pieces = pieces_of(load_.pools, load_.work);
    pieces.ids = load_.pinned_ids;
    pieces.objects = load_.pinned_objects;
    pieces.pages = load_.pinned_pages;
    pieces.direction = TARDIS_GPU_TO_POOL;
    pieces.count_words = load_.pools.layer_count;
    pieces.count_each = row_;
    pieces.errors = &board()->errors;
    return launch_object_pieces(pieces, stream_);
  }
  int move_pinned(std::uint32_t layer) const {
    const tardis_gpu_move_args moved{load_.work.pieces + std::uint64_t{layer} * row_, load_.work.counts + layer, row_,
                                     load_.ctas};
    return tardis_gpu_move_in_class(&moved, &load_.traffic, stream_);
  }

  std::uint64_t digest_stride() const {
    return std::uint64_t{load_.shape.layers} * load_.shape.chunks * sizeof(std::uint64_t);
  }
  int gate() const {
    LoadGate gate{};
    gate.board = board();
    gate.board_digests = on_board<const std::uint64_t>(load_.layout.digests);
    gate.digests = load_.work.digests;
    gate.digests_bytes = load_.file_pages * digest_stride();
    gate.file_ids = load_.file_ids;
    gate.file_pages = load_.file_pages;
    gate.page_count = load_.pools.page_count;
    gate.flags = load_.work.flags;
    gate.layer_count = load_.pools.layer_count;
    gate.words = words_;
    gate.patience_ns = load_.patience_ns;
    return launch_load_gate(gate, stream_);
  }
  int move_digests() const {
    const tardis_gpu_move_args moved{&words_->digests, &words_->pieces, 1, load_.ctas};
    return tardis_gpu_move_in_class(&moved, &load_.traffic, stream_);
  }

  tardis_gio_layer ring_of(std::uint32_t layer) const {
    tardis_gio_layer ring = *load_.ring;
    ring.pool_pages = load_.file_ids;
    ring.slots = load_.slots;
    ring.count = &words_->ring_pages;
    ring.slot_blocks = on_board<const std::uint64_t>(load_.layout.blocks);
    for (int side = 0; side < kMaxSegments; ++side) {
      ring.pools[side] = load_.pools.host_layers[side] == nullptr ? 0 : load_.pools.host_layers[side][layer];
    }
    ring.pool_page_count = load_.pools.page_count;
    ring.most_pages = ring.slot_count = load_.file_pages;
    ring.first_block = layer * load_.layer_blocks;
    ring.digests = reinterpret_cast<std::uint64_t>(load_.work.digests + std::uint64_t{layer} * load_.shape.chunks);
    ring.digest_stride = digest_stride();
    ring.statuses = on_board<std::uint32_t>(load_.layout.statuses);
    ring.reports = on_board<RingReport>(load_.layout.reports) + std::uint64_t{layer} * load_.shape.rings;
    ring.flag = load_.work.flags + layer;
    return ring;
  }
  int run_rings(std::uint32_t layer) const {
    const tardis_gio_layer ring = ring_of(layer);
    const LayerPages pages = gio::pages_of(ring);
    const IoControlBlock iocb = control_block_of(ring);
    return Sequence()
        .then([&] {
          return tardis_gpu_gio_prepare(&pages, static_cast<IoContext*>(ring.contexts), ring.context_count, stream_);
        })
        .then([&] {
          return tardis_gpu_gio_run_in_class(static_cast<const GrantedQueue*>(ring.queues), ring.rings, &iocb,
                                             ring.ctas, &traffic_of_rings_, stream_);
        })
        .error();
  }
  int settle(std::uint32_t layer) const {
    const tardis_load_board_layout& layout = load_.layout;
    LoadSettling settling{};
    settling.board = board();
    settling.landed = on_board<std::uint32_t>(layout.landed) + layer;
    settling.repaired = on_board<const std::uint32_t>(layout.repaired) + layer;
    settling.repairs = on_board<const std::uint32_t>(layout.repairs) + layer;
    settling.list = on_board<const tardis_load_repair>(layout.list);
    settling.most_repairs = load_.shape.most_repairs;
    settling.flag = load_.work.flags + layer;
    settling.words = words_;
    settling.file_ids = load_.file_ids;
    settling.file_pages = load_.file_pages;
    settling.page_count = load_.pools.page_count;
    const tardis_gio_layer ring = ring_of(layer);
    for (int side = 0; side < kMaxSegments; ++side) {
      settling.pools[side] = ring.pools[side];
      settling.page_bytes[side] = ring.page_bytes[side];
    }
    settling.patience_ns = load_.patience_ns;
    return launch_load_settle(settling, stream_);
  }

  const LoadCall& load_;
  const cudaStream_t stream_;
  const std::uint32_t row_;  // pieces of a layer
  std::byte* const board_;
  LoadWords* const words_;
  tardis_gpu_link_traffic traffic_of_rings_ = load_.traffic;  // which take no in_flight
};

}  // namespace
}  // namespace tardis::gio

using namespace tardis::gio;

extern "C" int tardis_gpu_load_enqueue(const struct tardis_gpu_load* load, void* stream) {
  if (load == nullptr) return cudaErrorInvalidValue;
  Load enqueued(*load, stream);
  return enqueued.is_valid() ? enqueued.enqueue() : static_cast<int>(cudaErrorInvalidValue);
}

extern "C" int tardis_gpu_offload_enqueue(const tardis_gpu_offload* offload, void* stream) {
  if (offload == nullptr || !usable(offload->pools, offload->work) ||
      !usable(offload->traffic, TARDIS_GPU_LINK_OUT, offload->ctas) || offload->errors == nullptr ||
      offload->ids == nullptr || offload->objects == nullptr || offload->pages > offload->work.most_pages) {
    return cudaErrorInvalidValue;
  }
  if (offload->pages == 0) return cudaSuccess;
  ObjectPieces pieces = pieces_of(offload->pools, offload->work);
  pieces.ids = offload->ids;
  pieces.objects = offload->objects;
  pieces.pages = offload->pages;
  pieces.direction = TARDIS_GPU_FROM_POOL;
  pieces.count_words = 1;
  pieces.count_each = offload->pools.layer_count * offload->pages * sides_of(offload->pools);
  pieces.errors = offload->errors;
  const tardis_gpu_move_args moved{offload->work.pieces, offload->work.counts, pieces.count_each, offload->ctas};
  return Sequence()
      .then([&] { return launch_object_pieces(pieces, static_cast<cudaStream_t>(stream)); })
      .then([&] { return tardis_gpu_move_in_class(&moved, &offload->traffic, stream); })
      .error();
}

extern "C" int tardis_gpu_load_prepare(void) {
  return Sequence()
      .then([] { return tardis_gpu_load(); })
      .then([] { return load_object_pieces(); })
      .then([] { return load_load_gate(); })
      .then([] { return load_load_settle(); })
      .error();
}

extern "C" void tardis_gpu_load_sizes_of(tardis_gpu_load_sizes* sizes) {
  *sizes = {sizeof(tardis_gpu_pools),   sizeof(tardis_gpu_transfer_work), sizeof(LoadCall),
            sizeof(tardis_gpu_offload), sizeof(tardis_gpu_load_run),      sizeof(tardis_gpu_load_runs)};
}
