// SPDX-License-Identifier: Apache-2.0
// What a software controller is made of, and what it tells its clients about itself.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nvme/soft/faults.h"
#include "nvme/soft/medium.h"
#include "nvme/spec.h"

namespace tardis::nvme {

struct SoftNamespace {
  std::shared_ptr<Medium> medium;      // none: an inactive namespace id
  std::uint32_t block_shift = 12;      // 9 or 12
  std::uint64_t blocks = 0;            // NSZE; 0: as many as the medium holds
  std::uint16_t optimal_boundary = 0;  // NOIOB, in blocks
  // CSI, which descriptors say and CAP.CSS bit 6 announces; unset: NVM, and nothing is said. The controller executes
  // NVM commands only.
  std::optional<std::uint8_t> command_set = std::nullopt;
};

struct SoftControllerOptions {
  std::vector<SoftNamespace> namespaces;  // NSID 1, 2, ...

  // What the controller reports.
  std::string serial = "TARDIS-SOFT-1";
  std::uint32_t max_queue_entries = 1024;  // MQES + 1
  std::uint32_t queue_pairs = 16;          // I/O queues granted: NSQA + 1 and NCQA + 1
  std::uint32_t doorbell_stride = 0;       // DSTRD, an exponent
  std::uint32_t max_page_shift = 16;       // MPSMAX; MPSMIN is 4 KiB
  std::uint32_t timeout_ms = 7500;         // CAP.TO, in steps of 500
  std::uint8_t mdts = 8;                   // 2^n pages of 4 KiB; 0: no limit
  SglSupport sgl = kSglAnyAlignment;       // kSglNone, kSglAnyAlignment or kSglDword
  bool sgl_longer_than_data = false;       // SGLS bit 18
  bool sgl_bit_bucket = false;             // SGLS bit 16
  std::uint8_t sgl_blocks = 0;             // MSDBD, checked; 0: not said
  std::optional<bool> volatile_cache;      // VWC; unset: if a medium needs a flush
  std::uint16_t atomic_blocks = 0;         // AWUPF and AWUN, 0-based
  std::uint8_t abort_limit = 3;            // ACL, 0-based
  std::uint8_t async_event_limit = 3;      // AERL, 0-based
  std::uint32_t shutdown_us = 1'000'000;   // RTD3E

  // How it behaves.
  bool aborts = true;                        // false: Abort never aborts, as in QEMU
  std::chrono::milliseconds ready_delay{0};  // from CC.EN to CSTS.RDY, both ways
  std::shared_ptr<FaultPlan> faults;         // none: nothing is injected
  std::size_t violations_kept = 256;         // later ones are not

  // Threads. Queues are spread by their completion queue.
  std::uint32_t threads = 1;
  std::vector<int> cpus;               // where these run, e.g. those of a NUMA node; empty: anywhere
  std::chrono::microseconds spin{50};  // they look for work so long before they sleep
  // While asleep they look for doorbells that nobody told them of: after an eighth of the time that they have been
  // idle, within these bounds.
  std::chrono::microseconds least_sleep{50}, most_sleep{4000};
  std::uint32_t medium_threads = 8;  // for each medium that waits for a drive
  std::uint32_t medium_batch = 64;   // requests that one of them takes at a time

  // The register page, zeroed and page-aligned, of register_bytes() at least, e.g. pinned; none: the controller's own.
  void* registers = nullptr;
  std::size_t registers_bytes = 0;
};

// The size of the register page: registers, then the doorbells of the admin queue and of all I/O queues.
std::size_t register_bytes(const SoftControllerOptions& options);

}  // namespace tardis::nvme
