// SPDX-License-Identifier: Apache-2.0
// These definitions take the place of libc's in the test program, because the store's folder code calls libc and
// nothing stands between them. Without an observer they only do the system call.
#include "observed_calls.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>

namespace tardis::testing {
namespace {

// A replaced function has no other way to learn who observes it.
std::atomic<CallObserver*> current{nullptr};

int sync_call(long number, int file) {
  CallObserver* observer = current.load();
  if (observer != nullptr) observer->before_call();
  const auto result = static_cast<int>(::syscall(number, file));
  if (observer != nullptr && result == 0) observer->synced(file);
  return result;
}

int name_call(long number, const char* name, const char* other) {
  CallObserver* observer = current.load();
  if (observer != nullptr) observer->before_call();
  const auto result = static_cast<int>(other != nullptr ? ::syscall(number, name, other) : ::syscall(number, name));
  if (observer != nullptr && result == 0) observer->after_call();
  return result;
}

}  // namespace

void observe_calls(CallObserver* observer) { current.store(observer); }

}  // namespace tardis::testing

extern "C" {
int fsync(int file) { return tardis::testing::sync_call(SYS_fsync, file); }
int fdatasync(int file) { return tardis::testing::sync_call(SYS_fdatasync, file); }
int rename(const char* from, const char* to) noexcept { return tardis::testing::name_call(SYS_rename, from, to); }
int unlink(const char* path) noexcept { return tardis::testing::name_call(SYS_unlink, path, nullptr); }
}
