// SPDX-License-Identifier: Apache-2.0
// One NVMe namespace as bytes: what a raw-namespace store needs to know of drives.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "base/status.h"

namespace tardis::nvme {

struct NamespaceRequest {
  enum class Op : std::uint8_t { kRead, kWrite };
  Op op = Op::kRead;
  std::uint64_t offset = 0;       // bytes; a multiple of block_bytes(), as the length is
  std::span<const iovec> memory;  // any alignment and any count; owned by the caller until run() returns
  int error = 0;                  // out: 0, or a positive errno
};

// Thread-safe.
class RawNamespace {
 public:
  virtual ~RawNamespace() = default;

  virtual std::string name() const = 0;  // in messages
  virtual std::uint64_t bytes() const = 0;
  virtual std::uint32_t block_bytes() const = 0;  // 512 or 4096
  // Written whole or not at all, across a power failure too: at least one block.
  virtual std::uint32_t atomic_bytes() const = 0;

  // As BlockDevice::run(): returns when every request has finished and every completion has returned. A request that
  // timed out has its error only once no controller can touch its memory any more.
  using Completion = std::function<void(NamespaceRequest& request)>;
  virtual void run(std::span<NamespaceRequest> requests, const Completion& on_complete) = 0;
  // What was written before is durable when it returns.
  virtual Status flush() = 0;

  // As BlockDevice::register_memory(), a hint; but an error says that it was not registered. Code::kInvalidArgument:
  // and that it should not have been asked for.
  virtual Status register_memory(void* base, std::size_t bytes) = 0;
  virtual void unregister_memory(void* base) = 0;

  // One volume at a time: false if there is one.
  bool claim() { return !claimed_.exchange(true); }
  void release() { claimed_.store(false); }

 private:
  std::atomic<bool> claimed_{false};
};

}  // namespace tardis::nvme
