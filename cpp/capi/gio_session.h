// SPDX-License-Identifier: Apache-2.0
// What a handle of the C ABI stands for, and how its options are read.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gio/session.h"
#include "tardis/gio.h"

struct tardis_gio_session {
  std::unique_ptr<tardis::gio::Session> session;
  std::vector<std::uint64_t> prp;
  std::vector<tardis::nvme::SglDescriptor> sgl;

  void read_tables() {
    prp = session->prp_table();
    sgl = session->sgl_table();
  }
};

namespace tardis::capi {

Result<gio::SessionOptions> session_options(const tardis_gio_options& options);

}  // namespace tardis::capi
