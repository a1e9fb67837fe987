// SPDX-License-Identifier: Apache-2.0
// On a GPU: commands that land in HBM by copy engines, beside the same commands on the same queue pairs by bounce slots
// and SMs, after what a copy engine and 4 SMs can do at all. One JSON object a line on stdout: case, system, size
// (bytes of a command), value, unit, limit, ratio and more. Arguments: --quick. Exit status 0, 1 (an error, or wrong
// bytes), 77 (no GPU here).
#include <algorithm>
#include <numeric>
#include <random>

#include "tests/gpu_gio_direct_support.cuh"

namespace {

using namespace tardis;
using namespace tardis::gio;
using namespace tardis::gio::testing;

constexpr std::uint64_t kMs = 1'000'000, kMiB = 1 << 20, kSeed = 9;
bool quick = false;
int failures = 0;

void row(const std::string& name, const char* system, std::uint64_t size, double value, const char* unit, double limit,
         const std::string& more = "") {
  std::printf("{\"case\": \"%s\", \"system\": \"%s\", \"size\": %llu, \"value\": %.4g, \"unit\": \"%s\", ",
              name.c_str(), system, static_cast<unsigned long long>(size), value, unit);
  if (limit > 0) {
    std::printf("\"limit\": %.4g, \"ratio\": %.3f%s}\n", limit, value / limit, more.c_str());
  } else {
    std::printf("\"limit\": null, \"ratio\": null%s}\n", more.c_str());
  }
  std::fflush(stdout);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Timer {
 public:
  Timer() {
    for (cudaEvent_t* event : {&begin_, &end_}) check(cudaEventCreate(event), "event");
  }
  ~Timer() {
    for (cudaEvent_t event : {begin_, end_}) check(cudaEventDestroy(event), "event");
  }
  // Of what `enqueue` puts on the stream, in ms.
  template <class Enqueue>
  double run(cudaStream_t stream, Enqueue&& enqueue) {
    check(cudaEventRecord(begin_, stream), "event");
    enqueue();
    check(cudaEventRecord(end_, stream), "event");
    wait_seldom(stream, "timed");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "event");
    return ms;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// ---- the machine
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 value;
  asm volatile("ld.relaxed.sys.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

__global__ void __launch_bounds__(512) stream_link(const uint4* from, uint4* to, std::uint64_t units) {
  constexpr int kLoads = 8;
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x * kLoads;
  for (std::uint64_t at = std::uint64_t{blockIdx.x} * blockDim.x * kLoads + threadIdx.x; at < units; at += step) {
    uint4 values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::uint64_t k = at + std::uint64_t{blockDim.x} * i;
      if (k < units) values[i] = load_once(from + k);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::uint64_t k = at + std::uint64_t{blockDim.x} * i;
      if (k < units) to[k] = values[i];
    }
  }
}

struct Limits {
  double engine_in, engine_out, sms_in, sms_out;
};

Limits measure_limits() {
  constexpr std::uint64_t kBytes = 512 * kMiB;
  const Array<std::byte> host(Where::kMapped, kBytes), device(Where::kDevice, kBytes);
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Timer timer;
  const auto rate = [&](auto&& enqueue) {
    std::vector<double> rates;
    for (int i = 0; i < 4; ++i) {
      const double ms = timer.run(stream, enqueue);
      if (i > 0) rates.push_back(static_cast<double>(kBytes) / ms * 1e-6);
    }
    return median(rates);
  };
  const auto engine = [&](std::byte* to, const std::byte* from) {
    return rate([=] { check(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, stream), "copy"); });
  };
  const auto sms = [&](std::byte* to, const std::byte* from) {
    return rate([=] {
      stream_link<<<4, 512, 0, stream>>>(reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to),
                                         kBytes / 16);
    });
  };
  const Limits limits{engine(device.data(), host.data()), engine(host.data(), device.data()),
                      sms(device.data(), host.data()), sms(host.data(), device.data())};
  row("rig: one copy, host to HBM", "copy engine", kBytes, limits.engine_in, "GB/s", 0);
  row("rig: one copy, HBM to host", "copy engine", kBytes, limits.engine_out, "GB/s", 0);
  row("rig: loads and stores, host to HBM", "4 SMs", kBytes, limits.sms_in, "GB/s", 0);
  row("rig: loads and stores, HBM to host", "4 SMs", kBytes, limits.sms_out, "GB/s", 0);
  check(cudaStreamDestroy(stream), "stream");
  return limits;
}

// ---- the whole path
constexpr std::uint32_t kDirectThreads = 4;  // more are refused

struct Path {
  std::uint32_t bytes;  // of a command: K and V, half each
  std::uint32_t threads;
  std::uint32_t commands;
  tardis_gpu_copy_calls calls = TARDIS_GPU_COPY_CALLS_BEST;
};

class PathRig {
 public:
  static constexpr std::uint64_t kMedium = 2048 * kMiB;

