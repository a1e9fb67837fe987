// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/dma_space.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

namespace tardis::nvme {
namespace {

constexpr std::size_t kRemembered = 1024;  // unmapped ranges

std::string hex(std::uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(value));
  return text;
}

std::uint64_t pointer_value(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

}  // namespace

DmaSpace::DmaSpace(const DmaSpaceOptions& options) : options_(options), next_address_(options.first_address) {}

DmaSpace::~DmaSpace() = default;

std::size_t DmaSpace::range_above(std::uint64_t address) const {
  const auto above = std::upper_bound(ranges_.begin(), ranges_.end(), address, [](std::uint64_t a, const auto& range) {
    return a < range->address + range->bytes;
  });
  return static_cast<std::size_t>(above - ranges_.begin());
}

void DmaSpace::lock_readers() {
  for (Reader* reader : readers_) reader->lock_.lock();
}

void DmaSpace::unlock_readers() {
  for (Reader* reader : readers_) reader->lock_.unlock();
}

Result<std::uint64_t> DmaSpace::map(void* memory, std::size_t bytes, MemoryMover* mover, CopyEngine* engine) {
  const std::uint64_t pointer = pointer_value(memory), page = options_.page_bytes;
  if (memory == nullptr || bytes == 0 || pointer + bytes < pointer) {
    return Error{Code::kInvalidArgument,
                 "map: expected a range of memory, found " + hex(pointer) + " and " + std::to_string(bytes) + " bytes"};
  }
  std::unique_lock lock(mutex_);
  for (const auto& range : ranges_) {
    const std::uint64_t begin = pointer_value(range->memory);
    if (pointer < begin + range->bytes && begin < pointer + bytes) {
      return Error{Code::kInvalidArgument, "map: " + hex(pointer) + " + " + std::to_string(bytes) +
                                               " overlaps a range that is mapped at " + hex(begin) +
                                               "; unmap it first"};
    }
  }
  std::uint64_t address = pointer;
  if (options_.addresses == DmaSpaceOptions::Addresses::kTranslated) {
    address = next_address_ + pointer % page;
    next_address_ = (address + bytes + options_.gap + page - 1) / page * page;
  }
  auto range = std::make_unique<Range>(address, bytes, static_cast<std::byte*>(memory), mover, engine);
  const bool host = range->host();
  lock_readers();
  ranges_.insert(ranges_.begin() + static_cast<std::ptrdiff_t>(range_above(address)), std::move(range));
  std::erase_if(unmapped_, [&](const auto& old) { return old.first < address + bytes && address < old.second; });
  generation_.fetch_add(1, std::memory_order_release);
  unlock_readers();
  lock.unlock();
  if (host) {
    const std::lock_guard telling(listeners_mutex_);
    for (Listener* listener : listeners_) listener->mapped(memory, bytes);
  }
  return address;
}

Status DmaSpace::unmap(void* memory) {
  std::unique_ptr<Range> gone;
  {
    const std::lock_guard lock(mutex_);
    const auto found =
        std::find_if(ranges_.begin(), ranges_.end(), [&](const auto& range) { return range->memory == memory; });
    if (found == ranges_.end()) {
      return Error{Code::kNotFound, "unmap: expected the start of a mapped range, found " + hex(pointer_value(memory))};
    }
    lock_readers();
    gone = std::move(*found);
    ranges_.erase(found);
    if (unmapped_.size() == kRemembered) unmapped_.erase(unmapped_.begin());
    unmapped_.emplace_back(gone->address, gone->address + gone->bytes);
    generation_.fetch_add(1, std::memory_order_release);
    unlock_readers();
  }
  // Acquire: what a drive's transfer did to the memory is seen by the caller. The wait ends with those transfers, each
  // of which has its end in the medium below.
  while (gone->pins.load(std::memory_order_acquire) != 0) std::this_thread::sleep_for(std::chrono::microseconds(20));
  if (gone->host()) {
    const std::lock_guard telling(listeners_mutex_);
    for (Listener* listener : listeners_) listener->unmapped(memory);
  }
  return {};
}

std::vector<std::pair<void*, std::size_t>> DmaSpace::host_ranges() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<void*, std::size_t>> found;
  for (const auto& range : ranges_) {
    if (range->host()) found.emplace_back(range->memory, range->bytes);
  }
  return found;
}

void DmaSpace::add_listener(Listener& listener) {
  const std::lock_guard telling(listeners_mutex_);
  listeners_.push_back(&listener);
  for (const auto& [memory, bytes] : host_ranges()) listener.mapped(memory, bytes);
}

void DmaSpace::remove_listener(Listener& listener) {
  const std::lock_guard telling(listeners_mutex_);
  if (std::erase(listeners_, &listener) == 0) return;
  for (const auto& [memory, bytes] : host_ranges()) listener.unmapped(memory);
}

std::size_t DmaSpace::mapped_ranges() const {
  const std::lock_guard lock(mutex_);
  return ranges_.size();
}

std::size_t DmaSpace::mapped_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& range : ranges_) bytes += range->bytes;
  return bytes;
}

DmaSpace::Reader::Reader(DmaSpace& space) : space_(space) {
  const std::lock_guard lock(space_.mutex_);
  space_.readers_.push_back(this);
}

DmaSpace::Reader::~Reader() {
  const std::lock_guard lock(space_.mutex_);
  std::erase(space_.readers_, this);
}

DmaSpace::Range* DmaSpace::Reader::find(std::uint64_t address) {
  if (last_generation_ == space_.generation_.load(std::memory_order_relaxed) && last_ != nullptr &&
      address - last_->address < last_->bytes) {
    return last_;
  }
  const std::size_t at = space_.range_above(address);
  if (at == space_.ranges_.size() || space_.ranges_[at]->address > address) return nullptr;
  last_ = space_.ranges_[at].get();
  last_generation_ = space_.generation_.load(std::memory_order_relaxed);
  return last_;
}

std::byte* DmaSpace::Reader::translate(std::uint64_t address, std::size_t bytes) {
  const Range* range = find(address);
  if (range == nullptr || !range->host() || range->bytes - (address - range->address) < bytes) return nullptr;
  return range->memory + (address - range->address);
}

bool DmaSpace::Reader::was_mapped(std::uint64_t address) const {
  return std::any_of(space_.unmapped_.begin(), space_.unmapped_.end(),
                     [&](const auto& old) { return old.first <= address && address < old.second; });
}

}  // namespace tardis::nvme
