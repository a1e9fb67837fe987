// SPDX-License-Identifier: Apache-2.0
// What the store's tests share: small stores, namespaces whose pages check themselves, and devices that fail on
// purpose.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "block_support.h"
#include "store/scan.h"
#include "store/store.h"
#include "store/tools.h"
#include "store_pages.h"

namespace tardis::testing {

inline constexpr std::uint64_t kTestSegment = 4u << 20;

inline std::string memory_parent() { return "/dev/shm"; }

inline StoreOptions small_store(std::uint64_t segments,
                                BlockDeviceOptions::Engine engine = BlockDeviceOptions::Engine::kSync) {
  StoreOptions options;
  options.device.engine = engine;
  options.device.workers = 2;
  options.device.queue_depth = 32;
  options.segment_bytes = kTestSegment;
  options.capacity_bytes = segments * kTestSegment + kMetadataBytes;
  options.flush_milliseconds = 10'000;  // tests say when
  return options;
}

inline std::unique_ptr<Store> open_store(const std::string& folder, const StoreOptions& options, bool create = true,
                                         const Store::DeviceFactory& device = open_block_device) {
  auto store = Store::open(folder, options, create, device);
  if (!store) {
    ADD_FAILURE() << "opening " << folder << ": " << store.error().message;
    return nullptr;
  }
  return std::move(*store);
}

struct Layout {
  std::uint32_t parts = 1;
  std::vector<std::uint64_t> regions = {64 * 1024};
};

inline tardis_stats stats_of(Store& store) {
  tardis_stats stats;
  store.stats(stats);
  return stats;
}

// Every slot is in exactly one state, and none is stuck in a write.
inline void expect_slots_conserved(Store& store, std::uint64_t quarantined = 0) {
  const tardis_stats s = stats_of(store);
  EXPECT_EQ(s.slots_total, s.slots_live + s.slots_free + s.slots_quarantined + s.slots_writing);
  EXPECT_EQ(s.slots_writing, 0u);
  EXPECT_EQ(s.slots_quarantined, quarantined);
}

// A namespace as a test sees it: pages are (chain, index), their bytes follow from that.
class Space {
 public:
  Space(Store& store, std::uint8_t number, Layout layout)
      : store_(&store), number_(number), layout_(std::move(layout)) {
    auto id = store.open_namespace(fingerprint(), "{\"test\": " + std::to_string(number) + "}", layout_.parts,
                                   layout_.regions);
    if (!id) {
      ADD_FAILURE() << id.error().message;
      return;
    }
    id_ = *id;
  }

  NamespaceId id() const { return id_; }
  Fingerprint fingerprint() const { return {number_, 0x77}; }
  const Layout& layout() const { return layout_; }
  std::uint64_t seed(const Hash256& key) const { return page_seed(number_, key); }

  static std::vector<Hash256> keys(std::uint64_t chain, std::uint64_t first, std::size_t count) {
    std::vector<Hash256> result(count);
    for (std::size_t i = 0; i < count; ++i) result[i] = page_key(chain, first + i);
    return result;
  }

  // Stores pages [first, first + count) of a chain; returns how many were. The error, if any, goes to *why.
  std::size_t put(std::uint64_t chain, std::uint64_t first, std::size_t count, Status* why = nullptr) {
    PageMemory memory(layout_.parts, layout_.regions, count);
    const auto hashes = keys(chain, first, count);
    for (std::size_t i = 0; i < count; ++i) memory.write(i, seed(hashes[i]));
    const Hash256 before = first > 0 ? page_key(chain, first - 1) : Hash256{};
    std::vector<std::uint8_t> ok(count, 0xEE);
    const Status status =
        store_->set(id_, hashes.data(), first > 0 ? &before : nullptr, memory.pieces(), count, ok.data());
    const auto stored = static_cast<std::size_t>(std::find(ok.begin(), ok.end(), 0) - ok.begin());
    EXPECT_TRUE(
        std::all_of(ok.begin(), ok.begin() + static_cast<std::ptrdiff_t>(stored), [](auto x) { return x == 1; }));
    EXPECT_TRUE(std::all_of(ok.begin() + static_cast<std::ptrdiff_t>(stored), ok.end(), [](auto x) { return x == 0; }))
        << "a hole instead of a dropped suffix";
    EXPECT_EQ(stored == count, static_cast<bool>(status));
    if (why != nullptr) *why = status;
    return stored;
  }

