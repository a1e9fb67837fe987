// SPDX-License-Identifier: Apache-2.0
// Clients of a broker that do what none should, while an honest one works.
#include <fcntl.h>
#include <grp.h>
#include <sys/socket.h>

#include <random>

#include "nvme_broker_support.h"
#include "tests/store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;
using broker::Answer;
using broker::bytes_of;
using broker::HelloRequest;
using broker::Kind;
using broker::MapMemoryReply;
using broker::MapMemoryRequest;
using broker::Message;
using broker::Received;

template <class T>
T request_of(Kind kind, std::uint32_t number = 1) {
  T request{};
  request.header.kind = kind;
  request.header.number = number;
  request.header.bytes = sizeof request;
  return request;
}

// A socket to the broker without a client behind it.
struct Stranger {
  explicit Stranger(const std::string& path, bool greet = true) {
    auto made = broker::connect_to(path);
    EXPECT_TRUE(made);
    if (made) socket = std::move(*made);
    if (!greet) return;
    auto hello = request_of<HelloRequest>(Kind::kHello);
    broker::put_text(hello.name, "stranger\n\x01");
    EXPECT_EQ(send(bytes_of(hello)), broker::Sent::kYes);
    EXPECT_TRUE(next());
  }
  broker::Sent send(std::span<const std::byte> message, int file = -1) {
    return broker::send(socket.get(), message, file);
  }
  // False: the broker has closed it.
  bool next() {
    for (Received got = Received::kNothing;;) {
      EXPECT_TRUE(eventually([&] { return (got = receive(socket.get(), message)) != Received::kNothing; }));
      if (got != Received::kMessage) return false;
      std::memcpy(&answer, message.memory.data(), sizeof answer);
      return true;
    }
  }
  // It is told why, and then that is all.
  void expect_farewell(const std::string& with) {
    while (next()) {
      if (answer.header.kind != Kind::kFarewell) continue;
      EXPECT_NE(broker::get_text(answer.text).find(with), std::string::npos) << broker::get_text(answer.text);
    }
    EXPECT_EQ(answer.header.kind, Kind::kFarewell);
  }

  UniqueFd socket;
  Message message;
  Answer answer;
};

std::size_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

class NvmeBrokerHostile : public ::testing::Test {
 protected:
  void SetUp() override {
    auto options = small_broker();
    options.broker.hello_wait = std::chrono::milliseconds(300);
    options.broker.clients = 8;
    rig = std::make_unique<BrokerRig>(socket, options);
    honest = join_broker(client_options(socket, "honest"));
    space = take_range(honest, {.name = "honest"});
    ASSERT_NE(space, nullptr);
    worker = std::thread([this] {
      std::vector<std::byte> memory(32 << 10);
      for (std::uint64_t i = 0; !stop.load(); ++i) {
        const std::uint64_t offset = i % 64 * memory.size();
        mark(memory.data(), memory.size(), offset, i);
        ASSERT_EQ(move(*space, Op::kWrite, offset, memory.data(), memory.size()), 0);
        std::memset(memory.data(), 0, memory.size());
        ASSERT_EQ(move(*space, Op::kRead, offset, memory.data(), memory.size()), 0);
        ASSERT_TRUE(holds_mark(memory.data(), memory.size(), offset, i));
        done.fetch_add(1);
        ::usleep(200);
      }
    });
  }
  void TearDown() override {
    const std::uint64_t before = done.load();
    EXPECT_TRUE(eventually([&] { return done.load() > before + 5; })) << "the honest client works no more";
    stop.store(true);
    worker.join();
    EXPECT_EQ(rig->driver->counters().resets, 0u);
    EXPECT_TRUE(honest->namespaces()) << "the broker answers no more";
    EXPECT_TRUE(eventually([&] { return rig->counters().clients.load() == 1; }));
    space.reset();
    honest.reset();
  }
  // Its error, or none.
  Code map(Stranger& stranger, int file, std::uint64_t offset, std::uint64_t bytes) {
    auto request = request_of<MapMemoryRequest>(Kind::kMapMemory, 7);
    request.offset = offset;
    request.bytes = bytes;
    EXPECT_EQ(stranger.send(bytes_of(request), file), broker::Sent::kYes);
    EXPECT_TRUE(stranger.next());
    EXPECT_EQ(stranger.answer.header.number, 7u);
    return static_cast<Code>(stranger.answer.code);
  }

