// SPDX-License-Identifier: Apache-2.0
#include "nvme/memory.h"

#include <cstdlib>
#include <cstring>

#include "base/aligned_buffer.h"
#include "nvme/gpu_memory_probe.h"
#include "nvme/spec.h"

namespace tardis::nvme {
namespace {

constexpr std::size_t kSelfTestAlignment = 64 * 1024;  // of GPU pages; host memory is tested the same way

}  // namespace

Result<DmaPages> DmaMapper::allocate(std::size_t bytes) {
  auto buffer = AlignedBuffer::allocate(bytes, kPageBytes);
  if (!buffer) return buffer.error();
  auto owned = std::make_shared<AlignedBuffer>(std::move(*buffer));
  return DmaPages{{owned->data(), [owned](std::byte*) {}}, bytes};
}

Result<DmaMemory> DmaMemory::allocate(DmaMapper& mapper, std::size_t bytes) {
  auto pages = mapper.allocate((bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
  if (!pages) return pages.error();
  auto address = mapper.map(pages->memory.get(), pages->bytes);
  if (!address) return address.error();
  DmaMemory memory;
  memory.mapper_ = &mapper;
  memory.pages_ = std::move(*pages);
  memory.address_ = *address;
  if (*address % kPageBytes != 0) {
    return Error{Code::kInternal,
                 "mapping of page-aligned memory: expected a page-aligned address for the "
                 "controller, found " +
                     std::to_string(*address)};
  }
  return memory;
}

DmaMemory& DmaMemory::operator=(DmaMemory&& other) noexcept {
  if (this != &other) {
    reset();
    mapper_ = std::exchange(other.mapper_, nullptr);
    pages_ = std::move(other.pages_);
    address_ = other.address_;
  }
  return *this;
}

Status DmaMemory::revoke() {
  if (mapper_ == nullptr) return {};
  auto unmapped = mapper_->unmap(pages_.memory.get());
  if (unmapped) mapper_ = nullptr;
  return unmapped;
}

void DmaMemory::reset() {
  if (pages_.memory == nullptr) return;
  if (!revoke()) {
    // The controller may write there as long as this process lives.
    (void)std::make_unique<DmaPages>(std::move(pages_)).release();
    mapper_ = nullptr;
  }
  pages_ = {};
}

Result<void*> HostMemory::allocate(std::size_t bytes) {
  void* memory = std::aligned_alloc(kSelfTestAlignment, bytes);
  if (memory == nullptr) {
    return Error{Code::kInternal, "out of memory: " + std::to_string(bytes) + " bytes for the self-test"};
  }
  return memory;
}

void HostMemory::free(void* memory) { std::free(memory); }

Status HostMemory::copy_to(void* memory, std::span<const std::byte> from) {
  std::memcpy(memory, from.data(), from.size());
  return {};
}

Status HostMemory::copy_from(const void* memory, std::span<std::byte> to) {
  std::memcpy(to.data(), memory, to.size());
  return {};
}

Result<std::unique_ptr<MemoryProvider>> find_gpu_memory_provider(const SystemPaths& paths) {
  std::string tried;
  for (const GpuMemoryProbe& probe : probe_gpu_memory(paths)) {
    tried += (tried.empty() ? "" : "; ") + probe.way + ": " + probe.found;
  }
  return Error{Code::kNotFound,
               "GPU memory as the target of NVMe commands is not available, because nothing here tells user space the "
               "bus addresses of GPU memory (" +
                   tried + "); data goes through host memory"};
}

}  // namespace tardis::nvme