  // Loads pages in one call; which arrived. A page that arrives with a wrong byte fails the test.
  std::vector<std::uint8_t> get(std::uint64_t chain, std::uint64_t first, std::size_t count, Status* why = nullptr) {
    PageMemory memory(layout_.parts, layout_.regions, count);
    const auto hashes = keys(chain, first, count);
    std::vector<std::uint8_t> ok(count, 0xEE);
    const Status status = store_->get(id_, hashes.data(), memory.pieces(), count, ok.data());
    for (std::size_t i = 0; i < count; ++i) {
      if (ok[i] != 0) {
        EXPECT_TRUE(memory.holds(i, seed(hashes[i]))) << "wrong bytes in page " << first + i << " of " << chain;
      }
    }
    if (why != nullptr) *why = status;
    return ok;
  }
  std::size_t fetch(std::uint64_t chain, std::uint64_t first, std::size_t count) {
    const auto ok = get(chain, first, count);
    return static_cast<std::size_t>(std::count(ok.begin(), ok.end(), 1));
  }
  bool has(std::uint64_t chain, std::uint64_t index) { return run(chain, index, 1) == 1; }
  std::size_t run(std::uint64_t chain, std::uint64_t first, std::size_t count) {
    const auto hashes = keys(chain, first, count);
    auto found = store_->lookup(id_, hashes.data(), count);
    return found ? *found : 0;
  }

 private:
  Store* store_;
  std::uint8_t number_;
  Layout layout_;
  NamespaceId id_ = 0;
};

// Runs `body` in a child that is killed at its end (or where it kills itself); the parent sees what a crash leaves
// behind.
inline void in_killed_process(const std::function<void()>& body) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    body();
    if (::testing::Test::HasFailure()) ::_exit(1);
    ::raise(SIGKILL);
    ::_exit(2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "the child failed";
}

// ---- the files of a closed store
// ----------------------------------------------------------------------------------------

inline std::string segment_file(const std::string& folder, std::uint32_t id) {
  char name[32];
  std::snprintf(name, sizeof name, "/segments/%06u.seg", id);
  return folder + name;
}

// Changes a file behind the store's back. A segment that is changed is to be looked at: the checkpoint goes.
inline void write_bytes(const std::string& file, std::uint64_t offset, const void* data, std::size_t bytes) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(static_cast<std::streamoff>(offset));
  stream.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  ASSERT_TRUE(stream.good()) << file;
  const std::filesystem::path path(file);
  if (path.extension() == ".seg") std::filesystem::remove(path.parent_path().parent_path() / "index.checkpoint");
}

inline void flip_bit(const std::string& file, std::uint64_t byte, unsigned bit = 0) {
  auto old = file_contents(file, byte, 1);
  ASSERT_EQ(old.size(), 1u);
  old[0] = static_cast<std::uint8_t>(old[0] ^ (1u << bit));
  write_bytes(file, byte, old.data(), 1);
}

