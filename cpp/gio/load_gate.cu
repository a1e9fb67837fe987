// SPDX-License-Identifier: Apache-2.0
// Between a load and the loader's first word: one thread block, of which one thread waits.
#include "gio/load_board.cuh"
#include "gio/load_kernels.h"

namespace tardis::gio {
namespace {

constexpr unsigned kThreads = 128;

__global__ void __launch_bounds__(kThreads) load_gate(const __grid_constant__ LoadGate gate) {
  for (std::uint32_t i = threadIdx.x; i < gate.layer_count; i += kThreads) gate.flags[i] = 0;
  count_outside(gate.file_ids, gate.file_pages, gate.page_count, &gate.board->errors);
  if (threadIdx.x != 0) return;
  const std::uint32_t ready = await_told(&gate.board->ready, gate.patience_ns);
  if (ready == TARDIS_LOAD_PENDING) abandon(gate.board);
  // A number that is neither none nor all would leave pages that nobody reads.
  const bool all = ready == TARDIS_LOAD_GOOD && read_told(&gate.board->ring_pages) == gate.file_pages;
  *gate.words = {{reinterpret_cast<std::uint64_t>(gate.board_digests), reinterpret_cast<std::uint64_t>(gate.digests),
                  all ? gate.digests_bytes : 0},
                 1,
                 all ? gate.file_pages : 0};
}

}  // namespace

cudaError_t launch_load_gate(const LoadGate& gate, cudaStream_t stream) {
  load_gate<<<1, kThreads, 0, stream>>>(gate);
  return cudaGetLastError();
}

cudaError_t load_load_gate() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, load_gate);
}

}  // namespace tardis::gio
