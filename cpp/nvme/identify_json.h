// SPDX-License-Identifier: Apache-2.0
// What a controller says of itself, for tools: fields into an object that is open.
#pragma once

#include <cstdint>

#include "base/json.h"
#include "nvme/health_log.h"
#include "nvme/identify.h"
#include "nvme/spec.h"

namespace tardis::nvme {

void write_controller(JsonWriter& json, const IdentifyController& data, const ControllerInfo& info,
                      Capabilities capabilities);
// As it is, also of formats that the driver refuses; `refusal` says why it does, and is empty if it does not.
void write_namespace(JsonWriter& json, std::uint32_t id, const IdentifyNamespace& data,
                     const ControllerInfo& controller);
void write_health(JsonWriter& json, const HealthLog& log);

}  // namespace tardis::nvme
