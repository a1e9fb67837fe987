// SPDX-License-Identifier: Apache-2.0
// Sessions through their C ABI: over memory and over a file, with a ring of the host as their owner.
#include <cstring>
#include <filesystem>
#include <fstream>

#include "tardis/gio.h"
#include "tests/block_support.h"
#include "tests/gio_support.h"

namespace tardis::gio {
namespace {

tardis_gio_options options_of(const char* file) {
  tardis_gio_options options{};
  options.bytes = 4 << 20;
  options.file = file;
  options.block_bytes = 4096;
  options.controller_threads = 1;
  options.queues = 2;
  options.entries = 16;
  options.slot_bytes = 16 << 10;
  return options;
}

// One ring after the other, each as if it were alone.
IoFlag read_with_rings(std::vector<GrantedQueue>& queues, std::vector<IoContext>& contexts) {
  for (std::size_t i = 0; i < queues.size(); ++i) {
    AlignedBuffer memory(RingWork::bytes(queues[i].commands, 32), 64);
    const RingWork work = RingWork::in(memory.data(), queues[i].commands, 32);
    HostMover mover(queues[i], work);
    const auto count = static_cast<std::uint32_t>(contexts.size());
    std::vector<std::uint32_t> statuses(count);
    RingReport report{};
    std::uint32_t ended = 0, flag = kIoPending;
    const IoControlBlock iocb{contexts.data(), &count, statuses.data(), &report,
                              &ended,          &flag,  10'000'000'000,  nullptr};
    Ring<HostLanes<32>, HostMover>(HostLanes<32>(), mover, queues[i], work).run(iocb, 0, 1);
    if (flag != kIoDone) return kIoError;
  }
  return kIoDone;
}

void run_session(const char* file, std::uint32_t rest_us = 0) {
  const tardis_gio_options options = options_of(file);
  const std::size_t bytes = tardis_gio_memory_bytes(&options);
  ASSERT_GT(bytes, 2u * 15 * (16 << 10));
  AlignedBuffer memory(bytes);
  tardis_gio_session* session = nullptr;
  char* error = nullptr;
  ASSERT_EQ(tardis_gio_open(&options, memory.data(), &session, &error), TARDIS_OK) << error;
  ASSERT_EQ(tardis_gio_rest(session, 100, rest_us, &error), TARDIS_OK) << error;
  std::vector<std::byte> data(1 << 20), page(16 << 10);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7 + i / 4096);
  ASSERT_EQ(tardis_gio_write(session, 0, data.data(), data.size(), &error), TARDIS_OK) << error;
  ASSERT_EQ(tardis_gio_flush(session, &error), TARDIS_OK) << error;
  EXPECT_EQ(tardis_gio_write(session, 100, data.data(), 4096, &error), TARDIS_IO);
  tardis_free(error);

  for (int round = 0; round < 3; ++round) {
    tardis_gio_expect(session, round != 2);  // unexpected commands wait, and are served all the same
    const void *prp = nullptr, *sgl = nullptr;
    std::size_t prp_bytes = 0, sgl_bytes = 0;
    ASSERT_EQ(tardis_gio_tables(session, &prp, &prp_bytes, &sgl, &sgl_bytes, &error), TARDIS_OK);
    AlignedBuffer prp_copy(prp_bytes), sgl_copy(sgl_bytes), state(2 * 32), uses(2 * 15 * 2);
    std::memcpy(prp_copy.data(), prp, prp_bytes);
    std::memcpy(sgl_copy.data(), sgl, sgl_bytes);
    std::vector<GrantedQueue> queues(2);
    ASSERT_EQ(tardis_gio_queue_bytes(), sizeof(GrantedQueue));
    ASSERT_EQ(
        tardis_gio_queues(session, state.data(), uses.data(), prp_copy.data(), sgl_copy.data(), queues.data(), &error),
        TARDIS_OK);
    for (const GrantedQueue& queue : queues) start_queue(queue);
    std::vector<std::byte> pages(40 * (16 << 10), std::byte{0xa5});
    AlignedBuffer target(pages.size());
    std::vector<IoContext> contexts(40);
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      contexts[i].op = IoOp::kRead;
      contexts[i].block = 4 * ((i * 17) % 60);
      contexts[i].memory[0] = reinterpret_cast<std::uintptr_t>(target.data() + i * (16 << 10));
      contexts[i].bytes[0] = 16 << 10;
    }
    EXPECT_EQ(read_with_rings(queues, contexts), kIoDone);
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      EXPECT_EQ(std::memcmp(target.data() + i * (16 << 10), data.data() + contexts[i].block * 4096, 16 << 10), 0) << i;
    }
    ASSERT_EQ(tardis_gio_renew(session, &error), TARDIS_OK) << error;
  }
  ASSERT_EQ(tardis_gio_read(session, 4096, page.data(), page.size(), &error), TARDIS_OK) << error;
  EXPECT_EQ(std::memcmp(page.data(), data.data() + 4096, page.size()), 0);
  char* const report = tardis_gio_report(session);
  EXPECT_NE(std::string(report).find("2 for owners outside"), std::string::npos) << report;
  tardis_free(report);
  tardis_gio_close(session);
}

TEST(GioSession, OverMemory) { run_session(nullptr); }

TEST(GioSession, OverMemoryByThreadsThatRest) { run_session(nullptr, 200); }

TEST(GioSession, RestsThatAreTooLong) {
  const tardis_gio_options options = options_of(nullptr);
  AlignedBuffer memory(tardis_gio_memory_bytes(&options));
  tardis_gio_session* session = nullptr;
  char* error = nullptr;
  ASSERT_EQ(tardis_gio_open(&options, memory.data(), &session, &error), TARDIS_OK) << error;
  EXPECT_EQ(tardis_gio_rest(session, 1'000, 10'001, &error), TARDIS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error).find("10000"), std::string::npos) << error;
  tardis_free(error);
  tardis_gio_close(session);
}

TEST(GioSession, OverAFile) {
  const tardis::testing::TempFolder folder;
  const std::string file = folder.file("namespace");
  run_session(file.c_str());
  EXPECT_EQ(std::filesystem::file_size(file), 4u << 20);
}

TEST(GioSession, OptionsThatMakeNoSense) {
  const auto refused = [](auto change) {
    tardis_gio_options options = options_of(nullptr);
    change(options);
    return tardis_gio_memory_bytes(&options) == 0;
  };
  EXPECT_FALSE(refused([](tardis_gio_options&) {}));
  EXPECT_TRUE(refused([](tardis_gio_options& o) { o.block_bytes = 1024; }));
  EXPECT_TRUE(refused([](tardis_gio_options& o) { o.bytes = 1000; }));
  EXPECT_TRUE(refused([](tardis_gio_options& o) { o.queues = 0; }));
  EXPECT_TRUE(refused([](tardis_gio_options& o) { o.queues = 17; }));
  EXPECT_TRUE(refused([](tardis_gio_options& o) { o.entries = 1; }));
  EXPECT_TRUE(refused([](tardis_gio_options& o) { o.commands = 16; }));
  EXPECT_TRUE(refused([](tardis_gio_options& o) { o.slot_bytes = 3 << 20; }));
  EXPECT_EQ(tardis_gio_memory_bytes(nullptr), 0u);
}

}  // namespace
}  // namespace tardis::gio
