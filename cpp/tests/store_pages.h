// SPDX-License-Identifier: Apache-2.0
// Pages whose key and bytes follow from (namespace, chain, index), so that any byte read back can be checked without a
// record of what was written.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/checksum.h"
#include "store/format.h"

namespace tardis::testing {

inline std::uint64_t mix(std::uint64_t x) {  // SplitMix64's finalizer
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline Hash256 page_key(std::uint64_t chain, std::uint64_t index) {
  Hash256 key;
  for (std::uint64_t word = 0; word < 4; ++word) {
    const std::uint64_t value = mix(mix(chain * 4 + word) ^ (index * 0x100000001B3u));
    std::memcpy(key.data() + word * 8, &value, 8);
  }
  return key;
}

// Byte `at` of a page is byte at % 8 of word at / 8 of its stream.
inline void fill_page(std::uint8_t* out, std::uint64_t bytes, std::uint64_t seed, std::uint64_t at = 0) {
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t word = mix(seed + (at + done) / 8);
    const std::uint64_t skip = (at + done) % 8, n = std::min<std::uint64_t>(8 - skip, bytes - done);
    std::memcpy(out + done, reinterpret_cast<const std::uint8_t*>(&word) + skip, n);
    done += n;
  }
}

inline std::uint64_t page_seed(std::uint32_t space, const Hash256& key) {
  std::uint64_t word;
  std::memcpy(&word, key.data() + 8, 8);
  return mix(word ^ (std::uint64_t{space} << 56));
}

// Memory for a batch of objects of one layout, with the address list that the store takes. Regions of a page are spread
// apart by `gap` bytes, so that nothing is contiguous by chance.
class PageMemory {
 public:
  PageMemory(std::uint32_t parts, std::vector<std::uint64_t> regions, std::size_t pages, std::size_t distance = 0,
             std::size_t gap = 64)
      : parts_(parts), regions_(std::move(regions)), pages_(pages) {
    std::uint64_t page = 0;
    for (const std::uint64_t region : regions_) page += region + gap;
    memory_.assign(page * parts_ * pages_ + distance + 4096, 0xA5);
    auto at = (reinterpret_cast<std::uint64_t>(memory_.data()) + 4095) / 4096 * 4096 + distance;
    for (std::size_t i = 0; i < pages_ * parts_; ++i) {
      for (const std::uint64_t region : regions_) {
        addresses_.push_back(at);
        at += region + gap;
      }
    }
  }

  std::size_t pages() const { return pages_; }
  const std::uint64_t* pieces(std::size_t page = 0) const {
    return addresses_.data() + page * parts_ * regions_.size();
  }
  std::uint64_t page_bytes() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t region : regions_) sum += region;
    return sum * parts_;
  }

  void write(std::size_t page, std::uint64_t seed) {
    visit(page,
          [&](std::uint8_t* memory, std::uint64_t bytes, std::uint64_t at) { fill_page(memory, bytes, seed, at); });
  }
  void poison() {
    for (std::size_t page = 0; page < pages_; ++page) {
      visit(page, [](std::uint8_t* memory, std::uint64_t bytes, std::uint64_t) { std::memset(memory, 0x5A, bytes); });
    }
  }
  bool holds(std::size_t page, std::uint64_t seed) const {
    bool same = true;
    std::vector<std::uint8_t> expected;
    visit(page, [&](std::uint8_t* memory, std::uint64_t bytes, std::uint64_t at) {
      expected.resize(bytes);
      fill_page(expected.data(), bytes, seed, at);
      same = same && std::memcmp(memory, expected.data(), bytes) == 0;
    });
    return same;
  }

 private:
  template <class Visit>
  void visit(std::size_t page, Visit visit) const {
    std::uint64_t at = 0;
    const std::uint64_t* address = pieces(page);
    for (std::uint32_t part = 0; part < parts_; ++part) {
      for (const std::uint64_t bytes : regions_) {
        visit(reinterpret_cast<std::uint8_t*>(*address++), bytes, at);
        at += bytes;
      }
    }
  }

  std::uint32_t parts_;
  std::vector<std::uint64_t> regions_;
  std::size_t pages_;
  std::vector<std::uint8_t> memory_;
  std::vector<std::uint64_t> addresses_;
};

}  // namespace tardis::testing
