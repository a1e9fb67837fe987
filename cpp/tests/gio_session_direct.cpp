// SPDX-License-Identifier: Apache-2.0
// Direct landing of sessions through the C ABI, with an engine behind its table of functions.
#include <cstring>
#include <string>

#include "gio/session.h"
#include "tardis/gio_direct.h"
#include "tardis/gio_layer.h"
#include "tests/block_support.h"
#include "tests/gio_direct_support.h"

namespace tardis::gio {
namespace {

using testing::context_of;
using testing::CpuEngine;

CpuEngine& engine_of(void* context) { return *static_cast<CpuEngine*>(context); }
nvme::CopyDirection direction_of(int to_remote) {
  return to_remote != 0 ? nvme::CopyDirection::kToRemote : nvme::CopyDirection::kToHost;
}

tardis_copy_engine table_of(CpuEngine& engine) {
  tardis_copy_engine table{};
  table.context = &engine;
  table.name = "engine of the tests";
  table.allocate = [](void* context, std::uint64_t bytes, void** remote) {
    *remote = *engine_of(context).allocate(bytes);
    return 0;
  };
  table.release = [](void* context, void* remote) {
    engine_of(context).free(remote);
    return 0;
  };
  table.copy = [](void* context, const tardis_copy* copy, int to_remote) {
    return engine_of(context).copy(direction_of(to_remote), *copy) ? 0 : 1;
  };
  table.pin = [](void* context, void* host, std::uint64_t bytes) {
    return engine_of(context).pin(host, bytes) ? 0 : 1;
  };
  table.unpin = [](void* context, void* host) {
    engine_of(context).unpin(host);
    return 0;
  };
  table.open_lane = [](void* context, void** lane) {
    *lane = engine_of(context).open_lane()->release();
    return 0;
  };
  table.close_lane = [](void* lane) { delete static_cast<nvme::CopyLane*>(lane); };
  table.start = [](void* lane, int to_remote, const tardis_copy* copies, std::size_t count, std::uint64_t batch) {
    return static_cast<nvme::CopyLane*>(lane)->start(direction_of(to_remote), {copies, count}, batch) ? 0 : 1;
  };
  table.poll = [](void* lane, tardis_copy_end* ends, std::size_t most) {
    return static_cast<nvme::CopyLane*>(lane)->poll({ends, most});
  };
  return table;
}

// A session with everything that its owner has to have.
class Owner {
 public:
  explicit Owner(const char* file) {
    tardis_gio_options options{};
    options.bytes = kBytes;
    options.file = file;
    options.block_bytes = 4096;
    options.controller_threads = 2;
    options.queues = 2;
    options.entries = 16;
    options.slot_bytes = 4096;
    memory_ = AlignedBuffer(tardis_gio_memory_bytes(&options));
    expect(tardis_gio_open(&options, memory_.data(), &session, &error_));
    lists_ = AlignedBuffer(tardis_gio_direct_list_bytes(session));
    data_.resize(kBytes);
    for (std::size_t i = 0; i < data_.size(); ++i) data_[i] = static_cast<std::byte>(i * 7 + i / 4096);
    expect(tardis_gio_write(session, 0, data_.data(), data_.size(), &error_));
  }
  ~Owner() { tardis_gio_close(session); }

