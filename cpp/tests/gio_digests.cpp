// SPDX-License-Identifier: Apache-2.0
// Rings that compare the digests of what they read, and make those of what they write (IoContext::digests), on the CPU;
// and roots of objects, by which digests that come from a drive are proven.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "gio/host_roots.h"
#include "gio/prepare.h"
#include "store/digest.h"
#include "tests/gio_support.h"

namespace tardis::gio {
namespace {

using testing::GrantRig;
using testing::RigOptions;

constexpr std::uint64_t kSecond = 1'000'000'000;

// A layer in memory and on the medium: pages of K and V, or of one buffer, with the digests of the format.
class Layer {
 public:
  Layer(const char* name, std::uint32_t keys, std::uint32_t values, std::uint32_t most_bytes, std::uint32_t pages = 24)
      : name_(name), pages_(pages), keys_(keys), values_(values), stride_((keys + values + 4095) / 4096 * 4096) {
    RigOptions rig;
    rig.bytes = std::uint64_t{pages} * stride_;
    rig.soft.threads = 2;
    rig.soft.mdts = 9;
    GrantOptions options;
    options.queues = 2;
    options.entries = 9;
    options.slot_bytes = most_bytes;
    gio_ = std::make_unique<GrantRig>(rig, options);
    gio_->fill_media(keys + values);
    memory_ = AlignedBuffer(std::size_t{pages} * (keys + values));
    std::memset(memory_.data(), 0xa5, memory_.size());
    geometry_.parts = 1;
    geometry_.part_bytes = keys + values;
    geometry_.regions = values == 0 ? 1 : 2;
    geometry_.region_bytes[0] = keys;
    geometry_.region_bytes[1] = values;
    chunks_ = static_cast<std::uint32_t>((keys + values + kDigestedBytes - 1) / kDigestedBytes);
    digests_.assign(std::size_t{pages} * chunks_, 0xeeeeeeeeeeeeeeee);
    for (std::uint32_t i = 0; i < pages; ++i) ids_.push_back(i);
    layer_.memory_pages = layer_.file_pages = ids_.data();
    layer_.count = &pages_;
    layer_.pools[0] = reinterpret_cast<std::uintptr_t>(memory_.data());
    layer_.pools[1] = values == 0 ? 0 : layer_.pools[0] + std::uint64_t{pages} * keys;
    layer_.page_stride[0] = layer_.page_bytes[0] = keys;
    layer_.page_stride[1] = layer_.page_bytes[1] = values;
    layer_.blocks_per_page = stride_ >> 12;
    layer_.block_shift = 12;
    layer_.digests = reinterpret_cast<std::uintptr_t>(digests_.data());
    layer_.digest_stride = std::uint64_t{chunks_} * 8;
    layer_.most_bytes = most_bytes;
  }
  bool ready() const { return gio_->grant != nullptr; }
  const char* name() const { return name_; }
  std::uint32_t pages() const { return pages_; }
  std::uint32_t bytes() const { return keys_ + values_; }
  std::uint32_t chunks() const { return chunks_; }
  std::uint32_t commands_per_page() const { return layer_.commands_per_page(); }
  std::uint32_t most_bytes() const { return layer_.most_bytes; }
  std::byte* media(std::uint32_t page, std::uint64_t offset = 0) {
    return gio_->rig.medium->data() + std::uint64_t{page} * stride_ + offset;
  }
  std::uint64_t* digests(std::uint32_t page) { return &digests_[std::size_t{page} * chunks_]; }
  std::byte* memory(std::uint32_t page, std::uint64_t offset) {
    return offset < keys_
               ? memory_.data() + std::uint64_t{page} * keys_ + offset
               : memory_.data() + std::uint64_t{pages_} * keys_ + std::uint64_t{page} * values_ + (offset - keys_);
  }
  GrantRig& rig() { return *gio_; }

  // As the store makes them.
  void learn_from_media() {
    for (std::uint32_t page = 0; page < pages_; ++page) {
      const std::uint64_t pieces[] = {reinterpret_cast<std::uintptr_t>(media(page)),
                                      reinterpret_cast<std::uintptr_t>(media(page, keys_))};
      digest_chunks(geometry_, pieces, 0, chunks_, digests(page));
    }
  }
  std::vector<std::uint64_t> of_memory(std::uint32_t page) {
    std::vector<std::uint64_t> out(chunks_);
    const std::uint64_t pieces[] = {reinterpret_cast<std::uintptr_t>(memory(page, 0)),
                                    reinterpret_cast<std::uintptr_t>(memory(page, keys_))};
    digest_chunks(geometry_, pieces, 0, chunks_, out.data());
    return out;
  }
  std::vector<IoContext> contexts(IoOp op) {
    layer_.op = op;
    std::vector<IoContext> out;
    for (std::uint32_t i = 0; i < pages_ * commands_per_page(); ++i) {
      out.push_back(layer_.context(i / commands_per_page(), i % commands_per_page()));
    }
    return out;
  }
  template <std::uint32_t kWidth>
  auto run(IoOp op) {
    return gio_->owner->run<kWidth>(contexts(op), 20 * kSecond, true);
  }
  bool landed(std::uint32_t page) {
    for (std::uint32_t at = 0; at < bytes(); at += 16) {
      if (std::memcmp(memory(page, at), media(page, at), 16) != 0) return false;
    }
    return true;
  }

