// SPDX-License-Identifier: Apache-2.0
// Reads of a store's files through a gio session (the software controller's threads), beside the same copies by as many
// plain threads. No GPU: a host thread or two keep the rings full and touch no data.
//   tardis_gio_store_bench folder=DIR [size_mib=2048] [threads=1,2] [command_kib=64,256,1024] [depth=8] [ms=500]
//                          [clients=1] [limits=1]
// Prints a JSON object a line, after every kind of command has been compared with what was stored. Exit status 1: a
// byte is wrong, or something failed.
#include <fcntl.h>
#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
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
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/clock.h"
#include "gio/session.h"
#include "nvme/queue.h"
#include "store/store.h"
#include "store_pages.h"

namespace tardis::gio {
namespace {

using tardis::testing::fill_page;
using tardis::testing::page_key;
using tardis::testing::page_seed;

constexpr std::uint64_t kMiB = 1u << 20;
constexpr std::uint32_t kLayers = 32;
constexpr std::uint64_t kObject = 8 * kMiB;
constexpr std::uint32_t kBlock = 4096;
constexpr std::size_t kMapped = 256;  // objects, for plain copies: to map more takes longer than to copy them

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "tardis_gio_store_bench: %s\n", why.c_str());
  std::exit(1);
}
void need(const Status& status) {
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
      if (equals == std::string::npos || !values_.contains(text.substr(0, equals))) stop("unknown argument " + text);
      values_[text.substr(0, equals)] = text.substr(equals + 1);
    }
  }
  const std::string& text(const char* name) const { return values_.at(name); }
  std::vector<std::uint32_t> numbers(const char* name) const {
    std::vector<std::uint32_t> found;
    const char* at = values_.at(name).c_str();
    while (*at != '\0') {
      char* end = nullptr;
      const unsigned long value = std::strtoul(at, &end, 10);
      if (end == at || value > 1u << 20) stop(std::string(name) + ": expected numbers, found " + values_.at(name));
      found.push_back(static_cast<std::uint32_t>(value));
      at = *end == ',' ? end + 1 : end;
    }
    if (found.empty()) stop(std::string(name) + ": expected a number");
    return found;
  }
  std::uint32_t number(const char* name) const { return numbers(name).front(); }

 private:
  std::map<std::string, std::string> values_{{"folder", ""},   {"size_mib", "2048"}, {"threads", "1,2"},
                                             {"depth", "8"},   {"ms", "500"},        {"command_kib", "64,256,1024"},
                                             {"clients", "1"}, {"limits", "1"}};
};

// Where a piece of an object is, and what it is.
struct Place {
  std::uint64_t address, seed, at;
};

