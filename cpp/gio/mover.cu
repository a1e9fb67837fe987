// SPDX-License-Identifier: Apache-2.0
// The mover as a kernel of its own: every CTA walks through all pieces and carries its share of their chunks.
#include "gio/mover.h"

#include <cuda_runtime.h>

#include "gio/chunk_digests.cuh"
#include "gio/link_pacer.cuh"
#include "gio/mover.cuh"
#include "gio/part_digests.h"
#include "gio/programmatic.cuh"
#include "gio/read_part.cuh"

namespace tardis::gio {
namespace {

constexpr int kStages = 12;
constexpr int kStoring = 4;                 // stages; the rest is loading, being digested, or free
constexpr std::uint32_t kFewestStages = 3;  // where fewer are used, one of them storing

enum class Digests { kNo, kYes };

template <Digests digests>
struct Shape {
  static constexpr int kDigestWarps = digests == Digests::kYes ? 6 : 0;
  static constexpr int kThreads = (2 + kDigestWarps) * kWarpLanes;
  using Ring = MoverRing<kStages, kDigestWarps>;
  static_assert(sizeof(Ring) <= 227 * 1024, "shared memory of an SM");
};

enum Warp : int { kLoadWarp, kStoreWarp, kFirstDigestWarp };

// The first lane whose value is greater, of values that do not fall from lane to lane; one is.
__device__ __forceinline__ int first_greater(std::uint64_t of_lane, std::uint64_t value) {
  int lane = 0;
#pragma unroll
  for (int step = kWarpLanes / 2; step > 0; step /= 2) {
    if (__shfl_sync(xxh3::kAllLanes, of_lane, lane + step - 1) <= value) lane += step;
  }
  return lane;
}

// The loading warp of a CTA. It takes 32 parts at a time, one a lane, reading the next while these are loaded, and then
// 32 of its chunks of these at a time, one a lane again.
template <class Ring>
__device__ void load_owned_chunks(Ring& ring, const Piece* pieces, std::uint32_t parts, std::uint32_t pieces_per_part,
                                  const LinkTraffic& traffic, LinkGlance& glance, std::uint32_t stages) {
  Loader<Ring> loader(ring, stages);
  LinkPacer pacer(traffic, glance);
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  std::uint64_t before = 0;  // chunks of the parts that were passed
  std::uint64_t round = 0;
  Part next = read_part(pieces, lane, parts, pieces_per_part);
  for (std::uint64_t first = 0; first < parts; first += kWarpLanes) {
    const Part mine = next;
    const std::uint64_t ahead = first + kWarpLanes + lane;
    next = read_part(pieces, ahead < parts ? static_cast<std::uint32_t>(ahead) : parts, parts, pieces_per_part);
    const std::uint64_t chunks = mine.chunks();
    std::uint64_t end = chunks;  // with those of the lower lanes
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const std::uint64_t lower = __shfl_up_sync(xxh3::kAllLanes, end, distance);
      if (lane >= distance) end += lower;
    }
    end += before;  // now the number of the first chunk behind this lane's part
    const std::uint64_t batch_end = __shfl_sync(xxh3::kAllLanes, end, kWarpLanes - 1);
    for (;;) {
      const std::uint64_t number = owned_chunk(round + lane, blockIdx.x, gridDim.x);
      const int there = __popc(__ballot_sync(xxh3::kAllLanes, number < batch_end));  // those of the first lanes
      const int count = min(there, pacer.most_chunks());
      if (count == 0) break;
      const int owner = first_greater(end, number < batch_end ? number : batch_end - 1);
      const std::uint64_t part_chunks = __shfl_sync(xxh3::kAllLanes, chunks, owner);
      const std::uint64_t part_end = __shfl_sync(xxh3::kAllLanes, end, owner);
      Part part = {};
      part.pieces[0] = piece_of_lane(mine.pieces[0], owner);
      if (pieces_per_part > 1) part.pieces[1] = piece_of_lane(mine.pieces[1], owner);
      const std::uint64_t chunk = number - (part_end - part_chunks);
      const Chunk loaded = chunk_of(part, chunk);
      pacer.before(__reduce_add_sync(xxh3::kAllLanes, lane < count ? loaded.bytes : 0));
      loader.load_each(count, loaded, static_cast<std::uint32_t>(first) + owner, static_cast<std::uint32_t>(chunk),
                       static_cast<std::uint32_t>(part_chunks));
      round += count;
    }
    before = batch_end;
  }
  loader.finish();
  pacer.end();
}

template <Digests digests>
__global__ void __launch_bounds__(Shape<digests>::kThreads, 1)
    move_pieces(const tardis_gpu_move_args move, const tardis_gpu_digest_args digest_args, const LinkTraffic traffic) {
  using Ring = typename Shape<digests>::Ring;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ LinkGlance glance;
  Ring& ring = *reinterpret_cast<Ring*>(shared_memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const std::uint32_t stages = digests == Digests::kNo && traffic.in_flight != 0 ? traffic.in_flight : kStages;
  if (threadIdx.x == 0) {
    ring.init();
    LinkPacer::begin(traffic, glance);
  }
  __syncthreads();

  if (warp == kLoadWarp) {
    const std::uint32_t pieces_per_part = digests == Digests::kYes ? digest_args.pieces_per_part : 1;
    load_owned_chunks(ring, move.pieces, parts_of(move, pieces_per_part), pieces_per_part, traffic, glance, stages);
    if constexpr (digests == Digests::kYes) let_next_kernel_start();
  } else if (warp == kStoreWarp) {
    if (threadIdx.x % kWarpLanes == 0) tell_host(traffic);
    NoReport report;
    if (digests == Digests::kYes || stages == kStages) {
      store_chunks<kStoring>(ring, report);
    } else {
      store_chunks<1>(ring, report, stages);
    }
  } else if constexpr (digests == Digests::kYes) {
    const auto keys = xxh3::BlockKeys::of(static_cast<int>(threadIdx.x) % kWarpLanes);
    const ChunkDigests sink{digest_args.chunk_digests, digest_args.chunks_per_part};
    digest_chunks(ring, warp - kFirstDigestWarp, keys, sink);
  }
}

template <Digests digests>
cudaError_t prepare() {
  return cudaFuncSetAttribute(move_pieces<digests>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              sizeof(typename Shape<digests>::Ring));
}

bool is_valid(const tardis_gpu_move_args* move) {
  return move != nullptr && move->pieces != nullptr && move->piece_count != nullptr && move->ctas >= 1 &&
         move->ctas <= TARDIS_GPU_MAX_MOVER_CTAS;
}

bool is_valid(const tardis_gpu_digest_args* digests) {
  return digests != nullptr && (digests->pieces_per_part == 1 || digests->pieces_per_part == 2) &&
         digests->chunks_per_part != 0 && digests->chunk_digests != nullptr && digests->status != nullptr &&
         digests->errors != nullptr;
}

template <Digests digests>
int enqueue(const tardis_gpu_move_args& move, const tardis_gpu_digest_args& digest_args, const LinkTraffic& traffic,
            void* stream) {
  if (const cudaError_t error = prepare<digests>(); error != cudaSuccess) return error;
  using S = Shape<digests>;
  move_pieces<digests><<<move.ctas, S::kThreads, sizeof(typename S::Ring), static_cast<cudaStream_t>(stream)>>>(
      move, digest_args, traffic);
  return cudaGetLastError();
}

int move_digested(const tardis_gpu_move_args& move, const tardis_gpu_digest_args& digests, const LinkTraffic& traffic,
                  cudaStream_t stream) {
  if (const int error = enqueue<Digests::kYes>(move, digests, traffic, stream); error != cudaSuccess) return error;
  return enqueue_part_digests(move, digests, stream);
}

}  // namespace
}  // namespace tardis::gio

