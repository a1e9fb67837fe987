// SPDX-License-Identifier: Apache-2.0
// The self-test of a path: what it reports, and what it refuses.
#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>

#include "block/block_device.h"
#include "tests/block_support.h"

namespace tardis {
namespace {

using testing::OffsetMemory;
using testing::TempFolder;
using Engine = BlockDeviceOptions::Engine;
using Direct = BlockDeviceOptions::Direct;

// A file system mounted for one test (root only).
class Mount {
 public:
  Mount(const char* source, const std::string& at, const char* type, unsigned long flags, const char* data)
      : at_(at), mounted_(::mount(source, at.c_str(), type, flags, data) == 0), error_(errno) {}
  ~Mount() {
    if (mounted_) ::umount2(at_.c_str(), MNT_DETACH);
  }
  Mount(const Mount&) = delete;
  Mount& operator=(const Mount&) = delete;
  bool mounted() const { return mounted_; }
  std::string why() const { return std::string("mount: ") + ::strerror(error_) + " (needs root)"; }
  bool make_read_only() {
    return ::mount(nullptr, at_.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) == 0;
  }

 private:
  std::string at_;
  bool mounted_;
  int error_;
};

TEST(BlockProbe, DefaultsGiveAWorkingPathAndAReason) {
  TempFolder folder;
  auto report = probe_path(folder.path(), {}, false);
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_TRUE(report->engine == "io_uring" || report->engine == "sync");
  EXPECT_GE(report->logical_block, 512u);
  EXPECT_FALSE(report->reason.empty());
  RecordProperty("reason", report->reason);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  // Nothing buffered is given to io_uring by itself.
  EXPECT_FALSE(report->engine == "io_uring" && !report->direct) << report->reason;
}

TEST(BlockProbe, ReadOnlyCreatesNothing) {
  TempFolder folder;
  const auto before = std::filesystem::last_write_time(folder.path());
  auto report = probe_path(folder.path(), {}, true);
  ASSERT_TRUE(report);
  EXPECT_FALSE(report->direct);
  EXPECT_NE(report->reason.find("not tried"), std::string::npos) << report->reason;
  EXPECT_EQ(std::filesystem::last_write_time(folder.path()), before);
}

TEST(BlockProbe, MissingFolderAndFileInPlaceOfIt) {
  TempFolder folder;
  auto missing = open_block_device(folder.file("nowhere"), {}, -1);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_NE(missing.error().message.find("nowhere"), std::string::npos);
  ASSERT_EQ(::close(::open(folder.file("file").c_str(), O_CREAT | O_WRONLY, 0600)), 0);
  auto file = open_block_device(folder.file("file"), {}, -1);
  ASSERT_FALSE(file);
  EXPECT_EQ(file.error().code, Code::kInvalidArgument);
}

TEST(BlockProbe, SettingsOutOfRangeAreNamed) {
  TempFolder folder;
  const auto refused = [&](const char* setting, auto change) {
    BlockDeviceOptions options;
    change(options);
    auto device = open_block_device(folder.path(), options, -1);
    ASSERT_FALSE(device) << setting;
    EXPECT_EQ(device.error().code, Code::kInvalidArgument);
    EXPECT_EQ(device.error().message.find(setting), 0u) << device.error().message;
  };
  refused("queue_depth", [](auto& o) { o.queue_depth = 100000; });
  refused("io_workers", [](auto& o) { o.workers = 100000; });
  refused("bounce_buffers", [](auto& o) { o.bounce_buffers = 0; });
  refused("bounce_bytes", [](auto& o) { o.bounce_bytes = 100; });
}

TEST(BlockProbe, TmpfsIsBufferedAndSync) {
  struct statfs found;
  if (::statfs("/dev/shm", &found) != 0 || found.f_type != 0x01021994) GTEST_SKIP() << "/dev/shm is no tmpfs here";
  TempFolder folder("/dev/shm");
  if (folder.path().empty()) GTEST_SKIP() << "/dev/shm is not writable";
  auto report = probe_path(folder.path(), {}, false);
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->filesystem, "tmpfs");
  EXPECT_EQ(report->engine, "sync");
  EXPECT_FALSE(report->direct);
  BlockDeviceOptions options;
  options.direct = Direct::kOn;
  auto device = open_block_device(folder.path(), options, -1);
  ASSERT_FALSE(device);
  EXPECT_EQ(device.error().code, Code::kInvalidArgument);
  EXPECT_EQ(device.error().message.find("direct_io"), 0u) << device.error().message;
}

TEST(BlockProbe, ReadOnlyFolder) {
  TempFolder folder;
  Mount bind(folder.path().c_str(), folder.path(), nullptr, MS_BIND, nullptr);
  if (!bind.mounted()) GTEST_SKIP() << bind.why();
  ASSERT_TRUE(bind.make_read_only());
  auto device = open_block_device(folder.path(), {}, -1);
  ASSERT_FALSE(device);
  EXPECT_EQ(device.error().code, Code::kPermission) << device.error().message;
  EXPECT_NE(device.error().message.find(folder.path()), std::string::npos);
  EXPECT_TRUE(probe_path(folder.path(), {}, true));
}

TEST(BlockProbe, FolderWithoutPermission) {
  TempFolder folder;
  ASSERT_EQ(::chmod(folder.path().c_str(), 0555), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // Root passes every permission check, so be somebody else.
    if (::geteuid() == 0 && ::setuid(65534) != 0) ::_exit(100);
    auto device = open_block_device(folder.path(), {}, -1);
    ::_exit(!device && device.error().code == Code::kPermission &&
                    device.error().message.find(folder.path()) != std::string::npos
                ? 0
                : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(BlockProbe, FullDiskFailsReservationsAndWritesButNotReads) {
  TempFolder folder;
  Mount small("tardis-test", folder.path(), "tmpfs", 0, "size=4m");
  if (!small.mounted()) GTEST_SKIP() << small.why();
  auto opened = open_block_device(folder.path(), {}, -1);
  ASSERT_TRUE(opened) << opened.error().message;
  auto device = std::move(*opened);
  auto file = device->open_file(folder.file("data"), true, true);
  ASSERT_TRUE(file);
  const Status too_much = device->preallocate(*file, 8 << 20);
  ASSERT_FALSE(too_much);
  EXPECT_EQ(too_much.error().code, Code::kNoSpace);
  EXPECT_EQ(*device->file_bytes(*file), 0u);
  ASSERT_TRUE(device->preallocate(*file, 1 << 20)) << "what the failed reservation took must be free again";

  OffsetMemory memory(9 << 20, 0);
  const iovec large{memory.data(), 8 << 20};
  const iovec inside{memory.data() + (8 << 20), 1 << 20};
  IoRequest requests[] = {{IoRequest::Op::kWrite, *file, 1 << 20, {&large, 1}, -1},
                          {IoRequest::Op::kRead, *file, 0, {&inside, 1}, -1}};
  device->run(requests, nullptr);
  EXPECT_EQ(requests[0].error, ENOSPC);
  EXPECT_EQ(requests[1].error, 0);

  // A device can be opened on the full disk.
  auto again = open_block_device(folder.path(), {}, -1);
  ASSERT_TRUE(again) << again.error().message;
}

// A full disk with direct I/O, on a small ext4 image.
TEST(BlockProbe, FullExt4) {
  TempFolder folder;
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to mount";
  const std::string image = folder.file("image");
  const std::string at = folder.file("mnt");
  ASSERT_EQ(::mkdir(at.c_str(), 0700), 0);
  const std::string make = "truncate -s 16M " + image + " && mkfs.ext4 -q -m 0 " + image +
                           " >/dev/null 2>&1 && mount -o loop " + image + " " + at + " >/dev/null 2>&1";
  if (std::system(make.c_str()) != 0) GTEST_SKIP() << "no mkfs.ext4 or no loop devices here";
  struct Unmount {
    std::string at;
    ~Unmount() { ::umount2(at.c_str(), MNT_DETACH); }
  } unmount{at};

  for (const auto engine : {Engine::kAuto, Engine::kSync}) {
    BlockDeviceOptions options;
    options.engine = engine;
    auto opened = open_block_device(at, options, -1);
    ASSERT_TRUE(opened) << opened.error().message;
    auto file = (*opened)->open_file(at + "/data", true, true);
    ASSERT_TRUE(file);
    const Status too_much = (*opened)->preallocate(*file, 64 << 20);
    ASSERT_FALSE(too_much);
    EXPECT_EQ(too_much.error().code, Code::kNoSpace) << too_much.error().message;
    ASSERT_TRUE((*opened)->preallocate(*file, 1 << 20));
    OffsetMemory memory(33 << 20, 0);
    const iovec large{memory.data(), 32 << 20};
    const iovec inside{memory.data() + (32 << 20), 1 << 20};
    IoRequest requests[] = {{IoRequest::Op::kWrite, *file, 1 << 20, {&large, 1}, -1},
                            {IoRequest::Op::kRead, *file, 0, {&inside, 1}, -1}};
    (*opened)->run(requests, nullptr);
    EXPECT_EQ(requests[0].error, ENOSPC);
    EXPECT_EQ(requests[1].error, 0);
    auto again = open_block_device(at, options, -1);
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_EQ((*again)->geometry().direct, (*opened)->geometry().direct) << (*again)->report().reason;
    (*opened)->close_file(*file);
    ASSERT_EQ(::unlink((at + "/data").c_str()), 0);
  }
}

// Makes one system call fail in this process from now on, as container runtimes do with io_uring_setup. 0 or an errno.
int forbid(long call, int with_errno) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(with_errno)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{sizeof code / sizeof code[0], code};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return errno;
  return ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0 ? 0 : errno;
}

// What the child found wrong, as bits.
int behave_without_io_uring(const std::string& folder, int with_errno, const char* expected_text) {
  if (forbid(SYS_io_uring_setup, with_errno) != 0) return 100;
  auto device = open_block_device(folder, {}, -1);
  if (!device) return 1;
  const PathReport report = (*device)->report();
  int wrong = report.engine == "sync" ? 0 : 2;
  wrong += report.reason.find(expected_text) != std::string::npos &&
                   report.reason.find("using the sync engine") != std::string::npos
               ? 0
               : 4;
  if (wrong & 4) std::fprintf(stderr, "reason: %s\n", report.reason.c_str());
  auto file = (*device)->open_file(folder + "/data", true, true);
  if (!file) return wrong + 8;
  OffsetMemory memory(65536, 1);
  const iovec piece{memory.data(), memory.size()};
  IoRequest write{IoRequest::Op::kWrite, *file, 0, {&piece, 1}, -1};
  IoRequest read{IoRequest::Op::kRead, *file, 0, {&piece, 1}, -1};
  (*device)->run({&write, 1}, nullptr);
  (*device)->run({&read, 1}, nullptr);
  wrong += write.error == 0 && read.error == 0 ? 0 : 16;
  device->reset();

  BlockDeviceOptions options;
  options.engine = Engine::kIoUring;
  auto refused = open_block_device(folder, options, -1);
  wrong += !refused && refused.error().code == Code::kInvalidArgument &&
                   refused.error().message.find("engine is io_uring") == 0
               ? 0
               : 32;
  auto doctor = probe_path(folder, {}, true);
  wrong += doctor && doctor->engine == "sync" ? 0 : 64;
  return wrong;
}

TEST(BlockProbe, IoUringForbiddenBySeccomp) {
  const std::pair<int, const char*> cases[] = {
#if TARDIS_HAS_IO_URING
    {EPERM, "io_uring_setup: Operation not permitted"},
    {ENOSYS, "io_uring_setup: Function not implemented"},
#else
    {EPERM, "built without io_uring"},
#endif
  };
  for (const auto& [with_errno, text] : cases) {
    TempFolder folder;
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) ::_exit(behave_without_io_uring(folder.path(), with_errno, text));
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << status;
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
}

#if TARDIS_HAS_IO_URING
// A sandbox may close after the self-test: requests fail, one completion each, and nothing hangs or is left in the
// kernel.
int behave_when_enter_is_forbidden(const std::string& folder) {
  BlockDeviceOptions options;
  options.engine = Engine::kIoUring;
  options.queue_depth = 4;
  auto device = open_block_device(folder, options, -1);
  if (!device) return 77;
  auto file = (*device)->open_file(folder + "/data", true, true);
  if (!file) return 1;
  constexpr std::size_t kCount = 20;
  OffsetMemory memory(kCount * 8192, 0);
  iovec pieces[kCount];
  IoRequest requests[kCount];
  int wrong = 0;
  for (const bool forbidden : {false, true, true}) {
    if (forbidden && wrong == 0 && forbid(SYS_io_uring_enter, EPERM) != 0) return 2;
    for (std::size_t i = 0; i < kCount; ++i) {
      pieces[i] = {memory.data() + i * 8192 + (i % 4 == 0 ? 1 : 0), 4096};
      requests[i] = {IoRequest::Op::kWrite, *file, i * 8192, {&pieces[i], 1}, -1};
    }
    std::atomic<int> completed[kCount] = {};
    (*device)->run(requests, [&](IoRequest& request) { completed[&request - requests].fetch_add(1); });
    for (std::size_t i = 0; i < kCount; ++i) {
      if (completed[i].load() != 1) wrong |= 4;
      if (requests[i].error != (forbidden ? EPERM : 0)) wrong |= 8;
    }
  }
  return wrong;
}

TEST(BlockProbe, IoUringForbiddenAfterTheSelfTest) {
  TempFolder folder;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(behave_when_enter_is_forbidden(folder.path()));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << status;
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no io_uring here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// The description behind keep_open_fd lives as long as the device, even when its descriptor is closed.
TEST(BlockProbe, KeepOpenDescriptorOutlivesItsDescriptor) {
  TempFolder folder;
  BlockDeviceOptions options;
  options.engine = Engine::kIoUring;
  const std::string path = folder.file("lock");
  const int held = ::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  ASSERT_GE(held, 0);
  struct flock lock {};
  lock.l_type = F_WRLCK;
  ASSERT_EQ(::fcntl(held, F_OFD_SETLK, &lock), 0);
  auto opened = open_block_device(folder.path(), options, held);
  if (!opened) GTEST_SKIP() << opened.error().message;
  auto device = std::move(*opened);
  // The ring is made by the first run.
  auto file = device->open_file(folder.file("data"), true, true);
  ASSERT_TRUE(file);
  OffsetMemory memory(4096, 0);
  const iovec piece{memory.data(), memory.size()};
  IoRequest request{IoRequest::Op::kWrite, *file, 0, {&piece, 1}, -1};
  device->run({&request, 1}, nullptr);
  ASSERT_EQ(request.error, 0);

  ASSERT_EQ(::close(held), 0);
  const int other = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(other, 0);
  EXPECT_NE(::fcntl(other, F_OFD_SETLK, &lock), 0) << "the lock must still be held";
  device.reset();
  int result = -1;
  for (int i = 0; i < 200 && result != 0; ++i) {  // the kernel takes a ring apart in the background
    result = ::fcntl(other, F_OFD_SETLK, &lock);
    if (result != 0) ::usleep(10'000);
  }
  EXPECT_EQ(result, 0);
  ::close(other);
}
#endif

}  // namespace
}  // namespace tardis
