// SPDX-License-Identifier: Apache-2.0
// A path that fails is taken out: what it holds is not found any more, and nothing new goes there. It is tried again
// when the store is opened by a first process.
#include <cerrno>

#include "store/counters.h"
#include "store/store.h"

namespace tardis {
namespace {

// Batches in a row of which nothing succeeded. One bad sector, or one bad file, does not make three.
constexpr std::uint32_t kStrikesOut = 3;

}  // namespace

// Under the setup lock. The first process says which paths are in use; the others must be able to reach those.
Status Store::join_paths(bool alone) {
  const StorePaths& paths = folder_.paths();
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    if (paths[path].flags == 0) continue;
    LivePath& live_path = table_.header().paths[path];
    if (alone) live_path.state.store(paths[path].present ? PathState::kInUse : PathState::kOut);
    path_problems_[path] = paths[path].present ? "failed while the store was in use" : paths[path].problem;
    if (!paths[path].present && live_path.state.load() == PathState::kInUse) {
      return Error{Code::kBusy, "path " + paths[path].folder + ": in use by " + folder_.owner() +
                                    ", but cannot be reached from here: " + paths[path].problem +
                                    "; mount it here too, or give this process a store of its own"};
    }
  }
  return {};
}

std::uint32_t Store::paths_in_use() const {
  std::uint32_t count = 0;
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) count += path_in_use(path);
  return count;
}

// What a drive that fails, or a file system that is gone, answers; not what a full disk, a process without memory or
// descriptors, or a wrong request does.
bool Store::is_path_fault(int os_error) {
  switch (os_error) {
    case EIO:
    case ENXIO:
    case ENODEV:
    case EROFS:
    case ENOENT:
    case EACCES:
    case EPERM:
    case ESTALE:
    case ENOTCONN:
    case ESHUTDOWN:
    case ETIMEDOUT:
    case EREMOTEIO:
    case EUCLEAN:  // ext4, xfs: the file system is damaged
    case EBADMSG:
      return true;
    default:
      return false;
  }
}

void Store::path_result(std::uint32_t path, IoUse use, const Status& status) {
  std::atomic<std::uint32_t>& strikes = table_.header().paths[path].strikes[static_cast<std::size_t>(use)];
  if (status) {
    if (strikes.load(std::memory_order_relaxed) != 0) strikes.store(0);
  } else if (is_path_fault(status.error().os_error) && strikes.fetch_add(1) + 1 >= kStrikesOut) {
    take_out(path, status.error().message);
  }
}

void Store::path_result(Segment& segment, IoUse use, const Status& status) {
  if (!segment.stripes()) return path_result(segment.on_path(), use, status);
  for (const Segment::Met& one : segment.take_met(use)) {
    if (one.met.error == 0) {
      path_result(one.path, use, Status());
    } else {
      path_result(one.path, use, errno_error(one.met.error, segment.path()));
    }
  }
}

void Store::PathTally::add(std::uint32_t path, int os_error) {
  if (os_error == 0) {
    ++worked[path];
  } else if (is_path_fault(os_error)) {
    ++failed[path];
    error[path] = os_error;
  }
}

// An object that failed does not tell which of its drives it was. What a segment met is told with its first object;
// another call of this process may have told some of it.
void Store::PathTally::add(Segment& segment, IoUse use, int os_error) {
  if (!segment.stripes()) return add(segment.on_path(), os_error);
  for (const Segment::Met& one : segment.take_met(use)) {
    worked[one.path] += one.met.worked;
    if (one.met.error != 0) add(one.path, one.met.error);
  }
}

void Store::tell_paths(const PathTally& tally, IoUse use) {
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    if (tally.worked[path] > 0) {
      path_result(path, use, Status());
    } else if (tally.failed[path] > 0) {
      path_result(path, use, errno_error(tally.error[path], use == IoUse::kRead ? "reading" : "writing"));
    }
  }
}

void Store::take_out(std::uint32_t path, const std::string& problem) {
  PathState state = PathState::kInUse;
  if (paths_in_use() < 2) return;  // there is nothing to go on with
  if (!table_.header().paths[path].state.compare_exchange_strong(state, PathState::kOut)) return;
  {
    const std::lock_guard lock(problems_mutex_);
    path_problems_[path] = problem;
  }
  counters_->paths_taken_out += 1;
  forget_path(path);
}

// Nothing in it is found from here on. Who published something since the path was taken out looks at its state
// afterwards, so one of the two sees the other.
void Store::forget_path(std::uint32_t path) {
  const std::uint32_t end = table_.header().segments_end.load();
  for (std::uint32_t id = 0; id < end; ++id) {
    if (live(id).state.load() == SegmentState::kNone || (live(id).all_paths.load() >> path & 1) == 0) continue;
    index_.for_each_in(id, [&](const IndexEntry& entry) { index_.unpublish(entry); });
  }
}

// Pages were deleted. What a path holds that cannot be reached must not come back, nor an older copy of one that can.
Status Store::forbid_return() {
  if (folder_.paths().known() == 1) return {};
  for (std::uint32_t path = 0; path < kMaxPaths; ++path) {
    if (folder_.paths()[path].flags != 0 && !path_in_use(path)) forget_path(path);
  }
  if (!path_in_use(0)) {
    return Error{Code::kIo, "path " + folder_.path() +
                                ": is out, and holds what should be deleted; close the store and delete its segments "
                                "folder"};
  }
  const std::lock_guard describe(describe_mutex_);  // the setup lock is the process's
  if (Status status = folder_.lock_setup(); !status) return status;
  const auto failed = folder_.paths().deleted([this](std::uint32_t path) { return path_in_use(path); });
  folder_.unlock_setup();
  if (!failed) return failed.error();
  for (const std::uint32_t path : *failed) take_out(path, "its tardis.path cannot be written");
  return {};
}

}  // namespace tardis
