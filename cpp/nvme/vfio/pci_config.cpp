// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/pci_config.h"

#include <cstring>

namespace tardis::nvme {
namespace {

constexpr std::uint16_t kHasList = 1u << 4;  // of the status register
constexpr std::uint8_t kIdExpress = 0x10, kIdMsix = 0x11;
constexpr std::uint32_t kFirstCapability = 0x40;
constexpr int kMostCapabilities = 48;  // 4 bytes each, from 40h to FFh

// PCI Express Base 6.0, 7.5.3: offsets in the capability.
constexpr std::uint32_t kDeviceCapabilities = 0x04, kLinkCapabilities = 0x0c, kLinkStatus = 0x12;
constexpr std::uint32_t kFunctionReset = 1u << 28;

template <class T>
T load(std::span<const std::byte> config, std::uint32_t offset) {
  T value{};
  if (offset + sizeof value <= config.size()) std::memcpy(&value, config.data() + offset, sizeof value);
  return value;
}

std::uint32_t speed_of(std::uint32_t code) {
  constexpr std::uint32_t kSpeeds[] = {0, 2500, 5000, 8000, 16000, 32000, 64000};
  return code < std::size(kSpeeds) ? kSpeeds[code] : 0;
}

}  // namespace

PciCapabilities read_capabilities(std::span<const std::byte> config) {
  PciCapabilities found;
  if ((load<std::uint16_t>(config, kPciStatus) & kHasList) == 0) return found;
  std::uint32_t at = load<std::uint8_t>(config, kPciCapabilities) & ~3u;
  for (int i = 0; i < kMostCapabilities && at >= kFirstCapability && at + 2 <= config.size(); ++i) {
    const auto id = load<std::uint8_t>(config, at);
    if (id == 0xff) break;  // nobody answered
    if (id == kIdExpress) {
      found.express = true;
      found.express_offset = at;
      found.function_reset = (load<std::uint32_t>(config, at + kDeviceCapabilities) & kFunctionReset) != 0;
      const auto most = load<std::uint32_t>(config, at + kLinkCapabilities);
      const auto now = load<std::uint16_t>(config, at + kLinkStatus);
      found.link = {speed_of(now & 0xf), speed_of(most & 0xf), now >> 4 & 0x3fu, most >> 4 & 0x3fu};
    } else if (id == kIdMsix) {
      found.msix_vectors = (load<std::uint16_t>(config, at + 2) & 0x7ffu) + 1;
    }
    at = load<std::uint8_t>(config, at + 1) & ~3u;
  }
  return found;
}

}  // namespace tardis::nvme
