// SPDX-License-Identifier: Apache-2.0
// Times of loads and offloads of whole pages, all layers in one call; prints one JSON object for each. From pinned
// memory, and from a store's files in a tmpfs, of which the software controller's threads serve every command.
// Arguments: a folder for the store (/dev/shm), pages (512), repetitions (9), controller threads (12), parts (lpbwfso:
// limits, pinned memory, beside kernels, beside a forward that waits, files, other queue pairs, offloads). Exit status
// 0; 1: a CUDA error, or a page that is not what was asked for; 77: no GPU here.
#include <atomic>
#include <functional>
#include <numeric>
#include <set>
#include <tuple>

#include "gpu_gstore_measure.cuh"
#include "gpu_load_forward.cuh"
#include "gpu_load_rig.cuh"

namespace tardis::gstore::testing {
namespace {

using gio::testing::wait_for;

// What a matrix product is to a mover: blocks that fill an SM each, about ten times as many as there are SMs.
constexpr unsigned kBusyBlocks = 1320, kBusyShared = 160 << 10;

// Threads that do nothing, without a pause.
class BusyHost {
 public:
  explicit BusyHost(unsigned threads) {
    for (unsigned i = 0; i < threads; ++i) {
      threads_.emplace_back([this] {
        while (!stop_.load(std::memory_order_relaxed)) {
        }
      });
    }
  }
  ~BusyHost() {
    stop_.store(true);
    for (std::thread& thread : threads_) thread.join();
  }
  BusyHost(const BusyHost&) = delete;
  BusyHost& operator=(const BusyHost&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

class Stream {
 public:
  explicit Stream(bool first) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, first ? greatest : least), "stream");
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

struct LinkDestroy {
  void operator()(tardis_gpu_link* link) const { tardis_gpu_link_destroy(link); }
};

struct Times {
  double all, first, host, ready;  // s: to the last layer and the first, of the call, until the loader was ready
};

class LoadBench {
 public:
  LoadBench(const LoadRigOptions& options, int repetitions)
      : rig_(options),
        repetitions_(repetitions),
        most_(options.most_pages),
        shape_(options.shape),
        expected_(mapped_array<std::uint64_t>(options.pool_pages)),
        wrong_(device_array<unsigned long long>(1)),
        errors_(mapped_array<std::uint32_t>(1)),
        objects_(mapped_array<std::uint64_t>(options.most_pages)),
        ids_(mapped_array<std::uint32_t>(options.most_pages)),
        page_order_(options.pool_pages),
        plain_events_(options.shape.layers) {
    tardis_gpu_link* link = nullptr;
    check(tardis_gpu_link_create(&link), "tardis_gpu_link_create");
    link_.reset(link);
    for (cudaEvent_t& event : plain_events_) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    }
    std::iota(page_order_.begin(), page_order_.end(), 0u);
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
    check(cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize, kProductShared), "product");
    fill_pinned();
    text_ = std::to_string(shape_.bytes() >> 10) + " KiB in " + std::to_string(shape_.layers) + " layers";
  }

  void limits() {
    const std::uint64_t bytes = shape_.bytes() * std::min(rig_.options.pinned, rig_.options.pool_pages);
    copy_in_ = rate(bytes, [&] {
      check(cudaMemcpyAsync(rig_.pools.memory(), rig_.pinned.get(), bytes, cudaMemcpyHostToDevice, high_), "copy");
    });
    row("copy engine, pinned to HBM", "limit", text_, copy_in_, "GB/s");
    mover_in_ = rate(bytes, [&] { move(rig_.pinned_address(0), address(rig_.pools.memory()), bytes); });
    row("mover, one run of bytes, 2 CTAs, in", "limit", text_, mover_in_, "GB/s", copy_in_);
    both_in(bytes);
    copy_out_ = rate(bytes, [&] {
      check(cudaMemcpyAsync(rig_.pinned.get(), rig_.pools.memory(), bytes, cudaMemcpyDeviceToHost, high_), "copy");
    });
    row("copy engine, HBM to pinned", "limit", text_, copy_out_, "GB/s");
    mover_out_ = rate(bytes, [&] { move(address(rig_.pools.memory()), rig_.pinned_address(0), bytes); });
    row("mover, one run of bytes, 2 CTAs, out", "limit", text_, mover_out_, "GB/s", copy_out_);
  }

