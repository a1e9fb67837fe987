// SPDX-License-Identifier: Apache-2.0
// A warp for each queue pair runs its ring; the others of its CTA move bytes.
#include "gio/ring_kernel.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "gio/bulk_mover.cuh"
#include "gio/job_mover.cuh"
#include "gio/link_pacer.cuh"
#include "gio/ring.h"
#include "gio/ring_digests.cuh"
#include "gio/warp_lanes.cuh"

namespace tardis::gio {
namespace {

constexpr unsigned kMostCtas = 4;  // an SM each: more are not needed to fill the link
constexpr std::size_t kWorkAlignment = 128;

struct Launch {
  GrantedQueue queues[kMostQueues];
  IoControlBlock iocb;
  LinkTraffic traffic;
  std::uint32_t rings;
  std::uint32_t rings_per_cta;
  std::uint32_t work_bytes;  // shared memory of a ring
};

// Who carries bytes between bounce slots and their memory. Measured: lanes side by side move 4 KiB commands 1.6 times
// as fast, and lose up to 15 % from 16 KiB on. kDigested: as kParts, with warps that digest what passes.
enum class MoverKind { kParts, kJobs, kDigested };
constexpr std::uint32_t kMostJobBytes = 8 << 10;
constexpr std::uint64_t kMostDeadlineNs = 15'000'000'000;

// Shared memory that a launch may ask for: an SM's, less what the kernel has besides. The same for every launch: the
// limit belongs to the function, and another thread may be about to launch it with more.
constexpr std::size_t kBesides = 2 << 10, kMostSharedBytes = (227 << 10) - kBesides;

constexpr int kStoring = 3;  // stages of kParts and kDigested; the others are loading

template <MoverKind kind>
struct Shape {
  static constexpr int kDigestWarps = kind == MoverKind::kDigested ? 4 : 0;
  static constexpr unsigned kMovers = 2 + kDigestWarps;  // warps
  // Of a CTA. With digests 16 warps in all, so that each lane has the registers for its keys.
  static constexpr unsigned kMostRings = kind == MoverKind::kDigested ? 10 : 12;
  static constexpr unsigned kMostThreads = (kMostRings + kMovers) * WarpLanes::kWidth;
  using Stages = MoverRing<8, kDigestWarps>;
  static constexpr std::size_t kStaticBytes =
      kMostRings * (sizeof(MoverControl) + sizeof(MovedRing)) + sizeof(LoadedChunks) + sizeof(LinkGlance);
  static constexpr std::size_t kStageBytes = (sizeof(Stages) + kWorkAlignment - 1) / kWorkAlignment * kWorkAlignment;
};

// Warps of a CTA: its rings', then one that loads and one that stores for all of them, then those that digest.
template <MoverKind kind>
__global__ void __launch_bounds__(Shape<kind>::kMostThreads, 1) run_rings(const __grid_constant__ Launch launch) {
  using Stages = typename Shape<kind>::Stages;
  extern __shared__ __align__(kWorkAlignment) unsigned char memory[];
  __shared__ MoverControl controls[Shape<kind>::kMostRings];
  __shared__ MovedRing moved[Shape<kind>::kMostRings];
  __shared__ LoadedChunks loaded;
  __shared__ LinkGlance glance;
  Stages& stages = *reinterpret_cast<Stages*>(memory);
  const unsigned warp = threadIdx.x / WarpLanes::kWidth, first = blockIdx.x * launch.rings_per_cta;
  const unsigned rings = min(launch.rings_per_cta, launch.rings - first);  // of this CTA
  if (threadIdx.x < rings) {
    const GrantedQueue& queue = launch.queues[first + threadIdx.x];
    unsigned char* const at = memory + Shape<kind>::kStageBytes + threadIdx.x * launch.work_bytes;
    controls[threadIdx.x] = {0, 0};
    moved[threadIdx.x] = {&controls[threadIdx.x], &queue, RingWork::in(at, queue.commands, WarpLanes::kWidth)};
  }
  if (threadIdx.x == 0) {
    loaded = {0, 0};
    stages.init();
    LinkPacer::begin(launch.traffic, glance);
  }
  __syncthreads();
  if (warp < rings) {
    JobMover mover(controls[warp], moved[warp].work);
    Ring<WarpLanes, JobMover>(WarpLanes(), mover, launch.queues[first + warp], moved[warp].work)
        .run(launch.iocb, first + warp, launch.rings);
    mover.stop();
  } else if (warp == rings) {
    if constexpr (kind == MoverKind::kJobs) {
      JobLoader<Stages>(stages, moved, rings, launch.traffic, glance).run(loaded);
    } else {
      load_parts(stages, moved, rings, launch.traffic, glance);
    }
  } else if (warp == rings + 1) {
    if (threadIdx.x % WarpLanes::kWidth == 0) tell_host(launch.traffic);
    if constexpr (kind == MoverKind::kJobs) {
      store_jobs(stages, moved, loaded);
    } else {
      JobReport report{moved};
      store_chunks<kStoring>(stages, report);
    }
  } else if constexpr (kind == MoverKind::kDigested) {
    const int digesting = static_cast<int>(warp - rings) - 2;
    if (digesting >= Shape<kind>::kDigestWarps) return;  // of a CTA with fewer rings than others
    const auto keys = xxh3::BlockKeys::of(static_cast<int>(threadIdx.x) % kWarpLanes);
    digest_chunks(stages, digesting, keys, RingDigests(moved));
  }
}

__global__ void start_queues(const __grid_constant__ Launch launch) {
  const GrantedQueue& queue = launch.queues[blockIdx.x];
  if (threadIdx.x == 0) start_queue(queue);
}

bool copy_queues(const GrantedQueue* queues, std::uint32_t rings, std::uint32_t ctas, Launch& launch) {
  if (queues == nullptr || rings == 0 || rings > kMostQueues || ctas == 0 || ctas > kMostCtas) return false;
  std::size_t most = 0;
  for (std::uint32_t i = 0; i < rings; ++i) {
    launch.queues[i] = queues[i];
    if (queues[i].state == nullptr || queues[i].uses == nullptr || queues[i].commands == 0) return false;
    most = std::max(most, RingWork::bytes(queues[i].commands, WarpLanes::kWidth));
  }
  launch.rings = rings;
  launch.rings_per_cta = (rings + ctas - 1) / ctas;
  launch.work_bytes = static_cast<std::uint32_t>((most + kWorkAlignment - 1) / kWorkAlignment * kWorkAlignment);
  return true;
}

template <MoverKind kind>
int enqueue(const Launch& launch, void* cuda_stream) {
  if (launch.rings_per_cta > Shape<kind>::kMostRings) return cudaErrorInvalidValue;
  static_assert(Shape<kind>::kStaticBytes + (1 << 10) <= kBesides,
                "with its alignment, and 1 KiB that is the system's");
  const std::uint64_t bytes = Shape<kind>::kStageBytes + std::uint64_t{launch.rings_per_cta} * launch.work_bytes;
  if (bytes > kMostSharedBytes) return cudaErrorInvalidValue;
  const cudaError_t sized = cudaFuncSetAttribute(run_rings<kind>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(kMostSharedBytes));
  if (sized != cudaSuccess) return sized;
  const std::uint32_t ctas = (launch.rings + launch.rings_per_cta - 1) / launch.rings_per_cta;
  const std::uint32_t threads = (launch.rings_per_cta + Shape<kind>::kMovers) * WarpLanes::kWidth;
  run_rings<kind><<<ctas, threads, bytes, static_cast<cudaStream_t>(cuda_stream)>>>(launch);
  return cudaGetLastError();
}

}  // namespace
}  // namespace tardis::gio

