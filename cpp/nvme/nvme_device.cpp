// SPDX-License-Identifier: Apache-2.0
#include "nvme/nvme_device.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "base/unique_fd.h"
#include "block/io_arbiter.h"
#include "block/iovec_range.h"
#include "store/folder.h"

namespace tardis::nvme {
namespace {

// Of writes that go to the namespace in one batch: while it runs, reads that come are beside all of it.
constexpr std::uint64_t kWriteBatchBytes = 32u << 20;

Error not_open(FileId file) { return {Code::kInternal, "file id " + std::to_string(file) + " is not open"}; }

// Without another spelling, and below where it starts.
bool plain(std::string_view name) {
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t end = std::min(name.find('/', at), name.size());
    const std::string_view part = name.substr(at, end - at);
    if (part.empty() || part == "." || part == "..") return false;
    at = end + 1;
  }
  return true;
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

Result<Uuid> random_uuid() {
  Uuid uuid{};
  if (::getrandom(uuid.data(), uuid.size(), 0) != static_cast<ssize_t>(uuid.size())) {
    return errno_error(errno, "getrandom");
  }
  return uuid;
}

// The folder says which volume is its own before there is one, so that a crash leaves none that is nobody's.
Result<std::unique_ptr<RawVolume>> make_volume(RawNamespace& device, VolumeHome& home) {
  const auto uuid = random_uuid();
  if (!uuid) return uuid.error();
  if (Status status = home.write(*uuid); !status) return status.error();
  if (Status status = RawVolume::format(device, *uuid); !status) return status.error();
  return RawVolume::open(device, *uuid);
}

// The volume of this home; a new one where it has none.
Result<std::unique_ptr<RawVolume>> open_volume(RawNamespace& device, VolumeHome& home,
                                               const NvmeDeviceOptions& options) {
  const bool has_store = exists(home.folder() + "/" + kSuperblockFile);
  const auto binding = home.read();
  // A crash may cut the first write of it short; then there is no store yet.
  const bool cut_short = !binding && binding.error().code == Code::kCorrupt && (!has_store || options.force);
  if (!binding && !cut_short) return binding.error();
  const bool bound = binding && *binding;
  if (binding && !bound && has_store) {
    return Error{Code::kInvalidArgument, "path " + home.folder() +
                                             ": the store there keeps its segments in files, not "
                                             "on " +
                                             device.name() +
                                             "; name another folder for a store on the "
                                             "namespace"};
  }
  if (bound) {
    auto volume = RawVolume::open(device, (*binding)->volume);
    if (volume) return volume;
    const Code code = volume.error().code;
    const bool foreign = code == Code::kNotFound || code == Code::kInvalidArgument || code == Code::kCorrupt ||
                         code == Code::kUnsupportedFormat;
    if (!foreign) return volume;
    if (has_store && !options.force) {
      if (code != Code::kNotFound) return volume;
      return Error{Code::kNotFound, volume.error().message + ", but the store in " + home.folder() +
                                        " has its segments on one; attach the right namespace, or format this one "
                                        "with force: what was stored is lost"};
    }
  }
  if (!options.force) {
    if (Status status = RawVolume::check_blank(device); !status) return status.error();
  }
  return make_volume(device, home);
}

std::string describe(const RawNamespace& device, const RawVolume& volume) {
  const VolumeSuperblock& s = volume.superblock();
  std::string text = "raw namespace " + device.name() + ", " + human_bytes(device.bytes()) + " in blocks of " +
                     std::to_string(device.block_bytes()) + " bytes: volume " + hex(s.uuid.data(), s.uuid.size()) +
                     ", no file system below the segments";
  if (volume.mended() > 0) text += "; " + std::to_string(volume.mended()) + " sectors were mended from their copies";
  if (volume.lost() > 0) text += "; " + std::to_string(volume.lost()) + " entries of its directory are lost";
  return text;
}

}  // namespace

// Whoever reads or writes on the namespace does it through this, the volume's own I/O too. Has claimed the namespace.
class NvmeDevice::Turns final : public RawNamespace {
 public:
  explicit Turns(std::shared_ptr<RawNamespace> claimed) : inner_(std::move(claimed)) {}
  ~Turns() override { inner_->release(); }

