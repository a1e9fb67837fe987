// SPDX-License-Identifier: Apache-2.0
// A lock that many hold together or one alone, among the threads of several processes. A killed process lets go of it.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <string>

#include "base/unique_fd.h"
#include "torture_log.h"

namespace tardis::testing {

// Each thread has its own: the lock belongs to the open file description.
class Gate {
 public:
  explicit Gate(const std::string& file) : fd_(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    if (!fd_) die("cannot open " + file, 4);
  }
  void lock_shared() { enter(F_RDLCK); }
  void lock() { enter(F_WRLCK); }
  void unlock() { set(F_UNLCK, kInside); }
  void unlock_shared() { unlock(); }

 private:
  static constexpr off_t kTurn = 0, kInside = 1;

  // Who waits at the door keeps later ones from passing, or one alone would never get in.
  void enter(short type) {
    set(F_WRLCK, kTurn);
    set(type, kInside);
    set(F_UNLCK, kTurn);
  }
  void set(short type, off_t at) {
    struct flock range {};
    range.l_type = type;
    range.l_whence = SEEK_SET;
    range.l_start = at;
    range.l_len = 1;
    while (::fcntl(fd_.get(), F_OFD_SETLKW, &range) != 0) {
      if (errno != EINTR) die("locking the gate", 4);
    }
  }

  UniqueFd fd_;
};

}  // namespace tardis::testing
