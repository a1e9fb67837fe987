// SPDX-License-Identifier: Apache-2.0
// A set of files read and written in batches. Implementations: io_uring, and a pool of preadv/pwritev workers.
#pragma once

#include <sys/uio.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "block/flush_turns.h"

namespace tardis {

using FileId = std::uint32_t;

// What is asked of a drive, where success and failure are counted apart.
enum class IoUse : std::uint8_t { kRead, kWrite, kFlush };
inline constexpr std::size_t kIoUses = 3;

struct IoRequest {
  enum class Op : std::uint8_t { kRead, kWrite };
  Op op = Op::kRead;
  FileId file = 0;
  std::uint64_t offset = 0;       // a multiple of Geometry::offset_align when direct
  std::span<const iovec> memory;  // any alignment and any count; owned by the caller until run() returns
  int error = 0;                  // out: 0, or a positive errno (ENODATA: the file ends inside the range)
};

// Whether a read failed since the bytes are lost: the medium has them no more, or the file ends before them. Other
// errors (time-outs, a drive that is gone, memory, signals) say nothing about the bytes.
constexpr bool bytes_are_lost(int os_error) { return os_error == EIO || os_error == ENODATA; }

// What the operating system asks of direct I/O on this path.
struct IoGeometry {
  bool direct = false;             // O_DIRECT in use
  std::uint32_t offset_align = 1;  // file offset and length of a request
  std::uint32_t memory_align = 1;  // address of each iovec; lengths follow offset_align
};

struct BlockDeviceOptions {
  enum class Engine : std::uint8_t { kAuto, kIoUring, kSync };
  enum class Direct : std::uint8_t { kAuto, kOn, kOff };
  Engine engine = Engine::kAuto;
  Direct direct = Direct::kAuto;
  std::uint32_t queue_depth =
      0;                      // requests in flight for one run(); 0: what the device gains from, found while it works
  std::uint32_t workers = 0;  // threads of the pool that does sync I/O and runs completions; 0: twice the CPUs, 8 to
                              // 16, of which sync I/O uses as many as gain anything
  std::uint32_t bounce_buffers = 32;  // bound of the aligned bounce pool
  std::uint32_t bounce_bytes = 1u << 20;
  std::vector<std::string> more_folders;  // files there are used too: what they ask of direct I/O counts
};

// What the start-up self-test found and chose. `reason` is one readable line.
struct PathReport {
  std::string engine;  // "io_uring" | "sync"
  bool direct = false;
  std::uint32_t offset_align = 1;
  std::uint32_t memory_align = 1;
  std::uint32_t logical_block = 512;  // of the device below, 4096 if unknown
  std::string filesystem;             // "ext4", "tmpfs", ... from statfs magic, or the hex magic
  bool in_memory = false;             // tmpfs, in all folders: a file's bytes are in memory alone
  std::string reason;
};

struct BlockDeviceCounters {
  std::uint64_t reads = 0, writes = 0, read_bytes = 0, written_bytes = 0, bounced_requests = 0, bounced_bytes = 0,
                errors = 0;
  std::uint64_t peak_in_flight = 0;
  // Reads before writes. A read batch is a run() with a read in it; it is delayed by a flush that runs at the same
  // time.
  std::uint64_t read_batches = 0;
  std::uint64_t read_batches_delayed = 0;        // by a flush
  std::uint64_t read_batches_delayed_again = 0;  // by a second one: never, in this process
  std::uint64_t max_flushes_per_read_batch = 0;
  std::uint64_t writes_yielded = 0;     // write batches that held back for a read batch
  std::uint64_t flushes_postponed = 0;  // that waited for a read batch, or for another flush
  // Of the memory given to register_memory(): what the kernel took, what it did not, and how often it was used.
  std::uint64_t registered_bytes = 0, not_registered_bytes = 0, registered_requests = 0;
  // What queue_depth and workers stand at, after what was learnt.
  std::uint64_t read_depth = 0, write_depth = 0;
};

// Thread-safe: run() may be called from several threads at once, each gets its own queue.
class BlockDevice {
 public:
  virtual ~BlockDevice() = default;

