// SPDX-License-Identifier: Apache-2.0
// When a small copy to the device is there that another stream asks for behind a load by copy engines: what a forward's
// inputs meet. The load: 511 pages in 9 runs, K and V of 128 KiB in 32 layers. Prints one JSON object a size. Exit
// status 0; 1: a CUDA error; 77: no GPU here.
#include "gpu_gstore_measure.cuh"

namespace tardis::gstore::testing {
namespace {

constexpr std::size_t kLayers = 32, kPages = 511, kRuns = 9, kRow = 128 << 10, kObject = 2 * kRow * kLayers;
constexpr std::size_t kMostBytes = 1 << 20;
constexpr int kRepetitions = 9;

class SmallCopies {
 public:
  SmallCopies()
      : objects_(mapped_array<std::byte>(kPages * kObject)),
        pool_(device_array<std::byte>(kPages * kObject)),
        pinned_(mapped_array<std::byte>(kMostBytes)),
        pageable_(kMostBytes),
        target_(device_array<std::byte>(kMostBytes)) {
    for (cudaEvent_t* event : {&begin_, &loaded_, &copied_}) check(cudaEventCreate(event), "cudaEventCreate");
    check(cudaStreamCreateWithFlags(&load_, cudaStreamNonBlocking), "stream");
    check(cudaStreamCreateWithFlags(&forward_, cudaStreamNonBlocking), "stream");
  }
  ~SmallCopies() {
    for (cudaEvent_t event : {begin_, loaded_, copied_}) cudaEventDestroy(event);
    cudaStreamDestroy(load_);
    cudaStreamDestroy(forward_);
  }
  SmallCopies(const SmallCopies&) = delete;
  SmallCopies& operator=(const SmallCopies&) = delete;

  void measure(bool pinned, std::size_t bytes) {
    std::vector<double> copies, loads;
    for (int i = 0; i < kRepetitions; ++i) {
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      check(cudaEventRecord(begin_, load_), "cudaEventRecord");
      load();
      check(cudaEventRecord(loaded_, load_), "cudaEventRecord");
      const void* from = pinned ? pinned_.get() : pageable_.data();
      check(cudaMemcpyAsync(target_.get(), from, bytes, cudaMemcpyHostToDevice, forward_), "small copy");
      check(cudaEventRecord(copied_, forward_), "cudaEventRecord");
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      copies.push_back(milliseconds_to(copied_));
      loads.push_back(milliseconds_to(loaded_));
    }
    row("small copy beside a load", pinned ? "pinned" : "pageable", std::to_string(bytes) + " bytes", median(copies),
        "ms", median(loads));
  }

 private:
  void load() {
    constexpr std::size_t kEach = kPages / kRuns;
    for (std::size_t part = 0; part < 2 * kLayers; ++part) {
      for (std::size_t run = 0; run < kRuns; ++run) {
        std::byte* const to = pool_.get() + (part * kPages + run * kEach) * kRow;
        const std::byte* const from = objects_.get() + run * kEach * kObject + part * kRow;
        check(cudaMemcpy2DAsync(to, kRow, from, kObject, kRow, kEach, cudaMemcpyHostToDevice, load_), "run of pages");
      }
    }
  }
  double milliseconds_to(cudaEvent_t event) const {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, event), "cudaEventElapsedTime");
    return milliseconds;
  }

  const MappedArray<std::byte> objects_;
  const DeviceArray<std::byte> pool_;
  const MappedArray<std::byte> pinned_;
  const std::vector<std::byte> pageable_;
  const DeviceArray<std::byte> target_;
  cudaStream_t load_ = nullptr, forward_ = nullptr;
  cudaEvent_t begin_ = nullptr, loaded_ = nullptr, copied_ = nullptr;
};

}  // namespace
}  // namespace tardis::gstore::testing

int main() {
  using namespace tardis::gstore::testing;
  if (!has_gpu()) return kSkipped;
  SmallCopies bench;
  for (const bool pinned : {true, false}) {
    for (const std::size_t bytes : {256, 4096, 32 << 10, 64 << 10, 128 << 10, 1 << 20}) bench.measure(pinned, bytes);
  }
  return 0;
}
