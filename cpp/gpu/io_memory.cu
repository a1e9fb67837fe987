// SPDX-License-Identifier: Apache-2.0
#include "gpu/io_memory.h"

#include <cuda_runtime.h>

#include <cstdint>

namespace tardis {
namespace {

constexpr std::uint32_t kMostWords = 64;
constexpr std::uint64_t kPageBytes = 4096;
// CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, which the runtime's enumeration has no name for.
constexpr int kDmaBufAttribute = 124;

static_assert(sizeof(tardis_gpu_peer_facts) == 16);

// What a read of registers takes, on the device.
struct Words {
  std::uint32_t offsets[kMostWords];
  std::uint32_t values[kMostWords];
};
static_assert(sizeof(Words) == 512);

// By one thread, since a register may answer one access at a time.
__global__ void read_io_memory(const unsigned char* memory, Words* words, std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    // mmio: exactly one access of this size, neither merged, repeated nor taken from a cache.
    asm volatile("ld.mmio.relaxed.sys.global.u32 %0, [%1];"
                 : "=r"(words->values[i])
                 : "l"(memory + words->offsets[i])
                 : "memory");
  }
}

std::int32_t attribute(int which, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(which), device) == cudaSuccess) return value;
  (void)cudaGetLastError();  // the question failed, nothing else
  return -1;
}

cudaError_t read_mapped(const void* device, const std::uint32_t* offsets, std::uint32_t* values, std::uint32_t count) {
  Words words{};
  for (std::uint32_t i = 0; i < count; ++i) words.offsets[i] = offsets[i];
  void* on_device = nullptr;
  cudaError_t result = cudaMalloc(&on_device, sizeof words);
  if (result != cudaSuccess) return result;
  result = cudaMemcpy(on_device, &words, sizeof words, cudaMemcpyHostToDevice);
  if (result == cudaSuccess) {
    read_io_memory<<<1, 1>>>(static_cast<const unsigned char*>(device), static_cast<Words*>(on_device), count);
    result = cudaGetLastError();
  }
  if (result == cudaSuccess) result = cudaMemcpy(&words, on_device, sizeof words, cudaMemcpyDeviceToHost);
  const cudaError_t freed = cudaFree(on_device);
  if (result == cudaSuccess) result = freed;
  if (result != cudaSuccess) return result;
  for (std::uint32_t i = 0; i < count; ++i) values[i] = words.values[i];
  return cudaSuccess;
}

}  // namespace
}  // namespace tardis

int tardis_gpu_io_memory_map(void* memory, std::uint64_t bytes, void** device) {
  if (memory == nullptr || device == nullptr || bytes == 0 || bytes % tardis::kPageBytes != 0 ||
      reinterpret_cast<std::uintptr_t>(memory) % tardis::kPageBytes != 0) {
    return cudaErrorInvalidValue;
  }
  cudaError_t result = cudaHostRegister(memory, bytes, cudaHostRegisterIoMemory | cudaHostRegisterMapped);
  if (result == cudaSuccess) {
    result = cudaHostGetDevicePointer(device, memory, 0);
    if (result != cudaSuccess) (void)cudaHostUnregister(memory);
  }
  if (result != cudaSuccess) (void)cudaGetLastError();  // it is returned: later calls must not find it
  return result;
}

int tardis_gpu_io_memory_unmap(void* memory) { return cudaHostUnregister(memory); }

int tardis_gpu_io_memory_read(void* memory, std::uint64_t bytes, const std::uint32_t* offsets, std::uint32_t* values,
                              std::uint32_t count) {
  if (offsets == nullptr || values == nullptr || count == 0 || count > tardis::kMostWords) return cudaErrorInvalidValue;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (offsets[i] % 4 != 0 || offsets[i] + std::uint64_t{4} > bytes) return cudaErrorInvalidValue;
  }
  void* device = nullptr;
  const int mapped = tardis_gpu_io_memory_map(memory, bytes, &device);
  if (mapped != cudaSuccess) return mapped;
  const cudaError_t read = tardis::read_mapped(device, offsets, values, count);
  const int unmapped = tardis_gpu_io_memory_unmap(memory);
  return read != cudaSuccess ? static_cast<int>(read) : unmapped;
}

int tardis_gpu_peer_facts_of(tardis_gpu_peer_facts* facts) {
  if (facts == nullptr) return cudaErrorInvalidValue;
  *facts = {0, -1, -1, -1};
  int devices = 0, device = 0;
  cudaError_t result = cudaGetDeviceCount(&devices);
  if (result == cudaErrorNoDevice || result == cudaErrorInsufficientDriver) {
    (void)cudaGetLastError();
    return cudaSuccess;  // none is an answer
  }
  if (result == cudaSuccess) result = cudaGetDevice(&device);
  if (result != cudaSuccess) return result;
  facts->devices = devices;
  facts->direct_rdma = tardis::attribute(cudaDevAttrGPUDirectRDMASupported, device);
  facts->dma_buf = tardis::attribute(tardis::kDmaBufAttribute, device);
  facts->register_memory = tardis::attribute(cudaDevAttrHostRegisterSupported, device);
  return cudaSuccess;
}
