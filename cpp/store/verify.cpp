// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include "store/closed_store.h"
#include "store/digest.h"
#include "store/folder.h"
#include "store/scan.h"
#include "store/tools.h"

namespace tardis {
namespace {

constexpr std::size_t kMaxProblems = 1000;

struct Checked {
  std::unique_ptr<LiveSegment> live;
  std::unique_ptr<Segment> segment;
  SegmentImage image;
  std::vector<Claim> claims;
  std::vector<std::uint32_t> slots;  // of the claims
  std::vector<std::uint32_t> bad_headers;
  std::vector<std::uint32_t> bad_digests;  // their entry in the digest table is of another object

  // What does not fit in such a segment was cut short by a crash, and is no fault.
  bool crashed() const { return segment->dirty() || segment->suspect(); }
};

using Progress = std::function<bool(std::uint64_t, std::uint64_t)>;

class Verification {
 public:
  Verification(const StoreFolder& folder, StripedDevice& device) : folder_(folder), device_(device) {}

  Status scan();
  Status read_payloads(const Progress& progress);
  Status repair();
  VerifyResult take_result() { return std::move(result_); }
  void problem(std::string text);

 private:
  void scan_slot(Checked& checked, SegmentTable& table, std::uint32_t slot, const SegmentFacts& facts);
  void fault(const Checked& checked, std::uint64_t& counter, std::uint32_t slot, const std::string& what);

  const StoreFolder& folder_;
  StripedDevice& device_;
  VerifyResult result_;
  std::vector<Checked> segments_;
  std::uint64_t claimed_bytes_ = 0;
};

void Verification::problem(std::string text) {
  if (result_.problems.size() < kMaxProblems) result_.problems.push_back(std::move(text));
}

void Verification::fault(const Checked& checked, std::uint64_t& counter, std::uint32_t slot, const std::string& what) {
  if (checked.crashed()) {
    ++result_.report.torn;
    return;
  }
  ++counter;
  problem(checked.segment->path() + ": slot " + std::to_string(slot) + what);
}

Status Verification::scan() {
  const StoreSuperblock& store = folder_.superblock();
  auto files = folder_.segment_files();
  if (!files) return files.error();
  for (const auto& [name, file] : *files) {
    auto live = std::make_unique<LiveSegment>();
    live->path.store(name.path);
    live->number.store(name.number);
    SegmentImage image;
    Segment::Blame blame;
    auto segment = Segment::load(device_, *live, folder_, name.word(), image, blame);
    if (!segment && segment.error().code == Code::kNotFound) continue;
    Result<SegmentTable*> table = segment ? (*segment)->table() : Result<SegmentTable*>(segment.error());
    if (!table) {
      ++result_.report.unreadable_segments;
      problem(table.error().message);
      continue;
    }
    Checked checked{std::move(live), std::move(*segment), image, {}, {}, {}, {}};
    Segment& s = *checked.segment;
    ++result_.report.segments;
    result_.report.slots += s.geometry().slots;
    if (image.truncated()) {
      problem(file + ": " + std::to_string(image.file_bytes) + " bytes, expected " +
              std::to_string(store.segment_bytes));
    }
    const SegmentFacts facts{name.number, s.epoch(), s.geometry(), image.file_bytes, store.block_bytes};
    for (std::uint32_t slot = 0; slot < s.geometry().slots; ++slot) scan_slot(checked, **table, slot, facts);
    s.drop_table();
    segments_.push_back(std::move(checked));
  }
  return {};
}

void Verification::scan_slot(Checked& checked, SegmentTable& table, std::uint32_t slot, const SegmentFacts& facts) {
  tardis_verify_report& report = result_.report;
  const SlotHeader& header = table.header(slot);
  switch (judge(header, slot, facts)) {
    case Belief::kFree:
      ++report.free_slots;
      return;
    case Belief::kQuarantined:
      ++report.quarantined;
      return;
    case Belief::kBad:
      checked.bad_headers.push_back(slot);
      fault(checked, report.bad_headers, slot, ": the header fails its checks");
      return;
    case Belief::kObject:
      break;
  }
  const ObjectGeometry g = ObjectGeometry::of(header);
  ++report.objects;
  report.bytes += header.payload_bytes;
  if (digest_root(g, table.digests(slot)) != header.root_digest) {
    checked.bad_digests.push_back(slot);
    fault(checked, report.bad_headers, slot, ": the digest table does not match the header");
    return;
  }
  claimed_bytes_ += round_up(g.stored_bytes(), kTableBlockBytes);
  checked.claims.push_back({checked.segment->file(), facts.geometry.slot_offset(slot), header});
  checked.slots.push_back(slot);
}

Status Verification::read_payloads(const Progress& progress) {
  std::uint64_t done = 0;
  for (Checked& checked : segments_) {
    std::uint64_t here = 0;
    bool stopped = false;
    verify_claims(device_, checked.claims, [&](std::uint64_t bytes) {
      here = bytes;
      stopped = progress && !progress(done + bytes, claimed_bytes_);
      return !stopped;
    });
    if (stopped) return Error{Code::kClosed, "verification was stopped; nothing was changed"};
    done += here;
    for (std::size_t i = 0; i < checked.claims.size(); ++i) {
      const Claim& claim = checked.claims[i];
      if (claim.verified) continue;
      const std::string key = " (key " + hex(claim.header.key.data(), claim.header.key.size()) + "): ";
      if (claim.error == 0) {
        fault(checked, result_.report.bad_payloads, checked.slots[i], key + "the payload fails its digest");
      } else {  // no crash makes a medium unreadable
        ++result_.report.bad_payloads;
        problem(checked.segment->path() + ": slot " + std::to_string(checked.slots[i]) + key +
                errno_error(claim.error, "reading it").message);
      }
    }
  }
  return {};
}

Status repair_segment(Checked& checked) {
  Segment& segment = *checked.segment;
  const std::lock_guard io(segment.io_mutex());
  auto table = segment.table();
  if (!table) return table.error();
  const bool crashed = checked.crashed();
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
  // A block of the tables in which the file ends was taken for zeros. It is zeros before the file is longer again.
  const std::uint64_t start = segment.geometry().header_table_offset;
  if (checked.image.truncated() && checked.image.file_bytes > start) {
    const std::uint64_t there = checked.image.file_bytes - start;
    if (there < (*table)->bytes() && there % kTableBlockBytes != 0) blocks.insert(there / kTableBlockBytes);
  }
  if (!blocks.empty()) {
    if (Status status = segment.write_table(blocks); !status) return status;
  }
  if (Status status = segment.flush(); !status) return status;
  return segment.set_flags(0);
}

Status Verification::repair() {
  // It tells of headers as they were.
  if (Status status = folder_.remove_checkpoint(); !status) return status;
  for (Checked& checked : segments_) {
    if (Status status = repair_segment(checked); !status) return status;
  }
  return {};
}

}  // namespace

Result<VerifyResult> verify_store(const std::string& path, bool repair, const Progress& progress,
                                  const DeviceFactory& make_device) {
  auto store = ClosedStore::open(path, make_device);
  if (!store) return store.error();
  Verification verification((*store)->folder(), (*store)->device());
  for (const std::string& missing : (*store)->folder().paths().missing())
    verification.problem("not verified: " + missing);
  if (Status status = verification.scan(); !status) return status.error();
  if (Status status = verification.read_payloads(progress); !status) return status.error();
  if (repair) {
    if (Status status = verification.repair(); !status) return status.error();
  }
  return verification.take_result();
}

}  // namespace tardis