  void from_pinned() {
    for (const std::uint32_t n : sizes()) {
      for (const std::uint32_t ctas : {1u, 2u, 4u}) {
        rows("load from pinned memory, " + std::to_string(ctas) + " CTAs", n, mover_in_,
             [&] { return load(n, 0, ctas, high_); });
      }
      for (const std::uint32_t each : std::set<std::uint32_t>{n, 128, 32, 16, 8}) {
        if (n % each != 0) continue;  // also where a run would be longer than all
        rows("load from pinned memory, copy engine, runs of " + std::to_string(each), n, copy_in_,
             [&] { return load_runs(n, each); });
      }
    }
  }
  void from_files() {
    if (rig_.store == nullptr) return;
    const double files = pread_rates();
    for (const std::uint32_t n : sizes()) {
      if (n > rig_.options.stored) continue;
      rows("load from files", n, std::min(files, mover_in_), [&] { return load(0, n, 2, high_); });
      rows("load, half from pinned memory", n, 0, [&] { return load(n / 2, n - n / 2, 2, high_); });
      rows(
          "load from files by the host", n, std::min(files, mover_in_), [&] { return load(0, n, 2, high_, false); }, 3);
    }
  }
  void offloads() {
    for (const std::uint32_t n : sizes()) {
      for (const std::uint32_t ctas : {1u, 2u, 4u}) {
        std::vector<double> seconds, host;
        for (int i = 0; i <= repetitions_; ++i) {
          const auto [taken, called] = offload(n, ctas);
          if (i == 0) continue;
          seconds.push_back(taken);
          host.push_back(called);
        }
        const std::string name = "offload, " + std::to_string(ctas) + " CTAs";
        const std::string size = std::to_string(n) + " x " + text_;
        row(name.c_str(), "rate", size, gb(n) / median(seconds), "GB/s", mover_out_);
        row(name.c_str(), "call of the host", size, median(host) * 1e6, "us");
      }
    }
  }

  // Beside a stream whose kernels fill every SM, and go on longer than the load.
  void beside_compute() {
    const std::uint32_t n = std::min(128u, most_);
    Stream compute(false);
    const int each_us = 100;
    const int rounds = rounds_for(each_us, compute);
    const double alone = median_of([&] { return load(n, 0, 2, high_).all; });
    row("load from pinned memory", "nobody beside", std::to_string(n) + " x " + text_, alone * 1e3, "ms");
    const int kernels = static_cast<int>(alone * 1e6 / each_us * 3) + 10;
    const double compute_alone = median_of([&] { return products(kernels, rounds, compute, nullptr); });
    struct Way {
      const char* system;
      bool first;
      std::uint32_t in_flight;
    };
    for (const Way way : {Way{"highest priority", true, 0}, Way{"highest priority, 7 chunks in flight", true, 7},
                          Way{"the kernels' priority", false, 0}}) {
      Stream& stream = way.first ? high_ : low_;
      in_flight_ = way.in_flight;
      Times times{};
      std::vector<double> loads, firsts, lost;
      for (int i = 0; i < repetitions_; ++i) {
        const double seconds = products(kernels, rounds, compute, [&] { times = load(n, 0, 2, stream); });
        loads.push_back(times.all);
        firsts.push_back(times.first);
        lost.push_back((seconds - compute_alone) / times.all);
      }
      const std::string size = std::to_string(n) + " x " + text_;
      row("load beside kernels on all SMs", way.system, size, median(loads) * 1e3, "ms", alone * 1e3);
      row("its first layer", way.system, size, median(firsts) * 1e6, "us");
      row("time that the kernels lose meanwhile", way.system, size, median(lost) * 100, "%");
    }
    in_flight_ = 0;
  }

