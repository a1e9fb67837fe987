// SPDX-License-Identifier: Apache-2.0
#include "store/live_table.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "store/folder.h"

namespace tardis {
namespace {

// Words in use per word of the hash table: two buckets of eight to choose from do not both fill up at this load.
constexpr double kLoad = 0.6;
constexpr std::uint64_t kPage = 4096;

LiveShape shape_of(const LiveSizes& sizes) {
  LiveShape h{};
  h.capacity_bytes = sizes.capacity_bytes;
  h.segment_bytes = sizes.segment_bytes;
  h.max_segments = sizes.max_segments;
  h.slots_stride = SegmentGeometry::of(sizes.segment_bytes, kSlotAlign, 1).slots;
  h.buckets = std::max<std::uint64_t>(
      64, static_cast<std::uint64_t>(static_cast<double>(sizes.objects) / kLoad / IndexBucket::kWords) + 1);
  std::uint64_t end = kPage;
  const auto place = [&](std::uint64_t bytes) { return std::exchange(end, round_up(end + bytes, kPage)); };
  h.processes_offset = place(kMaxProcesses * sizeof(LiveProcess));
  h.namespaces_offset = place(kMaxNamespaces * sizeof(LiveNamespace));
  h.segments_offset = place(sizes.max_segments * sizeof(LiveSegment));
  h.buckets_offset = place(h.buckets * sizeof(IndexBucket));
  h.records_offset = place(std::uint64_t{sizes.max_segments} * h.slots_stride * sizeof(SlotRecord));
  h.total_bytes = end;
  return h;
}

std::string too_small(const std::string& path) {
  return path +
         ": the shared index needs more memory than this tmpfs has left; enlarge it (docker: --shm-size), or set "
         "a smaller capacity";
}

}  // namespace

std::string LiveTable::file_name(const LiveIdentity& identity) {
  return "tardis-" + hex(identity.store.data(), identity.store.size()) + "-" + std::to_string(identity.device) + "-" +
         std::to_string(identity.inode);
}

Result<LiveTable> LiveTable::create(const std::string& folder, const LiveIdentity& identity, const LiveSizes& sizes) {
  const std::string path = folder + "/" + file_name(identity);
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return errno_error(errno, path + ": removing an old index");
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) {
    return errno_error(errno,
                       path + ": the index of a store in use lives in shared memory, and no file can be made there");
  }
  LiveTable table(path, std::move(fd));
  const LiveShape h = shape_of(sizes);
  Status status;
  if (::ftruncate(table.fd_.get(), static_cast<off_t>(h.total_bytes)) != 0) {
    status = errno_error(errno, path + ": " + human_bytes(h.total_bytes) + " of address space");
  }
  if (status) status = table.map(h.total_bytes);
  if (status) status = table.reserve(0, kPage);
  if (status) {
    LiveHeader& header = table.header();
    header.magic = LiveHeader::kMagic;
    header.version = kLiveVersion;
    header.store = identity.store;
    header.shape = h;
    table.adopt_shape();
    status = table.reserve(h.namespaces_offset, kMaxNamespaces * sizeof(LiveNamespace));
  }
  if (status) status = table.reserve(h.buckets_offset, h.buckets * sizeof(IndexBucket));
  if (!status) {
    table.remove_file();
    return status.error();
  }
  table.header().next_generation.store(1);
  table.header().next_group.store(1);
  return table;
}

Result<LiveTable> LiveTable::attach(const std::string& folder, const LiveIdentity& identity) {
  const std::string path = folder + "/" + file_name(identity);
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) {
    return Error{Code::kBusy, path + ": " + errno_error(errno, "").message +
                                  "; another process serves this store with an index that cannot be reached from here "
                                  "(another container or IPC namespace?): share its " +
                                  folder + ", or give this process another path"};
  }
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return errno_error(errno, path);
  LiveTable table(path, std::move(fd));
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  if (bytes < kPage) return Error{Code::kCorrupt, path + ": not the index of a store"};
  if (Status mapped = table.map(bytes); !mapped) return mapped.error();
  const LiveHeader& h = table.header();
  if (h.magic != LiveHeader::kMagic || h.version != kLiveVersion || h.shape.total_bytes != bytes ||
      h.store != identity.store) {
    return Error{Code::kUnsupportedFormat,
                 path + ": the process that serves this store is of another release; use one release at a time"};
  }
  table.adopt_shape();
  return table;
}

LiveTable::LiveTable(LiveTable&& other) noexcept
    : path_(std::move(other.path_)),
      file_id_(std::move(other.file_id_)),
      fd_(std::move(other.fd_)),
      base_(std::exchange(other.base_, nullptr)),
      bytes_(other.bytes_),
      records_(other.records_),
      stride_(other.stride_),
      buckets_(other.buckets_) {}

LiveTable::~LiveTable() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

void LiveTable::remove_file() { ::unlink(path_.c_str()); }

Status LiveTable::map(std::uint64_t bytes) {
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) return errno_error(errno, path_);
  file_id_ = std::to_string(status.st_dev) + ":" + std::to_string(status.st_ino);
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (base == MAP_FAILED) return errno_error(errno, path_ + ": mapping " + human_bytes(bytes));
  base_ = static_cast<std::byte*>(base);
  bytes_ = bytes;
  return {};
}

void LiveTable::adopt_shape() {
  const LiveShape& shape = header().shape;
  stride_ = shape.slots_stride;
  buckets_ = shape.buckets;
  records_ = at<SlotRecord>(shape.records_offset);
}

Status LiveTable::reserve(std::uint64_t offset, std::uint64_t bytes) {
  int result;
  do {
    result = ::fallocate(fd_.get(), FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return {};
  if (errno == ENOSPC) return Error{Code::kNoSpace, too_small(path_)};
  return errno_error(errno, path_ + ": reserving shared memory");
}

Status LiveTable::reserve_process(std::uint32_t id) {
  return reserve(header().shape.processes_offset + id * sizeof(LiveProcess), sizeof(LiveProcess));
}

Status LiveTable::reserve_segment(std::uint32_t id) {
  return reserve(header().shape.segments_offset + id * sizeof(LiveSegment), sizeof(LiveSegment));
}

Status LiveTable::reserve_records(std::uint32_t segment, std::uint32_t slots) {
  return reserve(header().shape.records_offset + std::uint64_t{segment} * stride_ * sizeof(SlotRecord),
                 std::uint64_t{slots} * sizeof(SlotRecord));
}

}  // namespace tardis
