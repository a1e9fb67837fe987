// SPDX-License-Identifier: Apache-2.0
// Where the parts of a block table lie, and an empty one.
#include <cuda_runtime.h>

#include "gstore/block_table.cuh"

namespace tardis::gstore {
namespace {

struct Cursor {
  std::uint8_t* base;
  std::uint64_t at = 0;

  template <class T>
  T* next(std::uint64_t n) {
    T* part = reinterpret_cast<T*>(base + at);
    at += (n * sizeof(T) + 255) / 256 * 256;
    return part;
  }
  tardis_gpu_pool pool(std::uint32_t size) {
    std::uint32_t* bits = next<std::uint32_t>((std::uint64_t{size} + 31) / 32);
    return {bits, next<std::uint32_t>(2), size, 0};
  }
};

std::uint64_t place(tardis_gpu_blocks& blocks, void* memory, std::uint32_t hbm, std::uint32_t dram, std::uint32_t file,
                    std::uint32_t rows) {
  Cursor cursor{static_cast<std::uint8_t*>(memory)};
  blocks.rows = cursor.next<std::uint64_t>(2 * std::uint64_t{rows});
  blocks.home = cursor.next<std::uint64_t>(rows);
  blocks.used = cursor.next<std::uint32_t>(rows);
  blocks.clock = cursor.next<std::uint32_t>(1);
  blocks.pool[TARDIS_GPU_HBM] = cursor.pool(hbm);
  blocks.pool[TARDIS_GPU_DRAM] = cursor.pool(dram);
  blocks.pool[TARDIS_GPU_FILE] = cursor.pool(file);
  blocks.row_pool = cursor.pool(rows);
  return cursor.at;
}

__device__ void reset_pool(const tardis_gpu_pool& pool, std::uint64_t first, std::uint64_t step) {
  for (std::uint64_t i = first; i < (std::uint64_t{pool.size} + 31) / 32; i += step) pool.bits[i] = 0;
  if (first != 0) return;
  pool.control[kFree] = pool.size;
  pool.control[kNext] = 0;
}

__global__ void __launch_bounds__(kThreads) blocks_reset(const tardis_gpu_blocks blocks) {
  const std::uint64_t first = blockIdx.x * kThreads + threadIdx.x, step = std::uint64_t{gridDim.x} * kThreads;
  for (std::uint64_t i = first; i < blocks.row_pool.size; i += step) {
    blocks.rows[2 * i] = kNoBlock;
    blocks.rows[2 * i + 1] = 0;
    blocks.home[i] = kNone;
    blocks.used[i] = 0;
  }
  for (const tardis_gpu_pool& pool : blocks.pool) reset_pool(pool, first, step);
  reset_pool(blocks.row_pool, first, step);
  if (first == 0) *blocks.clock = 0;
}

}  // namespace
}  // namespace tardis::gstore

extern "C" uint64_t tardis_gpu_blocks_memory_bytes(uint32_t hbm, uint32_t dram, uint32_t file, uint32_t rows) {
  tardis_gpu_blocks blocks;
  return tardis::gstore::place(blocks, nullptr, hbm, dram, file, rows);
}

extern "C" int tardis_gpu_blocks_place(tardis_gpu_blocks* blocks, void* memory, uint64_t memory_bytes, uint32_t hbm,
                                       uint32_t dram, uint32_t file, uint32_t rows) {
  using namespace tardis::gstore;
  if (blocks == nullptr || memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % 256 != 0 || rows == 0 ||
      place(*blocks, memory, hbm, dram, file, rows) > memory_bytes) {
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

extern "C" int tardis_gpu_blocks_reset(const tardis_gpu_blocks* blocks, void* cuda_stream) {
  using namespace tardis::gstore;
  if (blocks == nullptr || blocks->rows == nullptr) return cudaErrorInvalidValue;
  blocks_reset<<<kMaxBlockCtas, kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(*blocks);
  return cudaGetLastError();
}
