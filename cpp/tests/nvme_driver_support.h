// SPDX-License-Identifier: Apache-2.0
// Helpers of the NVMe driver tests: a software controller with a driver on it, and a model of what blocks hold.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "nvme/driver.h"
#include "nvme/nvme_namespace.h"
#include "nvme/soft/controller.h"

namespace tardis::nvme::testing {

// TARDIS_NVME_CAMPAIGN multiplies the length of campaigns.
inline double campaign_factor() {
  const char* text = std::getenv("TARDIS_NVME_CAMPAIGN");
  const double factor = text != nullptr ? std::atof(text) : 1;
  return factor > 0 ? factor : 1;
}

// Stands before another window, to look at or change what goes through.
class WindowBefore : public RegisterWindow {
 public:
  virtual RegisterWindow& behind() = 0;
  std::uint32_t read32(std::uint32_t offset) override { return behind().read32(offset); }
  std::uint64_t read64(std::uint32_t offset) override { return behind().read64(offset); }
  void write32(std::uint32_t offset, std::uint32_t value) override { behind().write32(offset, value); }
  void write64(std::uint32_t offset, std::uint64_t value) override { behind().write64(offset, value); }
  volatile std::uint32_t* doorbells() override { return behind().doorbells(); }
  std::uint32_t bytes() const override { return const_cast<WindowBefore*>(this)->behind().bytes(); }
  void notify() override { behind().notify(); }
};

struct RigOptions {
  DmaSpaceOptions::Addresses addresses = DmaSpaceOptions::Addresses::kTranslated;
  std::uint64_t bytes = 8 << 20;  // of the namespace
  std::uint32_t block_shift = 12;
  SoftControllerOptions soft;
  DriverOptions driver;
  bool open = true;
};

// Members go in the reverse order: the driver shuts its controller down before that goes.
struct Rig {
  explicit Rig(RigOptions options) {
    DmaSpaceOptions space_options;
    space_options.addresses = options.addresses;
    space = std::make_unique<DmaSpace>(space_options);
    if (!options.soft.faults) options.soft.faults = std::make_shared<FaultPlan>();
    faults = options.soft.faults;
    auto made = MemoryMedium::create(options.bytes);
    EXPECT_TRUE(made);
    medium = std::shared_ptr<MemoryMedium>(std::move(*made));
    if (options.soft.namespaces.empty()) options.soft.namespaces.push_back({});
    options.soft.namespaces[0].medium = medium;
    options.soft.namespaces[0].block_shift = options.block_shift;
    auto created = SoftController::create(options.soft, *space);
    EXPECT_TRUE(created) << (created ? "" : created.error().message);
    if (!created) return;
    controller = std::move(*created);
    driver_options = options.driver;
    if (options.open) open();
  }
  ~Rig() {
    disk.reset();
    driver.reset();
    if (controller == nullptr) return;
    auto violations = controller->violations();
    std::erase_if(violations, [&](const Violation& violation) { return excused.contains(violation.kind); });
    EXPECT_TRUE(violations.empty()) << describe(violations);
    EXPECT_EQ(space->mapped_ranges(), 0u) << "the driver left memory mapped";
  }

  // Several attempts where the options leave no time for a machine that is loaded.
  bool open(int attempts = 1) {
    auto opened = Driver::open(controller->window(), *space, driver_options);
    while (!opened && --attempts > 0) opened = Driver::open(controller->window(), *space, driver_options);
    EXPECT_TRUE(opened) << (opened ? "" : opened.error().message);
    if (!opened) return false;
    driver = std::shared_ptr<Driver>(std::move(*opened));
    auto found = NvmeNamespace::open(driver, 1);
    EXPECT_TRUE(found) << (found ? "" : found.error().message);
    if (!found) return false;
    disk = std::move(*found);
    return true;
  }

  // One request.
  int move(NamespaceRequest::Op op, std::uint64_t offset, std::span<const iovec> memory) {
    NamespaceRequest request{.op = op, .offset = offset, .memory = memory, .error = -1};
    disk->run({&request, 1}, nullptr);
    return request.error;
  }
  int read(std::uint64_t offset, void* to, std::size_t bytes) {
    const iovec range{to, bytes};
    return move(NamespaceRequest::Op::kRead, offset, {&range, 1});
  }
  int write(std::uint64_t offset, void* from, std::size_t bytes) {
    const iovec range{from, bytes};
    return move(NamespaceRequest::Op::kWrite, offset, {&range, 1});
  }

