// SPDX-License-Identifier: Apache-2.0
// On a GPU: restores over a raw namespace as one graph: unknown pages are computed, and written by rings in the same
// graph; what was moved out of HBM comes back by rings, compared with the digests that were made when it was written.
// Now and then the namespace's bytes change, or a write fails; at last one has no end. Argument: replays (300).
// Exit status 0: all as expected; 1: not, or a CUDA error; 77: no GPU here.
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "gpu_gstore_measure.cuh"
#include "gpu_restore_rig.cuh"
#include "gstore/block_table.cuh"

namespace tardis::gstore::testing {
namespace {

constexpr std::uint64_t kWriteDeadlineNs = 1'000'000'000;

void check_raw(const ObjectShape& shape, std::uint32_t command_bytes, int replays, std::uint64_t seed) {
  RestoreRigOptions options;
  options.raw = true;
  options.shape = shape;
  options.command_bytes = command_bytes;
  options.objects = 1500;
  options.hbm = 300;
  options.dram = 100;
  options.max_pages = 150;
  options.rows = 3000;
  RestoreRig rig(options);
  std::mt19937_64 random(seed);
  gpu_test::Stream stream;
  auto keys = mapped_array<Key>(options.max_pages);
  auto numbers = mapped_array<std::uint64_t>(options.max_pages);
  auto count = mapped_array<std::uint32_t>(1);
  auto results = mapped_array<tardis_gpu_restore_result>(options.max_pages);
  auto wrong = mapped_array<std::uint32_t>(options.max_pages);
  auto want = mapped_array<std::uint32_t>(3);
  auto scratch = device_array<std::uint8_t>(tardis_gpu_blocks_scratch_bytes());
  const PageWords words{results.get(), count.get(), numbers.get(), rig.key_layers.get(), rig.value_layers.get(), shape};
  const tardis_gpu_restore* const r = &rig.restore;
  const Graph restore(stream, [&] {
    check(tardis_gpu_restore_begin(r, keys.get(), count.get(), results.get(), stream), "begin");
    poison_pages<<<64, 256, 0, stream>>>(words);
    rig.layers(stream);
    check(tardis_gpu_restore_end(r, keys.get(), count.get(), results.get(), stream), "end");
    compute_pages<<<64, 256, 0, stream>>>(words);
    check(tardis_gpu_restore_commit(r, keys.get(), stream), "commit");
    compare_pages<<<64, 256, 0, stream>>>(words, wrong.get());
    check(cudaGetLastError(), "launch");
    check(tardis_gpu_restore_write_begin(r, stream), "write_begin");
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      check(tardis_gpu_restore_write_layer(r, layer, rig.gpu->queues().data(), rig.gpu->rings(), options.ctas,
                                           kWriteDeadlineNs, stream),
            "write_layer");
    }
    check(tardis_gpu_restore_write_end(r, stream), "write_end");
  });
  const Graph evict(stream, [&] {
    check(tardis_gpu_restore_to_files(r, TARDIS_GPU_DRAM, &want[0], 2, scratch.get(), stream), "to_files");
    check(tardis_gpu_restore_to_dram(r, &want[1], 2, scratch.get(), options.ctas, stream), "to_dram");
    check(tardis_gpu_restore_to_files(r, TARDIS_GPU_HBM, &want[2], 2, scratch.get(), stream), "to_files");
  });

  // Nobody would compare what lands directly.
  std::vector<gio::GrantedQueue> direct(rig.gpu->queues().data(), rig.gpu->queues().data() + rig.gpu->rings());
  direct.back().direct.count = 1;
  const int refused =
      tardis_gpu_restore_layer(r, 0, direct.data(), rig.gpu->rings(), options.ctas, RestoreRig::kDeadlineNs, stream);
  expect(refused == cudaErrorInvalidValue, "queue pairs that land directly are refused", refused);

