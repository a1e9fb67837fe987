// SPDX-License-Identifier: Apache-2.0
#include "nvme/identify.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>

namespace tardis::nvme {
namespace {

constexpr std::uint32_t kUnlimited = ~std::uint32_t{0};
constexpr std::uint32_t kMostShutdownMs = 60'000;  // RTD3E can say more than an hour

Error unsupported(std::string message) { return {Code::kUnsupportedFormat, std::move(message)}; }

// Identify strings are padded with spaces, and may hold anything in a broken device.
template <std::size_t N>
std::string text_of(const char (&field)[N]) {
  std::string text;
  for (const char c : field) text.push_back(c >= 0x20 && c < 0x7f ? c : ' ');
  text.resize(text.find_last_not_of(' ') + 1);
  return text;
}

std::string who_of(std::uint32_t id, const ControllerInfo& controller) {
  return "NVMe namespace " + std::to_string(id) + " of '" + controller.model + "'";
}

// What the first descriptor of that type says, as far as the list can be believed.
std::optional<std::uint8_t> command_set_in(std::span<const std::byte> descriptors) {
  NamespaceDescriptor head{};
  for (std::size_t at = 0; at + sizeof head <= descriptors.size(); at += sizeof head + head.length) {
    std::memcpy(&head, descriptors.data() + at, sizeof head);
    if (head.length == 0) break;
    if (head.type != kDescriptorCommandSet) continue;
    if (head.length != 1 || at + sizeof head == descriptors.size()) break;
    return std::to_integer<std::uint8_t>(descriptors[at + sizeof head]);
  }
  return std::nullopt;
}

std::string command_set_text(std::uint8_t set) {
  switch (set) {
    case kCommandSetKeyValue:
      return "the key value command set";
    case kCommandSetZoned:
      return "the zoned namespace command set";
    case kCommandSetLocalMemory:
      return "the subsystem local memory command set";
    case kCommandSetPrograms:
      return "the computational programs command set";
    default:
      return "command set " + std::to_string(set);
  }
}

bool applies(const Quirk& quirk, const ControllerInfo& info) {
  return quirk.vendor == info.vendor && info.model.starts_with(quirk.model);
}

}  // namespace

Status check_capabilities(Capabilities capabilities) {
  if (!capabilities.nvm_commands()) {
    return unsupported("NVMe controller: expected the NVM command set (CAP.CSS bit 0), found none; this is no disk");
  }
  const std::uint32_t least = capabilities.min_page_shift(), most = capabilities.max_page_shift();
  if (least > most) {
    return unsupported("NVMe controller: expected CAP.MPSMIN <= CAP.MPSMAX, found pages of 2^" + std::to_string(least) +
                       " to 2^" + std::to_string(most) + " bytes");
  }
  if (least > std::uint32_t{std::countr_zero(kPageBytes)}) {
    return unsupported("NVMe controller: expected support of 4096-byte memory pages, found 2^" + std::to_string(least) +
                       " bytes at least (CAP.MPSMIN); this driver has no larger pages");
  }
  if (capabilities.max_queue_entries() < kMinQueueEntries) {
    return unsupported("NVMe controller: expected queues of at least 2 entries, found CAP.MQES = 0");
  }
  return {};
}

Result<ControllerInfo> read_controller(const IdentifyController& data, Capabilities capabilities, std::uint32_t version,
                                       std::span<const Quirk> quirks) {
  // As well as before bring-up: registers that change are not to be believed.
  if (auto fits = check_capabilities(capabilities); !fits) return fits.error();
  ControllerInfo info;
  info.vendor = data.vendor;
  info.serial = text_of(data.serial);
  info.model = text_of(data.model);
  info.firmware = text_of(data.firmware);
  info.version = version;
  info.max_queue_entries = capabilities.max_queue_entries();
  info.doorbell_stride = capabilities.doorbell_stride();

  const std::uint32_t shift = data.mdts + capabilities.min_page_shift();
  info.max_transfer_bytes =
      data.mdts == 0 || shift >= 63 ? std::numeric_limits<std::uint64_t>::max() : std::uint64_t{1} << shift;

  const auto range_holds = [](std::uint8_t sizes, std::uint32_t size) {
    return (sizes & 0xfu) <= size && size <= (sizes >> 4 & 0xfu);
  };
  if (!range_holds(data.sqes, kSubmissionEntryShift) || !range_holds(data.cqes, kCompletionEntryShift)) {
    return unsupported("NVMe controller '" + info.model +
                       "': expected queue entries of 64 and 16 bytes, found SQES/CQES that exclude them; "
                       "is it the I/O controller of the drive?");
  }

  switch (data.sgls & kSglMask) {
    case kSglAnyAlignment:
      info.sgl = SglRule::kAnyAlignment;
      break;
    case kSglDword:
      info.sgl = SglRule::kDword;
      break;
    default:  // none, or a value that is reserved
      info.sgl = SglRule::kNone;
  }
  info.sgl_blocks = data.sgl_blocks != 0 ? data.sgl_blocks : kUnlimited;
  for (const Quirk& quirk : quirks) {
    if (applies(quirk, info) && (quirk.flags & Quirk::kDoNotUseSgl) != 0) info.sgl = SglRule::kNone;
  }

  info.shadow_doorbells = (data.oacs & kOacsDoorbellBuffer) != 0;
  info.volatile_cache = (data.volatile_cache & 1) != 0;
  info.shutdown_ms = std::min(data.rtd3_entry_us / 1000 + (data.rtd3_entry_us % 1000 != 0), kMostShutdownMs);
  for (std::size_t i = 0; i < 3; ++i) info.retry_delay_ms[i + 1] = data.retry_delay_100ms[i] * 100u;
  info.power_fail_blocks = data.awupf + 1u;
  if (data.max_commands != 0) info.most_commands = data.max_commands;
  return info;
}

Status check_command_set(std::uint32_t id, std::span<const std::byte> descriptors, const ControllerInfo& controller) {
  const auto set = command_set_in(descriptors);
  if (set == kCommandSetNvm) return {};
  return unsupported(who_of(id, controller) + ": expected the NVM command set, found " +
                     (set ? command_set_text(*set) + "; this driver has no commands of it"
                          : std::string("no descriptor that says which it is; this controller has several")));
}

Result<NamespaceInfo> read_namespace(std::uint32_t id, const IdentifyNamespace& data,
                                     const ControllerInfo& controller) {
  const std::string who = who_of(id, controller);
  if (data.size_blocks == 0) return unsupported(who + ": expected a size, found 0 blocks; it is not attached");
  if (data.format_index() > data.formats) {
    return unsupported(who + ": expected a format of 0 to " + std::to_string(data.formats) + ", found " +
                       std::to_string(data.format_index()));
  }
  const LbaFormat& format = data.lba_format();
  if (format.metadata_bytes != 0) {
    return unsupported(who + ": expected a format without metadata, found " + std::to_string(format.metadata_bytes) +
                       " bytes per block; format the namespace (nvme format) with ms=0");
  }
  if ((data.protection & 7) != 0) {
    return unsupported(who + ": expected no protection information, found type " + std::to_string(data.protection & 7) +
                       "; format the namespace (nvme format) with pi=0");
  }
  if (format.block_shift != 9 && format.block_shift != 12) {
    return unsupported(who + ": expected blocks of 512 or 4096 bytes, found 2^" + std::to_string(format.block_shift) +
                       "; format the namespace (nvme format) with such a size");
  }
  if (data.size_blocks > std::numeric_limits<std::uint64_t>::max() >> format.block_shift) {
    return unsupported(who + ": expected a size below 2^64 bytes, found " + std::to_string(data.size_blocks) +
                       " blocks");
  }

  NamespaceInfo info;
  info.id = id;
  info.blocks = data.size_blocks;
  info.block_bytes = 1u << format.block_shift;
  info.boundary_blocks = data.optimal_boundary;
  info.read_only = (data.attributes & 1) != 0;
  const bool own_atomics = (data.nsfeat & 2) != 0;
  std::uint32_t atomic = own_atomics ? data.nawupf + 1u : controller.power_fail_blocks;
  if (own_atomics && data.nabspf != 0) {
    // A write over an atomic boundary is only whole on each side of it. With boundaries at an offset no aligned write
    // can be relied on but one of a single block.
    atomic = data.nabo != 0 ? 1 : std::min(atomic, std::uint32_t{1} << std::countr_zero(data.nabspf + 1u));
  }
  info.atomic_blocks = std::bit_floor(atomic);
  return info;
}

std::vector<std::uint32_t> read_namespace_list(std::span<const std::uint32_t> list) {
  std::vector<std::uint32_t> ids;
  for (const std::uint32_t id : list) {
    if (id == 0 || id >= kAllNamespaces - 1 || (!ids.empty() && id <= ids.back())) break;
    ids.push_back(id);
  }
  return ids;
}

}  // namespace tardis::nvme
