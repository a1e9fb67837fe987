// SPDX-License-Identifier: Apache-2.0
// What rings and movers do for every layer, made at once: a launch a layer costs as much as all of it. blockIdx.y is
// the layer.
#include "gio/prepare.h"
#include "gstore/device_warp.cuh"
#include "gstore/restore_work.h"

namespace tardis::gstore {
namespace {

using gio::IoOp;

__device__ gio::LayerPages layer_pages(const tardis_gpu_restore& restore, const RestoreWork& work, std::uint32_t layer,
                                       IoOp op) {
  const bool reads = op == IoOp::kRead;
  const std::uint64_t each = sizeof(std::uint64_t) * restore.shape.layer_digests;
  gio::LayerPages pages{};
  pages.memory_pages = reads ? work.file_pages : work.write_pages;
  pages.file_pages = reads ? work.file_blocks : work.write_blocks;
  pages.pools[0] = work.pools[layer];
  pages.page_stride[0] = pages.page_bytes[0] = restore.shape.page_bytes;
  if (restore.shape.sides == 2) {
    pages.pools[1] = work.pools[restore.shape.layers + layer];
    pages.page_stride[1] = pages.page_bytes[1] = restore.shape.page_bytes;
  }
  pages.first_block = layer * restore.places.layer_stride >> restore.shape.block_shift;
  if (each != 0) {
    pages.digests = reinterpret_cast<std::uint64_t>(reads ? work.digests : work.write_digests) + layer * each;
  }
  pages.digest_stride = restore.shape.layers * each;
  pages.block_shift = restore.shape.block_shift;
  pages.most_bytes = restore.shape.command_bytes;
  pages.op = op;
  return pages;
}

template <IoOp op>
__global__ void __launch_bounds__(kThreads)
    restore_commands(const __grid_constant__ tardis_gpu_restore restore, const __grid_constant__ RestoreWork work) {
  const std::uint32_t layer = blockIdx.y, at = blockIdx.x * kThreads + threadIdx.x;
  const gio::LayerPages pages = layer_pages(restore, work, layer, op);
  const std::uint32_t commands = pages.commands_per_page();
  const std::uint32_t contexts = (op == IoOp::kRead ? work.counts->files : work.counts->writes) * commands;
  if (at < contexts) {
    gio::IoContext context = pages.context(at / commands, at % commands);  // as if every page began at block 0
    const std::uint64_t first = (op == IoOp::kRead ? work.file_firsts : work.write_firsts)[at / commands];
    // What is nowhere (all ones) must not become a block of another page: the ring refuses it.
    context.block = first <= gio::LayerPages::kMostBlock ? context.block + first : ~std::uint64_t{0};
    work.contexts[std::uint64_t{layer} * gio::kMostContexts + at] = context;
  }
  if (layer == 0 && at == 0) work.counts->contexts = contexts;
  if (op != IoOp::kRead) return;
  const std::uint32_t sides = restore.shape.sides, pieces = work.counts->drams * sides;
  if (at < pieces) {
    const std::uint32_t page = at / sides, side = at % sides;
    const std::uint64_t bytes = restore.shape.page_bytes;
    const std::uint64_t object = work.dram_objects[page] + layer * restore.places.layer_stride + side * bytes;
    const std::uint64_t pool = side == 0 ? pages.pools[0] : pages.pools[1];
    work.pieces[std::uint64_t{layer} * sides * restore.shape.max_pages + at] = {
        object, pool + work.dram_pages[page] * bytes, bytes};
  }
  if (layer == 0 && at == 0) work.counts->pieces = pieces;
}

}  // namespace

int launch_restore_commands(const tardis_gpu_restore& restore, const RestoreWork& work, gio::IoOp op,
                            cudaStream_t stream) {
  // A page has a context at least, and two pieces at most.
  const std::uint32_t most = restore.shape.max_pages * (commands_per_page(restore.shape) + 1);
  const dim3 grid((most + kThreads - 1) / kThreads, restore.shape.layers);
  if (op == IoOp::kRead) {
    restore_commands<IoOp::kRead><<<grid, kThreads, 0, stream>>>(restore, work);
  } else {
    restore_commands<IoOp::kWrite><<<grid, kThreads, 0, stream>>>(restore, work);
  }
  return cudaGetLastError();
}

int load_restore_commands() {
  cudaFuncAttributes attributes;
  const int result = cudaFuncGetAttributes(&attributes, restore_commands<IoOp::kRead>);
  return result != cudaSuccess ? result : cudaFuncGetAttributes(&attributes, restore_commands<IoOp::kWrite>);
}

}  // namespace tardis::gstore
