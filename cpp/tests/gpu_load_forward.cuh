// SPDX-License-Identifier: Apache-2.0
// What a model does in each layer for a request whose prompt is in the cache but for 64 tokens: a few small kernels, a
// product that fills every SM, and attention that reads all pages of the layer.
#pragma once

#include <cstdint>
#include <functional>

#include "gpu_gstore_measure.cuh"
#include "gpu_load_rig.cuh"

namespace tardis::gstore::testing {

constexpr unsigned kProductThreads = 256, kProductShared = 200 << 10;

// Blocks that fill an SM each.
static __global__ void __launch_bounds__(kProductThreads) product(float* out, int rounds) {
  extern __shared__ float shared[];
  float a = static_cast<float>(threadIdx.x), b = 1.0001f, c = 0.5f, d = 0.25f;
  shared[threadIdx.x] = a;
  for (int i = 0; i < rounds; ++i) {
    a = a * b + c;
    c = c * b + d;
    d = d * b + a;
    a += shared[(threadIdx.x + i) % kProductThreads];
  }
  if (a == 12345.0f) *out = a + c + d;
}

static __global__ void small(float* out) {
  const float a = out[threadIdx.x % 2] * 2.0f + static_cast<float>(threadIdx.x);
  if (a == 12345.5f) *out = a;
}

// Reads a layer's pages, `passes` times.
static __global__ void __launch_bounds__(512)
    attention(const tardis_gpu_pools pools, std::uint32_t layer, std::uint32_t pages, int passes, float* out) {
  float sum = 0;
  const std::uint64_t words = std::uint64_t{pages} * pools.page_bytes[0] / sizeof(uint4);
  for (int pass = 0; pass < passes; ++pass) {
    for (int side = 0; side < 2; ++side) {
      if (pools.layers[side] == nullptr) continue;
      const auto* const at = reinterpret_cast<const uint4*>(pools.layers[side][layer]);
      for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words;
           i += std::uint64_t{gridDim.x} * blockDim.x) {
        const uint4 word = __ldcs(at + i);
        sum += __uint_as_float(word.x ^ word.y) + __uint_as_float(word.z ^ word.w);
      }
    }
  }
  if (sum == 12345.0f) *out = sum;
}

class Forward {
 public:
  Forward(const Pools& pools, int product_us, cudaStream_t stream)
      : pools_(pools.args), out_(device_array<float>(2)), stream_(stream) {
    check(cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize, kProductShared), "product");
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    sms_ = static_cast<unsigned>(properties.multiProcessorCount);
    constexpr int kProbe = 2000;
    const auto probe = [&] {
      Timer timer(stream_);
      return timer.seconds([&] { launch_product(kProbe); });
    };
    (void)probe();
    rounds_ = static_cast<int>(kProbe * product_us * 1e-6 / probe());
  }
  void layer(std::uint32_t number, std::uint32_t pages) const {
    for (int i = 0; i < 4; ++i) small<<<16, 256, 0, stream_>>>(out_.get());
    launch_product(rounds_);
    small<<<64, 256, 0, stream_>>>(out_.get());
    attention<<<4 * sms_, 512, 0, stream_>>>(pools_, number, pages, 2, out_.get());
    for (int i = 0; i < 4; ++i) small<<<16, 256, 0, stream_>>>(out_.get());
    check(cudaGetLastError(), "a layer of the forward");
  }
  cudaStream_t stream() const { return stream_; }

 private:
  void launch_product(int rounds) const {
    product<<<sms_, kProductThreads, kProductShared, stream_>>>(out_.get(), rounds);
  }

  const tardis_gpu_pools pools_;
  DeviceArray<float> out_;
  const cudaStream_t stream_;
  unsigned sms_ = 0;
  int rounds_ = 1;
};

}  // namespace tardis::gstore::testing
