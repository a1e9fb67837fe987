// SPDX-License-Identifier: Apache-2.0
// Runs the layers of loads where pools are memory of this process: what the GPU's stream does, by one thread, in order.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "gio/load.h"

namespace tardis::gio {

class LayerRunner {
 public:
  explicit LayerRunner(const LoadTerms& terms);
  ~LayerRunner();  // after what was begun
  LayerRunner(const LayerRunner&) = delete;
  LayerRunner& operator=(const LayerRunner&) = delete;

  // `load`: of the pages from files; null: there are none. Stays until left().
  Status begin(const Load* load, void* board, const tardis_host_load& what);
  // Returns when the layer has ended.
  void wait(const void* board, std::uint32_t layer);
  // Returns when no run of this load is under way or to come.
  void left(const Load& load);

 private:
  struct Run {
    const Load* load;
    LoadBoard board;
    tardis_host_load what;
  };
  tardis_gio_layer ring_of(const Run& run, std::uint32_t layer);
  void main();
  void run(const Run& run);
  void copy_pinned(const Run& run, std::uint32_t layer);
  bool land_files(const Run& run, std::uint32_t layer);
  void zero_files(const Run& run, std::uint32_t layer);
  void copy_page(const Run& run, std::uint32_t layer, std::uint32_t id, std::uint64_t from);

  const LoadTerms& terms_;
  std::vector<std::uint32_t> slots_;  // 0, 1, 2 ...
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Run> runs_;  // the first is under way
  bool closing_ = false;
  std::uint32_t flag_ = 0;  // of the ring that runs
  std::thread thread_;
};

}  // namespace tardis::gio
