// SPDX-License-Identifier: Apache-2.0
// The power goes after every single write, flush, rename and unlink of a store at work; of what was not flushed then,
// the drive keeps any part. Each such state is opened, checked against what the store had promised, and used on.
//
// TARDIS_CRASH_STATES: states for each workload (default 2500); TARDIS_CRASH_SEED: where the seeds begin (default 1).
// TARDIS_CRASH_LYING_DRIVE=1: the drive does not flush, and the test must fail.
// bench/crash_campaign.py asks for many. A failure names seed and session; the same seed does the same again.
#include "crash_campaign.h"

namespace tardis::testing {
namespace {

class StoreCrashStates : public CrashCampaign {
 protected:
  // Real files.
  DeviceFactory put_image(const FolderImage& image, const std::string& folder) override {
    for (const char* name : kStoreFolders) std::filesystem::create_directories(folder + "/" + name);
    std::vector<char> buffer;
    for (const auto& [path, file] : image.segments) {
      buffer.resize(file.bytes());
      file.read(0, buffer.data(), buffer.size());
      std::ofstream(folder + "/" + path, std::ios::binary)
          .write(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    }
    for (const auto& [path, text] : image.texts) std::ofstream(folder + "/" + path, std::ios::binary) << text;
    return open_block_device;
  }
};

TEST_P(StoreCrashStates, KeepEveryPromise) { campaign(setting("TARDIS_CRASH_STATES", 2500)); }

INSTANTIATE_TEST_SUITE_P(Workloads, StoreCrashStates, ::testing::ValuesIn(kCrashWorkloads),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tardis::testing