  // A forward that waits for each layer, beside the load; alone, all pages are there.
  void beside_forward() {
    const Forward forward(rig_.pools, 80, low_);
    for (const std::uint32_t n : sizes()) {
      const std::string size = std::to_string(n) + " x " + text_;
      const double alone = median_of([&] {
        Timer timer(low_);
        return timer.seconds([&] { run(forward, n, nullptr); });
      });
      row("forward", "nobody beside", size, alone * 1e3, "ms");
      for (const std::uint32_t ctas : {2u, 4u}) forward_rows(forward, n, 0, ctas);
      if (n <= rig_.options.stored) forward_rows(forward, 0, n, 2);
    }
  }

  // Other numbers of controller threads, and of commands in flight; also where others keep cores busy.
  void sessions() {
    if (rig_.store == nullptr) return;
    for (const std::uint32_t megabytes : {8u, 16u, 32u, 64u, 128u}) session_row(8, megabytes, 0);
    for (const std::uint32_t megabytes : {16u, 32u, 64u}) session_row(10, megabytes, 0);
    for (const std::uint32_t megabytes : {8u, 16u, 32u, 64u}) session_row(12, megabytes, 0);
    for (const std::uint32_t threads : {8u, 10u, 12u}) session_row(threads, 32, 3);
  }

