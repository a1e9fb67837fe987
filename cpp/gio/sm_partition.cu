// SPDX-License-Identifier: Apache-2.0
#include "gio/sm_partition.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <memory>
#include <new>
#include <string>

namespace tardis::gio {
namespace {

// Looked up through the runtime at run time: the library must load where no libcuda is.
struct Driver {
  decltype(&cuDeviceGet) device_get;
  decltype(&cuDeviceGetDevResource) get_resource;
  decltype(&cuDevSmResourceSplitByCount) split;
  decltype(&cuDevResourceGenerateDesc) describe;
  decltype(&cuGreenCtxCreate) create;
  decltype(&cuGreenCtxDestroy) destroy;
  decltype(&cuGreenCtxStreamCreate) stream_create;
  decltype(&cuGetErrorName) error_name;

  template <class Function>
  static bool find(const char* name, Function& function) {
    constexpr unsigned kVersion = 12050;  // that of cuGreenCtxStreamCreate, the newest of them
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();  // it is not the caller's
      return false;
    }
    function = reinterpret_cast<Function>(found);
    return true;
  }
  bool load() {
    return find("cuDeviceGet", device_get) && find("cuDeviceGetDevResource", get_resource) &&
           find("cuDevSmResourceSplitByCount", split) && find("cuDevResourceGenerateDesc", describe) &&
           find("cuGreenCtxCreate", create) && find("cuGreenCtxDestroy", destroy) &&
           find("cuGreenCtxStreamCreate", stream_create) && find("cuGetErrorName", error_name);
  }
};

// One green context with one stream.
struct Side {
  const Driver* driver = nullptr;
  CUgreenCtx context = nullptr;
  cudaStream_t stream = nullptr;
  std::uint32_t sms = 0;

  Side() = default;
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;
  ~Side() { close(); }

  CUresult open(const Driver& with, CUdevice device, CUdevResource& resource, int priority) {
    driver = &with;
    CUdevResourceDesc description = nullptr;
    CUresult result = with.describe(&description, &resource, 1);
    if (result == CUDA_SUCCESS) result = with.create(&context, description, device, CU_GREEN_CTX_DEFAULT_STREAM);
    if (result == CUDA_SUCCESS) result = with.stream_create(&stream, context, CU_STREAM_NON_BLOCKING, priority);
    if (result == CUDA_SUCCESS) sms = resource.sm.smCount;
    return result;
  }
  cudaError_t close() {
    cudaError_t result = cudaSuccess;
    if (stream != nullptr) result = cudaStreamDestroy(stream);
    if (context != nullptr && driver->destroy(context) != CUDA_SUCCESS) result = cudaErrorUnknown;
    stream = nullptr;
    context = nullptr;
    sms = 0;
    return result;
  }
};

}  // namespace
}  // namespace tardis::gio

struct tardis_gpu_partition {
  using Side = tardis::gio::Side;

  tardis::gio::Driver driver = {};
  Side movers, rest;
  tardis_gpu_partition_type kind = TARDIS_GPU_PRIORITY_STREAM;
  std::string reason;

  bool try_green_context(std::uint32_t sms) {
    int device_number = 0, greatest_priority = 0;
    if (cudaGetDevice(&device_number) != cudaSuccess || cudaFree(nullptr) != cudaSuccess ||
        cudaDeviceGetStreamPriorityRange(nullptr, &greatest_priority) != cudaSuccess) {
      return failed("no usable device");
    }
    if (!driver.load()) return failed("this driver has no green contexts");
    CUdevice device = 0;
    CUdevResource all = {}, group = {}, remaining = {};
    unsigned groups = 1;
    CUresult result = driver.device_get(&device, device_number);
    if (result == CUDA_SUCCESS) result = driver.get_resource(device, &all, CU_DEV_RESOURCE_TYPE_SM);
    if (result == CUDA_SUCCESS) {
      // Movers need no clusters: without the flag the least is 8 SMs.
      result = driver.split(&group, &groups, &all, &remaining, CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING, sms);
    }
    // The movers' few kernels go first on their SMs, where compute of other streams may be too.
    if (result == CUDA_SUCCESS) result = movers.open(driver, device, group, greatest_priority);
    if (result == CUDA_SUCCESS) result = rest.open(driver, device, remaining, 0);
    if (result != CUDA_SUCCESS) {
      rest.close();
      movers.close();
      const char* name = nullptr;
      if (driver.error_name(result, &name) != CUDA_SUCCESS) name = "unknown";
      return failed(std::string("the driver refused a green context of ") + std::to_string(sms) + " SMs: " + name);
    }
    kind = TARDIS_GPU_GREEN_CONTEXT;
    reason = "green context of " + std::to_string(movers.sms) + " of " + std::to_string(all.sm.smCount) + " SMs";
    return true;
  }

  int open_priority_stream() {
    int least = 0;
    cudaError_t result = cudaDeviceGetStreamPriorityRange(&least, nullptr);
    if (result == cudaSuccess) result = cudaStreamCreateWithPriority(&movers.stream, cudaStreamNonBlocking, least);
    return result;
  }

 private:
  bool failed(const std::string& why) {
    reason = "stream of lowest priority: " + why;
    return false;
  }
};

extern "C" int tardis_gpu_partition_create(uint32_t sms, tardis_gpu_partition** partition) {
  if (partition == nullptr) return cudaErrorInvalidValue;
  *partition = nullptr;
  std::unique_ptr<tardis_gpu_partition> made(new (std::nothrow) tardis_gpu_partition);
  if (made == nullptr) return cudaErrorMemoryAllocation;
  if (sms == 0) made->reason = "stream of lowest priority, as asked for";
  if (sms == 0 || !made->try_green_context(sms)) {
    if (const int result = made->open_priority_stream(); result != cudaSuccess) return result;
  }
  *partition = made.release();
  return cudaSuccess;
}

extern "C" int tardis_gpu_partition_destroy(tardis_gpu_partition* partition) {
  if (partition == nullptr) return cudaSuccess;
  const std::unique_ptr<tardis_gpu_partition> owned(partition);
  const cudaError_t rest = owned->rest.close(), movers = owned->movers.close();
  return rest != cudaSuccess ? rest : movers;
}

extern "C" void* tardis_gpu_partition_stream(const tardis_gpu_partition* partition) { return partition->movers.stream; }
extern "C" void* tardis_gpu_partition_rest_stream(const tardis_gpu_partition* partition) {
  return partition->rest.stream;
}
extern "C" uint32_t tardis_gpu_partition_kind(const tardis_gpu_partition* partition) { return partition->kind; }
extern "C" uint32_t tardis_gpu_partition_sms(const tardis_gpu_partition* partition) { return partition->movers.sms; }
extern "C" uint32_t tardis_gpu_partition_rest_sms(const tardis_gpu_partition* partition) { return partition->rest.sms; }
extern "C" const char* tardis_gpu_partition_reason(const tardis_gpu_partition* partition) {
  return partition->reason.c_str();
}
