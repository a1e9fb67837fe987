// SPDX-License-Identifier: Apache-2.0
// Every rule of queues, data pointers and I/O commands that the software controller checks, broken once.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "nvme_soft_client.h"

namespace tardis::nvme::testing {
namespace {

// A client with one queue and a few mapped pages.
struct Broken : HandClient {
  explicit Broken(SoftControllerOptions options = memory_options())
      : HandClient(std::move(options)), memory(space(), 2048 * 4096), lists(space(), 8 * 4096) {
    EXPECT_TRUE(enable());
    io = queue(1, 16);
  }
  // "status: kinds of violations" of a write, then of the same as a read.
  std::string write(std::uint64_t prp1, std::uint64_t prp2, std::uint32_t blocks) {
    return outcome(io_command(IoOpcode::kWrite, 7, 0, blocks, prp1, prp2));
  }
  std::string outcome(const SubmissionEntry& entry) {
    char status[8];
    std::snprintf(status, sizeof status, "%03x", io->status(entry));
    const std::string found = kinds();
    return found.empty() ? status : status + std::string(": ") + found;
  }
  SubmissionEntry sgl(const SglDescriptor& descriptor, std::uint32_t blocks, IoOpcode opcode = IoOpcode::kWrite) {
    SubmissionEntry entry = io_command(opcode, 9, 0, blocks);
    entry.set_data_pointer(DataPointer::kSgl);
    entry.sgl = descriptor;
    return entry;
  }
  // A (last) segment of the given descriptors, at `offset` in `lists`.
  SglDescriptor segment(std::size_t offset, const std::vector<SglDescriptor>& descriptors,
                        SglType type = SglType::kLastSegment) {
    // Bytes, as some of them are put at addresses that are wrong.
    if (!descriptors.empty()) std::memcpy(lists.data() + offset, descriptors.data(), descriptors.size() * 16);
    return SglDescriptor::of(type, lists.address(offset), static_cast<std::uint32_t>(descriptors.size() * 16));
  }
  SglDescriptor block(std::size_t page, std::uint32_t bytes) {
    return SglDescriptor::of(SglType::kDataBlock, memory.address(page * 4096), bytes);
  }

