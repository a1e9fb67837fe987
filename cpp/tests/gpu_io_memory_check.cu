// SPDX-License-Identifier: Apache-2.0
// Registers of an NVMe controller read by a GPU, where vfio-pci has one to give; else what is missing. Ordinary memory
// is first, since a reader that answers wrongly there is no reader.
#include <cuda_runtime.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "gpu/io_memory.h"
#include "nvme/memory.h"
#include "nvme/vfio/pci_device.h"
#include "tardis/nvme.h"

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  std::printf("%s: %s\n", what, holds ? "ok" : "FAILED");
  if (!holds) ++failures;
}

// A driver may refuse to take memory for I/O memory; what it takes, it must read.
void ordinary_memory() {
  constexpr std::size_t kBytes = 8192;
  std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(4096, kBytes), std::free);
  auto* const words = static_cast<std::uint32_t*>(memory.get());
  for (std::size_t i = 0; i < kBytes / 4; ++i) words[i] = static_cast<std::uint32_t>(i * 2654435761u + 1);
  const std::array<std::uint32_t, 3> offsets{0, 4, 8188};
  std::array<std::uint32_t, 3> values{};
  const int result = tardis_gpu_io_memory_read(words, kBytes, offsets.data(), values.data(), offsets.size());
  std::printf("ordinary memory as I/O memory: %s\n", cudaGetErrorString(static_cast<cudaError_t>(result)));
  if (result == cudaSuccess) {
    for (std::size_t i = 0; i < offsets.size(); ++i)
      expect(values[i] == words[offsets[i] / 4], "a word is what it was");
  }
  expect(cudaGetLastError() == cudaSuccess, "no error is left behind");
}

void refusals() {
  const std::uint32_t past = 4096, odd = 2;
  std::uint32_t value = 0;
  alignas(4096) static std::byte page[4096];
  const auto read = [&](void* memory, const std::uint32_t* offset, std::uint32_t count) {
    return tardis_gpu_io_memory_read(memory, sizeof page, offset, &value, count);
  };
  expect(read(page, &past, 1) == cudaErrorInvalidValue, "an offset beyond the page is refused");
  expect(read(page, &odd, 1) == cudaErrorInvalidValue, "an offset within a word is refused");
  expect(read(page, &past, 65) == cudaErrorInvalidValue, "too many words are refused");
  const std::uint32_t first = 0;
  expect(read(page + 4, &first, 1) == cudaErrorInvalidValue, "memory within a page is refused");
}

// How many controllers were tried.
int drives() {
  auto found = tardis::nvme::PciDevice::list_nvme();
  int tried = 0;
  if (!found) return 0;
  for (const auto& drive : *found) {
    if (drive.driver != tardis::nvme::kVfioPciDriver) continue;
    ++tried;
    char *json = nullptr, *error = nullptr;
    const tardis_code code =
        tardis_nvme_check_doorbells(nullptr, drive.address.text().c_str(), tardis_gpu_io_memory_read, &json, &error);
    std::printf("%s\n", code == TARDIS_OK ? json : error);
    expect(code == TARDIS_OK && std::strstr(json, "\"reached\":true") != nullptr, "the GPU reads its registers");
    tardis_free(json);
    tardis_free(error);
  }
  return tried;
}

}  // namespace

int main() {
  tardis_gpu_peer_facts facts{};
  if (tardis_gpu_peer_facts_of(&facts) != cudaSuccess || facts.devices == 0) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  std::printf("GPU: GPUDirect RDMA %d, dma-buf %d, cudaHostRegister %d\n", facts.direct_rdma, facts.dma_buf,
              facts.register_memory);
  const auto provider = tardis::nvme::find_gpu_memory_provider();
  std::printf("%s\n", provider ? "a provider of GPU memory was found" : provider.error().message.c_str());
  refusals();
  ordinary_memory();
  if (drives() == 0) std::printf("doorbells by a GPU: not available: no NVMe device that vfio-pci has\n");
  return failures == 0 ? 0 : 1;
}
