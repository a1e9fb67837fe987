// SPDX-License-Identifier: Apache-2.0
// Registers of NVMe controllers read by a GPU: of those named on the command line, which vfio-pci has. Ordinary memory
// is first, since a reader that answers wrongly there is no reader.
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "gpu/io_memory.h"
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

using Text = std::unique_ptr<char, void (*)(void*)>;

template <class Call>
Text ask(const char* what, Call call) {
  char *json = nullptr, *error = nullptr;
  const tardis_code code = call(&json, &error);
  Text answer(json, tardis_free);
  const Text message(error, tardis_free);
  std::printf("%s: %s\n", what, code == TARDIS_OK ? json : error);
  expect(code == TARDIS_OK, what);
  return answer;
}

void drive(const char* address) {
  const Text verdict = ask(address, [&](char** json, char** error) {
    return tardis_nvme_check_doorbells(nullptr, address, tardis_gpu_io_memory_read, json, error);
  });
  expect(verdict != nullptr && std::strstr(verdict.get(), "\"reached\":true") != nullptr,
         "the GPU reads what the host reads");
}

}  // namespace

int main(int argc, char** argv) {
  tardis_gpu_peer_facts facts{};
  if (tardis_gpu_peer_facts_of(&facts) != cudaSuccess || facts.devices == 0) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  std::printf("GPU: GPUDirect RDMA %d, dma-buf %d, cudaHostRegister %d\n", facts.direct_rdma, facts.dma_buf,
              facts.register_memory);
  refusals();
  ordinary_memory();
  ask("ways to GPU memory", [](char** json, char** error) { return tardis_nvme_gpu_memory(nullptr, json, error); });
  const Text list = ask("drives", [](char** json, char** error) { return tardis_nvme_list(nullptr, json, error); });
  for (int i = 1; i < argc; ++i) drive(argv[i]);
  if (argc == 1) {
    const bool none = list != nullptr && std::strcmp(list.get(), "{\"drives\":[]}") == 0;
    std::printf("doorbells by a GPU: %s\n", none ? "not available: no NVMe device"
                                                 : "not tried: name a drive that vfio-pci has, which is reset for it");
  }
  return failures == 0 ? 0 : 1;
}