 private:
  const char* const name_;
  std::uint32_t pages_;
  const std::uint32_t keys_, values_, stride_;
  std::unique_ptr<GrantRig> gio_;
  AlignedBuffer memory_;
  ObjectGeometry geometry_;
  std::uint32_t chunks_ = 0;
  std::vector<std::uint64_t> digests_;
  std::vector<std::uint32_t> ids_;
  LayerPages layer_{};
};

struct Shape {
  const char* name;
  std::uint32_t keys, values, most_bytes;
};
constexpr Shape kShapes[] = {
    {"a page less than a chunk", 2048, 2048, 16 << 10},
    {"a chunk of K and one of V", 16 << 10, 16 << 10, 32 << 10},
    {"a chunk of both K and V", 24 << 10, 24 << 10, 48 << 10},
    {"MLA, a short last chunk", 36 << 10, 0, 40 << 10},
    {"several commands a page, V from the middle of one", 40 << 10, 44 << 10, 32 << 10},
    {"MLA, several commands, the last of one block", 68 << 10, 0, 64 << 10},
};

template <std::uint32_t kWidth>
void reads(const Shape& shape) {
  SCOPED_TRACE(std::string(shape.name) + ", width " + std::to_string(kWidth));
  Layer layer(shape.name, shape.keys, shape.values, shape.most_bytes);
  ASSERT_TRUE(layer.ready());
  layer.learn_from_media();
  auto outcome = layer.run<kWidth>(IoOp::kRead);
  EXPECT_EQ(outcome.flag, kIoDone);
  EXPECT_EQ(outcome.count(IoEnd::kDone), outcome.statuses.size());
  for (std::uint32_t page = 0; page < layer.pages(); ++page) EXPECT_TRUE(layer.landed(page)) << page;

  // A bit on each side of each chunk's end, in a page each; those with an even number stay whole.
  std::mt19937_64 random(kWidth + shape.keys);
  std::vector<std::uint64_t> places = {0, layer.bytes() - 1, shape.keys - 1};
  if (shape.values != 0) places.push_back(shape.keys);
  for (std::uint32_t at = kDigestedBytes; at < layer.bytes(); at += kDigestedBytes) {
    places.push_back(at - 1);
    places.push_back(at);
  }
  for (std::size_t first = 0; first < places.size(); first += layer.pages() / 2) {
    std::vector<std::pair<std::byte*, std::byte>> flips;
    std::vector<bool> bad(outcome.statuses.size());
    for (std::size_t i = first; i < std::min<std::size_t>(places.size(), first + layer.pages() / 2); ++i) {
      const auto page = static_cast<std::uint32_t>(2 * (i - first) + 1);
      flips.emplace_back(layer.media(page, places[i]), std::byte{1} << random() % 8);
      bad[page * layer.commands_per_page() + places[i] / layer.most_bytes()] = true;
    }
    for (const auto& [at, bit] : flips) *at ^= bit;
    outcome = layer.run<kWidth>(IoOp::kRead);
    for (const auto& [at, bit] : flips) *at ^= bit;
    EXPECT_EQ(outcome.flag, kIoError);
    EXPECT_EQ(outcome.error(), RingError::kCommands);
    std::uint32_t damaged = 0, done = 0;
    for (const RingReport& report : outcome.reports) {
      damaged += report.damaged;
      done += report.done;
      EXPECT_EQ(report.error, report.damaged == 0 ? RingError::kNone : RingError::kCommands);
    }
    EXPECT_EQ(damaged, flips.size());
    EXPECT_EQ(done, bad.size() - flips.size());
    for (std::size_t i = 0; i < bad.size(); ++i) {
      EXPECT_EQ(outcome.statuses[i].end(), bad[i] ? IoEnd::kDamaged : IoEnd::kDone) << i;
    }
  }
  // The queue pairs are as good as before; digests that are expected may be wrong as well.
  layer.digests(3)[layer.chunks() - 1] ^= std::uint64_t{1} << 63;
  outcome = layer.run<kWidth>(IoOp::kRead);
  EXPECT_EQ(outcome.count(IoEnd::kDamaged), 1u);
  EXPECT_EQ(outcome.statuses[4 * layer.commands_per_page() - 1].end(), IoEnd::kDamaged);
  layer.digests(3)[layer.chunks() - 1] ^= std::uint64_t{1} << 63;
  EXPECT_EQ(layer.run<kWidth>(IoOp::kRead).flag, kIoDone);
}

template <std::uint32_t kWidth>
void writes(const Shape& shape) {
  SCOPED_TRACE(std::string(shape.name) + ", width " + std::to_string(kWidth));
  Layer layer(shape.name, shape.keys, shape.values, shape.most_bytes);
  ASSERT_TRUE(layer.ready());
  std::mt19937_64 random(kWidth);
  for (std::uint32_t page = 0; page < layer.pages(); ++page) {
    for (std::uint32_t at = 0; at < layer.bytes(); at += 8) {
      const std::uint64_t word = random();
      std::memcpy(layer.memory(page, at), &word, 8);
    }
  }
  const auto outcome = layer.run<kWidth>(IoOp::kWrite);
  EXPECT_EQ(outcome.flag, kIoDone);
  for (std::uint32_t page = 0; page < layer.pages(); ++page) {
    const auto expected = layer.of_memory(page);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), layer.digests(page))) << page;
    EXPECT_TRUE(layer.landed(page)) << page;
  }
  // What was written is what the same digests let be read.
  EXPECT_EQ(layer.run<kWidth>(IoOp::kRead).flag, kIoDone);
}

