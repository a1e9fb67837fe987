// SPDX-License-Identifier: Apache-2.0
#include "block/bounce_pool.h"

namespace tardis {

BouncePool::Lease BouncePool::acquire() {
  std::unique_lock lock(mutex_);
  returned_.wait(lock, [this] { return unused_ > 0 || !free_.empty(); });
  return take(lock);
}

std::optional<BouncePool::Lease> BouncePool::try_acquire() {
  std::unique_lock lock(mutex_);
  if (unused_ == 0 && free_.empty()) return std::nullopt;
  return take(lock);
}

BouncePool::Lease BouncePool::take(std::unique_lock<std::mutex>& lock) {
  if (!free_.empty()) {
    AlignedBuffer buffer = std::move(free_.back());
    free_.pop_back();
    return Lease(this, std::move(buffer));
  }
  --unused_;
  lock.unlock();
  auto made = AlignedBuffer::allocate(bytes_, alignment_);
  return Lease(this, made ? std::move(*made) : AlignedBuffer());
}

void BouncePool::give_back(AlignedBuffer buffer) {
  {
    const std::lock_guard lock(mutex_);
    if (buffer.data() != nullptr) {
      free_.push_back(std::move(buffer));
    } else {
      ++unused_;
    }
  }
  returned_.notify_one();
}

}  // namespace tardis