  SharedMemory memory, lists;
  std::unique_ptr<HandQueue> io;
};

TEST(NvmeSoftRules, Prp) {
  Broken client;
  const std::uint64_t page = client.memory.address(), list = client.lists.address();
  EXPECT_EQ(client.write(page, 0, 1), "000");
  EXPECT_EQ(client.write(page + 4, page + 4096, 1), "000");
  EXPECT_EQ(client.write(page + 4, 0, 1), "013: PRP");
  EXPECT_EQ(client.write(page + 2, page + 4096, 1), "013: PRP");
  EXPECT_EQ(client.write(page, page + 4096, 1), "000: PRP");  // PRP2 is reserved then
  EXPECT_EQ(client.write(page, page + 4096, 2), "000");
  EXPECT_EQ(client.write(page, page + 4096 + 8, 2), "013: PRP");
  EXPECT_EQ(client.write(0, 0, 1), "004: DMA address");
  EXPECT_EQ(client.write(0x7000, 0, 1), "004: DMA address");
  EXPECT_EQ(client.write(page, 0x7000, 2), "004: DMA address");
  const auto set = [&](std::size_t entry, std::uint64_t value) { client.lists.at<std::uint64_t>(entry * 8) = value; };
  set(0, page + 3 * 4096);
  set(1, page + 9 * 4096);
  EXPECT_EQ(client.write(page, list, 3), "000");
  EXPECT_EQ(client.write(page, list + 4, 3), "013: PRP");
  EXPECT_EQ(client.write(page, 0, 3), "013: PRP");
  EXPECT_EQ(client.write(page, 0x7000, 3), "004: DMA address");
  set(1, page + 9 * 4096 + 4);
  EXPECT_EQ(client.write(page, list, 3), "013: PRP");
  set(1, 0);
  EXPECT_EQ(client.write(page, list, 3), "013: PRP");
  set(1, 0x7000);
  EXPECT_EQ(client.write(page, list, 3), "004: DMA address");
  // A list that begins with the last entry of its page: that names the next page, unless it is all there is to name.
  set(511, page + 4096);
  EXPECT_EQ(client.write(page + 2048, list + 511 * 8, 1 + 1), "013: PRP");
  set(511, client.lists.address(4096));
  set(512, page + 5 * 4096);
  set(513, page + 6 * 4096);
  EXPECT_EQ(client.write(page + 2048, list + 511 * 8, 2), "000");
  set(511, client.lists.address(4096 + 8));
  EXPECT_EQ(client.write(page + 2048, list + 511 * 8, 2), "013: PRP");
}

// 513 pages fill a page of the list with data, 514 need its last entry for the chain.
TEST(NvmeSoftRules, PrpListsAreChainedOnlyWhereTheyMustBe) {
  SoftControllerOptions options = memory_options(64 << 20);
  options.mdts = 0;
  Broken client(std::move(options));
  client.memory.fill(3);
  for (const std::uint32_t pages : {512u, 513u, 514u, 1024u, 1025u, 2048u}) {
    for (const std::size_t start : {std::size_t{0}, std::size_t{100}, std::size_t{511}}) {
      // Pages of the memory in reverse, so that nothing is joined.
      const auto page = [&](std::uint32_t i) { return client.memory.address((pages - 1 - i) * std::size_t{4096}); };
      std::size_t at = start;
      for (std::uint32_t i = 1; i < pages; ++i) {
        if (at % 512 == 511 && i != pages - 1) {
          client.lists.at<std::uint64_t>(at * 8) = client.lists.address((at + 1) * 8);
          ++at;
        }
        client.lists.at<std::uint64_t>(at++ * 8) = page(i);
      }
      const auto command = [&](IoOpcode opcode) {
        return io_command(opcode, 1, 0, pages, page(0), client.lists.address(start * 8));
      };
      const std::string before = client.memory.text(0, pages * std::size_t{4096});
      ASSERT_EQ(client.outcome(command(IoOpcode::kWrite)), "000") << pages << " from " << start;
      std::memset(client.memory.data(), 0, client.memory.size());
      ASSERT_EQ(client.outcome(command(IoOpcode::kRead)), "000");
      ASSERT_TRUE(before == client.memory.text(0, pages * std::size_t{4096})) << pages << " from " << start;
      client.memory.fill(pages + start);
    }
  }
}

TEST(NvmeSoftRules, Sgl) {
  Broken client;
  using D = SglDescriptor;
  const auto run = [&](const D& descriptor, std::uint32_t blocks = 2) {
    return client.outcome(client.sgl(descriptor, blocks));
  };
  const D good = client.block(0, 8192);
  EXPECT_EQ(run(good), "000");
  EXPECT_EQ(run(client.block(0, 8191)), "00f: SGL");
  EXPECT_EQ(run(client.block(0, 8193)), "00f: SGL");
  EXPECT_EQ(run(D{}), "00f: SGL");
  EXPECT_EQ(run(D::of(SglType::kDataBlock, 0x7000, 8192)), "004: DMA address");
  EXPECT_EQ(run(D::of(SglType::kDataBlock, ~std::uint64_t{0} - 4096, 8192)), "004: SGL");
  EXPECT_EQ(run(D::of(SglType::kKeyed, good.address, 8192)), "011: SGL");
  EXPECT_EQ(run(D::of(SglType::kBitBucket, 0, 8192)), "011: SGL");
  D subtype = good;
  subtype.type |= 1;
  EXPECT_EQ(run(subtype), "011: SGL");
  EXPECT_EQ(run(client.segment(0, {client.block(0, 3), client.block(7, 8189)})), "000");
  EXPECT_EQ(run(client.segment(8, {client.block(0, 3), D{}, client.block(7, 8189)})), "000");
  EXPECT_EQ(run(client.segment(4, {good})), "00d: SGL");
  EXPECT_EQ(run(client.segment(0, {})), "00d: SGL");
  D odd = client.segment(0, {good});
  odd.length = 17;
  EXPECT_EQ(run(odd), "00d: SGL");
  odd = client.segment(0, {good});
  odd.type |= 2;
  EXPECT_EQ(run(odd), "011: SGL");
  EXPECT_EQ(run(D::of(SglType::kLastSegment, 0x7000, 16)), "004: DMA address");
  EXPECT_EQ(run(client.segment(0, {client.block(0, 4096), client.block(1, 4000)})), "00f: SGL");
  EXPECT_EQ(run(client.segment(0, {client.block(0, 8192), client.block(1, 16)})), "00f: SGL");
  EXPECT_EQ(run(client.segment(0, {client.block(0, 4096), D::of(SglType::kKeyed, good.address, 4096)})), "011: SGL");
  // Chains.
  const D last = client.segment(4096, {client.block(9, 4096)});
  EXPECT_EQ(run(client.segment(0, {client.block(3, 4096), last}, SglType::kSegment)), "000");
  EXPECT_EQ(run(client.segment(0, {client.block(3, 4096), last})), "00d: SGL");
  EXPECT_EQ(run(client.segment(0, {last, client.block(3, 4096)}, SglType::kSegment)), "00e: SGL");
  EXPECT_EQ(run(client.segment(0, {client.block(3, 8192)}, SglType::kSegment)), "00d: SGL");
  const D middle =
      client.segment(8192, {client.block(4, 2048), client.segment(4096, {client.block(9, 2048)})}, SglType::kSegment);
  EXPECT_EQ(run(client.segment(0, {client.block(3, 4096), middle}, SglType::kSegment)), "000");
  const D circle = D::of(SglType::kSegment, client.lists.address(), 16);
  EXPECT_EQ(run(client.segment(0, {circle}, SglType::kSegment)), "00d: SGL");
}

TEST(NvmeSoftRules, SglOptions) {
  SoftControllerOptions options = memory_options();
  options.sgl = kSglDword;
  options.sgl_blocks = 2;
  options.sgl_longer_than_data = true;
  options.sgl_bit_bucket = true;
  Broken client(std::move(options));
  using D = SglDescriptor;
  EXPECT_EQ(client.outcome(client.sgl(client.block(0, 4096), 1)), "000");
  EXPECT_EQ(client.outcome(client.sgl(client.block(0, 4100), 1)), "000");
  EXPECT_EQ(client.outcome(client.sgl(client.block(0, 4097), 1)), "01e: SGL");
  EXPECT_EQ(client.outcome(client.sgl(D::of(SglType::kDataBlock, client.memory.address(2), 4096), 1)), "01e: SGL");
  const auto three = {client.block(0, 2048), client.block(1, 1024), client.block(2, 1024)};
  EXPECT_EQ(client.outcome(client.sgl(client.segment(0, three), 1)), "00e: SGL");
  // Of a read of two blocks the first is not wanted.
  client.memory.fill(1);
  const std::string second = client.memory.text(4096, 4096);
  EXPECT_EQ(client.outcome(client.sgl(client.block(0, 8192), 2)), "000");
  const D bucket = D::of(SglType::kBitBucket, 0, 4096);
  const D wanted = client.segment(0, {bucket, client.block(5, 4096)});
  EXPECT_EQ(client.outcome(client.sgl(wanted, 2, IoOpcode::kRead)), "000");
  EXPECT_EQ(client.memory.text(5 * 4096, 4096), second);
  EXPECT_EQ(client.outcome(client.sgl(wanted, 2)), "00f: SGL");  // in a write it counts for nothing
  SoftControllerOptions none = memory_options();
  none.sgl = kSglNone;
  Broken without(std::move(none));
  EXPECT_EQ(without.outcome(without.sgl(without.block(0, 4096), 1)), "002: field");
}

TEST(NvmeSoftRules, FieldsOfCommands) {
  SoftControllerOptions options = memory_options(1 << 20);
  options.namespaces.push_back({});
  options.mdts = 2;
  Broken client(std::move(options));
  const std::uint64_t page = client.memory.address();
  const auto changed = [&](const std::function<void(SubmissionEntry&)>& change) {
    SubmissionEntry entry = io_command(IoOpcode::kWrite, 3, 0, 1, page);
    change(entry);
    return client.outcome(entry);
  };
  EXPECT_EQ(changed([](auto&) {}), "000");
  EXPECT_EQ(changed([](auto& e) { e.flags |= 1; }), "002: field");
  EXPECT_EQ(changed([](auto& e) { e.flags |= 4; }), "000: field");
  EXPECT_EQ(changed([](auto& e) { e.set_data_pointer(DataPointer::kSglMetadata); }), "002: field");
  EXPECT_EQ(changed([](auto& e) { e.flags |= 0xc0; }), "002: field");
  EXPECT_EQ(changed([](auto& e) { e.opcode = 0x55; }), "001: opcode");
  EXPECT_EQ(changed([](auto& e) { e.namespace_id = 0; }), "00b: namespace");
  EXPECT_EQ(changed([](auto& e) { e.namespace_id = 2; }), "002: namespace");
  EXPECT_EQ(changed([](auto& e) { e.namespace_id = 3; }), "00b: namespace");
  EXPECT_EQ(changed([](auto& e) { e.namespace_id = kAllNamespaces; }), "00b: namespace");
  EXPECT_EQ(changed([](auto& e) { e.cdw12 |= 1u << 29; }), "002: field");
  EXPECT_EQ(changed([](auto& e) { e.cdw12 |= kForceUnitAccess; }), "000");
  EXPECT_EQ(changed([](auto& e) { e.set_start_block(255); }), "000");
  EXPECT_EQ(changed([](auto& e) { e.set_start_block(256); }), "080: LBA range");
  EXPECT_EQ(changed([](auto& e) { e.set_start_block(~std::uint64_t{0}); }), "080: LBA range");
  EXPECT_EQ(changed([](auto& e) { e.command_id = 0xffff; }), "000: command id reserved");
  EXPECT_EQ(client.outcome(io_command(IoOpcode::kWrite, 3, 0, 5, page, page)), "002: transfer size");
  EXPECT_EQ(client.outcome(io_command(IoOpcode::kWriteZeroes, 3, 0, 256)), "000");  // MDTS is of no concern to it
  EXPECT_EQ(client.outcome(io_command(IoOpcode::kWriteZeroes, 3, 1, 256)), "080: LBA range");
  EXPECT_EQ(client.outcome(io_command(IoOpcode::kFlush, 3, 0, 1, 0, 0, kAllNamespaces)), "000");
  EXPECT_EQ(client.outcome(io_command(IoOpcode::kFlush, 3, 0, 1, 0, 0, 7)), "00b: namespace");
  client.memory.at<DeallocateRange>(0) = {0, 10, 5};
  client.memory.at<DeallocateRange>(16) = {0, 1, 256};
  SubmissionEntry deallocate = io_command(IoOpcode::kDatasetManagement, 3, 0, 1, page);
  deallocate.cdw11 = kDeallocate;
  EXPECT_EQ(client.outcome(deallocate), "000");
  deallocate.cdw10 = 1;
  EXPECT_EQ(client.outcome(deallocate), "080: LBA range");
}

TEST(NvmeSoftRules, AViolationShowsTheCommand) {
  Broken client;
  const SubmissionEntry entry = io_command(IoOpcode::kRead, 0x1234, 0xabcdef0123456789, 2, 0x7000);
  EXPECT_EQ(client.io->status(entry), kScLbaOutOfRange);
  const std::vector<Violation> found = client.controller().violations();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].kind, ViolationKind::kLbaRange);
  EXPECT_EQ(found[0].queue, 1);
  EXPECT_EQ(found[0].command_id, 0x1234);
  EXPECT_EQ(std::memcmp(&found[0].command, &entry, sizeof entry), 0);
  EXPECT_NE(found[0].text.find("02003412 01000000"), std::string::npos) << found[0].text;
  EXPECT_NE(found[0].text.find("89674523 01efcdab 01000000"), std::string::npos) << found[0].text;
}

