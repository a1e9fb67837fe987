// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/file_medium.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <deque>
#include <string>
#include <utility>

#include "block/iovec_range.h"

namespace tardis::nvme {
namespace {

constexpr std::size_t kLeastRegistered = 1u << 20;  // rings and lists are not worth it

alignas(4096) constexpr std::array<std::byte, 64 << 10> kZeros{};

void take_zeros(std::uint64_t bytes, std::vector<iovec>& out) {
  while (bytes > 0) {
    const std::uint64_t n = std::min<std::uint64_t>(bytes, kZeros.size());
    out.push_back({const_cast<std::byte*>(kZeros.data()), static_cast<std::size_t>(n)});
    bytes -= n;
  }
}

}  // namespace

// Requests of a medium, as requests of the device.
struct FileMedium::Batch {
  explicit Batch(std::size_t requests) : waiting(requests), errors(requests) {}
  std::vector<IoRequest> io;
  std::vector<std::size_t> owner;         // index of the medium's request, of each in `io`
  std::deque<std::vector<iovec>> memory;  // of each in `io`
  std::vector<std::atomic<std::uint32_t>> waiting;
  std::vector<std::atomic<int>> errors;
};

Result<std::unique_ptr<FileMedium>> FileMedium::create(BlockDevice& device, std::vector<Part> parts) {
  const std::uint32_t granularity = std::max(512u, device.geometry().offset_align);
  if (parts.empty()) return Error{Code::kInvalidArgument, "files of a namespace: expected one at least, found none"};
  for (const Part& part : parts) {
    const std::string name = "file " + std::to_string(part.file) + " of a namespace: ";
    if (part.bytes == 0 || part.bytes % granularity != 0) {
      return Error{Code::kInvalidArgument, name + "expected a multiple of " + std::to_string(granularity) +
                                               " bytes, found " + std::to_string(part.bytes)};
    }
    const Result<std::uint64_t> found = device.file_bytes(part.file);
    if (!found) return found.error();
    if (*found < part.bytes) {
      return Error{Code::kInvalidArgument, name + "expected " + std::to_string(part.bytes) + " bytes, found " +
                                               std::to_string(*found) + "; preallocate it first"};
    }
  }
  return std::unique_ptr<FileMedium>(new FileMedium(device, std::move(parts), granularity));
}

FileMedium::FileMedium(BlockDevice& device, std::vector<Part> parts, std::uint32_t granularity)
    : device_(device), parts_(std::move(parts)), granularity_(granularity) {
  std::uint64_t end = 0;
  for (const Part& part : parts_) ends_.push_back(end += part.bytes);
}

void FileMedium::memory_mapped(void* base, std::size_t bytes) {
  // Refused where another medium on this device told of it: then the device has it.
  if (bytes >= kLeastRegistered) (void)device_.register_memory(base, bytes);
}

void FileMedium::split(const MediumRequest& request, std::size_t index, Batch& batch) const {
  IovecCursor cursor;
  std::uint64_t at = request.offset, left = request.bytes;
  while (left > 0) {
    const auto part = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin());
    const std::uint64_t n = std::min(left, ends_[part] - at);
    std::vector<iovec>& memory = batch.memory.emplace_back();
    if (request.op == MediumRequest::Op::kWriteZeroes) {
      take_zeros(n, memory);
    } else {
      take(request.memory, cursor, n, memory);
    }
    IoRequest io;
    io.op = request.op == MediumRequest::Op::kRead ? IoRequest::Op::kRead : IoRequest::Op::kWrite;
    io.file = parts_[part].file;
    io.offset = at - (ends_[part] - parts_[part].bytes);
    io.memory = memory;
    batch.io.push_back(io);
    batch.owner.push_back(index);
    batch.waiting[index].fetch_add(1, std::memory_order_relaxed);
    at += n;
    left -= n;
  }
}

void FileMedium::run(std::span<MediumRequest> requests, const Completion& on_complete) {
  Batch batch(requests.size());
  std::vector<MediumRequest*> after_flush;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    MediumRequest& request = requests[i];
    request.error = 0;
    switch (request.op) {
      case MediumRequest::Op::kFlush:
        after_flush.push_back(&request);
        break;
      case MediumRequest::Op::kDeallocate:
        on_complete(request);
        break;  // only advice
      default:
        if (request.durable) after_flush.push_back(&request);
        split(request, i, batch);
    }
  }
  device_.run(batch.io, [&](IoRequest& io) {
    const std::size_t index = batch.owner[static_cast<std::size_t>(&io - batch.io.data())];
    if (io.error != 0) batch.errors[index].store(io.error, std::memory_order_relaxed);
    // Acquire and release: whoever finishes the last part sees the errors of the others.
    if (batch.waiting[index].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    requests[index].error = batch.errors[index].load(std::memory_order_relaxed);
    if (!requests[index].durable) on_complete(requests[index]);
  });
  if (after_flush.empty()) return;
  std::vector<FileId> files;
  for (const Part& part : parts_) files.push_back(part.file);
  for (const Status& flushed : device_.flush_files(files)) {
    if (!flushed) flush_error_.store(flushed.error().os_error != 0 ? flushed.error().os_error : EIO);
  }
  const int error = flush_error_.load();
  for (MediumRequest* request : after_flush) {
    if (request->error == 0) request->error = error;
    on_complete(*request);
  }
}

}  // namespace tardis::nvme
