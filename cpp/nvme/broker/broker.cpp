// SPDX-License-Identifier: Apache-2.0
#include "nvme/broker/broker.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"

namespace tardis::nvme::broker {
namespace {

constexpr int kLookMs = 50;        // how often the controller is looked at
constexpr int kAcceptsAtOnce = 8;  // connections, before others are served again
constexpr std::uint64_t kNsPerMs = 1'000'000;

}  // namespace

Result<std::unique_ptr<Broker>> Broker::open(Driver& driver, DmaMapper& mapper, const DoorbellFile& doorbells,
                                             BrokerOptions options) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (doorbells.offset % page != 0 || kRegDoorbells % page != 0 || doorbells.bytes <= kRegDoorbells) {
    return Error{Code::kUnsupportedFormat,
                 "NVMe broker: expected doorbells in pages of their own, behind the registers, found " +
                     std::to_string(doorbells.bytes) + " bytes of registers and pages of " + std::to_string(page)};
  }
  if (driver.external_queues() == 0) {
    return Error{Code::kInvalidArgument,
                 "NVMe broker: expected a controller with queue pairs for clients, found none "
                 "granted beyond the driver's own"};
  }
  std::unique_ptr<Broker> broker(new Broker(driver, mapper, doorbells, std::move(options)));
  auto listener = listen_at(broker->options_.socket_path);
  if (!listener) return listener.error();
  broker->listener_ = std::move(*listener);
  const char* const path = broker->options_.socket_path.c_str();
  const mode_t mode = broker->options_.group ? 0660 : 0600;
  if (broker->options_.group && ::chown(path, static_cast<uid_t>(-1), *broker->options_.group) != 0) {
    return errno_error(errno, "chgrp of the socket '" + broker->options_.socket_path + "'");
  }
  if (::chmod(path, mode) != 0) return errno_error(errno, "chmod of '" + broker->options_.socket_path + "'");
  broker->stop_event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!broker->stop_event_) return errno_error(errno, "eventfd");
  broker->resets_told_ = driver.count().resets.load();
  return broker;
}

Broker::~Broker() {
  end_all({Code::kClosed, "the broker stops", ESHUTDOWN});
  if (listener_) (void)::unlink(options_.socket_path.c_str());
}

void Broker::stop() {
  const std::uint64_t one = 1;
  (void)!::write(stop_event_.get(), &one, sizeof one);  // fails only if it is set already
}

Status Broker::run() {
  std::vector<pollfd> files;
  std::vector<Session*> ready;
  std::uint64_t next_look = 0, accept_after = 0;
  for (;;) {
    const std::uint64_t now = monotonic_ns();
    files.clear();
    files.push_back({stop_event_.get(), POLLIN, 0});
    files.push_back({now >= accept_after ? listener_.get() : -1, POLLIN, 0});
    for (const auto& session : sessions_) files.push_back({session->socket(), POLLIN, 0});
    if (::poll(files.data(), files.size(), kLookMs) < 0 && errno != EINTR) return errno_error(errno, "poll");
    if ((files[0].revents & POLLIN) != 0) {
      end_all({Code::kClosed, "the broker stops", ESHUTDOWN});
      return {};
    }
    ready.clear();
    for (std::size_t i = 0; i < sessions_.size(); ++i) {
      if (files[2 + i].revents != 0) ready.push_back(sessions_[i].get());
    }
    // One message of each, so that none is kept waiting by another's.
    for (Session* const session : ready) {
      if (std::find(over_.begin(), over_.end(), session) == over_.end() && !serve(*session)) over_.push_back(session);
    }
    if (monotonic_ns() >= next_look) {
      look_at_controller();
      next_look = monotonic_ns() + kLookMs * kNsPerMs;
    }
    while (!over_.empty()) {
      Session* const session = over_.back();
      over_.pop_back();
      end(*session);
    }
    if (driver_.state() != DriverState::kLive) {
      const Error lost{Code::kIo, "NVMe broker: the controller is gone or failed for good: " + driver_.report(),
                       driver_.closed_error()};
      end_all(lost);
      return lost;
    }
    if ((files[1].revents & POLLIN) != 0) {
      const std::size_t before = sessions_.size();
      accept_clients();
      // Without room for files it would be ready all the time.
      if (sessions_.size() == before) accept_after = monotonic_ns() + kNsPerMs;
    }
  }
}

void Broker::accept_clients() {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    auto peer = admit_peer(socket.get(), options_.group);
    Session session(std::move(socket), peer ? *peer : Peer{});
    if (peer && sessions_.size() >= options_.clients) {
      peer = Error{Code::kBusy, "NVMe broker: expected at most " + std::to_string(options_.clients) +
                                    " clients, found as many; end one, or raise --clients of tardis nvmed"};
    }
    if (!peer) {
      counters_.refused.fetch_add(1);
      send_farewell(session, peer.error());
      continue;
    }
    counters_.accepted.fetch_add(1);
    sessions_.push_back(std::make_unique<Session>(std::move(session)));
    counters_.clients.store(sessions_.size());
  }
}

