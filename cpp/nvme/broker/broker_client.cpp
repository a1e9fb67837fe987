// SPDX-License-Identifier: Apache-2.0
#include "nvme/broker/broker_client.h"

#include <linux/vfio.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/clock.h"
#include "nvme/backoff.h"
#include "nvme/external_queue.h"
#include "nvme/vfio/detached_call.h"

namespace tardis::nvme::broker {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
constexpr std::uint64_t kListenNs = 10 * kNsPerMs;
constexpr std::chrono::seconds kResetWait{10};
constexpr std::uint64_t kMostDoorbellBytes = std::uint64_t{1} << 20;

}  // namespace

BrokerClient::BrokerClient(UniqueFd socket, BrokerClientOptions options)
    : options_(std::move(options)),
      link_(std::move(socket), options_.answer_wait),
      mapper_(link_, stopped_),
      host_memory_(mapper_),
      registered_(mapper_) {}

Result<std::shared_ptr<BrokerClient>> BrokerClient::connect(BrokerClientOptions options) {
  if (options.queues == 0 || options.queue_entries < kMinQueueEntries || options.bounce_buffers == 0 ||
      options.bounce_bytes < kPageBytes || options.max_command_bytes < kPageBytes || options.io_timeout_ms == 0) {
    return Error{Code::kInvalidArgument,
                 "NVMe broker client options: expected at least 1 queue of 2 entries, 1 bounce buffer of 4096 bytes, "
                 "commands of 4096 bytes, and a time-out above 0"};
  }
  auto socket = connect_to(options.socket_path);
  if (!socket) return socket.error();
  std::shared_ptr<BrokerClient> client(new BrokerClient(std::move(*socket), std::move(options)));
  if (auto greeted = client->greet(); !greeted) return greeted.error();
  const std::uint32_t wanted = std::min(client->options_.queues, client->hello_.most_queues);
  for (std::uint32_t i = 0; i < wanted; ++i) {
    const auto opened = client->open_queue();
    if (opened) continue;
    // Others may have what the controller grants; one is enough.
    if (opened.error().code == Code::kBusy && i > 0) break;
    return opened.error();
  }
  return client;
}

BrokerClient::~BrokerClient() {
  link_.say_bye();
  give_up(link_.why());
}

Status BrokerClient::greet() {
  HelloRequest request;
  put_text(request.name, options_.name);
  auto file = link_.call(Kind::kHello, request, hello_);
  if (!file) return file.error();
  if (!*file || hello_.most_queues == 0 || hello_.doorbell_bytes == 0 || hello_.doorbell_bytes > kMostDoorbellBytes) {
    return Error{Code::kIo, "NVMe broker: expected a file with doorbells and a queue at least, found none", EPROTO};
  }
  device_ = std::move(*file);
  auto page = Mapping::map(device_.get(), hello_.doorbell_offset, hello_.doorbell_bytes, "doorbells");
  if (!page) return page.error();
  doorbells_ = std::make_unique<DoorbellPage>(std::move(*page));
  controller_.serial = get_text(hello_.serial);
  controller_.model = get_text(hello_.model);
  controller_.max_transfer_bytes = hello_.max_transfer_bytes;
  controller_.sgl = options_.use_sgl ? static_cast<SglRule>(hello_.sgl_rule) : SglRule::kNone;
  controller_.sgl_blocks = hello_.sgl_blocks;
  controller_.volatile_cache = hello_.volatile_cache != 0;
  std::copy_n(hello_.retry_delay_ms, 4, controller_.retry_delay_ms.begin());
  controller_.most_commands = hello_.most_commands;
  controller_.max_queue_entries = hello_.most_queue_entries;
  controller_.doorbell_stride = hello_.doorbell_stride;
  return {};
}

Status BrokerClient::open_queue() {
  const IoQueueShape shape =
      IoQueueShape::within(controller_, options_.queue_entries, options_.bounce_buffers, options_.bounce_bytes);
  OpenQueueRequest request;
  request.entries = shape.entries;
  request.more_bytes = IoQueue::memory_bytes(shape) - ExternalRings::bytes(shape.entries);
  OpenQueueReply reply;
  auto file = link_.call(Kind::kOpenQueue, request, reply);
  if (!file) return file.error();
  if (reply.memory_bytes != IoQueue::memory_bytes(shape)) {
    return Error{Code::kIo,
                 "NVMe broker: expected queue memory of " + std::to_string(IoQueue::memory_bytes(shape)) +
                     " bytes, found " + std::to_string(reply.memory_bytes),
                 EPROTO};
  }
  if (auto good = check_shared_memory(file->get(), 0, reply.memory_bytes); !good) return good;
  auto memory = Mapping::map(file->get(), 0, reply.memory_bytes, "queue memory");
  if (!memory) return memory.error();
  auto own = std::make_unique<OwnQueue>();
  own->made_after.store(reply.answer.resets);
  own->memory = std::make_unique<QueueMemoryMapper>(link_, stopped_, reply.queue, std::move(*memory), reply.address);
  auto queue = IoQueue::create(*own->memory, *doorbells_, static_cast<std::uint16_t>(reply.queue), shape, {});
  if (!queue) return queue.error();
  own->queue = std::move(*queue);
  queues_.push_back(std::move(own));
  pool_.add(*queues_.back()->queue);
  return {};
}

