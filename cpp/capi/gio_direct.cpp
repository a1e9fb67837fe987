// SPDX-License-Identifier: Apache-2.0
// The C ABI over the direct landing of gio sessions.
#include "tardis/gio_direct.h"

#include <cstring>
#include <memory>

#include "capi/gio_session.h"
#include "capi/guarded.h"

using namespace tardis;
using capi::guarded;

size_t tardis_gio_direct_list_bytes(tardis_gio_session* session) { return session->session->direct_list_bytes(); }

tardis_code tardis_gio_use_direct(tardis_gio_session* session, const tardis_copy_engine* engine, void* lists,
                                  char** error) {
  return guarded(error, [&]() -> Status {
    if (engine == nullptr)
      return Error{Code::kInvalidArgument, "tardis_gio_use_direct: expected an engine, found NULL"};
    return session->session->use_direct(*engine, lists);
  });
}

tardis_code tardis_gio_register_region(tardis_gio_session* session, void* base, uint64_t bytes, char** error) {
  return guarded(error, [&] { return session->session->add_region(base, bytes); });
}

tardis_code tardis_gio_unregister_region(tardis_gio_session* session, void* base, char** error) {
  return guarded(error, [&] { return session->session->remove_region(base); });
}

tardis_code tardis_gio_direct_table(tardis_gio_session* session, const void** table, size_t* bytes, char** error) {
  return guarded(error, [&]() -> Status {
    const auto& regions = session->session->regions();
    *table = regions.data();
    *bytes = regions.size() * sizeof(gio::DirectRegion);
    return {};
  });
}

tardis_code tardis_gio_direct_queues(tardis_gio_session* session, const void* table, void* queues, char** error) {
  return guarded(error, [&]() -> Status {
    if (table == nullptr || queues == nullptr || session->session->regions().empty()) {
      return Error{Code::kInvalidArgument,
                   "tardis_gio_direct_queues: expected queues and a copy of a table of registered regions"};
    }
    for (std::size_t i = 0; i < session->session->queues().size(); ++i) {
      std::byte* const at = static_cast<std::byte*>(queues) + i * sizeof(gio::GrantedQueue);
      gio::GrantedQueue queue;
      std::memcpy(&queue, at, sizeof queue);
      queue.direct = session->session->direct(i).seen_at(static_cast<const gio::DirectRegion*>(table));
      std::memcpy(at, &queue, sizeof queue);
    }
    return {};
  });
}
