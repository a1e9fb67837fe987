// SPDX-License-Identifier: Apache-2.0
#include "store/closed_store.h"

#include "store/live_layout.h"
#include "store/segment.h"

namespace tardis {

Result<std::unique_ptr<ClosedStore>> ClosedStore::open(const std::string& path, const DeviceFactory& make_device) {
  StoreFolder folder(path);
  if (!folder.has_superblock()) return Error{Code::kNotFound, path + ": no tardis store here"};
  if (Status status = folder.lock_alone(); !status) return status.error();
  if (Status status = folder.read_superblock(); !status) return status.error();
  StorePaths& paths = folder.paths();
  if (Status status = paths.load(folder.superblock().uuid); !status) return status.error();
  if (Status status = paths.lock_alone(); !status) return status.error();
  BlockDeviceOptions options;
  options.more_folders = paths.more_present();
  auto device = make_device(path, options, folder.lock_fd());
  if (!device) return device.error();
  if (Status status = folder.check_device(device->get()); !status) return status.error();
  return std::make_unique<ClosedStore>(Passkey(), std::move(folder), std::move(*device));
}

ClosedStore::ClosedStore(Passkey, StoreFolder folder, std::unique_ptr<BlockDevice> device)
    : folder_(std::move(folder)), device_(std::move(device)) {}

Result<HeaderTable> ClosedStore::header_table(SegmentName name) {
  LiveSegment live;
  live.path.store(name.path);
  live.number.store(name.number);
  SegmentImage image;
  Segment::Blame blame;
  auto segment = Segment::load(device_, live, folder_, name.word(), image, blame);
  if (!segment) return segment.error();
  auto table = (*segment)->table();
  if (!table) return table.error();
  HeaderTable result{(*segment)->path(), {}, name, image.superblock, image.file_bytes, {}};
  for (std::uint32_t slot = 0; slot < image.superblock.slots; ++slot) {
    result.headers.push_back((*table)->header(slot));
  }
  return result;
}

}  // namespace tardis
