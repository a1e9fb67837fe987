// SPDX-License-Identifier: Apache-2.0
// Drives that the kernel's own driver has, or had. The first has a file system, the second is used for swap;
// tests/qemu/test_refusals.py says when which of these runs.
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>

#include <filesystem>

#include "guest_scenario.h"
#include "tests/nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

std::string refusal(std::size_t number) {
  const auto controller = VfioController::open(guest_controllers().at(number), guest_options());
  EXPECT_FALSE(controller) << "it was opened";
  if (controller) return {};
  EXPECT_EQ(controller.error().code, Code::kBusy);
  std::printf("refused: %s\n", controller.error().message.c_str());
  return controller.error().message;
}

TEST(ScenarioKernel, DrivesInUseAreRefused) {
  EXPECT_NE(refusal(0).find("mounted"), std::string::npos);
  EXPECT_NE(refusal(1).find("swap"), std::string::npos);
}

// A child that does `what`, and then nothing until it is killed.
class Child {
 public:
  explicit Child(const std::function<bool()>& what) {
    int done[2];
    if (::pipe(done) != 0 || (child_ = ::fork()) < 0) {
      ADD_FAILURE() << "no child: " << std::strerror(errno);
      return;
    }
    if (child_ == 0) {
      const char answer = what() ? 'y' : 'n';
      (void)!::write(done[1], &answer, 1);
      for (;;) ::pause();
    }
    char answer = 0;
    EXPECT_EQ(::read(done[0], &answer, 1), 1);
    EXPECT_EQ(answer, 'y') << "the child could not";
    ::close(done[0]);
    ::close(done[1]);
  }
  ~Child() {
    if (child_ <= 0) return;
    (void)::kill(child_, SIGKILL);
    (void)::waitpid(child_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

 private:
  pid_t child_ = -1;
};

std::string node_of(std::size_t number) { return "/dev/nvme" + std::to_string(number) + "n1"; }

// Nothing is mounted here, and nobody holds them.
TEST(ScenarioKernel, DrivesOpenElsewhereAreRefused) {
  const auto open = [](int flags) { return [flags] { return ::open(node_of(0).c_str(), flags | O_CLOEXEC) >= 0; }; };
  {
    const Child exclusive(open(O_RDONLY | O_EXCL));
    EXPECT_NE(refusal(0).find("nvme0n1 is open exclusively"), std::string::npos);
  }
  {
    const Child any(open(O_RDWR));  // as a virtual machine does
    const std::string why = refusal(0);
    EXPECT_NE(why.find("nvme0n1 is open in process"), std::string::npos) << why;
    EXPECT_EQ(why.find("exclusively"), std::string::npos) << why;
  }
  {
    const Child commands([] { return ::open("/dev/ng0n1", O_RDWR | O_CLOEXEC) >= 0; });
    EXPECT_NE(refusal(0).find("ng0n1 is open in process"), std::string::npos);
  }
  {
    const Child mounted([] {
      return ::unshare(CLONE_NEWNS) == 0 && ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
             ::mount(node_of(0).c_str(), "/mnt", "ext2", 0, nullptr) == 0;
    });
    EXPECT_NE(::access("/mnt/file", F_OK), 0) << "it is mounted here too, so this shows nothing";
    EXPECT_NE(refusal(0).find("nvme0n1 is open exclusively"), std::string::npos);
  }
  // A node that is something else, and none, as in a container: nobody knows.
  const std::string aside = node_of(0) + ".aside";
  ASSERT_EQ(::rename(node_of(0).c_str(), aside.c_str()), 0);
  EXPECT_NE(refusal(0).find("cannot be opened to find out"), std::string::npos);
  EXPECT_EQ(::mknod(node_of(0).c_str(), S_IFCHR | 0600, makedev(1, 3)), 0);
  EXPECT_NE(refusal(0).find("is not the block device"), std::string::npos);
  ASSERT_EQ(::rename(aside.c_str(), node_of(0).c_str()), 0);
  EXPECT_NE(refusal(0).find("driver_override"), std::string::npos) << "nobody uses it any more";
}

TEST(ScenarioKernel, DrivesOfTheKernelAreRefused) {
  for (const std::size_t number : {0u, 1u}) {
    const std::string why = refusal(number);
    EXPECT_EQ(why.find("mounted"), std::string::npos);
    EXPECT_NE(why.find("driver_override"), std::string::npos) << "how to release it is not said";
  }
}

TEST(ScenarioKernel, WhatIsOnThemIsNotLost) {
  const std::string parent = setting("TARDIS_GUEST_FOLDER");
  for (const std::size_t number : {0u, 1u}) {
    const std::string home = parent + "/home" + std::to_string(number);
    std::filesystem::create_directories(home);
    auto disk = open_vfio_namespace(guest_controllers().at(number), 1, guest_options());
    ASSERT_TRUE(disk) << disk.error().message;
    AlignedBuffer before(1u << 20), after(1u << 20);
    ASSERT_EQ(move(**disk, Op::kRead, 0, before.data(), before.size()), 0);
    const auto refused = NvmeDevice::open(*disk, home, {});
    ASSERT_FALSE(refused);
    std::printf("refused: %s\n", refused.error().message.c_str());
    EXPECT_NE(refused.error().message.find(number == 0 ? "ext" : "swap"), std::string::npos);
    ASSERT_EQ(move(**disk, Op::kRead, 0, after.data(), after.size()), 0);
    EXPECT_EQ(std::memcmp(before.data(), after.data(), before.size()), 0) << "it was written to";
    if (number == 0) continue;
    // With the explicit switch.
    auto device = NvmeDevice::open(*disk, home, {.force = true});
    EXPECT_TRUE(device) << device.error().message;
  }
}

}  // namespace
}  // namespace tardis::nvme::testing