class FilledStore {
 public:
  FilledStore(const std::string& parent, std::uint64_t bytes) : folder_(parent + "/tardis-gio-store-bench-XXXXXX") {
    if (::mkdtemp(folder_.data()) == nullptr) stop("no folder at " + parent);
    StoreOptions options;
    options.segment_bytes = 256 * kMiB;
    options.capacity_bytes = bytes * 5 / 4 + kGibRoom;
    options.object_bytes_hint = kObject;
    options.checkpoint_seconds = 0;
    store_ = need(Store::open(folder_, options, true));
    space_ = need(store_->open_namespace({9}, "{}", kLayers, std::vector<std::uint64_t>(2, kObject / kLayers / 2)));
    fill(bytes / kObject);
  }
  ~FilledStore() {
    leases_.clear();
    store_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  FilledStore(const FilledStore&) = delete;
  FilledStore& operator=(const FilledStore&) = delete;

  Store& store() { return *store_; }
  // Of the first `most` objects.
  std::vector<Place> places(std::uint32_t bytes, std::size_t most = ~std::size_t{0}) const {
    std::vector<Place> places;
    for (const Place& object : std::span(objects_).first(std::min(most, objects_.size()))) {
      for (std::uint64_t at = 0; at < kObject; at += bytes) places.push_back({object.address + at, object.seed, at});
    }
    std::shuffle(places.begin(), places.end(), std::mt19937_64(7));
    return places;
  }
  std::string file_of(std::uint64_t address, std::uint64_t& offset) const {
    const SegmentAddresses addresses = store_->segment_addresses();
    offset = address % addresses.stride;
    char name[64];
    std::snprintf(name, sizeof name, "/segments/%06u.seg", addresses.segment_of(address).number);
    return folder_ + name;
  }

 private:
  static constexpr std::uint64_t kGibRoom = 1u << 30;
  static constexpr std::size_t kTogether = 32;

  void fill(std::size_t count) {
    const unsigned threads = std::clamp(std::thread::hardware_concurrency(), 1u, 12u);
    AlignedBuffer memory(kTogether * kObject);
    for (std::size_t first = 0; first < count; first += kTogether) {
      const std::size_t n = std::min(kTogether, count - first);
      std::vector<Hash256> keys;
      std::vector<std::uint64_t> pieces;
      for (std::size_t i = 0; i < n; ++i) {
        keys.push_back(page_key(1, first + i));
        for (std::uint64_t at = 0; at < kObject; at += kObject / kLayers / 2) {
          pieces.push_back(reinterpret_cast<std::uint64_t>(memory.data() + i * kObject + at));
        }
      }
      std::vector<std::thread> makers;
      for (unsigned t = 0; t < threads; ++t) {
        makers.emplace_back([&, t] {
          for (std::size_t i = t; i < n; i += threads) {
            fill_page(reinterpret_cast<std::uint8_t*>(memory.data() + i * kObject), kObject, page_seed(0, keys[i]));
          }
        });
      }
      for (std::thread& maker : makers) maker.join();
      std::vector<std::uint8_t> ok(n);
      const Hash256 before = first > 0 ? page_key(1, first - 1) : Hash256{};
      need(store_->set(space_, keys.data(), first > 0 ? &before : nullptr, pieces.data(), n, ok.data()));
      leases_.push_back(need(store_->acquire(space_, keys.data(), n)));
      if (leases_.back().size() != n) stop("not all objects were stored");
      for (std::size_t i = 0; i < n; ++i) {
        objects_.push_back({leases_.back().extents(i, 0, kObject).front().address, page_seed(0, keys[i]), 0});
      }
    }
  }

  std::string folder_;
  std::unique_ptr<Store> store_;
  NamespaceId space_ = 0;
  std::vector<Lease> leases_;
  std::vector<Place> objects_;
};

bool holds(const std::byte* found, std::uint32_t bytes, const Place& place) {
  std::vector<std::uint8_t> expected(bytes);
  fill_page(expected.data(), bytes, place.seed, place.at);
  return std::memcmp(found, expected.data(), bytes) == 0;
}

// Queue pairs of a session, kept full by one thread.
class Client {
 public:
  Client(const std::vector<GrantedQueue>& queues, std::size_t first, std::size_t step, const std::vector<Place>& places,
         std::uint32_t bytes)
      : places_(places), bytes_(bytes) {
    for (std::size_t i = first; i < queues.size(); i += step) {
      const GrantedQueue& queue = queues[i];
      commands_.emplace_back(queue.commands);
      pairs_.emplace_back(nvme::QueueMemory{queue.sq, queue.cq, commands_.back().data(), queue.sq_tail, queue.cq_head,
                                            queue.entries, queue.entries, queue.commands, queue.id});
      queues_.push_back(&queue);
      asked_.emplace_back(queue.commands);
    }
    next_ = first * 1009;
  }

  // Returns how many were read. `compare`: what landed is what was stored.
  std::uint64_t run(std::uint64_t end, std::uint64_t most, bool compare) {
    std::uint64_t sent = 0, done = 0;
    const std::uint64_t deadline = end + 20'000'000'000;
    for (std::size_t q = 0; q < pairs_.size(); ++q) {
      for (std::uint32_t slot = 0; slot < queues_[q]->commands && sent < most; ++slot, ++sent) submit(q, slot);
      pairs_[q].ring();
    }
    std::uint64_t now = monotonic_ns();
    while (done < sent) {
      const std::uint64_t before = done;
      for (std::size_t q = 0; q < pairs_.size(); ++q) {
        nvme::Completion completion;
        bool some = false;
        while (pairs_[q].poll(completion) == nvme::PollResult::kCompletion) {
          if (!completion.status.ok()) stop("a read failed");
          const auto slot = static_cast<std::uint32_t>(completion.tag);
          if (compare && !holds(queues_[q]->bounce + std::uint64_t{slot} * queues_[q]->slot_bytes, bytes_,
                                places_[asked_[q][slot]])) {
            stop("wrong bytes");
          }
          ++done;
          some = true;
          if (now >= end || sent >= most) continue;
          submit(q, slot);
          ++sent;
        }
        if (!some) continue;
        pairs_[q].acknowledge();
        pairs_[q].ring();
      }
      if (done == before) ::sched_yield();
      now = monotonic_ns();
      if (now > deadline) stop("commands do not complete");
    }
    return done;
  }

