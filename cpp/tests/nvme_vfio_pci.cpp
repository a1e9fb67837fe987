// SPDX-License-Identifier: Apache-2.0
// What is found out about a PCI function, and what is refused, before anything is touched. On a sysfs of files.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "nvme/vfio/block_users.h"
#include "nvme/vfio/drive_refusal.h"
#include "nvme/vfio/nvme_users.h"
#include "nvme/vfio/pci_device.h"
#include "nvme_vfio_machine.h"
#include "store_support.h"

namespace tardis::nvme {
namespace {

namespace fs = std::filesystem;

TEST(NvmeVfioPci, AddressesAreReadAndWritten) {
  for (const auto& [text, written] : {std::pair{"0000:00:04.0", "0000:00:04.0"},
                                      {"81:00.1", "0000:81:00.1"},
                                      {"10000:e1:1f.7", "10000:e1:1f.7"},
                                      {"0:0:0.0", "0000:00:00.0"}}) {
    const auto address = PciAddress::parse(text);
    ASSERT_TRUE(address) << text;
    EXPECT_EQ(address->text(), written);
    EXPECT_EQ(*PciAddress::parse(address->text()), *address);
  }
  for (const char* text : {"", ".", ":", "00:04", "0000:00:04", "0000:00:04.8", "0000:00:20.0", "0000:100:04.0",
                           "0000:00:04.00", " 0000:00:04.0", "0000:00:04.0 ", "0000:00:g4.0", "nvme0", "-1:04.0",
                           "123456789:00:04.0", "::04.0", "0x00:04.0", "1:2:3:4.0"}) {
    const auto address = PciAddress::parse(text);
    ASSERT_FALSE(address) << text << " is " << address->text();
    EXPECT_EQ(address.error().code, Code::kInvalidArgument);
  }
}

struct Config {
  std::array<std::byte, kPciConfigBytes> bytes{};
  template <class T>
  void put(std::uint32_t offset, T value) {
    std::memcpy(bytes.data() + offset, &value, sizeof value);
  }
};

Config usual_config() {
  Config config;
  config.put<std::uint16_t>(kPciStatus, 1u << 4);
  config.put<std::uint8_t>(kPciCapabilities, 0x40);
  config.put<std::uint16_t>(0x40, 0x8011);  // MSI-X, then 80h
  config.put<std::uint16_t>(0x42, 64);      // 65 vectors
  config.put<std::uint16_t>(0x80, 0x0010);  // PCI Express, the last
  config.put<std::uint32_t>(0x84, 1u << 28);
  config.put<std::uint32_t>(0x8c, 4u | 4u << 4);
  config.put<std::uint16_t>(0x92, 3u | 2u << 4);
  return config;
}

TEST(NvmeVfioPci, CapabilitiesAreRead) {
  const PciCapabilities found = read_capabilities(usual_config().bytes);
  EXPECT_TRUE(found.express);
  EXPECT_TRUE(found.function_reset);
  EXPECT_EQ(found.express_offset, 0x80u);
  EXPECT_EQ(found.msix_vectors, 65u);
  EXPECT_EQ(found.link, (PcieLink{8000, 16000, 2, 4}));
}

TEST(NvmeVfioPci, BrokenConfigurationSpaceEndsTheList) {
  Config config = usual_config();
  config.put<std::uint8_t>(0x81, 0x40);  // in a circle
  EXPECT_TRUE(read_capabilities(config.bytes).express);
  config.put<std::uint16_t>(kPciStatus, 0);
  EXPECT_FALSE(read_capabilities(config.bytes).express);
  std::array<std::byte, kPciConfigBytes> gone;
  gone.fill(std::byte{0xff});
  EXPECT_FALSE(read_capabilities(gone).express);
  EXPECT_FALSE(read_capabilities({}).express);
  const Config usual = usual_config();
  EXPECT_FALSE(read_capabilities(std::span(usual.bytes).first(64)).express);  // what a user may read
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    for (std::byte& byte : config.bytes) byte = static_cast<std::byte>(random());
    config.put<std::uint8_t>(kPciStatus, 0xff);
    (void)read_capabilities(std::span(config.bytes).first(random() % (kPciConfigBytes + 1)));
  }
}

class Machine : public testing::FileMachine {
 public:
  Machine() { write(paths.proc + "/swaps", "Filename\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"); }

