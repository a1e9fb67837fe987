// SPDX-License-Identifier: Apache-2.0
// What tools say of drives: Identify and health data, sysfs, releases, readers of registers. On data and files made up.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "nvme/gpu_memory_probe.h"
#include "nvme/identify_json.h"
#include "nvme/vfio/doorbell_check.h"
#include "nvme/vfio/drive_facts.h"
#include "nvme/vfio/drive_release.h"
#include "nvme/vfio/vfio_open.h"
#include "nvme_vfio_machine.h"
#include "store_support.h"
#include "tests/nvme_driver_support.h"

namespace tardis::nvme {
namespace {

namespace fs = std::filesystem;

void expect_has(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

TEST(NvmeVfioTools, HealthIsDecoded) {
  HealthLog log{};
  log.critical_warning = 0x85;
  log.temperature[0] = 0x2c;
  log.temperature[1] = 0x01;  // 300 K
  log.used_percent = 120;
  log.units_written = {0, 1};                               // 2^64
  log.units_read = {~std::uint64_t{0}, ~std::uint64_t{0}};  // 2^128 - 1
  log.power_on_hours = {10'000'000'000'000'000'000u, 0};
  log.sensors[1] = 310;
  JsonWriter json;
  json.begin_object();
  write_health(json, log);
  json.end_object();
  expect_has(
      json.text(),
      {R"("critical_warning":133,"warnings":["spare capacity below its threshold","reliability degraded","reserved bit 7"])",
       R"("temperature_celsius":27,"sensors_celsius":[37])", R"("used_percent":120)",
       R"("units_read":340282366920938463463374607431768211455,)", R"("units_written":18446744073709551616,)",
       R"("power_on_hours":10000000000000000000,)", R"("media_errors":0,)"});
  JsonWriter none;
  none.begin_object();
  write_health(none, HealthLog{});
  none.end_object();
  expect_has(none.text(), {R"("temperature_celsius":null,"sensors_celsius":[])"});
}

TEST(NvmeVfioTools, AControllerIsDescribed) {
  IdentifyController data{};
  std::memset(data.model, ' ', sizeof data.model);
  std::memcpy(data.model, "A \"drive\"", 9);
  std::memset(data.serial, ' ', sizeof data.serial);
  std::memset(data.firmware, ' ', sizeof data.firmware);
  data.sqes = 0x66;
  data.cqes = 0x44;
  data.mdts = 5;
  data.sgls = kSglDword | kSglBitBucket;
  data.sgl_blocks = 8;
  data.volatile_cache = 1;
  data.awupf = 7;
  data.oncs = kOncsDatasetManagement;
  std::memcpy(data.subsystem, "nqn.x\n", 6);
  const Capabilities capabilities = Capabilities::of(1024, 2000, 1, 12, 12);
  const auto info = read_controller(data, capabilities, 0x020100, {});
  ASSERT_TRUE(info) << info.error().message;
  const auto text = [&] {
    JsonWriter json;
    json.begin_object();
    write_controller(json, data, *info, capabilities);
    json.end_object();
    return json.text();
  };
  expect_has(
      text(),
      {R"("model":"A \"drive\"","serial":"")", R"("version":"2.1.0","mdts":5,"max_transfer_bytes":131072)",
       R"("sgl":"dword","sgl_bit_bucket":true,"sgl_blocks":8)", R"("volatile_cache":true)", R"("awupf_blocks":8)",
       R"("write_zeroes":false)", R"("doorbell_stride_bytes":8)", R"("subsystem":"nqn.x?")", R"("max_commands":null)"});
}

TEST(NvmeVfioTools, NamespacesAreDescribedAlsoWhereTheyAreRefused) {
  IdentifyNamespace data{};
  data.size_blocks = data.capacity_blocks = 1000;
  data.formats = 2;
  data.format_table[0] = {0, 9, 2};
  data.format_table[1] = {8, 12, 0};
  data.format_table[2] = {0, 77, 0};  // no size
  const ControllerInfo controller;
  const auto text = [&] {
    JsonWriter json;
    json.begin_object();
    write_namespace(json, 3, data, controller);
    json.end_object();
    return json.text();
  };
  expect_has(text(), {R"("id":3,"blocks":1000,)", R"("block_bytes":512,"bytes":512000,"metadata_bytes":0)",
                      R"({"index":1,"block_bytes":4096,"metadata_bytes":8,"performance":0,"in_use":false})",
                      R"({"index":2,"block_bytes":null,)", R"("power_fail_bytes":512,"refusal":"")"});
  data.format = 1;
  expect_has(text(), {R"("metadata_bytes":8,"performance":0,"in_use":true)", R"("power_fail_bytes":null)",
                      "expected a format without metadata, found 8"});
  data.format = 9;  // beyond the table that it says it has
  expect_has(text(), {R"("block_bytes":null,"bytes":null,"metadata_bytes":null)", "expected a format of 0 to 2"});
  data.format = 0;
  data.size_blocks = ~std::uint64_t{0};
  expect_has(text(), {R"("bytes":null)", "expected a size below 2^64"});
}

class Machine : public testing::FileMachine {
 public:
  Machine() {
    for (const char* driver : {"nvme", "vfio-pci"}) fs::create_directories(paths.sys + "/bus/pci/drivers/" + driver);
    write(paths.sys + "/bus/pci/drivers_probe", "");
    write(device() / "class", "0x010802\n");
    write(device() / "driver_override", "(null)\n");
    write(device() / "current_link_speed", "16.0 GT/s PCIe\n");
    write(device() / "max_link_speed", "32.0 GT/s PCIe\n");
    write(device() / "current_link_width", "4\n");
    write(device() / "max_link_width", "4\n");
  }
  static std::string read(const fs::path& file) {
    std::ifstream in(file);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  fs::path device() const { return testing::FileMachine::device("0000:81:00.0"); }
  void set_driver(const std::string& name) {
    fs::remove(device() / "driver");
    if (name.empty()) return;
    const fs::path driver = fs::path(paths.sys) / "bus/pci/drivers" / name;
    write(driver / "unbind", "");
    fs::create_directory_symlink(driver, device() / "driver");
  }
  void set_group(const std::string& group) {
    fs::create_directories(paths.sys + "/kernel/iommu_groups/" + group + "/devices");
    fs::create_directory_symlink(paths.sys + "/kernel/iommu_groups/" + group, device() / "iommu_group");
  }
  Result<DriveRelease> plan(const std::string& to) const {
    return DriveRelease::plan(*PciAddress::parse("81:00.0"), to, paths);
  }
  DriveFacts facts() const { return DriveFacts::read(*PciDevice::read(*PciAddress::parse("81:00.0"), paths), paths); }
};

TEST(NvmeVfioTools, WhatTheKernelShowsOfADrive) {
  Machine machine;
  machine.set_driver("nvme");
  machine.set_group("7");
  Machine::write(machine.device() / "nvme/nvme3/model", "Drive \x1b[31m of things        \n");
  Machine::write(machine.device() / "nvme/nvme3/serial", "S1  \n");
  Machine::write(machine.device() / "nvme/nvme3/queue_count", "17\n");
  fs::create_directories(machine.device() / "nvme/nvme3/nvme3n1");
  const fs::path block = fs::path(machine.paths.sys) / "block/nvme3n1";
  Machine::write(block / "size", "2048\n");
  Machine::write(block / "queue/logical_block_size", "4096\n");
  Machine::write(block / "queue/write_cache", "write through\n");
  Machine::write(block / "queue/max_hw_sectors_kb", "128\n");
  const DriveFacts facts = machine.facts();
  EXPECT_EQ(facts.link, (PcieLink{16000, 32000, 4, 4}));
  EXPECT_EQ(facts.controller, "nvme3");
  EXPECT_EQ(facts.model, "Drive ?[31m of things");
  EXPECT_EQ(facts.queues, 16u);
  ASSERT_EQ(facts.namespaces.size(), 1u);
  EXPECT_EQ(facts.namespaces[0].bytes, 1u << 20);
  EXPECT_EQ(facts.namespaces[0].block_bytes, 4096u);
  EXPECT_EQ(facts.namespaces[0].volatile_cache, false);
  EXPECT_EQ(facts.namespaces[0].max_transfer_bytes, 128u << 10);
  EXPECT_FALSE(facts.namespaces[0].power_fail_bytes);
  EXPECT_EQ(facts.refusal, "the kernel's driver has it");

  machine.set_driver("vfio-pci");
  expect_has(machine.facts().refusal, {"/vfio/7", "may not be opened"});
  Machine::write(machine.paths.dev + "/vfio/7", "");
  EXPECT_EQ(machine.facts().refusal, "");
  fs::remove(machine.paths.dev + "/vfio/7");
  fs::create_directories(machine.device() / "vfio-dev/vfio2");
  expect_has(machine.facts().vfio_file, {"/vfio/devices/vfio2"});
}

TEST(NvmeVfioTools, AReleaseIsPlannedOrRefused) {
  Machine machine;
  machine.set_driver("nvme");
  expect_has(machine.plan("vfio-pci").error().message, {"IOMMU group, found none"});
  expect_has(machine.plan("uio").error().message, {"expected the driver vfio-pci or nvme, found 'uio'"});
  machine.set_group("7");
  const std::string at = machine.device().string();
  const std::string probe = "echo 0000:81:00.0 > " + machine.paths.sys + "/bus/pci/drivers_probe";
  EXPECT_EQ(machine.plan("vfio-pci")->commands(),
            (std::vector<std::string>{"echo vfio-pci > " + at + "/driver_override",
                                      "echo 0000:81:00.0 > " + at + "/driver/unbind", probe}));
  EXPECT_FALSE(machine.plan("nvme")->needed());
  fs::remove_all(machine.paths.sys + "/bus/pci/drivers/vfio-pci");
  auto without_module = machine.plan("vfio-pci");
  EXPECT_EQ(without_module->commands().front(), "modprobe vfio-pci");
  expect_has(without_module->carry_out().error().message, {"modprobe vfio-pci"});
  machine.set_driver("");
  EXPECT_EQ(machine.plan("nvme")->commands(), (std::vector<std::string>{"echo > " + at + "/driver_override", probe}));
  machine.set_driver("uio_pci_generic");
  EXPECT_EQ(machine.plan("vfio-pci").error().code, Code::kBusy);
  Machine::write(machine.device() / "class", "0x020000\n");
  expect_has(machine.plan("vfio-pci").error().message, {"class 0108xx", "020000"});

  // Somebody drives it.
  Machine driven;
  driven.set_driver("vfio-pci");
  driven.set_group("8");
  Machine::write(driven.paths.dev + "/vfio/8", "");
  EXPECT_TRUE(driven.plan("nvme"));
  Machine::write(driven.paths.proc + "/77/comm", "python3\n");
  fs::create_directories(driven.paths.proc + "/77/fd");
  fs::create_symlink(driven.paths.dev + "/vfio/8", driven.paths.proc + "/77/fd/5");
  const auto busy = driven.plan("nvme");
  ASSERT_FALSE(busy);
  EXPECT_EQ(busy.error().code, Code::kBusy);
  expect_has(busy.error().message, {"/vfio/8 is open in process 77 (python3)"});
}

// What vfio-pci makes where there is no group file, and where there is no IOMMU.
TEST(NvmeVfioTools, EveryFileOfVfioIsKnown) {
  Machine machine;
  machine.set_driver("vfio-pci");
  machine.set_group("8");
  const std::string vfio = machine.paths.dev + "/vfio";
  const auto refusal_while_open = [&](const std::string& file) {
    const fs::path link = machine.paths.proc + "/77/fd/5";
    fs::create_directories(link.parent_path());
    fs::create_symlink(file, link);
    const auto plan = machine.plan("nvme");
    fs::remove(link);
    EXPECT_TRUE(machine.plan("nvme"));
    return plan ? std::string() : plan.error().message;
  };
  EXPECT_EQ(machine.facts().vfio_file, vfio + "/8");
  expect_has(machine.facts().refusal, {"is not there"});
  expect_has(refusal_while_open(vfio + "/8"), {"/vfio/8 is open in process 77"});  // of a process that has another /dev
  fs::create_directories(machine.device() / "vfio-dev/vfio3");
  Machine::write(vfio + "/devices/vfio3", "");
  EXPECT_EQ(machine.facts().vfio_file, vfio + "/devices/vfio3");
  EXPECT_EQ(machine.facts().refusal, "");
  expect_has(refusal_while_open(vfio + "/devices/vfio3"), {"/vfio/devices/vfio3 is open in process 77"});
  if (::geteuid() == 0) {
    expect_has(machine.plan("vfio-pci")->remaining(),
               {"/devices/vfio3 belongs to root; chown USER ", "/dev/iommu lets USER"});
  }
  Machine::write(vfio + "/8", "");
  EXPECT_EQ(machine.facts().vfio_file, vfio + "/8");

  fs::remove_all(vfio);
  Machine::write(vfio + "/noiommu-8", "");
  EXPECT_EQ(machine.facts().vfio_file, vfio + "/noiommu-8");
  expect_has(machine.facts().refusal, {"expected an IOMMU, found none", "all memory of the machine"});
  expect_has(machine.plan("vfio-pci")->remaining(), {"expected an IOMMU, found none"});
  expect_has(refusal_while_open(vfio + "/noiommu-8"), {"/vfio/noiommu-8 is open in process 77"});
  const auto opened =
      open_vfio(*PciDevice::read(*PciAddress::parse("0000:81:00.0"), machine.paths), VfioWay::kAuto, machine.paths);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, Code::kPermission);
  expect_has(opened.error().message, {"expected an IOMMU, found none"});
}

TEST(NvmeVfioTools, AReleaseThatNoDriverTakesIsTakenBack) {
  Machine machine;
  machine.set_driver("nvme");
  machine.set_group("7");
  auto release = machine.plan("vfio-pci");
  ASSERT_TRUE(release);
  const Status done = release->carry_out();
  ASSERT_FALSE(done);
  expect_has(done.error().message, {"expected the driver vfio-pci after it was asked, found nvme"});
  EXPECT_EQ(Machine::read(machine.device() / "driver/unbind"), "0000:81:00.0\n");
  EXPECT_EQ(Machine::read(machine.paths.sys + "/bus/pci/drivers_probe"), "0000:81:00.0\n");
  EXPECT_EQ(Machine::read(machine.device() / "driver_override").substr(0, 1), "\n") << "the override is taken back";
  // It lost its driver between the plan and the deed.
  auto lost = machine.plan("vfio-pci");
  ASSERT_TRUE(lost);
  machine.set_driver("");
  Machine::write(machine.paths.sys + "/bus/pci/drivers_probe", "");
  const Status nobody = lost->carry_out();
  ASSERT_FALSE(nobody);
  expect_has(nobody.error().message, {"driver/unbind", "nvme was asked to take it back"});
  EXPECT_EQ(Machine::read(machine.paths.sys + "/bus/pci/drivers_probe"), "0000:81:00.0\n");
  machine.set_driver("nvme");
  // It was mounted between the plan and the deed.
  auto late = machine.plan("vfio-pci");
  ASSERT_TRUE(late);
  fs::create_directories(machine.device() / "nvme/nvme0/nvme0n1");
  Machine::write(machine.paths.sys + "/block/nvme0n1/dev", "259:0\n");
  Machine::write(machine.paths.proc + "/self/mountinfo", "36 22 259:0 / /data rw - xfs /dev/nvme0n1 rw\n");
  Machine::write(machine.device() / "driver_override", "(null)\n");
  const Status refused = late->carry_out();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kBusy);
  EXPECT_EQ(Machine::read(machine.device() / "driver_override"), "(null)\n");
}

// Registers in memory, then doorbells.
class Registers final : public RegisterWindow {
 public:
  Registers() {
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<std::uint32_t>(0x1000 + i);
  }
  std::uint32_t read32(std::uint32_t offset) override { return words[offset / 4]; }
  std::uint64_t read64(std::uint32_t offset) override { return read32(offset); }
  void write32(std::uint32_t, std::uint32_t) override { ADD_FAILURE() << "a register was written"; }
  void write64(std::uint32_t, std::uint64_t) override { ADD_FAILURE() << "a register was written"; }
  volatile std::uint32_t* doorbells() override { return words.data() + kRegDoorbells / 4; }
  std::uint32_t bytes() const override { return sizeof words; }

