// SPDX-License-Identifier: Apache-2.0
#include "nvme/nvme_device.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/unique_fd.h"
#include "block/io_arbiter.h"
#include "block/iovec_range.h"
#include "store/folder.h"

namespace tardis::nvme {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
// Of writes that go to the namespace in one batch: while it runs, reads that come are beside all of it.
constexpr std::uint64_t kWriteBatchBytes = 32u << 20;

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
  if (path.starts_with(start) && path.find("/../") == std::string::npos) return path.substr(start.size());
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
  auto place = std::find(files_.begin(), files_.end(), nullptr);
  if (place == files_.end()) place = files_.insert(place, nullptr);
  *place = std::move(file);
  return static_cast<FileId>(place - files_.begin()) + 1;
}

std::shared_ptr<NvmeDevice::File> NvmeDevice::find(FileId file) const {
  const std::shared_lock lock(mutex_);
  return file > 0 && file <= files_.size() ? files_[file - 1] : nullptr;
}

void NvmeDevice::close_file(FileId file) {
  const std::unique_lock lock(mutex_);
  if (file == 0 || file > files_.size() || files_[file - 1] == nullptr) return;
  const std::weak_ptr<File> rest = files_[file - 1];
  const std::string name = files_[file - 1]->name;
  files_[file - 1] = nullptr;
  if (rest.expired()) by_name_.erase(name);
}

Status NvmeDevice::reserve(FileId file, std::uint64_t bytes, std::uint64_t zeros) {
  const auto own = find(file);
  if (own == nullptr) return Error{Code::kInternal, "file id " + std::to_string(file) + " is not open"};
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
  const auto own = find(file);
  if (own == nullptr) return Error{Code::kInternal, "file id " + std::to_string(file) + " is not open"};
  return own->bytes.load();
}

// 0 or an errno; with 0, `out` is where the request goes.
int NvmeDevice::translate(const IoRequest& request, const File* file, NamespaceRequest& out) const {
  if (file == nullptr) return EBADF;
  const std::uint64_t bytes = total_bytes(request.memory), end = file->bytes.load();
  if (((request.offset | bytes) & (device_->block_bytes() - 1)) != 0) return EINVAL;
  const bool read = request.op == IoRequest::Op::kRead;
  if (bytes > 0 && (request.offset > end || bytes > end - request.offset)) return read ? ENODATA : EFBIG;
  out = {read ? NamespaceRequest::Op::kRead : NamespaceRequest::Op::kWrite, file->offset.load() + request.offset,
         request.memory, 0};
  return 0;
}

void NvmeDevice::run(std::span<IoRequest> requests, const Completion& on_complete) {
  const auto finish = [&](IoRequest& request, int error) {
    request.error = error;
    count_finished(request);
    if (on_complete) on_complete(request);
  };
  std::vector<NamespaceRequest> down;
  std::vector<IoRequest*> up;
  std::vector<std::shared_ptr<File>> files;  // kept open until they are done
  down.reserve(requests.size());
  up.reserve(requests.size());
  for (IoRequest& request : requests) {
    if (files.empty() || request.file != (&request - 1)->file) files.push_back(find(request.file));
    NamespaceRequest next;
    const int error = translate(request, files.back().get(), next);
    if (error != 0 || total_bytes(request.memory) == 0) {
      finish(request, error);
    } else {
      down.push_back(next);
      up.push_back(&request);
    }
  }
  if (down.empty()) return;
  const std::uint64_t now = counters_.in_flight.fetch_add(down.size(), kRelaxed) + down.size();
  std::uint64_t peak = counters_.peak_in_flight.load(kRelaxed);
  while (now > peak && !counters_.peak_in_flight.compare_exchange_weak(peak, now, kRelaxed)) {
  }
  const NamespaceRequest* first = down.data();
  turns_->run(
      down, [&](NamespaceRequest& request) { finish(*up[static_cast<std::size_t>(&request - first)], request.error); });
  counters_.in_flight.fetch_sub(down.size(), kRelaxed);
}

void NvmeDevice::count_finished(const IoRequest& request) {
  const bool read = request.op == IoRequest::Op::kRead;
  (read ? counters_.reads : counters_.writes).fetch_add(1, kRelaxed);
  if (request.error == 0) {
    (read ? counters_.read_bytes : counters_.written_bytes).fetch_add(total_bytes(request.memory), kRelaxed);
  } else {
    counters_.errors.fetch_add(1, kRelaxed);
  }
}

// A namespace has one cache: one flush is for all files.
std::vector<Status> NvmeDevice::flush_files(std::span<const FileId> files) {
  if (files.empty()) return {};
  return std::vector<Status>(files.size(), turns_->flush());
}

void NvmeDevice::share_turns(std::unique_ptr<FlushTurns> turns) { turns_->arbiter().share(std::move(turns)); }

Status NvmeDevice::register_memory(void* base, std::size_t bytes) {
  const Status status = device_->register_memory(base, bytes);
  if (!status && status.error().code == Code::kInvalidArgument) return status;
  const std::lock_guard lock(registered_mutex_);
  (status ? registered_ : not_registered_)[base] = bytes;
  (status ? counters_.registered_bytes : counters_.not_registered_bytes).fetch_add(bytes, kRelaxed);
  return {};
}

void NvmeDevice::unregister_memory(void* base) {
  const std::lock_guard lock(registered_mutex_);
  if (const auto known = registered_.find(base); known != registered_.end()) {
    device_->unregister_memory(base);
    counters_.registered_bytes.fetch_sub(known->second, kRelaxed);
    registered_.erase(known);
  } else if (const auto refused = not_registered_.find(base); refused != not_registered_.end()) {
    counters_.not_registered_bytes.fetch_sub(refused->second, kRelaxed);
    not_registered_.erase(refused);
  }
}

std::optional<BlockDevice::Room> NvmeDevice::room() const {
  return Room{volume_->free_bytes(), volume_->superblock().data_bytes};
}

BlockDeviceCounters NvmeDevice::counters() const {
  BlockDeviceCounters now;
  now.reads = counters_.reads.load(kRelaxed);
  now.writes = counters_.writes.load(kRelaxed);
  now.read_bytes = counters_.read_bytes.load(kRelaxed);
  now.written_bytes = counters_.written_bytes.load(kRelaxed);
  now.errors = counters_.errors.load(kRelaxed);
  now.peak_in_flight = counters_.peak_in_flight.load(kRelaxed);
  now.registered_bytes = counters_.registered_bytes.load(kRelaxed);
  now.not_registered_bytes = counters_.not_registered_bytes.load(kRelaxed);
  const IoArbiter::Counters order = turns_->arbiter().counters();
  now.read_batches = order.read_batches;
  now.read_batches_delayed = order.delayed;
  now.read_batches_delayed_again = order.delayed_again;
  now.max_flushes_per_read_batch = order.max_flushes;
  now.writes_yielded = order.writes_yielded;
  now.flushes_postponed = order.flushes_postponed;
  return now;
}

}  // namespace tardis::nvme
