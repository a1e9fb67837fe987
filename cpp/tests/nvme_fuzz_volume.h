// SPDX-License-Identifier: Apache-2.0
// Fuzz target: volumes whose superblocks and directories were changed, most often with a checksum that fits. A volume
// is refused or opened; then its files are apart and within it, and stay so when it is used. As long as no checksum was
// made to fit, no file is another than it was.
#pragma once

#include <array>
#include <cerrno>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "block/iovec_range.h"
#include "block_file.h"
#include "nvme/raw_volume.h"
#include "nvme_fuzz_engine.h"

namespace tardis::nvme::fuzz {

// A namespace in memory that judges what is asked of it.
class FuzzNamespace final : public RawNamespace {
 public:
  FuzzNamespace(testing::BlockFile image, std::uint32_t block_bytes, const Findings& findings)
      : contents(std::move(image)), block_bytes_(block_bytes), findings_(findings) {}

  std::string name() const override { return "namespace"; }
  std::uint64_t bytes() const override { return contents.bytes(); }
  std::uint32_t block_bytes() const override { return block_bytes_; }
  std::uint32_t atomic_bytes() const override { return block_bytes_; }
  void run(std::span<NamespaceRequest> requests, const Completion& on_complete) override {
    for (NamespaceRequest& request : requests) {
      const std::uint64_t length = total_bytes(request.memory);
      findings_.expect(length > 0 && length % block_bytes_ == 0 && request.offset % block_bytes_ == 0,
                       "a request for parts of blocks");
      findings_.expect(request.offset <= bytes() && length <= bytes() - request.offset,
                       "a request beyond the namespace");
      request.error = request.offset < bad_end && request.offset + length > bad_begin ? EIO : 0;
      std::uint64_t at = request.offset;
      for (const iovec& piece : request.memory) {
        if (request.error != 0) break;
        request.op == NamespaceRequest::Op::kRead ? contents.read(at, piece.iov_base, piece.iov_len)
                                                  : contents.write(at, piece.iov_base, piece.iov_len);
        at += piece.iov_len;
      }
    }
    for (NamespaceRequest& request : requests) {
      if (on_complete) on_complete(request);
    }
  }
  Status flush() override { return {}; }
  Status register_memory(void*, std::size_t) override { return {}; }
  void unregister_memory(void*) override {}

  testing::BlockFile contents;
  std::uint64_t bad_begin = 0, bad_end = 0;  // cannot be read or written

 private:
  const std::uint32_t block_bytes_;
  const Findings& findings_;
};

class VolumeTarget final : public Target {
 public:
  struct Head {
    std::uint8_t image, grown, uses, uuid;
    std::uint32_t reserved;
  };
  struct Change {
    std::uint8_t what, width, reseal, more;
    std::uint16_t entry, reserved;
    std::uint32_t offset, reserved1;
    std::uint64_t value;
  };
  static_assert(sizeof(Head) == 8 && sizeof(Change) == 24);
  enum What : std::uint8_t {
    kHeadBlock,
    kTailBlock,
    kBothBlocks,
    kFirstCopy,
    kSecondCopy,
    kBothCopies,
    kClone,
    kByte,
    kBadSectors
  };
  static constexpr int kWhats = 9;

  VolumeTarget() {
    Findings findings;
    for (const std::uint32_t block : {512u, 4096u}) {
      testing::BlockFile image;
      image.resize(kBytes);
      FuzzNamespace device(image, block, findings);
      findings.expect(static_cast<bool>(RawVolume::format(device, kUuid)), "a volume cannot be made");
      auto volume = RawVolume::open(device, kUuid);
      findings.expect(static_cast<bool>(volume), "a volume cannot be opened");
      const auto make = [&](const char* name, std::uint64_t bytes) {
        findings.expect(static_cast<bool>((*volume)->create(name, bytes, 0)), "a file cannot be made");
      };
      make("segments/000000.seg", 4 << 20);
      make("segments/000001.seg", 1 << 20);
      make("gone", 1 << 20);
      make("segments/000002.part", (2 << 20) + 512);
      findings.expect(static_cast<bool>((*volume)->remove({"gone"})), "a file cannot be removed");
      superblock_ = (*volume)->superblock();
      images_.push_back({device.contents, block, check(device, **volume, findings)});
    }
  }

