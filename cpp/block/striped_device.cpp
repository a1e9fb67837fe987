// SPDX-License-Identifier: Apache-2.0
#include "block/striped_device.h"

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <optional>

#include "block/interleave.h"
#include "block/iovec_range.h"

namespace tardis {
namespace {

Error not_open() { return Error{Code::kInternal, "the id names no open striped file"}; }

}  // namespace

void StripedDevice::Member::met(IoUse use, int os_error) {
  const auto at = static_cast<std::size_t>(use);
  if (os_error == 0) {
    worked[at].fetch_add(1, std::memory_order_relaxed);
  } else {
    error[at].store(os_error, std::memory_order_relaxed);
  }
}

StripedDevice::Joined::Joined(const std::vector<FileId>& files, const std::atomic<std::uint64_t>& map)
    : members(files.size()), where(map) {
  for (std::size_t i = 0; i < files.size(); ++i) members[i].file = files[i];
}

FileId StripedDevice::join(std::vector<FileId> files, const std::atomic<std::uint64_t>& map) {
  auto joined = std::make_shared<Joined>(files, map);
  const std::unique_lock lock(mutex_);
  auto place = std::find(joined_.begin(), joined_.end(), nullptr);
  if (place == joined_.end()) place = joined_.insert(place, nullptr);
  *place = std::move(joined);
  return kJoined | static_cast<FileId>(place - joined_.begin());
}

std::shared_ptr<StripedDevice::Joined> StripedDevice::find(FileId file) const {
  const std::shared_lock lock(mutex_);
  const std::size_t place = file & ~kJoined;
  return place < joined_.size() ? joined_[place] : nullptr;
}

std::vector<StripedDevice::Met> StripedDevice::take_met(FileId file, IoUse use) {
  std::vector<Met> result;
  const auto joined = find(file);
  if (joined == nullptr) return result;
  const auto at = static_cast<std::size_t>(use);
  for (Member& member : joined->members) {
    result.push_back({member.worked[at].exchange(0), member.error[at].exchange(0)});
  }
  return result;
}

void StripedDevice::close_file(FileId file) {
  if (!is_joined(file)) return inner_->close_file(file);
  std::shared_ptr<Joined> gone;
  {
    const std::unique_lock lock(mutex_);
    const std::size_t place = file & ~kJoined;
    if (place < joined_.size()) gone = std::exchange(joined_[place], nullptr);
  }
  if (gone == nullptr) return;
  for (const Member& member : gone->members) inner_->close_file(member.file);
}

Status StripedDevice::preallocate(FileId file, std::uint64_t bytes) {
  if (!is_joined(file)) return inner_->preallocate(file, bytes);
  const auto joined = find(file);
  if (joined == nullptr) return not_open();
  const StripeMap map = joined->map();
  const std::uint64_t behind = bytes - std::min(bytes, map.start);
  for (std::uint32_t i = 0; i < map.files; ++i) {
    const std::uint64_t own = i == 0 ? std::min(bytes, map.start) : StripeMap::kMemberStart;
    Status status = inner_->preallocate(joined->members[i].file, own + map.share(i, behind));
    if (!status) return status;
  }
  return {};
}

Result<std::uint64_t> StripedDevice::file_bytes(FileId file) {
  if (!is_joined(file)) return inner_->file_bytes(file);
  const auto joined = find(file);
  if (joined == nullptr) return not_open();
  std::vector<std::uint64_t> bytes;
  for (const Member& member : joined->members) {
    auto own = inner_->file_bytes(member.file);
    if (!own) return own.error();
    bytes.push_back(*own);
  }
  return joined->map().available(bytes);
}

std::vector<Status> StripedDevice::flush_files(std::span<const FileId> files) {
  if (std::none_of(files.begin(), files.end(), is_joined)) return inner_->flush_files(files);
  struct Part {
    std::size_t whole;
    Member* member;  // null: an ordinary file
  };
  std::vector<Status> results(files.size());
  std::vector<std::shared_ptr<Joined>> joined(files.size());
  std::vector<FileId> inner;
  std::vector<Part> parts;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (!is_joined(files[i])) {
      inner.push_back(files[i]);
      parts.push_back({i, nullptr});
      continue;
    }
    joined[i] = find(files[i]);
    if (joined[i] == nullptr) {
      results[i] = not_open();
      continue;
    }
    for (Member& member : joined[i]->members) {
      inner.push_back(member.file);
      parts.push_back({i, &member});
    }
  }
  const std::vector<Status> flushed = inner_->flush_files(inner);
  for (std::size_t k = 0; k < parts.size(); ++k) {
    if (parts[k].member != nullptr) {
      parts[k].member->met(IoUse::kFlush, flushed[k] ? 0 : std::max(flushed[k].error().os_error, 1));
    }
    if (results[parts[k].whole] && !flushed[k]) results[parts[k].whole] = flushed[k];
  }
  return results;
}

