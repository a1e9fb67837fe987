// SPDX-License-Identifier: Apache-2.0
// One io_uring with its registered files, and the bounded pool of them.
#pragma once

#include <liburing.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "block/file_table.h"
#include "block/uring_buffers.h"

namespace tardis {

// Used by one thread at a time.
class UringRing {
  struct Passkey {
    explicit Passkey() = default;
  };

 public:
  explicit UringRing(Passkey) {}
  struct Failure {
    int error = 0;          // errno
    std::string operation;  // what failed
  };

  // `keep_open_fd` (or -1) is registered first: the ring, and with it the description behind that descriptor, lives
  // until the kernel has finished the ring's last I/O, even if the process was killed.
  static std::unique_ptr<UringRing> create(unsigned entries, int keep_open_fd, Failure* failure);
  ~UringRing();
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;

  io_uring* raw() { return &ring_; }

  // Points `sqe`, already prepared, at the file: through its registered slot where it has or gets one.
  void set_file(io_uring_sqe* sqe, FileId id, const std::shared_ptr<OpenFile>& file);
  // Lets go of files that were closed: a registered file would keep its blocks on disk after unlink.
  void drop_closed_files();

  // A ring whose system call failed in an unknown way is not used again.
  bool broken = false;

  // Kept by UringBuffers::attach().
  std::shared_ptr<const UringBufferTable> buffers;
  std::uint64_t buffers_version = 0;
  bool holds_own_buffers = false;

 private:
  io_uring ring_{};
  bool initialised_ = false;
  bool files_registered_ = false;
  std::vector<std::shared_ptr<OpenFile>> slots_;  // slots_[id]: the file in registered slot id + 1
};

class UringPool {
 public:
  UringPool(std::size_t max_rings, unsigned entries, int keep_open_fd, UringBuffers& buffers)
      : max_rings_(max_rings), entries_(entries), keep_open_fd_(keep_open_fd), buffers_(buffers) {}

  // Waits while all rings are in use. Null only if there is no ring and none can be made (*failure says why). The ring
  // has the registered memory of now.
  std::unique_ptr<UringRing> acquire(UringRing::Failure* failure);
  void release(std::unique_ptr<UringRing> ring);
  // After a file was closed.
  void drop_closed_files();
  // After memory was registered or unregistered.
  void attach_buffers();

 private:
  std::unique_ptr<UringRing> take(UringRing::Failure* failure);

  const std::size_t max_rings_;
  const unsigned entries_;
  const int keep_open_fd_;
  UringBuffers& buffers_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::size_t rings_ = 0;  // in use and idle
  std::vector<std::unique_ptr<UringRing>> idle_;
};

}  // namespace tardis
