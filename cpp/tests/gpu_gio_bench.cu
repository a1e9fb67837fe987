// SPDX-License-Identifier: Apache-2.0
// On a GPU: what rings reach against the software controller, beside what this machine can do at all: copies of host
// threads alone and while the GPU reads what they write, loads and stores of 4 SMs over the link, a doorbell's way
// there and back. One JSON object a line on stdout: case, system, size (bytes of a command), value, unit, limit, ratio
// and more. Arguments: --quick; --digests: only the whole path, without and with digests; --sweeps: only the limits of
// the machine, 1,024 commands in flight, and by depth. Exit status 0, 1 (an error, or wrong bytes), 77 (no GPU here).
#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>

#include "tests/gpu_gio_support.cuh"

namespace {

using namespace tardis;
using namespace tardis::gio;
using namespace tardis::gio::testing;

constexpr std::uint64_t kMs = 1'000'000;
constexpr const char* kSystem = "gio ring, software controller in memory";
bool quick = false;
int failures = 0;

void row(const char* name, const char* system, std::uint64_t size, double value, const char* unit, double limit,
         const std::string& more = "") {
  std::printf("{\"case\": \"%s\", \"system\": \"%s\", \"size\": %llu, \"value\": %.4g, \"unit\": \"%s\", ", name,
              system, static_cast<unsigned long long>(size), value, unit);
  const bool time = std::strcmp(unit, "us") == 0;
  if (limit > 0) {
    std::printf("\"limit\": %.4g, \"ratio\": %.3f%s}\n", limit, time ? limit / value : value / limit, more.c_str());
  } else {
    std::printf("\"limit\": null, \"ratio\": null%s}\n", more.c_str());
  }
  std::fflush(stdout);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// ---- the machine
// Past L1, which does not see what the host wrote since.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 value;
  asm volatile("ld.relaxed.sys.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

enum class Direction { kIn, kOut };

__global__ void __launch_bounds__(512)
    stream_link(uint4* host, uint4* device, std::uint64_t units, Direction direction, int passes) {
  constexpr int kLoads = 8;
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x * kLoads;
  for (int pass = 0; pass < passes; ++pass) {
    for (std::uint64_t at = (std::uint64_t{blockIdx.x} * blockDim.x) * kLoads + threadIdx.x; at < units; at += step) {
      uint4 values[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const std::uint64_t k = at + std::uint64_t{blockDim.x} * i;
        if (k < units) values[i] = load_once(direction == Direction::kIn ? host + k : device + k);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const std::uint64_t k = at + std::uint64_t{blockDim.x} * i;
        if (k < units) (direction == Direction::kIn ? device : host)[k] = values[i];
      }
    }
  }
}

double link_rate(const Array<std::byte>& host, const Array<std::byte>& device, Direction direction, unsigned ctas) {
  const std::uint64_t units = host.size() / 16;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<double> rates;
  for (int i = 0; i < 4; ++i) {
    check(cudaEventRecord(begin), "event");
    stream_link<<<ctas, 512>>>(reinterpret_cast<uint4*>(host.data()), reinterpret_cast<uint4*>(device.data()), units,
                               direction, 1);
    check(cudaEventRecord(end), "event");
    wait_for(nullptr, "link");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i > 0) rates.push_back(static_cast<double>(host.size()) / ms * 1e-6);
  }
  check(cudaEventDestroy(begin), "event");
  check(cudaEventDestroy(end), "event");
  return median(rates);
}

// GB/s of `threads` threads that copy `piece` bytes at a time from ordinary memory, at random, into a slot each of
// many.
double copy_rate(std::byte* from, std::uint64_t from_bytes, std::byte* to, std::uint64_t to_bytes, std::uint64_t piece,
                 unsigned threads, double seconds) {
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> bytes{0};
  std::vector<std::thread> all;
  const std::uint64_t begin = now_ns();
  for (unsigned t = 0; t < threads; ++t) {
    all.emplace_back([&, t] {
      std::mt19937_64 random(t);
      const std::uint64_t slots = to_bytes / piece / threads, sources = from_bytes / piece;
      std::uint64_t mine = 0;
      for (std::uint64_t i = 0; !stop.load(std::memory_order_relaxed); ++i) {
        std::memcpy(to + (t * slots + i % slots) * piece, from + random() % sources * piece, piece);
        mine += piece;
      }
      bytes.fetch_add(mine);
    });
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stop.store(true);
  for (std::thread& thread : all) thread.join();
  return static_cast<double>(bytes.load()) / static_cast<double>(now_ns() - begin);
}

__global__ void bounce_doorbell(volatile std::uint32_t* there, const std::uint32_t* back, std::uint32_t rounds,
                                std::uint32_t* times, std::uint64_t deadline_ns) {
  std::uint64_t begin, sent, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  for (std::uint32_t i = 1; i <= rounds; ++i) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(sent));
    nvme::store_doorbell(there, i);
    do {
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
      if (now - begin > deadline_ns) return;
    } while (nvme::load_acquire(back) != i);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    times[i - 1] = static_cast<std::uint32_t>(now - sent);
  }
}

void measure_doorbell() {
  constexpr std::uint32_t kRounds = 20000;
  Array<std::uint32_t> there(Where::kMapped, 64), back(Where::kMapped, 64), times(Where::kMapped, kRounds);
  std::atomic<bool> stop{false};
  std::thread host([&] {
    std::uint32_t seen = 0;
    while (!stop.load(std::memory_order_relaxed)) {
      const std::uint32_t value = __atomic_load_n(there.data(), __ATOMIC_ACQUIRE);
      if (value != seen) __atomic_store_n(back.data(), seen = value, __ATOMIC_RELEASE);
    }
  });
  bounce_doorbell<<<1, 1>>>(there.data(), back.data(), kRounds, times.data(), 2000 * kMs);
  check(cudaGetLastError(), "bounce_doorbell");
  wait_for(nullptr, "doorbell");
  stop.store(true);
  host.join();
  std::vector<std::uint32_t> sorted(times.data(), times.data() + kRounds);
  std::sort(sorted.begin(), sorted.end());
  row("rig: doorbell round trip, p50", "rig", 4, sorted[kRounds / 2] * 1e-3, "us", 0);
  row("rig: doorbell round trip, p99", "rig", 4, sorted[kRounds * 99 / 100] * 1e-3, "us", 0);
}

// ---- the whole path
struct Path {
  std::uint32_t bytes;   // of a command
  std::uint32_t pieces;  // 2: half of it K, half V
  IoOp op;
  std::uint32_t queues, threads, commands, ctas;
  std::uint32_t contexts;  // of an IOCB
  std::uint32_t iocbs;     // in a row, timed together
  std::uint64_t medium_bytes;
  std::uint32_t at_once = 1;  // IOCBs, each with its part of the queue pairs
  bool digested = false;      // reads are compared, of writes they are made
  bool in_order = false;      // both in the namespace and in HBM, instead of scattered