  std::string name() const override { return inner_->name(); }
  std::uint64_t bytes() const override { return inner_->bytes(); }
  std::uint32_t block_bytes() const override { return inner_->block_bytes(); }
  std::uint32_t atomic_bytes() const override { return inner_->atomic_bytes(); }
  Status register_memory(void* base, std::size_t bytes) override { return inner_->register_memory(base, bytes); }
  void unregister_memory(void* base) override { inner_->unregister_memory(base); }

  void run(std::span<NamespaceRequest> requests, const Completion& on_complete) override {
    const bool reads = std::any_of(requests.begin(), requests.end(),
                                   [](const NamespaceRequest& r) { return r.op == NamespaceRequest::Op::kRead; });
    if (reads) {
      const IoArbiter::ReadBatch turn(arbiter_);
      return inner_->run(requests, on_complete);
    }
    IoArbiter::WriteBatch turn(arbiter_);
    while (!requests.empty()) {
      std::uint64_t bytes = total_bytes(requests.front().memory);
      std::size_t count = 1;
      while (count < requests.size() && bytes < kWriteBatchBytes && turn.may_start(count)) {
        bytes += total_bytes(requests[count++].memory);
      }
      inner_->run(requests.first(count), on_complete);
      requests = requests.subspan(count);
    }
  }
  Status flush() override {
    const IoArbiter::Flush turn(arbiter_);
    return inner_->flush();
  }

  IoArbiter& arbiter() { return arbiter_; }

 private:
  const std::shared_ptr<RawNamespace> inner_;
  IoArbiter arbiter_;
};

Result<std::unique_ptr<BlockDevice>> NvmeDevice::open(std::shared_ptr<RawNamespace> device, const std::string& home,
                                                      const NvmeDeviceOptions& options) {
  if (!device->claim()) {
    return Error{Code::kBusy, device->name() +
                                  ": another store of this process uses the namespace; close that one "
                                  "first, or give this one another namespace"};
  }
  auto turns = std::make_unique<Turns>(device);
  auto locked = VolumeHome::lock(home);
  if (!locked) return locked.error();
  auto volume = open_volume(*turns, *locked, options);
  if (!volume) return volume.error();
  auto own = std::make_unique<NvmeDevice>(Passkey(), std::move(device), std::move(*locked), std::move(turns),
                                          std::move(*volume));
  if (Status status = own->remove_nameless(); !status) return status.error();
  return std::unique_ptr<BlockDevice>(std::move(own));
}

NvmeDevice::NvmeDevice(Passkey, std::shared_ptr<RawNamespace> device, VolumeHome home, std::unique_ptr<Turns> turns,
                       std::unique_ptr<RawVolume> volume)
    : device_(std::move(device)), home_(std::move(home)), turns_(std::move(turns)), volume_(std::move(volume)) {
  report_.engine = "nvme";
  report_.direct = true;
  report_.offset_align = report_.logical_block = device_->block_bytes();
  report_.filesystem = "none";
  report_.reason = describe(*device_, *volume_);
}

NvmeDevice::~NvmeDevice() = default;

Result<std::string> NvmeDevice::name_below_home(const std::string& path) const {
  const std::string start = home_.folder() + "/";
  if (path.starts_with(start) && plain(std::string_view(path).substr(start.size()))) return path.substr(start.size());
  return Error{Code::kInvalidArgument, path + ": a raw namespace has the segments of one folder, " + home_.folder() +
                                           "; leave further folders out, or keep them below that one"};
}

bool NvmeDevice::is_open(const std::string& name) const {
  const std::shared_lock lock(mutex_);
  const auto known = by_name_.find(name);
  return known != by_name_.end() && !known->second.expired();
}

// The empty file that stands for the name.
Status NvmeDevice::make_name(const std::string& path, const std::string& name, bool create, bool writable) {
  const int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  UniqueFd fd(::open(path.c_str(), flags));
  if (!fd && errno == ENOENT && create) {
    // What had this name before must be gone for good before the name is there again.
    if (is_open(name)) return Error{Code::kBusy, path + ": was removed and is still open"};
    if (Status status = volume_->remove({name}); !status) return status;
    fd.reset(::open(path.c_str(), flags | O_CREAT, 0600));
  }
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) return errno_error(errno, path);
  if (S_ISREG(status.st_mode) && status.st_size == 0) return {};
  return Error{Code::kInvalidArgument, path + ": expected an empty file that stands for bytes on " + device_->name() +
                                           ", found something else; move it away"};
}

