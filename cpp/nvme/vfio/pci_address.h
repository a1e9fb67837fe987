// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tardis::nvme {

// Where a PCI function is: "0000:81:00.0".
struct PciAddress {
  std::uint32_t domain = 0;
  std::uint8_t bus = 0, device = 0, function = 0;

  // With or without the domain, in hexadecimal.
  static Result<PciAddress> parse(std::string_view text);
  std::string text() const;
  auto operator<=>(const PciAddress&) const = default;
};

}  // namespace tardis::nvme