using namespace tardis::gio;

extern "C" int tardis_gpu_mover_prepare(void) {
  cudaError_t error = prepare<Digests::kNo>();
  if (error == cudaSuccess) error = prepare<Digests::kYes>();
  return error != cudaSuccess ? error : prepare_part_digests();
}

extern "C" int tardis_gpu_move(const tardis_gpu_move_args* move, void* stream) {
  return is_valid(move) ? enqueue<Digests::kNo>(*move, {}, {}, stream) : cudaErrorInvalidValue;
}

extern "C" int tardis_gpu_move_digested(const tardis_gpu_move_args* move, const tardis_gpu_digest_args* digests,
                                        void* stream) {
  if (!is_valid(move) || !is_valid(digests)) return cudaErrorInvalidValue;
  return move_digested(*move, *digests, {}, static_cast<cudaStream_t>(stream));
}

extern "C" int tardis_gpu_move_in_class(const tardis_gpu_move_args* move, const tardis_gpu_link_traffic* traffic,
                                        void* stream) {
  if (!is_valid(move) || !is_valid(traffic)) return cudaErrorInvalidValue;
  if (traffic->in_flight != 0 && (traffic->in_flight < kFewestStages || traffic->in_flight > kStages)) {
    return cudaErrorInvalidValue;
  }
  return enqueue<Digests::kNo>(*move, {}, LinkTraffic::of(*traffic), stream);
}

extern "C" int tardis_gpu_move_digested_in_class(const tardis_gpu_move_args* move,
                                                 const tardis_gpu_digest_args* digests,
                                                 const tardis_gpu_link_traffic* traffic, void* stream) {
  if (!is_valid(move) || !is_valid(digests) || !is_valid(traffic) || traffic->in_flight != 0) {
    return cudaErrorInvalidValue;
  }
  return move_digested(*move, *digests, LinkTraffic::of(*traffic), static_cast<cudaStream_t>(stream));
}
