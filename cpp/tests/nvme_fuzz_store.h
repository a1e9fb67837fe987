// SPDX-License-Identifier: Apache-2.0
// Fuzz target: the files of a store, of which headers, superblocks, checkpoint and lists of folders were changed, most
// often with a checksum that fits. Tools and the store refuse them or work; slots stay accounted for, and as long as no
// checksum was made to fit, no wrong byte is served and no object is listed that was not stored.
#pragma once

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "nvme_fuzz_store_image.h"
#include "store/list.h"
#include "store/tools.h"

namespace tardis::nvme::fuzz {

class StoreTarget final : public Target {
 public:
  struct Head {
    std::uint8_t way, reserved[7];
  };
  struct Change {
    std::uint8_t file, what, width, reseal;
    std::uint16_t index, reserved;
    std::uint32_t offset, reserved1;
    std::uint64_t value;
  };
  static_assert(sizeof(Head) == 8 && sizeof(Change) == 24);
  enum What : std::uint8_t {
    kHeadRecord,
    kSlotHeader,
    kCheckpointSegment,
    kCheckpointEntry,
    kByte,
    kTruncate,
    kRemove
  };
  static constexpr int kWhats = 7;

  StoreTarget() {
    const Status listed = list_store(image_.home(), [&](const ObjectInfo& object) {
      stored_.insert(fields(object));
      return true;
    });
    Findings().expect(listed && stored_.size() == 2 * StoreImage::kPages, "a page that was stored is not listed");
  }

  const char* name() const override { return "store"; }
  Shape shape() const override {
    return {sizeof(Head), sizeof(Change), 16, {{0, 1}, {1, 1}, {2, 1}, {4, 2}, {8, 4}, {16, 1}, {16, 4}, {16, 8}}};
  }
  void make_record(Random& random, std::span<std::uint8_t> record) const override {
    Change change{};
    change.file = static_cast<std::uint8_t>(random());
    change.what = static_cast<std::uint8_t>(random() % 8 == 0 ? random() % kWhats : random() % 4);
    change.width = static_cast<std::uint8_t>(random());
    change.reseal = static_cast<std::uint8_t>(random() % 4);
    change.index = static_cast<std::uint16_t>(random() % 32);
    static constexpr std::uint32_t kOffsets[] = {
        8,  12, 14,  16,  24,  32,  36,  40,  44,  48,  52,  56,  60,  64,  68,  72,   76,   80,   84,   88,
        92, 96, 100, 104, 108, 112, 116, 120, 124, 128, 129, 136, 144, 152, 160, 1008, 1012, 1016, 1020, 1024};
    change.offset =
        random() % 4 == 0 ? static_cast<std::uint32_t>(random() % 16384) : kOffsets[random() % std::size(kOffsets)];
    change.value = interesting(random);
    if (random() % 4 == 0) change.value = random() % 1024 * 4096;
    std::memcpy(record.data(), &change, sizeof change);
  }

  void execute(Input input, Findings& findings) override {
    Reader reader(input);
    const auto head = reader.get<Head>();
    bool forged = false;
    while (!reader.empty()) forged |= apply(reader.get<Change>());
    switch (head.way % 6) {
      case 0:
      case 1:
      case 2:
        look(findings, forged);
        break;
      case 3:
        if (head.way / 6 % 2 == 0) {
          repair(findings, forged);
        } else {
          (void)verify(findings, false);
        }
        break;
      default:
        use(findings, forged);
        break;
    }
    image_.put_back();
  }