  std::unique_ptr<DmaSpace> space;
  std::shared_ptr<FaultPlan> faults;
  std::shared_ptr<MemoryMedium> medium;
  std::unique_ptr<SoftController> controller;
  DriverOptions driver_options;
  std::shared_ptr<Driver> driver;
  std::unique_ptr<NvmeNamespace> disk;
  std::set<ViolationKind> excused;  // what the driver is blamed for, and the controller's own faults cause
};

// What the blocks of a range hold, where writes may have failed: each block holds one of the versions that may be
// there, whole. Version 0: zeros.
class BlockModel {
 public:
  BlockModel(std::uint64_t first, std::uint64_t blocks, std::uint32_t block_bytes)
      : first_(first), block_bytes_(block_bytes), versions_(blocks, {0}) {}

  std::uint64_t first() const { return first_; }
  std::uint64_t blocks() const { return versions_.size(); }
  std::uint32_t block_bytes() const { return block_bytes_; }

  void fill(std::uint64_t block, std::uint64_t version, std::byte* to) const {
    if (version == 0) {
      std::memset(to, 0, block_bytes_);
      return;
    }
    std::uint64_t state = (first_ + block) * 0x9e3779b97f4a7c15u ^ version * 0xbf58476d1ce4e5b9u;
    const std::uint64_t head[2] = {first_ + block, version};
    std::memcpy(to, head, sizeof head);
    for (std::uint32_t at = sizeof head; at < block_bytes_; at += 8) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::memcpy(to + at, &state, 8);
    }
  }
  std::uint64_t next_version() { return ++version_; }
  void wrote(std::uint64_t block, std::uint64_t version, bool surely) {
    if (surely) versions_[block].clear();
    versions_[block].insert(version);
  }
  // Empty if a block may hold these bytes; then it does.
  std::string judge(std::uint64_t block, const std::byte* found) {
    std::vector<std::byte> expected(block_bytes_);
    for (const std::uint64_t version : versions_[block]) {
      fill(block, version, expected.data());
      if (std::memcmp(found, expected.data(), block_bytes_) != 0) continue;
      const std::uint64_t held = version;
      versions_[block] = {held};
      return {};
    }
    std::uint64_t head[2];
    std::memcpy(head, found, sizeof head);
    std::string text = "block " + std::to_string(first_ + block) + ": expected one of the versions";
    for (const std::uint64_t version : versions_[block]) text += " " + std::to_string(version);
    return text + ", found what begins with block " + std::to_string(head[0]) + " version " + std::to_string(head[1]);
  }

 private:
  const std::uint64_t first_;
  const std::uint32_t block_bytes_;
  std::vector<std::set<std::uint64_t>> versions_;
  std::uint64_t version_ = 0;
};

// Memory of which random pieces are used, registered or not.
class Arena {
 public:
  Arena(std::size_t bytes, std::size_t offset) : buffer_(bytes + 65536), offset_(offset), bytes_(bytes) {}
  std::byte* data() { return buffer_.data() + offset_; }
  std::size_t size() const { return bytes_; }

 private:
  AlignedBuffer buffer_;
  std::size_t offset_, bytes_;
};

// `bytes` bytes within [begin, end), which has room for them and a page for each piece, as up to `pieces` pieces that
// do not overlap, in any order of addresses. `align`: of their beginnings and, but for one, of their lengths.
inline std::vector<iovec> random_pieces(std::mt19937_64& random, std::byte* begin, std::byte* end, std::size_t bytes,
                                        std::size_t pieces, std::size_t align) {
  std::vector<std::size_t> lengths;
  std::size_t left = bytes;
  for (std::size_t i = 0; i + 1 < pieces && left > align; ++i) {
    lengths.push_back(random() % 8 == 0 ? 0 : random() % left / align * align);
    left -= lengths.back();
  }
  lengths.push_back(left);
  std::vector<std::size_t> order(lengths.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  const std::size_t room = static_cast<std::size_t>(end - begin) - bytes - lengths.size() * align;
  std::vector<iovec> memory(lengths.size());
  std::byte* at = begin;
  for (const std::size_t i : order) {
    if (random() % 3 != 0) at += random() % (room / lengths.size() + 1);
    at += (align - reinterpret_cast<std::uintptr_t>(at) % align) % align;
    memory[i] = {at, lengths[i]};
    at += lengths[i];
  }
  return memory;
}

}  // namespace tardis::nvme::testing
