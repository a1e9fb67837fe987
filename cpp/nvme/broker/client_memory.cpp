// SPDX-License-Identifier: Apache-2.0
#include "nvme/broker/client_memory.h"

#include <unistd.h>

#include <utility>

namespace tardis::nvme::broker {

Result<DmaPages> ClientMapper::allocate(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  auto fd = make_shared_memory("tardis-nvme-memory", bytes);
  if (!fd) return fd.error();
  auto memory = Mapping::map(fd->get(), 0, bytes, "shared memory");
  if (!memory) return memory.error();
  std::byte* const begin = memory->data();
  const std::lock_guard lock(files_->mutex);
  files_->by_memory.emplace(begin, File{std::move(*fd), std::move(*memory)});
  const auto free = [files = files_](std::byte* which) {
    const std::lock_guard held(files->mutex);
    files->by_memory.erase(which);
  };
  return DmaPages{{begin, free}, bytes};
}

Result<std::uint64_t> ClientMapper::map(void* memory, std::size_t bytes) {
  auto* const begin = static_cast<std::byte*>(memory);
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  MapMemoryRequest request;
  std::uint64_t skip = 0;
  int fd = -1;
  {
    const std::lock_guard lock(files_->mutex);
    auto after = files_->by_memory.upper_bound(begin);
    if (after != files_->by_memory.begin()) {
      const File& file = std::prev(after)->second;
      const auto offset = static_cast<std::uint64_t>(begin - file.memory.data());
      if (offset < file.memory.bytes() && bytes <= file.memory.bytes() - offset) {
        skip = offset % page;
        request.offset = offset - skip;
        request.bytes = (skip + bytes + page - 1) / page * page;
        fd = file.fd.get();  // stays: whoever maps memory has it
      }
    }
  }
  if (fd < 0) {
    return Error{Code::kUnsupportedFormat,
                 "memory for a drive behind a broker: expected memory of BrokerClient::allocate(), found other memory, "
                 "which the broker cannot map; data goes through buffers"};
  }
  MapMemoryReply reply;
  if (auto done = link_.call(Kind::kMapMemory, request, reply, fd); !done) return done.error();
  const std::lock_guard lock(mutex_);
  mapped_[memory] = reply.memory;
  return reply.address + skip;
}

Status ClientMapper::unmap(void* memory) {
  UnmapMemoryRequest request;
  {
    const std::lock_guard lock(mutex_);
    const auto at = mapped_.find(memory);
    if (at == mapped_.end()) {
      return Error{Code::kInvalidArgument, "memory to unmap: expected the beginning of a range that is mapped"};
    }
    request.memory = at->second;
    mapped_.erase(at);
  }
  Answer answer;
  const auto done = link_.call(Kind::kUnmapMemory, request, answer);
  if (done || stopped_.load() || link_.farewell()) return {};
  return done.error();
}

Result<DmaPages> QueueMemoryMapper::allocate(std::size_t bytes) {
  if (bytes != memory_->bytes()) {
    return Error{Code::kInternal, "queue memory of an NVMe broker: expected " + std::to_string(bytes) +
                                      " bytes, found " + std::to_string(memory_->bytes())};
  }
  return DmaPages{{memory_->data(), [memory = memory_](std::byte*) {}}, memory_->bytes()};
}

Status QueueMemoryMapper::unmap(void*) {
  QueueRequest request;
  request.queue = queue_;
  Answer answer;
  const auto done = link_.call(Kind::kCloseQueue, request, answer);
  if (done || stopped_.load() || link_.farewell()) return {};
  return done.error();
}

}  // namespace tardis::nvme::broker