 private:
  // The copy engine and a mover at once, half of the bytes each: whether the link has more than either takes.
  void both_in(std::uint64_t bytes) {
    const std::uint64_t half = bytes / 2 >> 12 << 12;
    const double both = rate(bytes, [&] {
      check(cudaEventRecord(end_, high_), "cudaEventRecord");
      check(cudaStreamWaitEvent(low_, end_), "cudaStreamWaitEvent");
      check(cudaMemcpyAsync(rig_.pools.memory(), rig_.pinned.get(), half, cudaMemcpyHostToDevice, low_), "copy");
      move(rig_.pinned_address(0) + half, address(rig_.pools.memory()) + half, bytes - half);
      check(cudaEventRecord(end_, low_), "cudaEventRecord");
      check(cudaStreamWaitEvent(high_, end_), "cudaStreamWaitEvent");
    });
    row("copy engine and mover at once, in", "limit", text_, both, "GB/s", copy_in_);
  }
  // By preads of the host alone, while no controller's threads look for doorbells.
  double pread_rates() {
    const LoadRigOptions o = rig_.options;
    const std::uint64_t window = std::uint64_t{o.queues} * o.commands * o.command_bytes;
    rig_.close_session();
    double most = 0;
    for (const unsigned threads : {o.controller_threads, std::thread::hardware_concurrency()}) {
      const double files =
          rig_.store->read_rate(threads, rig_.pinned.get(), window, shape_.bytes() * o.stored, o.command_bytes) * 1e-9;
      row("pread, nobody beside", (std::to_string(threads) + " threads").c_str(), text_, files, "GB/s");
      most = std::max(most, files);
    }
    rig_.use_session(o.controller_threads, o.queues, o.commands);
    fill_pinned();  // which was read into
    return most;
  }
  void session_row(std::uint32_t threads, std::uint32_t megabytes, unsigned busy) {
    const std::uint32_t n = std::min(most_, rig_.options.stored);
    const std::uint32_t commands =
        std::max(1u, (megabytes << 20) / static_cast<std::uint32_t>(shape_.layer_bytes()) / threads);
    rig_.use_session(threads, threads, commands);
    const BusyHost others(busy);
    std::vector<double> all, first, ready;
    constexpr int kTimes = 5;
    for (int i = 0; i <= kTimes; ++i) {
      const Times times = load(0, n, 2, high_);
      if (i == 0) continue;
      all.push_back(times.all);
      first.push_back(times.first);
      ready.push_back(times.ready);
    }
    const std::string name = std::to_string(threads) + " threads and queues, " + std::to_string(commands) +
                             " commands of each" + (busy == 0 ? "" : ", " + std::to_string(busy) + " cores kept busy");
    const std::string size = std::to_string(n) + " x " + text_;
    row("load from files", name.c_str(), size, gb(n) / median(all), "GB/s", mover_in_, quantile(all, 0.99) * 1e3);
    row("its first layer", name.c_str(), size, median(first) * 1e6, "us");
    row("loader ready", name.c_str(), size, median(ready) * 1e6, "us");
  }
  void run(const Forward& forward, std::uint32_t pages, const std::vector<cudaEvent_t>* events) {
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      if (events != nullptr) check(cudaStreamWaitEvent(forward.stream(), (*events)[layer]), "cudaStreamWaitEvent");
      forward.layer(layer, pages);
    }
  }
  void forward_rows(const Forward& forward, std::uint32_t pinned, std::uint32_t files, std::uint32_t ctas) {
    const std::uint32_t n = pinned + files;
    const std::string size = std::to_string(n) + " x " + text_,
                      system = files != 0 ? std::string("files") : "pinned memory, " + std::to_string(ctas) + " CTAs";
    std::vector<double> alone, loads, ends;
    for (int i = 0; i <= repetitions_; ++i) {
      const double one = load(pinned, files, ctas, high_).all;
      meanwhile_ = [&] {
        run(forward, n, &rig_.events);
        check(cudaEventRecord(end_, forward.stream()), "cudaEventRecord");
      };
      const double beside = load(pinned, files, ctas, high_).all;
      meanwhile_ = nullptr;
      wait_for(forward.stream(), "forward");
      if (i == 0) continue;
      alone.push_back(one);
      loads.push_back(beside);
      ends.push_back(since_begin(end_));
    }
    row("load, nobody beside", system.c_str(), size, median(alone) * 1e3, "ms");
    row("load beside a forward that waits", system.c_str(), size, median(loads) * 1e3, "ms", median(alone) * 1e3);
    row("that forward's end", system.c_str(), size, median(ends) * 1e3, "ms", median(alone) * 1e3);
  }
  void fill_pinned() {
    fill_objects<<<256, 256, 0, high_>>>(reinterpret_cast<unsigned long long*>(rig_.pinned.get()), rig_.options.pinned,
                                         shape_.bytes() / 8, LoadRig::kPinnedNumbers);
    wait_for(high_, "objects in pinned memory");
  }
  static std::uint64_t address(const void* at) { return reinterpret_cast<std::uint64_t>(at); }
  double gb(std::uint32_t pages) const { return static_cast<double>(pages * shape_.bytes()) * 1e-9; }
  std::vector<std::uint32_t> sizes() const {
    std::vector<std::uint32_t> all;
    for (const std::uint32_t n : {8u, 64u, 128u, most_}) {
      if (n <= most_ && (all.empty() || all.back() < n)) all.push_back(n);
    }
    return all;
  }
  double median_of(const std::function<double()>& one) {
    std::vector<double> all;
    for (int i = 0; i < repetitions_; ++i) all.push_back(one());
    return median(all);
  }
  double rate(std::uint64_t bytes, const std::function<void()>& work) {
    std::vector<double> rates;
    for (int i = 0; i < 5; ++i) {
      Timer timer(high_);
      rates.push_back(static_cast<double>(bytes) * 1e-9 / timer.seconds(work));
    }
    return median(rates);
  }
  void move(std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
    const tardis_gpu_piece piece{from, to, bytes};
    const std::uint32_t one = 1;
    check(cudaMemcpyAsync(rig_.work.pieces.get(), &piece, sizeof piece, cudaMemcpyHostToDevice, high_), "piece");
    check(cudaMemcpyAsync(rig_.work.counts.get(), &one, sizeof one, cudaMemcpyHostToDevice, high_), "count");
    const tardis_gpu_move_args args{rig_.work.pieces.get(), rig_.work.counts.get(), 1, 2};
    check(tardis_gpu_move(&args, high_), "tardis_gpu_move");
  }

