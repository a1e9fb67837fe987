// SPDX-License-Identifier: Apache-2.0
// Lookup of a batch. A warp takes a tile of keys: its lanes load the keys side by side, read one bucket after the other
// together (a lane an entry, several buckets in flight), and then each lane proves its own key's record.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "gstore/device_warp.cuh"
#include "gstore/index_reader.h"

namespace tardis::gstore {
namespace {

constexpr int kTile = 32;  // keys of a warp at a time, at most
constexpr std::uint32_t kMiddleTile = 8;
constexpr std::uint32_t kSmallestTile = 4;   // of a small batch, so that it spreads over many warps
constexpr int kBucketsInFlight = 8;          // of a warp
constexpr int kPieces = 2;                   // of 16 bytes, of a key and of an answer
constexpr std::uint32_t kMaxCtas = 132 * 4;  // what is resident at once

struct Probe {
  std::uint32_t candidates = 0;  // lanes of the bucket whose entries may be the key's
  bool overflow = false;
  std::uint32_t seen = 0;  // low half of the first candidate's word
};

// All lanes: what the bucket that lane `of` asks for says, put into that lane's probe.
template <int n>
__device__ __forceinline__ void probe_buckets(const tardis_gpu_index& index, std::uint32_t bucket, std::uint32_t tag,
                                              const int (&of)[n], Probe& probe) {
  const int self = static_cast<int>(threadIdx.x) % kLanes;
  std::uint64_t words[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    words[i] = load(bucket_words(index, __shfl_sync(kAllLanes, bucket, of[i])) + self);
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const std::uint32_t its_tag = __shfl_sync(kAllLanes, tag, of[i]);
    const bool hit = self == kHeaderLane ? has_overflow(words[i]) : leads_to(words[i], its_tag);
    const std::uint32_t mask = __ballot_sync(kAllLanes, hit);
    const std::uint32_t candidates = mask & kEntryLanes;
    const int first = candidates != 0 ? __ffs(static_cast<int>(candidates)) - 1 : 0;
    const std::uint32_t seen = __shfl_sync(kAllLanes, static_cast<std::uint32_t>(words[i]), first);
    if (self == of[i]) probe = {candidates, (mask & ~kEntryLanes) != 0, seen};
  }
}

__device__ __forceinline__ Found prove(const tardis_gpu_index& index, std::uint32_t bucket, const Probe& probe,
                                       std::uint32_t tag, const Key& key, std::uint32_t space,
                                       tardis_gpu_index_answer& answer) {
  Found found = Found::kMiss;
  std::uint64_t seen = std::uint64_t{tag} << 32 | probe.seen;
  for (std::uint32_t rest = probe.candidates; rest != 0;) {
    const int lane = __ffs(static_cast<int>(rest)) - 1;
    const std::uint64_t* word = bucket_words(index, bucket) + lane;
    const Found its = examine(word, record_words(index, bucket, lane), seen, tag, key, space, answer,
                              patience_of(index, Deadline::kReaderPatience));
    if (its == Found::kFound) return its;
    if (its == Found::kUnknown) found = its;
    rest &= rest - 1;
    if (rest != 0) {
      seen = load(bucket_words(index, bucket) + __ffs(static_cast<int>(rest)) - 1);
      acquire_fence();  // forbids that the record is read before the word that leads to it
    }
  }
  return found;
}

template <int tile>
constexpr std::uint32_t kPieceRounds = (tile * kPieces + kLanes - 1) / kLanes;

// Keys from `base` on into a warp's shared memory. Whole lines a request: host memory is read over the link once, and
// no cache would join two halves.
template <int tile>
__device__ __forceinline__ void stage_keys(const ulonglong2* keys, std::uint32_t base, std::uint32_t n,
                                           ulonglong2* staged) {
  const ulonglong2* from = keys + std::size_t{base} * kPieces;
#pragma unroll
  for (std::uint32_t i = 0; i < kPieceRounds<tile>; ++i) {
    const std::uint32_t piece = threadIdx.x % kLanes + i * kLanes;
    if (piece < n * kPieces) staged[piece] = __ldcg(from + piece);
  }
  __syncwarp();
}

// Answers to n <= tile <= kTile staged keys, the first of which is number `base`.
template <int tile>
__device__ __forceinline__ void answer_tile(const tardis_gpu_index& index, std::uint32_t base, std::uint32_t n,
                                            std::uint32_t space, tardis_gpu_index_answer* answers, ulonglong2* staged,
                                            BatchTotals& totals) {
  const std::uint32_t self = threadIdx.x % kLanes;
  Key key{};
  Place place{};
  const bool asks = self < n;
  if (asks) {
    const ulonglong2 low = staged[self * kPieces], high = staged[self * kPieces + 1];
    key = {{low.x, low.y, high.x, high.y}};
    place = place_of(key, space, index.buckets);
  }

  Probe probe, second_probe;
  constexpr int kStep = tile < kBucketsInFlight ? tile : kBucketsInFlight;
  // In a small batch nobody waits for memory but this warp: both buckets at once.
  constexpr bool kBoth = tile == kSmallestTile;
#pragma unroll 1
  for (int first = 0; first < static_cast<int>(n); first += kStep) {
    int of[kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i) of[i] = first + i;  // a lane without a key asks for bucket 0
    probe_buckets<kStep>(index, place.first, place.tag, of, probe);
    if (kBoth) probe_buckets<kStep>(index, place.second, place.tag, of, second_probe);
  }
  acquire_fence();  // forbids that a record is read before the word that leads to it
  tardis_gpu_index_answer answer = miss();
  Found found = Found::kMiss;
  if (asks) found = prove(index, place.first, probe, place.tag, key, space, answer);

  const bool again = asks && found != Found::kFound && probe.overflow;
  std::uint32_t pending = __ballot_sync(kAllLanes, again);
  if (pending != 0) {
    while (!kBoth && pending != 0) {
      int of[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of[i] = pending != 0 ? __ffs(static_cast<int>(pending)) - 1 : of[0];
        pending &= pending - 1;
      }
      probe_buckets<4>(index, place.second, place.tag, of, second_probe);
    }
    if (!kBoth) acquire_fence();  // forbids that a record is read before the word that leads to it
    if (again) {
      const Found second = prove(index, place.second, second_probe, place.tag, key, space, answer);
      if (second != Found::kMiss) found = second;
    }
  }
  if (found == Found::kUnknown) answer.status = static_cast<std::uint32_t>(found);

  if (asks) {
    staged[self * kPieces] = make_ulonglong2(answer.location, answer.generation);
    staged[self * kPieces + 1] =
        make_ulonglong2(answer.root, std::uint64_t{answer.status} << 32 | answer.payload_bytes);
  }
  __syncwarp();  // forbids that an answer is copied out before its lane has put it here
  const std::uint32_t hits = __ballot_sync(kAllLanes, found == Found::kFound);
  const std::uint32_t unknown = __ballot_sync(kAllLanes, found == Found::kUnknown);
  auto* to = reinterpret_cast<ulonglong2*>(answers + base);
#pragma unroll
  for (std::uint32_t i = 0; i < kPieceRounds<tile>; ++i) {
    const std::uint32_t piece = self + i * kLanes;
    if (piece < n * kPieces) to[piece] = staged[piece];
  }
  __syncwarp();  // forbids that the next tile's keys are put here before this one's answers are copied out
  if (self == 0) {
    const auto all = static_cast<std::uint32_t>(__popc(hits)), lost = static_cast<std::uint32_t>(__popc(unknown));
    atomicAdd(&totals.by_status[TARDIS_GPU_INDEX_FOUND], all);
    atomicAdd(&totals.by_status[TARDIS_GPU_INDEX_MISS], n - all - lost);
    if (lost != 0) atomicAdd(&totals.by_status[TARDIS_GPU_INDEX_UNKNOWN], lost);
    if (all < n) atomicMin(&totals.run, base + static_cast<std::uint32_t>(__ffs(static_cast<int>(~hits))) - 1);
  }
}

// A tile a warp, whatever the count is: the keys are on their way while it is read.
__global__ void __launch_bounds__(kThreads, 3)
    lookup_small(const __grid_constant__ tardis_gpu_index index, const ulonglong2* keys,
                 const std::uint32_t* count_memory, std::uint32_t max_count, std::uint32_t space,
                 tardis_gpu_index_answer* answers, tardis_gpu_ticket* ticket, tardis_gpu_report* report) {
  __shared__ ulonglong2 staged[kWarpsPerCta][kSmallestTile * kPieces];
  __shared__ BatchTotals totals;
  begin_batch(totals);
  const std::uint32_t count = batch_count(count_memory, max_count);
  const std::uint32_t warp = threadIdx.x / kLanes;
  const std::uint32_t base = (blockIdx.x * kWarpsPerCta + warp) * kSmallestTile;
  const std::uint32_t room = base < max_count ? max_count - base : 0, n = base < count ? count - base : 0;
  stage_keys<kSmallestTile>(keys, base, room < kSmallestTile ? room : kSmallestTile, staged[warp]);
  if (n > 0) {
    answer_tile<kSmallestTile>(index, base, n < kSmallestTile ? n : kSmallestTile, space, answers, staged[warp],
                               totals);
  }
  end_batch(totals, count, ticket, report);
}

__global__ void __launch_bounds__(kThreads, 4)
    lookup_large(const __grid_constant__ tardis_gpu_index index, const ulonglong2* keys,
                 const std::uint32_t* count_memory, std::uint32_t max_count, std::uint32_t space,
                 tardis_gpu_index_answer* answers, tardis_gpu_ticket* ticket, tardis_gpu_report* report) {
  __shared__ ulonglong2 staged[kWarpsPerCta][kTile * kPieces];
  __shared__ BatchTotals totals;
  begin_batch(totals);
  const std::uint32_t count = batch_count(count_memory, max_count);
  const std::uint32_t warp = threadIdx.x / kLanes;
  const std::uint32_t self = blockIdx.x * kWarpsPerCta + warp, warps = gridDim.x * kWarpsPerCta;
  const auto walk = [&](auto size) {
    constexpr int tile = decltype(size)::value;
    for (std::uint64_t base = std::uint64_t{self} * tile; base < count; base += std::uint64_t{warps} * tile) {
      const auto first = static_cast<std::uint32_t>(base), n = count - first < tile ? count - first : tile;
      stage_keys<tile>(keys, first, n, staged[warp]);
      answer_tile<tile>(index, first, n, space, answers, staged[warp], totals);
    }
  };
  if (count <= std::uint64_t{warps} * kMiddleTile) {
    walk(std::integral_constant<int, kMiddleTile>());
  } else {
    walk(std::integral_constant<int, kTile>());
  }
  end_batch(totals, count, ticket, report);
}

}  // namespace
}  // namespace tardis::gstore

