// SPDX-License-Identifier: Apache-2.0
// A store on a tmpfs, a session over it, a loader, and KV pools of host memory between guards.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "capi/gio_session.h"
#include "capi/store_handle.h"
#include "gio/load_board.h"
#include "store_support.h"
#include "tardis/gio_store.h"
#include "tardis/loads.h"

namespace tardis::gio::testing {

using tardis::testing::fill_page;
using tardis::testing::page_key;
using tardis::testing::PageMemory;
using tardis::testing::TempFolder;

// 40 KiB of K and V a layer: the second of three digests spans both.
inline constexpr std::uint32_t kLayers = 3, kChunks = 3, kHalf = 20 << 10, kPart = 2 * kHalf;
inline constexpr std::uint32_t kStored = 24, kPoolPages = 64, kQueues = 2;
inline constexpr std::uint8_t kPoison = 0xA5;

struct RigTerms {
  bool layers_apart = false;  // placement "layers", on two paths
  std::uint32_t loads = 2, most_pages = 32, most_repairs = 32, most_bytes = kPart;
  std::uint64_t deadline_ns = 10'000'000'000;
  std::uint32_t rest_us = 0;   // of the controller's threads
  std::uint32_t half = kHalf;  // of the objects; another than kHalf is for loads without rings
};

class LoadRig {
 public:
  explicit LoadRig(const RigTerms& terms = {}) : terms_(terms), memory_(kLayers, {terms.half, terms.half}, kStored) {
    open_store();
    open_session();
    open_loader();
    for (std::uint32_t i = 0; i < kLayers * 2; ++i) {
      pools_[i] = AlignedBuffer(std::size_t{kPoolPages + 2} * terms_.half);
      layers_[i % 2][i / 2] = reinterpret_cast<std::uintptr_t>(pools_[i].data() + terms_.half);
    }
    poison();
  }
  ~LoadRig() {
    tardis_loader_close(loader_);
    tardis_gio_close(session_);
    tardis_destroy(store_);
  }
  LoadRig(const LoadRig&) = delete;
  LoadRig& operator=(const LoadRig&) = delete;

  Store& store() { return *store_->store; }
  tardis_loader* loader() { return loader_; }
  std::uint32_t space() const { return space_; }
  nvme::FaultPlan& faults() { return session_->session->faults(); }
  std::string folder() const { return folder_.file("first"); }
  const tardis_load_board_layout& layout() const { return layout_; }
  std::uint64_t part() const { return 2 * std::uint64_t{terms_.half}; }
  const Hash256& key(std::uint32_t object) const { return keys_[object]; }
  static std::uint64_t seed(std::uint32_t object) { return 1000 + object; }
  bool found(std::uint32_t object) {
    auto run = store().lookup(space_, &keys_[object], 1);
    return run && *run == 1;
  }
  tardis_loader_counters counters() {
    tardis_loader_counters counters{};
    tardis_loader_get_counters(loader_, &counters);
    return counters;
  }
  // Stores what is not there.
  void put() {
    std::vector<std::uint8_t> ok(kStored);
    ASSERT_TRUE(store().set(space_, keys_.data(), nullptr, memory_.pieces(), kStored, ok.data()));
  }
  void flip(std::uint32_t object, std::uint64_t byte) {
    const auto where = tardis::testing::find_on_disk(folder(), keys_[object]);
    ASSERT_EQ(where.header.magic, SlotHeader::kMagic);
    tardis::testing::flip_bit(where.file, where.payload_offset + byte);
  }
  // No lease is left: what is deleted becomes free.
  void expect_no_leases() {
    ASSERT_TRUE(store().clear(std::nullopt));
    const tardis_stats stats = tardis::testing::stats_of(store());
    EXPECT_EQ(stats.slots_free + stats.slots_quarantined, stats.slots_total);
  }

