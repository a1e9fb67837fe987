// SPDX-License-Identifier: Apache-2.0
// On a GPU: rings against the software controller over a file: every record of the file once, in random order, into
// scattered places in HBM, 4 queue pairs and 4 controller threads. One JSON object a line on stdout; bench/gio_file.py
// has fio beside it. Arguments: FILE (made, and overwritten), its MiB, passes.
// Exit status 0, 1 (an error, or wrong bytes), 77 (no GPU here).
#include "tests/gpu_file_support.cuh"

namespace {

using namespace tardis;
using namespace tardis::gio;
using namespace tardis::gio::testing;

constexpr std::uint64_t kSeed = 9, kDeadline = 15'000'000'000;
constexpr std::uint32_t kQueues = 4, kCommands = 64;

// K and V of each record, half each, to places of their own; IOCBs one after the other.
class FilePath {
 public:
  FilePath(const std::string& file, std::uint64_t file_bytes, std::uint32_t record)
      : record_(record), gpu_(options(file, file_bytes, record)), pool_(Where::kDevice, file_bytes) {
    const std::vector<std::uint64_t> order = shuffled_records(file_bytes, record, record);
    const std::vector<std::uint64_t> places = shuffled_records(file_bytes, record, record + 1);
    for (std::size_t first = 0; first < order.size(); first += kMostContexts) {
      const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(kMostContexts, order.size() - first));
      std::vector<IoContext> contexts(count, IoContext{});
      for (std::uint32_t i = 0; i < count; ++i) {
        contexts[i].op = IoOp::kRead;
        contexts[i].block = order[first + i] * (record >> 12);
        for (std::uint32_t half = 0; half < 2; ++half) {
          contexts[i].bytes[half] = record / 2;
          contexts[i].memory[half] = reinterpret_cast<std::uint64_t>(pool_.data()) + places[first + i] * (record / 2) +
                                     half * (file_bytes / 2);
        }
      }
      iocbs_.push_back(std::make_unique<Iocb>(Where::kDevice));
      iocbs_.back()->contexts.upload(contexts);
      iocbs_.back()->count.upload({count});
      records_ += count;
    }
  }

  // GB/s by the host's clock, from the first launch to the last flag.
  double run() {
    const std::uint64_t begin = now_ns();
    for (const auto& iocb : iocbs_) gpu_.enqueue(iocb->block(kDeadline), nullptr);
    wait_for(nullptr, "file", 60);
    const double seconds = static_cast<double>(now_ns() - begin) * 1e-9;
    std::uint64_t done = 0;
    for (const auto& iocb : iocbs_) done += iocb->total(gpu_.rings()).done;
    if (done != records_) {
      std::fprintf(stderr, "expected %llu commands done, found %llu\n", static_cast<unsigned long long>(records_),
                   static_cast<unsigned long long>(done));
      std::_Exit(1);
    }
    return static_cast<double>(records_) * record_ / seconds * 1e-9;
  }
  unsigned long long wrong_words() {
    check(cudaMemset(pool_.data(), 0xa5, pool_.size()), "poison");
    (void)run();
    const Array<unsigned long long> wrong(Where::kMapped, 1);
    for (const auto& iocb : iocbs_) {
      compare_landed<<<256, 256>>>(iocb->contexts.data(), iocb->count.data(), kSeed, 12, wrong.data());
      check(cudaGetLastError(), "compare");
    }
    wait_for(nullptr, "compare");
    return wrong[0];
  }

 private:
  static GpuRigOptions options(const std::string& file, std::uint64_t bytes, std::uint32_t record) {
    GpuRigOptions options;
    options.file = file;
    options.bytes = bytes;
    options.queues = kQueues;
    options.controller_threads = 4;
    options.commands = kCommands;
    options.entries = 2 * kCommands;
    options.slot_bytes = record;
    return options;
  }

  const std::uint32_t record_;
  GpuRig gpu_;
  Array<std::byte> pool_;
  std::vector<std::unique_ptr<Iocb>> iocbs_;
  std::uint64_t records_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  (void)::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s FILE MIB PASSES\n", argv[0]);
    return 1;
  }
  if (!gpu_test::has_gpu()) return gpu_test::kSkipped;
  const std::string file = argv[1];
  const std::uint64_t bytes = std::strtoull(argv[2], nullptr, 10) << 20;
  const int passes = std::max(1, std::atoi(argv[3]));
  check(tardis_gpu_gio_load(), "load");
  fill_file(file, bytes, kSeed);
  const bool direct = File(file, O_RDONLY).direct();
  int failures = 0;
  for (const std::uint32_t record : {64u << 10, 256u << 10, 1u << 20}) {
    FilePath path(file, bytes, record);
    const unsigned long long wrong = path.wrong_words();
    failures += wrong != 0;
    std::vector<double> rates;
    for (int i = 0; i < passes; ++i) rates.push_back(path.run());
    std::printf(
        "{\"case\": \"file, random read\", \"system\": \"gio ring, software controller over a file\", \"size\": %u, "
        "\"value\": %.4g, \"unit\": \"GB/s\", \"limit\": null, \"ratio\": null, \"direct\": %s, \"wrong_words\": %llu, "
        "\"queues\": %u, \"commands_in_flight\": %u}\n",
        record, median(rates), direct ? "true" : "false", wrong, kQueues, kQueues * kCommands);
    std::fflush(stdout);
  }
  return failures == 0 ? 0 : 1;
}