  const char* name() const override { return "volume"; }
  Shape shape() const override {
    return {sizeof(Head), sizeof(Change), 24, {{0, 1}, {1, 1}, {2, 1}, {4, 2}, {8, 4}, {16, 1}, {16, 4}, {16, 8}}};
  }
  void make_record(Random& random, std::span<std::uint8_t> record) const override {
    Change change{};
    change.what = static_cast<std::uint8_t>(random() % kWhats);
    change.width = static_cast<std::uint8_t>(random());
    change.reseal = static_cast<std::uint8_t>(random() % 4);
    change.entry = static_cast<std::uint16_t>(random() % (random() % 4 == 0 ? 64 : 4));
    static constexpr std::uint32_t kOfSuperblock[] = {0, 8, 12, 16, 32, 40, 48, 56, 64, 72, 80, 88, 508};
    static constexpr std::uint32_t kOfEntry[] = {0, 8, 12, 16, 32, 40, 48, 56, 60, 64, 65, 80, 508};
    change.offset = change.what <= kBothBlocks ? kOfSuperblock[random() % std::size(kOfSuperblock)]
                                               : kOfEntry[random() % std::size(kOfEntry)];
    change.value = interesting(random);
    switch (random() % 4) {
      case 0:
        change.value = (random() % 16) << 20;  // of extents
        break;
      case 1:
        change.value = random() % 8 * 4096;
        break;
      default:
        break;
    }
    std::memcpy(record.data(), &change, sizeof change);
  }

  void execute(Input input, Findings& findings) override {
    Reader reader(input);
    const auto head = reader.get<Head>();
    const auto& [base, block, original] = images_[head.image % images_.size()];
    FuzzNamespace device(base, block, findings);
    device.contents.resize(kBytes + (head.grown % 4 == 0 ? head.grown / 4 * block : 0));
    bool forged = false;
    while (!reader.empty()) forged |= apply(reader.get<Change>(), device);

    const auto blank = RawVolume::check_blank(device);
    findings.note_text("blank", blank ? "" : blank.error().message);
    std::optional<Uuid> expected;
    if (head.uuid % 4 == 0) expected = kUuid;
    auto opened = RawVolume::open(device, expected);
    if (!opened) {
      findings.note_text("open", opened.error().message);
      return;
    }
    findings.note("open", (*opened)->mended() > 3 ? 3 : (*opened)->mended(),
                  (*opened)->lost() > 2 ? 2 : (*opened)->lost());
    Files files = check(device, **opened, findings);
    for (const auto& file : files) {
      const auto found = original.find(file.first);
      findings.expect(forged || (found != original.end() && found->second == file.second),
                      "a file is another than it was, though a checksum tells");
    }
    use(head, **opened, findings);
    files = check(device, **opened, findings);
    if (device.bad_end != 0) return;
    opened = RawVolume::open(device, expected);
    findings.expect(static_cast<bool>(opened), "a volume in use cannot be opened again");
    findings.expect((*opened)->mended() == 0 && (*opened)->lost() == 0, "a volume in use had to be mended");
    findings.expect(check(device, **opened, findings) == files, "files changed when a volume was opened again");
  }

