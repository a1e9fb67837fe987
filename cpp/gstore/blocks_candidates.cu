// SPDX-License-Identifier: Apache-2.0
// The rows worth least, exactly: their ranks are counted by the upper half, then, where the border lies, by the lower
// half, then those above the border are collected.
#include <cuda_runtime.h>

#include "gstore/block_table.cuh"

namespace tardis::gstore {
namespace {

constexpr std::uint32_t kBins = 1 << 16;
constexpr std::uint32_t kCtas = 132 * 4;
constexpr std::uint32_t kUnlimited = 0x7FFFFFFF;  // counted down by fewer rows than that

enum class Stage { kUpper, kLower };

struct Scratch {
  std::uint32_t upper[kBins], lower[kBins];
  std::uint32_t finished[2];  // thread blocks, by stage
  std::uint32_t border[2];    // the half rank at which the wanted ones end
  std::uint32_t left[2];      // how many are wanted at the border itself
};

struct Search {
  tardis_gpu_blocks blocks;
  std::uint32_t tier, bonus;
  const std::uint32_t* want;
  std::uint32_t max_count;
  Scratch* scratch;

  __device__ bool candidate(std::uint32_t number, Row& row, std::uint32_t& rank) const {
    row = load_row(blocks.rows, number);
    if (block_of(row) == kNoBlock || moving(row) || refs_of(row) != 0) return false;
    if (tier_of(blocks, block_of(row)) != tier) return false;
    rank = eviction_rank(*static_cast<const volatile std::uint32_t*>(blocks.clock), blocks.used[number], count_of(row),
                         bonus);
    return true;
  }
};

// Of the bins from the last down, the one in which the wanted number is reached. All threads of one block.
__device__ void find_border(const std::uint32_t* bins, std::uint32_t wanted, std::uint32_t& border,
                            std::uint32_t& left) {
  __shared__ std::uint32_t sums[kThreads];
  constexpr std::uint32_t kPart = kBins / kThreads;
  const std::uint32_t top = kBins - threadIdx.x * kPart;  // thread 0 has the highest bins
  std::uint32_t sum = 0;
  for (std::uint32_t i = 1; i <= kPart; ++i) sum += *static_cast<const volatile std::uint32_t*>(bins + top - i);
  sums[threadIdx.x] = sum;
  __syncthreads();
  std::uint32_t above = 0;
  for (std::uint32_t i = 0; i < threadIdx.x; ++i) above += sums[i];
  if (threadIdx.x == kThreads - 1 && above + sum < wanted) {  // fewer than wanted: all of them
    border = 0;
    left = kUnlimited;
  }
  if (above < wanted && above + sum >= wanted) {
    std::uint32_t bin = top;
    while (above < wanted) {
      --bin;
      const std::uint32_t here = *static_cast<const volatile std::uint32_t*>(bins + bin);
      if (above + here >= wanted) break;
      above += here;
    }
    border = bin;
    left = wanted - above;
  }
}

template <Stage stage>
__global__ void __launch_bounds__(kThreads) blocks_rank(const Search search, std::uint32_t* found) {
  if (stage == Stage::kUpper && blockIdx.x == 0 && threadIdx.x == 0) *found = 0;
  Scratch& scratch = *search.scratch;
  constexpr int kStage = static_cast<int>(stage);
  std::uint32_t* bins = stage == Stage::kUpper ? scratch.upper : scratch.lower;
  const std::uint32_t border = stage == Stage::kUpper ? 0 : scratch.border[0];
  const std::uint32_t rows = search.blocks.row_pool.size;
  const std::uint64_t rounded = (std::uint64_t{rows} + kLanes - 1) / kLanes * kLanes;
  for (std::uint64_t i = blockIdx.x * kThreads + threadIdx.x; i < rounded; i += std::uint64_t{gridDim.x} * kThreads) {
    Row row{};
    std::uint32_t rank = 0, bin = kBins;
    if (i < rows && search.candidate(static_cast<std::uint32_t>(i), row, rank)) {
      if (stage == Stage::kUpper) bin = rank >> 16;
      if (stage == Stage::kLower && rank >> 16 == border) bin = rank & 0xFFFF;
    }
    // Most ranks share a few bins: one atomic for the lanes that do.
    const std::uint32_t same = __match_any_sync(kAllLanes, bin);
    if (bin != kBins && __ffs(static_cast<int>(same)) - 1 == static_cast<int>(threadIdx.x % kLanes)) {
      atomicAdd(bins + bin, static_cast<std::uint32_t>(__popc(same)));
    }
  }
  __shared__ bool last;
  fence();  // forbids that this block is counted as finished before its bins are
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&scratch.finished[kStage], 1) + 1 == gridDim.x;
  __syncthreads();
  if (!last) return;
  acquire_fence();  // forbids that bins are read before the other blocks are known to have finished
  std::uint32_t wanted = batch_count(search.want, search.max_count);
  if (stage == Stage::kLower) wanted = scratch.left[0];
  if (wanted == 0 || (stage == Stage::kLower && wanted == kUnlimited)) {
    if (threadIdx.x == 0) {
      scratch.border[kStage] = wanted == 0 ? kBins : 0;
      scratch.left[kStage] = wanted;
    }
    return;
  }
  find_border(bins, wanted, scratch.border[kStage], scratch.left[kStage]);
}

__global__ void __launch_bounds__(kThreads)
    blocks_collect(const Search search, std::uint64_t* handles, std::uint32_t* found) {
  Scratch& scratch = *search.scratch;
  const std::uint32_t upper = scratch.border[0], lower = scratch.border[1];
  const std::uint32_t wanted = batch_count(search.want, search.max_count), rows = search.blocks.row_pool.size;
  if (wanted == 0) return;
  for (std::uint64_t i = blockIdx.x * kThreads + threadIdx.x; i < rows; i += std::uint64_t{gridDim.x} * kThreads) {
    const auto number = static_cast<std::uint32_t>(i);
    Row row{};
    std::uint32_t rank = 0;
    if (!search.candidate(number, row, rank) || rank >> 16 < upper) continue;
    if (rank >> 16 == upper && (rank & 0xFFFF) < lower) continue;
    if (rank >> 16 == upper && (rank & 0xFFFF) == lower) {
      // At the border only as many as are left; ranks may have changed since they were counted.
      if (static_cast<std::int32_t>(atomicSub(&scratch.left[1], 1)) <= 0) continue;
    }
    const std::uint32_t at = atomicAdd(found, 1);
    if (at < wanted) handles[at] = handle_of(number, row);
    if (at >= wanted) atomicSub(found, 1);
  }
}

}  // namespace
}  // namespace tardis::gstore