extern "C" int tardis_gpu_index_lookup(const tardis_gpu_index* index, const void* keys, const uint32_t* count,
                                       uint32_t max_count, uint16_t space, tardis_gpu_index_answer* answers,
                                       tardis_gpu_ticket* ticket, tardis_gpu_report* report, uint32_t ctas,
                                       void* cuda_stream) {
  using namespace tardis::gstore;
  if (index == nullptr || keys == nullptr || count == nullptr || answers == nullptr || ticket == nullptr ||
      index->words == nullptr || index->buckets < 2 || max_count == 0) {
    return cudaErrorInvalidValue;
  }
  const std::uint32_t small = (max_count - 1) / (kWarpsPerCta * kSmallestTile) + 1, most = ctas == 0 ? kMaxCtas : ctas;
  const auto kernel = small <= most ? lookup_small : lookup_large;
  kernel<<<dim3(std::min(small, most)), kThreads, 0, static_cast<cudaStream_t>(cuda_stream)>>>(
      *index, static_cast<const ulonglong2*>(keys), count, max_count, space, answers, ticket, report);
  return cudaGetLastError();
}

extern "C" int tardis_gpu_index_load_lookup(void) {
  cudaFuncAttributes attributes;
  const cudaError_t small = cudaFuncGetAttributes(&attributes, tardis::gstore::lookup_small);
  return small == cudaSuccess ? cudaFuncGetAttributes(&attributes, tardis::gstore::lookup_large) : small;
}
