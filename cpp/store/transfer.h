// SPDX-License-Identifier: Apache-2.0
// Moves a batch of whole objects between memory and slots, and digests them while their bytes are warm in cache.
// Objects that lie side by side in a file share requests.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/aligned_buffer.h"
#include "block/block_device.h"
#include "store/format.h"

namespace tardis {

class Transfer {
 public:
  // `spread`: the files lie on several drives, which are to work at the same time.
  Transfer(BlockDevice& device, IoRequest::Op op, bool spread = false) : device_(device), op_(op), spread_(spread) {}
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // `pieces`: parts * regions addresses, [part][region]; must stay valid until run() returns. Returns the object's
  // position.
  std::size_t add(FileId file, std::uint64_t offset, const ObjectGeometry& geometry, const std::uint64_t* pieces);

  // Moves everything; with `digests`, also computes every digest. Call once.
  void run(bool digests);

  std::size_t size() const { return objects_.size(); }
  int error(std::size_t object) const { return objects_[object]->error.load(std::memory_order_relaxed); }
  std::uint64_t root(std::size_t object) const { return objects_[object]->root; }
  // [part][chunk]
  const std::uint64_t* chunk_digests(std::size_t object) const { return objects_[object]->chunk_digests.get(); }

 private:
  struct Object {
    FileId file;
    std::uint64_t offset;
    ObjectGeometry geometry;
    const std::uint64_t* pieces;
    std::unique_ptr<std::uint64_t[]> chunk_digests;
    std::uint64_t root = 0;
    std::atomic<std::uint32_t> unfinished{0};
    std::atomic<int> error{0};
  };
  // Chunks [first, last) of parts [part, end_part) of one object; several parts are always whole.
  struct Span {
    Object* object;
    std::uint32_t part, end_part;
    std::uint32_t first_chunk, last_chunk;
    std::size_t first_iovec, iovecs;

    std::uint64_t offset() const;
    std::uint64_t bytes() const;
  };
  // Spans [first, last) that one request moves.
  struct Group {
    std::size_t first, last;
    bool failed = false;
  };

  void cut(Object& object, std::uint64_t request_bytes);
  void join(std::uint64_t request_bytes);  // spans into groups of up to that many bytes
  void describe(Span& span);
  void move(std::vector<Group>& groups, bool digests);
  void finished(const Span& span, int error, bool digests);

  BlockDevice& device_;
  IoRequest::Op op_;
  const bool spread_;
  std::vector<std::unique_ptr<Object>> objects_;
  std::vector<Span> spans_;
  std::vector<Group> groups_;
  std::vector<iovec> iovecs_;
  std::size_t pads_ = 0;   // iovecs that stand for padding between parts
  AlignedBuffer padding_;  // one block for each of them when reading, so that no two requests share memory
};

}  // namespace tardis
