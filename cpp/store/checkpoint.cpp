// SPDX-License-Identifier: Apache-2.0
#include "store/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/checksum.h"
#include "base/read_exactly.h"
#include "store/files.h"
#include "store/live_layout.h"

namespace tardis {
namespace {

Status write_fully(int fd, const void* memory, std::size_t bytes, const std::string& path) {
  const auto* from = static_cast<const char*>(memory);
  while (bytes > 0) {
    const ssize_t put = ::write(fd, from, bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return errno_error(errno, path);
    from += put;
    bytes -= static_cast<std::size_t>(put);
  }
  return {};
}

}  // namespace

Checkpoint Checkpoint::load(const std::string& path, const Uuid& store) {
  Checkpoint none;
  Checkpoint loaded;
  auto file = open_regular_file(path, O_NOFOLLOW);
  if (!file) return none;
  loaded.fd_ = std::move(*file);
  struct stat status {};
  CheckpointHeader h;
  const int fd = loaded.fd_.get();
  if (::fstat(fd, &status) != 0 || !read_exactly(fd, path, 0, &h, sizeof h)) return none;
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  if (!sealed(h) || h.format_version != kFormatVersion || h.store_uuid != store || h.bytes != bytes ||
      h.namespaces > kMaxNamespaces || h.segments > kMaxSegments) {
    return none;
  }
  loaded.namespaces_.resize(h.namespaces);
  const std::uint64_t namespace_bytes = h.namespaces * sizeof(Fingerprint);
  if (!read_exactly(fd, path, sizeof h, loaded.namespaces_.data(), namespace_bytes)) return none;
  if (struct_crc(loaded.namespaces_.data(), namespace_bytes) != h.namespaces_crc) return none;
  std::uint64_t at = sizeof h + namespace_bytes;
  for (std::uint32_t i = 0; i < h.segments; ++i) {
    CheckpointSegment s;
    if (!read_exactly(fd, path, at, &s, sizeof s) || !sealed(s)) return none;
    at += sizeof s;
    loaded.segments_[s.segment] = {s, at};
    at += std::uint64_t{s.entries} * sizeof(CheckpointEntry);
    if (at > bytes) return none;
  }
  loaded.header_ = h;
  return loaded;
}

bool Checkpoint::covers(SegmentName segment, std::uint32_t epoch, std::uint64_t write_sequence) const {
  const auto it = segments_.find(segment.word());
  return it != segments_.end() && it->second.segment.epoch == epoch &&
         it->second.segment.write_sequence == write_sequence;
}

bool Checkpoint::read(SegmentName segment, std::vector<CheckpointEntry>& entries) const {
  const Place& place = segments_.at(segment.word());
  entries.resize(place.segment.entries);
  const std::size_t bytes = entries.size() * sizeof(CheckpointEntry);
  return read_exactly(fd_.get(), kCheckpointFile, place.offset, entries.data(), bytes) &&
         xxh3_64(entries.data(), bytes) == place.segment.entries_digest;
}

Status write_checkpoint(const std::string& folder, const std::vector<Fingerprint>& namespaces, CheckpointHeader header,
                        const std::function<bool(CheckpointSegment&, std::vector<CheckpointEntry>&)>& next) {
  const std::string path = folder + "/" + kCheckpointFile, fresh = path + ".new";
  UniqueFd fd(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  if (!fd) return errno_error(errno, fresh);
  const std::size_t namespace_bytes = namespaces.size() * sizeof(Fingerprint);
  header.magic = CheckpointHeader::kMagic;
  header.format_version = kFormatVersion;
  header.namespaces = static_cast<std::uint32_t>(namespaces.size());
  header.namespaces_crc = struct_crc(namespaces.data(), namespace_bytes);
  header.segments = 0;
  header.bytes = sizeof header + namespace_bytes;
  Status status = write_fully(fd.get(), &header, sizeof header, fresh);  // not sealed yet
  if (status) status = write_fully(fd.get(), namespaces.data(), namespace_bytes, fresh);
  CheckpointSegment segment{};
  std::vector<CheckpointEntry> entries;
  while (status && next(segment, entries)) {
    const std::size_t bytes = entries.size() * sizeof(CheckpointEntry);
    segment.magic = CheckpointSegment::kMagic;
    segment.entries = static_cast<std::uint32_t>(entries.size());
    segment.entries_digest = xxh3_64(entries.data(), bytes);
    seal(segment);
    status = write_fully(fd.get(), &segment, sizeof segment, fresh);
    if (status) status = write_fully(fd.get(), entries.data(), bytes, fresh);
    header.segments += 1;
    header.bytes += sizeof segment + bytes;
    segment = {};
    entries.clear();
  }
  seal(header);
  if (status && ::pwrite(fd.get(), &header, sizeof header, 0) != static_cast<ssize_t>(sizeof header)) {
    status = errno_error(errno, fresh);
  }
  if (status && ::fsync(fd.get()) != 0) status = errno_error(errno, fresh + ": fsync");
  if (status && ::rename(fresh.c_str(), path.c_str()) != 0) status = errno_error(errno, path);
  if (!status) {
    ::unlink(fresh.c_str());
    return status;
  }
  return sync_folder(folder);
}

}  // namespace tardis
