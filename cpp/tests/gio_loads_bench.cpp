// SPDX-License-Identifier: Apache-2.0
// What beginning and ending a load costs its caller, and how long until its board says ready. Prints one JSON object.
// Arguments: a folder on a tmpfs, objects (512), layers of each (32), KiB of a layer (256).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "gio/loader.h"
#include "store_pages.h"

namespace {

using namespace tardis;
using tardis::testing::page_key;
using tardis::testing::PageMemory;

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(1);
}

template <class T>
T expect(Result<T> result) {
  if (!result) stop(result.error().message);
  return std::move(*result);
}

struct Times {
  std::vector<double> microseconds;
  void add(std::uint64_t from, std::uint64_t to) { microseconds.push_back(static_cast<double>(to - from) / 1e3); }
  double median() {
    std::sort(microseconds.begin(), microseconds.end());
    return microseconds[microseconds.size() / 2];
  }
};

void measure(const std::string& folder, std::uint32_t objects, std::uint32_t layers, std::uint64_t part) {
  StoreOptions options;
  options.segment_bytes = 1u << 30;
  options.capacity_bytes = (objects * part * layers / options.segment_bytes + 2) * options.segment_bytes;
  const auto store = expect(Store::open(folder, options, true));
  const std::uint64_t regions[] = {part / 2, part / 2};
  const NamespaceId space = expect(store->open_namespace({1}, "{}", layers, regions));
  std::vector<Hash256> keys(objects);
  PageMemory memory(layers, {part / 2, part / 2}, 1);
  for (std::uint32_t i = 0; i < objects; ++i) {
    keys[i] = page_key(1, i);
    memory.write(0, i);
    std::uint8_t ok = 0;
    const Status set = store->set(space, &keys[i], i == 0 ? nullptr : &keys[i - 1], memory.pieces(), 1, &ok);
    if (!set) stop(set.error().message);
  }
  tardis_loader_options loads{};
  loads.shape = {layers, static_cast<std::uint32_t>((part + kChunkBytes - 1) / kChunkBytes), objects, 1, 1, 1};
  loads.name_space = space;
  loads.block_bytes = 4096;
  loads.loads = 1;
  AlignedBuffer staging(round_up(part, 4096));
  loads.staging = staging.data();
  loads.staging_bytes = staging.size();
  const auto loader = expect(gio::Loader::open(*store, loads));
  AlignedBuffer board(expect(gio::board_layout_of(loads.shape)).bytes);
  Times begin, ready, end;
  for (int turn = 0; turn < 21; ++turn) {
    std::memset(board.data(), 0, board.size());
    const std::uint64_t start = monotonic_ns();
    gio::LoadThread* const load = expect(loader->begin(keys.data(), objects, true, board.data()));
    const std::uint64_t begun = monotonic_ns();
    const tardis_load_board& head = load->load().board().head();
    while (gio::LoadBoard::read(head.ready) == TARDIS_LOAD_PENDING) std::this_thread::yield();
    const std::uint64_t prepared = monotonic_ns();
    if (head.ring_pages != objects) stop("expected all objects to be ready for rings");
    loader->end(*load, true);
    begin.add(start, begun);
    ready.add(start, prepared);
    end.add(prepared, monotonic_ns());
  }
  std::printf(
      "{\"objects\": %u, \"layers\": %u, \"layer_kib\": %u, \"begin_us\": %.1f, \"ready_us\": %.0f, "
      "\"end_us\": %.1f}\n",
      objects, layers, static_cast<unsigned>(part >> 10), begin.median(), ready.median(), end.median());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) stop("expected a folder on a tmpfs");
  const auto number = [&](int i, unsigned long otherwise) {
    return argc > i ? std::strtoul(argv[i], nullptr, 10) : otherwise;
  };
  const std::string folder = std::string(argv[1]) + "/tardis-loads-bench";
  std::filesystem::remove_all(folder);
  measure(folder, static_cast<std::uint32_t>(number(2, 512)), static_cast<std::uint32_t>(number(3, 32)),
          number(4, 256) << 10);
  std::filesystem::remove_all(folder);
}
