// SPDX-License-Identifier: Apache-2.0
// A warp a chunk of 16 KiB. One that lies in both pieces of its command is read as if they were one.
#include "gio/verify_kernel.h"

#include <cuda_runtime.h>

#include "gpu/xxh3_warp.cuh"
#include "nvme/ordering.h"

namespace tardis::gio {
namespace {

namespace x = xxh3;

constexpr unsigned kWarps = 8, kMostCtas = 16;
constexpr int kBlocksInFlight = 4;

// A chunk's addresses go on elsewhere from the border on.
struct Border {
  std::uint64_t address, jump;
};

struct PiecesLoad {
  static __device__ __forceinline__ Border& border() {
    __shared__ Border borders[kWarps];
    return borders[threadIdx.x / x::kLanes];
  }
  // Pieces are multiples of 16 bytes: no load lies in both. Past L1, which does not see what a copy engine wrote.
  static __device__ __forceinline__ x::Words at(const unsigned char* p) {
    const Border& mine = border();
    auto address = reinterpret_cast<std::uint64_t>(p);
    if (address >= mine.address) address += mine.jump;
    const ulonglong2 value = __ldcg(reinterpret_cast<const ulonglong2*>(address));
    return {value.x, value.y};
  }
  static __device__ __forceinline__ x::Words anywhere(const unsigned char* p) { return at(p); }  // never: see at()
};

// By all lanes of a warp. Commands are whole blocks, so a chunk has 512 bytes at least.
__device__ __forceinline__ std::uint64_t digest_of(const IoContext& context, std::uint32_t first, std::uint32_t bytes,
                                                   int lane, const x::LaneKeys& keys) {
  const std::uint32_t front = context.bytes[0];
  const std::uint64_t begin = first < front ? context.memory[0] + first : context.memory[1] + (first - front);
  __syncwarp();  // forbids that the border is changed before all lanes have used the last one
  if (lane == 0) {
    const bool both = first < front && first + bytes > front;
    PiecesLoad::border() = both ? Border{context.memory[0] + front, context.memory[1] - (context.memory[0] + front)}
                                : Border{~std::uint64_t{0}, 0};
  }
  __syncwarp();  // forbids that a lane reads by the last border
  return x::digest_long<PiecesLoad, kBlocksInFlight>(reinterpret_cast<const unsigned char*>(begin), bytes, lane, keys);
}

__global__ void __launch_bounds__(kWarps* x::kLanes)
    verify_landed(const IoControlBlock iocb, std::uint32_t* words, std::uint32_t* flag) {
  __shared__ std::uint32_t damaged;
  if (threadIdx.x == 0) damaged = 0;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % x::kLanes);
  const x::LaneKeys keys = x::LaneKeys::of(lane);
  const std::uint32_t told = __ldcg(iocb.count), count = told < kMostContexts ? told : kMostContexts;
  for (std::uint32_t i = blockIdx.x * kWarps + threadIdx.x / x::kLanes; i < count; i += gridDim.x * kWarps) {
    const IoContext context = iocb.contexts[i];
    const IoStatus status{nvme::load_acquire(iocb.statuses + i)};
    if (context.digests == 0 || status.end() != IoEnd::kDone) continue;
    auto* const digests = reinterpret_cast<unsigned long long*>(context.digests);
    const std::uint32_t bytes = context.bytes[0] + context.bytes[1];
    bool good = true;
    for (std::uint32_t first = 0, chunk = 0; first < bytes; first += kDigestedBytes, ++chunk) {
      const std::uint32_t rest = bytes - first;
      const std::uint64_t digest = digest_of(context, first, rest < kDigestedBytes ? rest : kDigestedBytes, lane, keys);
      if (context.op == IoOp::kRead) {
        good = good && __ldcg(digests + chunk) == digest;
      } else if (lane == 0) {
        digests[chunk] = digest;
      }
    }
    if (!good && lane == 0) {
      nvme::store_shared(iocb.statuses + i, IoStatus::of(IoEnd::kDamaged).raw);
      atomicAdd(&damaged, 1u);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Every CTA adds what it found above the number of those that have ended.
  constexpr std::uint32_t kOne = 1 << 16;
  static_assert(kMostContexts < kOne, "a half each");
  // Forbids that this CTA counts as ended before its statuses and digests are seen.
  __threadfence_system();
  const std::uint32_t before = atomicAdd(words, kOne + damaged);
  if ((before >> 16) + 1 != gridDim.x) return;
  words[1] = (before + damaged) & (kOne - 1);
  words[0] = 0;
  const bool good = nvme::load_acquire(iocb.flag) == kIoDone && words[1] == 0;
  // Forbids that whoever sees the flag misses any CTA's statuses or digests.
  __threadfence_system();
  nvme::store_shared(flag, good ? kIoDone : kIoError);
}

}  // namespace
}  // namespace tardis::gio

int tardis_gpu_gio_verify(const tardis::gio::IoControlBlock* iocb, std::uint32_t* words, std::uint32_t* flag,
                          std::uint32_t ctas, void* cuda_stream) {
  using namespace tardis::gio;
  if (iocb == nullptr || words == nullptr || flag == nullptr || flag == iocb->flag || ctas == 0 || ctas > kMostCtas) {
    return cudaErrorInvalidValue;
  }
  verify_landed<<<ctas, kWarps * x::kLanes, 0, static_cast<cudaStream_t>(cuda_stream)>>>(*iocb, words, flag);
  return cudaGetLastError();
}

int tardis_gpu_gio_verify_load() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, tardis::gio::verify_landed);
}
