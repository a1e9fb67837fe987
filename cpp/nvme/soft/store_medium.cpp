// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/store_medium.h"

#include <algorithm>
#include <cerrno>
#include <string>

namespace tardis::nvme {

Result<std::unique_ptr<StoreMedium>> StoreMedium::create(Store& store) {
  const SegmentAddresses addresses = store.segment_addresses();
  if (addresses.stride > SegmentAddresses::kMaxStride) {
    return Error{Code::kInvalidArgument, "a namespace of a store: expected segments of at most " +
                                             std::to_string(SegmentAddresses::kMaxStride) + " bytes, found " +
                                             std::to_string(addresses.stride)};
  }
  const std::uint32_t granularity = std::max(512u, store.read_geometry().offset_align);
  return std::unique_ptr<StoreMedium>(new StoreMedium(store, granularity));
}

void StoreMedium::run(std::span<MediumRequest> requests, const Completion& on_complete) {
  std::vector<AddressRead> reads;
  std::vector<MediumRequest*> owners;
  reads.reserve(requests.size());
  for (MediumRequest& request : requests) {
    if (request.op == MediumRequest::Op::kRead && !at_once_) {
      reads.push_back({request.offset, request.memory, 0});
      owners.push_back(&request);
      continue;
    }
    if (request.op == MediumRequest::Op::kRead) {
      request.error = store_.read_at_once(request.offset, request.memory);
    } else {
      request.error = request.op == MediumRequest::Op::kFlush ? 0 : EROFS;
    }
    on_complete(request);
  }
  if (reads.empty()) return;
  store_.read_addresses(reads, [&](AddressRead& read) {
    MediumRequest& request = *owners[static_cast<std::size_t>(&read - reads.data())];
    request.error = read.error;
    on_complete(request);
  });
}

std::vector<BlockRange> blocks_of(const Lease& lease, std::size_t object, std::uint64_t first, std::uint64_t bytes,
                                  std::uint32_t block_bytes) {
  std::vector<BlockRange> ranges;
  for (const Extent& extent : lease.extents(object, first, bytes)) {
    const std::uint64_t block = extent.address / block_bytes;
    const auto skip = static_cast<std::uint32_t>(extent.address % block_bytes);
    ranges.push_back({block, (skip + extent.bytes + block_bytes - 1) / block_bytes, skip, extent.bytes});
  }
  return ranges;
}

}  // namespace tardis::nvme