  std::map<std::uint64_t, std::uint64_t> handles;  // of numbers that were computed
  std::set<std::uint64_t> damaged;                 // numbers whose block on the drive was changed since it was written
  std::uint64_t sources[TARDIS_GPU_SOURCES] = {}, outcomes[TARDIS_GPU_RESTORE_OUTCOMES] = {}, compared = 0;
  std::uint64_t failed_writes = 0, changed = 0;
  for (int replay = 0; replay < replays; ++replay) {
    const std::uint32_t n = 1 + static_cast<std::uint32_t>(random() % options.max_pages);
    std::set<std::uint64_t> chosen;
    while (chosen.size() < n) chosen.insert(random() % (random() % 3 == 0 ? 1200 : 300));
    std::vector<std::uint64_t> asked(chosen.begin(), chosen.end());
    std::shuffle(asked.begin(), asked.end(), random);
    for (std::uint32_t i = 0; i < n; ++i) {
      keys[i] = key_of(asked[i]);
      numbers[i] = asked[i];
    }
    count[0] = n;
    std::memset(results.get(), 0xEE, sizeof(tardis_gpu_restore_result) * options.max_pages);
    std::memset(wrong.get(), 0, sizeof(std::uint32_t) * options.max_pages);
    const auto rows = copy(rig.blocks.table.rows, 2 * std::size_t{options.rows});
    const std::uint64_t files = tier_begin(rig.blocks.table, TARDIS_GPU_FILE);
    const bool write_fails = replay % 9 == 4;
    if (write_fails) {
      nvme::FaultRule rule;
      rule.kind = nvme::FaultKind::kStatus;
      rule.queue = rig.gpu->queues().front().id;
      rule.skip = 40;
      rule.count = 2;
      rule.status = nvme::kScInternal;
      rig.gpu->rig().faults().add(rule);
    }
    restore.launch(stream);
    gio::testing::wait_for(stream, "restore");
    if (write_fails) {
      failed_writes += rig.gpu->rig().faults().injected(nvme::FaultKind::kStatus);
      rig.gpu->rig().faults().clear();
    }
    std::vector<std::uint64_t> held;
    for (std::uint32_t i = 0; i < n; ++i) {
      const tardis_gpu_restore_result& result = results[i];
      int source = TARDIS_GPU_SOURCE_MISS;
      if (const auto known = handles.find(asked[i]); known != handles.end()) {
        const std::uint32_t row = number_of(known->second);
        const Row found{rows[2 * row], rows[2 * row + 1]};
        if (is_row_of(found, known->second)) {
          source = static_cast<int>(tier_of(rig.blocks.table, block_of(found)));
        }
      }
      expect(static_cast<int>(result.source) == source, "source of a key", result.source, source);
      if (result.outcome >= TARDIS_GPU_RESTORE_OUTCOMES) {
        expect(false, "an outcome", result.outcome);
        continue;
      }
      ++sources[source];
      ++outcomes[result.outcome];
      expect(wrong[i] == 0, "no word of a page that is wrong", wrong[i]);
      if (result.outcome <= TARDIS_GPU_RESTORE_NEW) {
        held.push_back(result.handle);
        ++compared;
      }
      if (result.outcome == TARDIS_GPU_RESTORE_NEW) {
        handles[asked[i]] = result.handle;
        damaged.erase(asked[i]);
      }
      if (source == TARDIS_GPU_SOURCE_FILE && result.outcome != TARDIS_GPU_RESTORE_NO_ROOM) {
        if (damaged.count(asked[i]) != 0) {
          expect(result.outcome != TARDIS_GPU_RESTORE_LANDED, "a damaged page, not served", result.outcome);
        } else if (!write_fails) {
          expect(result.outcome == TARDIS_GPU_RESTORE_LANDED, "landed from the drive", result.outcome);
        }
      }
      if (result.outcome == TARDIS_GPU_RESTORE_DAMAGED) handles.erase(asked[i]);
    }
    rig.unref(held, stream);
    if (replay % 5 == 2) {
      const auto now = copy(rig.blocks.table.rows, 2 * std::size_t{options.rows});
      std::size_t left = 4;
      for (const auto& [number, handle] : handles) {
        const Row found{now[2 * number_of(handle)], now[2 * number_of(handle) + 1]};
        if (left == 0 || !is_row_of(found, handle) || block_of(found) < files || random() % 4 != 0 ||
            damaged.count(number) != 0) {
          continue;
        }
        rig.gpu->rig().media()[(block_of(found) - files) * shape.bytes() + random() % shape.bytes()] ^= std::byte{0x10};
        damaged.insert(number);
        --left;
      }
      changed += 4 - left;
    }
    want[0] = static_cast<std::uint32_t>(random() % 40);
    want[1] = static_cast<std::uint32_t>(random() % 100);
    want[2] = static_cast<std::uint32_t>(random() % options.max_pages);
    evict.launch(stream);
    gio::testing::wait_for(stream, "evictions");
  }
  tardis_gpu_restore_counts counts{};
  check(cudaMemcpy(&counts, tardis_gpu_restore_counts_of(r), sizeof counts, cudaMemcpyDeviceToHost), "counts");
  for (int s = 0; s < TARDIS_GPU_SOURCE_MOVING; ++s) {
    expect(counts.sources[s] == sources[s], "counter of a source", counts.sources[s], sources[s]);
    expect(sources[s] > 100, "answers of source " + std::to_string(s), sources[s]);
  }
  for (int o = 0; o < TARDIS_GPU_RESTORE_OUTCOMES; ++o) {
    expect(counts.outcomes[o] == outcomes[o], "counter of an outcome", counts.outcomes[o], outcomes[o]);
  }
  expect(failed_writes > 0, "commands that fail", failed_writes);

