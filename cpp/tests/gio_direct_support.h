// SPDX-License-Identifier: Apache-2.0
// Direct landing without a GPU: an engine whose memory faults when anybody else touches it, and a grant that lands
// there.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "nvme/soft/copy_engine.h"
#include "tests/gio_support.h"

namespace tardis::gio::testing {

// Memory under two addresses: one that no thread may touch, and where its bytes are.
class RemoteMemory {
 public:
  explicit RemoteMemory(std::size_t bytes) : bytes_((bytes + kUnit - 1) / kUnit * kUnit) {
    const int file = ::memfd_create("remote", 0);
    EXPECT_GE(file, 0);
    EXPECT_EQ(::ftruncate(file, static_cast<off_t>(bytes_)), 0);
    bytes_at_ = map(file, PROT_READ | PROT_WRITE, bytes_);
    window_ = map(file, PROT_NONE, bytes_ + kUnit);
    ::close(file);
    base_ = window_ + (kUnit - reinterpret_cast<std::uintptr_t>(window_) % kUnit) % kUnit;
  }
  ~RemoteMemory() {
    ::munmap(bytes_at_, bytes_);
    ::munmap(window_, bytes_ + kUnit);
  }
  RemoteMemory(const RemoteMemory&) = delete;
  RemoteMemory& operator=(const RemoteMemory&) = delete;

  std::byte* base() const { return base_; }  // that an engine and commands name
  std::byte* bytes() const { return bytes_at_; }
  std::size_t size() const { return bytes_; }

 private:
  static constexpr std::size_t kUnit = 64 << 10;
  static std::byte* map(int file, int protection, std::size_t bytes) {
    void* const at = ::mmap(nullptr, bytes, protection, MAP_SHARED, file, 0);
    EXPECT_NE(at, MAP_FAILED);
    return static_cast<std::byte*>(at);
  }
  std::size_t bytes_;
  std::byte *bytes_at_, *window_, *base_;
};

// Lanes have threads, which take their batches in any order and take their time.
class CpuEngine final : public nvme::CopyEngine {
 public:
  std::string name() const override { return "engine of the tests"; }
  Result<std::unique_ptr<nvme::CopyLane>> open_lane() override {
    return std::unique_ptr<nvme::CopyLane>(std::make_unique<Lane>(*this));
  }
  Result<void*> allocate(std::size_t bytes) override {
    auto memory = std::make_unique<RemoteMemory>(bytes);
    void* const base = memory->base();
    const std::lock_guard lock(mutex_);
    memories_[base] = std::move(memory);
    return base;
  }
  void free(void* remote) override {
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(memories_.erase(remote), 1u);
  }
  Status copy(nvme::CopyDirection direction, const tardis_copy& each) override {
    move(direction, each);
    return {};
  }
  Status pin(void* host, std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    pinned_[static_cast<std::byte*>(host)] = bytes;
    return {};
  }
  void unpin(void* host) override {
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(pinned_.erase(static_cast<std::byte*>(host)), 1u);
  }

