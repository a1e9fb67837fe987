// SPDX-License-Identifier: Apache-2.0
// The software controller's registers and admin commands, and what it says of clients that break their rules.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "nvme_soft_client.h"

namespace tardis::nvme::testing {
namespace {

TEST(NvmeSoftAdmin, ComesUpAndDown) {
  HandClient client;
  const Capabilities capabilities{client.window().read64(kRegCap)};
  EXPECT_EQ(capabilities.max_queue_entries(), 1024u);
  EXPECT_EQ(capabilities.timeout_ms(), 7500u);
  EXPECT_TRUE(capabilities.contiguous_queues());
  EXPECT_TRUE(capabilities.nvm_commands());
  EXPECT_EQ(capabilities.min_page_shift(), 12u);
  EXPECT_EQ(client.window().read32(kRegVs), 0x00020000u);
  EXPECT_EQ(client.window().read32(kRegCsts), 0u);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(client.enable());
    SharedMemory page(client.space(), 4096);
    EXPECT_EQ(client.admin().status(admin_command(AdminOpcode::kIdentify, kCnsController, 0, page.address())), 0);
    EXPECT_EQ(page.at<IdentifyController>(0).namespaces, 1u);
    ASSERT_TRUE(client.disable());
    EXPECT_EQ(client.window().read32(kRegCsts), 0u);
  }
  EXPECT_EQ(client.controller().counters().resets, 3u);
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftAdmin, ReadyTakesItsTime) {
  SoftControllerOptions options = memory_options();
  options.ready_delay = std::chrono::milliseconds(30);
  HandClient client(std::move(options));
  const std::uint64_t start = monotonic_ns();
  ASSERT_TRUE(client.enable());
  EXPECT_GE(monotonic_ns() - start, 30'000'000u);
  client.controller().hold_ready(true);
  client.window().write32(kRegCc, kUsualCc & ~kCcEnable);
  EXPECT_FALSE(client.wait_status(kCstsReady, 0, 100'000'000));
  client.window().write32(kRegCc, kUsualCc);  // too early
  EXPECT_EQ(client.kinds(), "register");
  client.window().write32(kRegCc, kUsualCc & ~kCcEnable);
  client.controller().hold_ready(false);
  EXPECT_TRUE(client.wait_status(kCstsReady, 0));
}

TEST(NvmeSoftAdmin, WrongRegistersAreFatalUntilAReset) {
  HandClient client;
  const auto fails = [&](std::uint32_t cc) {
    client.window().write32(kRegCc, cc);
    EXPECT_TRUE(client.wait_status(kCstsFatal, kCstsFatal)) << cc;
    EXPECT_EQ(client.window().read32(kRegCsts) & kCstsReady, 0u);
    client.window().write32(kRegCc, 0);
    EXPECT_TRUE(client.wait_status(kCstsFatal, 0)) << cc;
    EXPECT_EQ(client.kinds(), "register") << cc;
  };
  client.set_admin_registers();
  fails(kUsualCc | 1u << kCcCssShift);
  fails(kUsualCc | 5u << kCcMpsShift);  // 128 KiB, above MPSMAX
  fails(kUsualCc | 1u << kCcAmsShift);
  fails(kUsualCc ^ 1u << kCcIosqesShift);
  client.window().write32(kRegAqa, 0);
  fails(kUsualCc);
  client.set_admin_registers();
  client.window().write64(kRegAsq, client.admin().sq().address() + 64);
  fails(kUsualCc);
  client.set_admin_registers();
  client.window().write64(kRegAcq, 0x123000);
  fails(kUsualCc);
  EXPECT_TRUE(client.enable());
  client.window().write32(kRegAqa, 0x10001);
  client.window().write32(kRegCsts, 0);
  client.window().write64(kRegCap, 0);
  client.window().write32(kRegCc, kUsualCc | 1u << kCcMpsShift);
  ASSERT_TRUE(client.wait_status(kCstsReady, kCstsReady));
  SharedMemory page(client.space(), 4096);
  EXPECT_EQ(client.admin().status(admin_command(AdminOpcode::kIdentify, kCnsController, 0, page.address())), 0);
  EXPECT_EQ(client.kinds(), "register, register, register, register");
}

// CSTS.RDY is 0 after an enabling that failed: there is nothing to wait for between clearing CC.EN and setting it.
TEST(NvmeSoftAdmin, EnablingThatFailedIsForgottenWithoutAWait) {
  HandClient client;
  for (int round = 0; round < 200; ++round) {
    client.set_admin_registers();
    client.window().write64(kRegAsq, 0x123000);
    client.window().write32(kRegCc, kUsualCc);
    ASSERT_TRUE(client.wait_status(kCstsFatal | kCstsReady, kCstsFatal)) << round;
    client.window().write32(kRegCc, 0);
    ASSERT_TRUE(client.enable()) << round;
    ASSERT_EQ(client.window().read32(kRegCsts) & kCstsFatal, 0u) << round;
    client.window().write32(kRegCc, 0);
    ASSERT_TRUE(client.wait_status(kCstsReady, 0)) << round;
  }
  EXPECT_EQ(client.controller().counters().resets, 400u);
}

TEST(NvmeSoftAdmin, IdentifyTellsWhatTheOptionsSay) {
  SoftControllerOptions options = memory_options(1 << 20);
  Result<std::unique_ptr<MemoryMedium>> small = MemoryMedium::create(64 << 10);
  options.namespaces[0].command_set = kCommandSetZoned;
  options.namespaces.push_back({});  // 2 is not active
  options.namespaces.push_back({std::shared_ptr<Medium>(std::move(*small)), 9, 100, 8});
  options.mdts = 5;
  options.sgl = kSglDword;
  options.sgl_blocks = 7;
  options.atomic_blocks = 7;
  options.volatile_cache = true;
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  SharedMemory page(client.space(), 8192);
  HandQueue& admin = client.admin();
  const auto identify = [&](std::uint32_t cns, std::uint32_t space, std::uint64_t offset = 0) {
    SubmissionEntry entry = admin_command(AdminOpcode::kIdentify, cns, 0, page.address(offset));
    entry.namespace_id = space;
    entry.prp.prp2 = offset == 0 ? 0 : page.address(4096);
    return admin.status(entry);
  };
  ASSERT_EQ(identify(kCnsController, 0, 2048), 0);  // across two pages
  const auto& controller = page.at<IdentifyController>(2048);
  EXPECT_EQ(std::string(controller.serial, 13), "TARDIS-SOFT-1");
  EXPECT_EQ(controller.mdts, 5);
  EXPECT_EQ(controller.namespaces, 3u);
  EXPECT_EQ(controller.sqes, 0x66);
  EXPECT_EQ(controller.cqes, 0x44);
  EXPECT_EQ(controller.volatile_cache & 1, 1);
  EXPECT_EQ(controller.awupf, 7);
  EXPECT_EQ(controller.sgls, 2u);
  EXPECT_EQ(controller.sgl_blocks, 7);
  EXPECT_EQ(controller.oncs, kOncsDatasetManagement | kOncsWriteZeroes);
  ASSERT_EQ(identify(kCnsNamespace, 1), 0);
  EXPECT_EQ(page.at<IdentifyNamespace>(0).size_blocks, 256u);
  EXPECT_EQ(page.at<IdentifyNamespace>(0).lba_format().block_shift, 12);
  ASSERT_EQ(identify(kCnsNamespace, 3), 0);
  EXPECT_EQ(page.at<IdentifyNamespace>(0).size_blocks, 100u);
  EXPECT_EQ(page.at<IdentifyNamespace>(0).lba_format().block_shift, 9);
  EXPECT_EQ(page.at<IdentifyNamespace>(0).optimal_boundary, 8);
  ASSERT_EQ(identify(kCnsNamespace, 2), 0);
  EXPECT_EQ(page.text(0, 4096), std::string(4096, '\0'));
  ASSERT_EQ(identify(kCnsActiveNamespaces, 0), 0);
  EXPECT_EQ(page.at<std::uint32_t>(0), 1u);
  EXPECT_EQ(page.at<std::uint32_t>(4), 3u);
  EXPECT_EQ(page.at<std::uint32_t>(8), 0u);
  ASSERT_EQ(identify(kCnsActiveNamespaces, 1), 0);
  EXPECT_EQ(page.at<std::uint32_t>(0), 3u);
  EXPECT_EQ(page.at<std::uint32_t>(4), 0u);
  ASSERT_EQ(identify(kCnsDescriptors, 1), 0);
  EXPECT_EQ(page.at<NamespaceDescriptor>(0).type, kDescriptorNguid);
  EXPECT_EQ(page.at<NamespaceDescriptor>(0).length, 16);
  EXPECT_EQ(page.text(4, 12), "TARDIS-SOFT-");
  EXPECT_EQ(page.at<NamespaceDescriptor>(20).type, kDescriptorCommandSet);
  EXPECT_EQ(page.at<NamespaceDescriptor>(20).length, 1);
  EXPECT_EQ(page.at<std::uint8_t>(24), kCommandSetZoned);
  EXPECT_EQ(page.at<NamespaceDescriptor>(25).length, 0);
  ASSERT_EQ(identify(kCnsDescriptors, 3), 0);
  EXPECT_EQ(page.at<NamespaceDescriptor>(20).length, 0);
  EXPECT_EQ(client.complaints(), "");
  EXPECT_EQ(identify(kCnsDescriptors, 2), kScInvalidNamespace);
  EXPECT_EQ(client.kinds(), "namespace");
  EXPECT_EQ(identify(kCnsNamespace, 4), kScInvalidNamespace);
  EXPECT_EQ(identify(kCnsNamespace, 0), kScInvalidNamespace);
  EXPECT_EQ(identify(0x7f, 0), kScInvalidField);
  EXPECT_EQ(identify(kCnsActiveNamespaces, 0xffffffff), kScInvalidNamespace);
  EXPECT_EQ(client.kinds(), "namespace, namespace, admin, namespace");
  SubmissionEntry sgl = admin_command(AdminOpcode::kIdentify, kCnsController);
  sgl.set_data_pointer(DataPointer::kSgl);
  sgl.sgl = SglDescriptor::of(SglType::kDataBlock, page.address(), 4096);
  EXPECT_EQ(admin.status(sgl), kScInvalidField);
  EXPECT_EQ(admin.status(admin_command(static_cast<AdminOpcode>(0x42))), kScInvalidOpcode);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kIdentify, kCnsController, 0, 0x1000)), kScDataTransferError);
  EXPECT_EQ(client.kinds(), "field, opcode, DMA address");
}