extern "C" uint64_t tardis_gpu_blocks_scratch_bytes(void) { return sizeof(tardis::gstore::Scratch); }

extern "C" int tardis_gpu_blocks_candidates(const tardis_gpu_blocks* blocks, uint32_t tier, uint32_t bonus,
                                            const uint32_t* want, uint32_t max_count, uint64_t* handles,
                                            uint32_t* found, void* scratch, void* cuda_stream) {
  using namespace tardis::gstore;
  if (blocks == nullptr || tier >= TARDIS_GPU_TIERS || want == nullptr || max_count == 0 || max_count >= 1u << 31 ||
      handles == nullptr || found == nullptr || scratch == nullptr) {
    return cudaErrorInvalidValue;
  }
  const auto stream = static_cast<cudaStream_t>(cuda_stream);
  const cudaError_t result = cudaMemsetAsync(scratch, 0, sizeof(Scratch), stream);
  if (result != cudaSuccess) return result;
  const Search search = {*blocks, tier, bonus, want, max_count, static_cast<Scratch*>(scratch)};
  const std::uint32_t wanted = (blocks->row_pool.size - 1) / kThreads + 1;
  const dim3 grid(wanted < kCtas ? wanted : kCtas);
  blocks_rank<Stage::kUpper><<<grid, kThreads, 0, stream>>>(search, found);
  blocks_rank<Stage::kLower><<<grid, kThreads, 0, stream>>>(search, found);
  blocks_collect<<<grid, kThreads, 0, stream>>>(search, handles, found);
  return cudaGetLastError();
}