using tardis::gio::GrantedQueue;
using tardis::gio::IoControlBlock;

int tardis_gpu_gio_load() {
  using namespace tardis::gio;
  cudaFuncAttributes attributes;
  cudaError_t result = cudaFuncGetAttributes(&attributes, start_queues);
  if (result == cudaSuccess) result = cudaFuncGetAttributes(&attributes, run_rings<MoverKind::kParts>);
  if (result == cudaSuccess) result = cudaFuncGetAttributes(&attributes, run_rings<MoverKind::kJobs>);
  if (result == cudaSuccess) result = cudaFuncGetAttributes(&attributes, run_rings<MoverKind::kDigested>);
  return result;
}

int tardis_gpu_gio_start_queues(const GrantedQueue* queues, std::uint32_t rings, void* cuda_stream) {
  tardis::gio::Launch launch{};
  if (!tardis::gio::copy_queues(queues, rings, tardis::gio::kMostCtas, launch)) return cudaErrorInvalidValue;
  tardis::gio::start_queues<<<rings, 32, 0, static_cast<cudaStream_t>(cuda_stream)>>>(launch);
  return cudaGetLastError();
}

int tardis_gpu_gio_clear(const IoControlBlock* iocb, void* cuda_stream) {
  if (iocb == nullptr) return cudaErrorInvalidValue;
  return cudaMemsetAsync(iocb->flag, 0, sizeof(std::uint32_t), static_cast<cudaStream_t>(cuda_stream));
}

int tardis_gpu_gio_run(const GrantedQueue* queues, std::uint32_t rings, const IoControlBlock* iocb, std::uint32_t ctas,
                       void* cuda_stream) {
  const tardis_gpu_link_traffic nobody{};
  return tardis_gpu_gio_run_in_class(queues, rings, iocb, ctas, &nobody, cuda_stream);
}

int tardis_gpu_gio_run_in_class(const GrantedQueue* queues, std::uint32_t rings, const IoControlBlock* iocb,
                                std::uint32_t ctas, const tardis_gpu_link_traffic* traffic, void* cuda_stream) {
  using namespace tardis::gio;
  Launch launch{};
  if (iocb == nullptr || !is_valid(traffic) || traffic->in_flight != 0 || iocb->deadline_ns > kMostDeadlineNs ||
      !copy_queues(queues, rings, ctas, launch)) {
    return cudaErrorInvalidValue;
  }
  launch.iocb = *iocb;
  launch.traffic = LinkTraffic::of(*traffic);
  if (iocb->digested != 0) return enqueue<MoverKind::kDigested>(launch, cuda_stream);
  return queues->slot_bytes <= kMostJobBytes ? enqueue<MoverKind::kJobs>(launch, cuda_stream)
                                             : enqueue<MoverKind::kParts>(launch, cuda_stream);
}
