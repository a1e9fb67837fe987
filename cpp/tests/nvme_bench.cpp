// SPDX-License-Identifier: Apache-2.0
// The software NVMe controller with a driver on it, to set beside memory copies, fio and a store on io_uring:
//   tardis_nvme_bench case=commands [block=4096] [depth=256] [seconds=2]
//   tardis_nvme_bench case=file folder=DIR [op=read|write] [block_kib=128] [depth=64] [size_mib=1024]
//   tardis_nvme_bench case=store folder=DIR [device=nvme|io_uring] [page_kib=128] [size_mib=1024] [batch=128]
//                     [callers=1] [repeat=1]
// and for all but the store on io_uring [threads=1] [spin_us=50] [medium_threads=8]
// [medium_batch=64], with folder= [engine=auto|io_uring|sync] and [registered=1]. Prints a JSON object a line. What was
// read is compared with what was written; the exit status is 1 if a byte is wrong or anything failed.
//
// commands: reads of one block at random places of a namespace in memory, through one queue pair.
// file: every block of DIR/tardis-nvme-bench.data once, in order, through driver, controller and FileMedium.
// store: pages into an empty store (fill), read back after it was opened anew (get), and over the pages of before
// (set); a flush is inside fill and set.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/clock.h"
#include "nvme/nvme_device.h"
#include "nvme/nvme_namespace.h"
#include "nvme/ordering.h"
#include "nvme/soft/controller.h"
#include "nvme/soft/file_medium.h"
#include "store/store.h"
#include "store_pages.h"

namespace tardis::nvme {
namespace {

using tardis::testing::fill_page;
using tardis::testing::page_key;

constexpr std::uint64_t kMiB = 1u << 20;
constexpr std::uint64_t kCommandsBytes = 64 * kMiB;  // of the namespace in memory

[[noreturn]] void stop(const std::string& message) {
  std::fprintf(stderr, "tardis_nvme_bench: %s\n", message.c_str());
  std::exit(1);
}

void check(const Status& status) {
  if (!status) stop(status.error().message);
}

template <class T>
T need(Result<T> result) {
  if (!result) stop(result.error().message);
  return std::move(*result);
}

class Arguments {
 public:
  Arguments(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string text = argv[i];
      const auto equals = text.find('=');
      if (equals == std::string::npos || !values_.contains(text.substr(0, equals))) {
        stop("unknown argument '" + text + "'");
      }
      values_[text.substr(0, equals)] = text.substr(equals + 1);
    }
  }
  const std::string& text(const char* name) const { return values_.at(name); }
  std::uint64_t number(const char* name, std::uint64_t least = 1, std::uint64_t most = 1u << 20) const {
    const std::string& found = values_.at(name);
    char* end = nullptr;
    const auto value = std::strtoull(found.c_str(), &end, 10);
    if (found.empty() || *end != '\0' || value < least || value > most) {
      stop(std::string(name) + ": expected " + std::to_string(least) + " to " + std::to_string(most) + ", found '" +
           found + "'");
    }
    return value;
  }
  bool chooses(const char* name, const char* first, const char* second) const {
    const std::string& found = values_.at(name);
    if (found != first && found != second) {
      stop(std::string(name) + ": expected " + first + " or " + second + ", found '" + found + "'");
    }
    return found == first;
  }
  BlockDeviceOptions device() const {
    using Engine = BlockDeviceOptions::Engine;
    BlockDeviceOptions options;
    if (text("engine") != "auto")
      options.engine = chooses("engine", "io_uring", "sync") ? Engine::kIoUring : Engine::kSync;
    return options;
  }

