// SPDX-License-Identifier: Apache-2.0
// Whether a store kept the promises of a torture's log.
#pragma once

#include <unistd.h>

#include "base/clock.h"
#include "torture_store.h"

namespace tardis::testing {

inline int check_torture(const std::string& folder, const std::string& engine, const Mode& mode, std::uint64_t seed,
                         const std::string& log) {
  const Expectations expected = read_log(log);
  const std::uint64_t started = monotonic_ns();
  OpenStore open(folder, engine, mode, seed);
  const double recovery_ms = static_cast<double>(monotonic_ns() - started) / 1e6;
  std::uint64_t found = 0, wrong = 0, flushed = 0, missing = 0, resurrected = 0;
  for (const auto& [key, chain] : expected.chains) {
    const auto [space, id] = key;
    const TortureLayout& layout = mode.layouts[space];
    PageMemory memory(layout.parts, layout.regions, 1);
    for (std::uint32_t i = 0; i < chain.attempted.size(); ++i) {
      if (!chain.attempted[i]) continue;
      const Hash256 hash = page_key(id, i);
      std::uint8_t ok = 0;
      char* error = nullptr;
      const tardis_code code = tardis_get(open.store, open.spaces[space], hash.data(), memory.pieces(), 1, &ok, &error);
      if (code != TARDIS_OK) die(std::string("get: ") + error, 1);
      found += ok;
      wrong += ok != 0 && !memory.holds(0, page_seed(space, hash));
      if (!mode.evict && i < chain.flushed.size() && chain.flushed[i]) {
        ++flushed;
        missing += ok == 0;
      }
    }
  }
  for (const auto& [key, attempted] : expected.cleared) {
    const auto again = expected.chains.find(key);  // stored anew after the clear
    for (std::uint32_t i = 0; i < attempted.size(); ++i) {
      if (!attempted[i]) continue;
      if (again != expected.chains.end() && i < again->second.attempted.size() && again->second.attempted[i]) continue;
      const Hash256 hash = page_key(key.second, i);
      std::size_t run = 0;
      (void)tardis_lookup(open.store, open.spaces[key.first], hash.data(), 1, &run);
      resurrected += run;
    }
  }
  tardis_stats s;
  const auto conserved = [&] {
    (void)tardis_get_stats(open.store, &s);
    return s.segments_unreadable == 0 &&
           s.slots_total == s.slots_live + s.slots_free + s.slots_quarantined + s.slots_writing && s.slots_writing == 0;
  };
  // The kernel ends the rings of a killed process a moment after it, and with them its lock. Until then what it held
  // counts as being written; whoever opens the store later takes it over.
  for (int again = 0; again < 40 && !conserved(); ++again) {
    ::usleep(50'000);
    open.close();
    open.open();
  }
  const bool all_slots = conserved();
  tardis_verify_report report{};
  if (!mode.dirty) {
    open.close();
    char* error = nullptr;
    char* problems = nullptr;
    if (tardis_verify(folder.c_str(), mode.repair, nullptr, nullptr, &report, &problems, &error) != TARDIS_OK) {
      die(std::string("verify: ") + error, 1);
    }
    if (report.bad_headers + report.bad_payloads > 0) std::fprintf(stderr, "verify: %s\n", problems);
    tardis_free(problems);
  }
  const std::uint64_t bad = report.bad_headers + report.bad_payloads + report.quarantined + report.unreadable_segments;
  std::printf(
      "{\"found\": %lu, \"wrong\": %lu, \"flushed\": %lu, \"missing\": %lu, \"resurrected\": %lu, \"slots\": %lu, "
      "\"conserved\": %s, \"quarantined\": %lu, \"unreadable\": %lu, \"verify_bad\": %lu, \"torn\": %lu, \"verified\": "
      "%lu, "
      "\"rejected\": %lu, \"recovery_ms\": %.3f}\n",
      found, wrong, flushed, missing, resurrected, s.slots_total, all_slots ? "true" : "false", s.slots_quarantined,
      s.segments_unreadable, bad, s.get_pages_torn, s.recovered_verified, s.recovered_rejected, recovery_ms);
  std::fflush(stdout);
  const bool kept = wrong == 0 && missing == 0 && resurrected == 0 && all_slots && s.slots_quarantined == 0 &&
                    s.segments_unreadable == 0 && bad == 0;
  if (mode.dirty) std::_Exit(kept ? 0 : 1);
  return kept ? 0 : 1;
}

}  // namespace tardis::testing
