// SPDX-License-Identifier: Apache-2.0
// On a GPU: how fast the block table's batches are. bench/gstore.py runs it.
//   tardis_gpu_gstore_blocks_bench
// Prints one JSON object a line. Exit status 77: no GPU here.
#include "gpu_gstore_measure.cuh"
#include "gstore/block_row.h"

namespace tardis::gstore::testing {
namespace {

constexpr std::uint32_t kHbm = 1 << 20, kDram = 1 << 20, kFile = 4 << 20, kRows = 6 << 20, kMost = 1 << 20;

__global__ void number_files(std::uint32_t* files, std::uint32_t n) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) files[i] = i;
}

// Answers of a lookup: three of four are found, at handles in no order.
__global__ void make_answers(tardis_gpu_index_answer* answers, const std::uint64_t* handles, std::uint32_t most,
                             std::uint32_t n) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const std::uint64_t draw = scramble(i);
    const bool found = draw % 4 != 0;
    answers[i] = {found ? handles[(draw >> 8) % most] : kNone, 0, 0, 0, found};
  }
}

struct Bench {
  Bench()
      : memory(device_array<std::uint8_t>(tardis_gpu_blocks_memory_bytes(kHbm, kDram, kFile, kRows))),
        handles(device_array<std::uint64_t>(kMost)),
        all_handles(device_array<std::uint64_t>(kFile)),
        ids(device_array<std::uint64_t>(kMost)),
        to(device_array<std::uint64_t>(kMost)),
        taken(device_array<std::uint64_t>(std::size_t{kMost} * TARDIS_GPU_SOURCES)),
        lists(device_array<std::uint32_t>(std::size_t{kMost} * TARDIS_GPU_SOURCES)),
        list_counts(device_array<std::uint32_t>(TARDIS_GPU_SOURCES)),
        sources(device_array<std::uint64_t>(TARDIS_GPU_SOURCES)),
        files(device_array<std::uint32_t>(kFile)),
        answers(device_array<tardis_gpu_index_answer>(kMost)),
        scratch(device_array<std::uint8_t>(tardis_gpu_blocks_scratch_bytes())),
        found(device_array<std::uint32_t>(1)),
        count(device_array<std::uint32_t>(1)),
        ticket(device_array<tardis_gpu_ticket>(1)),
        report(mapped_array<tardis_gpu_report>(1)) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check(tardis_gpu_blocks_place(&blocks, memory.get(), tardis_gpu_blocks_memory_bytes(kHbm, kDram, kFile, kRows),
                                  kHbm, kDram, kFile, kRows),
          "tardis_gpu_blocks_place");
    check(tardis_gpu_blocks_reset(&blocks, stream), "tardis_gpu_blocks_reset");
    number_files<<<1024, 256, 0, stream>>>(files.get(), kFile);
    check(cudaGetLastError(), "number_files");
    set_count(kFile);
    check(tardis_gpu_blocks_adopt(&blocks, files.get(), count.get(), kFile, all_handles.get(), nullptr, ticket.get(),
                                  report.get(), stream),
          "tardis_gpu_blocks_adopt");
    expect_ok(kFile, "adopted");
  }
  ~Bench() { cudaStreamDestroy(stream); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void set_count(std::uint32_t n) {
    check(cudaMemcpy(count.get(), &n, sizeof n, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void expect_ok(std::uint32_t n, const char* what) const {
    check(cudaStreamSynchronize(stream), what);
    if (report[0].totals[TARDIS_GPU_BLOCKS_OK] == n) return;
    std::fprintf(stderr, "%s: %u, expected %u\n", what, report[0].totals[TARDIS_GPU_BLOCKS_OK], n);
    std::exit(1);
  }
  void use(std::uint32_t how, std::uint32_t n) {
    check(tardis_gpu_blocks_use(&blocks, how, handles.get(), count.get(), n, ids.get(), nullptr, ticket.get(),
                                report.get(), stream),
          "tardis_gpu_blocks_use");
  }

  void run(std::uint32_t n) {
    constexpr int kRounds = 15;
    Timer timer(stream);
    set_count(n);
    std::vector<double> alloc, ref, unref, swap, free, classify, candidates;
    for (int round = 0; round < kRounds; ++round) {
      alloc.push_back(timer.seconds([&] {
        check(tardis_gpu_blocks_alloc(&blocks, TARDIS_GPU_HBM, count.get(), n, handles.get(), ids.get(), nullptr,
                                      ticket.get(), report.get(), stream),
              "tardis_gpu_blocks_alloc");
      }));
      expect_ok(n, "allocated");
      ref.push_back(timer.seconds([&] { use(TARDIS_GPU_REF, n); }));
      expect_ok(n, "referenced");
      unref.push_back(timer.seconds([&] { use(TARDIS_GPU_UNREF, n); }));
      use(TARDIS_GPU_UNREF, n);
      expect_ok(n, "given back");
      swap.push_back(timer.seconds([&] {
        check(tardis_gpu_blocks_swap_begin(&blocks, TARDIS_GPU_DRAM, 0, handles.get(), count.get(), n, ids.get(),
                                           to.get(), nullptr, ticket.get(), report.get(), stream),
              "tardis_gpu_blocks_swap_begin");
        check(tardis_gpu_blocks_swap_end(&blocks, handles.get(), to.get(), nullptr, count.get(), n, nullptr,
                                         ticket.get(), report.get(), stream),
              "tardis_gpu_blocks_swap_end");
      }));
      expect_ok(n, "moved");
      free.push_back(timer.seconds([&] {
        check(
            tardis_gpu_blocks_free(&blocks, handles.get(), count.get(), n, nullptr, ticket.get(), report.get(), stream),
            "tardis_gpu_blocks_free");
      }));
      expect_ok(n, "freed");
      make_answers<<<1024, 256, 0, stream>>>(answers.get(), all_handles.get(), kFile, n);
      classify.push_back(timer.seconds([&] {
        check(tardis_gpu_blocks_classify(&blocks, answers.get(), count.get(), n, ids.get(), lists.get(), taken.get(),
                                         list_counts.get(), sources.get(), stream),
              "tardis_gpu_blocks_classify");
      }));
      // Gives back what classification took; what it took is in the list of files.
      check(tardis_gpu_blocks_use(&blocks, TARDIS_GPU_UNREF, taken.get() + std::size_t{n} * TARDIS_GPU_SOURCE_FILE,
                                  &list_counts[TARDIS_GPU_SOURCE_FILE], n, nullptr, nullptr, ticket.get(), report.get(),
                                  stream),
            "tardis_gpu_blocks_use");
      check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      expect_ok(report[0].count, "given back by source");
      candidates.push_back(timer.seconds([&] {
        check(tardis_gpu_blocks_candidates(&blocks, TARDIS_GPU_FILE, 100, count.get(), n, handles.get(), found.get(),
                                           scratch.get(), stream),
              "tardis_gpu_blocks_candidates");
      }));
      std::uint32_t got = 0;
      check(cudaMemcpy(&got, found.get(), sizeof got, cudaMemcpyDeviceToHost), "cudaMemcpy");
      if (got != n) check(cudaErrorUnknown, "candidates");
    }
    const std::string size = std::to_string(n) + " blocks";
    const auto tell = [&](const char* test, const std::vector<double>& seconds) {
      row(test, "GPU block table", size, n * 1e-6 / median(seconds), "M/s");
    };
    tell("alloc", alloc);
    tell("ref", ref);
    tell("unref", unref);
    tell("swap begin and end", swap);
    tell("free", free);
    tell("classify", classify);
    row("eviction candidates of 4194304 rows", "GPU block table", size, median(candidates) * 1e6, "us");
  }

  DeviceArray<std::uint8_t> memory;
  DeviceArray<std::uint64_t> handles, all_handles, ids, to, taken;
  DeviceArray<std::uint32_t> lists, list_counts;
  DeviceArray<std::uint64_t> sources;
  DeviceArray<std::uint32_t> files;
  DeviceArray<tardis_gpu_index_answer> answers;
  DeviceArray<std::uint8_t> scratch;
  DeviceArray<std::uint32_t> found, count;
  DeviceArray<tardis_gpu_ticket> ticket;
  MappedArray<tardis_gpu_report> report;
  tardis_gpu_blocks blocks{};
  cudaStream_t stream = nullptr;
};

}  // namespace
}  // namespace tardis::gstore::testing

int main() {
  using namespace tardis::gstore::testing;
  if (!has_gpu()) return kSkipped;
  Bench bench;
  for (const std::uint32_t n : {2048u, 65536u, 1048576u}) bench.run(n);
  return 0;
}
