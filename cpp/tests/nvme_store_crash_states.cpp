// SPDX-License-Identifier: Apache-2.0
// The crash states of store_crash_states.cpp with the segments on a raw namespace: the power goes after every write and
// flush of the namespace and every change of a name in the store's folder. Of what was not flushed the namespace keeps
// any sectors, and below everything lies what an older store of the same shape left. The same once more through a
// driver and a software controller, so that the power also goes between the commands of one write, and what the store
// takes for flushed is what a Flush command brought to the medium.
//
// TARDIS_NVME_CAMPAIGN multiplies the states (default 1); the other settings are those of store_crash_states.cpp.
#include "crash_campaign.h"
#include "nvme_support_recorded_medium.h"
#include "nvme_support_soft_stack.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

constexpr std::uint64_t kStates = 800;  // for each workload
constexpr std::uint64_t kStatesBehindAController = 100;
constexpr int kStepsBehindAController = 8;
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
    return [&drive, this](const std::string& folder, const BlockDeviceOptions&,
                          int) -> Result<std::unique_ptr<BlockDevice>> {
      const auto device = namespace_on(drive);
      if (device == nullptr) return Error{Code::kInternal, "no namespace"};
      return NvmeDevice::open(device, folder, {});
    };
  }
  virtual std::shared_ptr<RawNamespace> namespace_on(RecordedDrive& drive) {
    return std::make_shared<RecordedNamespace>(drive, block_bytes());
  }
  DeviceFactory put_image(const FolderImage& image, const std::string& folder) override {
    drives_.push_back(std::make_unique<RecordedDrive>(folder, image, /*record=*/false));
    return device(*drives_.back());
  }
  // Both block sizes, by workload.
  std::uint32_t block_bytes() const { return GetParam().chains % 2 == 0 ? 512 : 4096; }

 private:
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

class NvmeStoreCrashStatesOnSoft : public NvmeStoreCrashStates {
 protected:
  int steps() const override { return kStepsBehindAController; }
  // A new controller and driver for each opening.
  std::shared_ptr<RawNamespace> namespace_on(RecordedDrive& drive) override {
    const auto stack = SoftStack::make(std::make_shared<RecordedMedium>(drive), options());
    return stack == nullptr ? nullptr : SoftStack::disk_of(stack);
  }

 private:
  // Commands of 64 KiB at most, or of 1 MiB; with and without SGLs.
  SoftStackOptions options() {
    SoftStackOptions options = small_stack(block_bytes());
    const std::uint64_t choice = mix(GetParam().chains * 100 + GetParam().chain_pages * 10 + GetParam().two_paths);
    options.soft.mdts = choice % 2 == 0 ? 4 : 8;
    options.soft.sgl = choice / 2 % 2 == 0 ? kSglNone : kSglAnyAlignment;
    return options;
  }
};

TEST_P(NvmeStoreCrashStatesOnSoft, KeepEveryPromise) {
  campaign(setting("TARDIS_CRASH_STATES", kStatesBehindAController) * setting("TARDIS_NVME_CAMPAIGN", 1));
}

// One process uses a raw namespace at a time.
std::vector<Workload> of_one_user() {
  std::vector<Workload> workloads(std::begin(kCrashWorkloads), std::end(kCrashWorkloads));
  for (Workload& workload : workloads) workload.users = 1;
  return workloads;
}

INSTANTIATE_TEST_SUITE_P(Workloads, NvmeStoreCrashStates, ::testing::ValuesIn(of_one_user()),
                         [](const auto& info) { return std::string(info.param.name); });
// Each opening brings up a controller, so a few of them must do; the campaign of soak has all.
std::vector<Workload> behind_a_controller() {
  std::vector<Workload> workloads = of_one_user();
  if (setting("TARDIS_NVME_CAMPAIGN", 1) > 1) return workloads;
  std::erase_if(workloads, [](const Workload& workload) {
    const std::string_view name = workload.name;
    return name != "Keep" && name != "Delete" && name != "Reclass" && name != "TwoPathsStriped";
  });
  return workloads;
}
INSTANTIATE_TEST_SUITE_P(Workloads, NvmeStoreCrashStatesOnSoft, ::testing::ValuesIn(behind_a_controller()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tardis::nvme::testing
