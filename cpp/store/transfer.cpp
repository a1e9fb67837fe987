// SPDX-License-Identifier: Apache-2.0
#include "store/transfer.h"

#include <algorithm>
#include <cstddef>

#include "store/digest.h"

namespace tardis {
namespace {

// Large enough for a drive's best bandwidth, small enough that a batch spreads over every worker. A multiple of
// kChunkBytes.
constexpr std::uint64_t kRequestBytes = 1u << 20;
static_assert(kRequestBytes % kChunkBytes == 0);

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
  cut(*objects_.back());
  return objects_.size() - 1;
}

void Transfer::cut(Object& object) {
  const ObjectGeometry& g = object.geometry;
  const std::size_t before = spans_.size();
  if (g.part_stride <= kRequestBytes) {
    const auto parts_each = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, kRequestBytes / g.part_stride));
    for (std::uint32_t part = 0; part < g.parts; part += parts_each) {
      spans_.push_back({&object, part, std::min(part + parts_each, g.parts), 0, g.chunks_per_part, 0, 0});
    }
  } else {
    constexpr std::uint32_t chunks_each = kRequestBytes / kChunkBytes;
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

void Transfer::run(bool digests) {
  if (op_ == IoRequest::Op::kRead) {
    std::size_t pads = 0;
    for (const auto& object : objects_) {
      if (object->geometry.part_stride > object->geometry.part_bytes) pads += object->geometry.parts;
    }
    if (pads > 0) padding_ = AlignedBuffer(pads * kMaxPad, kMaxPad);
  }
  for (Span& span : spans_) describe(span);
  std::vector<IoRequest> requests(spans_.size());
  for (std::size_t i = 0; i < spans_.size(); ++i) {
    const Span& span = spans_[i];
    const ObjectGeometry& g = span.object->geometry;
    requests[i].op = op_;
    requests[i].file = span.object->file;
    requests[i].offset = span.object->offset + span.part * g.part_stride + span.first_chunk * kChunkBytes;
    requests[i].memory = std::span(iovecs_).subspan(span.first_iovec, span.iovecs);
  }
  if (digests) {
    for (const auto& object : objects_) {
      object->chunk_digests = std::make_unique_for_overwrite<std::uint64_t[]>(object->geometry.chunks());
    }
  }
  const IoRequest* first = requests.data();
  device_.run(requests, [&](IoRequest& request) { finished(spans_[&request - first], request.error, digests); });
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