 private:
  std::map<std::string, std::string> values_{
      {"case", ""},         {"folder", ""},      {"block", "4096"},       {"depth", ""},
      {"seconds", "2"},     {"op", "read"},      {"device", "nvme"},      {"threads", "1"},
      {"block_kib", "128"}, {"page_kib", "128"}, {"medium_threads", "8"}, {"size_mib", "1024"},
      {"batch", "128"},     {"repeat", "1"},     {"medium_batch", "64"},  {"callers", "1"},
      {"registered", "1"},  {"spin_us", "50"},   {"engine", "auto"}};
};

double process_cpu_seconds() {
  rusage used;
  if (::getrusage(RUSAGE_SELF, &used) != 0) stop("getrusage failed");
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

struct Timed {
  double seconds = 0, cpu = 0;
  double gb_per_second(std::uint64_t bytes) const { return static_cast<double>(bytes) / seconds * 1e-9; }
  double cpu_per_gb(std::uint64_t bytes) const { return cpu / static_cast<double>(bytes) * 1e9; }
};

template <class Work>
Timed timed(Work work) {
  const double cpu = process_cpu_seconds();
  const std::uint64_t start = monotonic_ns();
  work();
  return {static_cast<double>(monotonic_ns() - start) * 1e-9, process_cpu_seconds() - cpu};
}

// A controller on one medium, and a driver on it. What is below goes last.
class Drive {
 public:
  Drive(std::shared_ptr<Medium> medium, std::uint32_t block_shift, std::uint32_t depth, const Arguments& arguments) {
    SoftControllerOptions soft;
    soft.namespaces.push_back({std::move(medium), block_shift, 0, 0});
    soft.threads = static_cast<std::uint32_t>(arguments.number("threads", 1, 256));
    soft.medium_threads = static_cast<std::uint32_t>(arguments.number("medium_threads", 1, 256));
    soft.medium_batch = static_cast<std::uint32_t>(arguments.number("medium_batch"));
    soft.spin = std::chrono::microseconds(arguments.number("spin_us", 0));
    controller_ = need(SoftController::create(std::move(soft), space_));
    DriverOptions options;
    options.queue_entries = depth + 1;  // one less can be used
    driver_ = need(Driver::open(controller_->window(), space_, options));
    namespace_ = need(NvmeNamespace::open(driver_, 1));
  }
  ~Drive() {
    const auto wrong = controller_->violations();
    if (!wrong.empty()) stop("the controller complains of its driver: " + describe(wrong));
    const DriverCounters counters = driver_->counters();
    if (counters.timeouts + counters.retries + counters.resets != 0) {
      stop("commands were late or failed: " + std::to_string(counters.timeouts) + " time-outs, " +
           std::to_string(counters.retries) + " retries, " + std::to_string(counters.resets) + " resets");
    }
  }
  Drive(const Drive&) = delete;
  Drive& operator=(const Drive&) = delete;

  SoftController& controller() { return *controller_; }
  Driver& driver() { return *driver_; }
  std::shared_ptr<NvmeNamespace> space() { return namespace_; }

 private:
  DmaSpace space_;
  std::unique_ptr<SoftController> controller_;
  std::shared_ptr<Driver> driver_;
  std::shared_ptr<NvmeNamespace> namespace_;
};

// One file as a namespace, through the engine that a store in this folder would get.
struct FileBelow {
  FileBelow(const std::string& folder, std::uint64_t bytes, const Arguments& arguments)
      : path(folder + "/tardis-nvme-bench.data"), device(need(open_block_device(folder, arguments.device(), -1))) {
    file = need(device->open_file(path, true, true));
    grown = need(device->file_bytes(file)) < bytes;
    check(device->preallocate(file, bytes));
    medium = std::shared_ptr<Medium>(need(FileMedium::create(*device, {{file, bytes}})));
  }
  std::string path;
  std::unique_ptr<BlockDevice> device;
  FileId file = 0;
  bool grown = false;  // parts of it were never written
  std::shared_ptr<Medium> medium;
};

// ---- case=commands

// Reads through one queue pair for a while; `sample` gets the time that each took, where it is not null.
std::uint64_t read_blocks(Drive& drive, std::uint32_t block, std::uint32_t depth, std::uint64_t seconds,
                          std::vector<std::uint32_t>* sample) {
  auto memory = need(AlignedBuffer::allocate(std::size_t{depth} * kPageBytes));
  check(drive.driver().register_memory(memory.data(), memory.size()));
  std::uint64_t done = 0;
  {
    const Driver::QueueLease lease(drive.driver());
    const std::uint64_t address = drive.driver()
                                      .regions()
                                      ->find(reinterpret_cast<std::uintptr_t>(memory.data()))
                                      ->address_of(reinterpret_cast<std::uintptr_t>(memory.data()));
    std::vector<std::uint32_t> places(1u << 16);
    std::mt19937 random(1);
    for (std::uint32_t& place : places) place = random() % static_cast<std::uint32_t>(kCommandsBytes / block);
    std::size_t next = 0;
    std::vector<std::uint64_t> sent(depth);
    const std::uint64_t deadline = monotonic_ns() + (seconds + 60) * 1'000'000'000;
    const auto submit = [&](std::uint64_t buffer) {
      SubmissionEntry command{};
      command.opcode = static_cast<std::uint8_t>(IoOpcode::kRead);
      command.namespace_id = 1;
      command.prp = {address + buffer * kPageBytes, 0};
      command.set_start_block(places[next++ % places.size()]);
      if (sample != nullptr) sent[buffer] = monotonic_ns();
      if ((*lease).submit(command, buffer, deadline) != IoQueue::Submit::kOk) stop("the queue has no room");
    };
    for (std::uint32_t i = 0; i < depth; ++i) submit(i);
    std::vector<FinishedCommand> finished;
    std::uint64_t in_flight = depth, now = monotonic_ns();
    const std::uint64_t end = now + seconds * 1'000'000'000;
    while (in_flight > 0) {
      finished.clear();
      if ((*lease).exchange(finished) == 0) relax();
      now = monotonic_ns();
      if (now > deadline) stop("commands do not complete");
      for (const FinishedCommand& command : finished) {
        if (command.fate != Fate::kCompleted || !command.status.ok()) stop("a read failed");
        if (sample != nullptr) sample->push_back(static_cast<std::uint32_t>(now - sent[command.tag]));
        ++done;
        if (now < end) {
          submit(command.tag);
        } else {
          --in_flight;
        }
      }
    }
  }
  drive.driver().unregister_memory(memory.data());
  return done;
}

// What a core does of the copies alone.
double copies_per_second(std::byte* from, std::uint32_t block, std::uint32_t depth) {
  auto memory = need(AlignedBuffer::allocate(std::size_t{depth} * kPageBytes));
  std::mt19937 random(1);
  std::uint64_t done = 0;
  const std::uint64_t start = monotonic_ns(), end = start + 500'000'000;
  std::uint64_t now = start;
  while (now < end) {
    for (std::uint32_t i = 0; i < depth; ++i) {
      const std::uint64_t place = random() % (kCommandsBytes / block);
      std::memcpy(memory.data() + std::size_t{i} * kPageBytes, from + place * block, block);
      asm volatile("" ::: "memory");
    }
    done += depth;
    now = monotonic_ns();
  }
  return static_cast<double>(done) / (static_cast<double>(now - start) * 1e-9);
}

int commands(const Arguments& arguments) {
  const auto block = static_cast<std::uint32_t>(arguments.number("block", 512, 4096));
  if (block != 512 && block != 4096) stop("block: expected 512 or 4096");
  const auto depth = static_cast<std::uint32_t>(arguments.text("depth").empty() ? 256 : arguments.number("depth"));
  const std::uint64_t seconds = arguments.number("seconds");
  auto medium = std::shared_ptr<MemoryMedium>(need(MemoryMedium::create(kCommandsBytes)));
  std::memset(medium->data(), 0x5a, kCommandsBytes);  // else all reads are of one page of zeros
  const double copies = copies_per_second(medium->data(), block, depth);
  Drive drive(medium, block == 512 ? 9 : 12, depth, arguments);

  std::vector<std::uint32_t> times;
  if (depth == 1) times.reserve(8u << 20);
  const std::uint64_t controller_before = drive.controller().counters().cpu_ns;
  std::uint64_t done = 0;
  const Timed all = timed([&] { done = read_blocks(drive, block, depth, seconds, depth == 1 ? &times : nullptr); });
  const double controller = static_cast<double>(drive.controller().counters().cpu_ns - controller_before) * 1e-9;
  const auto count = static_cast<double>(done);
  std::printf(
      "{\"case\": \"commands\", \"block\": %u, \"depth\": %u, \"commands\": %llu, \"per_second\": %.0f, "
      "\"per_controller_core_second\": %.0f, \"per_client_core_second\": %.0f, \"copies_per_core_second\": %.0f",
      block, depth, static_cast<unsigned long long>(done), count / all.seconds, count / controller,
      count / (all.cpu - controller), copies);
  if (!times.empty()) {
    std::sort(times.begin(), times.end());
    const auto part = [&](double p) { return times[static_cast<std::size_t>(p * static_cast<double>(times.size()))]; };
    std::printf(", \"p50_us\": %.3f, \"p99_us\": %.3f", part(0.5) * 1e-3, part(0.99) * 1e-3);
  }
  std::printf("}\n");
  return 0;
}

// ---- case=file

void run_all(NvmeNamespace& space, NamespaceRequest::Op op, AlignedBuffer& memory, std::uint64_t block) {
  std::vector<iovec> pieces(memory.size() / block);
  std::vector<NamespaceRequest> requests(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = {memory.data() + i * block, static_cast<std::size_t>(block)};
    requests[i] = {op, i * block, {&pieces[i], 1}, 0};
  }
  space.run(requests, nullptr);
  for (const NamespaceRequest& request : requests) {
    if (request.error != 0) stop(std::string("a request failed: ") + std::strerror(request.error));
  }
}

std::uint64_t wrong_bytes(const AlignedBuffer& memory, std::uint64_t seed) {
  std::vector<std::uint8_t> expected(kMiB);
  std::uint64_t wrong = 0;
  for (std::uint64_t at = 0; at < memory.size(); at += kMiB) {
    const std::uint64_t n = std::min<std::uint64_t>(kMiB, memory.size() - at);
    fill_page(expected.data(), n, seed, at);
    const auto* found = reinterpret_cast<const std::uint8_t*>(memory.data()) + at;
    if (std::memcmp(found, expected.data(), n) == 0) continue;
    for (std::uint64_t i = 0; i < n; ++i) wrong += found[i] != expected[i] ? 1 : 0;
  }
  return wrong;
}

int file(const Arguments& arguments) {
  const bool read = arguments.chooses("op", "read", "write");
  const std::uint64_t block = arguments.number("block_kib") << 10;
  const std::uint64_t size = (arguments.number("size_mib") << 20) / block * block;
  const auto depth = static_cast<std::uint32_t>(arguments.text("depth").empty() ? 64 : arguments.number("depth"));
  if (block % 4096 != 0 || size == 0) stop("block_kib and size_mib do not fit each other");
  const std::uint64_t seed = monotonic_ns();  // not what the file may hold already
  FileBelow below(arguments.text("folder"), size, arguments);
  const bool registered = arguments.number("registered", 0, 1) != 0;
  auto memory = need(AlignedBuffer::allocate(size));
  fill_page(reinterpret_cast<std::uint8_t*>(memory.data()), size, seed);
  Timed spent;
  std::uint64_t bounced = 0, wrong = 0;
  {
    Drive drive(below.medium, 12, depth, arguments);
    NvmeNamespace& space = *drive.space();
    if (read || below.grown) {
      // Really written: reads of what is only reserved never reach a drive, and writes to it are another case.
      const std::uint64_t largest = std::min<std::uint64_t>(size, kMiB);
      if (size % largest != 0) stop("size_mib: expected whole MiB");
      run_all(space, NamespaceRequest::Op::kWrite, memory, largest);
      check(space.flush());
    }
    if (read) std::memset(memory.data(), 0, memory.size());
    if (registered) check(space.register_memory(memory.data(), memory.size()));
    const std::uint64_t bounced_before = drive.driver().counters().bounced_commands;
    spent = timed([&] {
      run_all(space, read ? NamespaceRequest::Op::kRead : NamespaceRequest::Op::kWrite, memory, block);
      if (!read) check(space.flush());
    });
    bounced = drive.driver().counters().bounced_commands - bounced_before;
    if (!read) {
      std::memset(memory.data(), 0, memory.size());
      run_all(space, NamespaceRequest::Op::kRead, memory, block);
    }
    wrong = wrong_bytes(memory, seed);
    if (registered) space.unregister_memory(memory.data());
  }
  std::printf(
      "{\"case\": \"file\", \"op\": \"%s\", \"block_kib\": %llu, \"depth\": %u, \"bytes\": %llu, \"gb_per_second\": "
      "%.4f, \"cpu_seconds_per_gb\": %.4f, \"engine\": \"%s\", \"direct\": %s, \"bounced_commands\": %llu, "
      "\"wrong_bytes\": %llu}\n",
      read ? "read" : "write", static_cast<unsigned long long>(block >> 10), depth,
      static_cast<unsigned long long>(size), spent.gb_per_second(size), spent.cpu_per_gb(size),
      below.device->report().engine.c_str(), below.device->geometry().direct ? "true" : "false",
      static_cast<unsigned long long>(bounced), static_cast<unsigned long long>(wrong));
  return wrong == 0 ? 0 : 1;
}

// ---- case=store

struct Pages {
  Pages(std::size_t count, std::uint64_t bytes) : memory(need(AlignedBuffer::allocate(count * bytes))) {
    // As bench/storage.py has them: layers of K and V.
    parts = bytes >= 8 * kMiB ? 32 : bytes >= kMiB ? 16 : 4;
    regions.assign(2, bytes / parts / 2);
    for (std::uint64_t at = 0; at < memory.size(); at += bytes / parts / 2) {
      addresses.push_back(reinterpret_cast<std::uint64_t>(memory.data()) + at);
    }
    pieces_of_page = std::size_t{2} * parts;
  }
  const std::uint64_t* pieces(std::size_t page) const { return addresses.data() + page * pieces_of_page; }

  AlignedBuffer memory;
  std::uint32_t parts = 0;
  std::vector<std::uint64_t> regions, addresses;
  std::size_t pieces_of_page = 0;
};

class StoreBench {
 public:
  StoreBench(const Arguments& arguments, const std::string& folder, const DeviceFactory& device, std::uint64_t capacity,
             Pages& source, Pages& target, std::uint64_t page_bytes)
      : batch_(arguments.number("batch")),
        source_(source),
        target_(target),
        page_bytes_(page_bytes),
        count_(source.memory.size() / page_bytes),
        callers_(arguments.number("callers", 1, 256)),
        registered_(arguments.number("registered", 0, 1) != 0),
        folder_(folder),
        device_(device) {
    options_.capacity_bytes = capacity;
    options_.object_bytes_hint = page_bytes;
    options_.flush_bytes = batch_ * page_bytes;
    open();
  }
  ~StoreBench() { close(); }
  StoreBench(const StoreBench&) = delete;
  StoreBench& operator=(const StoreBench&) = delete;

  Timed set(std::uint64_t chain) {
    return timed([&] {
      for_batches(chain, [&](const std::vector<Hash256>& keys, std::size_t at, std::vector<std::uint8_t>& ok) {
        const Hash256 before = at > 0 ? page_key(chain, at - 1) : Hash256{};
        check(store_->set(space_, keys.data(), at > 0 ? &before : nullptr, source_.pieces(at), keys.size(), ok.data()));
      });
      check(store_->flush());
    });
  }
  Timed get(std::uint64_t chain) {
    return timed([&] {
      for_batches(chain, [&](const std::vector<Hash256>& keys, std::size_t at, std::vector<std::uint8_t>& ok) {
        check(store_->get(space_, keys.data(), target_.pieces(at), keys.size(), ok.data()));
      });
    });
  }
  std::uint64_t wrong_bytes() {
    const std::byte *a = source_.memory.data(), *b = target_.memory.data();
    std::uint64_t wrong = 0;
    if (std::memcmp(a, b, source_.memory.size()) != 0) {
      for (std::size_t i = 0; i < source_.memory.size(); ++i) wrong += a[i] != b[i] ? 1 : 0;
    }
    std::memset(target_.memory.data(), 0, target_.memory.size());
    return wrong;
  }
  void reopen() {
    close();
    open();
  }

 private:
  void open() {
    store_ = need(Store::open(folder_, options_, true, device_));
    space_ = need(store_->open_namespace({1, 2}, "{\"bench\": " + std::to_string(page_bytes_) + "}", source_.parts,
                                         source_.regions));
    for (Pages* pages : {&source_, &target_}) {
      if (registered_) check(store_->register_memory(pages->memory.data(), pages->memory.size()));
    }
  }
  void close() {
    for (Pages* pages : {&source_, &target_}) {
      if (registered_) store_->unregister_memory(pages->memory.data());
    }
    check(store_->close());
    store_.reset();
  }
  template <class Move>
  void for_batches(std::uint64_t chain, Move move) {
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
      std::vector<Hash256> keys;
      std::vector<std::uint8_t> ok;
      for (std::size_t at; (at = next.fetch_add(batch_)) < count_;) {
        keys.resize(std::min(batch_, count_ - at));
        ok.assign(keys.size(), 0);
        for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = page_key(chain, at + i);
        move(keys, at, ok);
        if (std::count(ok.begin(), ok.end(), 1) != static_cast<std::ptrdiff_t>(keys.size())) {
          stop("pages " + std::to_string(at) + " to " + std::to_string(at + keys.size()) + ": not all were there");
        }
      }
    };
    std::vector<std::thread> others;
    for (std::size_t i = 1; i < callers_; ++i) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
  }

  const std::size_t batch_;
  Pages &source_, &target_;
  const std::uint64_t page_bytes_;
  const std::size_t count_, callers_;
  const bool registered_;
  const std::string folder_;
  const DeviceFactory device_;
  StoreOptions options_;
  std::unique_ptr<Store> store_;
  NamespaceId space_{};
};

// What one repetition found.
struct Found {
  Timed fill, get, set;
  std::uint64_t wrong = 0;
};

Found measure_store(StoreBench& store) {
  Found found;
  found.fill = store.set(1);
  store.reopen();
  found.get = store.get(1);
  found.wrong = store.wrong_bytes();
  store.set(2);  // takes the rest of the room: what comes next goes over old pages
  found.set = store.set(3);
  store.get(3);
  found.wrong += store.wrong_bytes();
  return found;
}

int store(const Arguments& arguments) {
  const bool on_nvme = arguments.chooses("device", "nvme", "io_uring");
  const std::uint64_t page = arguments.number("page_kib") << 10;
  const std::size_t count = (arguments.number("size_mib") << 20) / page;
  if (page % (64 << 10) != 0 || count == 0) stop("page_kib and size_mib do not fit each other");
  const std::uint64_t size = count * page, capacity = size * 5 / 4 + 64 * kMiB;
  Pages source(count, page), target(count, page);
  fill_page(reinterpret_cast<std::uint8_t*>(source.memory.data()), size, 7);

  std::uint64_t wrong = 0;
  for (std::uint64_t i = 0; i < arguments.number("repeat"); ++i) {
    const std::string place = arguments.text("folder") + "/tardis-nvme-bench.store";
    std::filesystem::remove_all(place);
    Found found;
    if (on_nvme) {
      const std::string home = place + "/home";
      std::filesystem::create_directories(home);
      // Beside the segments a volume has its own tables.
      FileBelow below(place, capacity + 64 * kMiB, arguments);
      Drive drive(below.medium, 12, DriverOptions{}.queue_entries - 1, arguments);
      StoreBench bench(
          arguments, home,
          [&](const std::string& folder, const BlockDeviceOptions&, int) {
            return NvmeDevice::open(drive.space(), folder, NvmeDeviceOptions{});
          },
          capacity, source, target, page);
      found = measure_store(bench);
    } else {
      std::filesystem::create_directories(place);
      const auto io_uring = [](const std::string& folder, BlockDeviceOptions options, int keep_open_fd) {
        options.engine = BlockDeviceOptions::Engine::kIoUring;
        return open_block_device(folder, options, keep_open_fd);
      };
      StoreBench bench(arguments, place, io_uring, capacity, source, target, page);
      found = measure_store(bench);
    }
    std::filesystem::remove_all(place);
    wrong += found.wrong;
    for (const auto& [op, spent] : {std::pair{"fill", found.fill}, {"get", found.get}, {"set", found.set}}) {
      std::printf(
          "{\"case\": \"store\", \"device\": \"%s\", \"op\": \"%s\", \"page_kib\": %llu, \"bytes\": %llu, "
          "\"gb_per_second\": %.4f, \"cpu_seconds_per_gb\": %.4f, \"wrong_bytes\": %llu}\n",
          on_nvme ? "nvme" : "io_uring", op, static_cast<unsigned long long>(page >> 10),
          static_cast<unsigned long long>(size), spent.gb_per_second(size), spent.cpu_per_gb(size),
          static_cast<unsigned long long>(found.wrong));
    }
    std::fflush(stdout);
  }
  return wrong == 0 ? 0 : 1;
}

int run(int argc, char** argv) {
  const Arguments arguments(argc, argv);
  const std::string& name = arguments.text("case");
  if (name == "commands") return commands(arguments);
  if (arguments.text("folder").empty()) stop("expected case=commands, or case=file or case=store and folder=DIR");
  if (name == "file") return file(arguments);
  if (name == "store") return store(arguments);
  stop("case: expected commands, file or store, found '" + name + "'");
}

}  // namespace
}  // namespace tardis::nvme

int main(int argc, char** argv) { return tardis::nvme::run(argc, argv); }
