// SPDX-License-Identifier: Apache-2.0
#include "block/file_device.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace tardis {
namespace {

// Files flushed side by side; leaves most of the smallest pool to reads.
constexpr std::size_t kParallelFlushes = 4;

// Buffers are multiples of every alignment in use, so that a request is cut at block boundaries.
std::size_t bounce_alignment(const IoGeometry& geometry) {
  return std::max<std::size_t>({4096, geometry.offset_align, geometry.memory_align});
}

std::size_t bounce_bytes(const DeviceSetup& setup) {
  const std::size_t alignment = bounce_alignment(setup.geometry);
  return (setup.options.bounce_bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

FileDevice::FileDevice(DeviceSetup setup, std::unique_ptr<WorkerPool> workers)
    : setup_(std::move(setup)),
      workers_(std::move(workers)),
      bounce_(setup_.options.bounce_buffers, bounce_bytes(setup_), bounce_alignment(setup_.geometry)),
      run_state_(setup_.depth, setup_.depth) {}

Result<FileId> FileDevice::open_file(const std::string& path, bool create, bool writable) {
  return files_.open(path, create, writable, setup_.geometry.direct);
}

void FileDevice::close_file(FileId file) { files_.remove(file); }

Result<std::shared_ptr<OpenFile>> FileDevice::find(FileId file) const {
  auto found = files_.get(file);
  if (found == nullptr) return Error{Code::kInternal, "file id " + std::to_string(file) + " is not open"};
  return found;
}

Status FileDevice::preallocate(FileId file, std::uint64_t bytes) {
  auto found = find(file);
  if (!found) return found.error();
  const int fd = (*found)->fd.get();
  struct stat before;
  if (::fstat(fd, &before) != 0) return errno_error(errno, "fstat " + (*found)->path);
  int result;
  do {
    result = ::fallocate(fd, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return {};

  const int error = errno;
  if (error == EOPNOTSUPP) {
    // The file system cannot reserve: give the file its size, and let a full disk show at the write. The self-test says
    // so.
    if (static_cast<std::uint64_t>(before.st_size) >= bytes || ::ftruncate(fd, static_cast<off_t>(bytes)) == 0)
      return {};
    return errno_error(errno, "ftruncate " + (*found)->path);
  }
  // Give back what was reserved before the disk was full. If this fails too, the first error is still the one to
  // report.
  if (::ftruncate(fd, before.st_size) != 0) errno = error;
  return errno_error(error, "reserving " + std::to_string(bytes) + " bytes for " + (*found)->path);
}

Result<std::uint64_t> FileDevice::file_bytes(FileId file) {
  auto found = find(file);
  if (!found) return found.error();
  struct stat status;
  if (::fstat((*found)->fd.get(), &status) != 0) return errno_error(errno, "fstat " + (*found)->path);
  return static_cast<std::uint64_t>(status.st_size);
}

Status FileDevice::flush(FileId file) { return flush_files({&file, 1}).front(); }

std::vector<Status> FileDevice::flush_files(std::span<const FileId> files) {
  std::vector<Status> results(files.size());
  const IoArbiter::Flush turn(run_state_.arbiter);
  // The kernel makes one drive flush of those that wait at the same time, and each one alone would wait in the queue
  // behind whatever else is being written.
  workers_->parallel_for(files.size(), kParallelFlushes, [&](std::size_t i) {
    auto found = find(files[i]);
    if (!found) {
      results[i] = found.error();
      return;
    }
    const int fd = (*found)->fd.get();
    const int error = setup_.sync_file ? setup_.sync_file(fd) : ::fdatasync(fd) != 0 ? errno : 0;
    if (error != 0) results[i] = errno_error(error, "fdatasync " + (*found)->path);
  });
  return results;
}

std::uint64_t FileDevice::join_bytes() const {
  // A drive has its best bandwidth well before 1 MiB. A copy from the page cache should still be in the copying core's
  // second-level cache when the completion looks at it.
  return setup_.geometry.direct ? 1u << 20 : 256u << 10;
}

int FileDevice::check_request(const IoRequest& request, std::uint64_t bytes) const {
  const std::uint64_t mask = setup_.geometry.offset_align - 1;
  return ((request.offset | bytes) & mask) == 0 ? 0 : EINVAL;
}

BlockDeviceCounters FileDevice::counters() const {
  BlockDeviceCounters now = transfers_.tell(run_state_.arbiter.counters());
  now.read_depth = run_state_.read_tuner.depth();
  now.write_depth = run_state_.write_tuner.depth();
  return now;
}

}  // namespace tardis
