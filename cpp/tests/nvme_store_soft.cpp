// SPDX-License-Identifier: Apache-2.0
// The store through every part at once: NvmeDevice, driver, software controller, and a file below.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "nvme/driver.h"
#include "nvme/nvme_namespace.h"
#include "nvme/soft/controller.h"
#include "nvme/soft/file_medium.h"
#include "nvme_driver_support.h"
#include "nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

constexpr std::uint64_t kBytes = 16 * kTestSegment;
constexpr std::size_t kPages = 10;  // of a chain

// Ends the process, with a core for whoever wants to see the stacks, if what it watches stands still.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds patience) : thread_([this, patience] { watch(patience); }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  void moved() { moves_.fetch_add(1); }

 private:
  void watch(std::chrono::seconds patience) {
    std::unique_lock lock(mutex_);
    for (std::uint64_t seen = moves_.load();; seen = moves_.load()) {
      if (changed_.wait_for(lock, patience, [this] { return over_; })) return;
      if (moves_.load() != seen) continue;
      std::fprintf(stderr, "nothing has moved for %lld s\n", static_cast<long long>(patience.count()));
      std::abort();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::atomic<std::uint64_t> moves_{0};
  std::thread thread_;
};

struct StackOptions {
  DmaSpaceOptions::Addresses addresses = DmaSpaceOptions::Addresses::kTranslated;
  BlockDeviceOptions::Engine engine = BlockDeviceOptions::Engine::kAuto;
  SoftControllerOptions soft;
  DriverOptions driver;
};

// Members go in the reverse order. What a store kept in the file is there for the next stack.
struct Stack {
  Stack(const std::string& folder, StackOptions options) : space({.addresses = options.addresses}) {
    BlockDeviceOptions below_options;
    below_options.engine = options.engine;
    auto opened = open_block_device(folder, below_options, -1);
    if (!opened) {
      ADD_FAILURE() << opened.error().message;
      return;
    }
    below = std::move(*opened);
    const auto file = below->open_file(folder + "/namespace", true, true);
    if (!file || !below->preallocate(*file, kBytes)) {
      ADD_FAILURE() << "no file for the namespace";
      return;
    }
    auto medium = FileMedium::create(*below, {{*file, kBytes}});
    EXPECT_TRUE(medium) << (medium ? "" : medium.error().message);
    if (!medium) return;
    options.soft.namespaces.push_back({std::shared_ptr<Medium>(std::move(*medium)), 12, 0, 0});
    auto created = SoftController::create(std::move(options.soft), space);
    EXPECT_TRUE(created) << (created ? "" : created.error().message);
    if (!created) return;
    controller = std::move(*created);
    auto driven = Driver::open(controller->window(), space, options.driver);
    EXPECT_TRUE(driven) << (driven ? "" : driven.error().message);
    if (!driven) return;
    driver = std::shared_ptr<Driver>(std::move(*driven));
    auto found = NvmeNamespace::open(driver, 1);
    EXPECT_TRUE(found) << (found ? "" : found.error().message);
    if (found) disk = std::move(*found);
  }
  ~Stack() {
    if (driver) {
      const DriverCounters counters = driver->counters();
      EXPECT_EQ(counters.timeouts + counters.resets + counters.errors + counters.queue_faults, 0u);
    }
    disk.reset();
    driver.reset();
    if (!controller) return;
    EXPECT_EQ(describe(controller->take_violations()), "");
    EXPECT_EQ(space.mapped_ranges(), 0u) << "memory is left mapped";
  }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  DmaSpace space;
  std::unique_ptr<BlockDevice> below;
  std::unique_ptr<SoftController> controller;
  std::shared_ptr<Driver> driver;
  std::shared_ptr<NvmeNamespace> disk;
};

std::string home_in(const TempFolder& folder) {
  std::filesystem::create_directories(folder.file("home"));
  return folder.file("home");
}

TEST(NvmeStoreSoft, PagesStayInAFileBelow) {
  for (const std::string& parent : {std::string{}, memory_parent()}) {
    const TempFolder folder(parent);
    const std::string home = home_in(folder);
    const Layout layout{4, {16 << 10, 16 << 10}};
    for (const bool first : {true, false}) {
      Stack stack(folder.path(), {});
      ASSERT_NE(stack.disk, nullptr);
      auto store = open_store(home, small_store(8), first, on(stack.disk));
      ASSERT_NE(store, nullptr);
      Space space(*store, 1, layout);
      if (first) {
        EXPECT_EQ(space.put(1, 0, 100), 100u);
      }
      EXPECT_EQ(space.fetch(1, 0, 100), 100u);
      EXPECT_TRUE(store->close());
    }
  }
}

// Stores that are made, used by several threads and closed again and again, on stacks of all shapes: nothing stands
// still, and no command is late.
TEST(NvmeStoreSoft, NothingStandsStill) {
  const auto cycles = static_cast<std::uint64_t>(30 * campaign_factor());
  const char* const seed = std::getenv("TARDIS_NVME_SEED");
  std::mt19937_64 random(seed != nullptr ? std::strtoull(seed, nullptr, 10) : 1);
  const auto one_of = [&](auto... values) {
    const std::uint64_t all[] = {static_cast<std::uint64_t>(values)...};
    return all[random() % sizeof...(values)];
  };
  Watchdog watchdog(std::chrono::seconds(120));
  for (std::uint64_t cycle = 0; cycle < cycles && !::testing::Test::HasFailure(); ++cycle) {
    SCOPED_TRACE("cycle " + std::to_string(cycle));
    const TempFolder folder(one_of(0, 1) == 0 ? std::string{} : memory_parent());
    const std::string home = home_in(folder);
    StackOptions options;
    if (one_of(0, 1) == 0) options.addresses = DmaSpaceOptions::Addresses::kIdentity;
    if (one_of(0, 1, 2) == 0) options.engine = BlockDeviceOptions::Engine::kSync;
    options.soft.threads = static_cast<std::uint32_t>(one_of(1, 1, 2, 3));
    options.soft.medium_threads = static_cast<std::uint32_t>(one_of(1, 2, 8));
    options.soft.medium_batch = static_cast<std::uint32_t>(one_of(1, 3, 64));
    options.soft.spin = std::chrono::microseconds(one_of(0, 50, 50));
    // Who sleeps for that long is woken, or a command is late. Of one thread: with more, the end of one's work may have
    // to wait until another looks.
    if (options.soft.threads == 1 && one_of(0, 1) == 0) {
      options.soft.least_sleep = options.soft.most_sleep = std::chrono::seconds(30);
    }
    options.driver.queues = static_cast<std::uint32_t>(one_of(1, 2, 4));
    options.driver.queue_entries = static_cast<std::uint32_t>(one_of(2, 3, 17, 256));
    const std::size_t threads = one_of(1, 2, 5);
    const bool registered = one_of(0, 1) == 0;
    const Layout layout{4, {16 << 10, 16 << 10}};
    for (const bool first : {true, false}) {
      Stack stack(folder.path(), options);
      ASSERT_NE(stack.disk, nullptr);
      auto store = open_store(home, small_store(12), first, on(stack.disk));
      ASSERT_NE(store, nullptr);
      Space space(*store, 1, layout);
      std::vector<std::thread> users;
      for (std::size_t user = 0; user < threads; ++user) {
        users.emplace_back([&, user] {
          PageMemory memory(layout.parts, layout.regions, kPages);
          std::uint8_t ok[kPages];
          if (registered && user == 0) {
            auto* const begin = reinterpret_cast<void*>(*memory.pieces());
            EXPECT_TRUE(store->register_memory(begin, kPages * memory.page_bytes()));
          }
          for (std::uint64_t round = 0; round < 3; ++round) {
            const std::uint64_t chain = user * 10 + round;
            if (first) {
              EXPECT_EQ(space.put(chain, 0, kPages), kPages);
            }
            if (round == 1) {
              EXPECT_TRUE(store->flush());
            }
            const auto keys = Space::keys(chain, 0, kPages);
            EXPECT_TRUE(store->get(space.id(), keys.data(), memory.pieces(), kPages, ok));
            for (std::size_t page = 0; page < kPages; ++page) {
              EXPECT_EQ(ok[page], 1);
              EXPECT_TRUE(memory.holds(page, space.seed(keys[page])));
            }
            watchdog.moved();
          }
          if (registered && user == 0) store->unregister_memory(reinterpret_cast<void*>(*memory.pieces()));
        });
      }
      for (std::thread& user : users) user.join();
      EXPECT_EQ(stats_of(*store).evicted_pages, 0u);
      EXPECT_TRUE(store->close());
      watchdog.moved();
    }
  }
}

}  // namespace
}  // namespace tardis::nvme::testing
