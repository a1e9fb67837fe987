// SPDX-License-Identifier: Apache-2.0
// Helpers of the programs that run rings on a GPU: memory, a rig with its queue pairs on the device, bytes that tell
// where they belong.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "gio/prepare_kernel.h"
#include "gio/ring_kernel.h"
#include "gio/session.h"
#include "tests/gpu_support.h"

namespace tardis::gio::testing {

inline void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
  std::fflush(stderr);
  std::_Exit(1);
}
inline void check(int result, const char* what) { check(static_cast<cudaError_t>(result), what); }

inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

// Kernels end by themselves; should one not, the process must, for the device's sake.
inline void wait_for(cudaStream_t stream, const char* what, double seconds = 20) {
  const std::uint64_t begin = now_ns();
  cudaError_t state;
  while ((state = cudaStreamQuery(stream)) == cudaErrorNotReady) {
    if (static_cast<double>(now_ns() - begin) > seconds * 1e9) {
      std::fprintf(stderr, "%s: expected the device to be done within %.0f s; ending the process\n", what, seconds);
      std::fflush(stderr);
      std::_Exit(1);
    }
  }
  check(state, what);
}

enum class Where { kDevice, kMapped };

// Zeroed.
template <class T>
class Array {
 public:
  Array() = default;
  Array(Where where, std::size_t count) : where_(where), count_(count) {
    const std::size_t bytes = count * sizeof(T);
    if (where == Where::kDevice) {
      check(cudaMalloc(&data_, bytes), "cudaMalloc");
      check(cudaMemset(data_, 0, bytes), "cudaMemset");
    } else {
      check(cudaHostAlloc(&data_, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
      std::memset(static_cast<void*>(data_), 0, bytes);
    }
  }
  ~Array() {
    if (data_ == nullptr) return;
    check(where_ == Where::kDevice ? cudaFree(data_) : cudaFreeHost(data_), "free");
  }
  Array(Array&& other) noexcept
      : where_(other.where_), data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
  Array& operator=(Array&& other) noexcept {
    std::swap(where_, other.where_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) const { return data_[i]; }
  void upload(const std::vector<T>& from) const {
    check(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyDefault), "upload");
  }

 private:
  Where where_ = Where::kDevice;
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

// What 8 bytes at this word of the namespace hold.
TARDIS_HD inline std::uint64_t word_at(std::uint64_t word, std::uint64_t seed) {
  std::uint64_t z = (word + seed) * 0x9e3779b97f4a7c15u + 0x1234567;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  return z ^ z >> 27;
}

// Landed words that are not those of a namespace filled with word_at().
[[maybe_unused]] static __global__ void compare_landed(const IoContext* contexts, const std::uint32_t* count,
                                                       std::uint64_t seed, std::uint32_t block_shift,
                                                       unsigned long long* wrong) {
  unsigned long long bad = 0;
  for (std::uint32_t i = blockIdx.x; i < *count; i += gridDim.x) {
    const IoContext context = contexts[i];
    std::uint64_t word = (context.block << block_shift) / 8;
    for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
      const auto* const at = reinterpret_cast<const std::uint64_t*>(context.memory[piece]);
      for (std::uint32_t k = threadIdx.x; k < context.bytes[piece] / 8; k += blockDim.x) {
        bad += at[k] != word_at(word + k, seed);
      }
      word += context.bytes[piece] / 8;
    }
  }
  if (bad != 0) atomicAdd(wrong, bad);
}

inline void fill_words(std::byte* memory, std::uint64_t bytes, std::uint64_t seed) {
  const unsigned threads = std::max(1u, std::min(12u, std::thread::hardware_concurrency()));
  std::vector<std::thread> all;
  for (unsigned t = 0; t < threads; ++t) {
    all.emplace_back([=] {
      for (std::uint64_t i = bytes / 8 * t / threads; i < bytes / 8 * (t + 1) / threads; ++i) {
        reinterpret_cast<std::uint64_t*>(memory)[i] = word_at(i, seed);
      }
    });
  }
  for (std::thread& thread : all) thread.join();
}

// Digests of each `piece` bytes of `bytes`.
inline std::vector<std::uint64_t> digests_of(const std::byte* memory, std::uint64_t bytes, std::uint64_t piece) {
  std::vector<std::uint64_t> digests((bytes + piece - 1) / piece);
  const unsigned threads = std::max(1u, std::min(12u, std::thread::hardware_concurrency()));
  std::vector<std::thread> all;
  for (unsigned t = 0; t < threads; ++t) {
    all.emplace_back([&, t] {
      for (std::size_t i = digests.size() * t / threads; i < digests.size() * (t + 1) / threads; ++i) {
        digests[i] = xxh3_64(memory + i * piece, std::min(piece, bytes - i * piece));
      }
    });
  }
  for (std::thread& thread : all) thread.join();
  return digests;
}

// An IOCB for up to kMostContexts contexts. Contexts in mapped memory, as a host prepares them, or in HBM.
struct Iocb {
  explicit Iocb(Where where = Where::kMapped)
      : contexts(where, kMostContexts),
        count(where, 1),
        statuses(Where::kMapped, kMostContexts + 1),
        reports(Where::kMapped, kMostQueues),
        words(Where::kDevice, 2),
        flag_copy(Where::kMapped, 1) {}

  IoControlBlock block(std::uint64_t deadline_ns, bool digested = false) const {
    return {contexts.data(),  count.data(), statuses.data(), reports.data(), words.data(),
            words.data() + 1, deadline_ns,  nullptr,         digested};
  }
  std::uint32_t flag() const {
    check(cudaMemcpy(flag_copy.data(), words.data() + 1, 4, cudaMemcpyDefault), "flag");
    return flag_copy[0];
  }
  IoStatus status(std::size_t i) const { return {statuses[i]}; }
  RingReport total(std::uint32_t rings) const {
    RingReport sum{};
    for (std::uint32_t i = 0; i < rings; ++i) {
      const RingReport& report = reports[i];
      if (sum.error == RingError::kNone) {
        sum.error = report.error;
        sum.fault = report.fault;
        sum.entry = report.entry;
      }
      sum.done += report.done;
      sum.refused += report.refused;
      sum.failed += report.failed;
      sum.damaged += report.damaged;
      sum.timed_out += report.timed_out;
      sum.not_sent += report.not_sent;
      sum.doorbells += report.doorbells;
    }
    return sum;
  }

  Array<IoContext> contexts;
  Array<std::uint32_t> count, statuses;
  Array<RingReport> reports;
  Array<std::uint32_t> words, flag_copy;  // words: ended, flag
};

struct GpuRigOptions : SessionOptions {
  std::uint32_t ctas = 4;
};

// Queue pairs of a rig, with everything that the device needs near it.
class GpuRig {
 public:
  explicit GpuRig(const GpuRigOptions& options)
      : options_(options), memory_(Where::kMapped, Session::memory_bytes(options)) {
    auto opened = Session::open(options, memory_.data());
    if (!opened) {
      std::fprintf(stderr, "session: %s\n", opened.error().message.c_str());
      std::_Exit(1);
    }
    rig_ = std::move(*opened);
    const std::uint32_t commands = rig_->queues().front().commands;
    states_ = Array<RingState>(Where::kDevice, options.queues);
    uses_ = Array<std::uint16_t>(Where::kDevice, std::size_t{options.queues} * commands);
    start();
  }

  // After the queue pairs were made, and made anew.
  void start() {
    const std::vector<std::uint64_t> prp = rig_->prp_table();
    const std::vector<nvme::SglDescriptor> sgl = rig_->sgl_table();
    prp_ = Array<std::uint64_t>(Where::kDevice, prp.size());
    sgl_ = Array<nvme::SglDescriptor>(Where::kDevice, sgl.size());
    prp_.upload(prp);
    sgl_.upload(sgl);
    queues_ = rig_->queues();
    for (std::size_t i = 0; i < queues_.size(); ++i) {
      queues_[i].state = states_.data() + i;
      queues_[i].uses = uses_.data() + i * queues_[i].commands;
      queues_[i].pointers.prp = queues_[i].pointers.prp.seen_at(prp_.data());
      queues_[i].pointers.sgl = queues_[i].pointers.sgl.seen_at(sgl_.data());
    }
    check(tardis_gpu_gio_start_queues(queues_.data(), rings(), nullptr), "start_queues");
    check(cudaDeviceSynchronize(), "start_queues");
  }

  Session& rig() { return *rig_; }
  const GpuRigOptions& options() const { return options_; }
  std::uint32_t rings() const { return static_cast<std::uint32_t>(queues_.size()); }
  const std::vector<GrantedQueue>& queues() const { return queues_; }
  std::byte* bounce() const { return queues_.front().bounce; }

  // On the part `part` of `parts` equal ones of its queue pairs and CTAs.
  void enqueue(const IoControlBlock& block, cudaStream_t stream, std::uint32_t part = 0, std::uint32_t parts = 1) {
    const std::uint32_t mine = rings() / parts;
    check(tardis_gpu_gio_clear(&block, stream), "clear");
    check(tardis_gpu_gio_run(queues_.data() + part * mine, mine, &block, std::max(1u, options_.ctas / parts), stream),
          "run");
  }
  // Returns how long it took, in ns of the host.
  std::uint64_t run(const IoControlBlock& block, cudaStream_t stream = nullptr) {
    const std::uint64_t begin = now_ns();
    enqueue(block, stream);
    wait_for(stream, "ring");
    return now_ns() - begin;
  }

 private:
  const GpuRigOptions options_;
  Array<std::byte> memory_;
  std::unique_ptr<Session> rig_;
  Array<RingState> states_;
  Array<std::uint16_t> uses_;
  Array<std::uint64_t> prp_;
  Array<nvme::SglDescriptor> sgl_;
  std::vector<GrantedQueue> queues_;
};

}  // namespace tardis::gio::testing
