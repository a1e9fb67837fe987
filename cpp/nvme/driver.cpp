// SPDX-License-Identifier: Apache-2.0
// Bring-up, and what users ask of a driver outside I/O.
#include "nvme/driver.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>

namespace tardis::nvme {
namespace {

SubmissionEntry identify(IdentifyCns cns, std::uint32_t namespace_id) {
  SubmissionEntry command{};
  command.opcode = static_cast<std::uint8_t>(AdminOpcode::kIdentify);
  command.namespace_id = namespace_id;
  command.cdw10 = cns;
  return command;
}

std::string bytes_text(std::uint64_t bytes) {
  if (bytes >= 1u << 20 && bytes % (1u << 20) == 0) return std::to_string(bytes >> 20) + " MiB";
  return std::to_string(bytes >> 10) + " KiB";
}

}  // namespace

Driver::Driver(RegisterWindow& window, DmaMapper& mapper, DriverOptions options)
    : window_(window),
      mapper_(mapper),
      options_(std::move(options)),
      registers_(window, options_.ready_timeout_ms),
      host_memory_(mapper),
      registered_(mapper) {}

Result<std::unique_ptr<Driver>> Driver::open(RegisterWindow& window, DmaMapper& mapper, DriverOptions options) {
  if (options.queues == 0 || options.queues >= kMaxQueueEntries || options.queue_entries < kMinQueueEntries ||
      options.bounce_buffers == 0 || options.bounce_bytes < kPageBytes || options.max_command_bytes < kPageBytes ||
      options.io_timeout_ms == 0 || options.admin_timeout_ms == 0) {
    return Error{Code::kInvalidArgument,
                 "NVMe driver options: expected 1 to 65535 queues of at least 2 entries, at least 1 bounce buffer of "
                 "4096 bytes, commands of 4096 bytes, and time-outs above 0"};
  }
  if (mapper.page_bytes() < kPageBytes) {
    return Error{Code::kInvalidArgument, "NVMe driver: expected a mapper of 4096-byte pages at least, found " +
                                             std::to_string(mapper.page_bytes())};
  }
  std::unique_ptr<Driver> driver(new Driver(window, mapper, std::move(options)));
  if (auto started = driver->start(); !started) return started.error();
  driver->started_ = true;
  return driver;
}

Driver::~Driver() { (void)shut_down(); }

Status Driver::start() {
  if (registers_.health() == Health::kGone) {
    return Error{Code::kIo,
                 "NVMe controller: expected registers, found " + registers_.describe() +
                     "; is the drive plugged in, powered, and its memory decoding on?",
                 ENODEV};
  }
  if (auto fits = check_capabilities(registers_.capabilities()); !fits) return fits;
  auto admin = AdminQueue::create(mapper_, window_, registers_);
  if (!admin) return admin.error();
  admin_ = std::move(*admin);
  if (auto ready = start_controller(); !ready) return ready;
  if (auto known = identify_controller(controller_); !known) return known;
  if (auto granted = request_queues(granted_queues_); !granted) return granted;
  auto found = find_namespaces(refused_);
  if (!found) return found.error();
  namespaces_ = std::move(*found);

  // The rings of an owner outside have no shadows, and a controller that has them looks at nothing else.
  const bool room = doorbells_end(options_.queues, controller_.doorbell_stride) - kRegDoorbells <= kPageBytes;
  if (options_.shadow_doorbells && controller_.shadow_doorbells && options_.external_queues == 0 && room) {
    auto memory = DmaMemory::allocate(mapper_, 2 * kPageBytes);
    if (!memory) return memory.error();
    shadow_ = std::move(*memory);
    if (auto set = configure_shadows(); !set) return set;
  }

  const IoQueueShape shape =
      IoQueueShape::within(controller_, options_.queue_entries, options_.bounce_buffers, options_.bounce_bytes);
  for (std::uint32_t i = 0; i < std::min(options_.queues, granted_queues_); ++i) {
    const auto id = static_cast<std::uint16_t>(i + 1);
    auto queue = IoQueue::create(mapper_, window_, id, shape, shadows_of(id));
    if (!queue) return queue.error();
    // First: if only half of it is created, its memory must stay until the controller is off.
    queues_.push_back(std::move(*queue));
    if (auto created = create_queue(*queues_.back()); !created) return created;
    pool_.add(*queues_.back());
  }
  return {};
}

Status Driver::start_controller() {
  admin_->renew();
  if (auto up = registers_.bring_up(admin_->rings()); !up) return up;
  admin_->resume();
  return {};
}

Status Driver::identify_controller(ControllerInfo& info) {
  IdentifyController data;
  auto reply = admin_->execute(identify(kCnsController, 0), options_.admin_timeout_ms,
                               std::as_writable_bytes(std::span(&data, 1)));
  if (auto ok = answered(reply, "Identify (controller)"); !ok) return ok;
  auto read = read_controller(data, registers_.capabilities(), registers_.version(), options_.quirks);
  if (!read) return read.error();
  info = std::move(*read);
  if (!options_.use_sgl) info.sgl = SglRule::kNone;
  return {};
}

Result<std::vector<NamespaceInfo>> Driver::find_namespaces(std::vector<std::string>& refused) {
  std::array<std::uint32_t, kIdentifyBytes / sizeof(std::uint32_t)> list{};
  auto reply = admin_->execute(identify(kCnsActiveNamespaces, 0), options_.admin_timeout_ms,
                               std::as_writable_bytes(std::span(list)));
  if (auto ok = answered(reply, "Identify (active namespaces)"); !ok) return ok.error();
  std::vector<NamespaceInfo> found;
  for (const std::uint32_t id : read_namespace_list(list)) {
    auto fits = find_command_set(id);
    if (!fits && fits.error().code != Code::kUnsupportedFormat) return fits.error();
    if (!fits) {
      refused.push_back(fits.error().message);
      continue;
    }
    IdentifyNamespace data;
    reply = admin_->execute(identify(kCnsNamespace, id), options_.admin_timeout_ms,
                            std::as_writable_bytes(std::span(&data, 1)));
    if (auto ok = answered(reply, "Identify (namespace)"); !ok) return ok.error();
    auto info = read_namespace(id, data, controller_);
    if (info) {
      found.push_back(*info);
    } else {
      refused.push_back(info.error().message);
    }
  }
  return found;
}

// Only where there can be another than NVM: older controllers need not know the question.
Status Driver::find_command_set(std::uint32_t id) {
  if (!registers_.capabilities().command_sets()) return {};
  std::array<std::byte, kIdentifyBytes> descriptors{};
  auto reply = admin_->execute(identify(kCnsDescriptors, id), options_.admin_timeout_ms, descriptors);
  if (auto ok = answered(reply, "Identify (namespace descriptors)"); !ok) return ok;
  return check_command_set(id, descriptors, controller_);
}

const NamespaceInfo* Driver::find_namespace(std::uint32_t id) const {
  for (const NamespaceInfo& info : namespaces_) {
    if (info.id == id) return &info;
  }
  return nullptr;
}

Status Driver::request_queues(std::uint32_t& granted) {
  SubmissionEntry command{};
  command.opcode = static_cast<std::uint8_t>(AdminOpcode::kSetFeatures);
  command.cdw10 = kFeatureQueues;
  const std::uint64_t wanted = std::uint64_t{options_.queues} + options_.external_queues;
  const auto asked = static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted, kMaxQueueEntries - 1) -
                                                1);  // 0-based; ffffh is not allowed
  command.cdw11 = asked << 16 | asked;
  auto reply = admin(command);
  if (auto ok = answered(reply, "Set Features (number of queues)"); !ok) return ok;
  granted = std::min(reply->result & 0xffff, reply->result >> 16) + 1;
  return {};
}

