// SPDX-License-Identifier: Apache-2.0
// The crash states of store_crash_states.cpp with the segments on a raw namespace: the power goes after every write and
// flush of the namespace and every change of a name in the store's folder. Of what was not flushed the namespace keeps
// any sectors, and below everything lies what an older store of the same shape left.
//
// TARDIS_NVME_CAMPAIGN multiplies the states (default 1); the other settings are those of store_crash_states.cpp.
#include "crash_campaign.h"
#include "nvme_support_recorded_namespace.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

constexpr std::uint64_t kStates = 800;  // for each workload
constexpr std::uint32_t kStaleVersion = 1000;

class NvmeStoreCrashStates : public CrashCampaign {
 protected:
  FolderImage first_image() override {
    if (!stale_) stale_ = stale();
    FolderImage image;
    image.raw = *stale_;
    return image;
  }
  DeviceFactory device(RecordedDrive& drive) override {
    drive.find_ranges_with(ranges_on);
    return [&drive, this](const std::string& folder, const BlockDeviceOptions&, int) {
      return NvmeDevice::open(std::make_shared<RecordedNamespace>(drive, block_bytes()), folder, {});
    };
  }
  DeviceFactory put_image(const FolderImage& image, const std::string& folder) override {
    drives_.push_back(std::make_unique<RecordedDrive>(folder, image, /*record=*/false));
    return device(*drives_.back());
  }

 private:
  // Both block sizes, by workload.
  std::uint32_t block_bytes() const { return GetParam().chains % 2 == 0 ? 512 : 4096; }

  // A namespace full of pages that this test's stores would take for their own.
  BlockFile stale() {
    const Workload& workload = GetParam();
    auto memory = std::make_shared<MemoryNamespace>((workload.segments * 4 + 8) * kMiB, block_bytes());
    TempFolder folder(memory_parent());
    PageBytes bytes(workload.layouts);
    auto pages = OpenPages::open(folder.path(), options_of(workload, folder.path()), on(memory), bytes);
    if (pages == nullptr) return memory->contents;
    for (std::uint64_t index = 0; index < workload.chain_pages; ++index) {
      for (std::uint64_t chain = 0; chain < workload.chains; ++chain) {
        for (std::size_t space = 0; space < 2; ++space) (void)pages->put({space, chain, index}, {kStaleVersion});
      }
    }
    EXPECT_TRUE(pages->store().close());
    wipe_ends(memory->contents);
    return memory->contents;
  }

  std::optional<BlockFile> stale_;
  std::vector<std::unique_ptr<RecordedDrive>> drives_;
};

TEST_P(NvmeStoreCrashStates, KeepEveryPromise) {
  campaign(setting("TARDIS_CRASH_STATES", kStates) * setting("TARDIS_NVME_CAMPAIGN", 1));
}

// One process uses a raw namespace at a time.
std::vector<Workload> of_one_user() {
  std::vector<Workload> workloads(std::begin(kCrashWorkloads), std::end(kCrashWorkloads));
  for (Workload& workload : workloads) workload.users = 1;
  return workloads;
}

INSTANTIATE_TEST_SUITE_P(Workloads, NvmeStoreCrashStates, ::testing::ValuesIn(of_one_user()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tardis::nvme::testing
