// SPDX-License-Identifier: Apache-2.0
#include "nvme/identify_json.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <string>

namespace tardis::nvme {
namespace {

constexpr int kKelvinOfZeroCelsius = 273;
constexpr std::uint32_t kFormatsWithoutExtension = 16;  // NLBAF above 15 needs 64 entries (NVM-CS 4.1.5.1)
constexpr std::uint32_t kMostBlockShift = 31;

const char* const kWarnings[] = {"spare capacity below its threshold",
                                 "temperature beyond a threshold",
                                 "reliability degraded",
                                 "media read-only",
                                 "backup of volatile memory failed",
                                 "persistent memory region read-only"};

std::string decimal(const WideCounter& counter) {
  // In steps of what fits: 2^128 has 39 digits.
  std::uint64_t high = counter.high, low = counter.low;
  std::string digits;
  do {
    std::uint32_t words[4] = {static_cast<std::uint32_t>(high >> 32), static_cast<std::uint32_t>(high),
                              static_cast<std::uint32_t>(low >> 32), static_cast<std::uint32_t>(low)};
    std::uint64_t rest = 0;
    for (std::uint32_t& word : words) {
      rest = rest << 32 | word;
      word = static_cast<std::uint32_t>(rest / 10);
      rest %= 10;
    }
    digits.push_back(static_cast<char>('0' + rest));
    high = std::uint64_t{words[0]} << 32 | words[1];
    low = std::uint64_t{words[2]} << 32 | words[3];
  } while (high != 0 || low != 0);
  std::reverse(digits.begin(), digits.end());
  return digits;
}

std::string hex_of(std::span<const std::uint8_t> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : bytes) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 0xf]);
  }
  return text;
}

template <std::size_t N>
std::string text_of(const char (&field)[N]) {
  std::string text;
  for (const char c : field) {
    if (c == 0) break;
    text.push_back(c >= 0x20 && c < 0x7f ? c : '?');
  }
  text.resize(text.find_last_not_of(' ') + 1);
  return text;
}

// Of a format that may say anything.
std::optional<std::uint64_t> block_bytes_of(const LbaFormat& format) {
  if (format.block_shift < 9 || format.block_shift > kMostBlockShift) return std::nullopt;
  return std::uint64_t{1} << format.block_shift;
}

std::optional<int> celsius(std::uint32_t kelvin) {
  if (kelvin == 0) return std::nullopt;
  return static_cast<int>(kelvin) - kKelvinOfZeroCelsius;
}

}  // namespace

void write_controller(JsonWriter& json, const IdentifyController& data, const ControllerInfo& info,
                      Capabilities capabilities) {
  json.field("model", info.model);
  json.field("serial", info.serial);
  json.field("firmware", info.firmware);
  json.field("vendor", info.vendor);
  json.field("subsystem_vendor", data.subsystem_vendor);
  json.field("subsystem", text_of(data.subsystem));
  json.field("controller_id", data.controller_id);
  json.field("version", std::to_string(info.version >> 16) + "." + std::to_string(info.version >> 8 & 0xff) + "." +
                            std::to_string(info.version & 0xff));
  json.field("mdts", data.mdts);
  const bool bounded = info.max_transfer_bytes != std::numeric_limits<std::uint64_t>::max();
  json.field("max_transfer_bytes", bounded ? std::optional(info.max_transfer_bytes) : std::nullopt);
  json.field("sgls", data.sgls);
  const std::uint32_t sgl = data.sgls & kSglMask;
  json.field("sgl", sgl == kSglAnyAlignment ? "any alignment" : sgl == kSglDword ? "dword" : "none");
  json.field("sgl_bit_bucket", (data.sgls & kSglBitBucket) != 0);
  json.field("sgl_blocks", data.sgl_blocks != 0 ? std::optional(data.sgl_blocks) : std::nullopt);
  json.field("volatile_cache", info.volatile_cache);
  json.field("awun_blocks", data.awun + 1u);
  json.field("awupf_blocks", data.awupf + 1u);
  json.field("dataset_management", (data.oncs & kOncsDatasetManagement) != 0);
  json.field("write_zeroes", (data.oncs & kOncsWriteZeroes) != 0);
  json.field("shadow_doorbells", info.shadow_doorbells);
  json.field("namespaces_at_most", data.namespaces);
  json.field("max_queue_entries", capabilities.max_queue_entries());
  json.field("max_commands", data.max_commands != 0 ? std::optional(data.max_commands) : std::nullopt);
  json.field("doorbell_stride_bytes", 4u << capabilities.doorbell_stride());
  json.field("ready_timeout_ms", capabilities.timeout_ms());
  json.field("shutdown_us", data.rtd3_entry_us != 0 ? std::optional(data.rtd3_entry_us) : std::nullopt);
}

