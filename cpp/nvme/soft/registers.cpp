// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/registers.h"

#include <string>
#include <utility>

#include "nvme/soft/data_pointer.h"

namespace tardis::nvme {

SoftRegisters::SoftRegisters(void* memory, std::size_t bytes, std::uint32_t stride, std::uint32_t queues,
                             ViolationLog& log, std::function<void()> changed,
                             std::function<void(AsyncEvent)> bad_doorbell)
    : memory_(static_cast<std::byte*>(memory)),
      bytes_(bytes),
      stride_(stride),
      log_(log),
      changed_(std::move(changed)),
      bad_doorbell_(std::move(bad_doorbell)),
      exists_(2 * std::size_t{queues}) {}

void SoftRegisters::set_doorbell_exists(std::uint32_t queue, bool submission, bool exists) {
  store_word(submission ? tail_doorbell(queue) : head_doorbell(queue), 0);
  exists_[2 * std::size_t{queue} + (submission ? 0 : 1)].store(exists);
}

void SoftRegisters::power_on(std::uint64_t capabilities, std::uint32_t version) {
  const std::lock_guard lock(mutex_);
  for (std::uint32_t offset = 0; offset < kRegDoorbells; offset += 4) set(offset, 0);
  for (auto& exists : exists_) exists.store(false);
  set(kRegCap, static_cast<std::uint32_t>(capabilities));
  set(kRegCap + 4, static_cast<std::uint32_t>(capabilities >> 32));
  set(kRegVs, version);
  disabled_.store(false);
  gone_.store(false);
}

void SoftRegisters::vanish(bool reads_as_zero) {
  const std::lock_guard lock(mutex_);
  gone_.store(true);
  for (std::uint32_t offset = 0; offset < kRegDoorbells; offset += 4) set(offset, reads_as_zero ? 0 : kRegisterGone);
}

std::uint32_t SoftRegisters::read32(std::uint32_t offset) {
  if (offset % 4 != 0 || offset >= bytes_) {
    complain(ViolationKind::kRegister, 0, offset, 0, "read of a register that does not exist");
    return 0;
  }
  // Doorbells are write-only; a controller that is gone answers alike everywhere.
  return offset < kRegDoorbells ? get(offset) : gone_.load() ? get(kRegCap) : 0;
}

void SoftRegisters::write32(std::uint32_t offset, std::uint32_t value) {
  if (gone_.load()) return;
  if (offset >= kRegDoorbells) {
    write_doorbell(offset, value);
  } else if (!write_register(offset, value)) {
    return;
  }
  changed_();
}

bool SoftRegisters::write_register(std::uint32_t offset, std::uint32_t value) {
  const std::lock_guard lock(mutex_);
  if (gone_.load()) return false;
  const bool enabled = (get(kRegCc) & kCcEnable) != 0;
  switch (offset) {
    case kRegCc:
      if (!enabled && (value & kCcEnable) != 0 && (get(kRegCsts) & kCstsReady) != 0) {
        complain(ViolationKind::kRegister, 0, offset, value, "CC.EN is not to be set before CSTS.RDY is 0");
      }
      set(offset, value);
      if (enabled && (value & kCcEnable) == 0) disabled_.store(true);
      return true;
    case kRegAqa:
    case kRegAsq:
    case kRegAsq + 4:
    case kRegAcq:
    case kRegAcq + 4:
      if (enabled) {
        complain(ViolationKind::kRegister, 0, offset, value,
                 "admin queue registers are not to change while CC.EN is 1");
        return false;
      }
      break;
    default:
      complain(ViolationKind::kRegister, 0, offset, value, "write of a register that does not exist or is read-only");
      return false;
  }
  set(offset, value);
  return true;
}

void SoftRegisters::write64(std::uint32_t offset, std::uint64_t value) {
  if (gone_.load()) return;
  if (offset != kRegAsq && offset != kRegAcq) {
    complain(ViolationKind::kRegister, 0, offset, static_cast<std::uint32_t>(value),
             "64-bit write of a register that is not ASQ or ACQ");
    return;
  }
  write32(offset, static_cast<std::uint32_t>(value));
  write32(offset + 4, static_cast<std::uint32_t>(value >> 32));
}

void SoftRegisters::write_doorbell(std::uint32_t offset, std::uint32_t value) {
  const std::uint32_t step = 4u << stride_, index = (offset - kRegDoorbells) / step;
  const bool exists = (offset - kRegDoorbells) % step == 0 && index < exists_.size() && exists_[index].load();
  if (exists && get(offset) != value) {
    set(offset, value);
    return;
  }
  bad_doorbell_(exists ? kEventDoorbellValue : kEventNoSuchDoorbell);
  if (exists) {
    complain(ViolationKind::kDoorbellUnchanged, index / 2, offset, value,
             "doorbell written with the value that it had");
  } else {
    complain(ViolationKind::kDoorbellRange, index / 2, offset, value, "doorbell of a queue that does not exist");
  }
}

void SoftRegisters::complain(ViolationKind kind, std::uint32_t queue, std::uint32_t offset, std::uint32_t value,
                             const char* why) {
  log_.add(kind, static_cast<std::uint16_t>(queue), nullptr,
           std::string(why) + ": offset " + hex_address(offset) + ", value " + hex_address(value));
}

}  // namespace tardis::nvme