TEST(NvmeSoftAdmin, Features) {
  SoftControllerOptions options = memory_options();
  options.queue_pairs = 3;
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  HandQueue& admin = client.admin();
  std::uint32_t result = 0;
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kSetFeatures, kFeatureQueues, 7 | 7 << 16), &result), 0);
  EXPECT_EQ(result, 2u | 2u << 16);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kSetFeatures, kFeatureQueues, 1 | 1 << 16), &result), 0);
  EXPECT_EQ(result, 1u | 1u << 16);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kGetFeatures, kFeatureQueues), &result), 0);
  EXPECT_EQ(result, 1u | 1u << 16);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kSetFeatures, kFeatureAsyncEvents, 0x1f)), 0);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kGetFeatures, kFeatureAsyncEvents), &result), 0);
  EXPECT_EQ(result, 0x1fu);
  EXPECT_EQ(client.complaints(), "");
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kSetFeatures, kFeatureQueues, 0xffff)), kScInvalidField);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kSetFeatures, kFeatureVolatileCache, 1)), kScInvalidField);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kGetFeatures, kFeatureVolatileCache)), kScInvalidField);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kSetFeatures, 0x7f, 1)), kScInvalidField);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kGetFeatures, 0x7f, 1)), kScInvalidField);
  const auto queue = client.queue(1);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kSetFeatures, kFeatureQueues, 0)), kScCommandSequence);
  EXPECT_EQ(client.kinds(), "admin, admin, admin, admin, admin, admin");
  HandQueue beyond(client.controller(), 3, 8);
  EXPECT_EQ(client.create_cq(beyond), kScInvalidQueueId);  // two were granted
}

