// SPDX-License-Identifier: Apache-2.0
// The start-up self-test: which engine and which alignments a folder really allows.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/unique_fd.h"
#include "block/block_device.h"
#include "block/filesystem.h"
#include "block/numa.h"
#include "block/sync_device.h"
#include "block/uring_probe.h"

namespace tardis {
namespace {

using Engine = BlockDeviceOptions::Engine;
using Direct = BlockDeviceOptions::Direct;

constexpr std::uint32_t kMaxQueueDepth = 4096;
constexpr std::uint32_t kMaxWorkers = 256;
constexpr std::uint32_t kMaxBounceBuffers = 65536;
constexpr std::uint32_t kMinBounceBytes = 4096;
constexpr std::uint32_t kMaxBounceBytes = 1u << 30;
constexpr std::size_t kProbeBytes = 64 << 10;
// Requests of 1 MiB: fewer than this leave a fast drive waiting, and none has gained from more.
constexpr QueueTuner::Limits kUringDepth{32, 64, 256};

Status check_range(const char* setting, std::uint32_t value, std::uint32_t least, std::uint32_t most) {
  if (value >= least && value <= most) return {};
  return Error{Code::kInvalidArgument, std::string(setting) + ": expected " + std::to_string(least) + " to " +
                                           std::to_string(most) + ", found " + std::to_string(value)};
}

Status check_options(const BlockDeviceOptions& options) {
  for (const auto& status : {check_range("queue_depth", options.queue_depth, 0, kMaxQueueDepth),
                             check_range("io_workers", options.workers, 0, kMaxWorkers),
                             check_range("bounce_buffers", options.bounce_buffers, 1, kMaxBounceBuffers),
                             check_range("bounce_bytes", options.bounce_bytes, kMinBounceBytes, kMaxBounceBytes)}) {
    if (!status) return status;
  }
  return {};
}

// The file of the self-test; its name is gone as soon as both descriptors are open.
struct ProbeFile {
  UniqueFd buffered;
  UniqueFd direct;       // empty: see direct_error
  int direct_error = 0;  // errno of the open with O_DIRECT, or of switching it on
};

Result<ProbeFile> create_probe_file(const std::string& folder) {
  std::string path = folder + "/.tardis-self-test-XXXXXX";
  ProbeFile file;
  file.buffered.reset(::mkostemp(path.data(), O_CLOEXEC));
  if (!file.buffered) {
    const int error = errno;
    return errno_error(error, "data folder " + folder + ": expected to be able to create a file there");
  }
  file.direct.reset(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT));
  if (!file.direct) file.direct_error = errno;
  if (::unlink(path.c_str()) != 0) return errno_error(errno, "unlink " + path);
  return file;
}

// Whether blocks can be reserved here at all (some file systems cannot); see FileDevice::preallocate.
bool can_reserve(int fd) { return ::fallocate(fd, 0, 0, kProbeBytes) == 0 || errno != EOPNOTSUPP; }

enum class Trial { kWorks, kRefused, kDiskFull };

// Writes and reads one unit of `alignment.offset` bytes, at that offset, with memory that is aligned no better than
// asked.
Trial try_alignment(int fd, DirectAlignment alignment, int* error) {
  const std::size_t unit = alignment.offset;
  auto memory = AlignedBuffer::allocate(4 * unit + 2 * std::size_t{alignment.memory} + 8192, 4096);
  if (!memory) {
    *error = ENOMEM;
    return Trial::kRefused;
  }
  std::byte* const out = memory->data() + alignment.memory;
  std::byte* const in = out + (unit + alignment.memory - 1) / alignment.memory * alignment.memory;
  for (std::size_t i = 0; i < unit; ++i) out[i] = static_cast<std::byte>(i * 131 + unit);
  const auto at = static_cast<off_t>(unit);
  const auto expect = static_cast<ssize_t>(unit);
  const ssize_t written = ::pwrite(fd, out, unit, at);
  if (written != expect) {
    *error = written < 0 ? errno : EIO;
    return *error == ENOSPC || *error == EDQUOT ? Trial::kDiskFull : Trial::kRefused;
  }
  const ssize_t read = ::pread(fd, in, unit, at);
  if (read != expect || std::memcmp(in, out, unit) != 0) {
    *error = read < 0 ? errno : EIO;
    return Trial::kRefused;
  }
  return Trial::kWorks;
}

struct DirectFinding {
  std::optional<DirectAlignment> alignment;  // empty: no direct I/O
  std::string text;                          // how it is known, or why not
};

DirectFinding find_direct(const ProbeFile& file, const FilesystemFacts& facts) {
  if (facts.in_memory) return {std::nullopt, facts.name + " keeps files in memory and has no direct I/O"};
  if (!file.direct) {
    return {std::nullopt,
            errno_error(file.direct_error, "opening a file with O_DIRECT").message + " (" + facts.name + ")"};
  }
  std::vector<DirectAlignment> candidates;
  const auto said = direct_alignment(file.direct.get());
  if (said && said->offset == 0) return {std::nullopt, facts.name + " says that it has no direct I/O (STATX_DIOALIGN)"};
  if (said && std::has_single_bit(said->offset) && std::has_single_bit(said->memory)) candidates.push_back(*said);
  candidates.push_back({512, 512});
  candidates.push_back({4096, 4096});

  int error = 0;
  for (const DirectAlignment& candidate : candidates) {
    const bool from_statx = said && &candidate == &candidates.front();
    switch (try_alignment(file.direct.get(), candidate, &error)) {
      case Trial::kWorks:
        return {candidate,
                from_statx ? "from statx, checked with a write and a read" : "found with a write and a read"};
      case Trial::kDiskFull:
        // Reading must go on from a full disk. The larger alignment serves every disk.
        if (from_statx) return {candidate, "from statx; the disk is full, so not checked with a write"};
        return {DirectAlignment{4096, 4096}, "assumed: the disk is full, so not checked with a write"};
      case Trial::kRefused:
        break;
    }
  }
  return {std::nullopt, errno_error(error, "a write and a read with O_DIRECT").message + " (" + facts.name + ")"};
}

struct Choice {
  PathReport report;
  IoGeometry geometry;
};

QueueTuner::Limits uring_depth(const BlockDeviceOptions& options) {
  if (options.queue_depth == 0) return kUringDepth;
  return {options.queue_depth, options.queue_depth, options.queue_depth};
}

// A request of the sync engine takes a thread, and the thread that asks is one of them.
QueueTuner::Limits sync_depth(const BlockDeviceOptions& options, unsigned threads) {
  const unsigned all = options.queue_depth == 0 ? threads + 1 : std::min(options.queue_depth, threads + 1);
  const bool adaptive = options.queue_depth == 0 && options.workers == 0;
  return {adaptive ? std::min(2u, all) : all, all, all};
}

Result<Choice> choose(const std::string& folder, const BlockDeviceOptions& options, int keep_open_fd) {
  const auto facts = filesystem_facts(folder);
  if (!facts) return facts.error();
  auto file = create_probe_file(folder);
  if (!file) return file.error();

  Choice choice;
  PathReport& report = choice.report;
  IoGeometry& geometry = choice.geometry;
  report.filesystem = facts->name;
  report.in_memory = facts->in_memory;

  std::string direct_text = "direct_io is off";
  if (options.direct != Direct::kOff) {
    const DirectFinding finding = find_direct(*file, *facts);
    direct_text = finding.text;
    if (finding.alignment) {
      geometry = {true, finding.alignment->offset, finding.alignment->memory};
    } else if (options.direct == Direct::kOn) {
      return Error{Code::kInvalidArgument, "direct_io is on, but " + folder + " cannot serve it: " + finding.text +
                                               ". Set direct_io to auto or off, or use another folder"};
    }
  }
  report.direct = geometry.direct;
  report.offset_align = geometry.offset_align;
  report.memory_align = geometry.memory_align;
  report.logical_block = facts->logical_block_known ? facts->logical_block
                         : geometry.direct          ? geometry.offset_align
                                                    : facts->logical_block;

  // The engine is tried on the kind of file it would work on, unless a full disk left that file empty.
  std::optional<std::string> obstacle;
  if (options.engine != Engine::kSync) {
    const std::size_t alignment = std::max<std::size_t>(geometry.memory_align, 4096);
    auto memory = AlignedBuffer::allocate(std::max<std::size_t>(geometry.offset_align, 4096), alignment);
    if (!memory) return memory.error();
    const int fd = geometry.direct ? file->direct.get() : file->buffered.get();
    const unsigned unit = geometry.direct ? geometry.offset_align : 4096;
    struct stat status;
    if (!geometry.direct && ::pwrite(fd, memory->data(), unit, 0) < 0 && errno != ENOSPC && errno != EDQUOT) {
      return errno_error(errno, "data folder " + folder + ": writing the self-test file");
    }
    if (::fstat(fd, &status) != 0) return errno_error(errno, "fstat of the self-test file");
    const bool readable = status.st_size >= static_cast<off_t>(unit);
    obstacle = why_no_io_uring(uring_depth(options).most, keep_open_fd, readable ? fd : -1, memory->data(), unit);
    if (obstacle && options.engine == Engine::kIoUring) {
      return Error{Code::kInvalidArgument, "engine is io_uring, but this machine cannot serve it: " + *obstacle +
                                               ". Set engine to auto or sync"};
    }
  }

  const std::string access =
      geometry.direct ? "direct I/O, offsets and lengths of " + std::to_string(geometry.offset_align) + ", memory of " +
                            std::to_string(geometry.memory_align) + " bytes (" + direct_text + ")"
                      : "buffered I/O (" + direct_text + ")";
  if (options.engine == Engine::kSync) {
    report.engine = "sync";
    report.reason = "engine is sync; " + access;
  } else if (obstacle) {
    report.engine = "sync";
    report.reason = *obstacle + "; using the sync engine; " + access;
  } else if (!geometry.direct && options.engine == Engine::kAuto) {
    // A buffered read that hits the page cache is copied inside io_uring_enter(), by the one thread that submits.
    report.engine = "sync";
    report.reason = access + "; the sync engine copies with all workers";
  } else {
    report.engine = "io_uring";
    report.reason = "io_uring; " + access;
  }
  if (!can_reserve(file->buffered.get())) {
    report.reason += "; " + facts->name + " cannot reserve blocks (fallocate), so a full disk shows only when writing";
  }
  return choice;
}

// One device serves all folders, so it keeps to what each of them asks.
Status also_serve(Choice& choice, const std::string& first, const BlockDeviceOptions& options) {
  PathReport& report = choice.report;
  for (const std::string& folder : options.more_folders) {
    auto other = choose(folder, options, -1);
    if (!other) return other.error();
    if (other->report.direct != report.direct) {
      const bool direct = report.direct;
      return Error{Code::kInvalidArgument, "path: " + (direct ? first : folder) + " has direct I/O, " +
                                               (direct ? folder : first) + " has not (" +
                                               (direct ? *other : choice).report.reason +
                                               "); leave one of them out, or set direct_io to off"};
    }
    choice.geometry.offset_align = std::max(choice.geometry.offset_align, other->geometry.offset_align);
    choice.geometry.memory_align = std::max(choice.geometry.memory_align, other->geometry.memory_align);
    report.logical_block = std::max(report.logical_block, other->report.logical_block);
    report.in_memory &= other->report.in_memory;
    report.reason += "; " + folder + " (" + other->report.filesystem + "): " + other->report.reason;
  }
  report.offset_align = choice.geometry.offset_align;
  report.memory_align = choice.geometry.memory_align;
  return {};
}

#if !TARDIS_HAS_IO_URING
constexpr const char* kBuiltWithout = "built without io_uring";
#endif

}  // namespace

