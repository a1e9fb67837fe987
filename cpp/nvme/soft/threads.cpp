// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/threads.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

namespace tardis::nvme {

Result<std::thread> start_thread(const char* name, std::function<void()> body, const std::vector<int>& cpus) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  if (const int error = pthread_sigmask(SIG_SETMASK, &all, &before); error != 0) {
    return errno_error(error, "pthread_sigmask");
  }
  std::thread thread;
  int failure = 0;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    failure = error.code().value();
  } catch (const std::bad_alloc&) {
    failure = ENOMEM;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failure != 0) return errno_error(failure, "starting a thread of the software NVMe controller");
  (void)pthread_setname_np(thread.native_handle(), name);
  if (!cpus.empty()) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) {
      if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(static_cast<unsigned>(cpu), &set);
    }
    // Only a matter of speed: where it is refused, the thread runs anywhere.
    (void)pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
  }
  return thread;
}

std::uint64_t thread_cpu_ns(const std::thread& thread) {
  clockid_t clock;
  timespec used;
  auto handle = const_cast<std::thread&>(thread).native_handle();
  if (pthread_getcpuclockid(handle, &clock) != 0 || clock_gettime(clock, &used) != 0) return 0;
  return static_cast<std::uint64_t>(used.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(used.tv_nsec);
}

}  // namespace tardis::nvme