TEST(NvmeSoftAdmin, QueuesAreCreatedAndDeletedByTheRules) {
  SoftControllerOptions options = memory_options();
  options.max_queue_entries = 100;
  options.queue_pairs = 4;
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  HandQueue& admin = client.admin();
  HandQueue memory(client.controller(), 1, 128);
  const std::uint64_t sq = memory.sq().address(), cq = memory.cq().address();
  const auto create = [&](AdminOpcode opcode, std::uint32_t id, std::uint32_t entries, std::uint32_t cdw11,
                          std::uint64_t address) {
    return admin.status(admin_command(opcode, (entries - 1) << 16 | id, cdw11, address));
  };
  const auto create_cq = [&](std::uint32_t id, std::uint32_t entries, std::uint32_t cdw11, std::uint64_t address) {
    return create(AdminOpcode::kCreateCq, id, entries, cdw11, address);
  };
  const auto create_sq = [&](std::uint32_t id, std::uint32_t entries, std::uint32_t cdw11, std::uint64_t address) {
    return create(AdminOpcode::kCreateSq, id, entries, cdw11, address);
  };
  EXPECT_EQ(create_cq(0, 10, 1, cq), kScInvalidQueueId);
  EXPECT_EQ(create_cq(5, 10, 1, cq), kScInvalidQueueId);
  EXPECT_EQ(create_cq(1, 1, 1, cq), kScInvalidQueueSize);
  EXPECT_EQ(create_cq(1, 101, 1, cq), kScInvalidQueueSize);
  EXPECT_EQ(create_cq(1, 10, 0, cq), kScInvalidField);
  EXPECT_EQ(create_cq(1, 10, 3 | 1 << 16, cq), kScInvalidVector);
  EXPECT_EQ(create_cq(1, 10, 1, cq + 16), kScPrpOffsetInvalid);
  EXPECT_EQ(client.kinds(), "admin, admin, admin, admin, admin, admin, admin");
  EXPECT_EQ(create_cq(1, 10, 1, 0x10000), kScDataTransferError);
  EXPECT_EQ(client.kinds(), "DMA address");
  EXPECT_EQ(create_sq(1, 10, 1 << 16 | 1, sq), kScInvalidCq);
  EXPECT_EQ(create_sq(1, 10, 0 << 16 | 1, sq), kScInvalidQueueId);  // the admin completion queue
  EXPECT_EQ(create_sq(1, 10, 5 << 16 | 1, sq), kScInvalidQueueId);
  EXPECT_EQ(create_cq(1, 100, 1, cq), 0);
  EXPECT_EQ(create_cq(1, 100, 1, cq), kScInvalidQueueId);
  EXPECT_EQ(create_sq(0, 10, 1 << 16 | 1, sq), kScInvalidQueueId);
  EXPECT_EQ(create_sq(5, 10, 1 << 16 | 1, sq), kScInvalidQueueId);
  EXPECT_EQ(create_sq(1, 101, 1 << 16 | 1, sq), kScInvalidQueueSize);
  EXPECT_EQ(create_sq(1, 1, 1 << 16 | 1, sq), kScInvalidQueueSize);
  EXPECT_EQ(create_sq(1, 10, 1 << 16, sq), kScInvalidField);
  EXPECT_EQ(create_sq(1, 10, 1 << 16 | 1, sq + 64), kScPrpOffsetInvalid);
  EXPECT_EQ(create_sq(2, 100, 1 << 16 | 1, sq), 0);  // ids of SQ and CQ need not agree
  EXPECT_EQ(create_sq(2, 100, 1 << 16 | 1, sq), kScInvalidQueueId);
  EXPECT_EQ(client.delete_cq(1), kScInvalidQueueDeletion);
  EXPECT_EQ(client.delete_cq(2), kScInvalidQueueId);
  EXPECT_EQ(client.delete_sq(1), kScInvalidQueueId);
  EXPECT_EQ(client.delete_sq(0), kScInvalidQueueId);
  EXPECT_EQ(client.delete_cq(0), kScInvalidQueueId);
  EXPECT_NE(client.kinds(), "");
  EXPECT_EQ(client.delete_sq(2), 0);
  EXPECT_EQ(client.delete_cq(1), 0);
  EXPECT_EQ(create_cq(1, 100, 1, cq), 0);
  EXPECT_EQ(client.delete_cq(1), 0);
  EXPECT_EQ(client.complaints(), "");
  memory.cq().at<CompletionEntry>(99 * sizeof(CompletionEntry)).status = 1;
  EXPECT_EQ(create_cq(1, 100, 1, cq), 0);
  EXPECT_EQ(client.kinds(), "completion queue not zeroed");
}