TEST(NvmeSoftRules, CommandIdsInUse) {
  Broken client;
  FaultRule lose;
  lose.queue = 1;
  client.faults().add(lose);
  client.io->submit(io_command(IoOpcode::kFlush, 5));
  client.io->submit(io_command(IoOpcode::kFlush, 5));
  const auto done = client.io->wait();
  ASSERT_TRUE(done);
  EXPECT_EQ(CommandStatus::of(*done).raw, kScCommandIdConflict);
  EXPECT_EQ(client.kinds(), "command id in use");
  EXPECT_EQ(client.io->status(io_command(IoOpcode::kFlush, 6)), 0);
  EXPECT_EQ(client.controller().counters().outstanding, 1u);
}

TEST(NvmeSoftRules, Doorbells) {
  Broken client;
  HandQueue& io = *client.io;
  EXPECT_EQ(io.status(io_command(IoOpcode::kFlush, 1)), 0);
  io.ring(1);
  EXPECT_EQ(client.kinds(), "doorbell unchanged");
  io.acknowledge(1);
  EXPECT_EQ(client.kinds(), "doorbell unchanged");
  const auto kinds_soon = [&] {
    const std::uint64_t end = monotonic_ns() + kPatienceNs;
    while (client.controller().violations().empty() && monotonic_ns() < end) std::this_thread::yield();
    return client.kinds();
  };
  io.ring(16);
  EXPECT_EQ(kinds_soon(), "doorbell range");
  io.acknowledge(3);  // one completion was posted, and acknowledged
  EXPECT_EQ(kinds_soon(), "completion queue head");
  io.acknowledge(0x10001);
  EXPECT_EQ(kinds_soon(), "doorbell range");
  client.window().write32(sq_tail_doorbell(2, 0), 1);
  EXPECT_EQ(kinds_soon(), "doorbell range");
  // Wrong values are passed over, a right one is served.
  EXPECT_EQ(io.status(io_command(IoOpcode::kFlush, 2)), 0);
  EXPECT_EQ(client.complaints(), "");
}

