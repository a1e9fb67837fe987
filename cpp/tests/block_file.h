// SPDX-License-Identifier: Apache-2.0
// Contents of files and drives in memory, of which a test keeps many that are almost the same.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace tardis::testing {

inline constexpr std::uint64_t kSector = 512;  // what a drive writes whole or not at all

// The contents of one file, in blocks that copies share.
class BlockFile {
 public:
  std::uint64_t bytes() const { return bytes_; }
  void resize(std::uint64_t bytes) {
    bytes_ = bytes;
    blocks_.resize((bytes + kBlock - 1) / kBlock);
  }
  // [at, at + bytes), which shares its blocks; `at` is a multiple of a block.
  BlockFile slice(std::uint64_t at, std::uint64_t bytes) const {
    BlockFile part;
    part.resize(bytes);
    for (std::size_t i = 0; i < part.blocks_.size() && at / kBlock + i < blocks_.size(); ++i) {
      part.blocks_[i] = blocks_[at / kBlock + i];
    }
    return part;
  }
  void read(std::uint64_t at, void* out, std::uint64_t bytes) const {
    auto* to = static_cast<std::byte*>(out);
    for_blocks(at, bytes, [&](std::uint64_t block, std::uint64_t from, std::uint64_t n) {
      if (blocks_[block] == nullptr) {
        std::memset(to, 0, n);
      } else {
        std::memcpy(to, blocks_[block]->data() + from, n);
      }
      to += n;
    });
  }
  void write(std::uint64_t at, const void* data, std::uint64_t bytes) {
    const auto* source = static_cast<const std::byte*>(data);
    for_blocks(at, bytes, [&](std::uint64_t block, std::uint64_t from, std::uint64_t n) {
      std::shared_ptr<Block>& own = blocks_[block];
      if (own == nullptr) {
        own = std::make_shared<Block>();
        own->fill(std::byte{0});
      } else if (own.use_count() > 1) {
        own = std::make_shared<Block>(*own);
      }
      std::memcpy(own->data() + from, source, n);
      source += n;
    });
  }

 private:
  static constexpr std::uint64_t kBlock = 4096;
  using Block = std::array<std::byte, kBlock>;

  template <class Visit>
  static void for_blocks(std::uint64_t at, std::uint64_t bytes, Visit visit) {
    while (bytes > 0) {
      const std::uint64_t from = at % kBlock, n = std::min(kBlock - from, bytes);
      visit(at / kBlock, from, n);
      at += n;
      bytes -= n;
    }
  }

  std::uint64_t bytes_ = 0;
  std::vector<std::shared_ptr<Block>> blocks_;
};

// The bit `bit` % 8 of byte `bit` / 8.
inline void flip_bit_of(BlockFile& file, std::uint64_t bit) {
  std::uint8_t byte = 0;
  file.read(bit / 8, &byte, 1);
  byte = static_cast<std::uint8_t>(byte ^ 1u << bit % 8);
  file.write(bit / 8, &byte, 1);
}

}  // namespace tardis::testing
