// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/vfio_device.h"

#include <linux/vfio.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "nvme/vfio/detached_call.h"

namespace tardis::nvme {
namespace {

constexpr std::size_t kMostInfoBytes = 64u << 10;
constexpr __u32 kFeatureDmaBuf = 11;  // VFIO_DEVICE_FEATURE_DMA_BUF, newer than many headers

struct RegionFacts {
  std::uint64_t offset = 0, bytes = 0;
  std::uint64_t mappable = 0;  // from its beginning
};

// What of [0, bytes) can be mapped, where the kernel names parts.
std::uint64_t mappable_front(std::span<const std::byte> memory, std::size_t at, std::uint64_t bytes) {
  while (at != 0) {
    vfio_info_cap_header header{};
    if (at + sizeof header > memory.size()) return 0;
    std::memcpy(&header, memory.data() + at, sizeof header);
    if (header.id == VFIO_REGION_INFO_CAP_SPARSE_MMAP) {
      vfio_region_info_cap_sparse_mmap list{};
      if (at + sizeof list > memory.size()) return 0;
      std::memcpy(&list, memory.data() + at, sizeof list);
      std::uint64_t front = 0;
      for (std::size_t i = 0; i < list.nr_areas; ++i) {
        vfio_region_sparse_mmap_area area{};
        const std::size_t entry = at + sizeof list + i * sizeof area;
        if (entry + sizeof area > memory.size()) break;
        std::memcpy(&area, memory.data() + entry, sizeof area);
        if (area.offset <= front) front = std::max<std::uint64_t>(front, area.offset + area.size);
      }
      return std::min(front, bytes);
    }
    if (header.next <= at) break;
    at = header.next;
  }
  return bytes;
}

Result<RegionFacts> read_region(int fd, std::uint32_t index) {
  std::vector<std::byte> memory(sizeof(vfio_region_info));
  vfio_region_info head{};
  for (;;) {
    head = {};
    head.argsz = static_cast<__u32>(memory.size());
    head.index = index;
    std::memcpy(memory.data(), &head, sizeof head);
    if (::ioctl(fd, VFIO_DEVICE_GET_REGION_INFO, memory.data()) != 0) {
      return errno_error(errno, "VFIO_DEVICE_GET_REGION_INFO of region " + std::to_string(index));
    }
    std::memcpy(&head, memory.data(), sizeof head);
    if (head.argsz <= memory.size() || head.argsz > kMostInfoBytes) break;
    memory.assign(head.argsz, {});
  }
  RegionFacts facts{head.offset, head.size, 0};
  if ((head.flags & VFIO_REGION_INFO_FLAG_MMAP) != 0) {
    const std::size_t at = (head.flags & VFIO_REGION_INFO_FLAG_CAPS) != 0 ? head.cap_offset : 0;
    facts.mappable = mappable_front(memory, at, head.size);
  }
  return facts;
}

// Once and for all: the event is not read.
bool fired(const UniqueFd& event) {
  pollfd look{event.get(), POLLIN, 0};
  return event && ::poll(&look, 1, 0) == 1 && (look.revents & POLLIN) != 0;
}

}  // namespace

Result<std::unique_ptr<VfioDevice>> VfioDevice::create(std::shared_ptr<VfioFiles> files, const PciAddress& address) {
  std::unique_ptr<VfioDevice> device(new VfioDevice(std::move(files), address));
  const int fd = device->files_->device.get();
  vfio_device_info info{};
  info.argsz = sizeof info;
  if (::ioctl(fd, VFIO_DEVICE_GET_INFO, &info) != 0) return errno_error(errno, "VFIO_DEVICE_GET_INFO");
  if ((info.flags & VFIO_DEVICE_FLAGS_PCI) == 0 || info.num_regions <= VFIO_PCI_CONFIG_REGION_INDEX) {
    return Error{Code::kUnsupportedFormat, "PCI device " + address.text() + ": expected a device of vfio-pci"};
  }
  device->can_reset_ = (info.flags & VFIO_DEVICE_FLAGS_RESET) != 0;
  auto config = read_region(fd, VFIO_PCI_CONFIG_REGION_INDEX);
  if (!config) return config.error();
  device->config_offset_ = config->offset;
  device->config_bytes_ = config->bytes;
  std::array<std::byte, kPciConfigBytes> space{};
  const auto bytes = std::min<std::uint64_t>(space.size(), config->bytes);
  if (auto read = device->read_config(0, std::span(space).first(bytes)); !read) return read.error();
  device->capabilities_ = read_capabilities(std::span(space).first(bytes));
  device->vectors_ = device->irq_count(VFIO_PCI_MSIX_IRQ_INDEX);
  device->release_event_ = device->watch(VFIO_PCI_REQ_IRQ_INDEX);
  device->error_event_ = device->watch(VFIO_PCI_ERR_IRQ_INDEX);
  return device;
}

Result<VfioDevice::RegisterFile> VfioDevice::register_file() const {
  auto region = read_region(files_->device.get(), VFIO_PCI_BAR0_REGION_INDEX);
  if (!region) return region.error();
  return RegisterFile{files_->device.get(), region->offset, region->mappable};
}

Result<std::unique_ptr<BarWindow>> VfioDevice::map_registers() {
  auto file = register_file();
  if (!file) return file.error();
  return BarWindow::map(file->fd, file->offset, file->bytes);
}

Status VfioDevice::read_config(std::uint32_t offset, std::span<std::byte> out) const {
  const ssize_t got =
      ::pread(files_->device.get(), out.data(), out.size(), static_cast<off_t>(config_offset_ + offset));
  if (got == static_cast<ssize_t>(out.size())) return {};
  return errno_error(got < 0 ? errno : EIO, "PCI device " + address_.text() + ": reading its configuration space");
}

Status VfioDevice::write_command(std::uint16_t value) {
  const ssize_t put =
      ::pwrite(files_->device.get(), &value, sizeof value, static_cast<off_t>(config_offset_ + kPciCommand));
  if (put == static_cast<ssize_t>(sizeof value)) return {};
  return errno_error(put < 0 ? errno : EIO, "PCI device " + address_.text() + ": writing its command register");
}

Status VfioDevice::set_bus_mastering(bool enabled) {
  std::uint16_t command = 0;
  if (auto read = read_config(kPciCommand, std::as_writable_bytes(std::span(&command, 1))); !read) return read;
  // Its registers can be reached in both cases.
  const auto wanted = static_cast<std::uint16_t>(
      (enabled ? command | kPciCommandMaster : command & ~unsigned{kPciCommandMaster}) | kPciCommandMemory);
  if (auto written = write_command(wanted); !written) return written;
  if (auto read = read_config(kPciCommand, std::as_writable_bytes(std::span(&command, 1))); !read) return read;
  if (((command & kPciCommandMaster) != 0) == enabled) return {};
  return Error{Code::kIo,
               "PCI device " + address_.text() + ": expected bus mastering " + (enabled ? "on" : "off") +
                   " after setting it so, found the contrary; is it still plugged in?",
               ENODEV};
}

Status VfioDevice::reset() {
  // First, since a reset that fails or is not to be had must not leave a controller that reaches memory.
  if (auto off = set_bus_mastering(false); !off) return off;
  if (!can_reset_) {
    return Error{Code::kUnsupportedFormat,
                 "PCI device " + address_.text() + ": expected a function that can be reset alone, found none",
                 EOPNOTSUPP};
  }
  const auto error = call_within(
      kResetWait, [files = files_] { return ::ioctl(files->device.get(), VFIO_DEVICE_RESET) == 0 ? 0 : errno; });
  if (!error) {
    return Error{Code::kIo,
                 "PCI device " + address_.text() + ": expected a function level reset within " +
                     std::to_string(kResetWait.count()) + " s, found it still waiting; power-cycle the drive",
                 ETIMEDOUT};
  }
  if (*error != 0) return errno_error(*error, "PCI device " + address_.text() + ": function level reset");
  return set_bus_mastering(true);
}

std::uint32_t VfioDevice::irq_count(std::uint32_t index) const {
  vfio_irq_info info{};
  info.argsz = sizeof info;
  info.index = index;
  if (::ioctl(files_->device.get(), VFIO_DEVICE_GET_IRQ_INFO, &info) != 0) return 0;
  return (info.flags & VFIO_IRQ_INFO_EVENTFD) != 0 ? info.count : 0;
}

Status VfioDevice::set_irqs(std::uint32_t index, std::span<const int> eventfds, const char* what) {
  vfio_irq_set head{};
  std::vector<std::byte> memory(sizeof head + eventfds.size_bytes());
  head.argsz = static_cast<__u32>(memory.size());
  head.flags = VFIO_IRQ_SET_ACTION_TRIGGER | (eventfds.empty() ? VFIO_IRQ_SET_DATA_NONE : VFIO_IRQ_SET_DATA_EVENTFD);
  head.index = index;
  head.count = static_cast<__u32>(eventfds.size());
  std::memcpy(memory.data(), &head, sizeof head);
  if (!eventfds.empty()) std::memcpy(memory.data() + sizeof head, eventfds.data(), eventfds.size_bytes());
  if (::ioctl(files_->device.get(), VFIO_DEVICE_SET_IRQS, memory.data()) == 0) return {};
  return errno_error(errno, "PCI device " + address_.text() + ": VFIO_DEVICE_SET_IRQS for " + what);
}

Status VfioDevice::set_vectors(std::span<const int> eventfds) {
  if (eventfds.size() > vectors_) {
    return Error{Code::kInvalidArgument, "PCI device " + address_.text() + ": expected at most " +
                                             std::to_string(vectors_) + " interrupt vectors, found " +
                                             std::to_string(eventfds.size())};
  }
  return set_irqs(VFIO_PCI_MSIX_IRQ_INDEX, eventfds, "MSI-X");
}

UniqueFd VfioDevice::watch(std::uint32_t index) {
  if (irq_count(index) == 0) return {};
  UniqueFd event(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  const int fd = event.get();
  if (!event || !set_irqs(index, std::span(&fd, 1), "its notices")) return {};
  return event;
}

bool VfioDevice::exports_dma_buf() const {
  vfio_device_feature question{};
  question.argsz = sizeof question;
  question.flags = VFIO_DEVICE_FEATURE_PROBE | VFIO_DEVICE_FEATURE_GET | kFeatureDmaBuf;
  return ::ioctl(files_->device.get(), VFIO_DEVICE_FEATURE, &question) == 0;
}

bool VfioDevice::release_requested() { return fired(release_event_); }

bool VfioDevice::error_reported() { return fired(error_event_); }

}  // namespace tardis::nvme