 private:
  void submit(std::size_t q, std::uint32_t slot) {
    const GrantedQueue& queue = *queues_[q];
    const std::size_t which = next_++ % places_.size();
    asked_[q][slot] = which;
    nvme::SubmissionEntry entry{};
    entry.opcode = static_cast<std::uint8_t>(nvme::IoOpcode::kRead);
    entry.namespace_id = queue.namespace_id;
    entry.set_start_block(places_[which].address / kBlock);
    entry.cdw12 = bytes_ / kBlock - 1;
    if (!queue.pointers.describe(queue.bounce_offset + std::uint64_t{slot} * queue.slot_bytes, bytes_, entry)) {
      stop("a slot cannot be described");
    }
    if (pairs_[q].submit(entry, slot) == nvme::kNoCommandId) stop("a queue has no room");
  }

  const std::vector<Place>& places_;
  const std::uint32_t bytes_;
  std::vector<std::vector<nvme::CommandSlot>> commands_;
  std::vector<nvme::QueuePair> pairs_;
  std::vector<const GrantedQueue*> queues_;
  std::vector<std::vector<std::size_t>> asked_;
  std::size_t next_ = 0;
};

void row(const char* system, std::uint32_t threads, std::uint32_t kib, double rate, double limit) {
  char known[32] = "null";
  if (limit > 0) std::snprintf(known, sizeof known, "%.2f", limit);
  std::printf(
      "{\"case\": \"%u threads\", \"system\": \"%s\", \"size\": \"%u KiB\", \"value\": %.2f, \"unit\": \"GB/s\", "
      "\"limit\": %s}\n",
      threads, system, kib, rate, known);
  std::fflush(stdout);
}

double through_session(FilledStore& filled, std::uint32_t threads, std::uint32_t kib, const Arguments& arguments) {
  SessionOptions options;
  options.store = &filled.store();
  options.controller_threads = threads;
  options.queues = threads;
  options.slot_bytes = kib << 10;
  options.commands = arguments.number("depth");
  options.entries = options.commands + 2;
  AlignedBuffer memory(Session::memory_bytes(options));
  const auto session = need(Session::open(options, memory.data()));
  const std::vector<Place> places = filled.places(kib << 10);
  const std::uint32_t clients = std::min(arguments.number("clients"), threads);
  std::vector<std::unique_ptr<Client>> all;
  for (std::uint32_t i = 0; i < clients; ++i) {
    all.push_back(std::make_unique<Client>(session->queues(), i, clients, places, kib << 10));
  }
  all.front()->run(monotonic_ns() + 60'000'000'000, std::max(32u, (64u << 10) / kib), true);
  std::atomic<std::uint64_t> commands{0};
  const std::uint64_t begin = monotonic_ns(), end = begin + arguments.number("ms") * std::uint64_t{1'000'000};
  std::vector<std::thread> others;
  for (std::uint32_t i = 0; i < clients; ++i) {
    others.emplace_back([&, i] { commands += all[i]->run(end, ~std::uint64_t{0}, false); });
  }
  for (std::thread& other : others) other.join();
  const auto spent = static_cast<double>(monotonic_ns() - begin);
  if (const std::string wrong = session->violations(); !wrong.empty()) stop("the controller complains: " + wrong);
  return static_cast<double>(commands.load() * kib * 1024) / spent;
}

enum class Copy { kRead, kMapped, kStreaming };

[[gnu::target("avx512f")]] void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 256) {
    const __m512i a = _mm512_loadu_si512(from + i), b = _mm512_loadu_si512(from + i + 64),
                  c = _mm512_loadu_si512(from + i + 128), d = _mm512_loadu_si512(from + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 192), d);
  }
  _mm_sfence();
}

