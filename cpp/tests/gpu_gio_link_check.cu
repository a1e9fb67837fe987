// SPDX-License-Identifier: Apache-2.0
// On a GPU: the link arbiter's counts, budgets and waits, by the clock, with every byte of what was moved compared.
// Exit status 0: right; 1: not, or a CUDA error; 77: no GPU here.
#include <chrono>
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

constexpr std::uint32_t kRestore = TARDIS_GPU_LINK_RESTORE, kWriteBehind = TARDIS_GPU_LINK_WRITE_BEHIND;
constexpr std::uint32_t kIn = TARDIS_GPU_LINK_IN, kOut = TARDIS_GPU_LINK_OUT;
constexpr std::size_t kPage = 64 << 10;
constexpr std::uint32_t kPages = 256;
constexpr std::uint64_t kBudget = 256'000'000;

int wrong_total = 0;

void expect(bool right, const std::string& what) {
  std::printf("%-72s %s\n", what.c_str(), right ? "right" : "WRONG");
  std::fflush(stdout);
  wrong_total += !right;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

class Check {
 public:
  Check()
      : host_(Where::kPinned, kPages * kPage),
        device_(Where::kDevice, kPages * kPage),
        pieces_(Where::kDevice, 2 * kPages * sizeof(Piece)),
        counts_(Where::kDevice, 8),
        random_(fresh_seed()) {
    check(tardis_gpu_link_create(&link_), "tardis_gpu_link_create");
    check(tardis_gpu_link_set_budget(link_, kWriteBehind, kBudget), "tardis_gpu_link_set_budget");
    check(tardis_gpu_mover_prepare(), "tardis_gpu_mover_prepare");
    words_ = tardis_gpu_link_words_of(link_);
    std::vector<Piece> pieces;
    for (std::uint32_t i = 0; i < kPages; ++i) {  // out
      pieces.push_back({device_.address() + i * kPage, host_.address() + (i * 7 % kPages) * kPage, kPage});
    }
    for (std::uint32_t i = 0; i < kPages; ++i) {  // in
      pieces.push_back({host_.address() + (i * 7 % kPages) * kPage, device_.address() + i * kPage, kPage});
    }
    pieces_.write(pieces.data(), pieces.size() * sizeof(Piece));
  }
  ~Check() { check(tardis_gpu_link_destroy(link_), "tardis_gpu_link_destroy"); }

  void run() {
    refusals();
    counts();
    budget_and_end();
    fewer_in_flight();
    short_calls();
    short_calls_get_to_know();
    host_outranks();
    host_pacer();
    graph();
    side_by_side();
    const auto all = counters(kRestore);
    expect(all.active == 0 && counters(kWriteBehind).active == 0, "nobody counts as active at the end");
    expect(words_->device_active[kIn] == 0 && words_->device_active[kOut] == 0, "the host knows that");
    expect(all.errors == 1, "one error: the end without begin");
  }

 private:
  tardis_gpu_link_counters counters(std::uint32_t link_class) const {
    tardis_gpu_link_counters out;
    check(tardis_gpu_link_count(link_, link_class, &out), "tardis_gpu_link_count");
    return out;
  }
  void move(std::uint32_t link_class, std::uint32_t direction, std::uint32_t pages, cudaStream_t stream,
            std::uint32_t ctas = 2) {
    counts_.write(&pages, 4, direction * 4);
    enqueue(link_class, direction, stream, ctas);
  }
  void enqueue(std::uint32_t link_class, std::uint32_t direction, cudaStream_t stream, std::uint32_t ctas = 2) {
    const tardis_gpu_move_args args = {pieces_.data<Piece>() + (direction == kIn ? kPages : 0),
                                       counts_.data<std::uint32_t>() + direction, kPages, ctas};
    const tardis_gpu_link_traffic traffic = {words_, link_class, direction, in_flight_};
    check(tardis_gpu_move_in_class(&args, &traffic, stream), "tardis_gpu_move_in_class");
  }
  // New bytes in HBM, others in host memory; moved out by `work`, whose time is returned.
  template <class Work>
  double out_right(const std::string& what, std::uint32_t pages, Work work) {
    std::vector<unsigned char> bytes(kPages * kPage), found(kPages * kPage);
    fill_random(bytes.data(), bytes.size(), random_);
    device_.write(bytes.data(), bytes.size());
    std::memset(host_.data(), 0xa5, host_.size());
    const auto begin = std::chrono::steady_clock::now();
    work();
    stream_.wait();
    const double seconds = seconds_since(begin);
    int wrong = 0;
    for (std::uint32_t i = 0; i < kPages; ++i) {
      const unsigned char* at = host_.data() + (i * 7 % kPages) * kPage;
      if (i < pages) {
        wrong += std::memcmp(at, bytes.data() + i * kPage, kPage) != 0;
      } else {
        wrong += at[0] != 0xa5 || at[kPage - 1] != 0xa5;
      }
    }
    expect(wrong == 0, what + ": bytes");
    return seconds;
  }

  void refusals() {
    const tardis_gpu_move_args args = {pieces_.data<Piece>(), counts_.data<std::uint32_t>(), 0, 1};
    const tardis_gpu_link_traffic bad_class = {words_, TARDIS_GPU_LINK_CLASSES, 0, 0}, bad_way = {words_, 0, 2, 0},
                                  too_few = {nullptr, 0, 0, 2}, too_many = {nullptr, 0, 0, 13};
    expect(tardis_gpu_move_in_class(&args, nullptr, nullptr) == cudaErrorInvalidValue &&
               tardis_gpu_move_in_class(&args, &bad_class, nullptr) == cudaErrorInvalidValue &&
               tardis_gpu_move_in_class(&args, &bad_way, nullptr) == cudaErrorInvalidValue &&
               tardis_gpu_move_in_class(&args, &too_few, nullptr) == cudaErrorInvalidValue &&
               tardis_gpu_move_in_class(&args, &too_many, nullptr) == cudaErrorInvalidValue &&
               tardis_gpu_link_begin(link_, TARDIS_GPU_LINK_CLASSES, 0, nullptr) == cudaErrorInvalidValue &&
               tardis_gpu_link_end(nullptr, 0, 0, nullptr) == cudaErrorInvalidValue &&
               tardis_gpu_link_set_budget(link_, 1, TARDIS_GPU_LINK_LEAST_BUDGET - 1) == cudaErrorInvalidValue &&
               tardis_gpu_link_set_budget(link_, TARDIS_GPU_LINK_CLASSES, 0) == cudaErrorInvalidValue &&
               tardis_gpu_link_create(nullptr) == cudaErrorInvalidValue && tardis_gpu_link_destroy(nullptr) == 0,
           "what is refused");
  }

  void counts() {
    for (int i = 0; i < 3; ++i) check(tardis_gpu_link_begin(link_, 1, kIn, stream_), "begin");
    stream_.wait();
    expect(counters(1).active == 3 && users_of(words_->device_active[kIn], 1) == 3,
           "three users, as the host sees too");
    for (int i = 0; i < 4; ++i) check(tardis_gpu_link_end(link_, 1, kIn, stream_), "end");
    stream_.wait();
    expect(counters(1).active == 0 && counters(1).errors == 1, "an end too many changes nothing and is an error");
  }

  void budget_and_end() {
    Stream other;
    check(tardis_gpu_link_begin(link_, kRestore, kIn, other), "begin");
    other.wait();
    const auto before = counters(kWriteBehind);
    const double paced = out_right("16 MiB on a budget", kPages, [&] { move(kWriteBehind, kOut, kPages, stream_); });
    const auto after = counters(kWriteBehind);
    const double wanted = kPages * kPage / static_cast<double>(kBudget);
    expect(paced > 0.95 * wanted && paced < 1.2 * wanted,
           "they take " + std::to_string(wanted * 1e3) + " ms: " + std::to_string(paced * 1e3));
    expect(after.bytes - before.bytes == kPages * kPage && after.budget_bytes - before.budget_bytes == kPages * kPage &&
               after.held_ns > before.held_ns,
           "and are counted");
    check(tardis_gpu_link_end(link_, kRestore, kIn, other), "end");
    other.wait();
    const double free =
        out_right("the same with nobody beside", kPages, [&] { move(kWriteBehind, kOut, kPages, stream_); });
    expect(free < 0.2 * wanted, "faster by far: " + std::to_string(free * 1e3) + " ms");
    expect(counters(kWriteBehind).budget_bytes == after.budget_bytes, "and not on a budget");
  }

  void fewer_in_flight() {
    for (const std::uint32_t chunks : {3u, 4u, 5u, 6u, 7u, 8u, 9u, 10u, 11u, 12u}) {
      in_flight_ = chunks;
      for (const std::uint32_t ctas : {1u, 4u}) {
        out_right(std::to_string(chunks) + " chunks in flight, " + std::to_string(ctas) + " CTAs", kPages,
                  [&] { move(kRestore, kOut, kPages, stream_, ctas); });
      }
    }
    in_flight_ = 0;
  }

  void short_calls() {
    const LinkUse restore(*words_, kRestore, kIn);
    const std::uint32_t pages = 4;
    counts_.write(&pages, 4, kOut * 4);
    const double seconds = out_right("64 short calls on a budget", pages, [&] {
      for (int i = 0; i < 64; ++i) enqueue(kWriteBehind, kOut, stream_);
    });
    const double wanted = 64 * pages * kPage / static_cast<double>(kBudget);
    expect(seconds > 0.85 * wanted && seconds < 1.3 * wanted,
           "they take " + std::to_string(wanted * 1e3) + " ms: " + std::to_string(seconds * 1e3));
  }

  // Each looks once, and none comes after a pause that would make it wait for what the host says.
  void short_calls_get_to_know() {
    constexpr int kBefore = 200, kAfter = 160;
    const std::uint32_t pages = 4;
    counts_.write(&pages, 4, kOut * 4);
    const double seconds = out_right("short calls one after the other, and a host thread's use", pages, [&] {
      for (int i = 0; i < kBefore; ++i) enqueue(kWriteBehind, kOut, stream_);
      const LinkUse restore(*words_, kRestore, kIn);
      for (int i = 0; i < kAfter; ++i) enqueue(kWriteBehind, kOut, stream_);
      stream_.wait();
    });
    const double wanted = kAfter * pages * kPage / static_cast<double>(kBudget);
    expect(seconds > 0.7 * wanted,
           "the later ones take " + std::to_string(wanted * 1e3) + " ms: " + std::to_string(seconds * 1e3));
  }

  void host_outranks() {
    const double seconds = out_right("a host thread's use, and its end", kPages, [&] {
      const LinkUse load_back(*words_, TARDIS_GPU_LINK_LOAD_BACK, kIn);
      move(kWriteBehind, kOut, kPages, stream_);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      expect(cudaStreamQuery(stream_) == cudaErrorNotReady, "it is held back");
    });
    expect(seconds < 0.040, "and goes on at once: " + std::to_string(seconds * 1e3) + " ms of 66");
  }

  void host_pacer() {
    tardis_gpu_link_pacer* pacer = nullptr;
    expect(tardis_gpu_link_pacer_create(link_, TARDIS_GPU_LINK_CLASSES, kOut, &pacer) == cudaErrorInvalidValue,
           "a pacer of no class is refused");
    check(tardis_gpu_link_pacer_create(link_, kWriteBehind, kOut, &pacer), "tardis_gpu_link_pacer_create");
    const auto paced = [&] {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < 16; ++i) tardis_gpu_link_pace(pacer, 1'000'000);
      return seconds_since(begin);
    };
    expect(paced() < 0.01, "a host thread is not held back with nobody beside");
    check(tardis_gpu_link_begin(link_, kRestore, kIn, stream_), "begin");
    stream_.wait();
    const double seconds = paced(), wanted = 16e6 / static_cast<double>(kBudget);
    expect(seconds > 0.95 * wanted && seconds < 1.2 * wanted,
           "and beside a kernel's use for " + std::to_string(wanted * 1e3) + " ms: " + std::to_string(seconds * 1e3));
    check(tardis_gpu_link_end(link_, kRestore, kIn, stream_), "end");
    stream_.wait();
    tardis_gpu_link_pacer_destroy(pacer);
  }

  void graph() {
    cudaGraph_t graph;
    cudaGraphExec_t made;
    counts_.write(&kPages, 4, kOut * 4);
    counts_.write(&kPages, 4, kIn * 4);
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    check(tardis_gpu_link_begin(link_, TARDIS_GPU_LINK_ATTENTION, kIn, stream_), "begin");
    enqueue(kRestore, kIn, stream_);
    enqueue(kWriteBehind, kOut, stream_);
    check(tardis_gpu_link_end(link_, TARDIS_GPU_LINK_ATTENTION, kIn, stream_), "end");
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&made, graph, 0), "cudaGraphInstantiate");
    check(tardis_gpu_link_set_budget(link_, kWriteBehind, 0), "tardis_gpu_link_set_budget");  // without capture again
    const auto before = counters(kRestore);
    for (int i = 0; i < 200; ++i) check(cudaGraphLaunch(made, stream_), "cudaGraphLaunch");
    stream_.wait();
    expect(counters(kRestore).bytes - before.bytes == 200 * kPages * kPage, "200 replays of a graph are counted");
    expect(words_->device_active[kIn] == 0 && words_->device_active[kOut] == 0, "and leave nobody active");
    check(tardis_gpu_link_set_budget(link_, kWriteBehind, kBudget), "tardis_gpu_link_set_budget");
    check(cudaGraphExecDestroy(made), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }

  // Begins and ends of many streams at once: what the host is told must be what is counted, also of the last.
  void side_by_side() {
    bool right = true;
    Stream streams[8];
    for (int round = 0; round < 50; ++round) {
      for (Stream& stream : streams) {
        for (int i = 0; i < 4; ++i) check(tardis_gpu_link_begin(link_, 1 + i % 3, kOut, stream), "begin");
        for (int i = 0; i < 4; ++i) {
          if (&stream != streams || i != 0) check(tardis_gpu_link_end(link_, 1 + i % 3, kOut, stream), "end");
        }
      }
      for (Stream& stream : streams) stream.wait();
      right = right && words_->device_active[kOut] == one_user(1);
      check(tardis_gpu_link_end(link_, 1, kOut, streams[7]), "end");
      streams[7].wait();
      right = right && words_->device_active[kOut] == 0;
    }
    expect(right, "what the host is told by eight streams at once is what is counted");
  }

  tardis_gpu_link* link_ = nullptr;
  tardis_gpu_link_words* words_ = nullptr;
  std::uint32_t in_flight_ = 0;
  Stream stream_;
  Memory host_, device_, pieces_, counts_;
  std::mt19937_64 random_;
};

}  // namespace

int main() {
  if (!has_gpu()) return kSkipped;
  Check().run();
  std::printf("%s\n", wrong_total == 0 ? "all right" : "WRONG");
  return wrong_total == 0 ? 0 : 1;
}
