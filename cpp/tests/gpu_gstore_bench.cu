// SPDX-License-Identifier: Apache-2.0
// On a GPU: how fast its index answers and changes, beside the store's index on this machine's cores, and the batch
// from which on the GPU is first. bench/gstore.py runs it.
//   tardis_gpu_gstore_bench SHARED_MEMORY_FOLDER [entries, default 16777216] [seconds of budget, default 150]
// Prints one JSON object a line. Exit status 77: no GPU here.
#include <cmath>
#include <thread>

#include "gpu_gstore_cpu_index.h"
#include "gpu_gstore_measure.cuh"

namespace tardis::gstore::testing {
namespace {

constexpr std::uint32_t kMost = 1 << 20;  // keys of a batch
constexpr std::uint32_t kSets = 8;        // of keys, in turn: 256 MiB, more than the caches hold
const std::vector<std::uint32_t> kBatches = {32, 128, 512, 2048, 8192, 32768, 131072, 524288, 1048576};

__global__ void make_entries(tardis_gpu_index_entry* out, std::uint64_t first, std::uint32_t n, std::uint8_t op) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    out[i] = entry_of(key_of(first + i), first + i + 1, 0, op);
  }
}

__global__ void make_keys(Key* keys, std::uint64_t seed, std::uint64_t entries, std::uint64_t offset, std::uint32_t n) {
  for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    keys[i] = key_of(offset + scramble(seed + i) % entries);
  }
}

// What a lookup of a key must at least read, without asking what it says: a bucket, by a warp, and 64 bytes of a record
// that a lane reads, at places that need no bucket to be known.
__global__ void __launch_bounds__(256)
    gather(tardis_gpu_index index, std::uint32_t n, std::uint64_t seed, std::uint64_t* out) {
  const std::uint32_t lane = threadIdx.x % kLanes;
  const std::uint32_t warps = gridDim.x * 8;
  std::uint64_t sum = 0;
  for (std::uint32_t tile = blockIdx.x * 8 + threadIdx.x / kLanes; tile < n / kLanes; tile += warps) {
    const std::uint64_t draw = scramble(seed + tile * kLanes + lane);
    const std::uint32_t bucket = scale(draw, index.buckets);
    for (int first = 0; first < kLanes; first += 8) {
      std::uint64_t words[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        words[i] = load(bucket_words(index, __shfl_sync(~0u, bucket, first + i)) + lane);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += words[i];
    }
    const auto* record =
        reinterpret_cast<const ulonglong2*>(record_words(index, scale(draw * 3, index.buckets), 1 + draw % 31));
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += __ldcg(record + i).x;
  }
  if (sum == 0x123456789) *out = sum;
}

__global__ void __launch_bounds__(512) read_all(const ulonglong2* from, std::uint64_t n, std::uint64_t* out) {
  std::uint64_t sum = 0;
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 4 * step) {
    ulonglong2 v[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i + k * step < n) v[k] = __ldcg(from + i + k * step);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += v[k].x + v[k].y;
  }
  if (sum == 0x123456789) *out = sum;
}

// A batch that asks nothing: what a launch and a report cost by themselves.
__global__ void __launch_bounds__(256)
    report_only(std::uint32_t* finished, std::uint64_t* epoch_memory, tardis_gpu_report* report) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  fence();
  if (atomicAdd(finished, 1) + 1 != gridDim.x) return;
  *finished = 0;
  const std::uint64_t epoch = ++*epoch_memory;
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(&report->epoch), "l"(epoch) : "memory");
}