  TempFolder folder{memory_parent()};
  const std::string socket = folder.file("nvmed");
  std::unique_ptr<BrokerRig> rig;
  std::shared_ptr<BrokerClient> honest;
  std::shared_ptr<BrokerNamespace> space;
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> done{0};
  std::thread worker;
};

TEST_F(NvmeBrokerHostile, MalformedMessagesEndTheirClientAlone) {
  const auto hello = request_of<HelloRequest>(Kind::kHello);
  const std::vector<std::byte> garbage(100, std::byte{0x5a}), longest(broker::kMostMessageBytes + 1);
  {
    Stranger s(socket);
    s.send(garbage);
    s.expect_farewell("something else");
  }
  {
    Stranger s(socket);
    s.send(longest);
    s.expect_farewell("something else");
  }
  {
    Stranger s(socket);
    s.send(bytes_of(hello).first(10));
    s.expect_farewell("something else");
  }
  {
    Stranger s(socket);
    s.send(bytes_of(hello));
    s.expect_farewell("second greeting");
  }
  {
    Stranger s(socket, false);
    s.send(bytes_of(request_of<broker::ByeRequest>(Kind::kBye)));
    s.expect_farewell("before the greeting");
  }
  {
    Stranger s(socket, false);
    auto other = hello;
    other.header.version = 9;
    s.send(bytes_of(other));
    s.expect_farewell("version 9");
  }
  {
    Stranger s(socket);
    s.send(bytes_of(request_of<broker::ByeRequest>(Kind::kBye, 0)));
    s.expect_farewell("without a number");
  }
  for (const auto kind : {Kind::kOpenQueue, Kind::kMapMemory, Kind::kFarewell, static_cast<Kind>(999)}) {
    Stranger s(socket);
    s.send(bytes_of(request_of<broker::ByeRequest>(kind)));  // of another size
    s.expect_farewell("a request of kind");
  }
  {
    Stranger s(socket);
    s.send(bytes_of(request_of<MapMemoryRequest>(Kind::kMapMemory)));  // without its file
    s.expect_farewell("a request of kind");
  }
}

