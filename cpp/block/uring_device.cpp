// SPDX-License-Identifier: Apache-2.0
#include "block/uring_device.h"

#include "block/uring_run.h"

namespace tardis {
namespace {

// More callers than this at once wait for each other; each ring costs a few pages of kernel memory and two descriptors.
constexpr std::size_t kMaxRings = 32;

}  // namespace

UringDevice::UringDevice(DeviceSetup setup, std::unique_ptr<WorkerPool> workers)
    : FileDevice(std::move(setup), std::move(workers)),
      rings_(kMaxRings, setup_.depth.most, setup_.keep_open_fd, buffers_) {}

void UringDevice::close_file(FileId file) {
  FileDevice::close_file(file);
  rings_.drop_closed_files();
}

void UringDevice::run(std::span<IoRequest> requests, const Completion& on_complete) {
  if (requests.empty()) return;
  UringRing::Failure failure;
  auto ring = rings_.acquire(&failure);
  if (ring == nullptr) {
    for (IoRequest& request : requests) {
      request.error = failure.error;
      transfers_.finished(request, 0, false);
      if (on_complete) on_complete(request);
    }
    return;
  }
  {
    UringRun run(*this, *ring, requests, on_complete);
    run.execute();
  }
  rings_.release(std::move(ring));
}

Status UringDevice::register_memory(void* base, std::size_t bytes) {
  if (Status status = buffers_.add(base, bytes); !status) return status;
  rings_.attach_buffers();
  return {};
}

void UringDevice::unregister_memory(void* base) {
  buffers_.remove(base);
  rings_.attach_buffers();
}

BlockDeviceCounters UringDevice::counters() const {
  BlockDeviceCounters now = FileDevice::counters();
  now.registered_bytes = buffers_.registered_bytes();
  now.not_registered_bytes = buffers_.refused_bytes();
  now.registered_requests = registered_requests_.load(std::memory_order_relaxed);
  return now;
}

}  // namespace tardis