struct Bench {
  Bench(std::uint64_t entries, const std::string& folder)
      : entries(entries),
        table(entries),
        device_keys(device_array<Key>(std::size_t{kMost} * kSets)),
        host_keys(mapped_array<Key>(std::size_t{kMost} * kSets)),
        device_answers(device_array<tardis_gpu_index_answer>(kMost, 0xEE)),
        host_answers(mapped_array<tardis_gpu_index_answer>(kMost)),
        changes(device_array<tardis_gpu_index_entry>(kMost)),
        host_changes(mapped_array<tardis_gpu_index_entry>(kMost)),
        ticket(device_array<tardis_gpu_ticket>(1)),
        count(mapped_array<std::uint32_t>(1)),
        device_count(device_array<std::uint32_t>(1)),
        report(mapped_array<tardis_gpu_report>(1)),
        sink(device_array<std::uint64_t>(1)),
        folder(folder) {
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Bench() { cudaStreamDestroy(stream); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void set_count(std::uint32_t n) {
    count[0] = n;
    check(cudaMemcpyAsync(device_count.get(), count.get(), 4, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  void lookup(const Key* keys, std::uint32_t n, tardis_gpu_index_answer* answers, tardis_gpu_report* to,
              std::uint32_t ctas = 0) {
    check(
        tardis_gpu_index_lookup(&table.index, keys, device_count.get(), n, 0, answers, ticket.get(), to, ctas, stream),
        "tardis_gpu_index_lookup");
  }
  double apply(const tardis_gpu_index_entry* list, std::uint32_t n, Timer& timer) {
    return timer.seconds([&] {
      check(tardis_gpu_index_apply(&table.index, list, device_count.get(), n, nullptr, ticket.get(), report.get(), 0,
                                   stream),
            "tardis_gpu_index_apply");
    });
  }
  void expect_total(int status, std::uint32_t n, const char* what) const {
    if (report[0].totals[status] == n) return;
    std::fprintf(stderr, "%s: %u, expected %u\n", what, report[0].totals[status], n);
    std::exit(1);
  }
  static void wait_epoch(const tardis_gpu_report& where, std::uint64_t epoch) {
    const auto start = Clock::now();
    while (__atomic_load_n(&where.epoch, __ATOMIC_ACQUIRE) < epoch) {
      if (since(start) < 5) continue;
      std::fprintf(stderr, "no report after 5 s\n");
      std::exit(1);
    }
  }
  // Keys of a set, at a place that differs from turn to turn for small batches.
  std::size_t place(std::uint32_t turn, std::uint32_t n) const {
    const std::size_t room = std::size_t{kMost} * kSets;
    return n >= kMost ? (turn % kSets) * std::size_t{kMost} : scramble(turn) % (room - n);
  }

  void load();
  void limits();
  void rates();
  void rates_with_few_blocks();
  std::vector<double> until_reported(std::uint64_t& epoch, const tardis_gpu_report& where, int rounds,
                                     const std::function<void(std::uint32_t)>& one) const;
  void latencies();
  void changes_per_second();
  void cpu(double budget);
  void crossover() const;

  const std::uint64_t entries;
  Table table;
  DeviceArray<Key> device_keys;
  MappedArray<Key> host_keys;
  DeviceArray<tardis_gpu_index_answer> device_answers;
  MappedArray<tardis_gpu_index_answer> host_answers;
  DeviceArray<tardis_gpu_index_entry> changes;
  MappedArray<tardis_gpu_index_entry> host_changes;
  DeviceArray<tardis_gpu_ticket> ticket;
  MappedArray<std::uint32_t> count;
  DeviceArray<std::uint32_t> device_count;
  MappedArray<tardis_gpu_report> report;
  DeviceArray<std::uint64_t> sink;
  const std::string folder;
  cudaStream_t stream = nullptr;
  double gather_limit = 0, host_read_limit = 0;                // G keys/s
  std::vector<double> gpu_us, gpu_host_us, core_us, cores_us;  // of a batch
};

void Bench::load() {
  Timer timer(stream);
  std::vector<double> rates;
  const auto start = Clock::now();
  for (std::uint64_t first = 0; first < entries; first += kMost) {
    const auto n = static_cast<std::uint32_t>(std::min<std::uint64_t>(kMost, entries - first));
    set_count(n);
    make_entries<<<1024, 256, 0, stream>>>(changes.get(), first, n, TARDIS_GPU_INDEX_PUT);
    rates.push_back(n / apply(changes.get(), kMost, timer) * 1e-9);
    expect_total(TARDIS_GPU_INDEX_INSERTED, n, "inserted");
  }
  row("load, entries in HBM", "GPU index", std::to_string(entries) + " entries", since(start), "s");
  row("insert, empty to full", "GPU index", keys_text(kMost), median(rates), "G/s");
  for (std::uint32_t set = 0; set < kSets; ++set) {
    make_keys<<<1024, 256, 0, stream>>>(device_keys.get() + std::size_t{set} * kMost, 1 + std::uint64_t{set} * kMost,
                                        entries, 0, kMost);
  }
  check(cudaGetLastError(), "make_keys");
  check(
      cudaMemcpyAsync(host_keys.get(), device_keys.get(), sizeof(Key) * kMost * kSets, cudaMemcpyDeviceToHost, stream),
      "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  std::fprintf(stderr, "load %.3f\n", static_cast<double>(entries) / (table.index.buckets * 31.0));
}

void Bench::limits() {
  Timer timer(stream);
  std::vector<double> gathers, reads;
  for (int i = 0; i < 9; ++i) {
    gathers.push_back(kMost * 4 / timer.seconds([&] {
      gather<<<1056, 256, 0, stream>>>(table.index, kMost * 4, 99 + i, sink.get());
    }) * 1e-9);
    reads.push_back(sizeof(Key) * kMost * kSets / timer.seconds([&] {
      read_all<<<64, 512, 0, stream>>>(reinterpret_cast<const ulonglong2*>(host_keys.get()), 2ull * kMost * kSets,
                                       sink.get());
    }) * 1e-9);
  }
  check(cudaGetLastError(), "limits");
  gather_limit = median(gathers);
  host_read_limit = median(reads) / sizeof(Key);
  row("limit: 320 random bytes a key", "GPU", keys_text(kMost * 4), gather_limit, "G/s");
  row("limit: reads of host memory", "GPU", "256 MiB", median(reads), "GB/s");
}

void Bench::rates() {
  Timer timer(stream);
  constexpr int kRounds = 9;
  for (const std::uint32_t n : kBatches) {
    set_count(n);
    const int repeats = n >= 524288 ? 8 : 32;
    const std::string size = keys_text(n);
    const auto measure = [&](const char* test, const std::function<void(std::uint32_t)>& one, double limit) {
      std::uint32_t turn = 0;
      const Graph graph(stream, [&] {
        for (int i = 0; i < repeats; ++i) one(turn++);
      });
      std::vector<double> rates, plain;
      for (int round = 0; round < kRounds; ++round) {
        rates.push_back(n * 1e-9 * repeats / timer.seconds([&] { graph.launch(stream); }));
        expect_total(TARDIS_GPU_INDEX_FOUND, n, "found");
        plain.push_back(n * 1e-9 * repeats / timer.seconds([&] {
          for (int i = 0; i < repeats; ++i) one(turn++);
        }));
        expect_total(TARDIS_GPU_INDEX_FOUND, n, "found");
      }
      row(test, "GPU index, graph", size, median(rates), "G/s", limit);
      row(test, "GPU index, launches", size, median(plain), "G/s", limit);
    };
    measure(
        "lookup, keys in HBM",
        [&](std::uint32_t turn) { lookup(device_keys.get() + place(turn, n), n, device_answers.get(), report.get()); },
        gather_limit);
    measure(
        "lookup, keys in host memory",
        [&](std::uint32_t turn) { lookup(host_keys.get() + place(turn, n), n, device_answers.get(), report.get()); },
        host_read_limit);
    if (n < 2048) continue;
    auto* staging = reinterpret_cast<Key*>(changes.get());
    measure(
        "lookup, keys copied from host",
        [&](std::uint32_t turn) {
          check(cudaMemcpyAsync(staging, host_keys.get() + place(turn, n), n * sizeof(Key), cudaMemcpyHostToDevice,
                                stream),
                "cudaMemcpyAsync");
          lookup(staging, n, device_answers.get(), report.get());
        },
        host_read_limit);
  }
  // Nothing that is asked for is there.
  make_keys<<<1024, 256, 0, stream>>>(reinterpret_cast<Key*>(changes.get()), 7, entries, entries * 2, kMost);
  set_count(kMost);
  std::vector<double> rates;
  for (int round = 0; round < kRounds; ++round) {
    rates.push_back(kMost * 1e-9 / timer.seconds([&] {
      lookup(reinterpret_cast<Key*>(changes.get()), kMost, device_answers.get(), report.get());
    }));
    expect_total(TARDIS_GPU_INDEX_MISS, kMost, "missed");
  }
  row("lookup, keys in HBM, all misses", "GPU index, launches", keys_text(kMost), median(rates), "G/s", gather_limit);
}

void Bench::rates_with_few_blocks() {
  Timer timer(stream);
  set_count(kMost);
  for (const std::uint32_t ctas : {4u, 8u, 16u, 32u, 66u, 132u, 264u, 528u}) {
    std::vector<double> rates;
    for (std::uint32_t round = 0; round < 5; ++round) {
      rates.push_back(kMost * 1e-9 / timer.seconds([&] {
        lookup(device_keys.get() + place(round, kMost), kMost, device_answers.get(), report.get(), ctas);
      }));
    }
    row("lookup, keys in HBM, few blocks", "GPU index, launches", std::to_string(ctas) + " blocks", median(rates),
        "G/s", gather_limit);
  }
}

// Median and 99th percentile of the time from before one(turn) until its report is seen, in microseconds.
std::vector<double> Bench::until_reported(std::uint64_t& epoch, const tardis_gpu_report& where, int rounds,
                                          const std::function<void(std::uint32_t)>& one) const {
  std::vector<double> times;
  for (int round = -20; round < rounds; ++round) {
    const auto start = Clock::now();
    one(static_cast<std::uint32_t>(round + 20));
    wait_epoch(where, ++epoch);
    if (round >= 0) times.push_back(since(start) * 1e6);
  }
  return {median(times), quantile(times, 0.99)};
}

void Bench::latencies() {
  constexpr std::uint32_t kGraphs = 16;
  auto memory = device_array<std::uint64_t>(2);
  auto empty = mapped_array<tardis_gpu_report>(1);
  const auto nothing = [&](std::uint32_t) {
    report_only<<<64, 256, 0, stream>>>(reinterpret_cast<std::uint32_t*>(memory.get()), memory.get() + 1, empty.get());
    check(cudaGetLastError(), "report_only");
  };
  std::uint64_t empty_epoch = 0;
  const Graph nothing_graph(stream, [&] { nothing(0); });
  const auto least_graph =
      until_reported(empty_epoch, empty[0], 1000, [&](std::uint32_t) { nothing_graph.launch(stream); });
  const auto least_plain = until_reported(empty_epoch, empty[0], 1000, nothing);
  row("launch to report of nothing", "GPU, graph", "64 blocks", least_graph[0], "us", 0, least_graph[1]);
  row("launch to report of nothing", "GPU, launch", "64 blocks", least_plain[0], "us", 0, least_plain[1]);

  std::uint64_t epoch = report[0].epoch;
  for (const std::uint32_t n : kBatches) {
    set_count(n);
    const int rounds = n <= 32768 ? 1000 : 60;
    const auto measure = [&](const char* test, const Key* keys, tardis_gpu_index_answer* answers) {
      std::vector<std::unique_ptr<Graph>> graphs;
      for (std::uint32_t i = 0; i < kGraphs; ++i) {
        graphs.push_back(
            std::make_unique<Graph>(stream, [&] { lookup(keys + place(i, n), n, answers, report.get()); }));
      }
      check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      const auto graph =
          until_reported(epoch, report[0], rounds, [&](std::uint32_t turn) { graphs[turn % kGraphs]->launch(stream); });
      expect_total(TARDIS_GPU_INDEX_FOUND, n, "found");
      const auto plain = until_reported(epoch, report[0], rounds, [&](std::uint32_t turn) {
        lookup(keys + place(turn + 100, n), n, answers, report.get());
      });
      expect_total(TARDIS_GPU_INDEX_FOUND, n, "found");
      row(test, "GPU index, graph", keys_text(n), graph[0], "us", least_graph[0], graph[1]);
      row(test, "GPU index, launch", keys_text(n), plain[0], "us", least_plain[0], plain[1]);
      return graph[0];
    };
    gpu_us.push_back(measure("launch to result, keys and answers in HBM", device_keys.get(), device_answers.get()));
    gpu_host_us.push_back(
        measure("launch to result, keys and answers in host memory", host_keys.get(), host_answers.get()));
    if (n == 2048) measure("launch to result, keys in host memory", host_keys.get(), device_answers.get());
  }
}

void Bench::changes_per_second() {
  Timer timer(stream);
  for (const std::uint32_t n : {128u, 2048u, 65536u, kMost}) {
    set_count(n);
    std::vector<double> insert, replace, erase, host_insert;
    std::uint32_t there = 0;  // of n: beyond a load of 0.8 a few may find no room
    for (int round = 0; round < 7; ++round) {
      const std::uint64_t first = entries * 4;
      make_entries<<<1024, 256, 0, stream>>>(changes.get(), first, n, TARDIS_GPU_INDEX_PUT);
      insert.push_back(n * 1e-6 / apply(changes.get(), n, timer));
      there = n - report[0].totals[TARDIS_GPU_INDEX_FULL];
      expect_total(TARDIS_GPU_INDEX_INSERTED, there, "inserted");
      replace.push_back(n * 1e-6 / apply(changes.get(), n, timer));
      expect_total(TARDIS_GPU_INDEX_REPLACED, there, "replaced");
      make_entries<<<1024, 256, 0, stream>>>(changes.get(), first, n, TARDIS_GPU_INDEX_ERASE);
      erase.push_back(n * 1e-6 / apply(changes.get(), n, timer));
      expect_total(TARDIS_GPU_INDEX_ERASED, there, "erased");
      make_entries<<<1024, 256, 0, stream>>>(host_changes.get(), first, n, TARDIS_GPU_INDEX_PUT);
      host_insert.push_back(n * 1e-6 / apply(host_changes.get(), n, timer));
      there = n - report[0].totals[TARDIS_GPU_INDEX_FULL];
      expect_total(TARDIS_GPU_INDEX_INSERTED, there, "inserted from host memory");
      apply(changes.get(), n, timer);
      expect_total(TARDIS_GPU_INDEX_ERASED, there, "erased");
    }
    if (there != n) std::fprintf(stderr, "%u of %u found no room at a load of 0.8\n", n - there, n);
    row("insert", "GPU index, entries in HBM", keys_text(n), median(insert), "M/s");
    row("insert", "GPU index, entries in host memory", keys_text(n), median(host_insert), "M/s");
    row("replace", "GPU index, entries in HBM", keys_text(n), median(replace), "M/s");
    row("erase", "GPU index, entries in HBM", keys_text(n), median(erase), "M/s");
  }
}

void Bench::cpu(double budget) {
  const auto start = Clock::now();
  CpuIndex index(folder, entries, std::max(1u, std::thread::hardware_concurrency()));
  row("load", "store's index, all cores", std::to_string(entries) + " entries", index.load_seconds(), "s");
  const auto measure = [&](const char* system, std::uint32_t n, const std::function<bool(const Key*)>& ask) {
    std::vector<double> times;
    const auto began = Clock::now();
    for (std::uint32_t turn = 0; turn < 2000 && (turn < 3 || since(began) < budget / 40); ++turn) {
      const Key* keys = host_keys.get() + place(turn + 1000, n);
      const auto at = Clock::now();
      if (!ask(keys)) {
        std::fprintf(stderr, "the store's index did not find a key\n");
        std::exit(1);
      }
      times.push_back(since(at) * 1e6);
    }
    row("batch", system, keys_text(n), median(times), "us", 0, quantile(times, 0.99));
    row("lookup", system, keys_text(n), n / median(times) * 1e-3, "G/s");
    return median(times);
  };
  for (const std::uint32_t n : kBatches) {
    core_us.push_back(measure("store's index, one core", n, [&](const Key* keys) { return index.find_all(keys, n); }));
  }
  index.start_threads();
  for (const std::uint32_t n : kBatches) {
    cores_us.push_back(
        measure("store's index, all cores", n, [&](const Key* keys) { return index.find_all_together(keys, n); }));
  }
  index.stop_threads();
  const CpuIndex::Changes changes = index.change(500'000);
  row("insert", "store's index, one core", keys_text(500'000), 0.5 / changes.publish, "M/s");
  row("erase", "store's index, one core", keys_text(500'000), 0.5 / changes.unpublish, "M/s");
  std::fprintf(stderr, "the store's index: %u threads, %.1f s\n", index.threads(), since(start));
}

// The smallest batch from which on the GPU is first, by interpolation between measured ones in logarithms.
void Bench::crossover() const {
  const auto smallest = [&](const char* system, const std::vector<double>& gpu, const std::vector<double>& other) {
    std::size_t at = kBatches.size();
    while (at > 0 && gpu[at - 1] < other[at - 1]) --at;
    if (at == kBatches.size()) return row("crossover batch", system, "none up to 1048576", 0, "keys");
    double batch = kBatches[at];
    if (at > 0) {
      const double before = std::log(gpu[at - 1] / other[at - 1]), after = std::log(gpu[at] / other[at]);
      const double share = before / (before - after);
      batch = kBatches[at - 1] * std::pow(static_cast<double>(kBatches[at]) / kBatches[at - 1], share);
    }
    row("crossover batch", system, at == 0 ? "every measured one" : "interpolated", batch, "keys");
  };
  smallest("HBM to HBM against one core", gpu_us, core_us);
  smallest("HBM to HBM against all cores", gpu_us, cores_us);
  smallest("host to host against one core", gpu_host_us, core_us);
  smallest("host to host against all cores", gpu_host_us, cores_us);
}

}  // namespace
}  // namespace tardis::gstore::testing

int main(int argc, char** argv) {
  using namespace tardis::gstore::testing;
  if (argc < 2) {
    std::fprintf(stderr, "usage: tardis_gpu_gstore_bench SHARED_MEMORY_FOLDER [entries] [seconds]\n");
    return 2;
  }
  if (!has_gpu()) return kSkipped;
  Bench bench(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 16ull << 20, argv[1]);
  bench.load();
  bench.limits();
  bench.latencies();
  bench.rates();
  bench.rates_with_few_blocks();
  bench.changes_per_second();
  bench.cpu(argc > 3 ? std::strtod(argv[3], nullptr) : 60);
  bench.crossover();
  return 0;
}