 private:
  static constexpr std::uint64_t kBytes = 16 << 20;
  static constexpr Uuid kUuid{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  using Files = std::map<std::string, std::pair<std::uint64_t, std::uint64_t>>;

  // Changes one record in `device`, and its checksum with it if that is wished.
  template <class T>
  static void change_record(FuzzNamespace& device, std::uint64_t at, const Change& change) {
    if (at + sizeof(T) > device.bytes()) return;
    T record;
    device.contents.read(at, &record, sizeof record);
    set_field(record, change.offset, change.width, change.value);
    if (change.reseal % 4 != 0) seal(record);
    device.contents.write(at, &record, sizeof record);
  }
  // True if a checksum was made to fit.
  bool apply(const Change& change, FuzzNamespace& device) const {
    const std::uint64_t tail = device.bytes() / kVolumeBlockBytes * kVolumeBlockBytes - kVolumeBlockBytes;
    const auto entry = [&](std::size_t copy, std::uint64_t number) {
      return superblock_.directory_offset[copy] + number % superblock_.entries * sizeof(VolumeEntry);
    };
    const What what = static_cast<What>(change.what % kWhats);
    switch (what) {
      case kHeadBlock:
      case kTailBlock:
      case kBothBlocks:
        if (what != kTailBlock) change_record<VolumeSuperblock>(device, 0, change);
        if (what != kHeadBlock) change_record<VolumeSuperblock>(device, tail, change);
        break;
      case kFirstCopy:
      case kSecondCopy:
      case kBothCopies:
        if (what != kSecondCopy) change_record<VolumeEntry>(device, entry(0, change.entry), change);
        if (what != kFirstCopy) change_record<VolumeEntry>(device, entry(1, change.entry), change);
        break;
      case kClone:  // an entry as another one
        for (const std::size_t copy : {0u, 1u}) {
          VolumeEntry one;
          device.contents.read(entry(copy, change.entry), &one, sizeof one);
          one.number = static_cast<std::uint32_t>(change.value % superblock_.entries);
          if (change.reseal % 2 != 0) one.name[0] = static_cast<char>(one.name[0] + 1);
          seal(one);
          device.contents.write(entry(copy, one.number), &one, sizeof one);
        }
        break;
      case kByte: {
        const std::uint64_t at =
            change.offset % 2 == 0 ? change.offset % (1u << 20) : device.bytes() - 1 - change.offset % (1u << 20);
        device.contents.write(at, &change.value, 1);
        break;
      }
      case kBadSectors:
        device.bad_begin = change.value % device.bytes() / 512 * 512;
        device.bad_end = device.bad_begin + 512 * (1 + change.entry % 64);
        break;
    }
    return what == kClone || (what < kClone && change.reseal % 4 != 0);
  }

  // Each file by name, all apart and within the volume's data.
  static Files check(const FuzzNamespace& device, const RawVolume& volume, Findings& findings) {
    const VolumeSuperblock& s = volume.superblock();
    findings.expect(s.data_offset + s.data_bytes <= device.bytes() && s.data_offset >= kVolumeBlockBytes,
                    "the volume's data is not within the namespace");
    Files files;
    std::map<std::uint64_t, std::uint64_t> places;
    std::uint64_t used = 0;
    for (const std::string& name : volume.names()) {
      const auto extent = volume.find(name);
      if (!extent) continue;  // doubtful
      files[name] = {extent->offset, extent->bytes};
      findings.expect(extent->bytes > 0 && extent->offset % kVolumeExtentAlign == 0 &&
                          extent->offset >= s.data_offset && extent->offset <= s.data_offset + s.data_bytes &&
                          extent->bytes <= s.data_offset + s.data_bytes - extent->offset,
                      "a file is not within the volume's data");
      findings.expect(places.emplace(extent->offset, extent->bytes).second, "two files begin at one place");
      used += (extent->bytes + kVolumeExtentAlign - 1) / kVolumeExtentAlign * kVolumeExtentAlign;
    }
    std::uint64_t end = 0;
    for (const auto& [offset, bytes] : places) {
      findings.expect(offset >= end, "two files share a range");
      end = offset + bytes;
    }
    findings.note("files", files.size(), volume.names().size() - files.size());
    findings.note("free", volume.free_bytes() >> 20, s.data_bytes >> 20);
    findings.expect(volume.free_bytes() <= s.data_bytes, "more is free than there is");
    findings.expect(used <= s.data_bytes - volume.free_bytes(), "what is used is free");
    return files;
  }

  static void use(const Head& head, RawVolume& volume, Findings& findings) {
    for (std::uint32_t n = 0; n < head.uses % 6u; ++n) {
      const std::string name = "new" + std::to_string(n % 4);
      if ((head.uses >> n & 1) != 0) {
        const auto made = volume.create(name, ((n * 7 + head.uses) % 5 << 20) + 512, 4096);
        findings.note_text("create", made ? "" : made.error().message);
      } else {
        const auto names = volume.names();
        const Status removed = volume.remove({names.empty() ? "none" : names[head.uses % names.size()]});
        findings.note_text("remove", removed ? "" : removed.error().message);
      }
    }
  }

  VolumeSuperblock superblock_{};
  struct Image {
    testing::BlockFile contents;
    std::uint32_t block_bytes;
    Files files;
  };
  std::vector<Image> images_;
};

}  // namespace tardis::nvme::fuzz
