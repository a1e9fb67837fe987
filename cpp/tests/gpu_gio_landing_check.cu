// SPDX-License-Identifier: Apache-2.0
// On a GPU: the movers' device functions in a kernel of another kind (gio/mover.cuh), which tells the host of each part
// as it lands, while it runs. The host lets it load part after part and compares each when it is told, from pinned
// memory directly and from HBM through a copy engine: what was told has landed, and nothing waits for what comes next.
// Exit status 0: right; 1: not, or a CUDA error; 77: no GPU here.
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "gio/chunk_digests.cuh"
#include "gio/mover.cuh"
#include "gpu_support.h"

namespace {

using namespace tardis::gio;
using namespace tardis::gpu_test;

constexpr std::uint32_t kParts = 300;
constexpr std::uint64_t kKernelPatience = 5'000'000'000;  // ns without a word from the host
constexpr std::chrono::seconds kHostPatience{5};
constexpr int kDigestWarps = 2;
using Ring = MoverRing<6, kDigestWarps>;
constexpr int kPending = 3;

// Pinned words that host and kernel share.
struct Shared {
  volatile std::uint32_t allowed;         // parts that may be loaded
  volatile std::uint32_t landed[kParts];  // chunks
  volatile std::uint32_t gave_up;
};

struct Tell {
  static constexpr bool kWanted = true;
  Shared* shared;
  __device__ void landed(const Stage& stage) {
    __threadfence_system();  // forbids that the host sees the count before the bytes
    shared->landed[stage.part] = shared->landed[stage.part] + 1;
  }
};

__global__ void __launch_bounds__((2 + kDigestWarps) * kWarpLanes, 1)
    land_and_tell(const Part* parts, Shared* shared, const ChunkDigests digests) {
  extern __shared__ __align__(128) unsigned char memory[];
  Ring& ring = *reinterpret_cast<Ring*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  if (warp == 0) {
    Loader<Ring> loader(ring);
    for (std::uint32_t i = 0; i < kParts; ++i) {
      const std::uint64_t start = nanoseconds();
      bool late = false;
      while (shared->allowed <= i && !late) late = nanoseconds() - start > kKernelPatience;
      if (__any_sync(tardis::xxh3::kAllLanes, late)) {
        if (lane == 0) shared->gave_up = 1;
        break;
      }
      __threadfence_system();  // forbids that the source is read before the host's word was
      fence_proxy_async();     // ... by the copy engine
      const Part part = parts[i];
      const auto chunks = static_cast<std::uint32_t>(part.chunks());
      for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) loader.load(chunk_of(part, chunk), i, chunk, chunks);
    }
    loader.finish();
  } else if (warp == 1) {
    Tell tell{shared};
    store_chunks<kPending>(ring, tell);
  } else {
    const auto keys = tardis::xxh3::BlockKeys::of(lane);
    digest_chunks(ring, warp - 2, keys, digests);
  }
}

