// SPDX-License-Identifier: Apache-2.0
// Bits flip on a raw namespace while its store is closed: in superblocks and directories of the volume, in tables and
// payload of segments. Whatever is served afterwards has the bytes that were stored; what is lost is a miss. Once
// directly, once with a driver and a software controller between the store and the medium. TARDIS_NVME_CAMPAIGN
// multiplies the cases (default 1).
#include <cstdio>

#include "crash_campaign.h"
#include "nvme_support_recorded_medium.h"
#include "nvme_support_soft_stack.h"
#include "nvme_support_store_folder.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

constexpr std::uint64_t kCases = 800, kCasesBehindAController = 400;
constexpr std::uint64_t kChains = 6, kPages = 8;
const std::array<Layout, 2> kLayouts = {{{2, {5000, 3000}}, {1, {100'000}}}};

StoreOptions options() { return small_store(4); }

class NvmeStoreFlips : public ::testing::TestWithParam<bool> {  // behind a controller
 protected:
  NvmeStoreFlips() : bytes_(kLayouts), parent_(memory_parent()) {
    auto memory = std::make_shared<MemoryNamespace>(24 * kMiB);
    const std::string folder = fresh_folder();
    auto pages = OpenPages::open(folder, options(), on(memory), bytes_);
    if (pages == nullptr) return;
    for (std::size_t space = 0; space < 2; ++space) {
      for (std::uint64_t chain = 0; chain < kChains; ++chain) {
        EXPECT_EQ(pages->put({space, chain, 0}, std::vector<std::uint32_t>(kPages, 0)), kPages);
        for (std::uint64_t i = 0; i < kPages; ++i) known_.pages[{space, chain, i}].versions = {0};
      }
    }
    EXPECT_TRUE(pages->store().close());
    whole_ = StoreFolderImage::of(folder).with(memory->contents);
    for (const auto& [name, range] : ranges_on(memory->contents)) ranges_.push_back(range);
    memory->contents.read(0, &volume_, sizeof volume_);
  }

  std::string fresh_folder() {
    std::string folder = parent_.path() + "/" + std::to_string(folders_++);
    std::filesystem::create_directory(folder);
    return folder;
  }

  std::shared_ptr<RawNamespace> namespace_on(RecordedDrive& drive) {
    if (!GetParam()) return std::make_shared<RecordedNamespace>(drive, 512);
    const auto stack = SoftStack::make(std::make_shared<RecordedMedium>(drive), small_stack(512));
    return stack == nullptr ? nullptr : SoftStack::disk_of(stack);
  }

  enum class Target { kVolume, kTables, kPayload, kCount };
  std::uint64_t choose_byte(Target target, std::mt19937_64& random) const {
    if (target == Target::kVolume) {
      const std::uint64_t tail = volume_.namespace_bytes - 4096, used = (ranges_.size() + 2) * sizeof(VolumeEntry);
      const std::pair<std::uint64_t, std::uint64_t> places[] = {
          {0, 512}, {tail, 512}, {volume_.directory_offset[0], used}, {volume_.directory_offset[1], used}};
      const auto& [offset, bytes] = places[random() % std::size(places)];
      return offset + random() % bytes;
    }
    const auto& [offset, bytes] = ranges_[random() % ranges_.size()];
    if (target == Target::kPayload) return offset + kMiB + random() % (bytes - kMiB);
    return offset + random() % (random() % 8 == 0 ? 4096 : 128 * 1024);
  }

  PageBytes bytes_;
  TempFolder parent_;
  std::uint64_t folders_ = 0;
  Oracle known_;
  FolderImage whole_;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges_;
  VolumeSuperblock volume_{};
};

TEST_P(NvmeStoreFlips, NoWrongByteIsServed) {
  ASSERT_GE(ranges_.size(), 2u);
  const std::uint64_t cases = (GetParam() ? kCasesBehindAController : kCases) * setting("TARDIS_NVME_CAMPAIGN", 1);
  std::mt19937_64 random(setting("TARDIS_CRASH_SEED", 1));
  std::uint64_t refused = 0, served = 0, missed = 0, harmless = 0;
  for (std::uint64_t number = 0; number < cases && !HasFailure(); ++number) {
    FolderImage image = whole_;
    const auto target = static_cast<Target>(random() % static_cast<std::size_t>(Target::kCount));
    const std::uint64_t flips = std::array<std::uint64_t, 4>{1, 2, 16, 200}[random() % 4];
    for (std::uint64_t i = 0; i < flips; ++i) flip_bit_of(*image.raw, choose_byte(target, random) * 8 + random() % 8);
    if (random() % 2 == 0) image.texts.erase("index.checkpoint");  // so that the tables are read
    SCOPED_TRACE("case " + std::to_string(number) + ": " + std::to_string(flips) + " bits of target " +
                 std::to_string(static_cast<std::size_t>(target)));
    const std::string folder = fresh_folder();
    RecordedDrive drive(folder, image, /*record=*/false);
    const auto behind = namespace_on(drive);
    ASSERT_NE(behind, nullptr);
    const DeviceFactory device = on(behind);
    auto store = Store::open(folder, options(), true, device);
    if (!store) {
      // Both superblocks, or a directory that contradicts itself.
      EXPECT_EQ(target, Target::kVolume) << store.error().message;
      EXPECT_GT(flips, 1u) << store.error().message;
      EXPECT_TRUE(store.error().code == Code::kCorrupt || store.error().code == Code::kUnsupportedFormat);
      ++refused;
      std::filesystem::remove_all(folder);
      continue;
    }
    EXPECT_TRUE((*store)->close());
    store->reset();
    auto pages = OpenPages::open(folder, options(), device, bytes_);
    ASSERT_NE(pages, nullptr);
    std::uint64_t here = 0;
    std::vector<PageId> wanted;
    for (const auto& [page, promise] : known_.pages) wanted.push_back(page);
    pages->read_many(wanted, [&](const PageId& page, const std::uint8_t* found) {
      if (found == nullptr) return;
      ++here;
      EXPECT_TRUE(pages->holds(page, found, {0})) << "wrong bytes were served";
    });
    const std::uint64_t lost = known_.pages.size() - here;
    served += here;
    missed += lost;
    harmless += lost == 0;
    if (target == Target::kVolume && flips == 1) {
      EXPECT_EQ(lost, 0u) << "one bit of the volume's own lost something";
    }
    if (target == Target::kPayload) {
      EXPECT_LE(lost, flips);
    }
    // What was lost can be stored again.
    EXPECT_EQ(pages->put({0, 1000, 0}, {0}), 1u);
    EXPECT_NE(pages->get({0, 1000, 0}), nullptr);
    EXPECT_TRUE(pages->store().close());
    pages.reset();
    std::filesystem::remove_all(folder);
  }
  EXPECT_GT(missed, cases) << "too little was damaged to prove anything";
  EXPECT_GT(served, 50 * cases);
  EXPECT_LT(refused, cases / 4);
  std::printf("[ FLIPS    ] %llu cases, %llu pages served, %llu missed, %llu stores refused\n",
              static_cast<unsigned long long>(cases), static_cast<unsigned long long>(served),
              static_cast<unsigned long long>(missed), static_cast<unsigned long long>(refused));
  RecordProperty("refused", std::to_string(refused));
  RecordProperty("pages_served", std::to_string(served));
  RecordProperty("pages_missed", std::to_string(missed));
  RecordProperty("cases_without_loss", std::to_string(harmless));
}

INSTANTIATE_TEST_SUITE_P(Through, NvmeStoreFlips, ::testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "Controller" : "Namespace"); });

}  // namespace
}  // namespace tardis::nvme::testing
