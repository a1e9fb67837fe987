// SPDX-License-Identifier: Apache-2.0
// The slot that a controller is in.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "base/unique_fd.h"

namespace tardis::nvme::testing {

inline std::string sysfs(const std::string& address) { return "/sys/bus/pci/devices/" + address; }

inline bool within(int seconds, const std::function<bool()>& condition) {
  for (int i = 0; i < seconds * 100; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return condition();
}

// The port above a device, and where its PCI Express capability begins.
struct Port {
  UniqueFd config;
  std::uint32_t capability = 0;
};
inline Port port_above(const std::string& address) {
  const std::string device = std::filesystem::canonical(sysfs(address));
  Port port;
  port.config.reset(::open((std::filesystem::path(device).parent_path() / "config").c_str(), O_RDWR | O_CLOEXEC));
  std::uint8_t at = 0;
  if (::pread(port.config.get(), &at, 1, 0x34) != 1) return port;
  for (int i = 0; i < 48 && at != 0; ++i) {
    std::uint8_t head[2] = {};
    if (::pread(port.config.get(), head, 2, at) != 2) break;
    if (head[0] == 0x10) port.capability = at;
    at = head[1];
  }
  return port;
}

// Slot Control: Power Indicator off and Power Controller off. QEMU takes the device out at once.
inline void switch_slot_off(const std::string& address) {
  const Port port = port_above(address);
  ASSERT_NE(port.capability, 0u);
  const auto offset = static_cast<off_t>(port.capability + 0x18);
  std::uint16_t control = 0;
  ASSERT_EQ(::pread(port.config.get(), &control, 2, offset), 2);
  control |= 0x0300 | 0x0400;
  ASSERT_EQ(::pwrite(port.config.get(), &control, 2, offset), 2);
}

}  // namespace tardis::nvme::testing