  PathRig(const Path& path, const Array<std::byte>& pool)
      : path_(path),
        engine_(path.calls),
        gpu_(options_of(path), path.threads <= kDirectThreads ? &engine_ : nullptr, {&pool}),
        count_(std::min(kMostContexts, static_cast<std::uint32_t>(pool.size() / path.bytes))),
        pool_(pool) {
    fill_words(gpu_.rig().media(), kMedium, kSeed);
    std::mt19937_64 random(path.bytes + path.threads);
    std::vector<std::uint32_t> places(pool.size() / path.bytes);
    std::iota(places.begin(), places.end(), 0u);
    for (std::uint32_t i = 0; i < kIocbs; ++i) {
      iocbs_.push_back(std::make_unique<Iocb>(Where::kDevice));
      std::shuffle(places.begin(), places.end(), random);
      std::vector<IoContext> contexts(count_, IoContext{});
      for (std::uint32_t k = 0; k < count_; ++k) {
        contexts[k].block = random() % (kMedium / path.bytes) * (path.bytes >> 12);
        for (std::uint32_t half = 0; half < 2; ++half) {
          contexts[k].bytes[half] = path.bytes / 2;
          contexts[k].memory[half] = reinterpret_cast<std::uint64_t>(pool.data()) + half * (pool.size() / 2) +
                                     std::uint64_t{places[k]} * (path.bytes / 2);
        }
        contexts[k].op = IoOp::kRead;
      }
      contexts_.push_back(contexts);
      upload(i);
      check(cudaMemcpy(iocbs_[i]->count.data(), &count_, 4, cudaMemcpyDefault), "count");
    }
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  }
  ~PathRig() { check(cudaStreamDestroy(stream_), "stream"); }

