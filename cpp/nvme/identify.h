// SPDX-License-Identifier: Apache-2.0
// What the driver takes from Identify data, and what it refuses there. Pure functions of bytes that a device made up.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "nvme/spec.h"

namespace tardis::nvme {

// A device that does not do what it says. An empty model matches every model of the vendor.
struct Quirk {
  enum Flag : std::uint32_t { kDoNotUseSgl = 1u << 0 };
  std::uint16_t vendor = 0;
  std::string model;  // the beginning of the model number
  std::uint32_t flags = 0;
};

enum class SglRule : std::uint8_t { kNone, kAnyAlignment, kDword };

struct ControllerInfo {
  std::uint16_t vendor = 0;
  std::string serial, model, firmware;
  std::uint32_t version = 0;  // VS
  std::uint64_t max_transfer_bytes = 0;
  SglRule sgl = SglRule::kNone;
  std::uint32_t sgl_blocks = 1;  // most data block descriptors of a command
  bool volatile_cache = false;
  std::uint32_t shutdown_ms = 0;                       // RTD3E; 0: not said
  std::array<std::uint32_t, 4> retry_delay_ms{};       // by the CRD field of a status
  std::uint32_t power_fail_blocks = 1;                 // AWUPF
  std::uint32_t most_commands = kMaxQueueEntries - 1;  // MAXCMD: of one queue
  std::uint32_t max_queue_entries = 0;                 // CAP.MQES
  std::uint32_t doorbell_stride = 0;                   // CAP.DSTRD
  bool shadow_doorbells = false;                       // OACS: it reads doorbells from memory
  bool operator==(const ControllerInfo&) const = default;
};

struct NamespaceInfo {
  std::uint32_t id = 0;
  std::uint64_t blocks = 0;
  std::uint32_t block_bytes = 0;      // 512 or 4096
  std::uint32_t atomic_blocks = 1;    // an aligned write of so many is whole or absent after a power failure
  std::uint32_t boundary_blocks = 0;  // NOIOB: commands that cross a multiple of it are slow; 0: none
  bool read_only = false;
  bool operator==(const NamespaceInfo&) const = default;
};

// Fails if the driver cannot work with such a controller; the message says why.
Result<ControllerInfo> read_controller(const IdentifyController& data, Capabilities capabilities, std::uint32_t version,
                                       std::span<const Quirk> quirks);
Result<NamespaceInfo> read_namespace(std::uint32_t id, const IdentifyNamespace& data, const ControllerInfo& controller);
// Of a controller with CAP.CSS bit 6: whether the namespace is one of the NVM command set. `descriptors`: its list (CNS
// 03h). Asked first, since Identify data of other command sets is laid out otherwise, or refused.
Status check_command_set(std::uint32_t id, std::span<const std::byte> descriptors, const ControllerInfo& controller);
// Checked before anything is asked of the controller.
Status check_capabilities(Capabilities capabilities);
// The ids of an active namespace list (CNS 02h), as far as it is ascending.
std::vector<std::uint32_t> read_namespace_list(std::span<const std::uint32_t> list);

}  // namespace tardis::nvme
