// SPDX-License-Identifier: Apache-2.0
// A thread that plays the loader's part at a board for one load at a time, and can be told to play it badly: what the
// GPU does then is part of what it promises. C++17, for programs that nvcc compiles.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "gio/iocb.h"
#include "gpu_restore_store.h"
#include "tardis/gio_store.h"
#include "tardis/loads.h"

namespace tardis::gstore::testing {

enum class Playing {
  kWell,
  kNeverReady,
  kNoAnswer,     // to a layer that is told bad
  kUnknownPage,  // names a page that the load has not
  kTooMany,      // says more repairs than there can be
};

class LoadPlayer {
 public:
  LoadPlayer(RestoreStore& store, const ObjectShape& shape, const tardis_load_shape& load_shape,
             const tardis_load_board_layout& layout, std::uint8_t* staging)
      : store_(store), shape_(shape), load_(load_shape), layout_(layout), staging_(staging) {}
  ~LoadPlayer() {
    if (thread_.joinable()) end();
  }
  LoadPlayer(const LoadPlayer&) = delete;
  LoadPlayer& operator=(const LoadPlayer&) = delete;

  void begin(const std::vector<std::uint64_t>& numbers, bool use_rings, std::uint8_t* board, Playing playing) {
    numbers_ = numbers;
    use_rings_ = use_rings;
    board_ = board;
    playing_ = playing;
    good_ = false;
    repaired_ = 0;
    ended_ = 0;
    thread_ = std::thread([this] { play(); });
  }
  // The stream has passed the load. Whether every layer was good or repaired.
  bool end() {
    __atomic_store_n(&ended_, 1, __ATOMIC_RELEASE);
    thread_.join();
    return good_;
  }
  std::uint32_t repaired() const { return repaired_; }  // parts
  double seconds_to_ready() const { return to_ready_; }

