// SPDX-License-Identifier: Apache-2.0
// A block table, and the arrays of its batches, for programs that check it.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "gpu_gstore_support.cuh"
#include "gstore/block_row.h"

namespace tardis::gstore::testing {

constexpr std::uint32_t kRoom = 1024;  // elements of a batch

inline int failures = 0;  // of this program

inline void expect(bool good, const std::string& what, unsigned long long found = 0, unsigned long long expected = 0) {
  if (good) return;
  if (++failures < 20) std::fprintf(stderr, "WRONG: %s: found %llu, expected %llu\n", what.c_str(), found, expected);
}

struct Blocks {
  Blocks(std::uint32_t hbm, std::uint32_t dram, std::uint32_t file, std::uint32_t rows)
      : bytes(tardis_gpu_blocks_memory_bytes(hbm, dram, file, rows)), memory(device_array<std::uint8_t>(bytes, 0xEE)) {
    check(tardis_gpu_blocks_place(&table, memory.get(), bytes, hbm, dram, file, rows), "tardis_gpu_blocks_place");
    check(tardis_gpu_blocks_reset(&table, nullptr), "tardis_gpu_blocks_reset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  const std::uint64_t bytes;
  DeviceArray<std::uint8_t> memory;
  tardis_gpu_blocks table{};
};

template <class T>
std::vector<T> copy(const T* from, std::size_t n) {
  std::vector<T> to(n);
  check(cudaMemcpy(to.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return to;
}

// Arrays of one batch, in mapped memory.
struct Batch {
  MappedArray<std::uint64_t> handles = mapped_array<std::uint64_t>(kRoom);
  MappedArray<std::uint64_t> ids = mapped_array<std::uint64_t>(kRoom);
  MappedArray<std::uint64_t> to = mapped_array<std::uint64_t>(kRoom);
  MappedArray<std::uint32_t> files = mapped_array<std::uint32_t>(kRoom);
  MappedArray<std::uint8_t> good = mapped_array<std::uint8_t>(kRoom);
  MappedArray<std::uint8_t> statuses = mapped_array<std::uint8_t>(kRoom);
  MappedArray<std::uint32_t> count = mapped_array<std::uint32_t>(1);
  MappedArray<tardis_gpu_report> report = mapped_array<tardis_gpu_report>(1);
  DeviceArray<tardis_gpu_ticket> ticket = device_array<tardis_gpu_ticket>(1);

  void poison() {
    std::memset(ids.get(), 0xEE, kRoom * 8);
    std::memset(statuses.get(), 0xEE, kRoom);
  }
  void wait() const { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }
};

}  // namespace tardis::gstore::testing
