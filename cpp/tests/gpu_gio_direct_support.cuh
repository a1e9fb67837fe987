// SPDX-License-Identifier: Apache-2.0
// Rings on a GPU whose commands land in HBM by its copy engines.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "gio/copy_engine_memory.h"
#include "gio/verify_kernel.h"
#include "tests/gpu_gio_support.cuh"

namespace tardis::gio::testing {

// What starting copies took, of all lanes since the last reset().
struct StartTimes {
  std::atomic<std::uint64_t> batches{0}, copies{0}, ns{0}, most_ns{0};
  void reset() { batches = copies = ns = most_ns = 0; }
  void add(std::size_t count, std::uint64_t took) {
    ++batches;
    copies += count;
    ns += took;
    std::uint64_t most = most_ns.load();
    while (most < took && !most_ns.compare_exchange_weak(most, took)) {
    }
  }
  static StartTimes& of_all() {
    static StartTimes times;
    return times;
  }
};

class CudaEngine {
 public:
  explicit CudaEngine(tardis_gpu_copy_calls calls = TARDIS_GPU_COPY_CALLS_BEST) {
    int device = 0;
    check(cudaGetDevice(&device), "device");
    check(tardis_gpu_copy_engine_open(device, calls, &table_), "copy_engine_open");
    timed_ = table_;
    start_of_table() = table_.start;
    timed_.start = [](void* lane, int to_remote, const tardis_copy* copies, std::size_t count, std::uint64_t batch) {
      const std::uint64_t begin = now_ns();
      const int result = start_of_table()(lane, to_remote, copies, count, batch);
      StartTimes::of_all().add(count, now_ns() - begin);
      return result;
    };
  }
  ~CudaEngine() { check(tardis_gpu_copy_engine_close(&table_), "copy_engine_close"); }
  CudaEngine(const CudaEngine&) = delete;
  CudaEngine& operator=(const CudaEngine&) = delete;
  const tardis_copy_engine& table() const { return timed_; }

 private:
  using Start = decltype(tardis_copy_engine::start);
  static Start& start_of_table() {  // the same of all engines
    static Start start = nullptr;
    return start;
  }
  tardis_copy_engine table_{}, timed_{};
};

// The engine and the pools stay longer. Without an engine: only bounce().
class DirectGpuRig {
 public:
  DirectGpuRig(const GpuRigOptions& options, const CudaEngine* engine,
               const std::vector<const Array<std::byte>*>& pools)
      : gpu_(std::make_unique<GpuRig>(options)), lists_(Where::kMapped, gpu_->rig().direct_list_bytes()) {
    if (engine == nullptr) return;
    std::string error;
    if (auto used = gpu_->rig().use_direct(engine->table(), lists_.data()); !used) error = used.error().message;
    for (const Array<std::byte>* pool : pools) {
      if (!error.empty()) break;
      if (auto added = gpu_->rig().add_region(pool->data(), pool->size()); !added) error = added.error().message;
    }
    if (!error.empty()) {
      std::fprintf(stderr, "direct landing: %s\n", error.c_str());
      std::fflush(stderr);
      std::_Exit(1);
    }
    const std::vector<DirectRegion>& regions = gpu_->rig().regions();
    regions_ = Array<DirectRegion>(Where::kDevice, regions.size());
    regions_.upload(regions);
    start();
  }
  ~DirectGpuRig() { gpu_.reset(); }  // lists stay longer than the session
  DirectGpuRig(const DirectGpuRig&) = delete;
  DirectGpuRig& operator=(const DirectGpuRig&) = delete;
  // Also after renew().
  void start() {
    gpu_->start();
    queues_ = gpu_->queues();
    for (std::size_t i = 0; i < queues_.size(); ++i) queues_[i].direct = gpu_->rig().direct(i).seen_at(regions_.data());
  }

  GpuRig& bounce() { return *gpu_; }  // the same queue pairs, by bounce slots
  Session& rig() { return gpu_->rig(); }
  std::uint32_t rings() const { return gpu_->rings(); }
  const std::vector<GrantedQueue>& queues() const { return queues_; }

  // Nothing is moved by SMs: one CTA runs the rings.
  void enqueue(const IoControlBlock& block, cudaStream_t stream) {
    check(tardis_gpu_gio_clear(&block, stream), "clear");
    check(tardis_gpu_gio_run(queues_.data(), rings(), &block, 1, stream), "run");
  }

 private:
  std::unique_ptr<GpuRig> gpu_;
  Array<std::byte> lists_;
  Array<DirectRegion> regions_;
  std::vector<GrantedQueue> queues_;
};

// Behind a ring: digests of what it landed, and the flag that the layer's users wait for.
class Verifier {
 public:
  explicit Verifier(std::uint32_t ctas) : ctas_(ctas), words_(Where::kDevice, 3), copy_(Where::kMapped, 3) {}
  void enqueue(const IoControlBlock& block, cudaStream_t stream) const {
    check(cudaMemsetAsync(words_.data() + 2, 0, sizeof(std::uint32_t), stream), "clear");
    check(tardis_gpu_gio_verify(&block, words_.data(), words_.data() + 2, ctas_, stream), "verify");
  }
  // Of the last one, which has ended.
  std::uint32_t damaged() const { return word(1); }
  std::uint32_t flag() const { return word(2); }

 private:
  std::uint32_t word(std::size_t i) const {
    check(cudaMemcpy(copy_.data(), words_.data(), 12, cudaMemcpyDefault), "words");
    return copy_[i];
  }
  const std::uint32_t ctas_;
  Array<std::uint32_t> words_, copy_;
};

// Polls seldom: calls of the driver would hold its lock against those that start copies.
inline void wait_seldom(cudaStream_t stream, const char* what, double seconds = 20) {
  const std::uint64_t begin = now_ns();
  cudaError_t state;
  while ((state = cudaStreamQuery(stream)) == cudaErrorNotReady) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (static_cast<double>(now_ns() - begin) > seconds * 1e9) wait_for(stream, what, 0);
  }
  check(state, what);
}

}  // namespace tardis::gio::testing
