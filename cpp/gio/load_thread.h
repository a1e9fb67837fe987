// SPDX-License-Identifier: Apache-2.0
// A thread for one load at a time, which sleeps while there is none.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "gio/load.h"

namespace tardis::gio {

class LoadThread {
 public:
  LoadThread(const LoadTerms& terms, std::byte* staging);
  ~LoadThread();  // its load has ended
  LoadThread(const LoadThread&) = delete;
  LoadThread& operator=(const LoadThread&) = delete;

  // False: it has a load.
  bool begin(const Hash256* hashes, std::uint32_t n, bool use_rings, void* board);
  // Returns when the thread has let go of board and staging; it can be given another load then.
  tardis_load_result end(bool cancelled);
  const Load& load() const { return load_; }  // between begin() and end()

 private:
  enum class State { kIdle, kBegun, kEnding, kLetGo, kClosing };
  void main();
  void become(State state);

  Load load_;
  std::mutex mutex_;  // never held during I/O
  std::condition_variable changed_;
  State state_ = State::kIdle;
  std::thread thread_;
};

}  // namespace tardis::gio