#if !TARDIS_HAS_IO_URING
std::optional<std::string> why_no_io_uring(unsigned, int, int, void*, unsigned) { return kBuiltWithout; }
#endif

Result<std::unique_ptr<BlockDevice>> open_block_device(const std::string& folder, const BlockDeviceOptions& options,
                                                       int keep_open_fd) {
  if (const Status status = check_options(options); !status) return status.error();
  auto choice = choose(folder, options, keep_open_fd);
  if (!choice) return choice.error();
  if (Status status = also_serve(*choice, folder, options); !status) return status.error();

  std::size_t threads = options.workers;
  // With the sync engine a thread is a place in the drive's queue, so few CPUs still get several.
  if (threads == 0) threads = std::clamp<std::size_t>(2 * std::size_t{std::thread::hardware_concurrency()}, 8, 16);
  struct stat status;
  std::optional<NumaPlace> place;
  // Drives of several folders may hang on several nodes.
  if (options.more_folders.empty() && ::stat(folder.c_str(), &status) == 0) place = numa_place(status.st_dev);
  if (place) choice->report.reason += "; workers run on NUMA node " + std::to_string(place->node) + ", the drive's";
  auto workers = WorkerPool::create(threads, place ? &place->cpus : nullptr);
  if (!workers) return workers.error();
  DeviceSetup setup;
  setup.options = options;
  setup.geometry = choice->geometry;
  setup.report = std::move(choice->report);
  setup.keep_open_fd = keep_open_fd;
#if TARDIS_HAS_IO_URING
  if (setup.report.engine == "io_uring") {
    setup.depth = uring_depth(options);
    return make_uring_device(std::move(setup), std::move(*workers));
  }
#endif
  setup.depth = sync_depth(options, static_cast<unsigned>(threads));
  return std::unique_ptr<BlockDevice>(std::make_unique<SyncDevice>(std::move(setup), std::move(*workers)));
}

Result<PathReport> probe_path(const std::string& folder, const BlockDeviceOptions& options, bool read_only) {
  if (const Status status = check_options(options); !status) return status.error();
  if (!read_only) {
    auto choice = choose(folder, options, -1);
    if (!choice) return choice.error();
    return std::move(choice->report);
  }
  const auto facts = filesystem_facts(folder);
  if (!facts) return facts.error();
  PathReport report;
  report.filesystem = facts->name;
  report.in_memory = facts->in_memory;
  report.logical_block = facts->logical_block;
  const auto obstacle = why_no_io_uring(uring_depth(options).most, -1, -1, nullptr, 0);
  report.engine = obstacle || options.engine == Engine::kSync || facts->in_memory ? "sync" : "io_uring";
  report.reason = (obstacle ? *obstacle : std::string("io_uring can be set up")) +
                  (facts->in_memory ? "; " + facts->name + " keeps files in memory: buffered I/O with the sync engine"
                                    : "; read-only self-test: direct I/O was not tried");
  return report;
}

}  // namespace tardis
