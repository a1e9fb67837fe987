// SPDX-License-Identifier: Apache-2.0
// Memory, tables and checked calls for programs that need a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "gpu_gstore_objects.h"
#include "gpu_support.h"

namespace tardis::gstore::testing {

using gpu_test::check;
using gpu_test::has_gpu;
using gpu_test::kSkipped;

struct DeviceFree {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct HostFree {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
template <class T>
using DeviceArray = std::unique_ptr<T[], DeviceFree>;
template <class T>
using MappedArray = std::unique_ptr<T[], HostFree>;

template <class T>
DeviceArray<T> device_array(std::size_t n, int byte = 0) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, n * sizeof(T)), "cudaMalloc");
  check(cudaMemset(memory, byte, n * sizeof(T)), "cudaMemset");
  return DeviceArray<T>(static_cast<T*>(memory));
}
template <class T>
MappedArray<T> mapped_array(std::size_t n) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, n * sizeof(T), cudaHostAllocMapped), "cudaHostAlloc");
  std::memset(memory, 0, n * sizeof(T));
  return MappedArray<T>(static_cast<T*>(memory));
}

struct Table {
  explicit Table(std::uint64_t entries) : Table(tardis_gpu_index_memory_bytes(entries), 0) {}
  Table(std::uint64_t bytes, int) : bytes(bytes), memory(device_array<std::uint8_t>(bytes)) {
    check(tardis_gpu_index_place(&index, memory.get(), bytes), "tardis_gpu_index_place");
  }
  const std::uint64_t bytes;
  DeviceArray<std::uint8_t> memory;
  tardis_gpu_index index{};
};

}  // namespace tardis::gstore::testing