TEST_F(NvmeBrokerHostile, WhatIsNotTheirsIsNotFound) {
  Stranger s(socket);
  for (const auto kind : {Kind::kRenewQueue, Kind::kCloseQueue}) {
    for (const std::uint32_t queue : {0u, 1u, 2u, 3u, 65538u, ~0u}) {  // 2 and 3 are the honest client's
      auto request = request_of<broker::QueueRequest>(kind);
      request.queue = queue;
      s.send(bytes_of(request));
      ASSERT_TRUE(s.next());
      EXPECT_EQ(static_cast<Code>(s.answer.code), Code::kNotFound) << queue;
    }
  }
  for (const std::uint64_t number : {0u, 1u, 2u}) {
    auto request = request_of<broker::UnmapMemoryRequest>(Kind::kUnmapMemory);
    request.memory = number;
    s.send(bytes_of(request));
    ASSERT_TRUE(s.next());
    EXPECT_EQ(static_cast<Code>(s.answer.code), Code::kNotFound);
    auto range = request_of<broker::CloseRangeRequest>(Kind::kCloseRange);
    range.range = static_cast<std::uint32_t>(number);
    s.send(bytes_of(range));
    ASSERT_TRUE(s.next());
    EXPECT_EQ(static_cast<Code>(s.answer.code), Code::kNotFound);
  }
  for (const auto& [entries, more] : std::vector<std::pair<std::uint32_t, std::uint64_t>>{
           {0, 0}, {1, 0}, {70'000, 0}, {64, 100}, {64, ~std::uint64_t{4095}}, {64, std::uint64_t{1} << 60}}) {
    auto request = request_of<broker::OpenQueueRequest>(Kind::kOpenQueue);
    request.entries = entries;
    request.more_bytes = more;
    s.send(bytes_of(request));
    ASSERT_TRUE(s.next());
    EXPECT_NE(s.answer.code, 0) << entries << " " << more;
  }
}

TEST_F(NvmeBrokerHostile, OnlyMemoryThatCannotShrinkIsMapped) {
  Stranger s(socket);
  const UniqueFd bare(::memfd_create("bare", MFD_CLOEXEC | MFD_ALLOW_SEALING)), pipe_end([] {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::pipe(ends), 0);
    ::close(ends[1]);
    return ends[0];
  }());
  ASSERT_EQ(::ftruncate(bare.get(), 65536), 0);
  EXPECT_EQ(map(s, bare.get(), 0, 65536), Code::kInvalidArgument);
  EXPECT_EQ(map(s, pipe_end.get(), 0, 4096), Code::kInvalidArgument);
  const UniqueFd file(::open(folder.file("plain").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
  EXPECT_EQ(map(s, file.get(), 0, 4096), Code::kInvalidArgument);
  auto good = broker::make_shared_memory("good", 65536);
  ASSERT_TRUE(good);
  for (const auto& [offset, bytes] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {0, 0}, {0, 65537}, {0, 69632}, {4096, 65536}, {100, 4096}, {~std::uint64_t{4095}, 8192}}) {
    EXPECT_EQ(map(s, good->get(), offset, bytes), Code::kInvalidArgument) << offset << " " << bytes;
  }
  EXPECT_EQ(map(s, good->get(), 4096, 4096), Code::kOk);
  EXPECT_EQ(map(s, good->get(), 4096, 4096), Code::kOk) << "the same, mapped again";
}

TEST_F(NvmeBrokerHostile, FilesInAnyNumberAreClosed) {
  const std::size_t before = open_files();
  for (int round = 0; round < 20; ++round) {
    Stranger s(socket);
    std::array<int, 60> files;
    files.fill(s.socket.get());
    alignas(cmsghdr) std::byte control[CMSG_SPACE(sizeof files)]{};
    const auto request = request_of<MapMemoryRequest>(Kind::kMapMemory);
    iovec data{const_cast<MapMemoryRequest*>(&request), sizeof request};
    msghdr head{};
    head.msg_iov = &data;
    head.msg_iovlen = 1;
    head.msg_control = control;
    // Two fit in what the broker has for them, 60 do not; and a message that is files alone.
    const std::size_t count = round % 2 == 0 ? 2 : files.size();
    head.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* const list = CMSG_FIRSTHDR(&head);
    list->cmsg_level = SOL_SOCKET;
    list->cmsg_type = SCM_RIGHTS;
    list->cmsg_len = CMSG_LEN(count * sizeof(int));
    std::memcpy(CMSG_DATA(list), files.data(), count * sizeof(int));
    if (round % 4 == 3) data.iov_len = 0;
    for (int i = 0; i < 3; ++i) (void)::sendmsg(s.socket.get(), &head, MSG_DONTWAIT | MSG_NOSIGNAL);
    s.expect_farewell("something else");
  }
  // One too many with requests that are fine otherwise.
  Stranger s(socket);
  for (int i = 0; i < 50; ++i) {
    s.send(bytes_of(request_of<broker::NamespacesRequest>(Kind::kNamespaces)), s.socket.get());
    ASSERT_TRUE(s.next());
    EXPECT_EQ(s.answer.code, 0);
  }
  s.socket.reset();
  EXPECT_TRUE(eventually([&] { return open_files() <= before; })) << open_files() << " of " << before;
}

TEST_F(NvmeBrokerHostile, WhoNeverReadsIsDropped) {
  Stranger s(socket);
  const auto request = request_of<broker::NamespacesRequest>(Kind::kNamespaces);
  EXPECT_TRUE(eventually([&] { return s.send(bytes_of(request)) == broker::Sent::kEnd; })) << "it is served for ever";
  EXPECT_GE(rig->counters().dropped.load(), 1u);
}

TEST_F(NvmeBrokerHostile, WhoSaysNothingIsDropped) {
  std::vector<std::unique_ptr<Stranger>> silent;
  for (int i = 0; i < 12; ++i) silent.push_back(std::make_unique<Stranger>(socket, false));
  EXPECT_TRUE(eventually([&] { return rig->counters().dropped.load() >= 7; }));
  EXPECT_TRUE(eventually([&] { return rig->counters().clients.load() == 1; }));
  EXPECT_EQ(rig->counters().refused.load(), 5u);
}

TEST_F(NvmeBrokerHostile, RandomMessagesFromASeed) {
  std::mt19937_64 random(7);
  auto memory = broker::make_shared_memory("good", 1 << 20);
  ASSERT_TRUE(memory);
  std::uint64_t answers = 0;
  for (int round = 0; round < 60; ++round) {
    Stranger s(socket);
    bool open = true;
    for (int i = 0; open && i < 20; ++i) {
      // Of kNamespaces to kBye: right more often than not.
      constexpr std::size_t kSizes[] = {24, 88, 24, 32, 24, 24, 32, 24, 16};
      const std::size_t which = random() % 9;
      std::vector<std::byte> bytes(kSizes[random() % 16 == 0 ? random() % 9 : which]);
      for (auto& each : bytes) each = random() % 3 == 0 ? std::byte(random()) : std::byte(random() % 4);
      broker::Header header;
      header.kind = static_cast<Kind>(2 + which);
      header.number = 1 + static_cast<std::uint32_t>(random() % 5);
      header.bytes = static_cast<std::uint32_t>(bytes.size());
      std::memcpy(bytes.data(), &header, sizeof header);
      (void)s.send(bytes, random() % 4 != 0 ? memory->get() : -1);
      open = s.next() && s.answer.header.kind != Kind::kFarewell;
      answers += open ? 1 : 0;
    }
  }
  EXPECT_GT(answers, 60u);
}

// Needs another user, so root.
TEST(NvmeBrokerPeers, OnlyTheSameUserOrGroup) {
  if (::geteuid() != 0) GTEST_SKIP() << "becoming another user needs root";
  const TempFolder folder(memory_parent());
  ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
  constexpr gid_t kGroup = 12345;
  const std::string socket = folder.file("nvmed");
  SharedValue<std::atomic<int>> ready;
  const auto as = [&](const std::vector<gid_t>& groups, bool admitted) {
    return std::make_unique<ChildProcess>([&, groups, admitted] {
      ASSERT_TRUE(eventually([&] { return ready->load() != 0; }));
      ASSERT_EQ(::setgroups(groups.size(), groups.data()), 0);
      ASSERT_EQ(::setgid(65534), 0);
      ASSERT_EQ(::setuid(65534), 0);
      const auto client = BrokerClient::connect(client_options(socket, "nobody"));
      EXPECT_EQ(static_cast<bool>(client), admitted) << (client ? "" : client.error().message);
      if (client) return;
      EXPECT_TRUE(client.error().code == Code::kPermission) << client.error().message;
    });
  };
  auto member = as({kGroup}, true), other = as({54321}, false);
  auto options = small_broker();
  options.broker.group = kGroup;
  BrokerRig rig(socket, options);
  ASSERT_EQ(::chmod(socket.c_str(), 0666), 0);  // so that the broker itself has to look
  ready->store(1);
  member->join();
  other->join();
  EXPECT_EQ(rig.counters().accepted.load(), 1u);
  EXPECT_EQ(rig.counters().refused.load(), 1u);
}

}  // namespace
}  // namespace tardis::nvme::testing
