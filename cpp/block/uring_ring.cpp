// SPDX-License-Identifier: Apache-2.0
#include "block/uring_ring.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

namespace tardis {
namespace {

// Registered files are bounded by RLIMIT_NOFILE; files beyond the table are used by descriptor.
constexpr std::size_t kFileSlots = 1024;

std::size_t file_slots() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 64;
  return std::clamp<std::size_t>(limit.rlim_cur, 2, kFileSlots);
}

}  // namespace

std::unique_ptr<UringRing> UringRing::create(unsigned entries, int keep_open_fd, Failure* failure) {
  auto made = std::make_unique<UringRing>(Passkey());
  // Without COOP_TASKRUN every completion interrupts the submitting thread, which will ask for them anyway; with
  // TASKRUN_FLAG it sees that there are some. Kernels before 5.19 do not know them and say EINVAL.
  int result = -EINVAL;
  for (const unsigned flags :
       {IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG, IORING_SETUP_CLAMP}) {
    result = io_uring_queue_init(entries, &made->ring_, flags);
    if (result != -EINVAL) break;
  }
  if (result < 0) {
    *failure = {-result, "io_uring_setup"};
    return nullptr;
  }
  made->initialised_ = true;
  // The memory of iovecs may go once it is submitted, completions are never dropped, and READ/WRITE exist (Linux 5.6).
  constexpr unsigned kNeeded = IORING_FEAT_SUBMIT_STABLE | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;
  if ((made->ring_.features & kNeeded) != kNeeded) {
    *failure = {EOPNOTSUPP, "io_uring of Linux 5.6 or newer"};
    return nullptr;
  }
  io_uring_ring_dontfork(&made->ring_);

  std::vector<int> descriptors(file_slots(), -1);
  descriptors[0] = keep_open_fd;
  result = io_uring_register_files(&made->ring_, descriptors.data(), static_cast<unsigned>(descriptors.size()));
  made->files_registered_ = result == 0;
  if (result < 0 && keep_open_fd >= 0) {
    *failure = {-result, "io_uring_register (files)"};
    return nullptr;
  }
  if (made->files_registered_) made->slots_.resize(descriptors.size() - 1);
  return made;
}

UringRing::~UringRing() {
  if (initialised_) io_uring_queue_exit(&ring_);
}

void UringRing::set_file(io_uring_sqe* sqe, FileId id, const std::shared_ptr<OpenFile>& file) {
  if (id < slots_.size()) {
    if (slots_[id] != file) {
      const int fd = file->fd.get();
      if (io_uring_register_files_update(&ring_, id + 1, &fd, 1) == 1) slots_[id] = file;
    }
    if (slots_[id] == file) {
      sqe->fd = static_cast<int>(id + 1);
      sqe->flags |= IOSQE_FIXED_FILE;
      return;
    }
  }
  sqe->fd = file->fd.get();
}

void UringRing::drop_closed_files() {
  for (std::size_t id = 0; id < slots_.size(); ++id) {
    if (slots_[id] == nullptr || !slots_[id]->closed.load()) continue;
    const int none = -1;
    io_uring_register_files_update(&ring_, static_cast<unsigned>(id + 1), &none, 1);
    slots_[id] = nullptr;
  }
}

std::unique_ptr<UringRing> UringPool::acquire(UringRing::Failure* failure) {
  auto ring = take(failure);
  if (ring != nullptr) buffers_.attach(*ring);
  return ring;
}

std::unique_ptr<UringRing> UringPool::take(UringRing::Failure* failure) {
  std::unique_lock lock(mutex_);
  bool may_create = true;
  for (;;) {
    if (!idle_.empty()) {
      auto ring = std::move(idle_.back());
      idle_.pop_back();
      return ring;
    }
    if (may_create && rings_ < max_rings_) {
      ++rings_;
      lock.unlock();
      auto ring = UringRing::create(entries_, keep_open_fd_, failure);
      if (ring != nullptr) return ring;
      lock.lock();
      --rings_;
      may_create = false;  // no descriptors or memory for another one: share those there are
      continue;
    }
    if (rings_ == 0) return nullptr;
    returned_.wait(lock);
  }
}

void UringPool::release(std::unique_ptr<UringRing> ring) {
  std::unique_lock lock(mutex_, std::defer_lock);
  do {
    if (lock.owns_lock()) lock.unlock();
    if (!ring->broken) buffers_.attach(*ring);  // may pin memory: the others go on meanwhile
    lock.lock();
    // Under the lock, so that memory unregistered meanwhile is let go of either here or by attach_buffers().
  } while (!ring->broken && !buffers_.up_to_date(*ring));
  if (ring->broken) {
    --rings_;
  } else {
    ring->drop_closed_files();  // under the lock for the same reason
    idle_.push_back(std::move(ring));
  }
  lock.unlock();
  // All: a waiter that finds no ring left may have to give up.
  returned_.notify_all();
}

void UringPool::drop_closed_files() {
  const std::lock_guard lock(mutex_);
  for (auto& ring : idle_) ring->drop_closed_files();
}

void UringPool::attach_buffers() {
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto outdated =
        std::find_if(idle_.begin(), idle_.end(), [&](const auto& ring) { return !buffers_.up_to_date(*ring); });
    if (outdated == idle_.end()) return;
    auto ring = std::move(*outdated);
    idle_.erase(outdated);
    lock.unlock();
    release(std::move(ring));
    lock.lock();
  }
}

}  // namespace tardis