TEST(NvmeSoftAdmin, SeveralSubmissionQueuesOfOneCompletionQueue) {
  for (const std::uint32_t threads : {1u, 3u}) {
    SoftControllerOptions options = memory_options();
    options.threads = threads;
    HandClient client(std::move(options));
    ASSERT_TRUE(client.enable());
    HandQueue first(client.controller(), 2, 8, 16), second(client.controller(), 5, 8);
    ASSERT_EQ(client.create_cq(first), 0);
    ASSERT_EQ(client.create_sq(first, 2), 0);
    ASSERT_EQ(client.create_sq(second, 2), 0);
    for (std::uint16_t i = 0; i < 40; ++i) {
      (i % 2 == 0 ? first : second).submit(io_command(IoOpcode::kFlush, i));
      const auto done = first.wait();
      ASSERT_TRUE(done);
      EXPECT_EQ(done->command_id, i);
      EXPECT_EQ(done->sq_id, i % 2 == 0 ? 2 : 5);
      EXPECT_EQ(done->sq_head, (i / 2 + 1) % 8);
    }
    EXPECT_EQ(client.delete_sq(2), 0);
    EXPECT_EQ(client.delete_cq(2), kScInvalidQueueDeletion);
    EXPECT_EQ(client.delete_sq(5), 0);
    EXPECT_EQ(client.delete_cq(2), 0);
    EXPECT_EQ(client.kinds(), "admin");
  }
}

