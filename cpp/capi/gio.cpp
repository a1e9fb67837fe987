// SPDX-License-Identifier: Apache-2.0
// The C ABI over gio sessions.
#include "tardis/gio.h"

#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "capi/gio_session.h"
#include "capi/guarded.h"
#include "gio/iocb.h"
#include "gio/session.h"

namespace {
constexpr std::uint32_t kMostRestUs = 10'000;
}

namespace tardis::capi {

Result<gio::SessionOptions> session_options(const tardis_gio_options& o) {
  if ((o.block_bytes != 512 && o.block_bytes != 4096) || o.bytes == 0 || o.bytes % 4096 != 0) {
    return Error{Code::kInvalidArgument,
                 "tardis_gio_options: expected blocks of 512 or 4096 bytes and whole pages of 4096, found blocks of " +
                     std::to_string(o.block_bytes) + " and " + std::to_string(o.bytes) + " bytes"};
  }
  if (o.queues == 0 || o.queues > gio::kMostQueues || o.entries < nvme::kMinQueueEntries ||
      o.entries > nvme::kMaxQueueEntries || o.commands >= o.entries || o.slot_bytes == 0 || o.slot_bytes > 2u << 20) {
    return Error{Code::kInvalidArgument,
                 "tardis_gio_options: expected 1 to " + std::to_string(gio::kMostQueues) +
                     " queues of 2 to 65536 entries, fewer commands than entries, and slots of at most 2 MiB, found " +
                     std::to_string(o.queues) + " queues, " + std::to_string(o.entries) + " entries, " +
                     std::to_string(o.commands) + " commands, slots of " + std::to_string(o.slot_bytes)};
  }
  gio::SessionOptions options;
  options.bytes = o.bytes;
  options.file = o.file == nullptr ? "" : o.file;
  options.block_shift = o.block_bytes == 512 ? 9 : 12;
  options.controller_threads = o.controller_threads;
  options.queues = o.queues;
  options.entries = o.entries;
  options.commands = o.commands;
  options.slot_bytes = o.slot_bytes;
  return options;
}

Status open_session(const gio::SessionOptions& options, void* memory, tardis_gio_session** session) {
  auto made = std::make_unique<tardis_gio_session>();
  auto opened = gio::Session::open(options, memory);
  if (!opened) return opened.error();
  made->session = std::move(*opened);
  made->read_tables();
  *session = made.release();
  return {};
}

}  // namespace tardis::capi

namespace {

using namespace tardis;
using capi::copy_text;
using capi::guarded;
using capi::session_options;

}  // namespace

size_t tardis_gio_queue_bytes(void) { return sizeof(gio::GrantedQueue); }

size_t tardis_gio_memory_bytes(const tardis_gio_options* options) {
  return capi::session_memory_bytes(options, session_options);
}

tardis_code tardis_gio_open(const tardis_gio_options* options, void* memory, tardis_gio_session** session,
                            char** error) {
  return guarded(error, [&]() -> Status {
    if (options == nullptr || session == nullptr) {
      return Error{Code::kInvalidArgument, "tardis_gio_open: expected options and a place for the session"};
    }
    auto converted = session_options(*options);
    if (!converted) return converted.error();
    return capi::open_session(*converted, memory, session);
  });
}

void tardis_gio_close(tardis_gio_session* session) { delete session; }

tardis_code tardis_gio_tables(tardis_gio_session* session, const void** prp, size_t* prp_bytes, const void** sgl,
                              size_t* sgl_bytes, char** error) {
  return guarded(error, [&]() -> Status {
    *prp = session->prp.data();
    *prp_bytes = session->prp.size() * sizeof(std::uint64_t);
    *sgl = session->sgl.data();
    *sgl_bytes = session->sgl.size() * sizeof(nvme::SglDescriptor);
    return {};
  });
}

tardis_code tardis_gio_queues(tardis_gio_session* session, void* state, void* uses, void* prp, void* sgl, void* queues,
                              char** error) {
  return guarded(error, [&]() -> Status {
    for (const void* pointer : {state, uses, prp, sgl, queues}) {
      if (pointer == nullptr) return Error{Code::kInvalidArgument, "tardis_gio_queues: expected memory, found NULL"};
    }
    std::size_t i = 0;
    for (gio::GrantedQueue queue : session->session->queues()) {
      queue.state = reinterpret_cast<gio::RingState*>(static_cast<std::byte*>(state) + i * 32);
      queue.uses = static_cast<std::uint16_t*>(uses) + i * queue.commands;
      queue.pointers.prp = queue.pointers.prp.seen_at(static_cast<std::uint64_t*>(prp));
      queue.pointers.sgl = queue.pointers.sgl.seen_at(static_cast<nvme::SglDescriptor*>(sgl));
      std::memcpy(static_cast<std::byte*>(queues) + i++ * sizeof queue, &queue, sizeof queue);
    }
    return {};
  });
}

tardis_code tardis_gio_renew(tardis_gio_session* session, char** error) {
  return guarded(error, [&]() -> Status {
    if (auto renewed = session->session->renew(); !renewed) return renewed;
    session->read_tables();
    return {};
  });
}

tardis_code tardis_gio_rest(tardis_gio_session* session, uint32_t spin_us, uint32_t sleep_us, char** error) {
  return guarded(error, [&]() -> Status {
    if (sleep_us > kMostRestUs) {
      return Error{Code::kInvalidArgument, "tardis_gio_rest: expected at most " + std::to_string(kMostRestUs) +
                                               " us of sleep, found " + std::to_string(sleep_us) +
                                               "; a command after a pause may wait as long"};
    }
    session->session->rest(spin_us, sleep_us);
    return {};
  });
}

void tardis_gio_expect(tardis_gio_session* session, int commands) { session->session->expect(commands != 0); }

tardis_code tardis_gio_read(tardis_gio_session* session, uint64_t offset, void* memory, size_t bytes, char** error) {
  return guarded(error, [&] { return session->session->read(offset, memory, bytes); });
}

tardis_code tardis_gio_write(tardis_gio_session* session, uint64_t offset, const void* memory, size_t bytes,
                             char** error) {
  return guarded(error, [&] { return session->session->write(offset, const_cast<void*>(memory), bytes); });
}

tardis_code tardis_gio_flush(tardis_gio_session* session, char** error) {
  return guarded(error, [&] { return session->session->flush(); });
}

char* tardis_gio_report(tardis_gio_session* session) {
  try {
    return copy_text(session->session->report());
  } catch (const std::exception&) {
    return nullptr;
  }
}
