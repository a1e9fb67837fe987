// SPDX-License-Identifier: Apache-2.0
// What is no drive to be driven, and what a driver or a kernel does not have: refused by name, and before anything is
// touched.
#include <algorithm>
#include <fstream>

#include "guest_support.h"
#include "nvme/self_test.h"
#include "raw_queue.h"

namespace tardis::nvme::testing {
namespace {

using Op = NamespaceRequest::Op;

using GuestRefusals = Guest;

std::string refusal(const std::string& address, Code code, VfioOptions options = guest_options()) {
  const auto opened = VfioController::open(address, std::move(options));
  EXPECT_FALSE(opened) << address;
  if (opened) return {};
  EXPECT_EQ(opened.error().code, code) << opened.error().message;
  return opened.error().message;
}
void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST_F(GuestRefusals, WhatIsNoNvmeController) {
  expect_part(refusal("0000:00:00.0", Code::kInvalidArgument), "expected an NVMe controller (class 0108xx)");
  refusal("0000:7e:1f.7", Code::kNotFound);
  for (const char* const text : {"", "zz", "0000:00", "0000:00:04", "0000:00:20.0", "0000:00:04.8", "10000:100:00.0"}) {
    EXPECT_FALSE(PciAddress::parse(text)) << text;
  }
}

TEST_F(GuestRefusals, AFunctionThatNoDriverHas) {
  const std::string at = "/sys/bus/pci/devices/" + address;
  const auto write_file = [](const std::string& path, const std::string& text) { std::ofstream(path) << text; };
  write_file(at + "/driver/unbind", address);
  expect_part(refusal(address, Code::kNotFound), "found none");
  write_file("/sys/bus/pci/drivers_probe", address);
  EXPECT_NE(open(), nullptr);
}

TEST_F(GuestRefusals, WaysThatThisKernelLacks) {
  if (guest_way() != VfioWay::kGroup) GTEST_SKIP() << "the kernel has other ways (guest_scenario_modes.cpp)";
  VfioOptions options = guest_options();
  options.way = VfioWay::kWithoutIommu;
  expect_part(refusal(address, Code::kNotFound, options), "noiommu-");
  options.way = VfioWay::kDeviceFile;
  const auto opened = VfioController::open(address, options);
  ASSERT_FALSE(opened);
  std::printf("%s\n", opened.error().message.c_str());
  options.way = VfioWay::kAuto;
  EXPECT_NE(open(options), nullptr);
}

TEST_F(GuestRefusals, NamespacesThatAreNotThere) {
  const auto controller = open();
  ASSERT_NE(controller, nullptr);
  const auto space = controller->open_namespace(77);
  ASSERT_FALSE(space);
  EXPECT_EQ(space.error().code, Code::kNotFound) << space.error().message;
}

TEST_F(GuestRefusals, QueuesOfOthers) {
  if (guest_way() == VfioWay::kWithoutIommu) GTEST_SKIP() << "memory that is not of huge pages needs an IOMMU";
  VfioOptions options = guest_options();
  options.driver.external_queues = 1;
  const auto controller = open(options);
  ASSERT_NE(controller, nullptr);
  Driver& driver = *controller->driver();
  EXPECT_EQ(driver.external_queues(), 1u);
  AlignedBuffer memory(ExternalRings::bytes(16));
  EXPECT_EQ(driver.open_external({nullptr, 16}).error().code, Code::kInvalidArgument);
  EXPECT_EQ(driver.open_external({memory.data() + 8, 16}).error().code, Code::kInvalidArgument);
  EXPECT_EQ(driver.open_external({memory.data(), 1}).error().code, Code::kInvalidArgument);
  EXPECT_EQ(driver.open_external({memory.data(), driver.controller().max_queue_entries + 1}).error().code,
            Code::kInvalidArgument);
  EXPECT_EQ(driver.close_external(1).error().code, Code::kNotFound);
  const auto queue = driver.open_external({memory.data(), 16});
  ASSERT_TRUE(queue) << queue.error().message;
  EXPECT_TRUE(driver.external_alive(queue->id));
  AlignedBuffer second(ExternalRings::bytes(16));
  const auto further = driver.open_external({second.data(), 16});
  ASSERT_FALSE(further);
  EXPECT_EQ(further.error().code, Code::kBusy);
  expect_part(driver.report(), "for owners outside");
  // A reset ends it, and it is not made again; a shutdown ends one that is open.
  ASSERT_TRUE(driver.reset());
  EXPECT_FALSE(driver.external_alive(queue->id));
  EXPECT_TRUE(driver.close_external(queue->id));
  const auto third = driver.open_external({memory.data(), 16});
  ASSERT_TRUE(third);
  EXPECT_TRUE(driver.shut_down());
  EXPECT_FALSE(driver.external_alive(third->id));
  EXPECT_EQ(driver.open_external({second.data(), 16}).error().code, Code::kClosed);
  EXPECT_FALSE(driver.reset());
  EXPECT_FALSE(driver.volatile_cache_enabled());
  EXPECT_EQ(driver.state(), DriverState::kShutDown);
  std::printf("%s\n", driver.report().c_str());
}

TEST_F(GuestRefusals, SelfTestOfReads) {
  if (guest_way() == VfioWay::kWithoutIommu) GTEST_SKIP() << "memory that is not of huge pages needs an IOMMU";
  const auto controller = open();
  ASSERT_NE(controller, nullptr);
  const auto space = space_of(controller, 1);
  HostMemory memory(controller->mapper());
  const Status tested = self_test_reads(memory, *space);
  EXPECT_TRUE(tested) << tested.error().message;
}

// As a GPU's pages lie: scattered granules, of which a table has a descriptor each.
TEST_F(GuestRefusals, TablesOfScatteredGranules) {
  if (guest_way() == VfioWay::kWithoutIommu) GTEST_SKIP() << "memory that is not of huge pages needs an IOMMU";
  VfioOptions options = guest_options();
  options.driver.external_queues = 1;
  const auto controller = open(options);
  ASSERT_NE(controller, nullptr);
  if (controller->driver()->controller().sgl != SglRule::kAnyAlignment) GTEST_SKIP() << "the controller has no SGLs";
  const auto space = space_of(controller, 1);
  const std::uint32_t block = space->block_bytes();
  constexpr std::uint64_t kGranule = 8192, kGranules = 9;
  const std::uint64_t region = kGranules * kGranule - kGranule / 2;
  std::vector<AlignedBuffer> granules;
  std::vector<std::uint64_t> addresses(kGranules);
  for (std::uint64_t i = 0; i < kGranules; ++i) granules.emplace_back(kGranule);
  for (std::uint64_t i = 0; i < kGranules; ++i) {
    const std::uint64_t at = i * 4 % kGranules;  // not in their order
    const auto address = controller->mapper().map(granules[at].data(), kGranule);
    ASSERT_TRUE(address);
    addresses[at] = *address;
  }
  AlignedBuffer entries(4096);
  const auto bus = controller->mapper().map(entries.data(), entries.size());
  ASSERT_TRUE(bus);
  auto* const descriptors = reinterpret_cast<SglDescriptor*>(entries.data());
  const SglRules rules = SglRules::of(kSglAnyAlignment, 0);
  SglTable table;
  EXPECT_EQ(SglTable::make(rules, region, kGranule, descriptors, *bus, 16, table), SglStatus::kMemoryTooSmall);
  EXPECT_EQ(SglTable::make(rules, region, 12345, descriptors, *bus, entries.size(), table), SglStatus::kGranule);
  ASSERT_EQ(SglTable::make(rules, region, kGranule, descriptors, *bus, entries.size(), table), SglStatus::kOk);
  ASSERT_EQ(table.fill([&](std::uint64_t i) { return addresses[i]; }), SglStatus::kOk);

  RawQueue queue(*controller->driver(), 16);
  ASSERT_TRUE(queue.ready());
  const auto transfer = [&](IoOpcode opcode, std::uint64_t offset, std::uint64_t bytes) {
    SglDescriptor pointer{};
    const SglStatus described = table.describe(offset, bytes, pointer);
    EXPECT_EQ(described, SglStatus::kOk) << name_of(described);
    SubmissionEntry entry = guest_io(opcode, 1, (4u << 20) / block + offset / block, bytes / block);
    entry.set_data_pointer(DataPointer::kSgl);
    entry.sgl = pointer;
    return queue.run(entry);
  };
  const auto byte_at = [](std::uint64_t at) { return static_cast<std::byte>(at * 31 + at / 4096); };
  const auto of_region = [&](std::uint64_t at) -> std::byte& { return granules[at / kGranule].data()[at % kGranule]; };
  for (std::uint64_t at = 0; at < region; ++at) of_region(at) = byte_at(at);
  EXPECT_EQ(table.longest(0, region), region);
  EXPECT_EQ(transfer(IoOpcode::kWrite, 0, region), kScSuccess);
  std::vector<std::byte> written(region);
  const iovec range{written.data(), written.size()};
  NamespaceRequest request{.op = Op::kRead, .offset = 4u << 20, .memory = {&range, 1}, .error = -1};
  space->run({&request, 1}, nullptr);
  ASSERT_EQ(request.error, 0);
  for (std::uint64_t at = 0; at < region; ++at) ASSERT_EQ(written[at], byte_at(at)) << at;
  // Back in three: a part of a granule, whole ones, and one that ends within a granule.
  for (AlignedBuffer& granule : granules) std::memset(granule.data(), 0, kGranule);
  for (std::uint64_t offset = 0; offset < region;) {
    const std::uint64_t most = offset == 0 ? kGranule / 2 : region - offset;
    const std::uint64_t bytes = table.longest(offset, most);
    ASSERT_GT(bytes, 0u);
    ASSERT_EQ(transfer(IoOpcode::kRead, offset, bytes), kScSuccess);
    offset += bytes;
  }
  for (std::uint64_t at = 0; at < region; ++at) ASSERT_EQ(of_region(at), byte_at(at)) << at;
  SglDescriptor pointer{};
  EXPECT_EQ(table.describe(kGranule / 2, kGranule, pointer), SglStatus::kGranule);
  EXPECT_EQ(table.describe(region, block, pointer), SglStatus::kOutOfRange);
  EXPECT_EQ(table.describe(0, 0, pointer), SglStatus::kNoBytes);
  for (AlignedBuffer& granule : granules) EXPECT_TRUE(controller->mapper().unmap(granule.data()));
  EXPECT_TRUE(controller->mapper().unmap(entries.data()));
}

// ---- machines of their own: tests/qemu/test_refusals.py

// The first controller: 1 can be used; 2 has metadata, 3 protection information, 4 blocks of 2048 bytes, 5 zones.
TEST(ScenarioFormats, WhatCannotBeDrivenIsLeftOut) {
  auto controller = VfioController::open(guest_controllers().at(0), guest_options());
  ASSERT_TRUE(controller) << controller.error().message;
  const auto driver = (*controller)->driver();
  ASSERT_EQ(driver->namespaces().size(), 1u);
  EXPECT_EQ(driver->namespaces().front().id, 1u);
  std::string all;
  for (const std::string& why : driver->refused_namespaces()) {
    std::printf("refused: %s\n", why.c_str());
    all += why + "\n";
  }
  expect_part(all, "namespace 2");
  expect_part(all, "expected a format without metadata, found 8 bytes per block");
  expect_part(all, "namespace 3");
  expect_part(all, "expected blocks of 512 or 4096 bytes, found 2^11");
  expect_part(all, "namespace 5");
  expect_part(all, "expected the NVM command set, found the zoned namespace command set");
  for (const std::uint32_t id : {2u, 3u, 4u, 5u}) {
    const auto space = (*controller)->open_namespace(id);
    ASSERT_FALSE(space);
    expect_part(space.error().message, "namespace " + std::to_string(id));
  }
}

// The second and the third controller are two functions of one slot, which can reach each other's memory. The third is
// the kernel's.
TEST(ScenarioFormats, NeighboursOfAnIommuGroup) {
  const auto addresses = guest_controllers();
  ASSERT_EQ(addresses.size(), 3u);
  const auto write_file = [](const std::string& path, const std::string& text) { std::ofstream(path) << text; };
  const std::string at = "/sys/bus/pci/devices/" + addresses[2];
  const auto give = [&](const std::string& driver) {
    write_file(at + "/driver/unbind", addresses[2]);
    write_file(at + "/driver_override", driver);
    write_file("/sys/bus/pci/drivers_probe", addresses[2]);
  };
  give("nvme");
  const std::string why = refusal(addresses[1], Code::kPermission);
  expect_part(why, addresses[2]);
  expect_part(why, "driver nvme");
  std::printf("refused: %s\n", why.c_str());
  give("vfio-pci");
  const auto both = VfioController::open(addresses[1], guest_options());
  EXPECT_TRUE(both) << both.error().message;
}

}  // namespace
}  // namespace tardis::nvme::testing
