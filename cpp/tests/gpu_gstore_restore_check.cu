// SPDX-License-Identifier: Apache-2.0
// On a GPU: the four branches of a restore (HBM, pinned memory, files, nowhere) in one graph, against a model.
// Exit status 0: no difference; 1: some, or a CUDA error; 77: no GPU here.
#include <algorithm>
#include <random>
#include <set>

#include "gpu_gstore_blocks_support.cuh"

namespace tardis::gstore::testing {
namespace {

// Lookup, classification, swap-in of what is in files and room for what is missing, as one graph that is replayed.
void restore_graph() {
  constexpr std::uint32_t kObjects = 6000, kReplays = 300;
  Blocks blocks(3000, 500, 8000, 9000);
  Table table(kObjects);
  Batch batch;
  auto keys = mapped_array<Key>(kRoom);
  auto answers = device_array<tardis_gpu_index_answer>(kRoom);
  auto lists = mapped_array<std::uint32_t>(std::size_t{kRoom} * TARDIS_GPU_SOURCES);
  auto taken = mapped_array<std::uint64_t>(std::size_t{kRoom} * TARDIS_GPU_SOURCES);
  auto count_memory = device_array<std::uint32_t>(TARDIS_GPU_SOURCES, 0xEE);
  auto source_memory = device_array<std::uint64_t>(TARDIS_GPU_SOURCES);
  auto new_handles = mapped_array<std::uint64_t>(kRoom);
  auto new_ids = mapped_array<std::uint64_t>(kRoom);
  auto changes = mapped_array<tardis_gpu_index_entry>(kRoom);
  auto tickets = device_array<tardis_gpu_ticket>(5);
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");

  // Objects 0 .. kObjects - 1 are in files, as the store would tell; every tenth goes to pinned memory first.
  std::vector<std::uint64_t> handle_of_object(kObjects);
  for (std::uint32_t first = 0; first < kObjects; first += kRoom) {
    const std::uint32_t n = std::min(kRoom, kObjects - first);
    batch.count[0] = n;
    for (std::uint32_t i = 0; i < n; ++i) batch.files[i] = first + i;
    check(tardis_gpu_blocks_adopt(&blocks.table, batch.files.get(), batch.count.get(), kRoom, batch.handles.get(),
                                  nullptr, batch.ticket.get(), batch.report.get(), stream),
          "tardis_gpu_blocks_adopt");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    expect(batch.report[0].totals[0] == n, "adopted", batch.report[0].totals[0], n);
    std::uint32_t pinned = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
      handle_of_object[first + i] = batch.handles[i];
      changes[i] = entry_of(key_of(first + i), 1, 0, TARDIS_GPU_INDEX_PUT);
      changes[i].location = batch.handles[i];
    }
    check(tardis_gpu_index_apply(&table.index, changes.get(), batch.count.get(), kRoom, nullptr, batch.ticket.get(),
                                 batch.report.get(), 0, stream),
          "tardis_gpu_index_apply");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    for (std::uint32_t i = 0; i < n; ++i) {
      if ((first + i) % 20 == 0) batch.handles[pinned++] = handle_of_object[first + i];
    }
    batch.count[0] = pinned;
    check(tardis_gpu_blocks_swap_begin(&blocks.table, TARDIS_GPU_DRAM, 0, batch.handles.get(), batch.count.get(), kRoom,
                                       batch.ids.get(), batch.to.get(), nullptr, batch.ticket.get(), nullptr, stream),
          "tardis_gpu_blocks_swap_begin");
    check(tardis_gpu_blocks_swap_end(&blocks.table, batch.handles.get(), batch.to.get(), nullptr, batch.count.get(),
                                     kRoom, nullptr, batch.ticket.get(), batch.report.get(), stream),
          "tardis_gpu_blocks_swap_end");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    expect(batch.report[0].totals[0] == pinned, "moved to pinned memory", batch.report[0].totals[0], pinned);
  }

  cudaGraph_t graph;
  cudaGraphExec_t exec;
  const auto of = [&](auto* base, int source) { return base + std::size_t{kRoom} * source; };
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  check(tardis_gpu_index_lookup(&table.index, keys.get(), batch.count.get(), kRoom, 0, answers.get(), &tickets[0],
                                nullptr, 0, stream),
        "tardis_gpu_index_lookup");
  check(tardis_gpu_blocks_classify(&blocks.table, answers.get(), batch.count.get(), kRoom, batch.ids.get(), lists.get(),
                                   taken.get(), count_memory.get(), source_memory.get(), stream),
        "tardis_gpu_blocks_classify");
  check(tardis_gpu_blocks_swap_begin(&blocks.table, TARDIS_GPU_HBM, 1, of(taken.get(), TARDIS_GPU_SOURCE_FILE),
                                     &count_memory[TARDIS_GPU_SOURCE_FILE], kRoom, batch.handles.get(), batch.to.get(),
                                     batch.statuses.get(), &tickets[1], nullptr, stream),
        "tardis_gpu_blocks_swap_begin");
  check(tardis_gpu_blocks_swap_end(&blocks.table, of(taken.get(), TARDIS_GPU_SOURCE_FILE), batch.to.get(), nullptr,
                                   &count_memory[TARDIS_GPU_SOURCE_FILE], kRoom, nullptr, &tickets[2], nullptr, stream),
        "tardis_gpu_blocks_swap_end");
  check(tardis_gpu_blocks_alloc(&blocks.table, TARDIS_GPU_FILE, &count_memory[TARDIS_GPU_SOURCE_MISS], kRoom,
                                new_handles.get(), new_ids.get(), nullptr, &tickets[3], batch.report.get(), stream),
        "tardis_gpu_blocks_alloc");
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");