void Broker::fill(Answer& answer, Kind kind, std::uint32_t number, const Status& status) {
  answer.header.kind = kind;
  answer.header.number = number;
  answer.resets = static_cast<std::uint32_t>(driver_.count().resets.load());
  answer.cache_losses = driver_.cache_losses();
  if (status) return;
  answer.code = static_cast<std::int32_t>(status.error().code);
  answer.os_error = status.error().os_error;
  put_text(answer.text, status.error().message);
}

template <class Reply>
bool Broker::reply(Session& session, const Header& request, Reply& reply, const Status& status, int file) {
  // First: a client that hears of its new queue knows what ended its old ones.
  tell_of_resets();
  Answer* head = nullptr;
  if constexpr (std::is_same_v<Reply, Answer>) {
    head = &reply;
  } else {
    head = &reply.answer;
  }
  fill(*head, request.kind, request.number, status);
  head->header.bytes = sizeof reply;
  if (send(session.socket(), bytes_of(reply), file) == Sent::kYes) return true;
  // One reply for a request fits, unless the client sends without reading.
  counters_.dropped.fetch_add(1);
  return false;
}

bool Broker::malformed(Session& session, const std::string& found) {
  counters_.dropped.fetch_add(1);
  log("client " + session.who() + " is dropped: " + found);
  // Before it hears of it: nothing of it is in use any more.
  (void)session.take_back(driver_, mapper_, ranges_);
  send_farewell(
      session,
      {Code::kInvalidArgument,
       "NVMe broker: expected a request of protocol version " + std::to_string(kVersion) + ", found " + found, EPROTO});
  return false;
}

bool Broker::serve(Session& session) {
  Message message;
  switch (receive(session.socket(), message)) {
    case Received::kNothing:
      return true;
    case Received::kEnd:
      counters_.ended.fetch_add(1);
      return false;
    case Received::kMalformed:
      return malformed(session, "something else");
    case Received::kMessage:
      break;
  }
  Header header;
  std::memcpy(&header, message.memory.data(), sizeof header);
  if (header.version != kVersion) {
    return malformed(session, "version " + std::to_string(header.version) + "; use the same release on both sides");
  }
  if (header.number == 0) return malformed(session, "a request without a number");
  if (session.greeted() == (header.kind == Kind::kHello)) {
    return malformed(session, session.greeted() ? "a second greeting" : "a request before the greeting");
  }
  if (driver_.state() != DriverState::kLive) return true;  // they all end in this round
  counters_.requests.fetch_add(1);
  return answer(session, message, header.kind);
}

bool Broker::answer(Session& session, const Message& message, Kind kind) {
  const auto read = [&](auto& request) { return read_message(message.memory.data(), message.bytes, request); };
  const std::string wrong = "a request of kind " + std::to_string(static_cast<int>(kind)) + " and " +
                            std::to_string(message.bytes) + " bytes";
  switch (kind) {
    case Kind::kHello: {
      HelloRequest request;
      if (!read(request)) break;
      session.greet(get_text(request.name));
      log("client " + session.who() + " has come");
      HelloReply made = hello();
      return reply(session, request.header, made, {}, doorbells_.fd);
    }
    case Kind::kNamespaces: {
      NamespacesRequest request;
      if (!read(request)) break;
      NamespacesReply made = namespaces(request.first);
      return reply(session, request.header, made, {});
    }
    case Kind::kOpenRange: {
      OpenRangeRequest request;
      if (!read(request)) break;
      OpenRangeReply made;
      const auto opened = session.open_range(ranges_, driver_, request, options_.limits, made);
      return reply(session, request.header, made, opened ? Status() : opened.error());
    }
    case Kind::kCloseRange: {
      CloseRangeRequest request;
      if (!read(request)) break;
      Answer made;
      return reply(session, request.header, made, session.close_range(ranges_, request.range));
    }
    case Kind::kOpenQueue: {
      OpenQueueRequest request;
      if (!read(request)) break;
      OpenQueueReply made;
      const auto opened = session.open_queue(driver_, request, options_.limits, made);
      return reply(session, request.header, made, opened ? Status() : opened.error(), opened ? opened->get() : -1);
    }
    case Kind::kRenewQueue:
    case Kind::kCloseQueue: {
      QueueRequest request;
      if (!read(request)) break;
      Answer made;
      const bool renew = kind == Kind::kRenewQueue;
      const Status done =
          renew ? session.renew_queue(driver_, request.queue) : session.close_queue(driver_, request.queue);
      return reply(session, request.header, made, done);
    }
    case Kind::kMapMemory: {
      MapMemoryRequest request;
      if (!read(request) || !message.file) break;
      MapMemoryReply made;
      const Status done = session.map_memory(mapper_, request, message.file.get(), options_.limits, made);
      return reply(session, request.header, made, done);
    }
    case Kind::kUnmapMemory: {
      UnmapMemoryRequest request;
      if (!read(request)) break;
      Answer made;
      return reply(session, request.header, made, session.unmap_memory(mapper_, request.memory));
    }
    case Kind::kBye: {
      ByeRequest request;
      if (!read(request)) break;
      Answer made;
      (void)reply(session, request.header, made, session.take_back(driver_, mapper_, ranges_));
      log("client " + session.who() + " has gone");
      return false;
    }
    case Kind::kReset:
    case Kind::kFarewell:
      break;
  }
  return malformed(session, wrong);
}

