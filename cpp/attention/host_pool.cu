// SPDX-License-Identifier: Apache-2.0
#include "attention/host_pool.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "attention/host_memory.h"
#include "block/numa.h"

namespace tardis::attention {
namespace {

std::string cuda_text(int error) {
  return std::string(cudaGetErrorString(static_cast<cudaError_t>(error))) + " (CUDA error " + std::to_string(error) +
         ")";
}

// The address must be the same for kernels: torch knows no other.
int pin(void*, void* memory, std::size_t bytes) {
  cudaError_t result = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (result == cudaSuccess) {
    void* there = nullptr;
    result = cudaHostGetDevicePointer(&there, memory, 0);
    if (result == cudaSuccess && there != memory) result = cudaErrorNotSupported;
    if (result != cudaSuccess) (void)cudaHostUnregister(memory);
  }
  if (result != cudaSuccess) (void)cudaGetLastError();  // it is told by the text, not by the next launch
  return result;
}

int unpin(void*, void* memory) {
  const cudaError_t result = cudaHostUnregister(memory);
  if (result != cudaSuccess) (void)cudaGetLastError();
  return result;
}

// The calling thread's device is the caller's again afterwards.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess) error_ = cudaSetDevice(device);
  }
  ~DeviceScope() {
    if (before_ >= 0) (void)cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = -1;
  cudaError_t error_;
};

class HostPool {
 public:
  // One a process: torch hands its allocators no context. Never destroyed, since torch may free blocks while the
  // process ends, in no known order.
  static HostPool& of_process() {
    alignas(HostPool) static unsigned char memory[sizeof(HostPool)];
    static HostPool& pool = *::new (static_cast<void*>(memory)) HostPool;
    return pool;
  }

  void configure(const tardis_gpu_host_pool_settings& settings) {
    const std::lock_guard<std::mutex> lock(mutex_);
    settings_ = settings;
  }

  void* allocate(std::size_t bytes, int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      const Status status = take(bytes, device);
      if (status) return last_;
      error_ = status.error().message;
    } catch (const std::exception& error) {
      error_ = std::string("host memory: ") + error.what();
    }
    ++usage_.failures;
    return nullptr;
  }

  void free(void* memory, int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(memory);
    if (found == blocks_.end()) return;
    // Pages that a kernel still writes must not be somebody else's.
    const DeviceScope scope(device);
    cudaError_t idle = scope.error();
    if (idle == cudaSuccess) idle = cudaDeviceSynchronize();
    HostMemory& block = found->second;
    usage_.bytes -= block.size();
    --usage_.blocks;
    if (block.pages() == Pages::kReserved) usage_.reserved_page_bytes -= block.size();
    if (block.on_node()) usage_.node_bytes -= block.size();
    if (idle != cudaSuccess) {
      (void)cudaGetLastError();
      block.abandon();
    }
    if (idle != cudaSuccess || !block.release()) usage_.kept_bytes += block.size();
    blocks_.erase(found);
  }

  tardis_gpu_host_pool_usage usage() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return usage_;
  }

  std::string take_error() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(error_, std::string());
  }

 private:
  HostPool() { usage_.node = -1; }

  Status take(std::size_t bytes, int device) {
    if (settings_.most_bytes != 0 && (bytes > settings_.most_bytes || usage_.bytes > settings_.most_bytes - bytes)) {
      return Error{Code::kNoSpace, "expected " + size_text(bytes) + " more of host memory for a KV pool, found " +
                                       size_text(usage_.bytes) + " taken of the " + size_text(settings_.most_bytes) +
                                       " that it may have; raise that, or make the pool smaller"};
    }
    const DeviceScope scope(device);
    if (scope.error() != cudaSuccess) {
      return Error{Code::kInternal, "host memory: GPU " + std::to_string(device) + ": " + cuda_text(scope.error())};
    }
    HostMemoryOptions options;
    if (settings_.step_bytes != 0) options.step_bytes = settings_.step_bytes;
    if (settings_.threads != 0) options.threads = settings_.threads;
    options.check_limits = settings_.unchecked == 0;
    options.reserved_huge_pages = settings_.no_reserved_pages == 0;
    char address[32] = "";
    if (cudaDeviceGetPCIBusId(address, sizeof address, device) == cudaSuccess) options.node = numa_node_of_pci(address);
    usage_.node = options.node.value_or(-1);
    Result<HostMemory> block = HostMemory::create(bytes, options, Pinner{pin, unpin, cuda_text, nullptr});
    if (!block) return block.error();
    last_ = block->data();
    usage_.bytes += block->size();
    usage_.peak_bytes = std::max(usage_.peak_bytes, usage_.bytes);
    ++usage_.blocks;
    if (block->pages() == Pages::kReserved) usage_.reserved_page_bytes += block->size();
    if (block->on_node()) usage_.node_bytes += block->size();
    blocks_.emplace(last_, std::move(*block));
    return {};
  }

  std::mutex mutex_;
  tardis_gpu_host_pool_settings settings_{};
  tardis_gpu_host_pool_usage usage_{};
  std::map<void*, HostMemory> blocks_;
  std::string error_;
  void* last_ = nullptr;
};

}  // namespace
}  // namespace tardis::attention

using tardis::attention::HostPool;

int tardis_gpu_host_pool_configure(const tardis_gpu_host_pool_settings* settings) {
  if (settings == nullptr || (settings->step_bytes != 0 && settings->step_bytes < (2U << 20))) {
    return cudaErrorInvalidValue;
  }
  HostPool::of_process().configure(*settings);
  return cudaSuccess;
}

void tardis_gpu_host_pool_usage_of(tardis_gpu_host_pool_usage* usage) { *usage = HostPool::of_process().usage(); }

void tardis_gpu_host_pool_take_error(char* text, std::size_t bytes) {
  if (bytes == 0) return;
  const std::string error = HostPool::of_process().take_error();
  const std::size_t length = std::min(bytes - 1, error.size());
  std::memcpy(text, error.data(), length);
  text[length] = '\0';
}

std::uint64_t tardis_gpu_host_pool_available() {
  const auto limits = tardis::attention::memory_limits();
  if (!limits) return 0;
  return std::min(limits->available, limits->group_left.value_or(limits->available)) + limits->free_huge;
}

void* tardis_gpu_host_pool_allocate(ssize_t bytes, int device, void*) {
  return HostPool::of_process().allocate(static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)), device);
}

void tardis_gpu_host_pool_free(void* memory, ssize_t, int device, void*) {
  HostPool::of_process().free(memory, device);
}
