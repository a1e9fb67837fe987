// SPDX-License-Identifier: Apache-2.0
// What a handle of the C ABI stands for, and how its options are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
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
// `read`: as session_options(). 0: options that make no sense.
template <class Read>
std::size_t session_memory_bytes(const tardis_gio_options* options, Read read) {
  if (options == nullptr) return 0;
  try {
    auto converted = read(*options);
    return converted ? gio::Session::memory_bytes(*converted) : 0;
  } catch (const std::exception&) {
    return 0;
  }
}
Status open_session(const gio::SessionOptions& options, void* memory, tardis_gio_session** session);

}  // namespace tardis::capi
