// SPDX-License-Identifier: Apache-2.0
#include "block/uring_probe.h"

#include <cerrno>
#include <fstream>

#include "block/uring_device.h"

namespace tardis {
namespace {

std::string explain(const UringRing::Failure& failure) {
  std::string text = errno_error(failure.error, failure.operation).message;
  if (failure.error == EPERM || failure.error == EACCES) {
    int disabled = 0;
    std::ifstream("/proc/sys/kernel/io_uring_disabled") >> disabled;
    text += disabled != 0 ? " (kernel.io_uring_disabled is " + std::to_string(disabled) + ")"
                          : " (seccomp, as in most containers, or a security module)";
  } else if (failure.error == ENOSYS) {
    text += " (a kernel without io_uring, or a sandbox that hides it)";
  } else if (failure.error == ENOMEM) {
    text += " (too little locked memory: see ulimit -l)";
  }
  return text;
}

}  // namespace

std::optional<std::string> why_no_io_uring(unsigned queue_depth, int keep_open_fd, int fd, void* memory,
                                           unsigned bytes) {
  UringRing::Failure failure;
  const auto ring = UringRing::create(queue_depth, keep_open_fd, &failure);
  if (ring == nullptr) return explain(failure);
  if (fd < 0) return std::nullopt;

  io_uring_sqe* sqe = io_uring_get_sqe(ring->raw());
  io_uring_prep_read(sqe, fd, memory, bytes, 0);
  int result;
  do {
    result = io_uring_submit_and_wait(ring->raw(), 1);
  } while (result == -EINTR);
  if (result < 0) return explain({-result, "io_uring_enter"});
  io_uring_cqe* cqe = nullptr;
  do {
    result = io_uring_wait_cqe(ring->raw(), &cqe);
  } while (result == -EINTR);
  if (result < 0) return explain({-result, "io_uring_enter"});
  const int moved = cqe->res;
  io_uring_cqe_seen(ring->raw(), cqe);
  if (moved < 0) return explain({-moved, "a read with io_uring"});
  if (static_cast<unsigned>(moved) != bytes) {
    return "a read with io_uring moved " + std::to_string(moved) + " of " + std::to_string(bytes) + " bytes";
  }
  return std::nullopt;
}

std::unique_ptr<BlockDevice> make_uring_device(DeviceSetup setup, std::unique_ptr<WorkerPool> workers) {
  return std::make_unique<UringDevice>(std::move(setup), std::move(workers));
}

}  // namespace tardis
