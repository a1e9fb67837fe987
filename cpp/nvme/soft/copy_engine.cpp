// SPDX-License-Identifier: Apache-2.0
#include "nvme/soft/copy_engine.h"

#include <utility>

namespace tardis::nvme {
namespace {

// An engine of another library.
class TableLane final : public CopyLane {
 public:
  TableLane(const tardis_copy_engine& table, void* lane) : table_(table), lane_(lane) {}
  ~TableLane() override { table_.close_lane(lane_); }
  bool start(CopyDirection direction, std::span<const tardis_copy> copies, std::uint64_t batch) override {
    return table_.start(lane_, direction == CopyDirection::kToRemote ? 1 : 0, copies.data(), copies.size(), batch) == 0;
  }
  std::size_t poll(std::span<tardis_copy_end> ends) override { return table_.poll(lane_, ends.data(), ends.size()); }

 private:
  const tardis_copy_engine table_;
  void* const lane_;
};

class TableEngine final : public CopyEngine {
 public:
  explicit TableEngine(const tardis_copy_engine& table) : table_(table), name_(table.name) {}

  std::string name() const override { return name_; }
  Result<std::unique_ptr<CopyLane>> open_lane() override {
    void* lane = nullptr;
    if (auto opened = answered(table_.open_lane(table_.context, &lane), "a lane"); !opened) return opened.error();
    return std::unique_ptr<CopyLane>(std::make_unique<TableLane>(table_, lane));
  }
  Result<void*> allocate(std::size_t bytes) override {
    void* memory = nullptr;
    auto made = answered(table_.allocate(table_.context, bytes, &memory), "memory of " + std::to_string(bytes));
    if (!made) return made.error();
    return memory;
  }
  void free(void* remote) override { (void)table_.release(table_.context, remote); }
  Status copy(CopyDirection direction, const tardis_copy& copy) override {
    return answered(table_.copy(table_.context, &copy, direction == CopyDirection::kToRemote ? 1 : 0), "a copy");
  }
  Status pin(void* host, std::size_t bytes) override {
    return answered(table_.pin(table_.context, host, bytes),
                    "pinned host memory of " + std::to_string(bytes) + " bytes");
  }
  void unpin(void* host) override { (void)table_.unpin(table_.context, host); }

 private:
  Status answered(int error, const std::string& what) const {
    if (error == 0) return {};
    return Error{Code::kInternal, name_ + ": expected " + what + ", found error " + std::to_string(error)};
  }

  const tardis_copy_engine table_;
  const std::string name_;
};

}  // namespace

std::unique_ptr<CopyEngine> make_copy_engine(const tardis_copy_engine& table) {
  return std::make_unique<TableEngine>(table);
}

Status EngineMemory::copy_to(void* memory, std::span<const std::byte> from) {
  return engine_.copy(CopyDirection::kToRemote, {const_cast<std::byte*>(from.data()), memory, from.size()});
}

Status EngineMemory::copy_from(const void* memory, std::span<std::byte> to) {
  return engine_.copy(CopyDirection::kToHost, {to.data(), const_cast<void*>(memory), to.size()});
}

Result<PinnedBuffer> PinnedBuffer::allocate(CopyEngine& engine, std::size_t bytes) {
  auto buffer = AlignedBuffer::allocate(bytes);
  if (!buffer) return buffer.error();
  if (auto pinned = engine.pin(buffer->data(), bytes); !pinned) return pinned.error();
  PinnedBuffer made;
  made.engine_ = &engine;
  made.buffer_ = std::move(*buffer);
  return made;
}

}  // namespace tardis::nvme
