// SPDX-License-Identifier: Apache-2.0
// The store of a program that restores from it on a GPU: objects whose bytes follow from their number, and its mirror.
// For code that cannot include the store (C++17).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpu_gstore_objects.h"
#include "gstore/mirror_batch.h"
#include "tardis/tardis.h"

namespace tardis {
class Store;
}

namespace tardis::gstore::testing {

struct ObjectShape {
  std::uint32_t layers = 1, sides = 2, page_bytes = 16 << 10;
  std::uint64_t layer_bytes() const { return std::uint64_t{sides} * page_bytes; }
  std::uint64_t bytes() const { return layers * layer_bytes(); }
  std::uint32_t layer_digests() const { return static_cast<std::uint32_t>((layer_bytes() + (16 << 10) - 1) >> 14); }
  std::uint32_t digests() const { return layers * layer_digests(); }
};

// Word `word` of an object.
TARDIS_GSTORE_FUNCTION std::uint64_t object_word(std::uint64_t number, std::uint64_t word) {
  return scramble(scramble(number ^ 0x5EED) + word);
}

class RestoreStore {
 public:
  // In a new folder below `parent`, with room for this many objects.
  static std::unique_ptr<RestoreStore> open(const std::string& parent, const ObjectShape& shape, std::uint64_t objects);
  virtual ~RestoreStore() = default;

  virtual Store* store() = 0;
  virtual tardis_store* handle() = 0;       // of the C ABI
  virtual std::uint32_t space() const = 0;  // its namespace
  // Every function ends the program where the store refuses.
  virtual void set(const std::vector<std::uint64_t>& numbers) = 0;
  // Objects that somebody else made, [layer][side] each.
  virtual void set_from(const std::vector<std::uint64_t>& numbers, const std::vector<std::uint64_t>& addresses) = 0;
  virtual void remove(std::uint64_t number) = 0;
  virtual bool has(std::uint64_t number) = 0;
  virtual void corrupt(std::uint64_t number, std::uint64_t byte) = 0;  // behind the store's back
  virtual bool get(std::uint64_t number) = 0;                          // whether its bytes can be had, and are right
  // Bytes a second that so many threads read of the store's files by pread, `each` at a time, over and over into
  // `window` bytes at `memory`.
  virtual double read_rate(unsigned threads, void* memory, std::uint64_t window, std::uint64_t bytes,
                           std::uint64_t each) = 0;

  virtual void start_mirror(std::uint32_t file_blocks, std::uint32_t block_shift, std::uint64_t* page_blocks,
                            std::uint64_t* digests) = 0;
  virtual void scan(MirrorBatch& batch) = 0;
  virtual void expect(std::uint64_t number, std::uint64_t handle) = 0;
  virtual void attached(MirrorBatch& batch, const std::uint8_t* statuses) = 0;
  virtual void adopted(MirrorBatch& batch, const std::uint64_t* handles) = 0;
  virtual void left(const MirrorBatch& batch, const std::uint8_t* statuses) = 0;
};

}  // namespace tardis::gstore::testing
