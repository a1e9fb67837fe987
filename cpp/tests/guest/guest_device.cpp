// SPDX-License-Identifier: Apache-2.0
// The function below the controller: interrupts, bus mastering, what is on its namespaces, and who may have it.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "guest_support.h"
#include "nvme/disk_marks.h"
#include "nvme/raw_volume.h"
#include "nvme/vfio/drive_refusal.h"
#include "raw_queue.h"

namespace tardis::nvme::testing {
namespace {

using Op = NamespaceRequest::Op;
using GuestDevice = Guest;

TEST_F(GuestDevice, InterruptsReachTheProcess) {
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  if (guest_way() == VfioWay::kWithoutIommu) GTEST_SKIP() << "interrupts need an IOMMU";
  const UniqueFd event(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  const int fd = event.get();
  const auto set = controller->device().set_vectors({&fd, 1});
  ASSERT_TRUE(set) << set.error().message;
  // QEMU gives a queue its vector when the queue is made, and only while interrupts are on.
  ASSERT_TRUE(controller->driver()->reset());
  std::uint64_t count = 0;
  (void)!::read(fd, &count, sizeof count);
  // The admin queue's completions always interrupt.
  EXPECT_TRUE(controller->driver()->volatile_cache_enabled());
  pollfd look{fd, POLLIN, 0};
  EXPECT_EQ(::poll(&look, 1, 2000), 1);
  EXPECT_TRUE(controller->device().set_vectors({}));
  (void)!::read(fd, &count, sizeof count);
  EXPECT_TRUE(controller->driver()->volatile_cache_enabled());
  EXPECT_EQ(::poll(&look, 1, 50), 0);
  const std::vector<int> many(controller->device().vectors() + 1, fd);
  EXPECT_FALSE(controller->device().set_vectors(many));
}

TEST_F(GuestDevice, BusMasteringIsSwitched) {
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  EXPECT_TRUE(controller->device().set_bus_mastering(false));
  EXPECT_TRUE(controller->device().set_bus_mastering(true));
  EXPECT_FALSE(controller->device().release_requested());
  EXPECT_FALSE(controller->device().error_reported());
}

std::uint16_t command_register(const std::string& address) {
  std::uint16_t command = 0;
  std::ifstream config("/sys/bus/pci/devices/" + address + "/config", std::ios::binary);
  config.seekg(kPciCommand);
  config.read(reinterpret_cast<char*>(&command), sizeof command);
  EXPECT_TRUE(config);
  return command;
}

// While it lives, the kernel resets the function by no means.
class NoResets {
 public:
  explicit NoResets(std::string address) : file_("/sys/bus/pci/devices/" + std::move(address) + "/reset_method") {
    std::ofstream(file_) << "\n";
    std::string method;
    std::ifstream(file_) >> method;
    EXPECT_EQ(method, "");
  }
  ~NoResets() { std::ofstream(file_) << "default\n"; }
  NoResets(const NoResets&) = delete;
  NoResets& operator=(const NoResets&) = delete;

 private:
  const std::string file_;
};

TEST_F(GuestDevice, AResetThatIsNotToBeHadLeavesBusMasteringOff) {
  const NoResets without(address);
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  EXPECT_FALSE(controller->device().can_reset());
  EXPECT_NE(command_register(address) & kPciCommandMaster, 0);
  const auto refused = controller->device().reset();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().os_error, EOPNOTSUPP);
  EXPECT_EQ(command_register(address) & kPciCommandMaster, 0) << "the controller still reaches memory";
  EXPECT_TRUE(controller->device().set_bus_mastering(true));
}

// Its owner was killed, and the kernel could not reset it: it still has queues, at addresses that are about to be given
// out again.
TEST_F(GuestDevice, AControllerThatStillWorksIsSilencedFirst) {
  const NoResets without(address);
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t owner = ::fork();
  ASSERT_GE(owner, 0);
  if (owner == 0) {
    const auto opened = VfioController::open(address, guest_options());
    const char answer = opened ? 'y' : 'n';
    (void)!::write(ready[1], &answer, 1);
    for (;;) ::pause();
  }
  char answer = 0;
  EXPECT_EQ(::read(ready[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  EXPECT_EQ(::kill(owner, SIGKILL), 0);
  EXPECT_EQ(::waitpid(owner, nullptr, 0), owner);
  ::close(ready[0]);
  ::close(ready[1]);
  {
    const auto pci = PciDevice::read(*PciAddress::parse(address));
    ASSERT_TRUE(pci);
    const auto opened = open_vfio(*pci, guest_way());
    ASSERT_TRUE(opened) << opened.error().message;
    const auto device = VfioDevice::create(opened->files, pci->address);
    ASSERT_TRUE(device) << device.error().message;
    const auto window = (*device)->map_registers();
    ASSERT_TRUE(window) << window.error().message;
    EXPECT_NE((*window)->read32(kRegCc) & kCcEnable, 0u) << "it was reset after all, so this shows nothing";
    const auto silent = silence(**device, **window, 0);
    EXPECT_TRUE(silent) << silent.error().message;
    EXPECT_EQ((*window)->read32(kRegCc) & kCcEnable, 0u);
    EXPECT_EQ((*window)->read32(kRegCsts) & kCstsReady, 0u);
    EXPECT_EQ(command_register(address) & kPciCommandMaster, 0);
  }
  EXPECT_NE(open(), nullptr);
}

TEST_F(GuestDevice, WhatIsOnANamespaceIsTold) {
  auto controller = open();
  ASSERT_NE(controller, nullptr);
  for (const NamespaceInfo& info : controller->driver()->namespaces()) {
    auto space = space_of(controller, info.id);
    std::vector<std::byte> mib(1 << 20);
    const auto put = [&](std::uint64_t offset, std::vector<std::byte>& bytes) {
      const iovec range{bytes.data(), bytes.size()};
      NamespaceRequest request{.op = Op::kWrite, .offset = offset, .memory = {&range, 1}, .error = -1};
      space->run({&request, 1}, nullptr);
      EXPECT_EQ(request.error, 0);
    };
    put(0, mib);
    put(space->bytes() - mib.size(), mib);
    EXPECT_TRUE(RawVolume::check_blank(*space));
    EXPECT_EQ(describe(*what_is_on(*space)), "");
    std::vector<std::byte> start(8192);
    start[510] = std::byte{0x55}, start[511] = std::byte{0xaa};
    start[446 + 4] = std::byte{0xee}, start[446 + 12] = std::byte{1};
    std::memcpy(start.data() + info.block_bytes, "EFI PART", 8);
    put(0, start);
    std::vector<std::byte> end(4096);
    std::memcpy(end.data() + end.size() - info.block_bytes, "EFI PART", 8);
    put(space->bytes() - end.size(), end);
    const auto refused = RawVolume::check_blank(*space);
    ASSERT_FALSE(refused);
    for (const std::string& part :
         {std::string("an MBR partition table"), "a GPT partition table at byte " + std::to_string(info.block_bytes),
          "the second copy of a GPT partition table at byte " + std::to_string(space->bytes() - info.block_bytes)}) {
      EXPECT_NE(refused.error().message.find(part), std::string::npos) << refused.error().message;
    }
    put(0, mib);
    put(space->bytes() - mib.size(), mib);
  }
}

void write_file(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

// The second controller goes to the kernel's driver and comes back.
TEST_F(GuestDevice, DriveOfTheKernelIsRefusedWhileItIsUsed) {
  const auto addresses = guest_controllers();
  if (addresses.size() < 2) GTEST_SKIP() << "TARDIS_GUEST_NVME names one controller only";
  if (!std::filesystem::exists("/sys/bus/pci/drivers/nvme")) GTEST_SKIP() << "the kernel has no nvme driver";
  const std::string& second = addresses[1];
  const std::string at = "/sys/bus/pci/devices/" + second;
  const auto bind = [&](const char* driver) {
    write_file(at + "/driver_override", driver);
    write_file(at + "/driver/unbind", second);
    write_file("/sys/bus/pci/drivers_probe", second);
  };
  bind("nvme");
  std::string node;
  for (int i = 0; i < 500 && node.empty(); ++i) {
    for (const auto& entry : std::filesystem::directory_iterator("/sys/block")) {
      const std::string name = entry.path().filename();
      const auto real = std::filesystem::canonical(entry.path()).string();
      if (name.starts_with("nvme") && real.find(second) != std::string::npos) node = "/dev/" + name;
    }
    ::usleep(10'000);
  }
  ASSERT_NE(node, "") << "the nvme driver brought no namespace up";
  for (int i = 0; i < 200 && ::access(node.c_str(), F_OK) != 0; ++i) ::usleep(10'000);
  const auto refusal = [&] {
    auto opened = VfioController::open(second, guest_options());
    EXPECT_FALSE(opened);
    return opened ? std::string() : opened.error().message;
  };
  EXPECT_NE(refusal().find("driver_override"), std::string::npos) << refusal();
  const bool swapped = std::system(("mkswap " + node + " >/dev/null && swapon " + node).c_str()) == 0;
  EXPECT_TRUE(swapped);
  EXPECT_NE(refusal().find("is in use as swap"), std::string::npos) << refusal();
  EXPECT_EQ(std::system(("swapoff " + node).c_str()), 0);
  EXPECT_NE(refusal().find("driver_override"), std::string::npos) << refusal();
  {
    const UniqueFd exclusive(::open(node.c_str(), O_RDONLY | O_EXCL | O_CLOEXEC));
    ASSERT_TRUE(exclusive);
    EXPECT_NE(refusal().find("open exclusively"), std::string::npos) << refusal();
  }
  bind("vfio-pci");
  auto controller = VfioController::open(second, guest_options());
  ASSERT_TRUE(controller) << controller.error().message;
  auto space = (*controller)->open_namespace(1);
  ASSERT_TRUE(space);
  EXPECT_NE(describe(*what_is_on(**space)).find("swap space"), std::string::npos);
}

}  // namespace
}  // namespace tardis::nvme::testing
