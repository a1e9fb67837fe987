// SPDX-License-Identifier: Apache-2.0
#include "gio/load_thread.h"

#include <new>

namespace tardis::gio {

LoadThread::LoadThread(const LoadTerms& terms, std::byte* staging) : load_(terms, staging) {
  thread_ = std::thread([this] { main(); });
}

LoadThread::~LoadThread() {
  become(State::kClosing);
  thread_.join();
}

void LoadThread::become(State state) {
  {
    const std::lock_guard lock(mutex_);
    state_ = state;
  }
  changed_.notify_all();
}

bool LoadThread::begin(const Hash256* hashes, std::uint32_t n, bool use_rings, void* board) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::kIdle) return false;
    load_.start(hashes, n, use_rings, board);
    state_ = State::kBegun;
  }
  changed_.notify_all();
  return true;
}

tardis_load_result LoadThread::end(bool cancelled) {
  load_.stop();
  std::unique_lock lock(mutex_);
  state_ = State::kEnding;
  changed_.notify_all();
  changed_.wait(lock, [this] { return state_ == State::kLetGo; });
  const tardis_load_result result = load_.result(cancelled);
  state_ = State::kIdle;
  return result;
}

void LoadThread::main() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return state_ != State::kIdle && state_ != State::kLetGo; });
    if (state_ == State::kClosing) return;
    lock.unlock();
    try {
      if (!load_.stopped()) load_.prepare();
      load_.look_after();
      load_.judge();
    } catch (const std::bad_alloc&) {
      load_.give_up();
    }
    load_.let_go(/*over=*/false);
    lock.lock();
    changed_.wait(lock, [this] { return state_ != State::kBegun; });
    lock.unlock();
    load_.let_go(/*over=*/true);
    lock.lock();
    if (state_ == State::kClosing) return;
    state_ = State::kLetGo;
    changed_.notify_all();
  }
}

}  // namespace tardis::gio
