// SPDX-License-Identifier: Apache-2.0
// The log page "SMART / Health Information" (Base 5.1.12.1.3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace tardis::nvme {

struct WideCounter {  // 128 bits, little-endian
  std::uint64_t low, high;
};

struct HealthLog {
  std::uint8_t critical_warning;                                      // 0, CriticalWarning
  std::uint8_t temperature[2];                                        // 1: composite, Kelvin, little-endian
  std::uint8_t spare_percent, spare_threshold_percent, used_percent;  // 3; used may be above 100
  std::uint8_t group_warning;                                         // 6
  std::uint8_t reserved7[25];
  WideCounter units_read, units_written;  // 32: of 512,000 bytes, rounded up
  WideCounter read_commands, write_commands;
  WideCounter busy_minutes;  // 96
  WideCounter power_cycles, power_on_hours;
  WideCounter unsafe_shutdowns, media_errors, error_log_entries;  // 144
  std::uint32_t warning_minutes, critical_minutes;                // 192: above WCTEMP and CCTEMP
  std::uint16_t sensors[8];                                       // 200: Kelvin; 0: there is none
  std::uint32_t throttle_count[2];                                // 216: light, heavy
  std::uint32_t throttle_seconds[2];
  std::uint8_t reserved232[280];
};
static_assert(sizeof(HealthLog) == 512 && std::is_trivially_copyable_v<HealthLog>);
static_assert(offsetof(HealthLog, spare_percent) == 3 && offsetof(HealthLog, units_read) == 32 &&
              offsetof(HealthLog, busy_minutes) == 96 && offsetof(HealthLog, unsafe_shutdowns) == 144 &&
              offsetof(HealthLog, warning_minutes) == 192 && offsetof(HealthLog, sensors) == 200 &&
              offsetof(HealthLog, throttle_count) == 216);

inline constexpr std::uint64_t kHealthUnitBytes = 512'000;

}  // namespace tardis::nvme