  void poison() {
    for (AlignedBuffer& pool : pools_) std::memset(pool.data(), kPoison, pool.size());
  }
  // Pages of the pools have these objects' bytes, but zeros in layers from `zero_from` on (behind it, perhaps), and all
  // others, and the guards, are as they were.
  void expect_pools(const std::map<std::uint32_t, std::uint64_t>& seeds_of_pages, std::uint32_t zero_from = kLayers) {
    std::vector<std::uint8_t> wanted(terms_.half), poisoned(terms_.half, kPoison), zeros(terms_.half);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      for (std::uint32_t half = 0; half < 2; ++half) {
        for (std::uint32_t page = 0; page < kPoolPages + 2; ++page) {
          const auto seed = page == 0 ? seeds_of_pages.end() : seeds_of_pages.find(page - 1);
          const bool filled = seed != seeds_of_pages.end();
          if (filled) fill_page(wanted.data(), terms_.half, seed->second, layer * part() + half * terms_.half);
          const std::byte* const at = pools_[layer * 2 + half].data() + std::size_t{page} * terms_.half;
          const auto is = [&](const std::vector<std::uint8_t>& bytes) {
            return std::memcmp(at, bytes.data(), terms_.half) == 0;
          };
          const bool may_be_right = !filled || layer != zero_from, may_be_zero = filled && layer >= zero_from;
          EXPECT_TRUE((may_be_right && is(filled ? wanted : poisoned)) || (may_be_zero && is(zeros)))
              << "layer " << layer << " half " << half << " page " << int(page) - 1;
        }
      }
    }
  }