  bool use_direct(CpuEngine& engine) {
    const tardis_copy_engine table = table_of(engine);
    const bool used = tardis_gio_use_direct(session, &table, lists_.data(), &error_) == TARDIS_OK;
    if (!used) message = error_;
    tardis_free(std::exchange(error_, nullptr));
    return used;
  }
  std::string report() {
    char* const text = tardis_gio_report(session);
    const std::string copy = text;
    tardis_free(text);
    return copy;
  }
  // The namespace is as it was written.
  void unharmed() {
    std::vector<std::byte> found(kBytes);
    expect(tardis_gio_read(session, 0, found.data(), found.size(), &error_));
    EXPECT_EQ(std::memcmp(found.data(), data_.data(), kBytes), 0);
  }
  // Every context on each of the queues, one after the other.
  IoFlag run(const std::vector<IoContext>& contexts, bool direct) {
    const void *prp = nullptr, *sgl = nullptr, *table = nullptr;
    std::size_t prp_bytes = 0, sgl_bytes = 0, table_bytes = 0;
    expect(tardis_gio_tables(session, &prp, &prp_bytes, &sgl, &sgl_bytes, &error_));
    std::vector<GrantedQueue> queues(2);
    std::vector<RingState> states(2 * 2);
    std::vector<std::uint16_t> uses(2 * 15);
    expect(tardis_gio_queues(session, states.data(), uses.data(), const_cast<void*>(prp), const_cast<void*>(sgl),
                             queues.data(), &error_));
    std::vector<std::byte> copy;
    if (direct) {
      expect(tardis_gio_direct_table(session, &table, &table_bytes, &error_));
      copy.assign(static_cast<const std::byte*>(table), static_cast<const std::byte*>(table) + table_bytes);
      expect(tardis_gio_direct_queues(session, copy.data(), queues.data(), &error_));
    }
    std::uint32_t worst = kIoDone;
    for (GrantedQueue& queue : queues) {
      start_queue(queue);
      AlignedBuffer memory(RingWork::bytes(queue.commands, 32), 64);
      const RingWork work = RingWork::in(memory.data(), queue.commands, 32);
      HostMover mover(queue, work);
      const auto count = static_cast<std::uint32_t>(contexts.size());
      std::vector<std::uint32_t> statuses(count);
      RingReport ring{};
      std::uint32_t ended = 0, flag = kIoPending;
      const IoControlBlock iocb{contexts.data(), &count, statuses.data(), &ring,
                                &ended,          &flag,  10'000'000'000,  nullptr};
      Ring<HostLanes<32>, HostMover>(HostLanes<32>(), mover, queue, work).run(iocb, 0, 1);
      worst = std::max(worst, flag);
    }
    expect(tardis_gio_renew(session, &error_));
    return static_cast<IoFlag>(worst);
  }
  void expect(tardis_code code) { ASSERT_EQ(code, TARDIS_OK) << error_; }

  static constexpr std::size_t kBytes = 2 << 20;
  tardis_gio_session* session = nullptr;
  std::string message;
  const std::byte* data(std::uint64_t block) const { return data_.data() + block * 4096; }

 private:
  AlignedBuffer memory_, lists_;
  std::vector<std::byte> data_;
  char* error_ = nullptr;
};

void lands(const char* file) {
  CpuEngine engine;
  Owner owner(file);
  EXPECT_NE(owner.report().find("landing: bounce slots"), std::string::npos) << owner.report();
  char* error = nullptr;
  auto* const a = static_cast<std::byte*>(*engine.allocate(256 << 10));
  auto* const b = static_cast<std::byte*>(*engine.allocate(256 << 10));
  EXPECT_EQ(tardis_gio_register_region(owner.session, a, 256 << 10, &error), TARDIS_INVALID_ARGUMENT);
  tardis_free(error);
  ASSERT_TRUE(owner.use_direct(engine)) << owner.message;
  owner.unharmed();
  EXPECT_FALSE(owner.use_direct(engine));
  for (std::byte* const base : {b, a}) {
    ASSERT_EQ(tardis_gio_register_region(owner.session, base, 256 << 10, &error), TARDIS_OK) << error;
  }
  EXPECT_EQ(tardis_gio_register_region(owner.session, a + 4096, 4096, &error), TARDIS_INVALID_ARGUMENT);
  tardis_free(error);
  const std::string report = owner.report();
  EXPECT_NE(report.find("landing: direct (engine of the tests, self-test passed), 2 regions of 524288 bytes"),
            std::string::npos)
      << report;
  EXPECT_NE(report.find(file == nullptr ? "from the namespace's memory" : "staged"), std::string::npos) << report;

  std::vector<IoContext> contexts;
  for (std::size_t i = 0; i < 30; ++i) {
    contexts.push_back(context_of(IoOp::kRead, 2 * ((i * 17) % 200), a + i * 8192, 4096, b + i * 8192, 4096));
  }
  EXPECT_EQ(owner.run(contexts, true), kIoDone);
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    EXPECT_EQ(std::memcmp(engine.at(a + i * 8192), owner.data(contexts[i].block), 4096), 0) << i;
    EXPECT_EQ(std::memcmp(engine.at(b + i * 8192), owner.data(contexts[i].block + 1), 4096), 0) << i;
  }
  // The same queues, with bounce slots.
  AlignedBuffer page(4096);
  contexts.assign(1, context_of(IoOp::kRead, 5, page.data(), 4096));
  EXPECT_EQ(owner.run(contexts, true), kIoError);
  EXPECT_EQ(owner.run(contexts, false), kIoDone);
  EXPECT_EQ(std::memcmp(page.data(), owner.data(5), 4096), 0);
  // A region less.
  ASSERT_EQ(tardis_gio_unregister_region(owner.session, b, &error), TARDIS_OK) << error;
  EXPECT_EQ(tardis_gio_unregister_region(owner.session, b, &error), TARDIS_NOT_FOUND);
  tardis_free(error);
  engine.free(b);
  contexts.assign(1, context_of(IoOp::kRead, 5, b, 4096));
  EXPECT_EQ(owner.run(contexts, true), kIoError);
  contexts.assign(1, context_of(IoOp::kRead, 5, a, 4096));
  EXPECT_EQ(owner.run(contexts, true), kIoDone);
}

TEST(GioSessionDirect, FromMemory) { lands(nullptr); }

TEST(GioSessionDirect, FromAFile) {
  const tardis::testing::TempFolder folder;
  const std::string file = folder.file("namespace");
  lands(file.c_str());
}

// No ring sees the bytes: digests that were asked for would be neither compared nor made.
TEST(GioSessionDirect, LayersWithDigestsAreRefused) {
  CpuEngine engine;
  Owner owner(nullptr);
  ASSERT_TRUE(owner.use_direct(engine)) << owner.message;
  char* error = nullptr;
  auto* const pool = static_cast<std::byte*>(*engine.allocate(64 << 10));
  ASSERT_EQ(tardis_gio_register_region(owner.session, pool, 64 << 10, &error), TARDIS_OK) << error;
  GrantedQueue queues[2];
  RingState states[4];
  std::vector<std::uint16_t> uses(2 * 15);
  const void *prp = nullptr, *sgl = nullptr, *table = nullptr;
  std::size_t bytes = 0;
  ASSERT_EQ(tardis_gio_tables(owner.session, &prp, &bytes, &sgl, &bytes, &error), TARDIS_OK);
  ASSERT_EQ(tardis_gio_queues(owner.session, states, uses.data(), const_cast<void*>(prp), const_cast<void*>(sgl),
                              queues, &error),
            TARDIS_OK);
  ASSERT_EQ(tardis_gio_direct_table(owner.session, &table, &bytes, &error), TARDIS_OK);
  ASSERT_EQ(tardis_gio_direct_queues(owner.session, table, queues, &error), TARDIS_OK);
  ASSERT_EQ(tardis_gio_host_start(queues, 2, &error), TARDIS_OK);
  AlignedBuffer contexts(kMostContexts * sizeof(IoContext)), work(tardis_gio_host_work_bytes(queues, 2), 64);
  std::vector<std::uint32_t> statuses(kMostContexts);
  std::vector<RingReport> reports(2);
  const std::uint32_t page = 3, slot = 5, count = 1;
  std::uint64_t digest = 0;  // of other bytes
  std::uint32_t context_count = 0, ended = 0, flag = kIoPending;
  tardis_gio_layer layer{};
  layer.pool_pages = &page;
  layer.slots = &slot;
  layer.count = &count;
  layer.pools[0] = reinterpret_cast<std::uintptr_t>(pool);
  layer.page_stride[0] = layer.page_bytes[0] = layer.block_bytes = layer.most_bytes = 4096;
  layer.most_pages = 1;
  layer.pool_page_count = layer.slot_count = 16;
  layer.op = TARDIS_GIO_READ;
  layer.blocks_per_slot = 1;
  layer.digests = reinterpret_cast<std::uintptr_t>(&digest);
  layer.digest_stride = sizeof digest;
  layer.contexts = contexts.data();
  layer.context_count = &context_count;
  layer.ended = &ended;
  layer.work = work.data();
  layer.statuses = statuses.data();
  layer.reports = reports.data();
  layer.flag = &flag;
  layer.deadline_ns = 10'000'000'000;
  layer.queues = queues;
  layer.rings = 2;
  EXPECT_EQ(tardis_gio_host_layer(&layer, &error), TARDIS_INVALID_ARGUMENT);
  EXPECT_EQ(flag, kIoPending);
  EXPECT_NE(std::string(error == nullptr ? "" : error).find("queues that do not land directly"), std::string::npos);
  tardis_free(error);
  layer.digests = 0;
  EXPECT_EQ(tardis_gio_host_layer(&layer, &error), TARDIS_OK);
  EXPECT_EQ(flag, kIoDone);
  EXPECT_EQ(std::memcmp(engine.at(pool + page * 4096), owner.data(slot), 4096), 0);
}

TEST(GioSessionDirect, AnEngineThatFailsTheSelfTest) {
  CpuEngine flips, fails, good;
  Owner owner(nullptr);
  flips.flips = true;
  EXPECT_FALSE(owner.use_direct(flips));
  EXPECT_NE(owner.message.find("found others from byte"), std::string::npos) << owner.message;
  EXPECT_NE(owner.report().find("landing: bounce slots (self-test of engine of the tests"), std::string::npos)
      << owner.report();
  fails.fail(1000, 0);  // however often the driver tries
  EXPECT_FALSE(owner.use_direct(fails));
  owner.unharmed();
  AlignedBuffer page(4096);
  const std::vector<IoContext> contexts = {context_of(IoOp::kRead, 5, page.data(), 4096)};
  EXPECT_EQ(owner.run(contexts, false), kIoDone);
  EXPECT_EQ(std::memcmp(page.data(), owner.data(5), 4096), 0);
  EXPECT_TRUE(owner.use_direct(good)) << owner.message;
}

TEST(GioSessionDirect, TooManyControllerThreads) {
  CpuEngine engine;
  SessionOptions options;
  options.bytes = 1 << 20;
  options.slot_bytes = 4096;
  options.controller_threads = 5;
  AlignedBuffer memory(Session::memory_bytes(options));
  auto opened = Session::open(options, memory.data());
  ASSERT_TRUE(opened) << opened.error().message;
  AlignedBuffer lists((*opened)->direct_list_bytes());
  const auto used = (*opened)->use_direct(table_of(engine), lists.data());
  ASSERT_FALSE(used);
  EXPECT_NE(used.error().message.find("at most 4 controller threads, found 5"), std::string::npos)
      << used.error().message;
}

TEST(GioSessionDirect, RegionsOutliveAController) {
  CpuEngine engine;
  SessionOptions options;
  options.bytes = 1 << 20;
  options.entries = 16;
  options.slot_bytes = 4096;
  AlignedBuffer memory(Session::memory_bytes(options));
  auto opened = Session::open(options, memory.data());
  ASSERT_TRUE(opened) << opened.error().message;
  Session& session = **opened;
  AlignedBuffer lists(session.direct_list_bytes());
  ASSERT_TRUE(session.use_direct(table_of(engine), lists.data()));
  auto* const base = static_cast<std::byte*>(*engine.allocate(64 << 10));
  ASSERT_TRUE(session.add_region(base, 64 << 10));
  ASSERT_TRUE(session.reopen());
  ASSERT_EQ(session.regions().size(), 1u);
  GrantedQueue queue = session.queues().front();
  RingState state{};
  std::vector<std::uint16_t> uses(queue.commands);
  queue.state = &state;
  queue.uses = uses.data();
  queue.direct = session.direct(0);
  start_queue(queue);
  std::memset(session.media() + 4096, 0x3c, 4096);
  const IoContext context = context_of(IoOp::kRead, 1, base + 512, 4096);
  AlignedBuffer work_memory(RingWork::bytes(queue.commands, 32), 64);
  const RingWork work = RingWork::in(work_memory.data(), queue.commands, 32);
  HostMover mover(queue, work);
  const std::uint32_t count = 1;
  std::uint32_t status = 0, ended = 0, flag = kIoPending;
  RingReport report{};
  const IoControlBlock iocb{&context, &count, &status, &report, &ended, &flag, 10'000'000'000, nullptr};
  Ring<HostLanes<32>, HostMover>(HostLanes<32>(), mover, queue, work).run(iocb, 0, 1);
  EXPECT_EQ(flag, kIoDone);
  EXPECT_EQ(std::memcmp(engine.at(base) + 512, session.media() + 4096, 4096), 0);
}

}  // namespace
}  // namespace tardis::gio