// No completion has told the client that entries are free, and it writes over them.
TEST(NvmeSoftRules, SubmissionQueueOverrun) {
  Broken client;
  FaultRule lose;
  lose.queue = 1;
  lose.count = 0;
  client.faults().add(lose);
  HandQueue& io = *client.io;
  for (std::uint16_t i = 0; i < 15; ++i) io.put(io_command(IoOpcode::kFlush, i));
  io.ring();
  const std::uint64_t end = monotonic_ns() + kPatienceNs;
  while (client.controller().counters().outstanding != 15 && monotonic_ns() < end) std::this_thread::yield();
  EXPECT_EQ(client.complaints(), "");
  io.submit(io_command(IoOpcode::kFlush, 15));
  while (client.controller().violations().empty() && monotonic_ns() < end) std::this_thread::yield();
  EXPECT_EQ(client.kinds(), "submission queue overrun");
  EXPECT_EQ(client.controller().counters().outstanding, 15u);
}

TEST(NvmeSoftRules, CompletionQueueOverflow) {
  SoftControllerOptions options = memory_options();
  HandClient client(std::move(options));
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 16, 4);
  for (std::uint16_t i = 0; i < 5; ++i) queue->put(io_command(IoOpcode::kFlush, i));
  queue->ring();
  const std::uint64_t end = monotonic_ns() + kPatienceNs;
  while (client.controller().violations().empty() && monotonic_ns() < end) std::this_thread::yield();
  EXPECT_EQ(client.kinds(), "completion queue overflow");
  // Nothing is lost: the rest comes as there is room.
  for (std::uint16_t i = 0; i < 5; ++i) {
    const auto done = queue->wait();
    ASSERT_TRUE(done);
    EXPECT_EQ(done->command_id, i);
  }
  EXPECT_EQ(client.complaints(), "");
}