  void add(const std::string& address, const std::string& class_code, const std::string& driver,
           const std::string& group) {
    const fs::path at = device(address);
    write(at / "class", class_code + "\n");
    write(at / "vendor", "0x144d\n");
    write(at / "device", "0xa80a\n");
    write(at / "numa_node", "1\n");
    write(at / "resource",
          "0x00000000fe000000 0x00000000fe003fff 0x0000000000140204\n"
          "0x0000000000000000 0x0000000000000000 0x0000000000000000\n");
    const Config config = usual_config();
    write(at / "config", {reinterpret_cast<const char*>(config.bytes.data()), config.bytes.size()});
    if (!driver.empty()) fs::create_directory_symlink("../../../bus/pci/drivers/" + driver, at / "driver");
    if (group.empty()) return;
    const fs::path members = fs::path(paths.sys) / "kernel/iommu_groups" / group / "devices";
    fs::create_directories(members);
    fs::create_directory_symlink("../../../../bus/pci/devices/" + address, members / address);
    fs::create_directory_symlink("../../../../kernel/iommu_groups/" + group, at / "iommu_group");
  }
  // A namespace with a partition.
  void add_namespace(const std::string& address, const std::string& entry, const std::string& name) {
    fs::create_directories(device(address) / "nvme/nvme0" / entry);
    const fs::path block = fs::path(paths.sys) / "block" / name;
    write(block / "dev", "259:0\n");
    fs::create_directories(block / "holders");
    write(block / (name + "p1") / "partition", "1\n");
    write(block / (name + "p1") / "dev", "259:1\n");
    fs::create_directories(block / (name + "p1") / "holders");
    write(fs::path(paths.dev) / name, "");
  }
  PciDevice read(const std::string& address) const {
    auto found = PciDevice::read(*PciAddress::parse(address), paths);
    EXPECT_TRUE(found) << found.error().message;
    return *found;
  }
  std::string refusal(const std::string& address) const {
    const auto checked = check_drive(read(address), paths);
    return checked ? std::string() : checked.error().message;
  }
};

void expect_says(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

TEST(NvmeVfioPci, DeviceIsReadFromSysfs) {
  Machine machine;
  machine.add("0000:81:00.0", "0x010802", "vfio-pci", "17");
  machine.add("0000:82:00.0", "0x010802", "nvme", "18");
  machine.add("0000:00:1f.0", "0x060100", "", "");
  const PciDevice device = machine.read("0000:81:00.0");
  EXPECT_TRUE(device.is_nvme());
  EXPECT_EQ(device.vendor, 0x144d);
  EXPECT_EQ(device.device, 0xa80a);
  EXPECT_EQ(device.driver, "vfio-pci");
  EXPECT_EQ(device.group, "17");
  EXPECT_TRUE(device.group_others.empty());
  EXPECT_EQ(device.bar_bytes[0], 0x4000u);
  EXPECT_EQ(device.bar_bytes[1], 0u);
  EXPECT_EQ(device.numa_node, 1);
  EXPECT_EQ(device.capabilities.msix_vectors, 65u);
  const auto all = PciDevice::list_nvme(machine.paths);
  ASSERT_TRUE(all);
  ASSERT_EQ(all->size(), 2u);
  EXPECT_EQ((*all)[1].address.text(), "0000:82:00.0");
  const auto none = PciDevice::read(*PciAddress::parse("0000:83:00.0"), machine.paths);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Code::kNotFound);
}

TEST(NvmeVfioPci, OnlyAReleasedDriveAloneInItsGroupIsTaken) {
  Machine machine;
  machine.add("0000:81:00.0", "0x010802", "vfio-pci", "17");
  EXPECT_EQ(machine.refusal("0000:81:00.0"), "");

  machine.add("0000:00:1f.0", "0x060100", "vfio-pci", "1");
  expect_says(machine.refusal("0000:00:1f.0"), {"class 0108xx", "060100"});
  machine.add("0000:82:00.0", "0x010802", "", "18");
  expect_says(machine.refusal("0000:82:00.0"), {"found none", "driver_override", "0000:82:00.0"});
  machine.add("0000:83:00.0", "0x010802", "nvme", "19");
  expect_says(machine.refusal("0000:83:00.0"), {"found nvme", "driver_override", "unbind", "drivers_probe"});
  machine.add("0000:84:00.0", "0x010802", "vfio-pci", "");
  expect_says(machine.refusal("0000:84:00.0"), {"IOMMU group", "intel_iommu=on"});

  // A bridge is no company, another device is, unless VFIO has it as well.
  machine.add("0000:81:01.0", "0x060400", "pcieport", "17");
  EXPECT_EQ(machine.refusal("0000:81:00.0"), "");
  machine.add("0000:81:02.0", "0x020000", "e1000e", "17");
  expect_says(machine.refusal("0000:81:00.0"), {"group 17", "0000:81:02.0", "e1000e"});
  fs::remove(machine.device("0000:81:02.0") / "driver");
  expect_says(machine.refusal("0000:81:00.0"), {"0000:81:02.0", "driver none"});
  fs::create_directory_symlink("../vfio-pci", machine.device("0000:81:02.0") / "driver");
  EXPECT_EQ(machine.refusal("0000:81:00.0"), "");
}

TEST(NvmeVfioPci, DriveInUseIsNotToBeReleased) {
  const std::string address = "0000:81:00.0";
  const auto with = [&](auto change, std::initializer_list<const char*> says, const std::string& entry = "nvme0n1") {
    Machine machine;
    machine.add(address, "0x010802", "nvme", "17");
    machine.add_namespace(address, entry, "nvme0n1");
    EXPECT_TRUE(check_release(machine.read(address), machine.paths));
    change(machine);
    const auto refused = check_release(machine.read(address), machine.paths);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Code::kBusy);
    expect_says(refused.error().message, says);
    // Not the way to release it.
    EXPECT_EQ(machine.refusal(address), refused.error().message);
    EXPECT_EQ(refused.error().message.find("driver_override"), std::string::npos);
  };
  const auto mount = [](const std::string& line) {
    return [line](Machine& m) { Machine::write(fs::path(m.paths.proc) / "self/mountinfo", line, true); };
  };
  with(mount("36 22 259:1 / /srv/a\\040b rw shared:1 - ext4 /dev/root rw\n"), {"nvme0n1p1 is mounted on /srv/a b"});
  with(mount("36 22 0:45 /@ /data rw - btrfs /dev/nvme0n1 rw\n"), {"nvme0n1 is mounted on /data"});
  // With two paths to a namespace the controller's folder names the path.
  with(mount("36 22 259:0 / /data rw - xfs /dev/nvme0n1 rw\n"), {"nvme0n1 is mounted on /data"}, "nvme0c3n1");
  with([](Machine& m) { Machine::write(fs::path(m.paths.proc) / "swaps", "/dev/nvme0n1p1 partition 1 0 -2\n", true); },
       {"nvme0n1p1 is in use as swap"});
  with([](Machine& m) { fs::create_directories(fs::path(m.paths.sys) / "block/nvme0n1/nvme0n1p1/holders/dm-0"); },
       {"nvme0n1p1 is held by dm-0"});
  with([](Machine& m) { fs::create_directories(fs::path(m.paths.sys) / "block/nvme0n1/holders/md127"); },
       {"nvme0n1 is held by md127"});
}

