// SPDX-License-Identifier: Apache-2.0
// GB/s of the block device on one file, to set beside fio:
//   tardis_block_bench FOLDER [engine=auto|io_uring|sync] [direct=auto|on|off] [op=read|write] [size_mib=1024]
//                      [request_kib=1024] [iovecs=1] [depth=128] [workers=0] [seconds=5] [order=sequential|random]
//                      [unaligned=0] [digest=0] [callers=1] [registered=0] [huge=0]
// Each run() carries 2 x depth requests (256 for depth 0, which lets the device find its depth). `registered=1` tells
// the device of the memory, `huge=1` asks for huge pages. `digest=1` computes XXH3-64 of every request in its
// completion, as the store does.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "block/block_device.h"

namespace tardis {
namespace {

using Arguments = std::map<std::string, std::string>;

[[noreturn]] void stop(const std::string& message) {
  std::fprintf(stderr, "tardis_block_bench: %s\n", message.c_str());
  std::exit(1);
}

std::uint64_t number(const Arguments& arguments, const char* name) {
  const std::string& text = arguments.at(name);
  char* end = nullptr;
  const auto value = std::strtoull(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0') stop(std::string(name) + ": expected a number, found '" + text + "'");
  return value;
}

template <class T>
T choice(const Arguments& arguments, const char* name, const std::map<std::string, T>& values) {
  const auto found = values.find(arguments.at(name));
  if (found == values.end()) stop(std::string(name) + ": '" + arguments.at(name) + "' is none of its values");
  return found->second;
}

double cpu_seconds() {
  rusage used;
  if (::getrusage(RUSAGE_SELF, &used) != 0) stop("getrusage failed");
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

struct Plan {
  IoRequest::Op op;
  FileId file;
  std::uint64_t file_requests, request_bytes, iovecs, batch, seconds, distance;
  bool random, digest, registered, huge;
};

// Runs batches until the time is over; returns bytes moved.
std::uint64_t work(BlockDevice& device, const Plan& plan, std::uint64_t seed) {
  auto memory = AlignedBuffer::allocate(plan.batch * plan.request_bytes + 4096);
  if (!memory) stop(memory.error().message);
  if (plan.huge && ::madvise(memory->data(), memory->size(), MADV_HUGEPAGE) != 0) stop("MADV_HUGEPAGE is refused");
  if (plan.registered) {
    const Status status = device.register_memory(memory->data(), memory->size());
    if (!status) stop(status.error().message);
  }
  std::mt19937_64 generator(seed);
  for (std::size_t i = 0; i + 8 <= memory->size(); i += 512)
    reinterpret_cast<std::uint64_t*>(memory->data())[i / 8] = generator();

  std::vector<iovec> pieces(plan.batch * plan.iovecs);
  const std::uint64_t piece_bytes = plan.request_bytes / plan.iovecs;
  for (std::size_t i = 0; i < pieces.size(); ++i)
    pieces[i] = {memory->data() + plan.distance + i * piece_bytes, piece_bytes};

  std::vector<IoRequest> requests(plan.batch);
  std::atomic<std::uint64_t> digest{0};
  std::uint64_t next = seed * plan.file_requests / 7;
  std::uint64_t moved = 0;
  const std::uint64_t end = monotonic_ns() + plan.seconds * 1'000'000'000;
  while (monotonic_ns() < end) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const std::uint64_t slot = (plan.random ? generator() : next++) % plan.file_requests;
      requests[i] = {plan.op, plan.file, slot * plan.request_bytes, {&pieces[i * plan.iovecs], plan.iovecs}, 0};
    }
    device.run(requests, [&](IoRequest& request) {
      if (!plan.digest) return;
      Xxh3Stream stream;
      for (const iovec& piece : request.memory) stream.update(piece.iov_base, piece.iov_len);
      digest.fetch_xor(stream.digest(), std::memory_order_relaxed);
    });
    for (const IoRequest& request : requests) {
      if (request.error != 0) stop(std::string("a request failed: ") + std::strerror(request.error));
    }
    moved += plan.batch * plan.request_bytes;
  }
  if (plan.registered) device.unregister_memory(memory->data());
  return moved;
}

int run(int argc, char** argv) {
  Arguments arguments{{"engine", "auto"},      {"direct", "auto"},      {"op", "read"},     {"size_mib", "1024"},
                      {"request_kib", "1024"}, {"iovecs", "1"},         {"depth", "128"},   {"workers", "0"},
                      {"seconds", "5"},        {"order", "sequential"}, {"unaligned", "0"}, {"digest", "0"},
                      {"callers", "1"},        {"registered", "0"},     {"huge", "0"}};
  if (argc < 2) stop("expected a folder");
  for (int i = 2; i < argc; ++i) {
    const std::string text = argv[i];
    const auto equals = text.find('=');
    if (equals == std::string::npos || !arguments.contains(text.substr(0, equals)))
      stop("unknown argument '" + text + "'");
    arguments[text.substr(0, equals)] = text.substr(equals + 1);
  }

  BlockDeviceOptions options;
  using Engine = BlockDeviceOptions::Engine;
  using Direct = BlockDeviceOptions::Direct;
  options.engine = choice<Engine>(arguments, "engine",
                                  {{"auto", Engine::kAuto}, {"io_uring", Engine::kIoUring}, {"sync", Engine::kSync}});
  options.direct =
      choice<Direct>(arguments, "direct", {{"auto", Direct::kAuto}, {"on", Direct::kOn}, {"off", Direct::kOff}});
  options.queue_depth = static_cast<std::uint32_t>(number(arguments, "depth"));
  options.workers = static_cast<std::uint32_t>(number(arguments, "workers"));
  auto device = open_block_device(argv[1], options, -1);
  if (!device) stop(device.error().message);

  Plan plan{};
  plan.op = choice<IoRequest::Op>(arguments, "op", {{"read", IoRequest::Op::kRead}, {"write", IoRequest::Op::kWrite}});
  plan.request_bytes = number(arguments, "request_kib") << 10;
  plan.file_requests = (number(arguments, "size_mib") << 20) / plan.request_bytes;
  plan.iovecs = number(arguments, "iovecs");
  plan.batch = options.queue_depth > 0 ? 2 * options.queue_depth : 256;
  plan.seconds = number(arguments, "seconds");
  plan.distance = number(arguments, "unaligned") != 0 ? 1 : 0;
  plan.digest = number(arguments, "digest") != 0;
  plan.registered = number(arguments, "registered") != 0;
  plan.huge = number(arguments, "huge") != 0;
  plan.random = choice<bool>(arguments, "order", {{"sequential", false}, {"random", true}});
  if (plan.file_requests == 0 || plan.iovecs == 0 || plan.request_bytes % plan.iovecs != 0) {
    stop("size_mib, request_kib and iovecs do not fit each other");
  }

  const std::string path = std::string(argv[1]) + "/tardis-block-bench.data";
  const auto file = (*device)->open_file(path, true, true);
  if (!file) stop(file.error().message);
  plan.file = *file;
  const auto bytes = (*device)->file_bytes(plan.file);
  if (!bytes) stop(bytes.error().message);
  if (*bytes < plan.file_requests * plan.request_bytes) {
    // Really written, once: reads of a reserved but unwritten extent never reach the disk.
    const Status reserved = (*device)->preallocate(plan.file, plan.file_requests * plan.request_bytes);
    if (!reserved) stop(reserved.error().message);
    auto block = AlignedBuffer::allocate(plan.request_bytes);
    if (!block) stop(block.error().message);
    std::mt19937_64 generator(1);
    for (std::uint64_t i = 0; i < plan.file_requests; ++i) {
      for (std::size_t word = 0; word < block->size() / 8; ++word)
        reinterpret_cast<std::uint64_t*>(block->data())[word] = generator();
      const iovec piece{block->data(), block->size()};
      IoRequest request{IoRequest::Op::kWrite, plan.file, i * plan.request_bytes, {&piece, 1}, 0};
      (*device)->run({&request, 1}, nullptr);
      if (request.error != 0) stop(std::string("writing the file: ") + std::strerror(request.error));
    }
    const Status flushed = (*device)->flush(plan.file);
    if (!flushed) stop(flushed.error().message);
  }

  const std::uint64_t callers = std::max<std::uint64_t>(1, number(arguments, "callers"));
  std::atomic<std::uint64_t> moved{0};
  std::vector<std::thread> threads;
  const double cpu_before = cpu_seconds();
  const std::uint64_t start = monotonic_ns();
  for (std::uint64_t i = 0; i < callers; ++i)
    threads.emplace_back([&, i] { moved.fetch_add(work(**device, plan, i)); });
  for (auto& thread : threads) thread.join();
  const double seconds = static_cast<double>(monotonic_ns() - start) * 1e-9;
  const auto counters = (*device)->counters();
  std::printf(
      "%.3f GB/s, %.3f CPU s/GB  %s %s, %llu KiB requests, %llu iovecs, depth %u, %llu callers, digest %d, bounced "
      "%llu, peak in "
      "flight %llu, registered requests %llu, depth found %llu; %s\n",
      static_cast<double>(moved.load()) / seconds * 1e-9,
      (cpu_seconds() - cpu_before) * 1e9 / static_cast<double>(moved.load()), arguments["order"].c_str(),
      arguments["op"].c_str(), static_cast<unsigned long long>(plan.request_bytes >> 10),
      static_cast<unsigned long long>(plan.iovecs), options.queue_depth, static_cast<unsigned long long>(callers),
      plan.digest ? 1 : 0, static_cast<unsigned long long>(counters.bounced_requests),
      static_cast<unsigned long long>(counters.peak_in_flight),
      static_cast<unsigned long long>(counters.registered_requests),
      static_cast<unsigned long long>(plan.op == IoRequest::Op::kRead ? counters.read_depth : counters.write_depth),
      (*device)->report().reason.c_str());
  return 0;
}

}  // namespace
}  // namespace tardis

int main(int argc, char** argv) { return tardis::run(argc, argv); }