Result<FileId> NvmeDevice::open_file(const std::string& path, bool create, bool writable) {
  const auto name = name_below_home(path);
  if (!name) return name.error();
  const std::lock_guard names(names_mutex_);
  if (Status status = make_name(path, *name, create, writable); !status) return status.error();
  const auto extent = volume_->find(*name);
  const std::unique_lock lock(mutex_);
  std::shared_ptr<File> file = by_name_[*name].lock();
  if (file == nullptr) {
    file = std::make_shared<File>();
    file->name = *name;
    by_name_[*name] = file;
    if (extent) {
      file->offset.store(extent->offset);
      file->bytes.store(extent->bytes);
    }
  }
  auto place = std::find_if(files_.begin(), files_.end(), [](const OpenFile& open) { return open.file == nullptr; });
  if (place == files_.end()) place = files_.emplace(place);
  *place = {std::move(file), writable};
  return static_cast<FileId>(place - files_.begin()) + 1;
}

NvmeDevice::OpenFile NvmeDevice::find(FileId file) const {
  const std::shared_lock lock(mutex_);
  return file > 0 && file <= files_.size() ? files_[file - 1] : OpenFile();
}

void NvmeDevice::close_file(FileId file) {
  const std::unique_lock lock(mutex_);
  if (file == 0 || file > files_.size() || files_[file - 1].file == nullptr) return;
  const std::weak_ptr<File> rest = files_[file - 1].file;
  const std::string name = files_[file - 1].file->name;
  files_[file - 1] = {};
  if (rest.expired()) by_name_.erase(name);
}

Status NvmeDevice::reserve(FileId file, std::uint64_t bytes, std::uint64_t zeros) {
  const auto own = find(file).file;
  if (own == nullptr) return not_open(file);
  const std::lock_guard names(names_mutex_);
  const std::uint64_t before = own->bytes.load();
  if (before >= bytes) return {};
  if (before > 0) {
    return Error{Code::kInvalidArgument, own->name + ": has " + std::to_string(before) + " bytes on " +
                                             device_->name() + " and cannot have " + std::to_string(bytes)};
  }
  auto extent = volume_->create(own->name, bytes, zeros);
  if (!extent && extent.error().code == Code::kNoSpace) {
    if (Status status = remove_nameless(); !status) return status;
    extent = volume_->create(own->name, bytes, zeros);
  }
  if (!extent) return extent.error();
  own->offset.store(extent->offset);
  own->bytes.store(extent->bytes);
  return {};
}

// Frees what has lost its name. Where a whole folder is not there, it may come back.
Status NvmeDevice::remove_nameless() {
  std::vector<std::string> gone;
  for (const std::string& name : volume_->names()) {
    const std::string path = home_.folder() + "/" + name;
    struct stat status {};
    if (::lstat(path.c_str(), &status) == 0 || errno != ENOENT) continue;
    if (exists(path.substr(0, path.rfind('/'))) && !is_open(name)) gone.push_back(name);
  }
  return volume_->remove(gone);
}

Result<std::uint64_t> NvmeDevice::file_bytes(FileId file) {
  const auto own = find(file).file;
  if (own == nullptr) return not_open(file);
  return own->bytes.load();
}

