// SPDX-License-Identifier: Apache-2.0
// What traffic of priority keeps of its rate beside other traffic, with the link arbiter and without. One JSON object a
// line (bench/link.py reads them); medians, GB/s (1e9 bytes).
//   tardis_gpu_gio_link_bench [--quick]
// Exit status 1: an error; 77: no GPU here.
#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gio/link.h"
#include "gio/link_host.h"
#include "gpu_support.h"

namespace {

using namespace tardis;
using namespace tardis::gio;
using namespace tardis::gpu_test;

constexpr std::uint32_t kRestore = TARDIS_GPU_LINK_RESTORE, kLoadBack = TARDIS_GPU_LINK_LOAD_BACK,
                        kWriteBehind = TARDIS_GPU_LINK_WRITE_BEHIND;
constexpr std::uint32_t kIn = TARDIS_GPU_LINK_IN, kOut = TARDIS_GPU_LINK_OUT;
constexpr std::size_t kPage = 128 << 10;
constexpr std::size_t kPool = 512 << 20;                   // of each flow, on each side
constexpr std::uint32_t kHighPages = 256, kLowPages = 32;  // of a call
constexpr std::uint32_t kCtas = 2;
constexpr int kHighCalls = 24, kLowCalls = 400;

// How the bytes of a flow move.
enum class Means { kMover, kEngine, kPacedEngine };

struct FlowKind {
  const char* name;
  std::uint32_t link_class, direction;
  Means means;
};
constexpr FlowKind kHigh = {"restore in", kRestore, kIn, Means::kMover};
constexpr FlowKind kLows[] = {
    {"write-behind out, mover", kWriteBehind, kOut, Means::kMover},
    {"load-back in, mover", kLoadBack, kIn, Means::kMover},
    {"write-behind out, copy engine, host paced", kWriteBehind, kOut, Means::kPacedEngine},
    {"load-back in, copy engine, host paced", kLoadBack, kIn, Means::kPacedEngine},
    {"load-back in, copy engine", kLoadBack, kIn, Means::kEngine},
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Scattered pages between pools of its own.
class Flow {
 public:
  Flow(const FlowKind& kind, std::uint32_t call_pages, std::mt19937_64& random)
      : kind_(kind),
        call_pages_(call_pages),
        host_(Where::kPinned, kPool),
        device_(Where::kDevice, kPool),
        pieces_(Where::kDevice, kPool / kPage * sizeof(Piece)),
        count_(Where::kDevice, 4) {
    std::vector<std::uint64_t> from(kPool / kPage), to(kPool / kPage);
    std::iota(from.begin(), from.end(), 0);
    std::iota(to.begin(), to.end(), 0);
    std::shuffle(from.begin(), from.end(), random);
    std::shuffle(to.begin(), to.end(), random);
    std::vector<Piece> pieces;
    const Memory& source = kind.direction == kIn ? host_ : device_;
    const Memory& target = kind.direction == kIn ? device_ : host_;
    for (std::size_t i = 0; i < from.size(); ++i) {
      pieces.push_back({source.address() + from[i] * kPage, target.address() + to[i] * kPage, kPage});
    }
    pieces_.write(pieces.data(), pieces.size() * sizeof(Piece));
    count_.write(&call_pages_, 4);
    std::memset(host_.data(), 1, host_.size());
    device_.fill(2);
  }

  const FlowKind& kind() const { return kind_; }
  double call_bytes() const { return static_cast<double>(call_pages_) * kPage; }
  cudaStream_t stream() const { return stream_; }

  // One call; words null: without the arbiter.
  void enqueue(int call, tardis_gpu_link_words* words) { enqueue(call, words, kind_.link_class); }
  void enqueue(int call, tardis_gpu_link_words* words, std::uint32_t link_class) {
    const std::size_t calls = kPool / kPage / call_pages_;
    const std::size_t first = static_cast<std::size_t>(call) % calls * call_pages_;
    if (kind_.means == Means::kMover) {
      const tardis_gpu_move_args args = {pieces_.data<Piece>() + first, count_.data<std::uint32_t>(), call_pages_,
                                         kCtas};
      const tardis_gpu_link_traffic traffic = {words, link_class, kind_.direction, 0};
      check(words == nullptr ? tardis_gpu_move(&args, stream_) : tardis_gpu_move_in_class(&args, &traffic, stream_),
            "move");
      return;
    }
    char* const host = host_.data<char>() + first * kPage;
    char* const device = device_.data<char>() + first * kPage;
    const bool in = kind_.direction == kIn;
    check(cudaMemcpyAsync(in ? device : host, in ? host : device, call_pages_ * kPage, cudaMemcpyDefault, stream_),
          "cudaMemcpyAsync");
  }

 private:
  const FlowKind kind_;
  const std::uint32_t call_pages_;
  Stream stream_;
  Memory host_, device_, pieces_, count_;
};

// A flow of low priority that runs from before the measured one until after it.
class Background {
 public:
  Background(Flow& flow, tardis_gpu_link_words* words) : flow_(flow) {
    if (flow.kind().means == Means::kMover) {
      for (int i = 0; i < kLowCalls; ++i) call(i, words);
      ends_.front().wait();
    } else {
      thread_ = std::thread([this, words] { copy(words); });
      while (!runs_) std::this_thread::yield();
    }
  }
  ~Background() { stop(); }
  // GB/s from `start` to `end`; none if it ended too early.
  std::optional<double> finish(const Event& start, const Event& end) {
    stop();
    check(cudaStreamSynchronize(flow_.stream()), "cudaStreamSynchronize");
    const double window = end.milliseconds_since(start);
    if (ends_.back().milliseconds_since(start) < window) return std::nullopt;
    const auto calls = std::count_if(ends_.begin(), ends_.end(), [&](const Event& event) {
      const double at = event.milliseconds_since(start);
      return at > 0 && at <= window;
    });
    return static_cast<double>(calls) * flow_.call_bytes() / window * 1e-6;
  }

 private:
  void stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  void call(int number, tardis_gpu_link_words* words) {
    flow_.enqueue(number, words);
    ends_.emplace_back().record(flow_.stream());
  }

  // By a thread that keeps two copies in flight.
  void copy(tardis_gpu_link_words* words) {
    const FlowKind& kind = flow_.kind();
    const bool asks = words != nullptr && kind.means == Means::kPacedEngine;
    std::optional<HostPacer> pacer;
    if (asks) pacer.emplace(*words, kind.link_class, kind.direction);
    for (int i = 0; !stop_; ++i) {
      if (asks) pacer->pace(static_cast<std::uint64_t>(flow_.call_bytes()));
      call(i, nullptr);
      if (i >= 2) ends_[static_cast<std::size_t>(i) - 2].wait();
      runs_ = i >= 2;
    }
    call(0, nullptr);  // so that the last one ends behind what is measured
  }

  Flow& flow_;
  std::deque<Event> ends_;
  std::thread thread_;
  std::atomic<bool> stop_{false}, runs_{false};
};

class Bench {
 public:
  explicit Bench(bool quick) : samples_(quick ? 3 : 7), random_(fresh_seed()), high_(kHigh, kHighPages, random_) {
    check(tardis_gpu_link_create(&link_), "tardis_gpu_link_create");
    words_ = tardis_gpu_link_words_of(link_);
    check(tardis_gpu_mover_prepare(), "tardis_gpu_mover_prepare");
    for (const FlowKind& kind : kLows) lows_.push_back(std::make_unique<Flow>(kind, kLowPages, random_));
  }
  ~Bench() { check(tardis_gpu_link_destroy(link_), "tardis_gpu_link_destroy"); }

  void run() {
    cost(high_, kHighCalls, kRestore, "restore, 32 MiB a call");
    cost(high_, kHighCalls, kWriteBehind, "write-behind, 32 MiB a call");
    cost(*lows_[0], 256, kWriteBehind, "write-behind, 4 MiB a call");
    alone_ = alone(high_, kHighCalls, nullptr);
    row(kHigh.name, "alone", "-", alone_, 0, "");
    for (auto& low : lows_) {
      beside({low.get()}, low->kind().name, false, 0);
      if (low->kind().means == Means::kEngine) continue;  // nobody asks before it copies
      for (const double budget : {1e9, 2e9, 4e9, 8e9}) beside({low.get()}, low->kind().name, true, budget);
    }
    const std::vector<Flow*> mixed = {lows_[0].get(), lows_[1].get()};
    const char* const name = "write-behind out and load-back in, movers";
    beside(mixed, name, false, 0);
    for (const double budget : {1e9, 2e9, 4e9}) beside(mixed, name, true, budget);
  }

 private:
  void row(const char* name, const std::string& system, const std::string& size, double value, double limit,
           const std::string& extra) {
    std::printf("{\"case\": \"%s\", \"system\": \"%s\", \"size\": \"%s\", \"value\": %.3f, \"limit\": %.3f%s}\n", name,
                system.c_str(), size.c_str(), value, limit, extra.c_str());
    std::fflush(stdout);
  }

  double rate(Flow& flow, int calls, tardis_gpu_link_words* words, std::uint32_t link_class, Event& start, Event& end) {
    start.record(flow.stream());
    for (int call = 0; call < calls; ++call) flow.enqueue(call, words, link_class);
    end.record(flow.stream());
    end.wait();
    return calls * flow.call_bytes() / end.milliseconds_since(start) * 1e-6;
  }
  double alone(Flow& flow, int calls, tardis_gpu_link_words* words) {
    Event start, end;
    std::vector<double> rates;
    for (int i = 0; i < samples_; ++i) rates.push_back(rate(flow, calls, words, flow.kind().link_class, start, end));
    return median(rates);
  }

  // With the arbiter and without, in turn, nobody beside.
  void cost(Flow& flow, int calls, std::uint32_t link_class, const char* which) {
    Event start, end;
    std::vector<double> without, with;
    rate(flow, calls, nullptr, link_class, start, end);
    for (int i = 0; i < 3 * samples_; ++i) {
      without.push_back(rate(flow, calls, nullptr, link_class, start, end));
      with.push_back(rate(flow, calls, words_, link_class, start, end));
    }
    row("a mover alone, with the arbiter", which, "-", median(with), median(without), "");
  }

  // The flow of priority beside others.
  void beside(const std::vector<Flow*>& lows, const char* name, bool arbiter, double budget) {
    if (arbiter) {
      for (std::uint32_t i = 1; i < kLinkClasses; ++i) {
        check(tardis_gpu_link_set_budget(link_, i, static_cast<std::uint64_t>(budget)), "tardis_gpu_link_set_budget");
      }
    }
    tardis_gpu_link_words* const words = arbiter ? words_ : nullptr;
    std::vector<double> rates, others;
    for (int i = 0, tries = 0; i < samples_ && tries < 3 * samples_; ++tries) {
      Event start, end;
      std::vector<std::unique_ptr<Background>> running;
      for (Flow* low : lows) running.push_back(std::make_unique<Background>(*low, words));
      const double high = rate(high_, kHighCalls, words, kRestore, start, end);
      double sum = 0;
      bool whole = true;
      for (auto& background : running) {
        const std::optional<double> found = background->finish(start, end);
        whole = whole && found.has_value();
        sum += found.value_or(0);
      }
      if (!whole) continue;
      rates.push_back(high);
      others.push_back(sum);
      ++i;
    }
    if (rates.empty()) {
      std::fprintf(stderr, "%s: expected traffic beside the whole measurement, found that it always ended before\n",
                   name);
      std::exit(1);
    }
    const std::string system =
        !arbiter ? "without arbiter" : "budgets of " + std::to_string(budget / 1e9).substr(0, 3) + " GB/s";
    row("restore in beside other traffic", system, name, median(rates), alone_,
        ", \"beside_gb_s\": " + std::to_string(median(others)) + ", \"samples\": " + std::to_string(rates.size()));
  }

  const int samples_;
  std::mt19937_64 random_;
  Flow high_;
  std::vector<std::unique_ptr<Flow>> lows_;
  tardis_gpu_link* link_ = nullptr;
  tardis_gpu_link_words* words_ = nullptr;
  double alone_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (!has_gpu()) return kSkipped;
  const bool quick = argc == 2 && std::string(argv[1]) == "--quick";
  if (argc > 1 && !quick) {
    std::fprintf(stderr, "usage: %s [--quick]\n", argv[0]);
    return 1;
  }
  Bench(quick).run();
  return 0;
}