  std::uint64_t digested_bytes() const { return std::min(bytes, kDigestedBytes); }
};

struct PathResult {
  double gb_s, commands_s;
  std::vector<double> us;  // of each command, sorted
};

class PathRig {
 public:
  explicit PathRig(const Path& path) : path_(path), gpu_(rig_options(path)) {
    fill_words(gpu_.rig().media(), path.medium_bytes, kSeed);
    const std::uint64_t pool_bytes = std::uint64_t{path.contexts} * path.bytes;
    pool_ = Array<std::byte>(Where::kDevice, pool_bytes);
    if (path.digested) {
      const auto known = digests_of(gpu_.rig().media(), path.medium_bytes, path.digested_bytes());
      digests_ = Array<std::uint64_t>(Where::kDevice, known.size());
      digests_.upload(known);
    }
    std::mt19937_64 random(path.bytes + path.commands);
    std::vector<std::uint32_t> places(path.contexts);
    std::iota(places.begin(), places.end(), 0u);
    const std::uint32_t blocks = path.bytes >> 12;
    for (std::uint32_t i = 0; i < path.iocbs; ++i) {
      iocbs_.push_back(std::make_unique<Iocb>(Where::kDevice));
      if (!path.in_order) std::shuffle(places.begin(), places.end(), random);
      std::vector<IoContext> contexts(path.contexts, IoContext{});
      for (std::uint32_t k = 0; k < path.contexts; ++k) {
        IoContext& context = contexts[k];
        context.op = path.op;
        const std::uint64_t objects = path.medium_bytes / path.bytes;
        context.block =
            (path.in_order ? (std::uint64_t{i} * path.contexts + k) % objects : random() % objects) * blocks;
        if (path.digested) {
          context.digests =
              reinterpret_cast<std::uint64_t>(digests_.data() + (context.block << 12) / path.digested_bytes());
        }
        const std::uint32_t piece = path.bytes / path.pieces;
        for (std::uint32_t half = 0; half < path.pieces; ++half) {
          context.bytes[half] = piece;
          context.memory[half] = reinterpret_cast<std::uint64_t>(pool_.data()) + std::uint64_t{places[k]} * piece +
                                 half * (pool_bytes / 2);
        }
      }
      check(cudaMemcpy(iocbs_[i]->contexts.data(), contexts.data(), contexts.size() * sizeof(IoContext),
                       cudaMemcpyDefault),
            "contexts");
      check(cudaMemcpy(iocbs_[i]->count.data(), &path.contexts, 4, cudaMemcpyDefault), "count");
    }
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    check(cudaStreamCreateWithFlags(&other_, cudaStreamNonBlocking), "stream");
  }
  ~PathRig() {
    check(cudaStreamDestroy(stream_), "stream");
    check(cudaStreamDestroy(other_), "stream");
  }