TEST(GioDigests, ReadsAreCompared) {
  for (const Shape& shape : kShapes) {
    reads<1>(shape);
    reads<5>(shape);
    reads<32>(shape);
  }
}

TEST(GioDigests, WritesAreDigested) {
  for (const Shape& shape : kShapes) {
    writes<1>(shape);
    writes<5>(shape);
    writes<32>(shape);
  }
}

TEST(GioDigests, SomeContextsWithAndSomeWithout) {
  Layer layer("mixed", 24 << 10, 24 << 10, 48 << 10);
  ASSERT_TRUE(layer.ready());
  layer.learn_from_media();
  auto contexts = layer.contexts(IoOp::kRead);
  for (std::size_t i = 0; i < contexts.size(); i += 2) contexts[i].digests = 0;
  for (const std::uint32_t page : {4u, 5u}) *layer.media(page, 20'000) ^= std::byte{1};
  const auto outcome = layer.rig().owner->run<32>(contexts, 20 * kSecond, true);
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    EXPECT_EQ(outcome.statuses[i].end(), i == 5 ? IoEnd::kDamaged : IoEnd::kDone) << i;
  }
}

TEST(GioDigests, RefusesWhatCannotBeHonoured) {
  Layer layer("refused", 24 << 10, 24 << 10, 48 << 10);
  ASSERT_TRUE(layer.ready());
  layer.learn_from_media();
  auto contexts = layer.contexts(IoOp::kRead);
  // Nobody said that there would be any: refused rather than read without.
  auto outcome = layer.rig().owner->run<32>(contexts);
  EXPECT_EQ(outcome.count(IoEnd::kRefused), contexts.size());
  EXPECT_EQ(outcome.flag, kIoError);
  contexts[0].digests = 0;
  outcome = layer.rig().owner->run<5>(contexts);
  EXPECT_EQ(outcome.count(IoEnd::kRefused), contexts.size() - 1);
  EXPECT_EQ(outcome.statuses[0].end(), IoEnd::kDone);

  // Addresses that cannot be any. Multiples of 8 that are none of 16 are right.
  contexts = layer.contexts(IoOp::kRead);
  contexts[1].digests += 1;
  contexts[2].digests += 4;
  contexts[3].digests = ~std::uint64_t{0};
  contexts[4].digests = ~std::uint64_t{0} - 7;   // its second word would be at 0
  contexts[5].digests = ~std::uint64_t{0} - 15;  // its third
  outcome = layer.rig().owner->run<32>(contexts, 20 * kSecond, true);
  std::uint32_t refused = 0;
  for (const RingReport& report : outcome.reports) refused += report.refused;
  EXPECT_EQ(refused, 5u);
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    EXPECT_EQ(outcome.statuses[i].end(), i >= 1 && i <= 5 ? IoEnd::kRefused : IoEnd::kDone) << i;
  }
}

