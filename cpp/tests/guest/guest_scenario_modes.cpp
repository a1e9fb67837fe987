// SPDX-License-Identifier: Apache-2.0
// What is particular to VFIO's character device, and to VFIO without an IOMMU. tests/qemu/test_vfio_modes.py has the
// machines; there the cases of every machine run in these ways too.
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "guest_answers.h"
#include "guest_scenario.h"
#include "nvme/broker/vfio_broker.h"
#include "tests/child_process.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;
using Op = NamespaceRequest::Op;

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in " << text;
}
std::string group_of_drive() {
  return std::filesystem::read_symlink("/sys/bus/pci/devices/" + drive() + "/iommu_group").filename();
}
Answer identify() {
  return ask([](char** json, char** error) { return tardis_nvme_identify(nullptr, drive().c_str(), json, error); });
}
int move(NvmeNamespace& space, Op op, std::uint64_t offset, std::vector<std::byte>& memory) {
  const iovec range{memory.data(), memory.size()};
  NamespaceRequest request{.op = op, .offset = offset, .memory = {&range, 1}, .error = -1};
  space.run({&request, 1}, nullptr);
  return request.error;
}
// Both namespaces: what is written is read again.
void expect_round_trips(VfioController& controller, std::uint64_t salt) {
  for (const NamespaceInfo& info : controller.driver()->namespaces()) {
    auto space = controller.open_namespace(info.id);
    ASSERT_TRUE(space) << space.error().message;
    std::vector<std::byte> memory(256 << 10);
    for (std::uint64_t offset = 0; offset < (4u << 20); offset += memory.size()) {
      mark(memory.data(), memory.size(), offset, salt);
      ASSERT_EQ(move(**space, Op::kWrite, offset, memory), 0);
    }
    EXPECT_TRUE((*space)->flush());
    for (std::uint64_t offset = 0; offset < (4u << 20); offset += memory.size()) {
      std::memset(memory.data(), 0, memory.size());
      ASSERT_EQ(move(**space, Op::kRead, offset, memory), 0);
      ASSERT_TRUE(holds_mark(memory.data(), memory.size(), offset, salt)) << info.block_bytes << " at " << offset;
    }
    std::printf("round trips of %u-byte blocks\n", info.block_bytes);
  }
}

// ---- the character device; the file of the group is not there

TEST(ScenarioDeviceFile, IsTakenWhereThereAreNoGroups) {
  ASSERT_FALSE(std::filesystem::exists("/dev/vfio/" + group_of_drive()));
  VfioOptions options = guest_options();
  options.way = VfioWay::kAuto;
  const auto controller = VfioController::open(drive(), options);
  ASSERT_TRUE(controller) << controller.error().message;
  std::printf("%s\n", (*controller)->report().c_str());
  expect_part((*controller)->report(), "by VFIO with iommufd");
  expect_round_trips(**controller, 1);
  // Another owner is told so, and the tools do not ask the kernel to take it away.
  const auto second = VfioController::open(drive(), options);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().os_error, EBUSY) << second.error().message;
  const Answer busy = release("nvme", true);
  EXPECT_EQ(busy.code, TARDIS_BUSY);
  expect_has(busy, {"/dev/vfio/devices/vfio", "is open in process", "(tardis_nvme_gue)"});
}

TEST(ScenarioDeviceFile, IsWhatTheToolsName) {
  expect_has(list(), {R"("driver":"vfio-pci")", R"("vfio_file":"/dev/vfio/devices/vfio)",
                      R"("vfio_file_usable":true,"refusal":"")"});
  expect_has(identify(), {R"("model":"QEMU NVMe Ctrl")"});
  expect_has(release("vfio-pci", true), {R"("done":true)", "chown USER /dev/vfio/devices/vfio", " /dev/iommu"});
}

TEST(ScenarioDeviceFile, NeedsNoRootOnceItsFilesAreGiven) {
  constexpr uid_t kUser = 1234;
  const std::string at = "/sys/bus/pci/devices/" + drive() + "/vfio-dev";
  const std::string name = std::filesystem::directory_iterator(at)->path().filename();
  const std::string file = "/dev/vfio/devices/" + name;
  ASSERT_EQ(::chown(file.c_str(), kUser, kUser), 0);
  const auto as_user = [](const std::function<void()>& body) {
    ChildProcess process([&] {
      const rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY};
      ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &unlimited), 0);
      ASSERT_EQ(::setgid(kUser), 0);
      ASSERT_EQ(::setuid(kUser), 0);
      body();
    });
    process.join();
  };
  VfioOptions options = guest_options();
  options.way = VfioWay::kDeviceFile;
  ASSERT_EQ(::chmod("/dev/iommu", 0600), 0);
  as_user([&] {
    const auto refused = VfioController::open(drive(), options);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().os_error, EACCES);
    expect_part(refused.error().message, "opening /dev/iommu");
    expect_part(refused.error().message, "give the file to the user of this process");
  });
  ASSERT_EQ(::chown("/dev/iommu", kUser, kUser), 0);
  as_user([&] {
    const auto controller = VfioController::open(drive(), options);
    ASSERT_TRUE(controller) << controller.error().message;
    expect_round_trips(**controller, 2);
  });
  EXPECT_EQ(::chown(file.c_str(), 0, 0), 0);
  EXPECT_EQ(::chown("/dev/iommu", 0, 0), 0);
}