void write_namespace(JsonWriter& json, std::uint32_t id, const IdentifyNamespace& data,
                     const ControllerInfo& controller) {
  const std::uint32_t most =
      data.formats < kFormatsWithoutExtension ? kFormatsWithoutExtension : std::size(data.format_table);
  const std::uint32_t formats = std::min<std::uint32_t>(data.formats + 1u, most);
  const std::uint32_t now = data.format_index();
  const auto block_bytes = now < formats ? block_bytes_of(data.lba_format()) : std::nullopt;
  json.field("id", id);
  json.field("blocks", data.size_blocks);
  json.field("capacity_blocks", data.capacity_blocks);
  json.field("used_blocks", data.used_blocks);
  json.field("block_bytes", block_bytes);
  const bool sized = block_bytes && data.size_blocks <= std::numeric_limits<std::uint64_t>::max() / *block_bytes;
  json.field("bytes", sized ? std::optional(data.size_blocks * *block_bytes) : std::nullopt);
  json.field("metadata_bytes", now < formats ? std::optional(data.lba_format().metadata_bytes) : std::nullopt);
  json.field("protection_type", data.protection & 7u);
  json.field("write_protected", (data.attributes & kNsattrWriteProtected) != 0);
  json.field("optimal_boundary_blocks", data.optimal_boundary);
  json.field("nguid", hex_of(data.nguid));
  json.field("eui64", hex_of(data.eui64));
  json.begin_array("formats");
  for (std::uint32_t i = 0; i < formats; ++i) {
    const LbaFormat& format = data.format_table[i];
    json.begin_object();
    json.field("index", i);
    json.field("block_bytes", block_bytes_of(format));
    json.field("metadata_bytes", format.metadata_bytes);
    json.field("performance", format.performance & 3u);  // 0 is best
    json.field("in_use", i == now);
    json.end_object();
  }
  json.end_array();
  const auto info = read_namespace(id, data, controller);
  json.field("power_fail_bytes",
             info ? std::optional(std::uint64_t{info->atomic_blocks} * info->block_bytes) : std::nullopt);
  json.field("refusal", info ? std::string() : info.error().message);
}

void write_health(JsonWriter& json, const HealthLog& log) {
  const auto counter = [&](const char* name, const WideCounter& value) {
    json.field(name, JsonNumber{decimal(value)});
  };
  json.field("critical_warning", log.critical_warning);
  json.begin_array("warnings");
  for (std::size_t bit = 0; bit < 8; ++bit) {
    if ((log.critical_warning >> bit & 1) == 0) continue;
    json.value(bit < std::size(kWarnings) ? std::string(kWarnings[bit]) : "reserved bit " + std::to_string(bit));
  }
  json.end_array();
  json.field("temperature_celsius", celsius(log.temperature[0] | log.temperature[1] << 8));
  json.begin_array("sensors_celsius");
  for (const std::uint16_t sensor : log.sensors) {
    if (sensor != 0) json.value(celsius(sensor));
  }
  json.end_array();
  json.field("spare_percent", log.spare_percent);
  json.field("spare_threshold_percent", log.spare_threshold_percent);
  json.field("used_percent", log.used_percent);
  json.field("unit_bytes", kHealthUnitBytes);
  counter("units_read", log.units_read);
  counter("units_written", log.units_written);
  counter("read_commands", log.read_commands);
  counter("write_commands", log.write_commands);
  counter("busy_minutes", log.busy_minutes);
  counter("power_cycles", log.power_cycles);
  counter("power_on_hours", log.power_on_hours);
  counter("unsafe_shutdowns", log.unsafe_shutdowns);
  counter("media_errors", log.media_errors);
  counter("error_log_entries", log.error_log_entries);
  json.field("warning_minutes", log.warning_minutes);
  json.field("critical_minutes", log.critical_minutes);
  json.field("light_throttles", log.throttle_count[0]);
  json.field("heavy_throttles", log.throttle_count[1]);
  json.field("light_throttle_seconds", log.throttle_seconds[0]);
  json.field("heavy_throttle_seconds", log.throttle_seconds[1]);
}

}  // namespace tardis::nvme
