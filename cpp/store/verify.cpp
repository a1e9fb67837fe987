// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include "store/digest.h"
#include "store/folder.h"
#include "store/scan.h"
#include "store/tools.h"

namespace tardis {
namespace {

constexpr std::size_t kMaxProblems = 1000;

struct Checked {
  std::unique_ptr<Segment> segment;
  std::vector<Claim> claims;
  std::vector<std::uint32_t> slots;  // of the claims
  std::vector<std::uint32_t> bad_headers;
  std::vector<std::uint32_t> bad_digests;  // their entry in the digest table is of another object
};

Status repair_segment(Checked& checked) {
  Segment& segment = *checked.segment;
  const std::lock_guard io(segment.io_mutex());
  auto table = segment.table();
  if (!table) return table.error();
  const bool crashed = segment.dirty() || segment.suspect();
  std::set<std::uint64_t> blocks;
  for (const std::uint32_t slot : checked.bad_headers) {
    (*table)->header(slot) = {};
    (*table)->blocks_of(slot, blocks);
  }
  std::vector<std::uint32_t> failed = checked.bad_digests;
  for (std::size_t i = 0; i < checked.claims.size(); ++i) {
    if (!checked.claims[i].verified) failed.push_back(checked.slots[i]);
  }
  for (const std::uint32_t slot : failed) {
    SlotHeader& header = (*table)->header(slot);
    if (crashed) {
      header = {};
    } else {
      header.flags |= kSlotQuarantined;
      seal(header);
    }
    (*table)->blocks_of(slot, blocks);
  }
  if (!blocks.empty()) {
    if (Status status = segment.write_table(blocks); !status) return status;
  }
  if (Status status = segment.flush(); !status) return status;
  return segment.set_flags(0);
}

}  // namespace

Result<VerifyResult> verify_store(const std::string& path, bool repair,
                                  const std::function<bool(std::uint64_t, std::uint64_t)>& progress) {
  StoreFolder folder(path);
  if (!folder.has_superblock()) return Error{Code::kNotFound, path + ": no tardis store here"};
  if (Status status = folder.lock(); !status) return status.error();
  if (Status status = folder.read_superblock(); !status) return status.error();
  auto device = open_block_device(path, {}, folder.lock_fd());
  if (!device) return device.error();
  auto files = folder.segment_files();
  if (!files) return files.error();

  VerifyResult result;
  tardis_verify_report& report = result.report;
  const auto problem = [&](std::string text) {
    if (result.problems.size() < kMaxProblems) result.problems.push_back(std::move(text));
  };
  std::vector<Checked> all;
  std::uint64_t total = 0;
  for (const auto& [id, file] : *files) {
    auto segment = Segment::load(**device, file, id, folder.superblock().uuid, folder.superblock().segment_bytes);
    if (!segment && segment.error().code == Code::kNotFound) continue;
    Result<SegmentTable*> table = segment ? (*segment)->table() : Result<SegmentTable*>(segment.error());
    if (!table) {
      ++report.unreadable_segments;
      problem(table.error().message);
      continue;
    }
    Checked checked{std::move(*segment), {}, {}, {}, {}};
    Segment& s = *checked.segment;
    ++report.segments;
    report.slots += s.geometry().slots;
    if (s.truncated())
      problem(file + ": " + std::to_string(s.file_bytes()) + " bytes, expected " +
              std::to_string(folder.superblock().segment_bytes));
    const SegmentFacts facts{id, s.epoch(), s.geometry(), s.file_bytes(), folder.superblock().block_bytes};
    for (std::uint32_t slot = 0; slot < s.geometry().slots; ++slot) {
      const SlotHeader& header = (*table)->header(slot);
      switch (judge(header, slot, facts)) {
        case Belief::kFree:
          ++report.free_slots;
          break;
        case Belief::kQuarantined:
          ++report.quarantined;
          break;
        case Belief::kBad:
          checked.bad_headers.push_back(slot);
          if (s.dirty() || s.suspect()) {
            ++report.torn;
          } else {
            ++report.bad_headers;
            problem(file + ": slot " + std::to_string(slot) + ": the header fails its checks");
          }
          break;
        case Belief::kObject: {
          const ObjectGeometry g = ObjectGeometry::of(header);
          ++report.objects;
          report.bytes += header.payload_bytes;
          if (digest_root(g, (*table)->digests(slot)) != header.root_digest) {
            checked.bad_digests.push_back(slot);
            if (s.dirty() || s.suspect()) {
              ++report.torn;
            } else {
              ++report.bad_headers;
              problem(file + ": slot " + std::to_string(slot) + ": the digest table does not match the header");
            }
            break;
          }
          total += round_up(g.stored_bytes(), kTableBlockBytes);
          checked.claims.push_back({s.file(), facts.geometry.slot_offset(slot), header});
          checked.slots.push_back(slot);
          break;
        }
      }
    }
    s.drop_table();
    all.push_back(std::move(checked));
  }

  std::uint64_t done = 0;
  bool stopped = false;
  for (Checked& checked : all) {
    std::uint64_t here = 0;
    verify_claims(**device, checked.claims, [&](std::uint64_t bytes) {
      here = bytes;
      stopped = progress && !progress(done + bytes, total);
      return !stopped;
    });
    done += here;
    if (stopped) return Error{Code::kClosed, "verification was stopped; nothing was changed"};
    const Segment& s = *checked.segment;
    for (std::size_t i = 0; i < checked.claims.size(); ++i) {
      const Claim& claim = checked.claims[i];
      if (claim.verified) continue;
      if ((s.dirty() || s.suspect()) && claim.error == 0) {
        ++report.torn;
        continue;
      }
      ++report.bad_payloads;
      const std::string why =
          claim.error != 0 ? errno_error(claim.error, "reading it").message : "the payload fails its digest";
      problem(s.path() + ": slot " + std::to_string(checked.slots[i]) + " (key " +
              hex(claim.header.key.data(), claim.header.key.size()) + "): " + why);
    }
  }
  if (repair) {
    for (Checked& checked : all) {
      if (Status status = repair_segment(checked); !status) return status.error();
    }
  }
  return result;
}

}  // namespace tardis