// What a controller must still be after a reset, since requests are in flight that count on it.
Status Driver::check_unchanged() {
  ControllerInfo now;
  if (auto known = identify_controller(now); !known) return known;
  std::uint32_t granted = 0;
  if (auto answer = request_queues(granted); !answer) return answer;
  std::vector<std::string> refused;
  auto found = find_namespaces(refused);
  if (!found) return found.error();
  ControllerInfo before = controller_;
  before.firmware = now.firmware;  // a new one may begin with a reset
  if (now == before && *found == namespaces_ && granted >= queues_.size()) return {};
  return Error{Code::kIo,
               "NVMe controller '" + controller_.model + "' " + controller_.serial +
                   ": expected the same drive, namespaces and queues after a reset, found '" + now.model + "' " +
                   now.serial + ", " + std::to_string(found->size()) + " namespaces and " + std::to_string(granted) +
                   " queues; open it anew",
               EIO};
}

Result<bool> Driver::volatile_cache_enabled() {
  SubmissionEntry command{};
  command.opcode = static_cast<std::uint8_t>(AdminOpcode::kGetFeatures);
  command.cdw10 = kFeatureVolatileCache;
  auto reply = admin(command);
  if (auto ok = answered(reply, "Get Features (volatile write cache)"); !ok) return ok.error();
  return (reply->result & 1) != 0;
}

