// SPDX-License-Identifier: Apache-2.0
// Tests that run on a machine which has NVMe controllers to give away: a guest of QEMU. What is on their namespaces is
// lost. TARDIS_GUEST_NVME names the controllers: "0000:00:04.0,0000:00:05.0".
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "nvme/vfio/vfio_controller.h"

namespace tardis::nvme::testing {

inline std::vector<std::string> guest_controllers() {
  std::vector<std::string> addresses;
  const char* const text = std::getenv("TARDIS_GUEST_NVME");
  std::istringstream words(text != nullptr ? text : "");
  for (std::string word; std::getline(words, word, ',');) {
    if (!word.empty()) addresses.push_back(word);
  }
  return addresses;
}

// TARDIS_GUEST_WAY: "group" (the default), "device-file", "without-iommu" or "auto".
inline VfioWay guest_way() {
  const char* const text = std::getenv("TARDIS_GUEST_WAY");
  const std::string way = text != nullptr ? text : "group";
  if (way == "device-file") return VfioWay::kDeviceFile;
  if (way == "without-iommu") return VfioWay::kWithoutIommu;
  if (way == "auto") return VfioWay::kAuto;
  if (way != "group") ADD_FAILURE() << "TARDIS_GUEST_WAY: found '" << way << "'";
  return VfioWay::kGroup;
}

// Queues whose memory fits in a huge page each, which a machine without an IOMMU needs.
inline VfioOptions guest_options() {
  VfioOptions options;
  options.way = guest_way();
  options.driver.queues = 2;
  options.driver.queue_entries = 64;
  options.driver.bounce_buffers = 8;
  return options;
}

// A test of the first controller, which it opens itself.
class Guest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto addresses = guest_controllers();
    if (addresses.empty()) GTEST_SKIP() << "TARDIS_GUEST_NVME names no controller";
    address = addresses.front();
  }
  // Null, and a failed test, if it cannot be opened.
  std::shared_ptr<VfioController> open(VfioOptions options = guest_options()) {
    auto opened = VfioController::open(address, std::move(options));
    if (opened) return *opened;
    ADD_FAILURE() << opened.error().message;
    return nullptr;
  }
  static std::shared_ptr<NvmeNamespace> space_of(const std::shared_ptr<VfioController>& controller, std::uint32_t id) {
    auto space = controller->open_namespace(id);
    if (space) return *space;
    ADD_FAILURE() << space.error().message;
    return nullptr;
  }

  std::string address;
};

}  // namespace tardis::nvme::testing
