// SPDX-License-Identifier: Apache-2.0
// What it costs to follow a store: the first look at everything, with the digests of everything, and later ones.
// Prints one JSON object for each. Arguments: a folder on a tmpfs, objects of 4 KiB (default 1,000,000).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "gstore/mirror.h"
#include "store_pages.h"

namespace {

using namespace tardis;
using Clock = std::chrono::steady_clock;

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(1);
}

void set_pages(Store& store, NamespaceId space, std::uint64_t first, std::size_t count, std::uint64_t chain) {
  constexpr std::size_t kTogether = 512;
  AlignedBuffer memory(kTogether * 4096);
  for (std::size_t done = 0; done < count; done += kTogether) {
    const std::size_t n = std::min(kTogether, count - done);
    std::vector<Hash256> keys;
    std::vector<std::uint64_t> pieces;
    for (std::size_t i = 0; i < n; ++i) {
      keys.push_back(tardis::testing::page_key(chain, first + done + i));
      pieces.push_back(reinterpret_cast<std::uint64_t>(memory.data() + i * 4096));
      std::memcpy(memory.data() + i * 4096, keys.back().data(), sizeof(Hash256));
    }
    std::vector<std::uint8_t> ok(n);
    if (auto set = store.set(space, keys.data(), nullptr, pieces.data(), n, ok.data()); !set) stop(set.error().message);
  }
}

template <class Work>
void timed(const char* what, std::uint64_t objects, int times, Work work) {
  std::vector<double> seconds;
  for (int i = 0; i < times; ++i) {
    const auto begin = Clock::now();
    work();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::sort(seconds.begin(), seconds.end());
  std::printf(
      "{\"case\": \"%s\", \"system\": \"one core\", \"size\": \"%llu objects\", \"value\": %.3f, \"unit\": \"ms\"}\n",
      what, static_cast<unsigned long long>(objects), seconds[seconds.size() / 2] * 1e3);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) stop("expected a folder on a tmpfs");
  const std::uint64_t objects = argc > 2 ? std::strtoull(argv[2], nullptr, 0) : 1'000'000;
  const std::string folder = std::string(argv[1]) + "/tardis-follow-bench";
  std::filesystem::remove_all(folder);
  StoreOptions options;
  options.segment_bytes = 64u << 20;
  options.capacity_bytes = objects * 4096 * 6 / 5 + (1u << 30);
  options.object_bytes_hint = 4096;
  options.checkpoint_seconds = 0;
  auto opened = Store::open(folder, options, true);
  if (!opened) stop(opened.error().message);
  Store& store = **opened;
  const std::uint64_t region = 4096;
  const Fingerprint fingerprint{1};
  auto space = store.open_namespace(fingerprint, "{}", 1, {&region, 1});
  if (!space) stop(space.error().message);
  set_pages(store, *space, 0, objects, 1);

  {
    SeenSlots seen;
    std::uint64_t visited = 0;
    const auto look = [&] {
      if (auto looked = store.changes(seen, [&](const SlotChange&) { ++visited; }); !looked)
        stop(looked.error().message);
    };
    timed("first look", objects, 1, look);
    timed("look, nothing changed", objects, 9, look);
    if (visited != objects) stop("expected to be told of every object once");
  }
  std::vector<std::uint64_t> blocks(objects + objects / 10), digests(blocks.size());
  gstore::MirrorOptions mirror_options;
  mirror_options.space = *space;
  mirror_options.file_blocks = static_cast<std::uint32_t>(blocks.size());
  mirror_options.page_blocks = blocks.data();
  mirror_options.digests = digests.data();
  auto mirror = gstore::Mirror::create(store, mirror_options);
  if (!mirror) stop(mirror.error().message);
  std::uint64_t handle = 1;
  const auto scan = [&] {
    gstore::MirrorBatch batch;
    if (auto scanned = mirror->scan(batch); !scanned) stop(scanned.error().message);
    const std::vector<std::uint8_t> statuses(batch.leaves.size());
    mirror->left(batch, statuses.data());
    std::vector<std::uint64_t> handles(batch.adopts.size());
    for (auto& h : handles) h = handle++;
    mirror->adopted(batch, handles.data());
  };
  timed("mirror, first scan with digests", objects, 1, scan);
  timed("mirror, nothing changed", objects, 9, scan);
  if (mirror->counters().objects != objects) stop("expected to mirror every object");
  set_pages(store, *space, 0, objects / 100, 2);
  timed("mirror, a hundredth is new", objects, 1, scan);
  if (auto closed = store.close(); !closed) stop(closed.error().message);
  opened->reset();
  std::filesystem::remove_all(folder);
  return 0;
}