// 0 or an errno; with 0, `out` is where the request goes.
int NvmeDevice::translate(const IoRequest& request, const OpenFile& open, NamespaceRequest& out) const {
  const bool read = request.op == IoRequest::Op::kRead;
  if (open.file == nullptr || (!read && !open.writable)) return EBADF;
  const std::uint64_t bytes = total_bytes(request.memory), end = open.file->bytes.load();
  if (((request.offset | bytes) & (device_->block_bytes() - 1)) != 0) return EINVAL;
  if (bytes > 0 && (request.offset > end || bytes > end - request.offset)) return read ? ENODATA : EFBIG;
  out = {read ? NamespaceRequest::Op::kRead : NamespaceRequest::Op::kWrite, open.file->offset.load() + request.offset,
         request.memory, 0};
  return 0;
}

void NvmeDevice::run(std::span<IoRequest> requests, const Completion& on_complete) {
  const auto finish = [&](IoRequest& request, int error) {
    request.error = error;
    transfers_.finished(request, total_bytes(request.memory), /*bounced=*/false);
    if (on_complete) on_complete(request);
  };
  std::vector<NamespaceRequest> down;
  std::vector<IoRequest*> up;
  std::vector<OpenFile> files;  // kept open until they are done
  down.reserve(requests.size());
  up.reserve(requests.size());
  for (IoRequest& request : requests) {
    if (files.empty() || request.file != (&request - 1)->file) files.push_back(find(request.file));
    NamespaceRequest next;
    const int error = translate(request, files.back(), next);
    if (error != 0 || total_bytes(request.memory) == 0) {
      finish(request, error);
    } else {
      down.push_back(next);
      up.push_back(&request);
    }
  }
  if (down.empty()) return;
  transfers_.started(down.size());
  const NamespaceRequest* first = down.data();
  turns_->run(
      down, [&](NamespaceRequest& request) { finish(*up[static_cast<std::size_t>(&request - first)], request.error); });
  transfers_.ended(down.size());
}

// A namespace has one cache: one flush is for all files.
std::vector<Status> NvmeDevice::flush_files(std::span<const FileId> files) {
  if (files.empty()) return {};
  const Status flushed = turns_->flush();
  std::vector<Status> results;
  for (const FileId file : files) results.push_back(find(file).file != nullptr ? flushed : not_open(file));
  return results;
}

void NvmeDevice::share_turns(std::unique_ptr<FlushTurns> turns) { turns_->arbiter().share(std::move(turns)); }

Status NvmeDevice::register_memory(void* base, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  const std::lock_guard lock(memory_mutex_);
  const auto after = memory_.lower_bound(begin);
  const bool into_next = after != memory_.end() && after->first - begin < bytes;
  const bool into_previous =
      after != memory_.begin() && begin - std::prev(after)->first < std::prev(after)->second.bytes;
  if (bytes == 0 || into_next || into_previous) {
    return Error{Code::kInvalidArgument, "register_memory: expected memory that is not registered, found " +
                                             std::string(bytes == 0 ? "none" : "a range that overlaps one")};
  }
  const Status status = device_->register_memory(base, bytes);
  if (!status && status.error().code == Code::kInvalidArgument) return status;
  memory_.emplace(begin, Memory{bytes, static_cast<bool>(status)});
  return {};
}

void NvmeDevice::unregister_memory(void* base) {
  const std::lock_guard lock(memory_mutex_);
  const auto known = memory_.find(reinterpret_cast<std::uintptr_t>(base));
  if (known == memory_.end()) return;
  if (known->second.registered) device_->unregister_memory(base);
  memory_.erase(known);
}

std::optional<BlockDevice::Room> NvmeDevice::room() const {
  return Room{volume_->free_bytes(), volume_->superblock().data_bytes};
}

BlockDeviceCounters NvmeDevice::counters() const {
  BlockDeviceCounters now = transfers_.tell(turns_->arbiter().counters());
  const std::lock_guard lock(memory_mutex_);
  for (const auto& [begin, memory] : memory_) {
    (memory.registered ? now.registered_bytes : now.not_registered_bytes) += memory.bytes;
  }
  return now;
}

}  // namespace tardis::nvme
