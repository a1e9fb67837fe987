// SPDX-License-Identifier: Apache-2.0
// Behind a layer's rings: one thread tells the loader what became of the layer. In the good case that is all. Else it
// waits for the parts that the loader reads again, and the warps copy them, a part each, with plain loads: the shared
// memory of a mover would be asked for in the good case as well, and the host reads far slower than these copy. Of a
// layer that stays bad, the file pages become zeros: damaged bytes have landed, and might be NaN in the forward that
// runs before anybody hears of it.
#include "gio/iocb.h"
#include "gio/load_board.cuh"
#include "gio/load_kernels.h"

namespace tardis::gio {
namespace {

constexpr unsigned kThreads = 256, kLanes = 32;
constexpr std::uint32_t kInFlight = 8;  // words of 16 bytes that a lane has on the way

constexpr std::uint32_t kLost = UINT32_MAX;  // instead of a number of parts: the layer stays bad

// How many parts of the list are to be landed, or kLost.
__device__ std::uint32_t await_repairs(const LoadSettling& settling) {
  if (read_told(&settling.board->abandoned) != 0) return kLost;
  const std::uint32_t answer = await_told(settling.repaired, settling.patience_ns);
  if (answer == TARDIS_LOAD_PENDING) abandon(settling.board);
  if (answer != TARDIS_LOAD_GOOD) return kLost;
  const std::uint32_t repairs = read_told(settling.repairs);
  if (repairs <= settling.most_repairs) return repairs;
  add_to(&settling.board->errors, 1);
  return kLost;
}

// By a warp: multiples of 16 bytes.
__device__ void copy(std::uint64_t to, std::uint64_t from, std::uint32_t bytes) {
  const auto* const source = reinterpret_cast<const uint4*>(from);
  auto* const destination = reinterpret_cast<uint4*>(to);
  const std::uint32_t words = bytes / sizeof(uint4);
  std::uint32_t at = threadIdx.x % kLanes;
  for (; at + (kInFlight - 1) * kLanes < words; at += kInFlight * kLanes) {
    uint4 values[kInFlight];
#pragma unroll
    for (std::uint32_t i = 0; i < kInFlight; ++i) values[i] = __ldcg(source + at + i * kLanes);
#pragma unroll
    for (std::uint32_t i = 0; i < kInFlight; ++i) __stcg(destination + at + i * kLanes, values[i]);
  }
  for (; at < words; at += kLanes) __stcg(destination + at, __ldcg(source + at));
}

// By all threads: the layer of all pages from files.
__device__ void zero_pages(const LoadSettling& settling) {
  for (std::uint32_t page = 0; page < settling.file_pages; ++page) {
    const std::uint32_t id = settling.file_ids[page];
    if (id >= settling.page_count) continue;
#pragma unroll
    for (int side = 0; side < kMaxSegments; ++side) {
      const std::uint32_t bytes = settling.page_bytes[side];
      auto* const words = reinterpret_cast<uint4*>(settling.pools[side] + std::uint64_t{id} * bytes);
      for (std::uint32_t at = threadIdx.x; at < bytes / sizeof(uint4); at += kThreads) __stcg(words + at, uint4{});
    }
  }
}

__global__ void __launch_bounds__(kThreads) load_settle(const __grid_constant__ LoadSettling settling) {
  __shared__ std::uint32_t parts, unknown;
  if (threadIdx.x == 0) {
    unknown = 0;
    const bool good = settling.words->ring_pages == settling.file_pages && *settling.flag == kIoDone;
    tell(settling.landed, good ? TARDIS_LOAD_GOOD : TARDIS_LOAD_BAD);
    parts = good ? 0 : await_repairs(settling);
  }
  __syncthreads();
  if (parts == kLost) return zero_pages(settling);
  for (std::uint32_t part = threadIdx.x / kLanes; part < parts; part += kThreads / kLanes) {
    const std::uint64_t address = settling.list[part].address;
    const std::uint32_t page = settling.list[part].page;
    if (page >= settling.file_pages) {
      unknown = 1;
      continue;
    }
    const std::uint32_t id = settling.file_ids[page];
    if (id >= settling.page_count) continue;  // counted by the gate
    std::uint64_t from = address;
#pragma unroll
    for (int side = 0; side < kMaxSegments; ++side) {
      const std::uint32_t bytes = settling.page_bytes[side];
      copy(settling.pools[side] + std::uint64_t{id} * bytes, from, bytes);
      from += bytes;
    }
  }
  if (parts == 0) return;
  __syncthreads();
  if (unknown == 0) return;
  zero_pages(settling);
  if (threadIdx.x == 0) add_to(&settling.board->errors, 1);
}

}  // namespace

cudaError_t launch_load_settle(const LoadSettling& settling, cudaStream_t stream) {
  load_settle<<<1, kThreads, 0, stream>>>(settling);
  return cudaGetLastError();
}

cudaError_t load_load_settle() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, load_settle);
}

}  // namespace tardis::gio
