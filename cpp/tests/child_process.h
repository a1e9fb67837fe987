// SPDX-License-Identifier: Apache-2.0
// Child processes of a test, and memory that they share with it.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <utility>

#ifdef TARDIS_GCOV
extern "C" void __gcov_dump(void);
#endif

namespace tardis::testing {

// The fork comes before this process has threads, and before the child opens anything.
class ChildProcess {
 public:
  explicit ChildProcess(const std::function<void()>& body) : pid_(::fork()) {
    if (pid_ != 0) return;
    body();
    std::fflush(stdout);
#ifdef TARDIS_GCOV
    __gcov_dump();  // _exit() does not
#endif
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  ~ChildProcess() {
    if (pid_ > 0) kill();
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  void kill() {
    signal(SIGKILL);
    (void)wait();
  }
  void signal(int number) { EXPECT_EQ(::kill(pid_, number), 0); }
  void join_killed() {
    const int status = wait();
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "the child was not killed where it should be";
  }
  void join() {
    const int status = wait();
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "a child failed";
  }

 private:
  int wait() {
    int status = 0;
    EXPECT_GT(::waitpid(std::exchange(pid_, -1), &status, 0), 0);
    return status;
  }

  pid_t pid_;
};

// Memory that parent and children share.
template <class T>
class SharedValue {
 public:
  SharedValue() : memory_(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    EXPECT_NE(memory_, MAP_FAILED);
  }
  ~SharedValue() { ::munmap(memory_, sizeof(T)); }
  SharedValue(const SharedValue&) = delete;
  SharedValue& operator=(const SharedValue&) = delete;
  T* operator->() { return static_cast<T*>(memory_); }
  T& operator*() { return *static_cast<T*>(memory_); }

 private:
  void* memory_;
};

}  // namespace tardis::testing