 private:
  template <class T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(board_ + offset);
  }
  void need(tardis_code code, const char* what, char* error) const {
    if (code == TARDIS_OK) return;
    std::fprintf(stderr, "%s: %s\n", what, error == nullptr ? "" : error);
    std::_Exit(1);
  }
  std::uint32_t await(const std::uint32_t* word) const {
    for (;;) {
      const std::uint32_t told = __atomic_load_n(word, __ATOMIC_ACQUIRE);
      if (told != TARDIS_LOAD_PENDING || __atomic_load_n(&ended_, __ATOMIC_ACQUIRE) != 0) return told;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  static void tell(std::uint32_t* word, std::uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

  void play() {
    if (playing_ == Playing::kNeverReady) return;
    const auto begin = std::chrono::steady_clock::now();
    keys_.resize(numbers_.size());
    for (std::size_t i = 0; i < numbers_.size(); ++i) keys_[i] = key_of(numbers_[i]);
    const auto* const hashes = reinterpret_cast<const std::uint8_t*>(keys_.data());
    tardis_lease* lease = nullptr;
    std::size_t leased = 0;
    char* error = nullptr;
    need(tardis_lease_acquire(store_.handle(), store_.space(), hashes, keys_.size(), &lease, &leased, &error), "lease",
         error);
    std::vector<std::uint8_t> proven(keys_.size());
    bool whole = leased == keys_.size();
    if (whole) {
      need(tardis_lease_blocks(lease, 4096, at<std::uint64_t>(layout_.blocks), nullptr, nullptr, &error), "blocks",
           error);
      need(tardis_lease_digests(store_.handle(), store_.space(), lease, at<std::uint64_t>(layout_.digests),
                                proven.data(), &error),
           "digests", error);
      for (const std::uint8_t is : proven) whole = whole && is != 0;
    }
    auto* const board = at<tardis_load_board>(0);
    tell(&board->ring_pages, whole && use_rings_ ? static_cast<std::uint32_t>(keys_.size()) : 0);
    tell(&board->ready, TARDIS_LOAD_GOOD);
    to_ready_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    good_ = whole;
    for (std::uint32_t layer = 0; layer < load_.layers; ++layer) {
      if (!good_) {
        tell(at<std::uint32_t>(layout_.repaired) + layer, TARDIS_LOAD_BAD);
        continue;
      }
      const std::uint32_t landed = await(at<std::uint32_t>(layout_.landed) + layer);
      if (landed == TARDIS_LOAD_GOOD) continue;
      if (landed == TARDIS_LOAD_PENDING) good_ = false;  // the load was over before
      if (landed != TARDIS_LOAD_BAD) break;
      if (playing_ == Playing::kNoAnswer) {
        good_ = false;
        break;
      }
      good_ = repair(layer);
      tell(at<std::uint32_t>(layout_.repaired) + layer, good_ ? TARDIS_LOAD_GOOD : TARDIS_LOAD_BAD);
    }
    tardis_lease_end(lease);
    objects_.clear();
  }

  bool is_done(std::uint32_t page) const {
    const auto* const statuses = at<std::uint32_t>(layout_.statuses);
    for (std::uint32_t i = 0; i < load_.commands_per_page; ++i) {
      if (gio::IoStatus{statuses[page * load_.commands_per_page + i]}.end() != gio::IoEnd::kDone) return false;
    }
    return true;
  }
  bool repair(std::uint32_t layer) {
    const bool all = at<tardis_load_board>(0)->ring_pages == 0;
    auto* const list = at<tardis_load_repair>(layout_.list);
    std::uint32_t repairs = 0;
    objects_.resize(keys_.size());
    for (std::uint32_t page = 0; page < keys_.size(); ++page) {
      if (!all && is_done(page)) continue;
      if (repairs == load_.most_repairs) return false;
      if (objects_[page].empty() && !read(page)) return false;
      std::uint8_t* const part = staging_ + repairs * part_stride();
      std::memcpy(part, objects_[page].data() + layer * shape_.layer_bytes(), shape_.layer_bytes());
      list[repairs++] = {reinterpret_cast<std::uint64_t>(part), page, 0};
    }
    if (playing_ == Playing::kUnknownPage) list[0].page = static_cast<std::uint32_t>(keys_.size());
    if (playing_ == Playing::kTooMany) repairs = load_.most_repairs + 1;
    tell(at<std::uint32_t>(layout_.repairs) + layer, repairs);
    repaired_ += repairs;
    return true;
  }
  bool read(std::uint32_t page) {
    objects_[page].resize(shape_.bytes());
    std::vector<std::uint64_t> pieces;
    for (std::uint32_t piece = 0; piece < shape_.layers * shape_.sides; ++piece) {
      pieces.push_back(reinterpret_cast<std::uint64_t>(objects_[page].data()) +
                       std::uint64_t{piece} * shape_.page_bytes);
    }
    std::uint8_t ok = 0;
    const tardis_code code =
        tardis_get(store_.handle(), store_.space(), reinterpret_cast<const std::uint8_t*>(&keys_[page]), pieces.data(),
                   1, &ok, nullptr);
    return code == TARDIS_OK && ok != 0;
  }
  std::uint64_t part_stride() const { return (shape_.layer_bytes() + 4095) / 4096 * 4096; }

  RestoreStore& store_;
  const ObjectShape shape_;
  const tardis_load_shape load_;
  const tardis_load_board_layout layout_;
  std::uint8_t* const staging_;
  std::uint8_t* board_ = nullptr;
  std::vector<std::uint64_t> numbers_;
  std::vector<Key> keys_;
  std::vector<std::vector<std::uint8_t>> objects_;
  bool use_rings_ = true, good_ = false;
  Playing playing_ = Playing::kWell;
  std::uint32_t repaired_ = 0, ended_ = 0;
  double to_ready_ = 0;
  std::thread thread_;
};

}  // namespace tardis::gstore::testing