  // Opens (creating when asked) a regular file and keeps it open under an id. O_CLOEXEC always.
  virtual Result<FileId> open_file(const std::string& path, bool create, bool writable) = 0;
  virtual void close_file(FileId file) = 0;
  // Reserves blocks for [0, bytes); those that are new read as zeros. ENOSPC -> Code::kNoSpace.
  virtual Status preallocate(FileId file, std::uint64_t bytes) = 0;
  virtual Result<std::uint64_t> file_bytes(FileId file) = 0;

  // Called once per finished request (error already set), from any thread, several at once, while its bytes are still
  // warm in the cache of the core that calls it. Must not block or call run().
  using Completion = std::function<void(IoRequest& request)>;

  // Executes all requests, at most queue_depth in flight, and returns when every one has finished and every completion
  // has returned. Never throws; failures are per request.
  virtual void run(std::span<IoRequest> requests, const Completion& on_complete) = 0;

  // fdatasync. A failure is final for the data written before it (the caller must not retry it). Starts only while no
  // other flush of this device runs and no read batch runs that another flush has delayed already; so it waits for the
  // read batches of one moment at most.
  virtual Status flush(FileId file) = 0;
  // The same of several files, with one result for each; to reads it is one flush.
  virtual std::vector<Status> flush_files(std::span<const FileId> files) {
    std::vector<Status> results;
    for (const FileId file : files) results.push_back(flush(file));
    return results;
  }

  // Other processes use the same drives. Before anything is read or flushed.
  virtual void share_turns(std::unique_ptr<FlushTurns> /*turns*/) {}

  // Whether reads are no more than copies, by whoever asks, since all files are in memory: then read_at_once() reads
  // one range by the calling thread alone. It takes no place in a queue and waits for no other request. 0, or a
  // positive errno, as IoRequest::error.
  virtual bool reads_at_once() const { return false; }
  virtual int read_at_once(FileId /*file*/, std::uint64_t /*offset*/, std::span<const iovec> /*memory*/) {
    return EOPNOTSUPP;
  }

  // Tells the device of memory that many requests will use, such as a host page pool, so that the kernel need not look
  // it up for each. Only a hint: what cannot be registered (no such engine, too little locked memory) works as before,
  // and counters().not_registered_bytes says so. Fails if the range overlaps one that is registered. No request may use
  // the memory from unregister_memory() until it returns; it must be called before the memory is freed.
  virtual Status register_memory(void* /*base*/, std::size_t /*bytes*/) { return {}; }
  virtual void unregister_memory(void* /*base*/) {}

  virtual IoGeometry geometry() const = 0;
  // Requests that lie side by side in a file are best joined to one of up to this many bytes; 0: better not.
  virtual std::uint64_t join_bytes() const { return 0; }
  virtual const PathReport& report() const = 0;
  virtual BlockDeviceCounters counters() const = 0;

  // As preallocate(), of a new file of which only [0, zeros) is read before it is written: that reads as zeros, after a
  // crash too.
  virtual Status reserve(FileId file, std::uint64_t bytes, std::uint64_t /*zeros*/) { return preallocate(file, bytes); }
  // Room for the bytes of files, where they do not lie in the file system that has their names.
  struct Room {
    std::uint64_t free = 0, total = 0;
  };
  virtual std::optional<Room> room() const { return std::nullopt; }
};

// Runs the self-test in `folder` (creates and removes one small temporary file there) and builds the device it chose.
// An explicit engine or direct setting that the path cannot serve is an error naming the setting, never a fallback.
// `keep_open_fd` (or -1): a descriptor whose file description must outlive in-flight I/O of this process (the store's
// lock); the io_uring engine registers it with every ring.
Result<std::unique_ptr<BlockDevice>> open_block_device(const std::string& folder, const BlockDeviceOptions& options,
                                                       int keep_open_fd);

// Who makes the device of a store: open_block_device(), or what puts another one below it.
using DeviceFactory = std::function<Result<std::unique_ptr<BlockDevice>>(
    const std::string& folder, const BlockDeviceOptions& options, int keep_open_fd)>;

// The self-test alone, for `tardis doctor`. `read_only`: do not create a file; report only what can be known without
// one.
Result<PathReport> probe_path(const std::string& folder, const BlockDeviceOptions& options, bool read_only);

}  // namespace tardis
