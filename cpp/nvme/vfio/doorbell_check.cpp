// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/doorbell_check.h"

#include <array>
#include <cerrno>
#include <cstdio>

#include "nvme/spec.h"

namespace tardis::nvme {
namespace {

constexpr std::array<std::uint32_t, 3> kConstant{kRegCap, kRegCap + 4, kRegVs};

std::string hex(std::uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

}  // namespace

Result<IoMemoryVerdict> check_doorbells(RegisterWindow& window, const IoMemoryReader& reader) {
  auto* const doorbells = reinterpret_cast<volatile std::byte*>(window.doorbells());
  auto* const registers = const_cast<std::byte*>(doorbells - kRegDoorbells);
  std::array<std::uint32_t, kConstant.size()> expected{}, found{};
  for (std::size_t i = 0; i < kConstant.size(); ++i) {
    expected[i] = window.read32(kConstant[i]);
    found[i] = ~expected[i];
  }
  if (expected[0] == kRegisterGone && expected[2] == kRegisterGone) {
    return Error{Code::kIo, "NVMe controller: expected registers, found all ones; is the drive plugged in?", ENODEV};
  }
  IoMemoryVerdict verdict;
  verdict.reader_error = reader(registers, kPageBytes, kConstant.data(), found.data(), kConstant.size());
  if (verdict.reader_error != 0) {
    verdict.found = "the page of registers cannot be mapped or read";
    return verdict;
  }
  for (std::size_t i = 0; i < kConstant.size(); ++i) {
    if (found[i] == expected[i]) continue;
    verdict.found = "register " + hex(kConstant[i]) + ": expected " + hex(expected[i]) + ", found " + hex(found[i]);
    return verdict;
  }
  const std::uint32_t first = 0;
  std::uint32_t value = 0;
  verdict.reader_error = reader(const_cast<std::byte*>(doorbells), kPageBytes, &first, &value, 1);
  if (verdict.reader_error != 0) {
    verdict.found = "the page of doorbells cannot be mapped or read";
    return verdict;
  }
  verdict.reached = true;
  verdict.found = "CAP " + hex(expected[1]) + hex(expected[0]) + " and VS " + hex(expected[2]) +
                  " were read as by the host, and a doorbell was read";
  return verdict;
}

}  // namespace tardis::nvme