  // A write without an end: its block is nobody's any more.
  const auto free_blocks = [&] { return copy(rig.blocks.table.pool[TARDIS_GPU_FILE].control + kFree, 1)[0]; };
  want[0] = want[1] = want[2] = 50;
  evict.launch(stream);
  gio::testing::wait_for(stream, "room");
  const std::uint32_t free_before = free_blocks();
  const std::uint64_t written_before = counts.written;
  count[0] = 4;
  for (std::uint32_t i = 0; i < count[0]; ++i) {
    numbers[i] = 100'000 + i;  // nobody knows them, so nothing is read
    keys[i] = key_of(numbers[i]);
  }
  nvme::FaultRule lost;
  lost.kind = nvme::FaultKind::kLostCompletion;
  lost.queue = rig.gpu->queues().front().id;
  lost.skip = 1;
  lost.count = 1;
  rig.gpu->rig().faults().add(lost);
  restore.launch(stream);
  gio::testing::wait_for(stream, "a write without an end");
  check(cudaMemcpy(&counts, tardis_gpu_restore_counts_of(r), sizeof counts, cudaMemcpyDeviceToHost), "counts");
  for (std::uint32_t i = 0; i < count[0]; ++i) {
    expect(results[i].outcome == TARDIS_GPU_RESTORE_NEW, "a new page", results[i].outcome);
  }
  expect(counts.late == 1, "blocks that a write may come to yet", counts.late, 1);
  const std::uint64_t written = counts.written - written_before;
  expect(written < count[0], "pages written beside it", written);
  expect(free_blocks() + 1 + written == free_before, "free blocks", free_blocks(), free_before - 1 - written);

  expect(outcomes[TARDIS_GPU_RESTORE_DAMAGED] > 0, "damaged pages", outcomes[TARDIS_GPU_RESTORE_DAMAGED]);
  expect(counts.written > 100, "pages that rings wrote", counts.written);
  std::printf(
      "raw namespace, pages of %u layers x %u x %u bytes, %d replays: %llu hits in HBM, %llu in pinned memory, %llu on "
      "the drive, %llu misses; new %llu, of which written %llu; damaged %llu (%llu blocks changed), failed %llu, no "
      "room "
      "%llu; %llu compared\n",
      shape.layers, shape.sides, shape.page_bytes, replays, static_cast<unsigned long long>(sources[0]),
      static_cast<unsigned long long>(sources[1]), static_cast<unsigned long long>(sources[2]),
      static_cast<unsigned long long>(sources[3]), static_cast<unsigned long long>(outcomes[2]),
      static_cast<unsigned long long>(counts.written), static_cast<unsigned long long>(outcomes[5]),
      static_cast<unsigned long long>(changed), static_cast<unsigned long long>(outcomes[6]),
      static_cast<unsigned long long>(outcomes[4]), static_cast<unsigned long long>(compared));
}

}  // namespace
}  // namespace tardis::gstore::testing

int main(int argc, char** argv) {
  using namespace tardis::gstore::testing;
  if (!has_gpu()) return kSkipped;
  const int replays = argc > 1 ? std::atoi(argv[1]) : 300;
  const std::uint64_t seed = tardis::gpu_test::fresh_seed();
  check_raw({6, 2, 16 << 10}, 32 << 10, replays, seed);
  check_raw({2, 1, 36 << 10}, 16 << 10, replays, seed + 1);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