Result<std::vector<NamespaceInfo>> BrokerClient::namespaces() {
  std::vector<NamespaceInfo> found;
  for (;;) {
    NamespacesRequest request;
    request.first = static_cast<std::uint32_t>(found.size());
    NamespacesReply reply;
    if (auto done = link_.call(Kind::kNamespaces, request, reply); !done) return done.error();
    for (std::uint32_t i = 0; i < std::min(reply.count, kNamespacesAtOnce); ++i) {
      found.push_back(info_of(reply.entries[i]));
    }
    if (reply.count == 0 || found.size() >= reply.total) return found;
  }
}

BrokerClient::OwnQueue& BrokerClient::own(const IoQueue& queue) {
  return **std::find_if(queues_.begin(), queues_.end(), [&](const auto& each) { return each->queue.get() == &queue; });
}

bool BrokerClient::healthy(IoQueue& queue) {
  link_.listen();
  return current(queue);
}

void BrokerClient::listen_at_times() {
  const std::uint64_t now = monotonic_ns();
  if (now < next_listen_.load(std::memory_order_relaxed)) return;
  next_listen_.store(now + kListenNs, std::memory_order_relaxed);
  link_.listen();
}

void BrokerClient::wait_for_late(IoQueue& queue) {
  const std::uint64_t deadline = monotonic_ns() + options_.grace_ms * kNsPerMs;
  Backoff backoff;
  while (queue.quarantined() != 0 && monotonic_ns() < deadline && healthy(queue)) {
    queue.collect();
    backoff.pause();
  }
}

void BrokerClient::recover(IoQueue& queue) {
  link_.listen();
  queue.stop();
  if (current(queue) && queue.fault() == QueueFault::kNone) {
    const auto overdue = queue.quarantine_overdue(monotonic_ns());
    count_.timeouts.fetch_add(overdue.size(), std::memory_order_relaxed);
    wait_for_late(queue);
    if (current(queue) && queue.resume()) return;
  }
  if (queue.fault() != QueueFault::kNone) count_.queue_faults.fetch_add(1, std::memory_order_relaxed);
  // What has completed need not be sent again.
  queue.collect();
  QueueRequest request;
  request.queue = queue.id();
  Answer answer;
  if (const auto renewed = link_.call(Kind::kRenewQueue, request, answer); !renewed) return give_up(renewed.error());
  count_.queue_deletions.fetch_add(1, std::memory_order_relaxed);
  const auto held = queue.hold();
  queue.restart_held();
  own(queue).made_after.store(answer.resets);
}

bool BrokerClient::stop_device() {
  if (link_.farewell()) return true;
  // The threads of a software controller went with their process.
  if (hello_.doorbell_kind == DoorbellKind::kMemory) return link_.hung_up();
  if (!device_) return true;  // it was never given a queue
  // Nobody else can: the kernel gives the function back, and resets it, only when the last process has closed it.
  const auto error = call_within(
      kResetWait, [fd = device_.get()] { return ::ioctl(fd, VFIO_DEVICE_RESET) == 0 || errno == ENODEV ? 0 : errno; });
  return error && *error == 0;
}

void BrokerClient::give_up(const Error& why) {
  link_.end(why);
  const std::lock_guard lock(give_up_mutex_);
  if (given_up_) return;
  given_up_ = true;
  stopped_.store(stop_device());
  // First what users own. Only then do their requests end.
  if (!registered_.revoke() && !stopped_.load()) {
    std::fprintf(stderr,
                 "tardis: NVMe controller '%s' %s: its broker does not answer, and memory of this process cannot be "
                 "taken away from the controller (expected a reset of its function to work); ending the process\n",
                 controller_.model.c_str(), controller_.serial.c_str());
    std::abort();
  }
  for (const auto& each : queues_) {
    const auto held = each->queue->hold();
    (void)each->queue->close_held();  // what cannot be unmapped is never freed
  }
  if (doorbells_) doorbells_->unmap();
  device_.reset();
}

}  // namespace tardis::nvme::broker