TEST(NvmeSoftAdmin, AsynchronousEventsAreHeldCompletedAndAborted) {
  HandClient client;
  ASSERT_TRUE(client.enable());
  HandQueue& admin = client.admin();
  const auto queue = client.queue(1, 8);
  std::vector<std::uint16_t> ids;
  for (int i = 0; i < 4; ++i) {
    const SubmissionEntry event = admin_command(AdminOpcode::kAsyncEvent);
    ids.push_back(event.command_id);
    admin.submit(event);
  }
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kAsyncEvent)), kScAsyncEventLimit);
  EXPECT_EQ(client.kinds(), "admin");
  EXPECT_EQ(client.controller().counters().outstanding, 4u);
  queue->ring(8);  // beyond the queue
  auto done = admin.wait();
  ASSERT_TRUE(done);
  EXPECT_EQ(done->command_id, ids[0]);
  EXPECT_EQ(done->result, 0x00010100u);
  EXPECT_EQ(client.kinds(), "doorbell range");
  queue->ring(9);  // masked until the log page is read
  EXPECT_FALSE(admin.wait(50'000'000));
  SharedMemory page(client.space(), 4096);
  SubmissionEntry log = admin_command(AdminOpcode::kGetLogPage, 1 | 15 << 16, 0, page.address());
  admin.submit(log);
  done = admin.wait();
  ASSERT_TRUE(done);
  EXPECT_EQ(done->command_id, log.command_id);
  done = admin.wait();
  ASSERT_TRUE(done);
  EXPECT_EQ(done->command_id, ids[1]);
  std::uint32_t result = 9;
  admin.submit(admin_command(AdminOpcode::kAbort, std::uint32_t{ids[2]} << 16));
  done = admin.wait();
  ASSERT_TRUE(done);
  EXPECT_EQ(done->command_id, ids[2]);
  EXPECT_EQ(CommandStatus::of(*done).raw, kScAbortRequested);
  done = admin.wait();
  ASSERT_TRUE(done);
  EXPECT_EQ(done->result & 1, 0u);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kAbort, 77u << 16), &result), 0);
  EXPECT_EQ(result & 1, 1u);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kGetLogPage, 0x70, 0, page.address())), kScInvalidLogPage);
}