 private:
  template <class T>
  bool change_record(const std::string& name, std::uint64_t at, const Change& change) {
    const std::string& original = image_.original(name);
    if (at + sizeof(T) > original.size()) return false;
    T record;
    std::memcpy(&record, original.data() + at, sizeof record);
    set_field(record, change.offset, change.width, change.value);
    const bool forged = change.reseal % 4 != 0;
    if (forged) seal(record);
    image_.change(name, at, &record, sizeof record);
    return forged;
  }
  // True if a checksum was made to fit.
  bool apply(const Change& change) {
    const std::string& name = image_.names()[change.file % image_.names().size()];
    const std::string& original = image_.original(name);
    const bool segment = name.ends_with(kSegmentSuffix), checkpoint = name.ends_with(kCheckpointFile);
    switch (static_cast<What>(change.what % kWhats)) {
      case kHeadRecord:
        if (segment) return change_record<SegmentSuperblock>(name, 0, change);
        if (checkpoint) return change_record<CheckpointHeader>(name, 0, change);
        if (name.ends_with(kStripeSuffix)) return change_record<StripeHeader>(name, 0, change);
        if (name.ends_with("tardis.paths")) return change_record<PathsFile>(name, 0, change);
        if (name.ends_with("tardis.path")) return change_record<PathMarker>(name, 0, change);
        return change_record<StoreSuperblock>(name, 0, change);
      case kSlotHeader: {
        if (!segment) break;
        SegmentSuperblock superblock;
        std::memcpy(&superblock, original.data(), sizeof superblock);
        const std::uint64_t slot = change.index % std::max(1u, superblock.slots);
        return change_record<SlotHeader>(name, superblock.header_table_offset + slot * kHeaderBytes, change);
      }
      case kCheckpointSegment:
      case kCheckpointEntry:
        if (checkpoint) return change_checkpoint(name, change);
        break;
      case kByte:
        if (change.offset < original.size()) image_.change(name, change.offset, &change.value, 1);
        break;
      case kTruncate:
        image_.truncate(name, change.value % (original.size() + 8192));
        break;
      case kRemove:
        image_.remove(name);
        break;
    }
    return false;
  }
  bool change_checkpoint(const std::string& name, const Change& change) {
    const std::string& original = image_.original(name);
    CheckpointHeader header;
    std::memcpy(&header, original.data(), sizeof header);
    std::uint64_t at = sizeof header + header.namespaces * sizeof(Fingerprint);
    CheckpointSegment segment;
    for (std::uint32_t i = 0;; ++i) {
      if (at + sizeof segment > original.size()) return false;
      std::memcpy(&segment, original.data() + at, sizeof segment);
      if (i == change.index % std::max(1u, header.segments)) break;
      at += sizeof segment + segment.entries * sizeof(CheckpointEntry);
    }
    if (change.what % kWhats == kCheckpointSegment) {
      set_field(segment, change.offset, change.width, change.value);
    } else {
      if (segment.entries == 0) return false;
      std::vector<CheckpointEntry> entries(segment.entries);
      std::memcpy(entries.data(), original.data() + at + sizeof segment, entries.size() * sizeof entries[0]);
      set_field(entries[change.index / 4 % entries.size()], change.offset, change.width, change.value);
      image_.change(name, at + sizeof segment, entries.data(), entries.size() * sizeof entries[0]);
      segment.entries_digest = xxh3_64(entries.data(), entries.size() * sizeof entries[0]);
    }
    const bool forged = change.reseal % 4 != 0;
    if (forged) seal(segment);
    image_.change(name, at, &segment, sizeof segment);
    return forged;
  }

  // Tools that change nothing.
  void look(Findings& findings, bool forged) {
    std::size_t objects = 0;
    const Status listed = list_store(image_.home(), [&](const ObjectInfo& object) {
      findings.expect(forged || stored_.contains(fields(object)), "an object is listed that was not stored");
      return ++objects < 1000;
    });
    findings.note_text("list", listed ? "" : listed.error().message);
    findings.note("objects", objects);
    const auto inspected = inspect_store(image_.home());
    findings.note_text("inspect", inspected ? "" : inspected.error().message);
  }
  Result<VerifyResult> verify(Findings& findings, bool repair) {
    image_.touched();
    auto verified = verify_store(image_.home(), repair, [](std::uint64_t, std::uint64_t) { return true; });
    findings.note_text("verify", verified ? "" : verified.error().message);
    if (!verified) return verified;
    for (const std::string& problem : verified->problems) findings.note_text("problem", problem);
    return verified;
  }
  // What was repaired has no fault that can be repaired, and serves no wrong byte.
  void repair(Findings& findings, bool forged) {
    const auto before = verify(findings, true);
    if (!before) return;
    const auto after = verify(findings, false);
    findings.expect(static_cast<bool>(after), "a store cannot be verified after it was repaired");
    const tardis_verify_report& report = after->report;
    findings.expect(report.bad_headers + report.bad_payloads + report.torn == 0, "a repaired store has faults");
    use(findings, forged);
  }
  void use(Findings& findings, bool forged) {
    image_.touched();
    auto opened = Store::open(image_.home(), image_.options(), false);
    findings.note_text("store", opened ? "" : opened.error().message);
    if (!opened) return;
    Store& store = **opened;
    for (const std::size_t kind : {0u, 1u}) {
      const auto space = StoreImage::open_space(store, kind);
      findings.note_text("space", space ? "" : space.error().message);
      if (!space) continue;
      const auto got = StoreImage::get(store, kind, *space, 0, StoreImage::kPages);
      findings.note("got", got.arrived, kind);
      findings.expect(forged || got.wrong == 0, "a wrong byte is served");
      findings.note("stored", StoreImage::put(store, kind, *space, 100, 8), kind);
      const auto again = StoreImage::get(store, kind, *space, 100, 8);
      findings.expect(again.wrong == 0, "a wrong byte is served of a page just stored");
    }
    tardis_stats stats;
    store.stats(stats);
    findings.expect(
        stats.slots_total == stats.slots_live + stats.slots_free + stats.slots_quarantined + stats.slots_writing,
        "slots are not accounted for");
    const Status closed = store.close();
    findings.note_text("close", closed ? "" : closed.error().message);
  }

  using Fields = std::tuple<Hash256, Fingerprint, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                            std::uint32_t, std::uint32_t, std::uint32_t, bool>;
  static Fields fields(const ObjectInfo& o) {
    return {o.key,         o.fingerprint, o.parent,  o.generation, o.payload_bytes,
            o.root_digest, o.parts,       o.segment, o.slot,       o.quarantined};
  }

  StoreImage image_;
  std::set<Fields> stored_;
};

}  // namespace tardis::nvme::fuzz
