// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/cached_medium.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace tardis::nvme {
namespace {

constexpr std::uint64_t kSector = 512;

void gather(std::span<const iovec> memory, std::byte* to) {
  for (const iovec& part : memory) {
    std::memcpy(to, part.iov_base, part.iov_len);
    to += part.iov_len;
  }
}

void scatter(std::span<const iovec> memory, std::uint64_t at, const std::byte* from, std::uint64_t bytes) {
  for (const iovec& part : memory) {
    if (at >= part.iov_len) {
      at -= part.iov_len;
      continue;
    }
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(bytes, part.iov_len - at));
    std::memcpy(static_cast<std::byte*>(part.iov_base) + at, from, n);
    from += n;
    bytes -= n;
    at = 0;
    if (bytes == 0) return;
  }
}

}  // namespace

CachedMedium::CachedMedium(std::shared_ptr<Medium> base, const CacheOptions& options)
    : base_(std::move(base)), options_(options) {}

int CachedMedium::to_base(MediumRequest below, MediumRequest& above) {
  below.not_before = 0;
  base_->run({&below, 1}, [](MediumRequest&) {});
  above.not_before = std::max(above.not_before, below.not_before);
  return below.error;
}

void CachedMedium::run(std::span<MediumRequest> requests, const Completion& on_complete) {
  for (MediumRequest& request : requests) {
    {
      const std::lock_guard lock(mutex_);
      switch (request.op) {
        case MediumRequest::Op::kRead:
          request.error = read(request);
          break;
        case MediumRequest::Op::kWrite:
        case MediumRequest::Op::kWriteZeroes:
          request.error = write(request);
          break;
        // Only advice, unless the namespace says that it reads as zero afterwards.
        case MediumRequest::Op::kDeallocate:
          request.error = deallocates_to_zero() ? write(request) : 0;
          break;
        case MediumRequest::Op::kFlush:
          request.error = flush(request);
          break;
      }
    }
    on_complete(request);
  }
}

int CachedMedium::read(MediumRequest& request) {
  if (const int error = to_base(request, request)) return error;
  static constexpr std::array<std::byte, kSector> kZeros{};
  const std::uint64_t end = (request.offset + request.bytes) / kSector;
  for (auto held = sectors_.lower_bound(request.offset / kSector); held != sectors_.end() && held->first < end;
       ++held) {
    const Write& newest = *held->second.back();
    const std::byte* data =
        newest.data.empty() ? kZeros.data() : newest.data.data() + (held->first * kSector - newest.offset);
    scatter(request.memory, held->first * kSector - request.offset, data, kSector);
  }
  return 0;
}

int CachedMedium::write(MediumRequest& request) {
  const bool zeros = request.op != MediumRequest::Op::kWrite;
  const std::uint64_t first = request.offset / kSector, end = (request.offset + request.bytes) / kSector;
  if (request.durable) {
    const int error = to_base(request, request);
    // What was written here before must not come back.
    if (error == 0) sectors_.erase(sectors_.lower_bound(first), sectors_.lower_bound(end));
    return error;
  }
  auto write = std::make_shared<Write>();
  write->offset = request.offset;
  write->bytes = request.bytes;
  if (!zeros) {
    write->data.resize(static_cast<std::size_t>(request.bytes));
    gather(request.memory, write->data.data());
  }
  for (std::uint64_t sector = first; sector < end; ++sector) sectors_[sector].push_back(write);
  held_bytes_ += request.bytes;
  return held_bytes_ > options_.most_bytes ? write_back(request) : 0;
}

int CachedMedium::write_back(MediumRequest& above) {
  std::vector<std::byte> data;
  for (auto held = sectors_.begin(); held != sectors_.end();) {
    const std::uint64_t first = held->first;
    data.clear();
    for (; held != sectors_.end() && held->first == first + data.size() / kSector; ++held) {
      const Write& newest = *held->second.back();
      const std::size_t at = data.size();
      data.resize(at + kSector);
      if (!newest.data.empty()) {
        std::memcpy(data.data() + at, newest.data.data() + (held->first * kSector - newest.offset), kSector);
      }
    }
    const iovec memory{data.data(), data.size()};
    MediumRequest below;
    below.op = MediumRequest::Op::kWrite;
    below.offset = first * kSector;
    below.memory = {&memory, 1};
    below.bytes = data.size();
    if (const int error = to_base(below, above)) return error;
  }
  sectors_.clear();
  held_bytes_ = 0;
  return 0;
}

int CachedMedium::flush(MediumRequest& request) {
  if (const int error = write_back(request)) return error;
  return to_base(request, request);
}

CachedMedium::Cut CachedMedium::power_cut(std::mt19937_64& random) {
  const std::lock_guard lock(mutex_);
  enum class Fate : std::uint8_t { kKept, kLost, kTorn };
  struct Outcome {
    Fate fate;
    std::map<std::uint64_t, bool> pieces;  // of a torn one: what is kept
  };
  std::map<const Write*, Outcome> outcomes;
  const auto outcome_of = [&](const Write* write) -> Outcome& {
    const auto [found, added] = outcomes.try_emplace(write);
    if (added) found->second.fate = static_cast<Fate>(random() % (write->bytes <= options_.atomic_bytes ? 2 : 3));
    return found->second;
  };
  // A medium cannot write less at a time than its granularity.
  const std::uint64_t torn_bytes = std::max(options_.torn_bytes, granularity());
  const auto survives = [&](const Write* write, std::uint64_t sector) {
    Outcome& outcome = outcome_of(write);
    if (outcome.fate != Fate::kTorn) return outcome.fate == Fate::kKept;
    const auto [piece, added] = outcome.pieces.try_emplace(sector * kSector / torn_bytes);
    if (added) piece->second = (random() & 1) != 0;
    return piece->second;
  };
  for (auto held = sectors_.begin(); held != sectors_.end();) {
    std::vector<WritePtr>& writes = held->second;
    // Every write meets its fate, also where a later one covers it.
    std::erase_if(writes, [&](const WritePtr& write) { return !survives(write.get(), held->first); });
    held = writes.empty() ? sectors_.erase(held) : std::next(held);
  }
  Cut cut;
  for (const auto& [write, outcome] : outcomes) {
    ++(outcome.fate == Fate::kKept ? cut.kept : outcome.fate == Fate::kLost ? cut.lost : cut.torn);
  }
  MediumRequest cut_off;
  (void)write_back(cut_off);  // a medium that fails now has lost the rest, too
  sectors_.clear();
  held_bytes_ = 0;
  return cut;
}

std::uint64_t CachedMedium::unflushed_bytes() const {
  const std::lock_guard lock(mutex_);
  return sectors_.size() * kSector;
}

}  // namespace tardis::nvme
