// SPDX-License-Identifier: Apache-2.0
// The calls by which a program makes names and small files durable, seen by a test: fsync, fdatasync, rename, unlink.
#pragma once

namespace tardis::testing {

class CallObserver {
 public:
  virtual ~CallObserver() = default;
  virtual void before_call() = 0;
  virtual void after_call() = 0;      // of a rename or unlink that succeeded
  virtual void synced(int file) = 0;  // fsync or fdatasync succeeded
};

// One observer at a time, for every thread of the program; null: none. It must outlive the calls that it sees.
void observe_calls(CallObserver* observer);

}  // namespace tardis::testing
