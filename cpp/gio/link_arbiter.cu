// SPDX-License-Identifier: Apache-2.0
// The arbiter's memory, and uses of the link that begin and end with a stream.
#include "gio/link_arbiter.h"

#include <cuda_runtime.h>

#include <memory>
#include <new>

#include "gio/link_host.h"
#include "gio/link_pacer.cuh"

namespace tardis::gio {
namespace {

constexpr std::uint64_t kBudget = 1'000'000'000;  // measured: docs/gio.md

struct HostFree {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
struct DeviceFree {
  void operator()(void* memory) const { cudaFree(memory); }
};

enum class Step { kBegin, kEnd };

// One thread: a user more or less.
__global__ void count_link_user(const LinkTraffic traffic, Step step) {
  std::uint64_t* const word = &traffic.device->active[traffic.direction];
  std::uint64_t seen = load_shared_word(word), wanted;
  while (true) {
    wanted = seen;
    if (!(step == Step::kBegin ? add_user(wanted, traffic.link_class) : remove_user(wanted, traffic.link_class))) {
      add_shared_word(&traffic.device->errors, 1);
      return;
    }
    const std::uint64_t found = atomicCAS(reinterpret_cast<unsigned long long*>(word), seen, wanted);
    if (found == seen) break;
    seen = found;
  }
  tell_host(traffic);
}

}  // namespace
}  // namespace tardis::gio

struct tardis_gpu_link {
  std::unique_ptr<tardis_gpu_link_words, tardis::gio::HostFree> words;
  std::unique_ptr<tardis::gio::LinkDeviceWords, tardis::gio::DeviceFree> device;
};

struct tardis_gpu_link_pacer {
  tardis::gio::HostPacer pacer;
};

using namespace tardis::gio;

namespace {

int count_user(tardis_gpu_link* link, std::uint32_t link_class, std::uint32_t direction, Step step, void* stream) {
  if (link == nullptr || link_class >= kLinkClasses || direction >= kLinkDirections) return cudaErrorInvalidValue;
  count_link_user<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
      {link->words.get(), link->device.get(), link_class, direction, 0}, step);
  return cudaGetLastError();
}

}  // namespace

extern "C" int tardis_gpu_link_create(tardis_gpu_link** link) {
  if (link == nullptr) return cudaErrorInvalidValue;
  *link = nullptr;
  std::unique_ptr<tardis_gpu_link> made(new (std::nothrow) tardis_gpu_link);
  if (made == nullptr) return cudaErrorMemoryAllocation;
  void *words = nullptr, *seen = nullptr, *device = nullptr;
  cudaError_t result =
      cudaHostAlloc(&words, sizeof(tardis_gpu_link_words), cudaHostAllocMapped | cudaHostAllocPortable);
  if (result != cudaSuccess) return result;
  made->words.reset(new (words) tardis_gpu_link_words{});
  result = cudaMalloc(&device, sizeof(LinkDeviceWords));
  if (result != cudaSuccess) return result;
  made->device.reset(static_cast<LinkDeviceWords*>(device));
  result = cudaMemset(device, 0, sizeof(LinkDeviceWords));
  if (result == cudaSuccess) result = cudaDeviceSynchronize();
  if (result == cudaSuccess) result = cudaHostGetDevicePointer(&seen, words, 0);
  cudaFuncAttributes loaded;  // now, so that it need not be behind a kernel that polls
  if (result == cudaSuccess) result = cudaFuncGetAttributes(&loaded, count_link_user);
  if (result != cudaSuccess) return result;
  if (seen != words) return cudaErrorNotSupported;  // host and device must share addresses
  made->words->device = made->device.get();
  for (std::uint64_t& budget : made->words->host.budgets) budget = kBudget;
  *link = made.release();
  return cudaSuccess;
}

extern "C" int tardis_gpu_link_destroy(tardis_gpu_link* link) {
  if (link == nullptr) return cudaSuccess;
  const std::unique_ptr<tardis_gpu_link> owned(link);
  return cudaDeviceSynchronize();  // a kernel's news to the host may be under way
}

extern "C" tardis_gpu_link_words* tardis_gpu_link_words_of(const tardis_gpu_link* link) { return link->words.get(); }

extern "C" int tardis_gpu_link_set_budget(tardis_gpu_link* link, uint32_t link_class, uint64_t budget) {
  if (link == nullptr || link_class >= kLinkClasses || (budget != 0 && budget < TARDIS_GPU_LINK_LEAST_BUDGET)) {
    return cudaErrorInvalidValue;
  }
  __atomic_store_n(&link->words->host.budgets[link_class], budget, __ATOMIC_RELAXED);
  return cudaSuccess;
}

extern "C" int tardis_gpu_link_begin(tardis_gpu_link* link, uint32_t link_class, uint32_t direction, void* stream) {
  return count_user(link, link_class, direction, Step::kBegin, stream);
}
extern "C" int tardis_gpu_link_end(tardis_gpu_link* link, uint32_t link_class, uint32_t direction, void* stream) {
  return count_user(link, link_class, direction, Step::kEnd, stream);
}

extern "C" int tardis_gpu_link_pacer_create(tardis_gpu_link* link, uint32_t link_class, uint32_t direction,
                                            tardis_gpu_link_pacer** pacer) {
  if (link == nullptr || pacer == nullptr || link_class >= kLinkClasses || direction >= kLinkDirections) {
    return cudaErrorInvalidValue;
  }
  std::unique_ptr<tardis_gpu_link_pacer> made(new (std::nothrow)
                                                  tardis_gpu_link_pacer{{*link->words, link_class, direction}});
  *pacer = made.release();
  return *pacer != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
extern "C" void tardis_gpu_link_pacer_destroy(tardis_gpu_link_pacer* pacer) {
  const std::unique_ptr<tardis_gpu_link_pacer> owned(pacer);
}
extern "C" void tardis_gpu_link_pace(tardis_gpu_link_pacer* pacer, uint64_t bytes) { pacer->pacer.pace(bytes); }

extern "C" int tardis_gpu_link_count(const tardis_gpu_link* link, uint32_t link_class,
                                     tardis_gpu_link_counters* counters) {
  if (link == nullptr || counters == nullptr || link_class >= kLinkClasses) return cudaErrorInvalidValue;
  LinkDeviceWords device;
  const cudaError_t result = cudaMemcpy(&device, link->device.get(), sizeof device, cudaMemcpyDeviceToHost);
  if (result != cudaSuccess) return result;
  const tardis_gpu_link_words& words = *link->words;
  *counters = {device.bytes[link_class] + load_link_word(words.bytes[link_class]),
               device.budget_bytes[link_class] + load_link_word(words.budget_bytes[link_class]),
               device.held_ns[link_class] + load_link_word(words.held_ns[link_class]), 0,
               device.errors + load_link_word(words.errors)};
  for (std::uint32_t i = 0; i < kLinkDirections; ++i) {
    counters->active +=
        users_of(device.active[i], link_class) + users_of(load_link_word(words.host.active[i]), link_class);
  }
  return cudaSuccess;
}