TEST(NvmeSoftRules, MemoryTakenAwayFromQueuesAndCommands) {
  HandClient client;
  ASSERT_TRUE(client.enable());
  auto queue = client.queue(1, 8);
  SharedMemory data(client.space(), 4096);
  const std::uint64_t address = data.address();
  EXPECT_EQ(queue->status(io_command(IoOpcode::kWrite, 1, 0, 1, address)), 0);
  data.unmap();
  EXPECT_EQ(queue->status(io_command(IoOpcode::kWrite, 1, 0, 1, address)), kScDataTransferError);
  EXPECT_EQ(client.kinds(), "DMA after unmap");
  queue->cq().unmap();
  EXPECT_TRUE(client.wait_status(kCstsFatal, kCstsFatal));
  EXPECT_EQ(client.kinds(), "DMA after unmap");
}

// A client that takes no completions gets no more commands served, so that those that wait for room stay few.
TEST(NvmeSoftRules, CompletionsThatNobodyTakesDoNotPileUp) {
  HandClient client;
  ASSERT_TRUE(client.enable());
  const auto queue = client.queue(1, 16, 4);
  std::uint64_t fetched = client.controller().counters().commands;
  const std::uint64_t before = fetched;
  for (std::uint16_t id = 0; id < 300; ++id) {
    queue->submit(io_command(IoOpcode::kFlush, id));
    const std::uint64_t end = monotonic_ns() + 500'000'000;
    while (client.controller().counters().commands == fetched && monotonic_ns() < end) std::this_thread::yield();
    if (client.controller().counters().commands == fetched) break;
    fetched = client.controller().counters().commands;
  }
  EXPECT_LT(fetched - before, 16u);
  EXPECT_EQ(client.kinds(), "completion queue overflow");
  // As it takes them, the rest is served.
  for (std::uint16_t id = 0; id < fetched - before; ++id) {
    const auto done = queue->wait();
    ASSERT_TRUE(done);
    EXPECT_EQ(done->command_id, id);
  }
  EXPECT_TRUE(queue->wait());
}

