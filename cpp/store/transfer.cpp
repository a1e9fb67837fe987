// SPDX-License-Identifier: Apache-2.0
#include "store/transfer.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "block/interleave.h"
#include "store/digest.h"

namespace tardis {
namespace {

// Large enough for a drive's best bandwidth, small enough that a batch spreads over every worker. A device that joins
// requests says what suits it.
constexpr std::uint64_t kRequestBytes = 1u << 20;
// A batch of writes is waited for as a whole, and smaller ones leave less to wait for at its end.
constexpr std::uint64_t kWriteRequestBytes = 512u << 10;
static_assert(kRequestBytes % kChunkBytes == 0 && kWriteRequestBytes % kChunkBytes == 0);
// Ranges of memory in a request of several objects: the kernel cuts a request at 256 of them.
constexpr std::size_t kMaxJoinedIovecs = 256;

constexpr std::size_t kMaxPad = 4096;  // padding is shorter than a block, and a block is at most this
alignas(kMaxPad) constexpr std::byte kZeros[kMaxPad] = {};

}  // namespace

std::size_t Transfer::add(FileId file, std::uint64_t offset, const ObjectGeometry& geometry,
                          const std::uint64_t* pieces) {
  auto object = std::make_unique<Object>();
  object->file = file;
  object->offset = offset;
  object->geometry = geometry;
  object->pieces = pieces;
  objects_.push_back(std::move(object));
  return objects_.size() - 1;
}

std::uint64_t Transfer::Span::offset() const {
  return object->offset + part * object->geometry.part_stride + first_chunk * kChunkBytes;
}

std::uint64_t Transfer::Span::bytes() const {
  const ObjectGeometry& g = object->geometry;
  const std::uint64_t last_part = last_chunk == g.chunks_per_part ? g.part_stride : last_chunk * kChunkBytes;
  return (end_part - part - 1) * g.part_stride + last_part - first_chunk * kChunkBytes;
}

void Transfer::cut(Object& object, std::uint64_t request_bytes) {
  const ObjectGeometry& g = object.geometry;
  const std::size_t before = spans_.size();
  if (g.part_stride <= request_bytes) {
    const auto parts_each = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, request_bytes / g.part_stride));
    for (std::uint32_t part = 0; part < g.parts; part += parts_each) {
      spans_.push_back({&object, part, std::min(part + parts_each, g.parts), 0, g.chunks_per_part, 0, 0});
    }
  } else {
    const auto chunks_each = static_cast<std::uint32_t>(request_bytes / kChunkBytes);
    for (std::uint32_t part = 0; part < g.parts; ++part) {
      for (std::uint32_t chunk = 0; chunk < g.chunks_per_part; chunk += chunks_each) {
        spans_.push_back({&object, part, part + 1, chunk, std::min(chunk + chunks_each, g.chunks_per_part), 0, 0});
      }
    }
  }
  object.unfinished = static_cast<std::uint32_t>(spans_.size() - before);
}

void Transfer::describe(Span& span) {
  const ObjectGeometry& g = span.object->geometry;
  span.first_iovec = iovecs_.size();
  const auto append = [&](std::uint64_t address, std::uint64_t bytes) {
    if (iovecs_.size() > span.first_iovec) {
      iovec& last = iovecs_.back();
      if (reinterpret_cast<std::uint64_t>(last.iov_base) + last.iov_len == address) {
        last.iov_len += bytes;
        return;
      }
    }
    iovecs_.push_back({reinterpret_cast<void*>(address), static_cast<std::size_t>(bytes)});
  };
  for (std::uint32_t part = span.part; part < span.end_part; ++part) {
    const std::uint64_t begin = span.first_chunk * kChunkBytes;
    const std::uint64_t end = std::min(span.last_chunk * kChunkBytes, g.part_bytes);
    std::uint64_t region_start = 0;
    for (std::uint32_t region = 0; region < g.regions; ++region) {
      const std::uint64_t from = std::max(begin, region_start);
      const std::uint64_t to = std::min(end, region_start + g.region_bytes[region]);
      if (from < to) append(span.object->pieces[part * g.regions + region] + (from - region_start), to - from);
      region_start += g.region_bytes[region];
    }
    const std::uint64_t pad = g.part_stride - g.part_bytes;
    if (span.last_chunk == g.chunks_per_part && pad > 0) {
      const std::byte* block = op_ == IoRequest::Op::kWrite ? kZeros : padding_.data() + pads_++ * kMaxPad;
      iovecs_.push_back({const_cast<std::byte*>(block), static_cast<std::size_t>(pad)});
    }
  }
  span.iovecs = iovecs_.size() - span.first_iovec;
}

