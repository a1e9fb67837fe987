// SPDX-License-Identifier: Apache-2.0
// System calls that can stay in the kernel for a minute, such as the end of a VFIO device that does not answer its
// reset. They cannot be interrupted; their caller can go on without them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

namespace tardis::nvme {

// What `call` returned, or nothing if it has not within `patience`. It then goes on in a thread that is left behind,
// which owns the function: that must hold all it uses.
template <class Call>
auto call_within(std::chrono::milliseconds patience, Call call) -> std::optional<decltype(call())> {
  using Value = decltype(call());
  struct Shared {
    std::mutex mutex;
    std::condition_variable over;
    std::optional<Value> value;
  };
  auto shared = std::make_shared<Shared>();
  auto function = std::make_shared<Call>(std::move(call));
  try {
    std::thread([shared, function] {
      Value value = (*function)();
      const std::lock_guard lock(shared->mutex);
      shared->value = std::move(value);
      shared->over.notify_all();
    }).detach();
  } catch (const std::system_error&) {
    return (*function)();  // no thread is to be had: the caller waits, however long it takes
  }
  std::unique_lock lock(shared->mutex);
  shared->over.wait_for(lock, patience, [&] { return shared->value.has_value(); });
  return shared->value;
}

}  // namespace tardis::nvme