// ---- without an IOMMU; there are huge pages

VfioOptions without_iommu() {
  VfioOptions options = guest_options();
  options.way = VfioWay::kWithoutIommu;
  return options;
}

TEST(ScenarioWithoutIommu, IsTakenOnlyIfAskedFor) {
  const std::string file = "/dev/vfio/noiommu-" + group_of_drive();
  for (const VfioWay way : {VfioWay::kAuto, VfioWay::kGroup, VfioWay::kDeviceFile}) {
    VfioOptions options = guest_options();
    options.way = way;
    const auto refused = VfioController::open(drive(), options);
    ASSERT_FALSE(refused);
    std::printf("refused: %s\n", refused.error().message.c_str());
    if (way == VfioWay::kAuto) expect_part(refused.error().message, "expected an IOMMU, found none (" + file + ")");
  }
  broker::VfioBrokerOptions options;
  options.broker.socket_path = "/tmp/nvmed";
  const auto broker = broker::VfioBroker::open(drive(), options);
  ASSERT_FALSE(broker);
  expect_part(broker.error().message, "expected an IOMMU, found none");

  const auto controller = VfioController::open(drive(), without_iommu());
  ASSERT_TRUE(controller) << controller.error().message;
  std::printf("%s\n", (*controller)->report().c_str());
  expect_part((*controller)->report(), "by VFIO without an IOMMU");
  EXPECT_FALSE((*controller)->driver()->options().zero_copy);
  expect_round_trips(**controller, 3);
}

TEST(ScenarioWithoutIommu, IsWhatTheToolsWarnOf) {
  const std::string file = "/dev/vfio/noiommu-" + group_of_drive();
  const Answer shown = list();
  expect_has(shown, {R"("driver":"vfio-pci")", "expected an IOMMU, found none"});
  std::string name;  // by which `tardis doctor` knows that this group is none of an IOMMU
  std::ifstream("/sys/kernel/iommu_groups/" + group_of_drive() + "/name") >> name;
  EXPECT_EQ(name, "vfio-noiommu");
  expect_part(shown.text, R"("vfio_file":")" + file);
  const Answer unread = identify();
  EXPECT_NE(unread.code, TARDIS_OK);
  expect_has(unread, {"expected an IOMMU, found none"});
  expect_has(release("vfio-pci", true), {R"("done":true)", "expected an IOMMU, found none"});
  const auto controller = VfioController::open(drive(), without_iommu());
  ASSERT_TRUE(controller) << controller.error().message;
  const Answer busy = release("nvme", true);
  EXPECT_EQ(busy.code, TARDIS_BUSY);
  expect_part(busy.text, file + " is open in process");
}

TEST(ScenarioWithoutIommu, NeedsRoot) {
  const std::string file = "/dev/vfio/noiommu-" + group_of_drive();
  ASSERT_EQ(::chmod(file.c_str(), 0666), 0);
  ChildProcess user([] {
    ASSERT_EQ(::setuid(1234), 0);
    const auto refused = VfioController::open(drive(), without_iommu());
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().os_error, EPERM) << refused.error().message;
    expect_part(refused.error().message, "run it as root");
  });
  user.join();
  ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
}

TEST(ScenarioWithoutIommu, NeedsHugePages) {
  const std::string pool = "/proc/sys/vm/nr_hugepages";
  std::string before;
  std::ifstream(pool) >> before;
  std::ofstream(pool) << 0;
  const auto none = VfioController::open(drive(), without_iommu());
  ASSERT_FALSE(none);
  expect_part(none.error().message, "raise vm.nr_hugepages");
  std::ofstream(pool) << before;
  const auto controller = VfioController::open(drive(), without_iommu());
  ASSERT_TRUE(controller) << controller.error().message;
  // Memory of others is copied, and never named to the drive.
  std::vector<std::byte> memory(1 << 20);
  EXPECT_FALSE((*controller)->mapper().map(memory.data(), memory.size()));
}

// The addresses that the drive was told stay those of its owner's memory, whoever writes to it first.
TEST(ScenarioWithoutIommu, AForkedChildChangesNoAddress) {
  const auto controller = VfioController::open(drive(), without_iommu());
  ASSERT_TRUE(controller) << controller.error().message;
  int hold[2];
  ASSERT_EQ(::pipe(hold), 0);
  ChildProcess child([&] {
    char byte = 0;
    ::close(hold[1]);
    (void)!::read(hold[0], &byte, 1);
    ::_exit(0);
  });
  ::close(hold[0]);
  expect_round_trips(**controller, 4);
  ::close(hold[1]);
  child.join();
  expect_round_trips(**controller, 5);
}

}  // namespace
}  // namespace tardis::nvme::testing