int check_direction(Where from, Where to, std::mt19937_64& random) {
  constexpr std::size_t kPlace = 256 << 10;
  Memory source(from, kParts * kPlace), destination(to, kParts * kPlace), shared_words(Where::kPinned, sizeof(Shared)),
      part_list(Where::kDevice, kParts * sizeof(Part)), found(Where::kPinned, kPlace);
  constexpr std::uint32_t kChunks = kPlace / kChunkBytes;
  Memory chunk_digests(Where::kDevice, kParts * kChunks * 8);
  std::vector<unsigned char> bytes(source.size()), poison(kPlace);
  fill_random(bytes.data(), bytes.size(), random);
  source.write(bytes.data(), bytes.size());
  destination.fill(0xA5);
  std::fill(poison.begin(), poison.end(), 0xA5);
  chunk_digests.fill(0xA5);
  std::vector<Part> parts;
  for (std::uint32_t i = 0; i < kParts; ++i) {
    // K and V change places; some sizes are no multiple of 16.
    const std::uint64_t at = i * kPlace, unit = i % 5 == 0 ? 1 : 16;
    const std::uint64_t first = unit * (1 + random() % (100'000 / 16)), second = unit * (random() % (100'000 / 16));
    parts.push_back({{{source.address() + at, destination.address() + at + second, first},
                      {source.address() + at + first, destination.address() + at, second}}});
  }
  part_list.write(parts.data(), part_list.size());
  auto* const shared = shared_words.data<Shared>();
  std::memset(shared_words.data(), 0, sizeof(Shared));
  const ChunkDigests digests{chunk_digests.data<std::uint64_t>(), kChunks};
  check(cudaFuncSetAttribute(land_and_tell, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Ring)), "attribute");
  Stream stream, copies;
  check(cudaDeviceSynchronize(), "preparation");
  land_and_tell<<<1, (2 + kDigestWarps) * kWarpLanes, sizeof(Ring), stream>>>(part_list.data<Part>(), shared, digests);
  check(cudaGetLastError(), "land_and_tell");

  int wrong = 0;
  for (std::uint32_t i = 0; i < kParts && wrong == 0;) {
    const auto step = static_cast<std::uint32_t>(1 + random() % 7);
    const std::uint32_t end = std::min(kParts, i + step);
    __atomic_store_n(&shared->allowed, end, __ATOMIC_RELEASE);
    for (; i < end && wrong == 0; ++i) {
      const auto deadline = std::chrono::steady_clock::now() + kHostPatience;
      while (__atomic_load_n(&shared->landed[i], __ATOMIC_ACQUIRE) != parts[i].chunks()) {
        if (std::chrono::steady_clock::now() > deadline) {
          std::fprintf(stderr, "part %u: %u of %llu chunks were told of\n", i, shared->landed[i],
                       static_cast<unsigned long long>(parts[i].chunks()));
          ++wrong;
          break;
        }
      }
      const unsigned char* landed = destination.data() + i * kPlace;
      if (to == Where::kDevice) {
        check(cudaMemcpyAsync(found.data(), landed, kPlace, cudaMemcpyDeviceToHost, copies), "cudaMemcpyAsync");
        copies.wait();
        landed = found.data();
      }
      const std::uint64_t first = parts[i].pieces[0].bytes, second = parts[i].pieces[1].bytes;
      const unsigned char* expected = bytes.data() + i * kPlace;
      wrong += std::memcmp(landed + second, expected, first) != 0;
      wrong += std::memcmp(landed, expected + first, second) != 0;
      wrong += std::memcmp(landed + first + second, poison.data(), kPlace - first - second) != 0;
    }
  }
  shared->allowed = kParts;
  check(cudaDeviceSynchronize(), "land_and_tell");
  wrong += shared->gave_up != 0;
  std::vector<std::uint64_t> made(kParts * kChunks);
  chunk_digests.read(made.data(), chunk_digests.size());
  for (std::uint32_t i = 0; i < kParts && wrong == 0; ++i) {
    for (std::uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      const std::uint64_t at = std::uint64_t{chunk} * kChunkBytes, end = parts[i].bytes();
      const std::uint64_t expected =
          at >= end ? 0xA5A5A5A5A5A5A5A5
                    : tardis::xxh3_64(bytes.data() + i * kPlace + at, std::min<std::uint64_t>(kChunkBytes, end - at));
      wrong += made[i * kChunks + chunk] != expected;
    }
  }
  std::printf("%s -> %s: %u parts told of while the kernel ran: %s\n", name_of(from), name_of(to), kParts,
              wrong == 0 ? "right" : "WRONG");
  return wrong;
}

}  // namespace

int main() {
  if (!has_gpu()) return kSkipped;
  std::mt19937_64 random(fresh_seed());
  int wrong = check_direction(Where::kPinned, Where::kDevice, random);
  wrong += check_direction(Where::kDevice, Where::kPinned, random);
  return wrong == 0 ? 0 : 1;
}
