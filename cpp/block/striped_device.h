// SPDX-License-Identifier: Apache-2.0
// Makes one file of several, which lie best on a drive each: a request is cut into a piece for each of them, and the
// pieces go to the device below in one batch. Requests for ordinary files pass through as they are.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "block/block_device.h"
#include "block/stripe_map.h"

namespace tardis {

class StripedDevice : public BlockDevice {
 public:
  explicit StripedDevice(std::unique_ptr<BlockDevice> inner) : inner_(std::move(inner)) {}

  // One file of several open ones, which belong to it from now on. `map`: StripeMap::pack(), read at each request; it
  // must outlive the file.
  FileId join(std::vector<FileId> files, const std::atomic<std::uint64_t>& map);

  // What one of the joined files met since this was asked last.
  struct Met {
    std::uint32_t worked = 0;
    int error = 0;  // the last
  };
  std::vector<Met> take_met(FileId file, IoUse use);

  Result<FileId> open_file(const std::string& path, bool create, bool writable) override {
    return inner_->open_file(path, create, writable);
  }
  void close_file(FileId file) override;
  Status preallocate(FileId file, std::uint64_t bytes) override;
  Status reserve(FileId file, std::uint64_t bytes, std::uint64_t zeros) override {
    return is_joined(file) ? preallocate(file, bytes) : inner_->reserve(file, bytes, zeros);
  }
  std::optional<Room> room() const override { return inner_->room(); }
  // Of a joined file: how many bytes come before the first that one of the files lacks.
  Result<std::uint64_t> file_bytes(FileId file) override;
  void run(std::span<IoRequest> requests, const Completion& on_complete) override;
  bool reads_at_once() const override { return inner_->reads_at_once(); }
  int read_at_once(FileId file, std::uint64_t offset, std::span<const iovec> memory) override;
  // Of a joined file: flushes every one, also after one has failed, and tells the first failure.
  Status flush(FileId file) override { return flush_files({&file, 1}).front(); }
  std::vector<Status> flush_files(std::span<const FileId> files) override;
  void share_turns(std::unique_ptr<FlushTurns> turns) override { inner_->share_turns(std::move(turns)); }
  Status register_memory(void* base, std::size_t bytes) override { return inner_->register_memory(base, bytes); }
  void unregister_memory(void* base) override { inner_->unregister_memory(base); }
  IoGeometry geometry() const override { return inner_->geometry(); }
  std::uint64_t join_bytes() const override { return inner_->join_bytes(); }
  const PathReport& report() const override { return inner_->report(); }
  BlockDeviceCounters counters() const override { return inner_->counters(); }

 private:
  static constexpr FileId kJoined = FileId{1} << 31;  // ids of the device below are small
  struct Member {
    FileId file = 0;
    std::array<std::atomic<std::uint32_t>, kIoUses> worked{};
    std::array<std::atomic<int>, kIoUses> error{};
    void met(IoUse use, int os_error);
  };
  struct Joined {
    Joined(const std::vector<FileId>& files, const std::atomic<std::uint64_t>& where);
    StripeMap map() const { return StripeMap::of(where.load(), static_cast<std::uint32_t>(members.size())); }
    std::vector<Member> members;
    const std::atomic<std::uint64_t>& where;
  };
  class Batch;

  static bool is_joined(FileId file) { return (file & kJoined) != 0; }
  std::shared_ptr<Joined> find(FileId file) const;  // null: not open

  std::unique_ptr<BlockDevice> inner_;
  mutable std::shared_mutex mutex_;
  std::vector<std::shared_ptr<Joined>> joined_;
};

}  // namespace tardis