  std::array<std::uint32_t, 2048> words;
};

TEST(NvmeVfioTools, AReaderOfRegistersIsBelievedOnlyIfItReadsThem) {
  Registers registers;
  int calls = 0;
  const auto read_from = [&](std::uint32_t flip, int fail_at) {
    calls = 0;
    return [&registers, &calls, flip, fail_at](void* memory, std::size_t bytes, const std::uint32_t* offsets,
                                               std::uint32_t* values, std::uint32_t count) {
      if (calls++ == fail_at) return 801;
      EXPECT_EQ(memory, registers.words.data() + (calls - 1) * 1024);
      EXPECT_EQ(bytes, 4096u);
      for (std::uint32_t i = 0; i < count; ++i) values[i] = static_cast<std::uint32_t*>(memory)[offsets[i] / 4] ^ flip;
      return 0;
    };
  };
  auto verdict = check_doorbells(registers, read_from(0, -1));
  ASSERT_TRUE(verdict);
  EXPECT_TRUE(verdict->reached);
  EXPECT_EQ(calls, 2);
  verdict = check_doorbells(registers, read_from(1, -1));
  EXPECT_FALSE(verdict->reached);
  expect_has(verdict->found, {"expected 00001000, found 00001001"});
  for (const int fail_at : {0, 1}) {
    verdict = check_doorbells(registers, read_from(0, fail_at));
    EXPECT_FALSE(verdict->reached);
    EXPECT_EQ(verdict->reader_error, 801);
    expect_has(verdict->found, {fail_at == 0 ? "page of registers" : "page of doorbells"});
  }
  // One that returns and reads nothing.
  verdict = check_doorbells(registers,
                            [](void*, std::size_t, const std::uint32_t*, std::uint32_t*, std::uint32_t) { return 0; });
  EXPECT_FALSE(verdict->reached);
  registers.words.fill(kRegisterGone);
  EXPECT_FALSE(check_doorbells(registers, read_from(0, -1)));
}

TEST(NvmeVfioTools, DataOfAdminCommands) {
  testing::RigOptions options;
  options.driver.queues = 1;
  options.driver.external_queues = kMaxQueueEntries;
  testing::Rig rig(options);
  ASSERT_NE(rig.driver, nullptr);
  Driver& driver = *rig.driver;
  EXPECT_EQ(driver.granted_queues(), driver.queue_pairs() + driver.external_queues());
  IdentifyController controller;
  ASSERT_TRUE(driver.read_identify(kCnsController, 0, std::as_writable_bytes(std::span(&controller, 1))));
  const auto info = read_controller(controller, driver.capabilities(), driver.controller().version, {});
  ASSERT_TRUE(info);
  EXPECT_EQ(*info, driver.controller());
  IdentifyNamespace space;
  ASSERT_TRUE(driver.read_identify(kCnsNamespace, 1, std::as_writable_bytes(std::span(&space, 1))));
  EXPECT_EQ(space.size_blocks, driver.namespaces().front().blocks);
  std::array<std::byte, 64> entry{};
  EXPECT_TRUE(driver.read_log(kLogErrors, entry));
  rig.excused = {ViolationKind::kAdmin};  // the controller blames who asks
  const Status none = driver.read_log(static_cast<LogPage>(0xbf), entry);
  ASSERT_FALSE(none);
  expect_has(none.error().message, {"Get Log Page"});
  std::array<std::byte, 4100> much{};
  for (const std::size_t bytes : {0u, 3u, 4100u}) {
    EXPECT_EQ(driver.read_log(kLogErrors, std::span(much).first(bytes)).error().code, Code::kInvalidArgument);
  }
}

TEST(NvmeVfioTools, WaysToGpuMemoryAreNamed) {
  Machine machine;
  auto found = probe_gpu_memory(machine.paths);
  ASSERT_EQ(found.size(), 5u);
  for (const GpuMemoryProbe& probe : found) EXPECT_FALSE(probe.here) << probe.way;
  fs::create_directories(machine.paths.sys + "/module/nvidia_peermem");
  fs::create_directories(machine.paths.sys + "/module/nvidia_fs");
  Machine::write(machine.paths.proc + "/driver/nvidia/version", "580\n");
  const fs::path gpu = fs::path(machine.paths.sys) / "bus/pci/devices/0000:19:00.0";
  Machine::write(gpu / "class", "0x030200\n");
  Machine::write(gpu / "vendor", "0x10de\n");
  Machine::write(gpu / "resource",
                 "0x00000000fe000000 0x00000000feffffff 0x0000000000040200\n"
                 "0x0000380000000000 0x0000383fffffffff 0x000000000014220c\n");
  found = probe_gpu_memory(machine.paths);
  for (const GpuMemoryProbe& probe : found) EXPECT_EQ(probe.here, probe.way != "dma-buf into VFIO") << probe.way;
  expect_has(found[4].found, {"0000:19:00.0 has 256 GiB"});
}

}  // namespace
}  // namespace tardis::nvme
