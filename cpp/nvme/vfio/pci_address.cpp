// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/pci_address.h"

#include <charconv>
#include <cstdio>
#include <optional>

namespace tardis::nvme {
namespace {

constexpr std::uint32_t kMostDevice = 0x1f, kMostFunction = 7;

// All of `text`, in at most `digits` hexadecimal digits.
std::optional<std::uint32_t> hex(std::string_view text, std::size_t digits) {
  std::uint32_t value = 0;
  if (text.empty() || text.size() > digits) return std::nullopt;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

Result<PciAddress> PciAddress::parse(std::string_view text) {
  const auto refused = [&] {
    return Error{Code::kInvalidArgument,
                 "PCI address: expected one like 0000:81:00.0 (domain:bus:device.function, hexadecimal), found '" +
                     std::string(text) + "'; lspci -D lists them"};
  };
  std::string_view rest = text;
  const std::size_t dot = rest.rfind('.');
  if (dot == std::string_view::npos) return refused();
  const auto function = hex(rest.substr(dot + 1), 1);
  rest = rest.substr(0, dot);
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string_view::npos) return refused();
  const auto device = hex(rest.substr(colon + 1), 2);
  rest = rest.substr(0, colon);
  const std::size_t first = rest.rfind(':');
  const auto domain = first == std::string_view::npos ? std::optional<std::uint32_t>(0) : hex(rest.substr(0, first), 8);
  const auto bus = hex(first == std::string_view::npos ? rest : rest.substr(first + 1), 2);
  if (!domain || !bus || !device || *device > kMostDevice || !function || *function > kMostFunction) return refused();
  return PciAddress{*domain, static_cast<std::uint8_t>(*bus), static_cast<std::uint8_t>(*device),
                    static_cast<std::uint8_t>(*function)};
}

std::string PciAddress::text() const {
  char text[24];
  std::snprintf(text, sizeof text, "%04x:%02x:%02x.%x", domain, bus, device, function);
  return text;
}

}  // namespace tardis::nvme