  void rows(const std::string& name, std::uint32_t n, double limit, const std::function<Times()>& one,
            int repetitions = 0) {
    std::vector<double> all, first, host, ready;
    if (repetitions == 0) repetitions = repetitions_;
    for (int i = 0; i <= repetitions; ++i) {
      const Times times = one();
      if (i == 0) continue;  // with the comparison of what landed
      all.push_back(times.all);
      first.push_back(times.first);
      ready.push_back(times.ready);
    }
    const std::string size = std::to_string(n) + " x " + text_;
    row(name.c_str(), "rate", size, gb(n) / median(all), "GB/s", limit);
    row(name.c_str(), "all layers", size, median(all) * 1e3, "ms", limit > 0 ? gb(n) / limit * 1e3 : 0,
        quantile(all, 0.99) * 1e3);
    row(name.c_str(), "first layer", size, median(first) * 1e6, "us");
    host.clear();
    plain_ = true;
    for (int i = 0; i < repetitions; ++i) host.push_back(one().host);
    plain_ = false;
    row(name.c_str(), "call of the host", size, median(host) * 1e6, "us");
    if (median(ready) > 0) row(name.c_str(), "loader ready", size, median(ready) * 1e6, "us");
  }

  // What landed is compared where it is the first load of its kind and size.
  Times load(std::uint32_t pinned, std::uint32_t files, std::uint32_t ctas, cudaStream_t stream,
             bool use_rings = true) {
    for (std::size_t i = page_order_.size(); i > 1; --i) std::swap(page_order_[i - 1], page_order_[next() % i]);
    std::fill_n(expected_.get(), rig_.options.pool_pages, kNobody);
    const auto begin_object = static_cast<std::uint32_t>(next() % rig_.options.pinned);
    for (std::uint32_t i = 0; i < pinned; ++i) {
      const std::uint32_t object = (begin_object + i * 7) % rig_.options.pinned;
      rig_.pinned_ids[i] = page_order_[i];
      rig_.pinned_objects[i] = rig_.pinned_address(object);
      expected_[page_order_[i]] = LoadRig::kPinnedNumbers + object;
    }
    std::vector<std::uint64_t> numbers(files);
    const std::uint64_t begin_number = files == 0 ? 0 : next() % rig_.options.stored;
    for (std::uint32_t i = 0; i < files; ++i) {
      numbers[i] = (begin_number + i) % rig_.options.stored;
      rig_.file_ids[i] = page_order_[pinned + i];
      expected_[page_order_[pinned + i]] = numbers[i];
    }
    rig_.clear_board();
    struct tardis_gpu_load load = rig_.load_of(pinned, files);
    load.ctas = ctas;
    load.traffic.in_flight = in_flight_;
    if (plain_) load.events = reinterpret_cast<void* const*>(plain_events_.data());
    const bool compare = compared_.insert({pinned, files, use_rings}).second;
    if (compare) {
      rig_.pools.poison(stream);
      wait_for(stream, "poison");
    }
    Times times{};
    check(cudaEventRecord(begin_, stream), "cudaEventRecord");
    tardis_load* const loading = files == 0 ? nullptr : rig_.begin(numbers, use_rings);
    const auto start = Clock::now();
    check(tardis_gpu_load_enqueue(&load, stream), "tardis_gpu_load_enqueue");
    times.host = since(start);
    if (meanwhile_) meanwhile_();
    if (loading != nullptr) {
      while (__atomic_load_n(&rig_.board()->ready, __ATOMIC_ACQUIRE) == TARDIS_LOAD_PENDING) {
      }
      times.ready = since(start);
    }
    wait_for(stream, "load");
    expect(loading == nullptr || rig_.end(loading).good != 0, "a good load");
    expect(rig_.board()->errors == 0, "no errors", rig_.board()->errors);
    if (plain_) return times;
    times.first = since_begin(rig_.events.front());
    times.all = since_begin(rig_.events.back());
    if (compare) compare_pools(stream);
    return times;
  }
  // By copy engines: objects in runs of `each`, to pages in runs of as many, in another order.
  Times load_runs(std::uint32_t n, std::uint32_t each) {
    const std::uint32_t count = n / each, shift = static_cast<std::uint32_t>(next() % count);
    std::vector<tardis_gpu_load_run> runs;
    std::fill_n(expected_.get(), rig_.options.pool_pages, kNobody);
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t object = i * each, page = (i + shift) % count * (each + 1);  // of which there are two for one
      runs.push_back({rig_.pinned_address(object), page, each});
      for (std::uint32_t k = 0; k < each; ++k) expected_[page + k] = LoadRig::kPinnedNumbers + object + k;
    }
    const auto& events = plain_ ? plain_events_ : rig_.events;
    const tardis_gpu_load_runs load{rig_.pools.args,
                                    runs.data(),
                                    shape_.bytes(),
                                    link_.get(),
                                    reinterpret_cast<void* const*>(events.data()),
                                    count,
                                    TARDIS_GPU_LINK_RESTORE};
    const bool compare = compared_runs_.insert({n, each}).second;
    if (compare) {
      rig_.pools.poison(high_);
      wait_for(high_, "poison");
    }
    Times times{};
    check(cudaEventRecord(begin_, high_), "cudaEventRecord");
    const auto start = Clock::now();
    check(tardis_gpu_load_runs_enqueue(&load, high_), "tardis_gpu_load_runs_enqueue");
    times.host = since(start);
    wait_for(high_, "load");
    if (plain_) return times;
    times.first = since_begin(rig_.events.front());
    times.all = since_begin(rig_.events.back());
    if (compare) compare_pools(high_);
    return times;
  }
  void compare_pools(cudaStream_t stream) {
    check(cudaMemsetAsync(wrong_.get(), 0, sizeof(unsigned long long), stream), "wrong");
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      compare_layer<<<256, 256, 0, stream>>>(rig_.pools.args, layer, expected_.get(), wrong_.get());
    }
    wait_for(stream, "comparison");
    const unsigned long long wrong = copy(wrong_.get(), 1)[0];
    expect(wrong == 0, "words that are wrong", wrong);
  }
  double since_begin(cudaEvent_t event) const {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, event), "cudaEventElapsedTime");
    return milliseconds * 1e-3;
  }
  std::pair<double, double> offload(std::uint32_t n, std::uint32_t ctas) {
    for (std::uint32_t i = 0; i < n; ++i) {
      ids_[i] = static_cast<std::uint32_t>((next() % 2 + 2 * i) % rig_.options.pool_pages);
      objects_[i] = rig_.pinned_address(i);
    }
    tardis_gpu_offload offload{};
    offload.pools = rig_.pools.args;
    offload.work = rig_.work.args;
    offload.ids = ids_.get();
    offload.objects = objects_.get();
    offload.pages = n;
    offload.ctas = ctas;
    offload.errors = errors_.get();
    offload.traffic.link_class = TARDIS_GPU_LINK_WRITE_BEHIND;
    offload.traffic.direction = TARDIS_GPU_LINK_OUT;
    check(cudaEventRecord(begin_, low_), "cudaEventRecord");
    const auto start = Clock::now();
    check(tardis_gpu_offload_enqueue(&offload, low_), "tardis_gpu_offload_enqueue");
    const double called = since(start);
    check(cudaEventRecord(end_, low_), "cudaEventRecord");
    wait_for(low_, "offload");
    expect(errors_[0] == 0, "no page outside", errors_[0]);
    return {since_begin(end_), called};
  }

  double products(int kernels, int rounds, cudaStream_t stream, const std::function<void()>& meanwhile) {
    cudaEvent_t from, to;
    check(cudaEventCreate(&from), "cudaEventCreate");
    check(cudaEventCreate(&to), "cudaEventCreate");
    check(cudaEventRecord(from, stream), "cudaEventRecord");
    for (int i = 0; i < kernels; ++i) {
      product<<<kBusyBlocks, kProductThreads, kBusyShared, stream>>>(reinterpret_cast<float*>(wrong_.get()), rounds);
    }
    check(cudaEventRecord(to, stream), "cudaEventRecord");
    if (meanwhile) meanwhile();
    wait_for(stream, "kernels");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, from, to), "cudaEventElapsedTime");
    check(cudaEventDestroy(from), "cudaEventDestroy");
    check(cudaEventDestroy(to), "cudaEventDestroy");
    return milliseconds * 1e-3;
  }
  // So that a kernel takes about this long.
  int rounds_for(int us, cudaStream_t stream) {
    constexpr int kProbe = 500;
    (void)products(3, kProbe, stream, nullptr);
    const double each = products(20, kProbe, stream, nullptr) / 20;
    return std::max(1, static_cast<int>(kProbe * us * 1e-6 / each));
  }
  std::uint64_t next() { return scramble(++seed_); }

  LoadRig rig_;
  const int repetitions_;
  const std::uint32_t most_;
  const ObjectShape shape_;
  MappedArray<std::uint64_t> expected_;
  DeviceArray<unsigned long long> wrong_;
  MappedArray<std::uint32_t> errors_;
  MappedArray<std::uint64_t> objects_;
  MappedArray<std::uint32_t> ids_;
  std::vector<std::uint32_t> page_order_;
  std::set<std::tuple<std::uint32_t, std::uint32_t, bool>> compared_;
  std::set<std::pair<std::uint32_t, std::uint32_t>> compared_runs_;
  std::unique_ptr<tardis_gpu_link, LinkDestroy> link_;
  std::uint64_t seed_ = 0;
  std::string text_;
  double copy_in_ = 0, copy_out_ = 0, mover_in_ = 0, mover_out_ = 0;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::vector<cudaEvent_t> plain_events_;  // as a server has them, without times
  bool plain_ = false;
  std::function<void()> meanwhile_;  // what the host does behind the call
  std::uint32_t in_flight_ = 0;
  Stream high_{true}, low_{false};
};

}  // namespace
}  // namespace tardis::gstore::testing

