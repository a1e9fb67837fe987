// SPDX-License-Identifier: Apache-2.0
// On a GPU: tardis_gpu_chunk_digests against the library, then its speed on device and on mapped host memory.
// Exit status 0: equal; 1: not, or a CUDA error; 77: no GPU here.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "base/checksum.h"
#include "gpu/xxh3_digest.h"
#include "gpu_support.h"

namespace {

using tardis::gpu_test::check;

constexpr std::size_t kChunk = 16 << 10;

struct Chunk {
  std::size_t start;
  std::size_t bytes;
};

// Device arrays of one call.
struct Call {
  const void** pieces = nullptr;
  std::uint64_t* bytes = nullptr;
  std::uint64_t* digests = nullptr;
  std::uint32_t chunks = 0;

  Call(const unsigned char* base, const std::vector<Chunk>& list) : chunks(static_cast<std::uint32_t>(list.size())) {
    std::vector<const void*> addresses;
    std::vector<std::uint64_t> lengths;
    for (const Chunk& chunk : list) {
      addresses.push_back(base + chunk.start);
      lengths.push_back(chunk.bytes);
    }
    check(cudaMalloc(&pieces, chunks * sizeof(void*)), "cudaMalloc");
    check(cudaMalloc(&bytes, chunks * sizeof(std::uint64_t)), "cudaMalloc");
    check(cudaMalloc(&digests, chunks * sizeof(std::uint64_t)), "cudaMalloc");
    check(cudaMemcpy(pieces, addresses.data(), chunks * sizeof(void*), cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaMemcpy(bytes, lengths.data(), chunks * sizeof(std::uint64_t), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~Call() {
    cudaFree(pieces);
    cudaFree(bytes);
    cudaFree(digests);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void enqueue(cudaStream_t stream) const {
    check(tardis_gpu_chunk_digests(pieces, bytes, digests, chunks, stream), "tardis_gpu_chunk_digests");
  }
  std::vector<std::uint64_t> results() const {
    std::vector<std::uint64_t> out(chunks);
    check(cudaMemcpy(out.data(), digests, chunks * sizeof(std::uint64_t), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return out;
  }
};

int compare(const char* where, const unsigned char* base, const unsigned char* host, const std::vector<Chunk>& list) {
  const Call call(base, list);
  call.enqueue(nullptr);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const auto digests = call.results();
  int wrong = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::uint64_t expected = tardis::xxh3_64(host + list[i].start, list[i].bytes);
    if (digests[i] == expected) continue;
    if (wrong++ < 5) {
      std::fprintf(stderr, "%s, %zu bytes at +%zu: expected %016llx, found %016llx\n", where, list[i].bytes,
                   list[i].start, static_cast<unsigned long long>(expected),
                   static_cast<unsigned long long>(digests[i]));
    }
  }
  std::printf("%s: %zu chunks, %d wrong\n", where, list.size(), wrong);
  return wrong;
}

void measure(const char* where, const unsigned char* base, std::size_t bytes) {
  std::vector<Chunk> list;
  for (std::size_t at = 0; at < bytes; at += kChunk) list.push_back({at, kChunk});
  const Call call(base, list);
  cudaEvent_t start;
  cudaEvent_t end;
  check(cudaEventCreate(&start), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  call.enqueue(nullptr);
  float best = 0;
  for (int round = 0; round < 5; ++round) {
    check(cudaEventRecord(start), "cudaEventRecord");
    call.enqueue(nullptr);
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start, end), "cudaEventElapsedTime");
    if (round == 0 || milliseconds < best) best = milliseconds;
  }
  std::printf("%s: %.1f GB/s (%zu MiB, best of 5)\n", where, static_cast<double>(bytes) / best * 1e-6, bytes >> 20);
  check(cudaEventDestroy(start), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
}

}  // namespace

int main() {
  if (!tardis::gpu_test::has_gpu()) return tardis::gpu_test::kSkipped;
  constexpr std::size_t kBytes = 256 << 20;
  unsigned char* mapped = nullptr;
  unsigned char* mapped_dev = nullptr;
  unsigned char* device = nullptr;
  check(cudaHostAlloc(&mapped, kBytes, cudaHostAllocMapped), "cudaHostAlloc");
  check(cudaHostGetDevicePointer(&mapped_dev, mapped, 0), "cudaHostGetDevicePointer");
  check(cudaMalloc(&device, kBytes), "cudaMalloc");
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i < kBytes / 8; ++i) reinterpret_cast<std::uint64_t*>(mapped)[i] = random();
  check(cudaMemcpy(device, mapped, kBytes, cudaMemcpyHostToDevice), "cudaMemcpy");

  std::vector<Chunk> list;
  for (std::size_t bytes = 0; bytes <= 3000; ++bytes) {
    list.push_back({16 * (random() % 4096), bytes});
    list.push_back({random() % 65536, bytes});
  }
  for (int i = 0; i < 20000; ++i) {
    const std::size_t bytes = i % 3 == 0 ? kChunk : random() % (3 * kChunk);
    const std::size_t start = random() % (kBytes - bytes);
    list.push_back({i % 2 == 0 ? start / 16 * 16 : start, bytes});
  }
  int wrong = compare("device memory", device, mapped, list);
  wrong += compare("mapped host memory", mapped_dev, mapped, list);
  measure("device memory", device, kBytes);
  measure("mapped host memory", mapped_dev, kBytes);
  check(cudaFree(device), "cudaFree");
  check(cudaFreeHost(mapped), "cudaFreeHost");
  return wrong == 0 ? 0 : 1;
}