// Entries that were accepted are served, whatever is written to the doorbell after them.
TEST(NvmeSoftRules, AWrongTailDoesNotHoldUpWhatWasBeforeIt) {
  Broken client;
  FaultRule slow;
  slow.kind = FaultKind::kSlow;
  slow.queue = 1;
  slow.delay = std::chrono::milliseconds(100);
  client.faults().add(slow);
  for (std::uint16_t id = 0; id < 3; ++id) client.io->put(io_command(IoOpcode::kFlush, id));
  client.io->ring();
  while (client.faults().injected() == 0) std::this_thread::yield();
  client.io->ring(77);
  for (std::uint16_t id = 0; id < 3; ++id) {
    const auto done = client.io->wait();
    ASSERT_TRUE(done);
    EXPECT_EQ(done->command_id, id);
  }
  EXPECT_EQ(client.kinds(), "doorbell range");
}

// A chain that is a circle of large segments holds up nobody for long.
TEST(NvmeSoftRules, ACircleOfLargeSegmentsEnds) {
  Broken client;
  const auto count = static_cast<std::uint32_t>(client.memory.size() / sizeof(SglDescriptor));
  const SglDescriptor circle =
      SglDescriptor::of(SglType::kSegment, client.memory.address(), count * std::uint32_t{sizeof(SglDescriptor)});
  client.memory.at<SglDescriptor>((count - 1) * sizeof circle) = circle;
  const std::uint64_t start = monotonic_ns();
  EXPECT_EQ(client.outcome(client.sgl(circle, 2)), "00d: SGL");
  EXPECT_LT(monotonic_ns() - start, 2'000'000'000u);
}

// Who sends a command again that can never succeed is told so.
TEST(NvmeSoftRules, DoNotRetry) {
  Broken client;
  const auto raw = [](HandQueue& queue, const SubmissionEntry& entry) {
    queue.submit(entry);
    const auto done = queue.wait();
    return done ? CommandStatus::of(*done).raw : 0xffff;
  };
  const std::uint64_t page = client.memory.address();
  EXPECT_EQ(raw(*client.io, io_command(IoOpcode::kRead, 1, 1 << 20, 1, page)), kScLbaOutOfRange | kDoNotRetry);
  EXPECT_EQ(raw(*client.io, io_command(IoOpcode::kRead, 1, 0, 2, page, 4)), kScPrpOffsetInvalid | kDoNotRetry);
  EXPECT_EQ(raw(client.admin(), admin_command(AdminOpcode::kSetFeatures, 0x7f)), kScInvalidField | kDoNotRetry);
  EXPECT_EQ(raw(client.admin(), admin_command(AdminOpcode::kDeleteSq, 9)), kScInvalidQueueId | kDoNotRetry);
  // These may do better another time.
  EXPECT_EQ(raw(client.admin(), admin_command(AdminOpcode::kDeleteCq, 1)), kScInvalidQueueDeletion);
  EXPECT_EQ(raw(*client.io, io_command(IoOpcode::kRead, 1, 0, 1, 0x7000)), kScDataTransferError);
  FaultRule media;
  media.kind = FaultKind::kMediaError;
  media.queue = 1;
  client.faults().add(media);
  EXPECT_EQ(raw(*client.io, io_command(IoOpcode::kRead, 1, 0, 1, page)), kScUnrecoveredRead);
}

}  // namespace
}  // namespace tardis::nvme::testing