Status Driver::set_volatile_cache(bool enabled) {
  SubmissionEntry command{};
  command.opcode = static_cast<std::uint8_t>(AdminOpcode::kSetFeatures);
  command.cdw10 = kFeatureVolatileCache;
  command.cdw11 = enabled ? 1 : 0;
  return answered(admin(command), "Set Features (volatile write cache)");
}

Status Driver::register_memory(MemoryProvider& provider, void* base, std::size_t bytes) {
  if (!options_.zero_copy) {
    return Error{Code::kUnsupportedFormat, provider.name() +
                                               ": expected the option zero_copy, found it off; data goes through "
                                               "bounce buffers"};
  }
  return registered_.add(provider, base, bytes);
}

int Driver::closed_error() const {
  switch (state_.load()) {
    case DriverState::kGone:
      return ENODEV;
    case DriverState::kShutDown:
      return ESHUTDOWN;
    default:
      return ENXIO;  // EIO would say that the blocks are lost
  }
}

std::string Driver::report() const {
  char version[24];
  std::snprintf(version, sizeof version, "%u.%u", controller_.version >> 16, controller_.version >> 8 & 0xff);
  std::string text = "NVMe " + std::string(version) + " '" + controller_.model + "' " + controller_.serial + ": " +
                     std::to_string(queues_.size()) + " queue pairs";
  if (granted_queues_ < options_.queues) text += " (" + std::to_string(options_.queues) + " asked for)";
  if (options_.external_queues != 0) {
    text += " and up to " + std::to_string(external_queues()) + " for owners outside";
  }
  text += " of " + std::to_string(queue_depth()) + " commands";
  text += controller_.sgl == SglRule::kNone    ? ", PRP"
          : controller_.sgl == SglRule::kDword ? ", PRP and SGL (dword)"
                                               : ", PRP and SGL";
  if (controller_.max_transfer_bytes <= std::uint64_t{kMaxBlocksPerCommand} * 512) {
    text += ", " + bytes_text(controller_.max_transfer_bytes) + " a command";
  }
  text += controller_.volatile_cache ? ", volatile cache" : ", no volatile cache";
  if (shadow_.bytes() != 0) text += ", doorbells in memory";
  const std::uint64_t registered = registered_.bytes();
  text += registered != 0 ? ", zero copy of " + bytes_text(registered) + " registered memory" : ", bounce buffers";
  switch (state_.load()) {
    case DriverState::kLive:
      break;
    case DriverState::kGone:
      text += ", GONE";
      break;
    case DriverState::kFailed:
      text += ", FAILED";
      break;
    case DriverState::kShutDown:
      text += ", shut down";
  }
  return text;
}

DriverCounters Driver::counters() const {
  DriverCounters c;
  c.commands = count_.commands.load();
  c.read_bytes = count_.read_bytes.load();
  c.written_bytes = count_.written_bytes.load();
  c.bounced_commands = count_.bounced_commands.load();
  c.bounced_bytes = count_.bounced_bytes.load();
  c.errors = count_.errors.load();
  c.retries = count_.retries.load();
  c.timeouts = count_.timeouts.load();
  c.queue_faults = count_.queue_faults.load();
  c.aborts = count_.aborts.load();
  c.aborted = count_.aborted.load();
  c.queue_deletions = count_.queue_deletions.load();
  c.resets = count_.resets.load();
  for (const auto& queue : queues_) c.quarantined += queue->quarantined();
  return c;
}

}  // namespace tardis::nvme
