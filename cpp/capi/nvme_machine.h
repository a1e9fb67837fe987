// SPDX-License-Identifier: Apache-2.0
// What the functions of tardis/nvme.h share.
#pragma once

#include <string>

#include "base/status.h"
#include "capi/guarded.h"
#include "nvme/vfio/system_paths.h"
#include "tardis/nvme.h"

namespace tardis::capi {

inline nvme::SystemPaths paths_of(const tardis_nvme_machine* machine) {
  nvme::SystemPaths paths;
  if (machine == nullptr) return paths;
  if (machine->sys != nullptr) paths.sys = machine->sys;
  if (machine->proc != nullptr) paths.proc = machine->proc;
  if (machine->dev != nullptr) paths.dev = machine->dev;
  return paths;
}

inline Status give(const std::string& text, char** json) {
  if (json == nullptr) return Error{Code::kInvalidArgument, "expected a place for the answer, found none"};
  *json = copy_text(text);
  if (*json == nullptr) return Error{Code::kInternal, "out of memory"};
  return {};
}

inline Error missing(const char* call, const char* what) {
  return {Code::kInvalidArgument, std::string(call) + ": expected " + what + ", found none"};
}

}  // namespace tardis::capi
