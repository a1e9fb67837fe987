// SPDX-License-Identifier: Apache-2.0
// What beginning and ending a load costs its caller, and how long until the board says ready: by default 512 objects of
// 8 MiB in 32 layers, on a tmpfs. tardis_gio_loads_bench [objects] [KiB of a layer] [layers]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "gio/loader.h"
#include "store_support.h"

namespace {

using namespace tardis;

double median(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int measure(std::uint32_t objects, std::uint64_t part, std::uint32_t layers) {
  const testing::TempFolder folder("/dev/shm");
  StoreOptions options;
  options.segment_bytes = 1u << 30;
  options.capacity_bytes = (objects * part * layers / options.segment_bytes + 2) * options.segment_bytes;
  auto store = Store::open(folder.path(), options, true);
  if (!store) return std::fprintf(stderr, "%s\n", store.error().message.c_str()), 1;
  const std::uint64_t regions[] = {part / 2, part / 2};
  auto space = (*store)->open_namespace({1}, "{}", layers, regions);
  if (!space) return std::fprintf(stderr, "%s\n", space.error().message.c_str()), 1;
  std::vector<Hash256> keys(objects);
  testing::PageMemory memory(layers, {part / 2, part / 2}, 1);
  for (std::uint32_t i = 0; i < objects; ++i) {
    keys[i] = testing::page_key(1, i);
    memory.write(0, i);
    std::uint8_t ok = 0;
    if (auto set = (*store)->set(*space, &keys[i], i == 0 ? nullptr : &keys[i - 1], memory.pieces(), 1, &ok); !set) {
      return std::fprintf(stderr, "%s\n", set.error().message.c_str()), 1;
    }
  }
  tardis_loader_options loads{};
  loads.shape = {layers, static_cast<std::uint32_t>((part + (16 << 10) - 1) / (16 << 10)), objects, 1, 1, 1};
  loads.name_space = *space;
  loads.block_bytes = 4096;
  loads.loads = 1;
  AlignedBuffer staging(round_up(part, 4096));
  loads.staging = staging.data();
  loads.staging_bytes = staging.size();
  auto loader = gio::Loader::open(**store, loads);
  if (!loader) return std::fprintf(stderr, "%s\n", loader.error().message.c_str()), 1;
  auto layout = gio::board_layout_of(loads.shape);
  AlignedBuffer board(layout->bytes, 64);
  std::vector<double> begin, ready, end;
  for (int turn = 0; turn < 21; ++turn) {
    std::memset(board.data(), 0, board.size());
    const std::uint64_t start = monotonic_ns();
    auto load = (*loader)->begin(keys.data(), objects, true, board.data());
    if (!load) return std::fprintf(stderr, "%s\n", load.error().message.c_str()), 1;
    const std::uint64_t begun = monotonic_ns();
    const auto& head = (*load)->load().board().head();
    while (gio::LoadBoard::read(head.ready) == TARDIS_LOAD_PENDING) std::this_thread::yield();
    const std::uint64_t prepared = monotonic_ns();
    if (head.ring_pages != objects) return std::fprintf(stderr, "not prepared\n"), 1;
    (*loader)->end(**load, true);
    const std::uint64_t ended = monotonic_ns();
    begin.push_back(static_cast<double>(begun - start) / 1e3);
    ready.push_back(static_cast<double>(prepared - start) / 1e3);
    end.push_back(static_cast<double>(ended - prepared) / 1e3);
  }
  std::printf("%u objects of %u layers of %llu KiB: begin %.1f us, ready after %.0f us, end %.0f us (medians of %zu)\n",
              objects, layers, static_cast<unsigned long long>(part >> 10), median(begin), median(ready), median(end),
              begin.size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, unsigned long otherwise) {
    return argc > i ? std::strtoul(argv[i], nullptr, 10) : otherwise;
  };
  return measure(static_cast<std::uint32_t>(number(1, 512)), number(2, 256) << 10,
                 static_cast<std::uint32_t>(number(3, 32)));
}