void Transfer::join(std::uint64_t request_bytes) {
  if (request_bytes > 0)
    std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) {
      return std::pair(a.object->file, a.offset()) < std::pair(b.object->file, b.offset());
    });
  std::uint64_t bytes = 0;
  std::size_t iovecs = 0;
  for (std::size_t i = 0; i < spans_.size(); ++i) {
    describe(spans_[i]);
    const Span& span = spans_[i];
    const bool joins = i > 0 && span.object->file == spans_[i - 1].object->file &&
                       span.offset() == spans_[i - 1].offset() + spans_[i - 1].bytes() &&
                       bytes + span.bytes() <= request_bytes && iovecs + span.iovecs <= kMaxJoinedIovecs;
    if (joins) {
      groups_.back().last = i + 1;
    } else {
      groups_.push_back({i, i + 1});
      bytes = iovecs = 0;
    }
    bytes += span.bytes();
    iovecs += span.iovecs;
  }
}

void Transfer::move(std::vector<Group>& groups, bool digests) {
  std::vector<IoRequest> requests(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const Span& first = spans_[groups[i].first];
    const Span& last = spans_[groups[i].last - 1];
    requests[i].op = op_;
    requests[i].file = first.object->file;
    requests[i].offset = first.offset();
    requests[i].memory =
        std::span(iovecs_).subspan(first.first_iovec, last.first_iovec + last.iovecs - first.first_iovec);
  }
  const IoRequest* front = requests.data();
  device_.run(requests, [&](IoRequest& request) {
    Group& group = groups[static_cast<std::size_t>(&request - front)];
    group.failed = request.error != 0 && group.last - group.first > 1;
    if (group.failed) return;
    for (std::size_t i = group.first; i < group.last; ++i) finished(spans_[i], request.error, digests);
  });
}

void Transfer::run(bool digests) {
  const std::uint64_t most = op_ == IoRequest::Op::kWrite ? kWriteRequestBytes : kRequestBytes;
  const std::uint64_t join_bytes = std::min(device_.join_bytes() / kChunkBytes * kChunkBytes, most);
  for (const auto& object : objects_) cut(*object, join_bytes > 0 ? join_bytes : most);
  if (op_ == IoRequest::Op::kRead) {
    std::size_t pads = 0;
    for (const auto& object : objects_) {
      if (object->geometry.part_stride > object->geometry.part_bytes) pads += object->geometry.parts;
    }
    if (pads > 0) padding_ = AlignedBuffer(pads * kMaxPad, kMaxPad);
  }
  join(join_bytes);
  if (spread_) interleave(groups_, [&](const Group& group) { return spans_[group.first].object->file; });
  if (digests) {
    for (const auto& object : objects_) {
      object->chunk_digests = std::make_unique_for_overwrite<std::uint64_t[]>(object->geometry.chunks());
    }
  }
  move(groups_, digests);
  // Where a request of several objects failed, each of them is asked for alone: a bad sector costs only its own object.
  std::vector<Group> alone;
  for (const Group& group : groups_) {
    for (std::size_t i = group.first; group.failed && i < group.last; ++i) alone.push_back({i, i + 1});
  }
  if (!alone.empty()) move(alone, digests);
}

void Transfer::finished(const Span& span, int error, bool digests) {
  Object& object = *span.object;
  const ObjectGeometry& g = object.geometry;
  if (error != 0) {
    object.error.store(error, std::memory_order_relaxed);
  } else if (digests) {
    for (std::uint32_t part = span.part; part < span.end_part; ++part) {
      digest_chunks(g, object.pieces + std::size_t{part} * g.regions, span.first_chunk, span.last_chunk,
                    object.chunk_digests.get() + std::size_t{part} * g.chunks_per_part + span.first_chunk);
    }
  }
  // acq_rel: the last span to finish reads the digests that the others wrote.
  if (object.unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1 && digests &&
      object.error.load(std::memory_order_relaxed) == 0) {
    object.root = digest_root(g, object.chunk_digests.get());
  }
}

}  // namespace tardis