  // All IOCBs, `at_once` of them beside each other; GB/s.
  double run_once(IoTimes* times = nullptr) {
    cudaEvent_t begin, end, joined;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    check(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming), "event");
    check(cudaEventRecord(begin, stream_), "event");
    check(cudaStreamWaitEvent(other_, begin), "fork");
    for (std::uint32_t i = 0; i < iocbs_.size(); ++i) {
      IoControlBlock block = iocbs_[i]->block(3000 * kMs, path_.digested);
      block.times = times;
      const std::uint32_t part = i % path_.at_once;
      gpu_.enqueue(block, part == 0 ? stream_ : other_, part, path_.at_once);
    }
    check(cudaEventRecord(joined, other_), "event");
    check(cudaStreamWaitEvent(stream_, joined), "join");
    check(cudaEventRecord(end, stream_), "event");
    wait_for(stream_, "path");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    for (cudaEvent_t event : {begin, end, joined}) check(cudaEventDestroy(event), "event");
    std::uint64_t done = 0;
    for (const auto& iocb : iocbs_) done += iocb->total(gpu_.rings() / path_.at_once).done;
    if (done != std::uint64_t{path_.contexts} * iocbs_.size()) fail("commands that were not done", done);
    return static_cast<double>(done) * path_.bytes / ms * 1e-6;
  }
  // Poisons, runs every IOCB and compares.
  void verify() {
    if (path_.op != IoOp::kRead) return;
    Array<unsigned long long> wrong(Where::kMapped, 1);
    check(cudaMemsetAsync(pool_.data(), 0xa5, pool_.size(), stream_), "poison");
    for (const auto& iocb : iocbs_) {
      gpu_.enqueue(iocb->block(3000 * kMs, path_.digested), stream_);
      compare_landed<<<256, 256, 0, stream_>>>(iocb->contexts.data(), iocb->count.data(), kSeed, 12, wrong.data());
    }
    wait_for(stream_, "verify");
    if (wrong[0] != 0) fail("wrong words", wrong[0]);
    if (!path_.digested) return;
    // That digests are looked at: one flipped bit, and no more than those that read it.
    std::byte& flipped = gpu_.rig().media()[path_.medium_bytes / 2];
    flipped ^= std::byte{1};
    std::uint64_t damaged = 0, reading = 0;
    for (const auto& iocb : iocbs_) {
      gpu_.enqueue(iocb->block(3000 * kMs, true), stream_);
      std::vector<IoContext> contexts(path_.contexts);
      check(cudaMemcpyAsync(contexts.data(), iocb->contexts.data(), contexts.size() * sizeof(IoContext),
                            cudaMemcpyDefault, stream_),
            "contexts");
      wait_for(stream_, "verify");
      damaged += iocb->total(gpu_.rings()).damaged;
      for (const IoContext& context : contexts) {
        reading += context.block << 12 <= path_.medium_bytes / 2 &&
                   path_.medium_bytes / 2 < (context.block << 12) + path_.bytes;
      }
    }
    flipped ^= std::byte{1};
    if (damaged != reading) fail("damaged commands, not those that read the flipped bit", damaged);
  }
  static void fail(const char* what, std::uint64_t found) {
    ++failures;
    std::fprintf(stderr, "%s: %llu\n", what, static_cast<unsigned long long>(found));
  }
  static constexpr std::uint64_t kSeed = 9;