  // Where the bytes of remote memory are.
  std::byte* at(const void* remote) {
    const std::lock_guard lock(mutex_);
    const auto after = memories_.upper_bound(const_cast<void*>(remote));
    if (after == memories_.begin()) return nullptr;
    const auto& memory = *std::prev(after)->second;
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(remote) - memory.base());
    return offset < memory.size() ? memory.bytes() + offset : nullptr;
  }
  void hold(bool held) {
    const std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  void fail(std::uint32_t batches, std::uint32_t starts) {  // that many of those to come
    const std::lock_guard lock(mutex_);
    fail_batches_ = batches;
    fail_starts_ = starts;
  }
  std::atomic<int> most_delay_us{20};
  std::atomic<bool> flips{false};  // a bit of what it moves
  std::atomic<std::uint64_t> moved{0};

 private:
  struct Batch {
    nvme::CopyDirection direction;
    std::vector<tardis_copy> copies;
    std::uint64_t number;
  };

  class Lane final : public nvme::CopyLane {
   public:
    explicit Lane(CpuEngine& engine) : engine_(engine), thread_([this] { work(); }) {}
    ~Lane() override {
      {
        const std::lock_guard lock(engine_.mutex_);
        stop_ = true;
        engine_.changed_.notify_all();
      }
      thread_.join();
    }
    bool start(nvme::CopyDirection direction, std::span<const tardis_copy> copies, std::uint64_t number) override {
      const std::lock_guard lock(engine_.mutex_);
      if (engine_.fail_starts_ != 0) {
        --engine_.fail_starts_;
        return false;
      }
      waiting_.push_back({direction, {copies.begin(), copies.end()}, number});
      engine_.changed_.notify_all();
      return true;
    }
    std::size_t poll(std::span<tardis_copy_end> ends) override {
      const std::lock_guard lock(engine_.mutex_);
      const std::size_t count = std::min(ends.size(), ended_.size());
      std::copy_n(ended_.begin(), count, ends.begin());
      ended_.erase(ended_.begin(), ended_.begin() + static_cast<std::ptrdiff_t>(count));
      return count;
    }

   private:
    void work() {
      std::unique_lock lock(engine_.mutex_);
      while (true) {
        // What was started is done before the end.
        engine_.changed_.wait(lock,
                              [&] { return (!waiting_.empty() && !engine_.held_) || (stop_ && waiting_.empty()); });
        if (waiting_.empty()) return;
        std::swap(waiting_.back(), waiting_[random_() % waiting_.size()]);
        const Batch batch = std::move(waiting_.back());
        waiting_.pop_back();
        const bool fails = engine_.fail_batches_ != 0;
        if (fails) --engine_.fail_batches_;
        lock.unlock();
        const int most = engine_.most_delay_us.load();
        if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % static_cast<unsigned>(most)));
        // Of one that fails, some has been moved.
        for (std::size_t i = 0; i < batch.copies.size() / (fails ? 2 : 1); ++i) {
          engine_.move(batch.direction, batch.copies[i]);
        }
        lock.lock();
        ended_.push_back({batch.number, fails ? 5 : 0, 0});
      }
    }

    CpuEngine& engine_;
    std::mt19937_64 random_{7};
    bool stop_ = false;
    std::vector<Batch> waiting_;
    std::vector<tardis_copy_end> ended_;
    std::thread thread_;  // the last: it uses the others
  };

  void move(nvme::CopyDirection direction, const tardis_copy& each) {
    std::byte* const remote = at(each.remote);
    ASSERT_NE(remote, nullptr);
    ASSERT_NE(at(static_cast<std::byte*>(each.remote) + each.bytes - 1), nullptr);
    if (direction == nvme::CopyDirection::kToRemote) {
      std::memcpy(remote, each.host, each.bytes);
      if (flips) remote[each.bytes / 2] ^= std::byte{1};
    } else {
      std::memcpy(each.host, remote, each.bytes);
    }
    moved += each.bytes;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  std::uint32_t fail_batches_ = 0, fail_starts_ = 0;
  std::map<void*, std::unique_ptr<RemoteMemory>> memories_;
  std::map<std::byte*, std::size_t> pinned_;
};

// A grant whose queues land in regions of such an engine.
struct DirectRig {
  DirectRig(RigOptions rig_options, GrantOptions options, std::size_t region_bytes, std::size_t region_count = 1)
      : gio(std::move(rig_options), options),
        provider(*gio.rig.space, engine),
        lists(gio.grant ? gio.grant->direct_list_bytes() : 4096) {
    if (gio.grant == nullptr) return;
    const auto good = [](const Status& status) { EXPECT_TRUE(status) << (status ? "" : status.error().message); };
    good(gio.rig.controller->attach(engine));
    good(gio.grant->use_direct(lists.data()));
    for (std::size_t i = 0; i < region_count; ++i) {
      void* const base = *engine.allocate(region_bytes);
      regions.push_back(static_cast<std::byte*>(base));
      good(gio.grant->add_region(provider, base, region_bytes));
    }
    start();
  }
  ~DirectRig() {
    gio.owner.reset();
    gio.grant.reset();
    gio.rig.disk.reset();
    gio.rig.driver.reset();
    gio.rig.controller->detach(engine);
  }

  // Also after renew().
  void start() {
    gio.owner->start(*gio.grant);
    for (std::size_t i = 0; i < gio.owner->queues().size(); ++i) gio.owner->queues()[i].direct = gio.grant->direct(i);
  }
  std::byte* bytes(const std::byte* remote) { return engine.at(remote); }

  const std::shared_ptr<CpuEngine> kept = std::make_shared<CpuEngine>();
  CpuEngine& engine = *kept;
  GrantRig gio;
  nvme::EngineMemory provider;
  AlignedBuffer lists;
  std::vector<std::byte*> regions;
};

}  // namespace tardis::gio::testing
