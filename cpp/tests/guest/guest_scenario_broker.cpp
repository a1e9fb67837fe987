// SPDX-License-Identifier: Apache-2.0
// A broker of a controller, with clients in other processes.
#include <grp.h>
#include <sys/resource.h>

#include <filesystem>

#include "guest_support.h"
#include "nvme/broker/vfio_broker.h"
#include "tardis/nvmed.h"
#include "tests/nvme_broker_work.h"
#include "tests/nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;
using broker::VfioBroker;
using broker::VfioBrokerOptions;

// Serves until it goes.
struct ServedBroker {
  explicit ServedBroker(const std::string& socket) {
    VfioBrokerOptions options;
    options.broker.socket_path = socket;
    options.client_queues = 12;
    auto opened = VfioBroker::open(guest_controllers().front(), options);
    if (!opened) {
      ADD_FAILURE() << opened.error().message;
      return;
    }
    broker = std::move(*opened);
    thread = std::thread([this] { EXPECT_TRUE(broker->broker().run()); });
  }
  ~ServedBroker() {
    if (broker == nullptr) return;
    broker->broker().stop();
    thread.join();
  }
  std::unique_ptr<VfioBroker> broker;
  std::thread thread;
};

std::string socket_path() { return std::string("/tmp/nvmed.") + std::to_string(::getpid()); }

TEST(ScenarioBroker, AKilledClientIsNothingToTheOthers) {
  ASSERT_FALSE(guest_controllers().empty());
  const std::string socket = socket_path();
  SharedValue<Progress> progress;
  new (progress.operator->()) Progress;
  ChildProcess stays([&] { work(socket, 0, *progress.operator->()); });
  ChildProcess killed([&] { work(socket, 1, *progress.operator->()); });
  ServedBroker served(socket);
  ASSERT_NE(served.broker, nullptr);
  Driver& driver = *served.broker->controller().driver();
  const auto& counters = served.broker->broker().counters();
  progress->up.store(true);
  ASSERT_TRUE(eventually([&] { return progress->moved[0].load() >= 64 && progress->moved[1].load() >= 64; }, 60));
  killed.kill();
  const std::uint64_t at_kill = progress->moved[0].load();
  ASSERT_TRUE(eventually([&] { return counters.clients.load() == 1; }));
  EXPECT_TRUE(eventually([&] { return progress->moved[0].load() >= at_kill + 64; })) << "the other one stands still";
  EXPECT_EQ(driver.counters().resets, 0u);
  auto third = join_broker(client_options(socket, "third"));
  ASSERT_NE(third, nullptr);
  auto space = take_range(third, {.first_block = kRangeBlocks, .blocks = kRangeBlocks, .name = "1"});
  ASSERT_NE(space, nullptr);
  std::vector<std::byte> memory(kPiece);
  constexpr std::uint64_t kPieces = 16;
  for (std::uint64_t i = 0; i < kPieces; ++i) {
    mark(memory.data(), kPiece, i * kPiece, 9);
    ASSERT_EQ(move(*space, Op::kWrite, i * kPiece, memory.data(), kPiece), 0);
  }
  EXPECT_TRUE(space->flush());
  for (std::uint64_t i = 0; i < kPieces; ++i) {
    ASSERT_EQ(move(*space, Op::kRead, i * kPiece, memory.data(), kPiece), 0);
    ASSERT_TRUE(holds_mark(memory.data(), kPiece, i * kPiece, 9));
  }
  // What ends all queues is survived by the process that is left.
  EXPECT_TRUE(driver.reset());
  const std::uint64_t at_reset = progress->moved[0].load();
  EXPECT_TRUE(eventually([&] { return progress->moved[0].load() >= at_reset + 64; }));
  ASSERT_EQ(move(*space, Op::kRead, 0, memory.data(), kPiece), 0);
  EXPECT_TRUE(holds_mark(memory.data(), kPiece, 0, 9));
  progress->stop.store(true);
  stays.join();
}

TEST(ScenarioBroker, AStoreOnARange) {
  const std::string socket = socket_path();
  const TempFolder folder(memory_parent());
  ServedBroker served(socket);
  ASSERT_NE(served.broker, nullptr);
  const Layout layout{4, {16 << 10, 16 << 10}};
  for (const bool first : {true, false}) {
    auto client = join_broker(client_options(socket, "store"));
    ASSERT_NE(client, nullptr);
    std::shared_ptr<RawNamespace> space = take_range(client, {.first_block = 2 * kRangeBlocks, .name = "store"});
    ASSERT_NE(space, nullptr);
    auto store = open_store(folder.path(), small_store(4), first, on(space, {.force = first}));
    ASSERT_NE(store, nullptr);
    Space pages(*store, 1, layout);
    if (first) {
      EXPECT_EQ(pages.put(1, 0, 60), 60u);
      EXPECT_TRUE(store->flush());
    }
    EXPECT_EQ(pages.fetch(1, 0, 60), 60u);
    EXPECT_TRUE(store->close());
  }
}