HelloReply Broker::hello() const {
  const ControllerInfo& controller = driver_.controller();
  HelloReply made;
  made.doorbell_kind = doorbells_.kind;
  made.doorbell_stride = controller.doorbell_stride;
  made.doorbell_offset = doorbells_.offset + kRegDoorbells;
  made.doorbell_bytes = doorbells_.bytes - kRegDoorbells;
  made.most_client_bytes = options_.limits.bytes;
  made.most_queues = std::min(options_.limits.queues, driver_.external_queues());
  made.most_queue_entries = controller.max_queue_entries;
  made.most_commands = controller.most_commands;
  made.sgl_rule = static_cast<std::uint32_t>(controller.sgl);
  made.sgl_blocks = controller.sgl_blocks;
  made.volatile_cache = controller.volatile_cache ? 1 : 0;
  made.max_transfer_bytes = controller.max_transfer_bytes;
  for (std::size_t i = 0; i < 4; ++i) made.retry_delay_ms[i] = controller.retry_delay_ms[i];
  put_text(made.serial, controller.serial);
  put_text(made.model, controller.model);
  return made;
}

NamespacesReply Broker::namespaces(std::uint32_t first) const {
  const auto& all = driver_.namespaces();
  NamespacesReply made;
  made.total = static_cast<std::uint32_t>(all.size());
  for (std::size_t i = first; i < all.size() && made.count < kNamespacesAtOnce; ++i) {
    made.entries[made.count++] = entry_of(all[i]);
  }
  return made;
}

void Broker::look_at_controller() {
  // Nobody else would: the driver has no commands in flight.
  if (!sessions_.empty() && driver_.state() == DriverState::kLive && !driver_.healthy()) {
    log("the controller has failed; it is reset");
    if (const auto reset = driver_.reset(); !reset) log(reset.error().message);
  }
  tell_of_resets();
  const auto now = std::chrono::steady_clock::now();
  for (const auto& session : sessions_) {
    if (session->greeted() || now - session->since() < options_.hello_wait) continue;
    counters_.dropped.fetch_add(1);
    over_.push_back(session.get());
  }
}

void Broker::tell_of_resets() {
  const std::uint64_t resets = driver_.count().resets.load();
  if (resets == resets_told_) return;
  resets_told_ = resets;
  log("the controller was reset (" + std::to_string(resets) + " times)");
  const bool live = driver_.state() == DriverState::kLive;
  for (const auto& session : sessions_) {
    // A controller that could not be stopped loses what it could still write to, before anybody hears of it.
    if (!live) {
      (void)session->unmap_all(mapper_);
      continue;
    }
    if (!session->greeted()) continue;
    Answer event;
    fill(event, Kind::kReset, 0, {});
    event.header.bytes = sizeof event;
    if (send(session->socket(), bytes_of(event)) == Sent::kYes) continue;
    if (std::find(over_.begin(), over_.end(), session.get()) == over_.end()) over_.push_back(session.get());
  }
}

void Broker::send_farewell(Session& session, const Error& why) {
  Answer event;
  fill(event, Kind::kFarewell, 0, why);
  event.header.bytes = sizeof event;
  (void)send(session.socket(), bytes_of(event));
}

void Broker::end(Session& session) {
  const auto at =
      std::find_if(sessions_.begin(), sessions_.end(), [&](const auto& each) { return each.get() == &session; });
  if (at == sessions_.end()) return;
  const std::unique_ptr<Session> owned = std::move(*at);
  sessions_.erase(at);
  if (const auto taken = owned->take_back(driver_, mapper_, ranges_); !taken) log(taken.error().message);
  log("client " + owned->who() + " has ended");
  counters_.clients.store(sessions_.size());
  tell_of_resets();
}

void Broker::end_all(const Error& why) {
  over_.clear();
  for (const auto& session : sessions_) {
    if (const auto taken = session->take_back(driver_, mapper_, ranges_); !taken) log(taken.error().message);
    send_farewell(*session, why);
  }
  sessions_.clear();
  counters_.clients.store(0);
}

}  // namespace tardis::nvme::broker