int main(int argc, char** argv) {
  using namespace tardis::gstore::testing;
  if (!has_gpu()) return kSkipped;
  LoadRigOptions options;
  if (argc > 1) options.parent = argv[1];
  const auto pages = argc > 2 ? static_cast<std::uint32_t>(std::atoi(argv[2])) : 512;
  const int repetitions = argc > 3 ? std::atoi(argv[3]) : 9;
  options.controller_threads = argc > 4 ? static_cast<std::uint32_t>(std::atoi(argv[4])) : 12;
  options.shape = {32, 2, 128 << 10};  // Llama-3.1-8B, 64 tokens
  options.queues = options.controller_threads;
  options.commands = (32u << 20) / options.command_bytes / options.queues;  // as servers have them
  options.stored = options.pinned = options.most_pages = pages;
  options.pool_pages = 2 * pages;
  const std::string parts = argc > 5 ? argv[5] : "lpbwfso";
  const auto wanted = [&](char part) { return parts.find(part) != std::string::npos; };
  LoadBench bench(options, repetitions);
  if (wanted('l')) bench.limits();
  if (wanted('p')) bench.from_pinned();
  if (wanted('b')) bench.beside_compute();
  if (wanted('w')) bench.beside_forward();
  if (wanted('f')) bench.from_files();
  if (wanted('s')) bench.sessions();
  if (wanted('o')) bench.offloads();  // last: objects in pinned memory are not what they were
  if (failures != 0) std::fprintf(stderr, "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
