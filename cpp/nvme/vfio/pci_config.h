// SPDX-License-Identifier: Apache-2.0
// What the configuration space of a PCI function says. Pure functions of bytes that a device made up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace tardis::nvme {

inline constexpr std::uint32_t kPciConfigBytes = 256;  // in which all capabilities lie that are read here

enum PciConfigOffset : std::uint32_t {
  kPciVendor = 0x00,
  kPciCommand = 0x04,
  kPciStatus = 0x06,
  kPciCapabilities = 0x34
};
enum PciCommandBits : std::uint16_t { kPciCommandMemory = 1u << 1, kPciCommandMaster = 1u << 2 };

struct PcieLink {
  std::uint32_t speed_mts = 0, most_speed_mts = 0;  // MT/s of a lane; 0: not known
  std::uint32_t lanes = 0, most_lanes = 0;
  bool operator==(const PcieLink&) const = default;
};

struct PciCapabilities {
  bool express = false;
  bool function_reset = false;       // FLR
  std::uint32_t express_offset = 0;  // of the PCI Express capability
  PcieLink link;
  std::uint32_t msix_vectors = 0;
};

// `config`: as much of the space as can be read, from its beginning. A list that is broken ends there.
PciCapabilities read_capabilities(std::span<const std::byte> config);

}  // namespace tardis::nvme
