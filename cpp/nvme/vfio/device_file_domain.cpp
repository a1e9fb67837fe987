// SPDX-License-Identifier: Apache-2.0
// The character device of a function, with iommufd (Linux 6.6 and later).
#include <fcntl.h>
#include <linux/vfio.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <vector>

#if __has_include(<linux/iommufd.h>)
#include <linux/iommufd.h>
#endif

#include "nvme/vfio/text_file.h"
#include "nvme/vfio/vfio_nodes.h"
#include "nvme/vfio/vfio_open.h"

namespace tardis::nvme {

#if defined(IOMMU_IOAS_MAP) && defined(VFIO_DEVICE_BIND_IOMMUFD) && defined(VFIO_DEVICE_ATTACH_IOMMUFD_PT)
namespace {

namespace fs = std::filesystem;

class DeviceFileDomain final : public IommuDomain {
 public:
  DeviceFileDomain(std::shared_ptr<VfioFiles> files, std::uint32_t space) : files_(std::move(files)), space_(space) {}

  // Of a space that the device is attached to.
  Status read_ranges() {
    std::vector<iommu_iova_range> list(16);
    for (;;) {
      iommu_ioas_iova_ranges request{};
      request.size = sizeof request;
      request.ioas_id = space_;
      request.num_iovas = static_cast<__u32>(list.size());
      request.allowed_iovas = reinterpret_cast<std::uintptr_t>(list.data());
      const int result = ::ioctl(files_->container.get(), IOMMU_IOAS_IOVA_RANGES, &request);
      if (result != 0 && errno != EMSGSIZE) return errno_error(errno, "IOMMU_IOAS_IOVA_RANGES");
      const bool all = request.num_iovas <= list.size();
      list.resize(request.num_iovas);
      if (!all) continue;
      page_bytes_ = std::max<std::size_t>(static_cast<std::size_t>(request.out_iova_alignment),
                                          static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)));
      for (const iommu_iova_range& range : list) ranges_.push_back({range.start, range.last});
      return {};
    }
  }

  std::string name() const override { return "VFIO with iommufd"; }
  std::vector<IovaRange> ranges() const override { return ranges_; }
  std::size_t page_bytes() const override { return page_bytes_; }
  std::optional<std::uint64_t> entries_left() override { return std::nullopt; }  // there is no such limit
  bool limit_of_user() const override { return true; }

  int map(std::uint64_t address, void* memory, std::size_t bytes) override {
    iommu_ioas_map request{};
    request.size = sizeof request;
    request.flags = IOMMU_IOAS_MAP_FIXED_IOVA | IOMMU_IOAS_MAP_READABLE | IOMMU_IOAS_MAP_WRITEABLE;
    request.ioas_id = space_;
    request.user_va = reinterpret_cast<std::uintptr_t>(memory);
    request.length = bytes;
    request.iova = address;
    return ::ioctl(files_->container.get(), IOMMU_IOAS_MAP, &request) == 0 ? 0 : errno;
  }
  int unmap(std::uint64_t address, std::size_t bytes) override {
    iommu_ioas_unmap request{};
    request.size = sizeof request;
    request.ioas_id = space_;
    request.iova = address;
    request.length = bytes;
    if (::ioctl(files_->container.get(), IOMMU_IOAS_UNMAP, &request) != 0) return errno;
    return request.length == bytes ? 0 : EIO;
  }

 private:
  const std::shared_ptr<VfioFiles> files_;
  const std::uint32_t space_;
  std::vector<IovaRange> ranges_;
  std::size_t page_bytes_ = 4096;
};

}  // namespace

Result<VfioOpened> open_device_file(const PciDevice& device, const SystemPaths& paths) {
  const fs::path folder = fs::path(paths.sys) / "bus/pci/devices" / device.address.text() / "vfio-dev";
  const auto names = names_in(folder);
  if (names.empty()) {
    return Error{Code::kNotFound, "PCI device " + device.address.text() + ": expected an entry in " + folder.string() +
                                      ", found none; its kernel lacks CONFIG_VFIO_DEVICE_CDEV"};
  }
  auto files = std::make_shared<VfioFiles>();
  auto iommu = open_node(paths.dev + "/iommu", "the kernel lacks CONFIG_IOMMUFD, or the module iommufd is not loaded");
  if (!iommu) return iommu.error();
  files->container = std::move(*iommu);
  auto function = open_node(paths.dev + "/vfio/devices/" + names.front(), "load the module vfio-pci");
  if (!function) return function.error();
  files->device = std::move(*function);

  vfio_device_bind_iommufd bind{};
  bind.argsz = sizeof bind;
  bind.iommufd = files->container.get();
  if (::ioctl(files->device.get(), VFIO_DEVICE_BIND_IOMMUFD, &bind) != 0) {
    const int error = errno == EINVAL ? EBUSY : errno;  // that is how a second opener is told
    return errno_error(error, "PCI device " + device.address.text() +
                                  ": VFIO_DEVICE_BIND_IOMMUFD (expected a drive that no other process has)");
  }
  iommu_ioas_alloc space{};
  space.size = sizeof space;
  if (::ioctl(files->container.get(), IOMMU_IOAS_ALLOC, &space) != 0) return errno_error(errno, "IOMMU_IOAS_ALLOC");
  vfio_device_attach_iommufd_pt attach{};
  attach.argsz = sizeof attach;
  attach.pt_id = space.out_ioas_id;
  if (::ioctl(files->device.get(), VFIO_DEVICE_ATTACH_IOMMUFD_PT, &attach) != 0) {
    return errno_error(errno, "PCI device " + device.address.text() + ": VFIO_DEVICE_ATTACH_IOMMUFD_PT");
  }
  auto domain = std::make_unique<DeviceFileDomain>(files, space.out_ioas_id);
  if (auto read = domain->read_ranges(); !read) return read.error();
  return VfioOpened{std::move(files), std::move(domain)};
}

#else

Result<VfioOpened> open_device_file(const PciDevice& device, const SystemPaths&) {
  return Error{Code::kUnsupportedFormat,
               "PCI device " + device.address.text() +
                   ": the character device of VFIO was asked for, but this library was compiled with kernel headers "
                   "older than Linux 6.6, without linux/iommufd.h; use the group, or compile it with newer ones"};
}

#endif

}  // namespace tardis::nvme