 private:
  static GpuRigOptions rig_options(const Path& path) {
    GpuRigOptions options;
    options.bytes = path.medium_bytes;
    options.ctas = path.ctas;
    options.controller_threads = path.threads;
    options.queues = path.queues;
    options.commands = path.commands;
    options.entries = std::max(2 * path.commands, path.commands + 1);
    options.slot_bytes = path.bytes;
    return options;
  }

  const Path path_;
  GpuRig gpu_;
  Array<std::byte> pool_;
  Array<std::uint64_t> digests_;  // of the medium
  std::vector<std::unique_ptr<Iocb>> iocbs_;
  cudaStream_t stream_ = nullptr, other_ = nullptr;
};

PathResult measure(const Path& path, bool with_times = false) {
  PathRig rig(path);
  rig.verify();
  std::vector<double> rates;
  for (int i = 0; i < (quick ? 1 : 3); ++i) rates.push_back(rig.run_once());
  PathResult result;
  result.gb_s = median(rates);
  result.commands_s = result.gb_s * 1e9 / path.bytes;
  if (with_times) {
    Array<IoTimes> times(Where::kDevice, kMostContexts);
    std::vector<IoTimes> host(path.contexts);
    for (int i = 0; i < 4; ++i) {
      (void)rig.run_once(times.data());
      check(cudaMemcpy(host.data(), times.data(), host.size() * sizeof(IoTimes), cudaMemcpyDefault), "times");
      for (const IoTimes& each : host) result.us.push_back(static_cast<double>(each.ended - each.sent) * 1e-3);
    }
    std::sort(result.us.begin(), result.us.end());
  }
  return result;
}

std::string describe(const Path& path) {
  char text[300];
  std::snprintf(
      text, sizeof text,
      ", \"ctas\": %u, \"queues\": %u, \"controller_threads\": %u, \"commands_in_flight\": %u, \"pieces\": %u, "
      "\"op\": \"%s\", \"namespace_mib\": %llu, \"iocbs_at_once\": %u, \"digests\": %s",
      path.ctas, path.queues, path.threads, path.queues * path.commands, path.pieces,
      path.op == IoOp::kRead ? "read" : "write", static_cast<unsigned long long>(path.medium_bytes >> 20), path.at_once,
      path.digested ? "true" : "false");
  return text;
}

// What host threads can copy at all for such a path: pieces of its size, to or from as much memory as its bounce slots
// are, while the GPU reads or writes that memory as fast as it can.
class CopyLimits {
 public:
  CopyLimits() : host_(Where::kMapped, kTargetBytes), device_(Where::kDevice, kTargetBytes), source_(kSourceBytes) {
    fill_words(source_.data(), source_.size(), 1);
  }
  double rate(std::uint64_t bytes, std::uint64_t footprint, std::uint64_t medium, unsigned threads, IoOp op, bool gpu) {
    const std::uint64_t target = std::min<std::uint64_t>(std::max(footprint, bytes * threads), kTargetBytes);
    const double seconds = quick ? 0.1 : 0.25;
    const Direction direction = op == IoOp::kRead ? Direction::kIn : Direction::kOut;
    if (gpu) {
      const auto passes = static_cast<int>((seconds + 0.1) * 52e9 / static_cast<double>(target)) + 1;
      stream_link<<<4, 512>>>(reinterpret_cast<uint4*>(host_.data()), reinterpret_cast<uint4*>(device_.data()),
                              target / 16, direction, passes);
      check(cudaGetLastError(), "link");
    }
    std::byte* const media = source_.data();
    const double result =
        op == IoOp::kRead
            ? copy_rate(media, std::min(medium, kSourceBytes), host_.data(), target, bytes, threads, seconds)
            : copy_rate(host_.data(), target, media, std::min(medium, kSourceBytes), bytes, threads, seconds);
    wait_for(nullptr, "link");
    return result;
  }
  const Array<std::byte>& host() const { return host_; }
  const Array<std::byte>& device() const { return device_; }