  // Poisons, runs and compares; then GB/s over a row of IOCBs. ctas 0: direct.
  double measure(IoOp op, std::uint32_t ctas) {
    for (std::uint32_t i = 0; i < kIocbs; ++i) {
      for (IoContext& context : contexts_[i]) context.op = op;
      upload(i);
    }
    if (op == IoOp::kRead) {
      Array<unsigned long long> wrong(Where::kMapped, 1);
      check(cudaMemsetAsync(pool_.data(), 0xa5, pool_.size(), stream_), "poison");
      for (const auto& iocb : iocbs_) {
        enqueue(iocb->block(3000 * kMs), ctas);
        compare_landed<<<256, 256, 0, stream_>>>(iocb->contexts.data(), iocb->count.data(), kSeed, 12, wrong.data());
      }
      wait_seldom(stream_, "verify");
      if (wrong[0] != 0) fail("wrong words", wrong[0]);
      for (const auto& iocb : iocbs_) {
        const RingReport report = iocb->total(gpu_.rings());
        if (report.error == RingError::kNone) continue;
        std::fprintf(stderr,
                     "error %u, fault %u, done %u, failed %u, timed out %u, not sent %u; longest start %.1f us\n",
                     static_cast<unsigned>(report.error), report.fault, report.done, report.failed, report.timed_out,
                     report.not_sent, static_cast<double>(StartTimes::of_all().most_ns) * 1e-3);
      }
    }
    StartTimes::of_all().reset();
    const int rounds = static_cast<int>(
        std::clamp<std::uint64_t>(6'000'000'000 / (std::uint64_t{kIocbs} * count_ * path_.bytes), 1, quick ? 4 : 16));
    std::vector<double> rates;
    for (int sample = 0; sample < 3; ++sample) {
      const double ms = timer_.run(stream_, [&] {
        for (int i = 0; i < rounds; ++i) {
          for (const auto& iocb : iocbs_) enqueue(iocb->block(3000 * kMs), ctas);
        }
      });
      for (const auto& iocb : iocbs_) {
        const RingReport report = iocb->total(gpu_.rings());
        if (report.done != count_)
          fail("commands done, error", report.done * 100ull + static_cast<unsigned>(report.error));
      }
      rates.push_back(static_cast<double>(rounds) * kIocbs * count_ * path_.bytes / ms * 1e-6);
    }
    return median(rates);
  }
  // Reads again, with digests of what landed compared behind each ring.
  double measure_verified(std::uint32_t ctas) {
    const std::uint32_t chunks = (path_.bytes + kDigestedBytes - 1) / kDigestedBytes;
    const Array<std::uint64_t> digests(Where::kDevice, std::size_t{kIocbs} * count_ * chunks);
    const Verifier verifier(ctas);
    for (std::uint32_t i = 0; i < kIocbs; ++i) {
      for (std::uint32_t k = 0; k < count_; ++k) {
        contexts_[i][k].op = IoOp::kRead;
        contexts_[i][k].digests =
            reinterpret_cast<std::uint64_t>(digests.data() + (std::size_t{i} * count_ + k) * chunks);
      }
      // What landed right is as good as written: those are its digests.
      const IoControlBlock block = iocbs_[i]->block(3000 * kMs);
      upload(i);
      enqueue(block, 0);
      wait_seldom(stream_, "digests");
      for (IoContext& context : contexts_[i]) context.op = IoOp::kWrite;
      upload(i);
      verifier.enqueue(block, stream_);
      wait_seldom(stream_, "digests");
      for (IoContext& context : contexts_[i]) context.op = IoOp::kRead;
      upload(i);
    }
    std::vector<double> rates;
    for (int sample = 0; sample < 3; ++sample) {
      const double ms = timer_.run(stream_, [&] {
        for (const auto& iocb : iocbs_) {
          enqueue(iocb->block(3000 * kMs), 0);
          verifier.enqueue(iocb->block(3000 * kMs), stream_);
        }
      });
      if (verifier.flag() != kIoDone) fail("damaged", verifier.damaged());
      rates.push_back(static_cast<double>(kIocbs) * count_ * path_.bytes / ms * 1e-6);
    }
    for (auto& contexts : contexts_) {
      for (IoContext& context : contexts) context.digests = 0;
    }
    return median(rates);
  }
  // Of single commands, from submission to landed; sorted.
  std::vector<double> times(std::uint32_t ctas) {
    Array<IoTimes> times(Where::kDevice, kMostContexts);
    std::vector<IoTimes> host(count_);
    std::vector<double> us;
    for (int i = 0; i < 3; ++i) {
      IoControlBlock block = iocbs_[0]->block(3000 * kMs);
      block.times = times.data();
      enqueue(block, ctas);
      wait_seldom(stream_, "times");
      check(cudaMemcpy(host.data(), times.data(), host.size() * sizeof(IoTimes), cudaMemcpyDefault), "times");
      for (const IoTimes& each : host) us.push_back(static_cast<double>(each.ended - each.sent) * 1e-3);
    }
    std::sort(us.begin(), us.end());
    return us;
  }
  std::string describe(IoOp op, std::uint32_t ctas) const {
    char text[200];
    std::snprintf(
        text, sizeof text,
        ", \"controller_threads\": %u, \"ctas\": %u, \"queues\": %u, \"commands_in_flight\": %u, \"op\": \"%s\"",
        path_.threads, std::max(1u, ctas), path_.threads, path_.threads * path_.commands,
        op == IoOp::kRead ? "read" : "write");
    return text;
  }
  const char* engine() const { return engine_.table().name; }

 private:
  static constexpr std::uint32_t kIocbs = 4;

  static GpuRigOptions options_of(const Path& path) {
    GpuRigOptions options;
    options.bytes = kMedium;
    options.controller_threads = path.threads;
    options.queues = path.threads;
    options.commands = path.commands;
    options.entries = 2 * path.commands + 1;
    options.slot_bytes = path.bytes;
    return options;
  }
  void upload(std::uint32_t i) { iocbs_[i]->contexts.upload(contexts_[i]); }
  void enqueue(const IoControlBlock& block, std::uint32_t ctas) {
    if (ctas == 0) return gpu_.enqueue(block, stream_);
    check(tardis_gpu_gio_clear(&block, stream_), "clear");
    check(tardis_gpu_gio_run(gpu_.bounce().queues().data(), gpu_.rings(), &block, ctas, stream_), "run");
  }
  void fail(const char* what, std::uint64_t found) {
    ++failures;
    std::fprintf(stderr, "%u bytes, %u threads: %s: %llu\n", path_.bytes, path_.threads, what,
                 static_cast<unsigned long long>(found));
  }

  const Path path_;
  const CudaEngine engine_;
  DirectGpuRig gpu_;
  const std::uint32_t count_;
  const Array<std::byte>& pool_;
  std::vector<std::unique_ptr<Iocb>> iocbs_;
  std::vector<std::vector<IoContext>> contexts_;
  Timer timer_;
  cudaStream_t stream_ = nullptr;
};

constexpr const char* kDirect = "direct, copy engines";
constexpr const char* kBounce = "bounce slots, SMs";

void measure(const Path& path, const Array<std::byte>& pool, const Limits& limits, bool writes) {
  PathRig rig(path, pool);
  const auto starts = [] {
    const StartTimes& times = StartTimes::of_all();
    const auto batches = static_cast<double>(times.batches), copies = static_cast<double>(times.copies);
    char text[160];
    std::snprintf(
        text, sizeof text, ", \"copies_a_batch\": %.2f, \"us_to_start_a_copy\": %.3f, \"longest_start_us\": %.1f",
        copies / batches, static_cast<double>(times.ns) * 1e-3 / copies, static_cast<double>(times.most_ns) * 1e-3);
    return std::string(text);
  };
  const auto add = [&](IoOp op, std::uint32_t ctas) {
    const bool lands = ctas == 0, read = op == IoOp::kRead;
    const double limit = lands ? (read ? limits.engine_in : limits.engine_out) : read ? limits.sms_in : limits.sms_out;
    const double rate = rig.measure(op, ctas);
    row(std::string(lands ? "direct" : "bounce") + (read ? ", read" : ", write"), lands ? kDirect : kBounce, path.bytes,
        rate, "GB/s", limit,
        rig.describe(op, ctas) +
            (lands ? std::string(", \"engine\": \"") + rig.engine() + "\"" + starts() : std::string()));
  };
  const bool direct = path.threads <= kDirectThreads;
  if (direct) add(IoOp::kRead, 0);
  if (path.calls != TARDIS_GPU_COPY_CALLS_BEST) return;
  add(IoOp::kRead, 4);
  if (!writes) return;
  for (const std::uint32_t ctas : {4u, 16u}) {
    if (!direct) break;
    row("direct, read, digests behind it", kDirect, path.bytes, rig.measure_verified(ctas), "GB/s", limits.engine_in,
        rig.describe(IoOp::kRead, 0) + ", \"verifying_ctas\": " + std::to_string(ctas));
  }
  if (direct) add(IoOp::kWrite, 0);
  add(IoOp::kWrite, 4);
}

}  // namespace

int main(int argc, char** argv) {
  (void)::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (!gpu_test::has_gpu()) return gpu_test::kSkipped;
  for (int i = 1; i < argc; ++i) quick |= std::strcmp(argv[i], "--quick") == 0;
  check(tardis_gpu_gio_load(), "load");
  check(tardis_gpu_gio_verify_load(), "load");
  const Limits limits = measure_limits();
  const Array<std::byte> pool(Where::kDevice, 2048 * kMiB);
  const unsigned most = std::min(12u, std::max(2u, std::thread::hardware_concurrency()) - 2);
  for (const std::uint32_t threads : {4u, most}) {
    for (const std::uint32_t bytes : {32u << 10, 64u << 10, 256u << 10, 1u << 20, 2u << 20}) {
      const std::uint32_t commands = std::clamp(static_cast<std::uint32_t>(32 * kMiB / threads / bytes), 4u, 64u);
      measure({bytes, threads, commands}, pool, limits, bytes == 64u << 10 || bytes == 1u << 20);
    }
  }
  for (const std::uint32_t bytes : {64u << 10, 1u << 20}) {
    measure({bytes, 4, 16, TARDIS_GPU_COPY_CALLS_SINGLE}, pool, limits, false);
  }
  for (const std::uint32_t threads : {1u, 2u}) measure({1u << 20, threads, 16}, pool, limits, false);
  for (const std::uint32_t bytes : {4u << 10, 64u << 10}) {
    PathRig rig({bytes, 1, 1}, pool);
    for (const std::uint32_t ctas : {0u, 1u}) {
      const std::vector<double> us = rig.times(ctas);
      char more[100];
      std::snprintf(more, sizeof more, ", \"p99_us\": %.2f", us[us.size() * 99 / 100]);
      row(ctas == 0 ? "direct, one command at a time, p50" : "bounce, one command at a time, p50",
          ctas == 0 ? kDirect : kBounce, bytes, us[us.size() / 2], "us", 0, rig.describe(IoOp::kRead, ctas) + more);
    }
  }
  return failures == 0 ? 0 : 1;
}
