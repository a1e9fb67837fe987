// SPDX-License-Identifier: Apache-2.0
#include "block/sync_device.h"

#include <limits.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "block/iovec_range.h"

namespace tardis {

void SyncDevice::run(std::span<IoRequest> requests, const Completion& on_complete) {
  if (requests.empty()) return;
  RunScope scope(run_state(), requests);
  const std::size_t parallel = std::min<std::size_t>(workers_->threads() + 1, scope.depth());
  const std::function<bool(std::size_t)> may_join = [&scope](std::size_t running) { return scope.may_start(running); };
  workers_->parallel_for(
      requests.size(), parallel,
      [&](std::size_t i) {
        execute(requests[i]);
        if (on_complete) on_complete(requests[i]);
      },
      &may_join);
}

int SyncDevice::read_at_once(FileId file, std::uint64_t offset, std::span<const iovec> memory) {
  IoRequest request{IoRequest::Op::kRead, file, offset, memory, 0};
  execute(request);
  return request.error;
}

void SyncDevice::execute(IoRequest& request) {
  const std::uint64_t bytes = total_bytes(request.memory);
  bool bounced = false;
  const auto file = files_.get(request.file);
  request.error = file == nullptr ? EBADF : check_request(request, bytes);
  if (request.error == 0 && bytes > 0) {
    bounced = !memory_fits(request.memory, setup_.geometry);
    transfers_.started();
    request.error = bounced ? move_bounced(file->fd.get(), request, bytes) : move_in_place(file->fd.get(), request);
    transfers_.ended();
  }
  transfers_.finished(request, bytes, bounced);
}

int SyncDevice::move_in_place(int fd, const IoRequest& request) {
  std::uint64_t offset = request.offset;
  for (std::size_t first = 0; first < request.memory.size(); first += IOV_MAX) {
    const auto part = request.memory.subspan(first, std::min<std::size_t>(IOV_MAX, request.memory.size() - first));
    if (const int error = transfer(fd, request.op, offset, part); error != 0) return error;
    offset += total_bytes(part);
  }
  return 0;
}

int SyncDevice::move_bounced(int fd, const IoRequest& request, std::uint64_t bytes) {
  BouncePool::Lease buffer = bounce_.acquire();
  if (buffer.data() == nullptr) return ENOMEM;
  IovecCursor at;
  for (std::uint64_t done = 0; done < bytes;) {
    const auto piece = static_cast<std::size_t>(std::min<std::uint64_t>(bytes - done, bounce_.buffer_bytes()));
    const iovec flat{buffer.data(), piece};
    if (request.op == IoRequest::Op::kWrite) gather(request.memory, at, buffer.data(), piece);
    if (const int error = transfer(fd, request.op, request.offset + done, {&flat, 1}); error != 0) return error;
    if (request.op == IoRequest::Op::kRead) scatter(buffer.data(), request.memory, at, piece);
    done += piece;
  }
  return 0;
}

int SyncDevice::transfer(int fd, IoRequest::Op op, std::uint64_t offset, std::span<const iovec> memory) {
  std::uint64_t left = total_bytes(memory);
  std::vector<iovec> rest;  // what is left after a short transfer
  while (left > 0) {
    const auto count = static_cast<int>(memory.size());
    const auto at = static_cast<off_t>(offset);
    const ssize_t moved =
        op == IoRequest::Op::kRead ? ::preadv(fd, memory.data(), count, at) : ::pwritev(fd, memory.data(), count, at);
    if (moved < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;  // the files are blocking: EAGAIN does not persist
      return errno;
    }
    const auto progress = judge_transfer(op, static_cast<std::uint64_t>(moved), left, setup_.geometry);
    if (progress.error != 0) return progress.error;
    left -= progress.bytes;
    offset += progress.bytes;
    if (left > 0) {
      rest = without_prefix(memory, progress.bytes);
      memory = rest;
    }
  }
  return 0;
}

}  // namespace tardis