 private:
  static constexpr std::uint64_t kTargetBytes = 512 << 20, kSourceBytes = std::uint64_t{2} << 30;
  Array<std::byte> host_, device_;
  std::vector<std::byte> source_;
};

// Times of single commands by how many are in flight: one controller thread, one queue pair, or more where so many do
// not fit in one, on a CTA of its own each: there is not the shared memory for two.
void measure_depths() {
  constexpr std::uint32_t kMostOfQueue = 512;
  constexpr std::uint64_t kMedium = std::uint64_t{2} << 30;
  for (const std::uint32_t bytes : {4u << 10, 64u << 10}) {
    for (const std::uint32_t depth : {1u, 2u, 4u, 8u, 16u, 32u, 64u, 128u, 256u, 512u, 1024u, 2048u}) {
      if (quick && depth != 1 && depth != 4 && depth != 16 && depth != 64) continue;
      const std::uint32_t queues = (depth - 1) / kMostOfQueue + 1;
      const Path path{bytes,  2, IoOp::kRead, queues, 1, depth / queues, queues, kMostContexts, depth < 8 ? 1u : 2u,
                      kMedium};
      const PathResult result = measure(path, true);
      char more[200];
      std::snprintf(
          more, sizeof more, ", \"commands_per_second\": %.0f, \"p50_us\": %.2f, \"p99_us\": %.2f, \"max_us\": %.2f",
          result.commands_s, result.us[result.us.size() / 2], result.us[result.us.size() * 99 / 100], result.us.back());
      row("depth sweep", kSystem, bytes, result.gb_s, "GB/s", 0, describe(path) + more);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  (void)::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (!gpu_test::has_gpu()) return gpu_test::kSkipped;
  bool only_digests = false, only_sweeps = false;
  for (int i = 1; i < argc; ++i) {
    quick |= std::strcmp(argv[i], "--quick") == 0;
    only_digests |= std::strcmp(argv[i], "--digests") == 0;
    only_sweeps |= std::strcmp(argv[i], "--sweeps") == 0;
  }
  check(tardis_gpu_gio_load(), "load");
  check(tardis_gpu_gio_prepare_load(), "load");
  const unsigned cores = std::max(2u, std::thread::hardware_concurrency());

  // ---- limits
  CopyLimits copies;
  const double link_in = link_rate(copies.host(), copies.device(), Direction::kIn, 4);
  const double link_out = link_rate(copies.host(), copies.device(), Direction::kOut, 4);
  row("rig: link, host to HBM, 4 SMs", "rig", 16, link_in, "GB/s", 0);
  row("rig: link, HBM to host, 4 SMs", "rig", 16, link_out, "GB/s", 0);
  measure_doorbell();
  constexpr std::uint64_t kMedium = std::uint64_t{2} << 30, kBounce = 32 << 20;
  for (const unsigned threads : {1u, 2u, 4u, 8u, 12u}) {
    if (threads > cores) break;
    char more[60];
    std::snprintf(more, sizeof more, ", \"threads\": %u, \"target_mib\": %llu", threads,
                  static_cast<unsigned long long>(kBounce >> 20));
    row("rig: host copies alone", "rig", 64 << 10, copies.rate(64 << 10, kBounce, kMedium, threads, IoOp::kRead, false),
        "GB/s", 0, more);
    row("rig: host copies while the GPU reads their target", "rig", 64 << 10,
        copies.rate(64 << 10, kBounce, kMedium, threads, IoOp::kRead, true), "GB/s", 0, more);
  }

  // ---- rates
  const unsigned copiers = std::min(12u, cores - 2);
  const auto whole_path = [&](std::uint32_t bytes, IoOp op, std::uint32_t ctas, bool digested = false) {
    Path path{bytes, 2, op, copiers, copiers, 0, ctas, 0, 2, kMedium};
    path.commands = std::max(4u, std::min(64u, static_cast<std::uint32_t>(kBounce / copiers / bytes)));
    path.contexts = std::min(kMostContexts, static_cast<std::uint32_t>(kMedium / bytes));
    if (bytes <= 64u << 10) path.iocbs = 8;
    path.digested = digested;
    const double copied =
        copies.rate(bytes, std::uint64_t{path.queues} * path.commands * bytes, kMedium, path.threads, op, true);
    const double link = op == IoOp::kRead ? link_in : link_out;
    const PathResult result = measure(path);
    char more[100];
    std::snprintf(more, sizeof more, ", \"host_copies\": %.4g, \"commands_per_second\": %.0f", copied,
                  result.commands_s);
    row(op == IoOp::kRead ? "whole path, read" : "whole path, write", kSystem, bytes, result.gb_s, "GB/s",
        std::min(copied, link), describe(path) + more);
  };
  // As many requests in flight as the paper's figure 3 has.
  const auto parallel = [&](std::uint32_t bytes, bool in_order) {
    Path path{bytes, 2, IoOp::kRead, 16, copiers, 64, 4, 0, bytes <= 128u << 10 ? 8u : 2u, kMedium};
    path.contexts = std::min(kMostContexts, static_cast<std::uint32_t>(kMedium / bytes));
    path.in_order = in_order;
    const double copied = copies.rate(bytes, std::uint64_t{1024} * bytes, kMedium, path.threads, IoOp::kRead, true);
    row(in_order ? "1,024 in flight, sequential" : "1,024 in flight, random", kSystem, bytes, measure(path).gb_s,
        "GB/s", std::min(copied, link_in), describe(path));
  };
  if (only_sweeps) {
    for (const std::uint32_t bytes : {32u << 10, 128u << 10, 512u << 10, 2u << 20}) {
      for (const bool in_order : {true, false}) parallel(bytes, in_order);
    }
    measure_depths();
    return failures == 0 ? 0 : 1;
  }
  for (const std::uint32_t bytes : {32u << 10, 64u << 10, 256u << 10, 1u << 20, 2u << 20}) {
    if (only_digests) whole_path(bytes, IoOp::kRead, 4);
    whole_path(bytes, IoOp::kRead, 4, true);
  }
  whole_path(64u << 10, IoOp::kRead, 2, true);
  for (const std::uint32_t bytes : {64u << 10, 1u << 20}) {
    if (only_digests) whole_path(bytes, IoOp::kWrite, 4);
    whole_path(bytes, IoOp::kWrite, 4, true);
  }
  if (only_digests) return failures == 0 ? 0 : 1;
  for (const std::uint32_t bytes : {4u << 10, 16u << 10, 32u << 10, 64u << 10, 256u << 10, 1u << 20, 2u << 20}) {
    whole_path(bytes, IoOp::kRead, 4);
  }
  for (const std::uint32_t ctas : {1u, 2u}) {
    for (const std::uint32_t bytes : {16u << 10, 64u << 10, 1u << 20}) whole_path(bytes, IoOp::kRead, ctas);
  }
  for (const std::uint32_t bytes : {4u << 10, 64u << 10, 1u << 20}) whole_path(bytes, IoOp::kWrite, 4);
  const auto small_commands = [&](std::uint32_t threads, std::uint64_t medium, std::uint32_t at_once) {
    Path path{4096, 1, IoOp::kRead, threads * at_once, threads, 128, std::min(4u, threads), kMostContexts, 16, medium};
    path.at_once = at_once;
    const PathResult result = measure(path);
    const double copied =
        copies.rate(4096, std::uint64_t{path.queues} * path.commands * 4096, medium, threads, IoOp::kRead, true);
    row("commands of 4 KiB", kSystem, 4096, result.commands_s * 1e-6, "M/s", copied / 4096e-3, describe(path));
  };
  for (const std::uint32_t threads : {1u, 2u, 4u}) small_commands(threads, kMedium, 1);
  small_commands(4, kMedium, 2);
  small_commands(4, 64 << 20, 1);
  small_commands(4, 64 << 20, 2);
  measure_depths();
  return failures == 0 ? 0 : 1;
}
