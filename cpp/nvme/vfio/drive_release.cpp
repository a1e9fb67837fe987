// SPDX-License-Identifier: Apache-2.0
#include "nvme/vfio/drive_release.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <thread>

#include "base/unique_fd.h"
#include "nvme/vfio/drive_refusal.h"
#include "nvme/vfio/nvme_users.h"
#include "nvme/vfio/open_files.h"
#include "nvme/vfio/text_file.h"
#include "nvme/vfio/vfio_nodes.h"

namespace tardis::nvme {
namespace {

namespace fs = std::filesystem;

constexpr const char* kKernelDriver = "nvme";
constexpr std::chrono::seconds kProbeWait{1};  // some drivers probe in a thread of their own

// Unbinding would wait for whoever has it, without an end.
Status check_vfio_unused(const PciDevice& device, const SystemPaths& paths) {
  const VfioNodes nodes = VfioNodes::find(device, paths);
  const auto files = VfioNodes::names(device, paths).all();
  const auto opened = openers_among_processes(paths, [&](const fs::path& link) {
    std::error_code error;
    const std::string target = fs::read_symlink(link, error).string();
    return !error && std::find(files.begin(), files.end(), target) != files.end() ? target : std::string();
  });
  std::string all;
  for (const FileOpener& opener : opened) all += (all.empty() ? "" : ", ") + opener.text;
  // A group is opened once, and not beside the character device; who has it may be in another container.
  const std::string& once = nodes.group.empty() ? nodes.without_iommu : nodes.group;
  if (all.empty() && !once.empty()) {
    const UniqueFd group(::open(once.c_str(), O_RDWR | O_CLOEXEC));
    if (!group && errno == EBUSY) all = once + " is open in a process that cannot be seen here";
  }
  if (all.empty()) return {};
  return Error{Code::kBusy, "PCI device " + device.address.text() +
                                ": expected a drive that nobody drives, found that " + all +
                                "; stop that process first"};
}

// While these are open, nobody can mount the namespaces or take them for swap, RAID or the device mapper.
Result<std::vector<UniqueFd>> claim_namespaces(const PciDevice& device, const SystemPaths& paths) {
  std::vector<UniqueFd> claims;
  for (const std::string& name : namespaces_of(device.address, paths)) {
    const std::string node = paths.dev + "/" + name;
    UniqueFd fd(::open(node.c_str(), O_RDONLY | O_EXCL | O_CLOEXEC));
    if (!fd && errno != ENOENT && errno != ENXIO && errno != ENODEV) {
      return errno_error(errno, node + ": expected to claim it before it is released");
    }
    if (fd) claims.push_back(std::move(fd));
  }
  return claims;
}

Status write_step(const std::string& file, const std::string& text) {
  const UniqueFd fd(::open(file.c_str(), O_WRONLY | O_CLOEXEC));
  if (!fd) return errno_error(errno, file);
  const std::string line = text + "\n";  // an empty one takes an override back
  if (::write(fd.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    return errno_error(errno, "writing '" + text + "' to " + file);
  }
  return {};
}

}  // namespace

Result<DriveRelease> DriveRelease::plan(const PciAddress& address, const std::string& to, const SystemPaths& paths) {
  if (to != kVfioPciDriver && to != kKernelDriver) {
    return Error{Code::kInvalidArgument, "releasing a drive: expected the driver vfio-pci or nvme, found '" + to + "'"};
  }
  auto device = PciDevice::read(address, paths);
  if (!device) return device.error();
  const std::string who = "PCI device " + address.text() + ": ";
  if (!device->is_nvme()) {
    // check_drive() names the class.
    const Status refused = check_drive(*device, paths);
    return refused ? Error{Code::kInvalidArgument, who + "no NVMe controller"} : refused.error();
  }
  DriveRelease release(std::move(*device), to, paths);
  const PciDevice& drive = release.device_;
  if (drive.driver == to) return release;
  if (drive.driver == kKernelDriver) {
    if (Status free = check_release(drive, paths); !free) return free.error();
  } else if (drive.driver == kVfioPciDriver) {
    if (Status free = check_vfio_unused(drive, paths); !free) return free.error();
  } else if (!drive.driver.empty()) {
    return Error{Code::kBusy, who + "expected the driver nvme, vfio-pci or none, found " + drive.driver +
                                  "; take the drive from that one by its own means"};
  }
  if (to == kVfioPciDriver && drive.group.empty()) {
    return Error{Code::kNotFound, who +
                                      "expected an IOMMU group, found none: the IOMMU is off, and vfio-pci would not "
                                      "take the drive. Switch VT-d or AMD-Vi on in the firmware, and with "
                                      "intel_iommu=on on the kernel's command line"};
  }
  std::error_code error;
  release.module_missing_ = !fs::is_directory(fs::path(paths.sys) / "bus/pci/drivers" / to, error);
  release.steps_.push_back({release.folder() + "/driver_override", to == kVfioPciDriver ? to : std::string()});
  if (!drive.driver.empty()) release.steps_.push_back({release.folder() + "/driver/unbind", address.text()});
  release.steps_.push_back({paths.sys + "/bus/pci/drivers_probe", address.text()});
  return release;
}

std::string DriveRelease::folder() const { return paths_.sys + "/bus/pci/devices/" + device_.address.text(); }

std::string DriveRelease::driver_now() const { return link_name(folder() + "/driver"); }

std::vector<std::string> DriveRelease::commands() const {
  std::vector<std::string> lines;
  if (needed() && module_missing_) lines.push_back("modprobe " + to_);
  for (const Step& step : steps_) lines.push_back("echo " + step.text + (step.text.empty() ? "> " : " > ") + step.file);
  return lines;
}

Status DriveRelease::take(const std::vector<Step>& steps) const {
  for (const Step& step : steps) {
    if (Status written = write_step(step.file, step.text); !written) return written;
  }
  const auto give_up = std::chrono::steady_clock::now() + kProbeWait;
  while (driver_now() != to_ && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (driver_now() == to_) return {};
  const std::string now = driver_now();
  return Error{Code::kIo, "PCI device " + device_.address.text() + ": expected the driver " + to_ +
                              " after it was asked, found " + (now.empty() ? "none" : now) + "; dmesg says why"};
}

Status DriveRelease::carry_out() {
  if (!needed()) return {};
  if (module_missing_) {
    return Error{Code::kNotFound, "expected the driver " + to_ + " in " + paths_.sys +
                                      "/bus/pci/drivers, found none; as root: modprobe " + to_};
  }
  std::vector<UniqueFd> claims;
  if (device_.driver == kKernelDriver) {
    auto claimed = claim_namespaces(device_, paths_);
    if (!claimed) return claimed.error();
    claims = std::move(*claimed);
    // Again, since somebody may have come before the claims.
    const auto users = known_users_of(device_.address, paths_);
    if (!users.empty()) {
      return Error{Code::kBusy, "PCI device " + device_.address.text() +
                                    ": expected a drive that nothing uses, found that " + users.front()};
    }
  }
  Status taken = take(steps_);
  if (taken) {
    steps_.clear();
    return {};
  }
  const std::string back = device_.driver == kVfioPciDriver ? kVfioPciDriver : "";
  const Status taken_back = write_step(folder() + "/driver_override", back);
  if (device_.driver.empty() || driver_now() == device_.driver) return taken;
  // Without a driver the drive is of no use to anybody.
  if (taken_back) (void)write_step(paths_.sys + "/bus/pci/drivers_probe", device_.address.text());
  return Error{taken.error().code, taken.error().message + "; " + device_.driver + " was asked to take it back",
               taken.error().os_error};
}

std::string DriveRelease::remaining() const {
  if (to_ != kVfioPciDriver) return {};
  const auto now = PciDevice::read(device_.address, paths_);
  if (!now) return now.error().message;
  if (now->driver != kVfioPciDriver) return {};  // nothing was done yet
  if (Status fits = check_drive(*now, paths_); !fits) return fits.error().message;
  const VfioNodes nodes = VfioNodes::find(*now, paths_);
  if (nodes.only_without_iommu()) return no_iommu_error(*now).message;
  // The character device is of no use without the IOMMU's file.
  const std::string needed = nodes.group.empty() ? nodes.device_file : nodes.group;
  struct stat file {};
  if (needed.empty() || ::stat(needed.c_str(), &file) != 0 || file.st_uid != 0) return {};
  const std::string also = nodes.group.empty() ? " " + paths_.dev + "/iommu" : "";
  return needed + " belongs to root; chown USER " + needed + also + " lets USER drive it without root";
}

}  // namespace tardis::nvme
