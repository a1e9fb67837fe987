// SPDX-License-Identifier: Apache-2.0
// A thread that plays the loader's part at a board badly: what the GPU does then is part of what it promises. C++17,
// for programs that nvcc compiles.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "tardis/loads.h"

namespace tardis::gstore::testing {

enum class Playing {
  kNeverReady,
  kNoAnswer,     // to a layer that is told bad, as each is: no ring shall read
  kUnknownPage,  // names a page that the load has not
  kTooMany,      // says more repairs than there can be
};

class LoadPlayer {
 public:
  LoadPlayer(Playing playing, const tardis_load_shape& shape, const tardis_load_board_layout& layout,
             std::uint8_t* board, std::uint8_t* staging)
      : playing_(playing), shape_(shape), layout_(layout), board_(board), staging_(staging), thread_([this] {
          play();
        }) {}
  // The stream has passed the load.
  ~LoadPlayer() {
    over_.store(true, std::memory_order_relaxed);
    thread_.join();
  }
  LoadPlayer(const LoadPlayer&) = delete;
  LoadPlayer& operator=(const LoadPlayer&) = delete;

 private:
  std::uint32_t* words(std::uint64_t offset) const { return reinterpret_cast<std::uint32_t*>(board_ + offset); }
  // Release: forbids that it is seen before what was written earlier.
  static void tell(std::uint32_t* word, std::uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

  void play() {
    if (playing_ == Playing::kNeverReady) return;
    tell(words(0), TARDIS_LOAD_GOOD);  // ring_pages stays 0
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      while (__atomic_load_n(words(layout_.landed) + layer, __ATOMIC_ACQUIRE) == TARDIS_LOAD_PENDING) {
        if (over_.load(std::memory_order_relaxed)) return;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      if (playing_ == Playing::kNoAnswer) return;
      auto* const list = reinterpret_cast<tardis_load_repair*>(board_ + layout_.list);
      list[0] = {reinterpret_cast<std::uint64_t>(staging_), shape_.most_pages, 0};
      words(layout_.repairs)[layer] = playing_ == Playing::kTooMany ? shape_.most_repairs + 1 : 1;
      tell(words(layout_.repaired) + layer, TARDIS_LOAD_GOOD);
    }
  }

  const Playing playing_;
  const tardis_load_shape& shape_;
  const tardis_load_board_layout& layout_;
  std::uint8_t* const board_;
  std::uint8_t* const staging_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace tardis::gstore::testing
