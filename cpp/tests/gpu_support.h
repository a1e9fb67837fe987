// SPDX-License-Identifier: Apache-2.0
// For programs that run on a GPU: checked calls, memory of either kind, random bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>

namespace tardis::gpu_test {

constexpr int kSkipped = 77;  // exit status, as CTest knows it

// A cudaError_t as it is or as the C ABI returns it.
inline void check(int result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(result)));
  std::exit(1);
}

inline bool has_gpu() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) return true;
  std::printf("skipped: no CUDA device\n");
  return false;
}

enum class Where { kDevice, kPinned };

inline const char* name_of(Where where) { return where == Where::kDevice ? "HBM" : "pinned host"; }

// Bytes that the device reaches at data(); pinned ones the host too, at the same address.
class Memory {
 public:
  Memory(Where where, std::size_t bytes) : where_(where), bytes_(bytes) {
    if (where == Where::kDevice) {
      check(cudaMalloc(&data_, bytes), "cudaMalloc");
    } else {
      check(cudaHostAlloc(&data_, bytes, cudaHostAllocMapped), "cudaHostAlloc");
      void* seen = nullptr;
      check(cudaHostGetDevicePointer(&seen, data_, 0), "cudaHostGetDevicePointer");
      if (seen != data_) {
        std::fprintf(stderr, "expected one address for host and device (UVA), found two\n");
        std::exit(1);
      }
    }
  }
  ~Memory() {
    if (data_ != nullptr) check(where_ == Where::kDevice ? cudaFree(data_) : cudaFreeHost(data_), "cudaFree");
  }
  Memory(Memory&& other) noexcept
      : where_(other.where_), bytes_(other.bytes_), data_(std::exchange(other.data_, nullptr)) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Memory& operator=(Memory&&) = delete;

  template <class T = unsigned char>
  T* data() const {
    return static_cast<T*>(data_);
  }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(data_); }
  std::size_t size() const { return bytes_; }

  void write(const void* from, std::size_t bytes, std::size_t at = 0) {
    check(cudaMemcpy(data<char>() + at, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  }
  void read(void* to, std::size_t bytes, std::size_t at = 0) const {
    check(cudaMemcpy(to, data<char>() + at, bytes, cudaMemcpyDefault), "cudaMemcpy");
  }
  void fill(int byte) { check(cudaMemset(data_, byte, bytes_), "cudaMemset"); }

 private:
  Where where_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~Stream() { check(cudaStreamDestroy(stream_), "cudaStreamDestroy"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { check(cudaEventDestroy(event_), "cudaEventDestroy"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void wait() { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  cudaEvent_t get() const { return event_; }
  double milliseconds_since(const Event& start) const {
    float elapsed = 0;
    check(cudaEventElapsedTime(&elapsed, start.event_, event_), "cudaEventElapsedTime");
    return elapsed;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Different in every run, unless TARDIS_SEED says which.
inline std::uint64_t fresh_seed() {
  const char* given = std::getenv("TARDIS_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

inline void fill_random(void* to, std::size_t bytes, std::mt19937_64& random) {
  auto* out = static_cast<unsigned char*>(to);
  std::size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    const std::uint64_t word = random();
    std::memcpy(out + at, &word, 8);
  }
  for (; at < bytes; ++at) out[at] = static_cast<unsigned char>(random());
}

}  // namespace tardis::gpu_test