template <class T>
T read_struct(const std::string& file, std::uint64_t offset) {
  const auto bytes = file_contents(file, offset, sizeof(T));
  T value{};
  EXPECT_EQ(bytes.size(), sizeof(T)) << file;
  if (bytes.size() == sizeof(T)) std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

struct OnDisk {
  std::string file;
  std::uint64_t header_offset, payload_offset;
  SlotHeader header;
};

// The newest header of a page in any segment; header.magic is empty if there is none.
inline OnDisk find_on_disk(const std::string& folder, const Hash256& key) {
  OnDisk best{};
  for (const auto& item : std::filesystem::directory_iterator(folder + "/segments")) {
    const std::string file = item.path().string();
    const auto s = read_struct<SegmentSuperblock>(file, 0);
    for (std::uint32_t slot = 0; slot < s.slots; ++slot) {
      const std::uint64_t at = s.header_table_offset + slot * kHeaderBytes;
      const auto header = read_struct<SlotHeader>(file, at);
      if (header.magic != SlotHeader::kMagic || header.key != key || header.generation < best.header.generation)
        continue;
      best = {file, at, s.payload_offset + slot * s.slot_bytes, header};
    }
  }
  return best;
}

// ---- devices that fail
// --------------------------------------------------------------------------------------------------

// What a FaultDevice does; shared with the test. `before` may return an errno to fail a request without doing it, or a
// negative one to do the first half of a write and then fail it. Called from several threads, each function one at a
// time.
struct Faults {
  std::mutex mutex, flush_mutex;
  std::function<int(const IoRequest&)> before;
  std::function<int(FileId)> before_flush;
  std::uint64_t reads = 0, writes = 0, flushes = 0;
};

class WrappedDevice : public BlockDevice {
 public:
  explicit WrappedDevice(std::unique_ptr<BlockDevice> inner) : inner_(std::move(inner)) {}
  Result<FileId> open_file(const std::string& path, bool create, bool writable) override {
    return inner_->open_file(path, create, writable);
  }
  void close_file(FileId file) override { inner_->close_file(file); }
  Status preallocate(FileId file, std::uint64_t bytes) override { return inner_->preallocate(file, bytes); }
  std::optional<Room> room() const override { return inner_->room(); }
  Result<std::uint64_t> file_bytes(FileId file) override { return inner_->file_bytes(file); }
  void run(std::span<IoRequest> requests, const Completion& on_complete) override {
    inner_->run(requests, on_complete);
  }
  Status flush(FileId file) override { return inner_->flush(file); }
  void share_turns(std::unique_ptr<FlushTurns> turns) override { inner_->share_turns(std::move(turns)); }
  IoGeometry geometry() const override { return inner_->geometry(); }
  const PathReport& report() const override { return inner_->report(); }
  BlockDeviceCounters counters() const override { return inner_->counters(); }

 protected:
  std::unique_ptr<BlockDevice> inner_;
};

// Calls `before` ahead of each batch, on the thread that asked for it and under no lock: it may wait, or use the store.
class HookedDevice : public WrappedDevice {
 public:
  using Hook = std::function<void(std::span<IoRequest>)>;
  HookedDevice(std::unique_ptr<BlockDevice> inner, Hook before)
      : WrappedDevice(std::move(inner)), before_(std::move(before)) {}
  void run(std::span<IoRequest> requests, const Completion& on_complete) override {
    before_(requests);
    inner_->run(requests, on_complete);
  }

 private:
  Hook before_;
};

inline Store::DeviceFactory hooked(HookedDevice::Hook before) {
  return [before = std::move(before)](const std::string& folder, const BlockDeviceOptions& options,
                                      int fd) -> Result<std::unique_ptr<BlockDevice>> {
    auto inner = open_block_device(folder, options, fd);
    if (!inner) return inner.error();
    return std::unique_ptr<BlockDevice>(std::make_unique<HookedDevice>(std::move(*inner), before));
  };
}

class FaultDevice : public WrappedDevice {
 public:
  FaultDevice(std::unique_ptr<BlockDevice> inner, std::shared_ptr<Faults> faults)
      : WrappedDevice(std::move(inner)), faults_(std::move(faults)) {}

  void run(std::span<IoRequest> requests, const Completion& on_complete) override {
    for (IoRequest& request : requests) {
      int verdict = 0;
      {
        const std::lock_guard lock(faults_->mutex);
        ++(request.op == IoRequest::Op::kRead ? faults_->reads : faults_->writes);
        if (faults_->before) verdict = faults_->before(request);
      }
      if (verdict < 0 && request.op == IoRequest::Op::kWrite) tear(request);
      if (verdict != 0) {
        request.error = std::abs(verdict);
      } else {
        inner_->run({&request, 1}, {});
      }
      if (on_complete) on_complete(request);
    }
  }

  Status flush(FileId file) override {
    int verdict = 0;
    {
      const std::lock_guard lock(faults_->flush_mutex);
      ++faults_->flushes;
      if (faults_->before_flush) verdict = faults_->before_flush(file);
    }
    if (verdict != 0) return errno_error(verdict, "fdatasync (injected)");
    return inner_->flush(file);
  }

 private:
  void tear(const IoRequest& request) {
    std::vector<std::byte> flat;
    for (const iovec& piece : request.memory) {
      const auto* from = static_cast<const std::byte*>(piece.iov_base);
      flat.insert(flat.end(), from, from + piece.iov_len);
    }
    const iovec half{flat.data(), flat.size() / 2 / 512 * 512};
    IoRequest partial = request;
    partial.memory = {&half, 1};
    inner_->run({&partial, 1}, {});
  }

  std::shared_ptr<Faults> faults_;
};

inline Store::DeviceFactory faulty(const std::shared_ptr<Faults>& faults) {
  return [faults](const std::string& folder, const BlockDeviceOptions& options,
                  int fd) -> Result<std::unique_ptr<BlockDevice>> {
    auto inner = open_block_device(folder, options, fd);
    if (!inner) return inner.error();
    return std::unique_ptr<BlockDevice>(std::make_unique<FaultDevice>(std::move(*inner), faults));
  };
}

}  // namespace tardis::testing