  // One load: its board and what its run names.
  struct Job {
    AlignedBuffer board;
    std::vector<std::uint32_t> file_ids, pinned_ids;
    std::vector<Hash256> hashes;
    std::vector<std::vector<std::uint8_t>> pinned;  // [layer][K,V]
    std::vector<std::uint64_t> pinned_objects;
    tardis_gio_layer ring{};
    tardis_host_load what{};
    tardis_load* load = nullptr;
  };
  std::unique_ptr<Job> job(const std::vector<std::pair<std::uint32_t, std::uint32_t>>& objects_to_ids,
                           const std::vector<std::pair<std::uint64_t, std::uint32_t>>& pinned_to_ids = {}) {
    auto job = std::make_unique<Job>();
    job->board = AlignedBuffer(layout_.bytes, 64);
    for (const auto& [object, id] : objects_to_ids) {
      job->hashes.push_back(keys_[object]);
      job->file_ids.push_back(id);
    }
    for (const auto& [seed, id] : pinned_to_ids) {
      auto& bytes = job->pinned.emplace_back(kLayers * part());
      fill_page(bytes.data(), bytes.size(), seed);
      job->pinned_objects.push_back(reinterpret_cast<std::uintptr_t>(bytes.data()));
      job->pinned_ids.push_back(id);
    }
    job->ring = ring_;
    job->ring.pool_pages = job->file_ids.data();
    job->what.ring = job->hashes.empty() ? nullptr : &job->ring;
    job->what.layers[0] = layers_[0];
    job->what.layers[1] = layers_[1];
    for (std::uint32_t& bytes : job->what.page_bytes) bytes = terms_.half;
    job->what.pool_page_count = kPoolPages;
    job->what.pinned_pages = static_cast<std::uint32_t>(job->pinned_ids.size());
    job->what.pinned_ids = job->pinned_ids.data();
    job->what.pinned_objects = job->pinned_objects.data();
    return job;
  }
  tardis_code begin(Job& job, int use_rings = 1) {
    char* error = nullptr;
    const tardis_code code = tardis_load_begin(loader_, job.hashes.front().data(), job.hashes.size(), use_rings,
                                               job.board.data(), &job.load, &error);
    tardis_free(error);
    return code;
  }
  LoadBoard board(Job& job) { return LoadBoard(job.board.data(), shape_, layout_); }
  void await(const std::uint32_t& word) {
    while (LoadBoard::read(word) == TARDIS_LOAD_PENDING) std::this_thread::yield();
  }
  void run(Job& job) {
    char* error = nullptr;
    ASSERT_EQ(tardis_load_run(loader_, job.load, job.board.data(), &job.what, &error), TARDIS_OK) << error;
  }
  void wait(Job& job) {
    char* error = nullptr;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      ASSERT_EQ(tardis_load_wait(loader_, job.board.data(), layer, &error), TARDIS_OK) << error;
    }
  }
  tardis_load_result end(Job& job, int cancelled = 0) {
    tardis_load_result result{};
    char* error = nullptr;
    EXPECT_EQ(tardis_load_end(std::exchange(job.load, nullptr), cancelled, &result, &error), TARDIS_OK) << error;
    return result;
  }
  tardis_load_result all(Job& job, int use_rings = 1) {
    EXPECT_EQ(begin(job, use_rings), TARDIS_OK);
    run(job);
    wait(job);
    return end(job);
  }
  // What is said against these options.
  std::string refusal(const tardis_loader_options& options) {
    tardis_loader* loader = nullptr;
    char* error = nullptr;
    EXPECT_EQ(tardis_loader_open(store_, &options, &loader, &error), TARDIS_INVALID_ARGUMENT);
    EXPECT_EQ(loader, nullptr);
    const std::string text = error == nullptr ? "" : error;
    tardis_free(error);
    return text;
  }
  void renew() {
    char* error = nullptr;
    ASSERT_EQ(tardis_gio_renew(session_, &error), TARDIS_OK) << error;
    grant();
  }

 private:
  void open_store() {
    tardis_options options;
    tardis_default_options(&options);
    options.capacity_bytes = 64 << 20;
    options.segment_bytes = 8 << 20;
    options.engine = TARDIS_ENGINE_SYNC;
    options.io_workers = 2;
    options.free_space_floor = 0;
    const std::string second = folder_.file("second");
    const char* more[] = {second.c_str()};
    if (terms_.layers_apart) {
      options.placement = TARDIS_PLACEMENT_LAYERS;
      options.more_paths = more;
      options.more_paths_count = 1;
    }
    char* error = nullptr;
    ASSERT_EQ(tardis_open(folder().c_str(), &options, 1, &store_, &error), TARDIS_OK) << error;
    tardis_object_layout layout{kLayers, 2, {terms_.half, terms_.half}};
    const std::uint8_t fingerprint[TARDIS_FINGERPRINT_BYTES] = {9};
    ASSERT_EQ(tardis_namespace_open(store_, fingerprint, "{}", &layout, &space_, &error), TARDIS_OK) << error;
    for (std::uint32_t i = 0; i < kStored; ++i) {
      keys_.push_back(page_key(3, i));
      memory_.write(i, seed(i));
    }
    put();
  }
  void open_session() {
    tardis_gio_options options{};
    options.block_bytes = 4096;
    options.controller_threads = 1;
    options.queues = kQueues;
    options.entries = 16;
    options.slot_bytes = 40 << 10;
    session_memory_ = AlignedBuffer(tardis_gio_store_memory_bytes(&options));
    char* error = nullptr;
    ASSERT_EQ(tardis_gio_open_store(&options, store_, session_memory_.data(), &session_, &error), TARDIS_OK) << error;
    ASSERT_EQ(tardis_gio_rest(session_, 100, terms_.rest_us, &error), TARDIS_OK) << error;
    tardis_gio_sizes sizes{};
    tardis_gio_layer_sizes(&sizes);
    state_ = AlignedBuffer(kQueues * sizes.state);
    uses_ = AlignedBuffer(kQueues * options.entries * 2);
    queues_ = AlignedBuffer(kQueues * sizes.queue);
    contexts_ = AlignedBuffer(std::size_t{sizes.most_contexts} * sizes.context);
    grant();
    work_ = AlignedBuffer(tardis_gio_host_work_bytes(queues_.data(), kQueues), 64);
    ring_.most_pages = terms_.most_pages;
    ring_.op = TARDIS_GIO_READ;
    ring_.block_bytes = 4096;
    ring_.most_bytes = terms_.most_bytes;
    ring_.contexts = contexts_.data();
    ring_.context_count = &context_count_;
    ring_.ended = &ended_;
    ring_.work = work_.data();
    ring_.deadline_ns = terms_.deadline_ns;
    ring_.queues = queues_.data();
    ring_.rings = kQueues;
  }
  void grant() {
    const void *prp = nullptr, *sgl = nullptr;
    std::size_t prp_bytes = 0, sgl_bytes = 0;
    char* error = nullptr;
    ASSERT_EQ(tardis_gio_tables(session_, &prp, &prp_bytes, &sgl, &sgl_bytes, &error), TARDIS_OK);
    ASSERT_EQ(tardis_gio_queues(session_, state_.data(), uses_.data(), const_cast<void*>(prp), const_cast<void*>(sgl),
                                queues_.data(), &error),
              TARDIS_OK);
    ASSERT_EQ(tardis_gio_host_start(queues_.data(), kQueues, &error), TARDIS_OK);
  }
  void open_loader() {
    shape_ = {kLayers,
              static_cast<std::uint32_t>((part() + (16 << 10) - 1) / (16 << 10)),
              terms_.most_pages,
              terms_.most_repairs,
              static_cast<std::uint32_t>((part() + terms_.most_bytes - 1) / terms_.most_bytes),
              kQueues};
    char* error = nullptr;
    ASSERT_EQ(tardis_load_board_layout_of(&shape_, &layout_, &error), TARDIS_OK) << error;
    tardis_loader_options options{};
    options.shape = shape_;
    options.name_space = space_;
    options.block_bytes = 4096;
    options.loads = terms_.loads;
    options.staging_bytes = std::uint64_t{terms_.loads} * terms_.most_repairs * ((part() + 4095) / 4096 * 4096);
    staging_ = AlignedBuffer(options.staging_bytes);
    options.staging = staging_.data();
    ASSERT_EQ(tardis_loader_open(store_, &options, &loader_, &error), TARDIS_OK) << error;
  }

  const RigTerms terms_;
  const TempFolder folder_{"/dev/shm"};
  PageMemory memory_;
  std::vector<Hash256> keys_;
  AlignedBuffer session_memory_, state_, uses_, queues_, contexts_, work_, staging_;
  AlignedBuffer pools_[kLayers * 2];  // [layer][K,V], a guard of a page at each end
  std::uint64_t layers_[2][kLayers] = {};
  std::uint32_t context_count_ = 0, ended_ = 0, space_ = 0;
  tardis_gio_layer ring_{};
  tardis_load_shape shape_{};
  tardis_load_board_layout layout_{};
  tardis_store* store_ = nullptr;
  tardis_gio_session* session_ = nullptr;
  tardis_loader* loader_ = nullptr;
};

// Objects [first, first + n) to ids that lie apart.
inline std::vector<std::pair<std::uint32_t, std::uint32_t>> objects(std::uint32_t first, std::uint32_t n,
                                                                    std::uint32_t shift = 0) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs;
  for (std::uint32_t i = 0; i < n; ++i) pairs.emplace_back(first + i, (shift + 7 * i) % kPoolPages);
  return pairs;
}
inline std::map<std::uint32_t, std::uint64_t> seeds(
    const std::vector<std::pair<std::uint32_t, std::uint32_t>>& objects_to_ids) {
  std::map<std::uint32_t, std::uint64_t> map;
  for (const auto& [object, id] : objects_to_ids) map[id] = LoadRig::seed(object);
  return map;
}

}  // namespace tardis::gio::testing