// The requests of one run(), cut up.
class StripedDevice::Batch {
 public:
  Batch(const StripedDevice& device, std::span<IoRequest> requests, const Completion& on_complete)
      : on_complete_(on_complete), wholes_(requests.size()) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      wholes_[i].request = &requests[i];
      if (is_joined(requests[i].file)) {
        cut(device, wholes_[i]);
      } else {
        wholes_[i].left = 1;
        pieces_.push_back({requests[i], &wholes_[i], nullptr, nullptr, {}});
      }
    }
  }

  void run(BlockDevice& inner) {
    // A request may lie in one file as a whole, and its neighbours too.
    interleave(pieces_, [](const Piece& piece) { return piece.request.file; });
    std::vector<IoRequest> requests(pieces_.size());
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      requests[i] = pieces_[i].request;
      if (pieces_[i].member != nullptr) requests[i].memory = pieces_[i].memory;
    }
    const IoRequest* front = requests.data();
    inner.run(requests, [&](IoRequest& request) {
      finished(pieces_[static_cast<std::size_t>(&request - front)], request.error);
    });
  }

 private:
  struct Whole {
    IoRequest* request = nullptr;
    std::atomic<std::uint32_t> left{0};  // pieces
    std::atomic<int> error{0};
  };
  struct Piece {
    IoRequest request;
    Whole* whole;
    std::shared_ptr<Joined> joined;  // null: an ordinary request, as it came
    Member* member;
    std::vector<iovec> memory;
  };

  void cut(const StripedDevice& device, Whole& whole) {
    const IoRequest& request = *whole.request;
    const auto joined = device.find(request.file);
    const std::uint64_t bytes = total_bytes(request.memory);
    if (joined == nullptr || joined->map().unit == 0 || bytes == 0) {
      whole.request->error = joined != nullptr && bytes == 0 ? 0 : EBADF;
      if (on_complete_) on_complete_(*whole.request);
      return;
    }
    const std::size_t first = pieces_.size();
    std::vector<std::optional<std::size_t>> own(joined->members.size());  // piece of each file
    IovecCursor at;
    joined->map().pieces(request.offset, bytes, [&](std::uint32_t file, std::uint64_t offset, std::uint64_t n) {
      if (!own[file]) {
        own[file] = pieces_.size();
        Piece& fresh = pieces_.emplace_back(Piece{request, &whole, joined, &joined->members[file], {}});
        fresh.request.file = joined->members[file].file;
        fresh.request.offset = offset;
      }
      take(request.memory, at, n, pieces_[*own[file]].memory);
    });
    whole.left = static_cast<std::uint32_t>(pieces_.size() - first);
  }

  void finished(Piece& piece, int error) {
    Whole& whole = *piece.whole;
    if (piece.member != nullptr) {
      piece.member->met(piece.request.op == IoRequest::Op::kRead ? IoUse::kRead : IoUse::kWrite, error);
    }
    int none = 0;
    if (error != 0) whole.error.compare_exchange_strong(none, error);
    // acq_rel: who finishes last passes on what the others read.
    if (whole.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    whole.request->error = whole.error.load();
    if (on_complete_) on_complete_(*whole.request);
  }

  const Completion& on_complete_;
  std::vector<Whole> wholes_;
  std::vector<Piece> pieces_;
};

void StripedDevice::run(std::span<IoRequest> requests, const Completion& on_complete) {
  if (std::none_of(requests.begin(), requests.end(), [](const IoRequest& r) { return is_joined(r.file); })) {
    return inner_->run(requests, on_complete);
  }
  Batch(*this, requests, on_complete).run(*inner_);
}

int StripedDevice::read_at_once(FileId file, std::uint64_t offset, std::span<const iovec> memory) {
  if (!is_joined(file)) return inner_->read_at_once(file, offset, memory);
  const auto joined = find(file);
  if (joined == nullptr || joined->map().unit == 0) return EBADF;
  int first_error = 0;
  IovecCursor at;
  std::vector<iovec> part;
  joined->map().pieces(offset, total_bytes(memory), [&](std::uint32_t own, std::uint64_t start, std::uint64_t n) {
    part.clear();
    take(memory, at, n, part);
    Member& member = joined->members[own];
    const int error = inner_->read_at_once(member.file, start, part);
    member.met(IoUse::kRead, error);
    if (first_error == 0) first_error = error;
  });
  return first_error;
}

}  // namespace tardis
