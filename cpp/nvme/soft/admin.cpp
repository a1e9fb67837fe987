// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/admin.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "nvme/soft/core.h"

namespace tardis::nvme {
namespace {

void pad(char* field, std::size_t bytes, const std::string& text) {
  std::memset(field, ' ', bytes);
  std::memcpy(field, text.data(), std::min(bytes, text.size()));
}

}  // namespace

Sc SoftAdmin::refuse(const SoftCommand& command, Sc status, const std::string& text) const {
  return Blame{core_.log(), 0, command.entry}.refuse(status, ViolationKind::kAdmin, text);
}

bool SoftAdmin::execute(SoftCommand& command) {
  const SubmissionEntry& entry = command.entry;
  const auto now = [&](Sc status) {
    command.status = status;
    return true;
  };
  if ((entry.flags & 3) != 0 || entry.data_pointer() != DataPointer::kPrp) {
    return now(Blame{core_.log(), 0, entry}.refuse(kScInvalidField, ViolationKind::kField,
                                                   "admin commands are neither fused nor use SGLs"));
  }
  switch (static_cast<AdminOpcode>(entry.opcode)) {
    case AdminOpcode::kDeleteSq:
      return delete_sq(command);
    case AdminOpcode::kCreateSq:
      return now(create_sq(command));
    case AdminOpcode::kGetLogPage:
      return now(get_log_page(command));
    case AdminOpcode::kDeleteCq:
      return now(delete_cq(command));
    case AdminOpcode::kCreateCq:
      return now(create_cq(command));
    case AdminOpcode::kIdentify:
      return now(identify(command));
    case AdminOpcode::kAbort:
      return now(abort(command));
    case AdminOpcode::kSetFeatures:
      return now(set_features(command));
    case AdminOpcode::kGetFeatures:
      return now(get_features(command));
    case AdminOpcode::kAsyncEvent:
      return async_event(command);
    case AdminOpcode::kDoorbellBufferConfig:
      break;  // Identify says that there are none
  }
  return now(Blame{core_.log(), 0, entry}.refuse(kScInvalidOpcode, ViolationKind::kOpcode,
                                                 "admin opcode " + hex_address(entry.opcode) + " is not supported"));
}

// ---- data to the host

Sc SoftAdmin::answer(SoftCommand& command, const void* page, std::uint64_t bytes) {
  const Blame blame{core_.log(), 0, command.entry};
  DmaSpace::Reader& reader = core_.workers().front()->reader();
  if (const Sc bad = walk_data_pointer(blame, core_.rules().data_pointer, bytes, true, reader, command.pieces))
    return bad;
  return copy_to_pieces(command, core_.log(), reader, page);
}

Sc SoftAdmin::identify(SoftCommand& command) {
  switch (command.entry.cdw10 & 0xff) {
    case kCnsNamespace:
      return identify_namespace(command);
    case kCnsController:
      return identify_controller(command);
    case kCnsActiveNamespaces:
      return identify_active(command);
    case kCnsDescriptors:
      return identify_descriptors(command);
    default:
      return refuse(command, kScInvalidField, "CNS " + hex_address(command.entry.cdw10 & 0xff) + " is not supported");
  }
}

Sc SoftAdmin::identify_controller(SoftCommand& command) {
  const SoftControllerOptions& options = core_.options();
  IdentifyController page{};
  page.vendor = page.subsystem_vendor = 0x1b36;
  pad(page.serial, sizeof page.serial, options.serial);
  pad(page.model, sizeof page.model, "TARDIS software NVMe controller");
  pad(page.firmware, sizeof page.firmware, "1");
  page.mdts = options.mdts;
  page.controller_id = 1;
  page.version = kSoftVersion;
  page.rtd3_entry_us = options.shutdown_us;
  page.retry_delay_100ms[0] = 1;
  page.abort_limit = options.abort_limit;
  page.async_event_limit = options.async_event_limit;
  page.sqes = kSubmissionEntryShift | kSubmissionEntryShift << 4;
  page.cqes = kCompletionEntryShift | kCompletionEntryShift << 4;
  page.max_commands = static_cast<std::uint16_t>(std::min(options.max_queue_entries, 0xffffu));
  page.namespaces = static_cast<std::uint32_t>(options.namespaces.size());
  page.oncs = kOncsDatasetManagement | kOncsWriteZeroes;
  page.volatile_cache = static_cast<std::uint8_t>((core_.has_cache() ? 1 : 0) | 3 << 1);
  page.awun = page.awupf = options.atomic_blocks;
  page.sgls = options.sgl | (options.sgl_bit_bucket ? kSglBitBucket : 0u) |
              (options.sgl_longer_than_data ? kSglLongerThanData : 0u);
  page.sgl_blocks = options.sgl_blocks;
  const std::string name = "nqn.2024-01.io.tardis:" + options.serial;
  std::memcpy(page.subsystem, name.data(), std::min(sizeof page.subsystem - 1, name.size()));
  return answer(command, &page, sizeof page);
}

std::array<std::uint8_t, 16> SoftAdmin::nguid_of(std::uint32_t id) const {
  std::array<std::uint8_t, 16> nguid{};
  const std::string& serial = core_.options().serial;
  std::memcpy(nguid.data(), serial.data(), std::min<std::size_t>(12, serial.size()));
  nguid[15] = static_cast<std::uint8_t>(id);
  return nguid;
}

Sc SoftAdmin::identify_namespace(SoftCommand& command) {
  const auto& namespaces = core_.rules().namespaces;
  const std::uint32_t id = command.entry.namespace_id;
  if (id == 0 || id > namespaces.size()) {
    return Blame{core_.log(), 0, command.entry}.refuse(kScInvalidNamespace, ViolationKind::kNamespace,
                                                       "namespace " + hex_address(id) + " does not exist");
  }
  IdentifyNamespace page{};  // of zeros if the namespace is not active
  const SoftNamespaceState& space = namespaces[id - 1];
  if (space.medium != nullptr) {
    page.size_blocks = space.blocks;
    page.capacity_blocks = page.used_blocks = std::min(space.blocks, space.medium->capacity() >> space.block_shift);
    page.nsfeat = page.capacity_blocks < space.blocks ? kNsfeatThin : 0;
    page.attributes = space.medium->read_only() ? kNsattrWriteProtected : 0;
    page.deallocate = space.medium->deallocates_to_zero() ? 1 : 0;
    page.optimal_boundary = space.optimal_boundary;
    page.format_table[0].block_shift = static_cast<std::uint8_t>(space.block_shift);
    const auto nguid = nguid_of(id);
    std::memcpy(page.nguid, nguid.data(), nguid.size());
  }
  return answer(command, &page, sizeof page);
}

Sc SoftAdmin::identify_active(SoftCommand& command) {
  if (command.entry.namespace_id >= 0xfffffffe) {
    return Blame{core_.log(), 0, command.entry}.refuse(kScInvalidNamespace, ViolationKind::kNamespace,
                                                       "the list of active namespaces begins after 0 to fffffffd");
  }
  std::array<std::uint32_t, kIdentifyBytes / 4> page{};
  const auto& namespaces = core_.rules().namespaces;
  std::size_t count = 0;
  for (std::uint64_t id = std::uint64_t{command.entry.namespace_id} + 1; id <= namespaces.size(); ++id) {
    if (namespaces[id - 1].medium != nullptr && count < page.size()) page[count++] = static_cast<std::uint32_t>(id);
  }
  return answer(command, page.data(), kIdentifyBytes);
}

Sc SoftAdmin::identify_descriptors(SoftCommand& command) {
  const auto& namespaces = core_.rules().namespaces;
  const std::uint32_t id = command.entry.namespace_id;
  if (id == 0 || id > namespaces.size() || namespaces[id - 1].medium == nullptr) {
    return Blame{core_.log(), 0, command.entry}.refuse(kScInvalidNamespace, ViolationKind::kNamespace,
                                                       "namespace " + hex_address(id) + " is not active");
  }
  std::array<std::byte, kIdentifyBytes> page{};
  std::size_t at = 0;
  const auto put = [&](DescriptorType type, const void* value, std::uint8_t length) {
    const NamespaceDescriptor head{type, length, {}};
    std::memcpy(page.data() + at, &head, sizeof head);
    std::memcpy(page.data() + at + sizeof head, value, length);
    at += sizeof head + length;
  };
  const auto nguid = nguid_of(id);
  put(kDescriptorNguid, nguid.data(), static_cast<std::uint8_t>(nguid.size()));
  const auto& set = core_.options().namespaces[id - 1].command_set;
  if (set) put(kDescriptorCommandSet, &*set, 1);
  return answer(command, page.data(), kIdentifyBytes);
}

// Empty logs: this controller's errors are in its list of violations.
Sc SoftAdmin::get_log_page(SoftCommand& command) {
  const std::uint8_t log = command.entry.cdw10 & 0xff;
  const std::uint64_t words = (command.entry.cdw10 >> 16 | std::uint64_t{command.entry.cdw11 & 0xffff} << 16) + 1;
  if (log < kLogErrors || log > kLogFirmware) return refuse(command, kScInvalidLogPage, "no such log page");
  if (words * 4 > kIdentifyBytes) return refuse(command, kScInvalidField, "at most 4096 bytes of a log page at a time");
  if (log == kLogErrors && (command.entry.cdw10 & kRetainEvent) == 0) events_masked_ = false;
  const std::array<std::byte, kIdentifyBytes> page{};
  return answer(command, page.data(), words * 4);
}

// ---- features

bool SoftAdmin::io_queues_exist() const {
  return std::any_of(core_.workers().begin(), core_.workers().end(), [](const auto& worker) {
    const SoftController::Core::Turn turn(*worker);
    return worker->has_io_queues();
  });
}

Sc SoftAdmin::set_features(SoftCommand& command) {
  const std::uint32_t value = command.entry.cdw11;
  switch (command.entry.cdw10 & 0xff) {
    case kFeatureQueues: {
      const std::uint32_t submission = value & 0xffff, completion = value >> 16;
      if (submission == 0xffff || completion == 0xffff)
        return refuse(command, kScInvalidField, "65536 queues are no number");
      if (io_queues_exist()) {
        return refuse(command, kScCommandSequence, "the number of queues is asked for before queues are created");
      }
      granted_ = std::min(std::max(submission, completion) + 1, core_.options().queue_pairs);
      command.result = (granted_ - 1) | (granted_ - 1) << 16;
      return kScSuccess;
    }
    case kFeatureVolatileCache:
      if (!core_.has_cache()) return refuse(command, kScInvalidField, "there is no volatile cache");
      core_.enable_cache((value & 1) != 0);
      return kScSuccess;
    case kFeatureAsyncEvents:
      event_configuration_ = value;
      return kScSuccess;
    default:
      return refuse(command, kScInvalidField,
                    "feature " + hex_address(command.entry.cdw10 & 0xff) + " is not supported");
  }
}

Sc SoftAdmin::get_features(SoftCommand& command) {
  switch (command.entry.cdw10 & 0xff) {
    case kFeatureQueues: {
      command.result = (queue_pairs() - 1) | (queue_pairs() - 1) << 16;
      return kScSuccess;
    }
    case kFeatureVolatileCache:
      if (!core_.has_cache()) return refuse(command, kScInvalidField, "there is no volatile cache");
      command.result = core_.cache_enabled() ? 1 : 0;
      return kScSuccess;
    case kFeatureAsyncEvents:
      command.result = event_configuration_;
      return kScSuccess;
    default:
      return refuse(command, kScInvalidField,
                    "feature " + hex_address(command.entry.cdw10 & 0xff) + " is not supported");
  }
}

// ---- queues

std::uint32_t SoftAdmin::queue_pairs() const { return granted_ != 0 ? granted_ : core_.options().queue_pairs; }

Sc SoftAdmin::check_queue_id(const SoftCommand& command, std::uint32_t id) const {
  if (id != 0 && id <= queue_pairs()) return kScSuccess;
  return refuse(command, kScInvalidQueueId,
                "queue id: expected 1 to " + std::to_string(queue_pairs()) + ", found " + std::to_string(id));
}

Sc SoftAdmin::check_queue(const SoftCommand& command, std::uint32_t expected_shift, std::uint32_t shift_field) {
  const SubmissionEntry& entry = command.entry;
  const std::uint32_t id = entry.cdw10 & 0xffff, entries = (entry.cdw10 >> 16) + 1;
  if (const Sc bad = check_queue_id(command, id)) return bad;
  if (entries < kMinQueueEntries || entries > core_.options().max_queue_entries) {
    return refuse(command, kScInvalidQueueSize,
                  "entries: expected 2 to " + std::to_string(core_.options().max_queue_entries) + ", found " +
                      std::to_string(entries));
  }
  const std::uint32_t shift = core_.registers().get(kRegCc) >> shift_field & 0xf;
  if (shift != expected_shift) {
    return refuse(command, kScInvalidQueueSize,
                  "entry size in CC: expected " + std::to_string(expected_shift) + ", found " + std::to_string(shift));
  }
  if ((entry.cdw11 & kQueueContiguous) == 0)
    return refuse(command, kScInvalidField, "queues are to be contiguous (CAP.CQR)");
  const std::uint64_t page = std::uint64_t{1} << core_.rules().page_shift;
  if (entry.prp.prp1 % page != 0) {
    return refuse(command, kScPrpOffsetInvalid,
                  "a queue is expected at the start of a page, found " + hex_address(entry.prp.prp1));
  }
  return kScSuccess;
}

Sc SoftAdmin::create_cq(SoftCommand& command) {
  const SubmissionEntry& entry = command.entry;
  if (const Sc bad = check_queue(command, kCompletionEntryShift, kCcIocqesShift)) return bad;
  if ((entry.cdw11 & kQueueInterrupts) != 0 && entry.cdw11 >> 16 != 0) {
    return refuse(command, kScInvalidVector, "there is no interrupt vector " + std::to_string(entry.cdw11 >> 16));
  }
  const auto id = static_cast<std::uint16_t>(entry.cdw10);
  const std::uint32_t entries = (entry.cdw10 >> 16) + 1;
  SoftWorker& worker = core_.worker_of(id);
  {
    const SoftController::Core::Turn turn(worker);
    if (worker.cq(id) != nullptr) return refuse(command, kScInvalidQueueId, "the completion queue exists");
    DmaSpace::Reader& reader = core_.workers().front()->reader();
    auto* ring =
        reinterpret_cast<CompletionEntry*>(reader.translate(entry.prp.prp1, entries * sizeof(CompletionEntry)));
    if (ring == nullptr) {
      return refuse_address(Blame{core_.log(), 0, entry}, reader, entry.prp.prp1, "the ring of a completion queue");
    }
    if (worker.add_cq(id, entries, entry.prp.prp1, ring).looks_posted()) {
      core_.log().add(ViolationKind::kCqNotZeroed, id, &entry, "a new completion queue is expected to be of zeros");
    }
  }
  worker.wakeup().notify();
  return kScSuccess;
}

Sc SoftAdmin::create_sq(SoftCommand& command) {
  const SubmissionEntry& entry = command.entry;
  if (const Sc bad = check_queue(command, kSubmissionEntryShift, kCcIosqesShift)) return bad;
  const auto id = static_cast<std::uint16_t>(entry.cdw10), cq_id = static_cast<std::uint16_t>(entry.cdw11 >> 16);
  if (const Sc bad = check_queue_id(command, cq_id)) return bad;
  const std::uint32_t entries = (entry.cdw10 >> 16) + 1;
  for (const auto& worker : core_.workers()) {
    const SoftController::Core::Turn turn(*worker);
    if (worker->sq(id) != nullptr) return refuse(command, kScInvalidQueueId, "the submission queue exists");
  }
  SoftWorker& worker = core_.worker_of(cq_id);
  {
    const SoftController::Core::Turn turn(worker);
    SoftCompletionQueue* cq = worker.cq(cq_id);
    if (cq == nullptr) {
      return refuse(command, kScInvalidCq,
                    "completion queue " + std::to_string(cq_id) + " of a new submission queue does not exist");
    }
    DmaSpace::Reader& reader = core_.workers().front()->reader();
    const auto* ring =
        reinterpret_cast<const SubmissionEntry*>(reader.translate(entry.prp.prp1, entries * sizeof(SubmissionEntry)));
    if (ring == nullptr) {
      return refuse_address(Blame{core_.log(), 0, entry}, reader, entry.prp.prp1, "the ring of a submission queue");
    }
    worker.add_sq(id, *cq, entries, entry.prp.prp1, ring);
  }
  worker.wakeup().notify();
  return kScSuccess;
}

Sc SoftAdmin::delete_cq(SoftCommand& command) {
  const auto id = static_cast<std::uint16_t>(command.entry.cdw10);
  SoftWorker& worker = core_.worker_of(id);
  const SoftController::Core::Turn turn(worker);
  SoftCompletionQueue* cq = id == 0 ? nullptr : worker.cq(id);
  if (cq == nullptr)
    return refuse(command, kScInvalidQueueId, "completion queue " + std::to_string(id) + " does not exist");
  if (cq->submission_queues != 0) {
    return refuse(command, kScInvalidQueueDeletion,
                  "submission queues of completion queue " + std::to_string(id) + " still exist");
  }
  worker.remove_cq(*cq);
  return kScSuccess;
}

bool SoftAdmin::delete_sq(SoftCommand& command) {
  const auto id = static_cast<std::uint16_t>(command.entry.cdw10);
  for (const auto& worker : core_.workers()) {
    const SoftController::Core::Turn turn(*worker);
    SoftSubmissionQueue* sq = id == 0 ? nullptr : worker->sq(id);
    if (sq == nullptr || sq->deleting) continue;
    worker->quiesce(*sq, false, false);
    deletions_.push_back({&command, id, worker.get()});
    return false;
  }
  command.status = refuse(command, kScInvalidQueueId, "submission queue " + std::to_string(id) + " does not exist");
  return true;
}

bool SoftAdmin::poll() {
  bool some = false;
  for (std::size_t i = 0; i < deletions_.size();) {
    const Deletion deletion = deletions_[i];
    {
      const SoftController::Core::Turn turn(*deletion.worker);
      SoftSubmissionQueue& sq = *deletion.worker->sq(deletion.queue);
      if (sq.in_drive != 0) {
        ++i;
        continue;
      }
      deletion.worker->remove_sq(sq);
    }
    deletions_.erase(deletions_.begin() + static_cast<std::ptrdiff_t>(i));
    core_.workers().front()->complete(*deletion.command);
    some = true;
  }
  const std::uint32_t untold = untold_.load();
  if (!events_masked_ && !events_.empty() && untold != 0) {
    SoftCommand& request = *events_.front();
    events_.erase(events_.begin());
    const auto information = static_cast<std::uint32_t>(std::countr_zero(untold));
    untold_.fetch_and(~(1u << information));
    request.result = kEventNoSuchDoorbell | information << 8;
    events_masked_ = true;
    core_.workers().front()->complete(request);
    some = true;
  }
  return some;
}

void SoftAdmin::doorbell_event(AsyncEvent event) {
  untold_.fetch_or(1u << (event >> 8 & 0xff));
  core_.workers().front()->wakeup().notify();
}

void SoftAdmin::reset() {
  deletions_.clear();
  events_.clear();
  untold_.store(0);
  events_masked_ = false;
  event_configuration_ = 0;
  granted_ = 0;
}

// ---- abort and asynchronous events

Sc SoftAdmin::abort(SoftCommand& command) {
  const auto queue = static_cast<std::uint16_t>(command.entry.cdw10);
  const auto id = static_cast<std::uint16_t>(command.entry.cdw10 >> 16);
  if (core_.workers().front()->waiting(AdminOpcode::kAbort) > core_.options().abort_limit) {
    return refuse(command, kScAbortLimit, "more than ACL + 1 aborts at a time");
  }
  command.result = 1;  // not aborted
  if (!core_.options().aborts) return kScSuccess;
  if (queue == 0) {
    const auto event = std::find_if(events_.begin(), events_.end(),
                                    [&](const SoftCommand* request) { return request->entry.command_id == id; });
    if (event != events_.end()) {
      SoftCommand& request = **event;
      events_.erase(event);
      request.status = kScAbortRequested;
      core_.workers().front()->complete(request);
      command.result = 0;
      return kScSuccess;
    }
  }
  for (const auto& worker : core_.workers()) {
    const SoftController::Core::Turn turn(*worker);
    SoftSubmissionQueue* sq = worker->sq(queue);
    if (sq != nullptr && worker->abort(*sq, id)) command.result = 0;
  }
  return kScSuccess;
}

bool SoftAdmin::async_event(SoftCommand& command) {
  if (events_.size() > core_.options().async_event_limit) {
    command.status = refuse(command, kScAsyncEventLimit, "more than AERL + 1 requests for events at a time");
    return true;
  }
  events_.push_back(&command);
  return false;
}

}  // namespace tardis::nvme
