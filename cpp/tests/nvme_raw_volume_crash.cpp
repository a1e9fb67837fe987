// SPDX-License-Identifier: Apache-2.0
// The power goes while a RawVolume changes, is opened or is made.
// TARDIS_NVME_CAMPAIGN multiplies the states (default 1).
#include "nvme_raw_volume_support.h"

namespace tardis::nvme::testing {
namespace {

// Random work on a volume over stale bytes; the power goes after every write and flush, also while the volume that this
// left is opened. What was said to be durable must be there, what was removed must be gone, and a new file's beginning
// must read as zeros.
class PowerCuts {
 public:
  PowerCuts(std::uint64_t seed, std::uint32_t block) : random_(seed), block_(block) {}

  void run(std::uint64_t states) {
    while (states_ < states && !::testing::Test::HasFailure()) life();
  }

 private:
  struct Promise {
    std::optional<VolumeExtent> extent;
    bool certain = true;  // else there or not
  };
  using Promises = std::map<std::string, Promise>;
  static constexpr std::uint64_t kZeros = 4096;

  void life() {
    MemoryNamespace device(kNamespace, block_);
    poison_data(device);
    auto volume = make(device);
    const BlockFile first = device.contents;
    device.recording = true;
    std::vector<std::pair<std::size_t, Promises>> log;  // holds from so many events on
    Promises now;
    log.emplace_back(0, now);
    for (int step = 0; step < 12; ++step) {
      const std::string name = "segments/" + std::to_string(random_() % 6);
      Promise& promise = now[name];
      promise.certain = false;
      log.emplace_back(device.events.size() + 1, now);
      if (promise.extent) {
        EXPECT_TRUE(volume->remove({name}));
        promise = {};
      } else {
        const auto extent = volume->create(name, (1 + random_() % 3) * kMiB, kZeros);
        if (extent) promise.extent = *extent;
        EXPECT_TRUE(extent || extent.error().code == Code::kNoSpace);
        promise.certain = true;
        // Whoever uses the file writes it.
        if (extent) use(device, *extent);
      }
      log.emplace_back(device.events.size(), now);
    }
    std::size_t next = 0;
    for (std::size_t at = 0; at <= device.events.size(); ++at) {
      while (next + 1 < log.size() && log[next + 1].first <= at) ++next;
      for (int choice = 0; choice < 4; ++choice) {
        SCOPED_TRACE("power cut after event " + std::to_string(at));
        check(after_power_cut(first, device.events, at, random_), log[next].second, 1);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
  static void use(MemoryNamespace& device, const VolumeExtent& extent) {
    std::vector<char> data(kZeros, 'u');
    iovec piece{data.data(), data.size()};
    NamespaceRequest request{NamespaceRequest::Op::kWrite, extent.offset + kZeros, {&piece, 1}, 0};
    device.run({&request, 1}, {});
  }

  void check(const BlockFile& image, const Promises& promises, int deeper) {
    ++states_;
    MemoryNamespace device(image, block_);
    device.recording = true;
    const auto volume = open(device);
    if (volume == nullptr) return;
    EXPECT_EQ(volume->lost(), 0u);
    std::uint64_t used = 0;
    for (const auto& [name, extent] : files_of(*volume)) {
      EXPECT_TRUE(promises.contains(name)) << name;
      EXPECT_TRUE(reads_zero(device.contents, extent.offset, kZeros)) << name << " begins with an older file";
      used += (extent.bytes + kMiB - 1) / kMiB * kMiB;
    }
    EXPECT_EQ(volume->free_bytes(), volume->superblock().data_bytes - used);
    for (const auto& [name, promise] : promises) {
      const auto found = volume->find(name);
      if (!promise.certain) continue;
      ASSERT_EQ(found.has_value(), promise.extent.has_value()) << name;
      if (!found) continue;
      EXPECT_EQ(found->offset, promise.extent->offset) << name;
      EXPECT_EQ(found->bytes, promise.extent->bytes) << name;
    }
    if (deeper == 0 || device.events.empty()) return;
    // What opening wrote may be torn too.
    for (std::size_t at = 1; at <= device.events.size(); ++at) {
      check(after_power_cut(image, device.events, at, random_), promises, deeper - 1);
    }
    // Once opened, what it said stays.
    Promises settled = promises;
    for (auto& [name, promise] : settled) promise = {volume->find(name), true};
    check(after_power_cut(image, device.events, device.events.size(), random_), settled, 0);
  }

  std::mt19937_64 random_;
  const std::uint32_t block_;
  std::uint64_t states_ = 0;
};

TEST(NvmeRawVolumeCrash, KeepsWhatItSaysThroughPowerCuts) {
  for (const std::uint32_t block : {512u, 4096u}) PowerCuts(block, block).run(5000 * campaign());
}

TEST(NvmeRawVolumeCrash, APowerCutWhileItIsFormattedLeavesABlankNamespaceOrAVolume) {
  std::mt19937_64 random(3);
  MemoryNamespace device(kNamespace);
  poison_data(device);
  const BlockFile first = device.contents;
  device.recording = true;
  ASSERT_TRUE(RawVolume::format(device, kUuid));
  std::uint64_t blank = 0, whole = 0;
  for (std::size_t at = 0; at <= device.events.size(); ++at) {
    for (int choice = 0; choice < 20; ++choice) {
      MemoryNamespace after(after_power_cut(first, device.events, at, random), 512);
      const auto volume = RawVolume::open(after, kUuid);
      if (volume) {
        EXPECT_TRUE((*volume)->names().empty());
        ++whole;
      } else {
        EXPECT_EQ(volume.error().code, Code::kNotFound) << volume.error().message;
        EXPECT_TRUE(RawVolume::check_blank(after));
        ++blank;
      }
      EXPECT_TRUE(at < device.events.size() || volume);
    }
  }
  EXPECT_GT(blank, 0u);
  EXPECT_GT(whole, 20u);
}

TEST(NvmeRawVolumeCrash, APowerCutWhileItIsFormattedAnewLeavesOneVolumeWholeOrNone) {
  std::mt19937_64 random(4);
  MemoryNamespace device(kNamespace);
  auto old = make(device);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(old->create(std::to_string(i), kMiB, 0));
  const Files files = files_of(*old);
  const BlockFile first = device.contents;
  device.recording = true;
  ASSERT_TRUE(RawVolume::format(device, kOther));
  std::uint64_t olds = 0, news = 0, nones = 0;
  for (std::size_t at = 0; at <= device.events.size(); ++at) {
    for (int choice = 0; choice < 20; ++choice) {
      MemoryNamespace after(after_power_cut(first, device.events, at, random), 512);
      const auto fresh = RawVolume::open(after, kOther);
      const auto kept = fresh ? Result<std::unique_ptr<RawVolume>>(Error{}) : RawVolume::open(after, kUuid);
      if (fresh) {
        EXPECT_TRUE((*fresh)->names().empty());
        EXPECT_EQ((*fresh)->lost(), 0u) << "entries of the old volume are still there";
      } else if (kept) {
        EXPECT_EQ(files_of(**kept).size(), files.size()) << "the old superblock stands over an empty directory";
      }
      ++(fresh ? news : kept ? olds : nones);
    }
  }
  EXPECT_GT(olds, 20u);
  EXPECT_GT(news, 20u);
  EXPECT_GT(nones, 20u);
}

}  // namespace
}  // namespace tardis::nvme::testing
