// SPDX-License-Identifier: Apache-2.0
// Queue pairs for a GPU without a drive: a software controller over memory, a file or an open store, its driver, and a
// grant, all in one piece of memory that the caller has pinned. For host code that knows of none of these (C++17).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "gio/granted_queue.h"
#include "nvme/soft/faults.h"
#include "tardis/copy_engine.h"

namespace tardis {
class Store;
}

namespace tardis::gio {

struct SessionOptions {
  std::uint64_t bytes = 64 << 20;  // of the namespace
  std::string file;                // where it is kept, made if there is none; empty: memory, zeroed
  Store* store = nullptr;          // instead of bytes and file: its data files, to be read; outlives the session
  std::uint32_t block_shift = 12;  // 9 or 12
  std::uint32_t controller_threads = 1;
  std::vector<int> cpus;                                                          // of those threads; empty: anywhere
  std::uint8_t mdts = 9;                                                          // of a command: 4 KiB << mdts
  bool sgl = true, aborts = true;                                                 // what the controller can
  std::uint32_t queues = 1, entries = 256, commands = 0, slot_bytes = 128 << 10;  // as GrantOptions
};

// Not thread-safe, but for what its queue pairs do.
class Session {
 public:
  static constexpr std::uint32_t kUnexpectedMs = 20;
  static std::size_t memory_bytes(const SessionOptions& options);
  // `memory`: memory_bytes(), page-aligned and zeroed, where the GPU reaches it, in place as long as the session. The
  // controller's threads look for doorbells without a pause all the while, unless rest() says otherwise.
  static Result<std::unique_ptr<Session>> open(const SessionOptions& options, void* memory);
  virtual ~Session() = default;

  // As Grant: without state and uses; tables of data pointers in host memory.
  virtual const std::vector<GrantedQueue>& queues() const = 0;
  virtual std::vector<std::uint64_t> prp_table() const = 0;
  virtual std::vector<nvme::SglDescriptor> sgl_table() const = 0;
  // Of the host's own queue pair. Whole blocks.
  virtual Status read(std::uint64_t offset, void* memory, std::size_t bytes) = 0;
  virtual Status write(std::uint64_t offset, void* memory, std::size_t bytes) = 0;
  virtual Status flush() = 0;

  // Direct landing (session_direct.h). `lists`: direct_list_bytes() of memory as open()'s. From then on regions of the
  // engine's memory can be registered; a queue whose `direct` is set from direct() lands there and nowhere else.
  virtual std::size_t direct_list_bytes() const = 0;
  virtual Status use_direct(const tardis_copy_engine& engine, void* lists) = 0;  // which stays as long as the session
  virtual Status add_region(void* base, std::size_t bytes) = 0;                  // as Grant::add_region()
  virtual Status remove_region(void* base) = 0;
  virtual const std::vector<DirectRegion>& regions() const = 0;
  virtual DirectLanding direct(std::size_t queue) const = 0;

  // The controller's threads sleep for up to `sleep_us` between looks once they have found nothing for `spin_us`. 0 of
  // sleep: never.
  virtual void rest(std::uint32_t spin_us, std::uint32_t sleep_us) = 0;
  // Whether anybody may put commands into the queues, as at first. If not, those threads sleep; a command from a client
  // that cannot wake them up waits for kUnexpectedMs at most.
  virtual void expect(bool commands) = 0;

  virtual bool alive() = 0;    // as Grant::alive()
  virtual Status renew() = 0;  // as Grant::renew()
  // As after the controller was removed and put back: everything is made anew, but the bytes of the namespace.
  virtual Status reopen() = 0;
  virtual std::string report() const = 0;

  // For tests and benchmarks.
  virtual std::byte* media() = 0;  // the bytes of the namespace; null: they are in a file
  virtual nvme::FaultPlan& faults() = 0;
  virtual std::uint64_t commands() const = 0;  // that the controller fetched, and completions that it posted
  virtual std::uint64_t completions() const = 0;
  virtual std::string violations() = 0;  // what it has to complain of, since last asked
};

}  // namespace tardis::gio