  std::mt19937_64 random(11);
  std::vector<int> where(kObjects, TARDIS_GPU_SOURCE_FILE);
  for (std::uint32_t i = 0; i < kObjects; i += 20) where[i] = TARDIS_GPU_SOURCE_DRAM;
  std::uint64_t totals[TARDIS_GPU_SOURCES] = {};
  std::uint32_t in_hbm = 0;
  for (std::uint32_t replay = 0; replay < kReplays; ++replay) {
    batch.count[0] = static_cast<std::uint32_t>(random() % 200);
    std::set<std::uint32_t> objects;
    while (objects.size() < batch.count[0]) {
      objects.insert(static_cast<std::uint32_t>(
          random() % 8 == 0 ? kObjects + random() % 1000 : (random() % 2 == 0 ? random() % kObjects : random() % 500)));
    }
    std::vector<std::uint32_t> asked(objects.begin(), objects.end());
    std::shuffle(asked.begin(), asked.end(), random);
    for (std::uint32_t i = 0; i < asked.size(); ++i) keys[i] = key_of(asked[i]);
    std::memset(lists.get(), 0xEE, std::size_t{kRoom} * TARDIS_GPU_SOURCES * 4);
    check(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const auto list_counts = copy(count_memory.get(), TARDIS_GPU_SOURCES);
    const auto sources = copy(source_memory.get(), TARDIS_GPU_SOURCES);
    std::vector<std::set<std::uint32_t>> expected(TARDIS_GPU_SOURCES);
    for (std::uint32_t i = 0; i < asked.size(); ++i) {
      expected[asked[i] < kObjects ? where[asked[i]] : TARDIS_GPU_SOURCE_MISS].insert(i);
    }
    for (int source = 0; source < TARDIS_GPU_SOURCES; ++source) {
      totals[source] += expected[source].size();
      const std::uint32_t n = std::min(list_counts[source], kRoom);
      const std::set<std::uint32_t> got(of(lists.get(), source), of(lists.get(), source) + n);
      expect(n == expected[source].size() && got == expected[source], "list of source " + std::to_string(source), n,
             expected[source].size());
      expect(sources[source] == totals[source], "counter of a source", sources[source], totals[source]);
      for (std::uint32_t k = 0; k < n; ++k) {
        const std::uint32_t object = asked[of(lists.get(), source)[k] % kRoom];
        if (object < kObjects) {
          expect(of(taken.get(), source)[k] == handle_of_object[object], "handle beside a position", object);
        }
      }
    }
    std::uint32_t swapped = 0;
    for (std::uint32_t k = 0; k < std::min(list_counts[TARDIS_GPU_SOURCE_FILE], kRoom); ++k) {
      const std::uint32_t object = asked[of(lists.get(), TARDIS_GPU_SOURCE_FILE)[k] % kRoom];
      if (batch.statuses[k] == TARDIS_GPU_BLOCKS_OK && object < kObjects) {
        where[object] = TARDIS_GPU_SOURCE_HBM;
        ++swapped;
        expect(batch.to[k] < 3000, "a swap-in ends in HBM", batch.to[k]);
      } else {
        expect(in_hbm + swapped <= 3000, "status of a swap-in", batch.statuses[k]);
      }
    }
    in_hbm += swapped;
    expect(batch.report[0].totals[0] == expected[TARDIS_GPU_SOURCE_MISS].size(), "room for what is missing");
    // The references that classification took, and the room for what is missing, are given back.
    std::uint32_t n = 0;
    for (const std::uint32_t object : asked) {
      if (object < kObjects) batch.handles[n++] = handle_of_object[object];
    }
    const auto missing = static_cast<std::uint32_t>(expected[TARDIS_GPU_SOURCE_MISS].size());
    std::copy(new_handles.get(), new_handles.get() + missing, batch.handles.get() + n);
    batch.count[0] = n + missing;
    if (n + missing == 0) continue;
    check(tardis_gpu_blocks_use(&blocks.table, TARDIS_GPU_UNREF, batch.handles.get(), batch.count.get(), kRoom, nullptr,
                                nullptr, &tickets[4], batch.report.get(), stream),
          "tardis_gpu_blocks_use");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    expect(batch.report[0].totals[0] == n + missing, "references that were given back", batch.report[0].totals[0],
           n + missing);
    std::copy(new_handles.get(), new_handles.get() + missing, batch.handles.get());
    batch.count[0] = missing;
    if (missing == 0) continue;
    check(tardis_gpu_blocks_free(&blocks.table, batch.handles.get(), batch.count.get(), kRoom, nullptr, &tickets[4],
                                 batch.report.get(), stream),
          "tardis_gpu_blocks_free");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    expect(batch.report[0].totals[0] == missing, "rows that were freed", batch.report[0].totals[0], missing);
  }
  std::printf("%u replays of one graph: %llu hits in HBM, %llu in pinned memory, %llu in files, %llu misses\n",
              kReplays, static_cast<unsigned long long>(totals[0]), static_cast<unsigned long long>(totals[1]),
              static_cast<unsigned long long>(totals[2]), static_cast<unsigned long long>(totals[3]));
  for (int source = 0; source < TARDIS_GPU_SOURCE_MOVING; ++source) {
    expect(totals[source] > 1000, "answers of each source", totals[source], 1000);
  }
  check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

}  // namespace
}  // namespace tardis::gstore::testing

int main() {
  using namespace tardis::gstore::testing;
  if (!has_gpu()) return kSkipped;
  restore_graph();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
