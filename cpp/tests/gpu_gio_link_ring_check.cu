// SPDX-License-Identifier: Apache-2.0
// On a GPU: rings of a class that is outranked land their bytes at its budget, and at full rate when it is not; every
// byte compared. Exit status 0: right; 1: not, or a CUDA error; 77: no GPU here.
#include <algorithm>
#include <random>

#include "gio/link_host.h"
#include "tests/gpu_gio_support.cuh"

namespace {

using namespace tardis;
using namespace tardis::gio;
using namespace tardis::gio::testing;

constexpr std::uint64_t kBudget = 128'000'000, kDeadlineNs = 10'000'000'000;
constexpr std::uint32_t kClass = TARDIS_GPU_LINK_WRITE_BEHIND, kIn = TARDIS_GPU_LINK_IN;

int wrong_total = 0;

void expect(bool right, const std::string& what) {
  std::printf("%-72s %s\n", what.c_str(), right ? "right" : "WRONG");
  std::fflush(stdout);
  wrong_total += !right;
}

void check_ring(const std::string& name, std::uint32_t slot_bytes, std::uint32_t digested, std::uint64_t seed) {
  tardis_gpu_link* link = nullptr;
  check(tardis_gpu_link_create(&link), "link_create");
  check(tardis_gpu_link_set_budget(link, kClass, kBudget), "link_set_budget");
  tardis_gpu_link_words* const words = tardis_gpu_link_words_of(link);
  GpuRigOptions options;
  options.bytes = 16 << 20;
  options.queues = 4;
  options.ctas = 2;
  options.controller_threads = 2;
  options.slot_bytes = slot_bytes;
  GpuRig gpu(options);
  fill_words(gpu.rig().media(), options.bytes, seed);
  const std::size_t count = std::min<std::size_t>(kMostContexts, options.bytes / slot_bytes),
                    bytes = count * slot_bytes;
  Array<std::byte> pool(Where::kDevice, bytes);
  std::vector<std::byte> found(bytes);
  Iocb iocb;
  for (std::size_t i = 0; i < count; ++i) {
    IoContext context{};
    context.op = IoOp::kRead;
    context.block = i * slot_bytes >> options.block_shift;
    context.bytes[0] = context.bytes[1] = slot_bytes / 2;
    for (int half = 0; half < 2; ++half) {
      context.memory[half] = reinterpret_cast<std::uint64_t>(pool.data()) + i * slot_bytes + half * (slot_bytes / 2);
    }
    iocb.contexts[i] = context;
  }
  iocb.count[0] = static_cast<std::uint32_t>(count);
  IoControlBlock block = iocb.block(kDeadlineNs);
  block.digested = digested;
  const tardis_gpu_link_traffic traffic = {words, kClass, kIn, 0};
  const auto seconds = [&](const std::string& what) {
    check(cudaMemset(pool.data(), 0xa5, bytes), "poison");
    const std::uint64_t begin = now_ns();
    check(tardis_gpu_gio_clear(&block, nullptr), "clear");
    check(tardis_gpu_gio_run_in_class(gpu.queues().data(), gpu.rings(), &block, options.ctas, &traffic, nullptr),
          "run");
    wait_for(nullptr, "ring");
    const double took = static_cast<double>(now_ns() - begin) * 1e-9;
    check(cudaMemcpy(found.data(), pool.data(), bytes, cudaMemcpyDeviceToHost), "pool");
    expect(iocb.flag() == kIoDone && std::memcmp(found.data(), gpu.rig().media(), bytes) == 0, name + what + ": bytes");
    return took;
  };
  seconds(", first");
  const double free = seconds(", with nobody beside");
  const double wanted = static_cast<double>(bytes) / kBudget;
  expect(free < 0.5 * wanted, std::to_string(free * 1e3) + " ms");
  {
    const LinkUse restore(*words, TARDIS_GPU_LINK_RESTORE, kIn);
    const double paced = seconds(", on a budget");
    expect(paced > 0.9 * wanted && paced < 1.3 * wanted,
           "it takes " + std::to_string(wanted * 1e3) + " ms: " + std::to_string(paced * 1e3));
  }
  tardis_gpu_link_counters counters;
  check(tardis_gpu_link_count(link, kClass, &counters), "link_count");
  expect(counters.bytes == 3 * bytes && counters.budget_bytes == bytes && counters.active == 0 && counters.errors == 0,
         name + ": what was counted");
  check(tardis_gpu_link_destroy(link), "link_destroy");
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device\n");
    return 77;
  }
  check(tardis_gpu_gio_load(), "gio_load");
  std::random_device random;
  check_ring("slots of 128 KiB", 128 << 10, 0, random());
  check_ring("slots of 128 KiB, digesting", 128 << 10, 1, random());
  check_ring("slots of 8 KiB", 8 << 10, 0, random());
  std::printf("%s\n", wrong_total == 0 ? "all right" : "WRONG");
  return wrong_total == 0 ? 0 : 1;
}
