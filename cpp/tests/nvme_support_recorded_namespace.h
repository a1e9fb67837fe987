// SPDX-License-Identifier: Apache-2.0
// A raw namespace on a RecordedDrive: its journal tells in which order the namespace and the files of the store's
// folder changed.
#pragma once

#include "nvme/raw_volume.h"
#include "nvme_store_support.h"
#include "recording_device.h"

namespace tardis::nvme::testing {

using tardis::testing::kRawNamespace;
using tardis::testing::RecordedDrive;

class RecordedNamespace final : public RawNamespace {
 public:
  RecordedNamespace(RecordedDrive& drive, std::uint32_t block_bytes) : drive_(drive), block_bytes_(block_bytes) {}

  std::string name() const override { return "recorded namespace"; }
  std::uint64_t bytes() const override { return drive_.segment_bytes(kRawNamespace); }
  std::uint32_t block_bytes() const override { return block_bytes_; }
  std::uint32_t atomic_bytes() const override { return block_bytes_; }
  void run(std::span<NamespaceRequest> requests, const Completion& on_complete) override {
    for (NamespaceRequest& request : requests) {
      request.error = check_request(request, bytes(), block_bytes_);
      if (request.error == 0) {
        const bool read = request.op == NamespaceRequest::Op::kRead;
        request.error = drive_.transfer(read, request.offset, request.memory, kRawNamespace);
      }
      if (on_complete) on_complete(request);
    }
  }
  Status flush() override {
    drive_.flush(kRawNamespace);
    return {};
  }
  Status register_memory(void*, std::size_t) override { return {}; }
  void unregister_memory(void*) override {}

 private:
  RecordedDrive& drive_;
  const std::uint32_t block_bytes_;
};

// Where files are, as the first copies of superblock and directory say. Of a volume that is open they are whole.
inline RecordedDrive::Ranges ranges_on(const BlockFile& contents) {
  RecordedDrive::Ranges ranges;
  VolumeSuperblock s;
  contents.read(0, &s, sizeof s);
  if (!sealed(s)) return ranges;
  for (std::uint64_t number = 0; number < s.entries; ++number) {
    VolumeEntry entry;
    contents.read(s.directory_offset[0] + number * sizeof entry, &entry, sizeof entry);
    if (!sealed(entry) || entry.state != EntryState::kInUse) continue;
    ranges[{entry.name.data(), entry.name_bytes}] = {entry.offset, entry.bytes};
  }
  return ranges;
}

// What a new store may find below its segments: the namespace as another store left it, but blank where the volume
// looks.
inline void wipe_ends(BlockFile& contents) {
  const std::string zeros(kVolumeInspectBytes, '\0');
  contents.write(0, zeros.data(), zeros.size());
  contents.write(contents.bytes() - zeros.size(), zeros.data(), zeros.size());
}

}  // namespace tardis::nvme::testing