TEST(GioDigests, AFailedCommandIsFailedAndNotDamaged) {
  Layer layer("failed", 16 << 10, 16 << 10, 32 << 10);
  ASSERT_TRUE(layer.ready());
  layer.learn_from_media();
  nvme::FaultRule rule;
  rule.kind = nvme::FaultKind::kMediaError;
  rule.queue = layer.rig().owner->queues().front().id;
  rule.skip = 3;
  rule.count = 1;
  layer.rig().rig.faults->add(rule);
  *layer.media(0, 5) ^= std::byte{4};
  const auto outcome = layer.run<32>(IoOp::kRead);
  EXPECT_EQ(outcome.count(IoEnd::kFailed), 1u);
  EXPECT_EQ(outcome.statuses[0].end(), IoEnd::kDamaged);
  EXPECT_EQ(outcome.count(IoEnd::kDone), layer.pages() - 2);
}

// --- roots
struct Objects {
  Objects(std::uint32_t count, std::uint32_t layers, std::uint32_t chunks, std::uint64_t seed)
      : count(count),
        digests(std::size_t{count} * layers * chunks),
        roots(count),
        layer_digests(count * layers),
        status(count, 0xee) {
    std::mt19937_64 random(seed);
    for (std::uint64_t& word : digests) word = random();
    ObjectGeometry geometry;
    geometry.parts = layers;
    geometry.chunks_per_part = chunks;
    for (std::uint32_t i = 0; i < count; ++i) {
      roots[i] = digest_root(geometry, &digests[std::size_t{i} * layers * chunks]);
      addresses.push_back(reinterpret_cast<std::uintptr_t>(&digests[std::size_t{i} * layers * chunks]));
    }
    args = {addresses.data(), 0,      0, &this->count, count, layers, chunks, 0, roots.data(), layer_digests.data(),
            status.data(),    &errors};
  }
  Objects(const Objects&) = delete;
  Objects& operator=(const Objects&) = delete;
  std::uint32_t count, errors = 0;
  std::vector<std::uint64_t> digests, roots, layer_digests, addresses;
  std::vector<std::uint32_t> status;
  tardis_gpu_root_args args;
};

TEST(GioRoots, ProveTheDigestsOfObjects) {
  for (const auto& [layers, chunks] : std::vector<std::pair<std::uint32_t, std::uint32_t>>{
           {1, 1}, {1, 128}, {2, 2}, {32, 8}, {80, 1}, {61, 31}, {30, 30}, {31, 1}, {128, 3}}) {
    SCOPED_TRACE(std::to_string(layers) + " layers of " + std::to_string(chunks) + " chunks");
    Objects objects(7, layers, chunks, layers);
    ASSERT_TRUE(check_roots_on_host(objects.args));
    EXPECT_EQ(objects.errors, 0u);
    for (const std::uint32_t status : objects.status) EXPECT_EQ(status, TARDIS_GPU_ROOT_GOOD);
    // One bit of any word is told, and nothing of the others.
    objects.digests[objects.digests.size() - 1] ^= 1;
    objects.digests[std::size_t{3} * layers * chunks] ^= std::uint64_t{1} << 63;
    objects.roots[1] ^= 2;
    ASSERT_TRUE(check_roots_on_host(objects.args));
    for (std::uint32_t i = 0; i < 7; ++i) {
      EXPECT_EQ(objects.status[i], i == 1 || i == 3 || i == 6 ? TARDIS_GPU_ROOT_MISMATCH : TARDIS_GPU_ROOT_GOOD) << i;
    }
    EXPECT_EQ(objects.errors, 3u);
  }
}

TEST(GioRoots, RefusesWhatIsNoAddressAndNoArguments) {
  Objects objects(5, 4, 2, 1);
  objects.addresses[1] = 0;
  objects.addresses[2] += 4;
  objects.args.max_objects = 4;
  ASSERT_TRUE(check_roots_on_host(objects.args));
  EXPECT_EQ(objects.errors, 2u);
  const std::uint32_t expected[] = {TARDIS_GPU_ROOT_GOOD, TARDIS_GPU_ROOT_REFUSED, TARDIS_GPU_ROOT_REFUSED,
                                    TARDIS_GPU_ROOT_GOOD, 0xee};
  for (std::uint32_t i = 0; i < 5; ++i) EXPECT_EQ(objects.status[i], expected[i]) << i;
  // One after the other.
  objects.args.objects = nullptr;
  objects.args.object_base = reinterpret_cast<std::uintptr_t>(objects.digests.data());
  objects.args.object_stride = 4 * 2 * 8;
  objects.errors = 0;
  ASSERT_TRUE(check_roots_on_host(objects.args));
  EXPECT_EQ(objects.errors, 0u);
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_EQ(objects.status[i], TARDIS_GPU_ROOT_GOOD) << i;
  objects.args.layers = 0;
  EXPECT_FALSE(check_roots_on_host(objects.args));
}

}  // namespace
}  // namespace tardis::gio
