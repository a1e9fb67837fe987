// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/json.h"
#include "block/block_device.h"

namespace tardis {

// The fields of a path report, inside an object that is open.
inline void write_fields(JsonWriter& json, const PathReport& report) {
  json.field("engine", report.engine);
  json.field("direct_io", report.direct);
  json.field("offset_align", report.offset_align);
  json.field("memory_align", report.memory_align);
  json.field("logical_block", report.logical_block);
  json.field("filesystem", report.filesystem);
  json.field("reason", report.reason);
}

}  // namespace tardis