TEST(NvmeSoftAdmin, ShutsDownAndFlushes) {
  HandClient client;
  ASSERT_TRUE(client.enable());
  client.window().write32(kRegCc, kUsualCc | kCcShnNormal);
  EXPECT_TRUE(client.wait_status(kCstsShstMask, kCstsShstComplete));
  ASSERT_TRUE(client.disable());
  EXPECT_EQ(client.window().read32(kRegCsts), 0u);
  ASSERT_TRUE(client.enable());
  client.window().write32(kRegCc, kUsualCc | kCcShnAbrupt);
  EXPECT_TRUE(client.wait_status(kCstsShstMask, kCstsShstComplete));
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftAdmin, QueuesOfAResetAreGoneAndMayBeMadeAnew) {
  HandClient client;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(client.enable());
    const auto queue = client.queue(1, 16);
    EXPECT_EQ(queue->status(io_command(IoOpcode::kFlush, 1)), 0);
    ASSERT_TRUE(client.disable());
    EXPECT_EQ(client.controller().counters().outstanding, 0u);
    queue->ring(5);
    EXPECT_EQ(client.kinds(), "doorbell range");
  }
}

TEST(NvmeSoftAdmin, StridesAndGivenRegisterMemory) {
  SoftControllerOptions options = memory_options();
  options.doorbell_stride = 3;
  options.queue_pairs = 200;
  const std::size_t bytes = register_bytes(options);
  EXPECT_EQ(bytes, 4096u + 4096 * ((201 * 2 * 32 + 4095) / 4096));
  AlignedBuffer memory(bytes);
  options.registers = memory.data();
  options.registers_bytes = bytes;
  HandClient client(std::move(options));
  EXPECT_EQ(Capabilities{client.window().read64(kRegCap)}.doorbell_stride(), 3u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(client.window().doorbells()),
            reinterpret_cast<std::uintptr_t>(memory.data()) + 4096);
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(200, 8);
  for (std::uint16_t i = 0; i < 20; ++i) EXPECT_EQ(queue->status(io_command(IoOpcode::kFlush, i)), 0);
  client.window().write32(kRegDoorbells + 4, 1);  // between two doorbells
  EXPECT_EQ(client.kinds(), "doorbell range");
}

TEST(NvmeSoftAdmin, RefusesWrongOptions) {
  DmaSpace space;
  const auto message = [&](auto change) {
    SoftControllerOptions options = memory_options();
    change(options);
    const auto made = SoftController::create(std::move(options), space);
    return made ? std::string() : made.error().message;
  };
  using Options = SoftControllerOptions;
  EXPECT_EQ(message([](Options&) {}), "");
  EXPECT_NE(message([](Options& o) { o.namespaces.clear(); }), "");
  EXPECT_NE(message([](Options& o) { o.namespaces[0].block_shift = 10; }), "");
  EXPECT_NE(message([](Options& o) { o.namespaces[0].blocks = 1 << 30; }), "");
  EXPECT_NE(message([](Options& o) { o.max_queue_entries = 1; }), "");
  EXPECT_NE(message([](Options& o) { o.queue_pairs = 0; }), "");
  EXPECT_NE(message([](Options& o) { o.threads = 0; }), "");
  EXPECT_NE(message([](Options& o) { o.registers = reinterpret_cast<void*>(4097); }), "");
  EXPECT_NE(message([](Options& o) { o.mdts = 31; }), "");
}

// A client that sets CC.EN again too early has its reset first: nothing of before is left when it is served.
TEST(NvmeSoftAdmin, AResetUnderWayIsNotGivenUp) {
  SoftControllerOptions options = memory_options();
  options.ready_delay = std::chrono::milliseconds(200);  // so that CSTS.RDY is seen to be 0
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  ASSERT_EQ(client.admin().status(admin_command(AdminOpcode::kSetFeatures, kFeatureQueues, 1 | 1 << 16)), 0);
  const auto queue = client.queue(1, 16);
  client.controller().hold_ready(true);
  client.window().write32(kRegCc, kUsualCc & ~kCcEnable);
  const std::uint64_t end = monotonic_ns() + kPatienceNs;
  while (client.controller().counters().resets == 0 && monotonic_ns() < end) std::this_thread::yield();
  client.admin().restart();
  client.window().write32(kRegCc, kUsualCc);
  client.controller().hold_ready(false);
  ASSERT_TRUE(client.wait_status(kCstsReady, 0));
  ASSERT_TRUE(client.wait_status(kCstsReady, kCstsReady));
  std::uint32_t result = 0;
  EXPECT_EQ(client.admin().status(admin_command(AdminOpcode::kGetFeatures, kFeatureQueues), &result), 0);
  EXPECT_EQ(result, 15u | 15u << 16);
  queue->ring(5);
  EXPECT_EQ(client.kinds(), "register, doorbell range");
}