// As many threads, each with its own slots, without controller and rings.
double plain(const FilledStore& filled, Copy copy, std::uint32_t threads, std::uint32_t kib,
             const Arguments& arguments) {
  struct File {
    int fd = -1;
    std::byte* memory = nullptr;
    std::size_t bytes = 0;
  };
  struct Piece {
    const File* file;
    std::uint64_t offset;
  };
  std::map<std::string, File> files;
  std::vector<Piece> pieces;
  const std::uint32_t bytes = kib << 10;
  for (const Place& place : filled.places(bytes, kMapped)) {
    std::uint64_t offset = 0;
    File& file = files[filled.file_of(place.address, offset)];
    if (file.fd < 0) {
      file.fd = ::open(filled.file_of(place.address, offset).c_str(), O_RDONLY | O_CLOEXEC);
      struct stat status;
      if (file.fd < 0 || ::fstat(file.fd, &status) != 0) stop("cannot open a segment");
      file.bytes = static_cast<std::size_t>(status.st_size);
      if (copy != Copy::kRead) {
        void* const memory = ::mmap(nullptr, file.bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, file.fd, 0);
        if (memory == MAP_FAILED) stop("cannot map a segment");
        file.memory = static_cast<std::byte*>(memory);
      }
    }
    pieces.push_back({&file, offset});
  }
  const std::uint32_t depth = arguments.number("depth");
  AlignedBuffer memory(std::uint64_t{threads} * depth * bytes);
  std::atomic<std::uint64_t> commands{0};
  const std::uint64_t begin = monotonic_ns(), end = begin + arguments.number("ms") * std::uint64_t{1'000'000};
  std::vector<std::thread> workers;
  for (std::uint32_t t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      std::uint64_t done = 0;
      for (std::size_t next = t * 1009; monotonic_ns() < end; ++done, ++next) {
        const Piece& piece = pieces[next % pieces.size()];
        std::byte* const to = memory.data() + (std::uint64_t{t} * depth + done % depth) * bytes;
        if (copy == Copy::kRead) {
          if (::pread(piece.file->fd, to, bytes, static_cast<off_t>(piece.offset)) != static_cast<ssize_t>(bytes)) {
            stop("pread");
          }
        } else if (copy == Copy::kMapped) {
          std::memcpy(to, piece.file->memory + piece.offset, bytes);
        } else {
          stream(to, piece.file->memory + piece.offset, bytes);
        }
      }
      commands += done;
    });
  }
  for (std::thread& worker : workers) worker.join();
  const auto spent = static_cast<double>(monotonic_ns() - begin);
  for (const auto& [name, file] : files) {
    if (file.memory != nullptr) ::munmap(file.memory, file.bytes);
    ::close(file.fd);
  }
  return static_cast<double>(commands.load() * bytes) / spent;
}

int run(const Arguments& arguments) {
  if (arguments.text("folder").empty()) stop("folder: expected a folder for the store, e.g. folder=/dev/shm");
  const std::uint64_t begin = monotonic_ns();
  FilledStore filled(arguments.text("folder"), arguments.number("size_mib") * kMiB);
  std::fprintf(stderr, "filled in %.1f s\n", static_cast<double>(monotonic_ns() - begin) * 1e-9);
  for (const std::uint32_t threads : arguments.numbers("threads")) {
    if (threads < 1 || threads > 16) stop("threads: expected 1 to 16");
    for (const std::uint32_t kib : arguments.numbers("command_kib")) {
      if (kib < 4 || kib > 2048 || kObject % (kib << 10) != 0) stop("command_kib: expected powers of 2, 4 to 2048");
      double limit = 0;
      const auto copies = [&](const char* name, Copy copy) {
        const double rate = plain(filled, copy, threads, kib, arguments);
        row(name, threads, kib, rate, 0);
        limit = std::max(limit, rate);
      };
      if (arguments.number("limits") != 0) {
        copies("pread", Copy::kRead);
        copies("copy from a mapping", Copy::kMapped);
        if (__builtin_cpu_supports("avx512f") != 0) copies("streaming copy from a mapping", Copy::kStreaming);
      }
      row("session", threads, kib, through_session(filled, threads, kib, arguments), limit);
    }
  }
  return 0;
}

}  // namespace
}  // namespace tardis::gio

int main(int argc, char** argv) { return tardis::gio::run(tardis::gio::Arguments(argc, argv)); }