// Nobody but its clients can stop the controller then, as the kernel waits for the last file to be closed.
TEST(ScenarioBroker, AKilledBrokerEndsAllRequestsAndTheNextOneStarts) {
  const std::string socket = socket_path();
  ChildProcess process([&] {
    ServedBroker served(socket);
    ::sleep(120);
  });
  ASSERT_TRUE(eventually([&] { return static_cast<bool>(broker::connect_to(socket)); }, 60));
  auto client = join_broker(client_options(socket, "left"));
  ASSERT_NE(client, nullptr);
  auto space = take_range(client, {.name = "all"});
  ASSERT_NE(space, nullptr);
  const DmaPages pages = registered_pages(*client, kPiece);
  ASSERT_TRUE(pages.memory);
  std::atomic<std::uint64_t> moved{0};
  int error = 0;
  std::thread worker([&] {
    while (error == 0) {
      error = move(*space, Op::kRead, 0, pages.memory.get(), kPiece);
      moved.fetch_add(1);
    }
  });
  EXPECT_TRUE(eventually([&] { return moved.load() > 20; }));
  process.kill();
  worker.join();
  EXPECT_EQ(error, ENXIO);
  EXPECT_TRUE(client->closed());
  ServedBroker next(socket);
  ASSERT_NE(next.broker, nullptr);
  auto again = join_broker(client_options(socket, "again"));
  ASSERT_NE(again, nullptr);
  auto all = take_range(again, {.name = "all"});
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(move(*all, Op::kRead, 0, pages.memory.get(), kPiece), 0);
}

// As `tardis nvmed` does it: the C ABI, root until the drive is open.
TEST(ScenarioBroker, ServesWithoutPrivileges) {
  constexpr std::uint32_t kUser = 65534, kOthers = 4321;
  const std::string socket = socket_path();
  SharedValue<std::atomic<int>> step;
  ChildProcess process([&] {
    rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY};
    ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &unlimited), 0);
    tardis_nvmed_options options;
    tardis_nvmed_default_options(&options);
    options.group = kOthers;
    tardis_nvmed* nvmed = nullptr;
    char *report = nullptr, *error = nullptr;
    ASSERT_EQ(tardis_nvmed_open(guest_controllers().front().c_str(), socket.c_str(), &options, nullptr, nullptr, &nvmed,
                                &report, &error),
              TARDIS_OK)
        << error;
    EXPECT_NE(std::string(report).find("QEMU"), std::string::npos) << report;
    tardis_free(report);
    ASSERT_EQ(::chown(socket.c_str(), kUser, kOthers), 0);
    ASSERT_EQ(tardis_nvmed_drop_privileges(kUser, kUser, kOthers, &error), TARDIS_OK) << error;
    EXPECT_EQ(::geteuid(), kUser);
    EXPECT_NE(::setuid(0), 0);
    EXPECT_NE(::access("/dev/vfio", W_OK), 0);
    std::thread stopper([&] {
      step->store(1);
      EXPECT_TRUE(eventually([&] { return step->load() == 2; }, 60));
      tardis_nvmed_stop(nvmed);
    });
    EXPECT_EQ(tardis_nvmed_run(nvmed, &error), TARDIS_OK) << error;
    stopper.join();
    tardis_nvmed_close(nvmed);
  });
  ASSERT_TRUE(eventually([&] { return step->load() == 1; }, 60));
  ChildProcess member([&] {
    const gid_t group = kOthers;
    ASSERT_EQ(::setgroups(1, &group), 0);
    ASSERT_EQ(::setuid(1234), 0);
    auto client = join_broker(client_options(socket, "member"));
    ASSERT_NE(client, nullptr);
    auto space = take_range(client, {.name = "all"});
    ASSERT_NE(space, nullptr);
    const DmaPages pages = registered_pages(*client, kPiece);
    ASSERT_TRUE(pages.memory);
    mark(pages.memory.get(), kPiece, 0, 5);
    EXPECT_EQ(move(*space, Op::kWrite, 0, pages.memory.get(), kPiece), 0);
    std::memset(pages.memory.get(), 0, kPiece);
    EXPECT_EQ(move(*space, Op::kRead, 0, pages.memory.get(), kPiece), 0);
    EXPECT_TRUE(holds_mark(pages.memory.get(), kPiece, 0, 5));
    EXPECT_EQ(client->count().bounced_bytes.load(), 0u);
  });
  member.join();
  step->store(2);
  process.join();
  EXPECT_FALSE(broker::connect_to(socket));
  ServedBroker next(socket);
  EXPECT_NE(next.broker, nullptr) << "the drive was given back";
}

}  // namespace
}  // namespace tardis::nvme::testing
