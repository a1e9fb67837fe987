// SPDX-License-Identifier: Apache-2.0
// A broker of a controller, with clients in other processes.
#include <grp.h>
#include <sys/resource.h>

#include <filesystem>

#include "guest_broker.h"
#include "guest_slot.h"
#include "nvme/vfio/vfio_mapper.h"
#include "tardis/nvmed.h"
#include "tests/nvme_broker_work.h"
#include "tests/nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

// Reads until it cannot any more; made when it has read a while.
class UntilAnError {
 public:
  UntilAnError(BrokerNamespace& space, const DmaPages& pages)
      : thread_([&] {
          while (error_ == 0) {
            error_ = move(space, Op::kRead, 0, pages.memory.get(), kPiece);
            reads_.fetch_add(1);
          }
        }) {
    EXPECT_TRUE(eventually([&] { return reads_.load() > 20; }));
  }
  ~UntilAnError() { error(); }

  int error() {
    if (thread_.joinable()) thread_.join();
    return error_;
  }

 private:
  std::atomic<std::uint64_t> reads_{0};
  int error_ = 0;
  std::thread thread_;
};

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

TEST(ScenarioBroker, AClientHasWhatItAsksForWithinItsLimits) {
  VfioBrokerOptions options;
  options.broker.clients = 1;
  options.broker.limits.queues = 1;
  options.broker.limits.ranges = 1;
  options.broker.limits.bytes = 8 << 20;
  ServedBroker served(socket_path(), options);
  ASSERT_NE(served.broker, nullptr);
  auto client = join_broker(client_options(socket_path(), "first"));
  ASSERT_NE(client, nullptr);
  EXPECT_EQ(client->queue_pairs(), 1u);
  const auto found = client->namespaces();
  ASSERT_TRUE(found) << found.error().message;
  const auto& own = served.broker->controller().driver()->namespaces();
  ASSERT_EQ(found->size(), own.size());
  EXPECT_EQ(found->front().block_bytes, own.front().block_bytes);
  EXPECT_EQ(found->front().blocks, own.front().blocks);

  const auto refusal = [](const auto& result) { return result ? std::string("nothing") : result.error().message; };
  const auto expect_part = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect_part(refusal(BrokerNamespace::open(client, {.namespace_id = 77, .name = "a"})),
              "expected namespace 77, found 1");
  expect_part(refusal(BrokerNamespace::open(client, {.first_block = own.front().blocks, .blocks = 1, .name = "a"})),
              "expected a name, and blocks within");
  auto space = take_range(client, {.blocks = kRangeBlocks, .name = "a"});
  ASSERT_NE(space, nullptr);
  expect_part(refusal(BrokerNamespace::open(client, {.first_block = kRangeBlocks, .blocks = 1, .name = "b"})),
              "expected at most 1 ranges for a client");
  expect_part(refusal(BrokerClient::connect(client_options(socket_path(), "second"))), "expected at most 1 clients");

  const auto too_much = client->allocate(16 << 20);
  ASSERT_TRUE(too_much);
  expect_part(refusal(client->register_memory(too_much->memory.get(), 16 << 20)), "bytes for a client");
  std::vector<std::byte> foreign(kPiece);
  EXPECT_FALSE(client->register_memory(foreign.data(), foreign.size())) << "the broker cannot map it";
  // Memory that is given back is no longer the controller's, and can be named again.
  const auto mapped = [&] { return dynamic_cast<VfioMapper&>(served.broker->controller().mapper()).mapped_ranges(); };
  const std::size_t before = mapped();
  const DmaPages pages = registered_pages(*client, kPiece);
  ASSERT_TRUE(pages.memory);
  EXPECT_GT(mapped(), before);
  client->unregister_memory(pages.memory.get());
  EXPECT_EQ(mapped(), before);
  ASSERT_TRUE(client->register_memory(pages.memory.get(), kPiece));
  mark(pages.memory.get(), kPiece, 0, 3);
  EXPECT_EQ(move(*space, Op::kWrite, 0, pages.memory.get(), kPiece), 0);
  std::memset(pages.memory.get(), 0, kPiece);
  EXPECT_EQ(move(*space, Op::kRead, 0, pages.memory.get(), kPiece), 0);
  EXPECT_TRUE(holds_mark(pages.memory.get(), kPiece, 0, 3));
  EXPECT_EQ(client->count().bounced_bytes.load(), 0u);
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
  UntilAnError reader(*space, pages);
  process.kill();
  EXPECT_EQ(reader.error(), ENXIO);
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
  ChildProcess stranger([&] {
    ASSERT_EQ(::chmod(socket.c_str(), 0666), 0);
    const gid_t group = kOthers + 1;
    ASSERT_EQ(::setgroups(1, &group), 0);
    ASSERT_EQ(::setuid(1234), 0);
    const auto refused = BrokerClient::connect(client_options(socket, "stranger"));
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Code::kPermission) << refused.error().message;
    EXPECT_NE(refused.error().message.find("found user 1234"), std::string::npos) << refused.error().message;
  });
  stranger.join();
  step->store(2);
  process.join();
  EXPECT_FALSE(broker::connect_to(socket));
  ServedBroker next(socket);
  EXPECT_NE(next.broker, nullptr) << "the drive was given back";
}

// ---- a machine of its own: the first controller is behind a port with slot power

TEST(ScenarioBrokerLoss, ADriveThatIsPulledEndsItsClientsAndTheBroker) {
  const std::string socket = socket_path();
  VfioBrokerOptions options;
  options.broker.socket_path = socket;
  auto opened = VfioBroker::open(guest_controllers().front(), options);
  ASSERT_TRUE(opened) << opened.error().message;
  Status ended;
  std::thread broker([&] { ended = (*opened)->broker().run(); });
  auto client = join_broker(client_options(socket, "client"));
  ASSERT_NE(client, nullptr);
  auto space = take_range(client, {.name = "all"});
  ASSERT_NE(space, nullptr);
  const DmaPages pages = registered_pages(*client, kPiece);
  ASSERT_TRUE(pages.memory);
  UntilAnError reader(*space, pages);
  switch_slot_off(guest_controllers().front());
  EXPECT_EQ(reader.error(), ENODEV);
  broker.join();
  EXPECT_TRUE(client->closed());
  ASSERT_FALSE(ended);
  EXPECT_EQ(ended.error().os_error, ENODEV);
  EXPECT_NE(ended.error().message.find("gone or failed for good"), std::string::npos) << ended.error().message;
  EXPECT_EQ((*opened)->broker().counters().clients.load(), 0u);
  EXPECT_EQ(dynamic_cast<VfioMapper&>((*opened)->controller().mapper()).mapped_ranges(), 0u) << "it has memory still";
}

}  // namespace
}  // namespace tardis::nvme::testing