TEST(NvmeVfioPci, UsersThatNeitherMountsNorHoldersShow) {
  const std::string address = "0000:81:00.0";
  const auto users = [&](auto change) {
    Machine machine;
    machine.add(address, "0x010802", "nvme", "17");
    machine.add_namespace(address, "nvme0n1", "nvme0n1");
    change(machine);
    std::string all;
    for (const std::string& user : users_of(*PciAddress::parse(address), machine.paths)) all += user + ";";
    return all;
  };
  const auto sys = [](const Machine& m, const char* file) { return fs::path(m.paths.sys) / file; };
  EXPECT_EQ(users([](Machine&) {}), "");
  // The file system is on the loop device, which opens the disk as anybody may.
  EXPECT_EQ(users([&](Machine& m) {
              Machine::write(sys(m, "block/loop3/loop/backing_file"), m.paths.dev + "/nvme0n1p1\n");
              Machine::write(sys(m, "block/loop4/loop/backing_file"), "/srv/image\n");
              fs::create_directories(sys(m, "block/loop5"));
            }),
            "nvme0n1p1 is behind loop3;");
  const auto target = [&](const char* enabled) {
    return [&, enabled](Machine& m) {
      const fs::path space = sys(m, "kernel/config/nvmet/subsystems/nqn.a/namespaces/5");
      Machine::write(space / "device_path", m.paths.dev + "/nvme0n1\n");
      Machine::write(space / "enable", enabled);
    };
  };
  EXPECT_EQ(users(target("1\n")), "nvme0n1 is exported as namespace 5 of nqn.a;");
  EXPECT_EQ(users(target("0\n")), "");
  const auto process = [&](const char* node) {
    return [&, node](Machine& m) {
      const fs::path at = fs::path(m.paths.proc) / "77";
      Machine::write(at / "comm", "qemu-system-x86\n");
      fs::create_directories(at / "fd");
      fs::create_symlink("socket:[1]", at / "fd/0");
      fs::create_symlink(m.paths.dev + "/" + node, at / "fd/9");
    };
  };
  EXPECT_EQ(users(process("nvme0n1p1")), "nvme0n1p1 is open in process 77 (qemu-system-x86);");
  EXPECT_EQ(users(process("ng0n1")), "ng0n1 is open in process 77 (qemu-system-x86);");
  EXPECT_EQ(users(process("nvme0n12")), "");
  // A container without the node: whether somebody has it open cannot be found out.
  const std::string blind = users([&](Machine& m) {
    fs::remove(fs::path(m.paths.dev) / "nvme0n1");
    EXPECT_TRUE(known_users_of(*PciAddress::parse(address), m.paths).empty()) << "nothing was opened";
  });
  EXPECT_NE(blind.find("cannot be opened to find out who uses nvme0n1"), std::string::npos) << blind;
  const std::string going = users([&](Machine& m) {
    fs::remove(fs::path(m.paths.dev) / "nvme0n1");
    fs::remove_all(sys(m, "block/nvme0n1"));
  });
  EXPECT_EQ(going, "");
}

// Of this machine: nodes that are not what the kernel calls by that name.
TEST(NvmeVfioPci, NodesThatAreSomethingElseTellNothing) {
  const auto told = exclusive_opener_of({"null", "259:0", "/sys"}, {});
  ASSERT_TRUE(told);
  EXPECT_NE(told->find("/dev/null is not the block device 259:0"), std::string::npos) << *told;
}

TEST(NvmeVfioPci, NamespacesOfAControllerAreFound) {
  Machine machine;
  machine.add("0000:81:00.0", "0x010802", "nvme", "17");
  const auto address = *PciAddress::parse("0000:81:00.0");
  EXPECT_TRUE(namespaces_of(address, machine.paths).empty());
  for (const char* entry :
       {"nvme0n1", "nvme0c1n1", "nvme0c2n12", "ng0n1", "hwmon3", "power", "nvme0", "nvme", "nvmen1"}) {
    fs::create_directories(machine.device("0000:81:00.0") / "nvme/nvme0" / entry);
  }
  EXPECT_EQ(namespaces_of(address, machine.paths), (std::vector<std::string>{"nvme0n1", "nvme0n12"}));
}

}  // namespace
}  // namespace tardis::nvme