// Nor is one that was never seen to be asked for.
TEST(NvmeSoftAdmin, CcEnClearedForAMomentIsAReset) {
  SoftControllerOptions options = memory_options();
  options.ready_delay = std::chrono::milliseconds(100);
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  for (int round = 0; round < 3; ++round) {
    client.admin().restart();
    client.window().write32(kRegCc, kUsualCc & ~kCcEnable);
    client.window().write32(kRegCc, kUsualCc);
    ASSERT_TRUE(client.wait_status(kCstsReady, 0));
    ASSERT_TRUE(client.wait_status(kCstsReady, kCstsReady));
    EXPECT_EQ(client.admin().status(admin_command(AdminOpcode::kGetFeatures, kFeatureQueues)), 0);
    EXPECT_EQ(client.kinds(), "register");
  }
}

TEST(NvmeSoftAdmin, AnEventSaysWhatWasWrongWithTheDoorbell) {
  HandClient client;
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 8);
  HandQueue& admin = client.admin();
  SharedMemory page(client.space(), 4096);
  const auto event_of = [&](std::uint32_t doorbell) -> std::uint32_t {
    const SubmissionEntry event = admin_command(AdminOpcode::kAsyncEvent);
    admin.submit(event);
    client.window().write32(doorbell, 8);
    const auto done = admin.wait();
    EXPECT_TRUE(done && done->command_id == event.command_id);
    EXPECT_EQ(admin.status(admin_command(AdminOpcode::kGetLogPage, 1 | 15 << 16, 0, page.address())), 0);
    return done ? done->result : 0;
  };
  EXPECT_EQ(event_of(sq_tail_doorbell(1, 0)), 0x00010100u);  // beyond the queue
  EXPECT_EQ(event_of(sq_tail_doorbell(2, 0)), 0x00010000u);  // of no queue
}

// CDW10 bit 15 of Get Log Page: the event stays as it is.
TEST(NvmeSoftAdmin, ALogPageMayBeReadWithoutClearingItsEvent) {
  HandClient client;
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 8);
  HandQueue& admin = client.admin();
  SharedMemory page(client.space(), 4096);
  admin.submit(admin_command(AdminOpcode::kAsyncEvent));
  admin.submit(admin_command(AdminOpcode::kAsyncEvent));
  queue->ring(8);
  ASSERT_TRUE(admin.wait());
  queue->ring(9);
  EXPECT_EQ(admin.status(admin_command(AdminOpcode::kGetLogPage, 1 | 1 << 15 | 15 << 16, 0, page.address())), 0);
  EXPECT_FALSE(admin.wait(50'000'000));
  admin.submit(admin_command(AdminOpcode::kGetLogPage, 1 | 15 << 16, 0, page.address()));
  EXPECT_TRUE(admin.wait());
  EXPECT_TRUE(admin.wait());
}

// What a removed controller's registers read as was written by nobody, and stays.
TEST(NvmeSoftAdmin, NothingIsWrittenToARemovedController) {
  HandClient client;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    while (!stop) client.window().write32(kRegAqa, 0x00010001);
  });
  const std::uint64_t end = monotonic_ns() + 300'000'000;
  std::uint64_t written = 0;
  while (monotonic_ns() < end) {
    client.controller().remove(false);
    for (int look = 0; look < 100; ++look) written += client.window().read32(kRegAqa) != kRegisterGone ? 1 : 0;
    client.controller().insert();
  }
  stop = true;
  writer.join();
  EXPECT_EQ(written, 0u);
}

}  // namespace
}  // namespace tardis::nvme::testing
