// SPDX-License-Identifier: Apache-2.0
// The index in host memory, by the code that runs on the device.
#pragma once

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "gstore/index_reader.h"
#include "gstore/index_writer.h"

namespace tardis::gstore {

struct HostWarp {
  using Words = std::array<std::uint64_t, kLanes>;

  Words words(const std::uint64_t* from, int n) const {
    Words out{};
    for (int lane = 0; lane < n; ++lane) out[static_cast<std::size_t>(lane)] = load(from + lane);
    return out;
  }
  std::uint64_t at(const Words& words, int lane) const { return words[static_cast<std::size_t>(lane)]; }
  std::uint64_t own(const Words& words, int lane) const { return at(words, lane); }
  template <class F>
  std::uint32_t ballot(F f) const {
    std::uint32_t mask = 0;
    for (int lane = 0; lane < kLanes; ++lane) mask |= static_cast<std::uint32_t>(f(lane)) << lane;
    return mask;
  }
  template <class F>
  void first_lanes(int n, F f) const {
    for (int lane = 0; lane < n; ++lane) f(lane);
  }
  template <class F>
  std::uint64_t leader(F f) const {
    return f();
  }
  void ordered() const {}
};

inline tardis_gpu_index_answer find_on_host(const tardis_gpu_index& index, const Key& key, std::uint16_t space) {
  const Place place = place_of(key, space, index.buckets);
  tardis_gpu_index_answer answer = miss();
  for (const std::uint32_t bucket : {place.first, place.second}) {
    const std::uint64_t* words = bucket_words(index, bucket);
    const std::uint64_t header = load(words + kHeaderLane);
    for (int lane = 1; lane < kLanes; ++lane) {
      const std::uint64_t seen = load(words + lane);
      if (!leads_to(seen, place.tag)) continue;
      const Found found = examine(words + lane, record_words(index, bucket, lane), seen, place.tag, key, space, answer);
      if (found == Found::kFound) return answer;
      if (found == Found::kUnknown) answer.status = static_cast<std::uint32_t>(found);
    }
    if (!has_overflow(header)) break;
  }
  return answer;
}

class HostIndex {
 public:
  explicit HostIndex(std::uint64_t buckets) : memory_(allocate(buckets * kBucketBytes)) {
    view_.words = static_cast<std::uint64_t*>(memory_.get());
    view_.records = view_.words + buckets * kLanes;
    view_.buckets = static_cast<std::uint32_t>(buckets);
  }

  const tardis_gpu_index& view() const { return view_; }
  std::uint64_t bytes() const { return view_.buckets * kBucketBytes; }

  Status apply(const tardis_gpu_index_entry& change) {
    HostWarp warp;
    return IndexWriter<HostWarp>(warp, view_).apply(&change);
  }

  tardis_gpu_index_answer find(const Key& key, std::uint16_t space) const { return find_on_host(view_, key, space); }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  static std::unique_ptr<void, Free> allocate(std::uint64_t bytes) {
    void* memory = std::aligned_alloc(256, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, 0, bytes);
    return std::unique_ptr<void, Free>(memory);
  }

  std::unique_ptr<void, Free> memory_;
  tardis_gpu_index view_{};
};

}  // namespace tardis::gstore
