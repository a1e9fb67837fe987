// SPDX-License-Identifier: Apache-2.0
// Memory that a controller reaches, and the self-test that decides whether it really does.
#include "nvme/memory.h"

#include <map>
#include <mutex>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

#include "nvme/self_test.h"
#include "tests/nvme_driver_support.h"

namespace tardis::nvme {
namespace {

using testing::Rig;
using testing::RigOptions;

// A mapper of which calls can fail.
class FailingMapper final : public DmaMapper {
 public:
  Result<std::uint64_t> map(void* memory, std::size_t bytes) override {
    if (maps_left == 0) return Error{Code::kNoSpace, "no more mappings"};
    --maps_left;
    mapped[memory] = bytes;
    return reinterpret_cast<std::uintptr_t>(memory) + shift;
  }
  Status unmap(void* memory) override {
    if (!may_unmap) return Error{Code::kIo, "cannot unmap"};
    return mapped.erase(memory) == 1 ? Status() : Status(Error{Code::kInternal, "not mapped"});
  }
  std::map<void*, std::size_t> mapped;
  int maps_left = 100;
  std::uint64_t shift = 0;
  bool may_unmap = true;
};

TEST(NvmeDriverMemory, OwnMemoryIsMappedWhileItLives) {
  FailingMapper mapper;
  {
    auto memory = DmaMemory::allocate(mapper, 5000);
    ASSERT_TRUE(memory);
    EXPECT_EQ(memory->bytes(), 8192u);
    EXPECT_EQ(memory->address(), reinterpret_cast<std::uintptr_t>(memory->data()));
    DmaMemory other = std::move(*memory);
    EXPECT_EQ(mapper.mapped.size(), 1u);
    other = DmaMemory();
    EXPECT_EQ(mapper.mapped.size(), 0u);
  }
  {
    auto memory = DmaMemory::allocate(mapper, 4096);
    ASSERT_TRUE(memory->revoke());
    EXPECT_FALSE(memory->mapped());
    EXPECT_TRUE(mapper.mapped.empty());
    memory->data()[4095] = std::byte{1};  // still ours
  }
  mapper.maps_left = 0;
  EXPECT_FALSE(DmaMemory::allocate(mapper, 4096));
  mapper.maps_left = 1;
  mapper.shift = 8;
  EXPECT_FALSE(DmaMemory::allocate(mapper, 4096)) << "an address that is not page-aligned";
  EXPECT_TRUE(mapper.mapped.empty());
}

TEST(NvmeDriverMemory, WhatCannotBeUnmappedIsNeverFreed) {
#if defined(__SANITIZE_ADDRESS__)
  const __lsan::ScopedDisabler meant;
#endif
  FailingMapper mapper;
  std::byte* data = nullptr;
  {
    auto memory = DmaMemory::allocate(mapper, 4096);
    ASSERT_TRUE(memory);
    data = memory->data();
    mapper.may_unmap = false;
    EXPECT_FALSE(memory->revoke());
  }
  // A controller writes there now. Under AddressSanitizer this would be the use of freed memory.
  std::memset(data, 0x77, 4096);
  ::operator delete (data, std::align_val_t{kPageBytes});
}

TEST(NvmeDriverMemory, RegistrationThatFailsHalfWayLeavesNothing) {
  FailingMapper mapper;
  HostMemory host(mapper);
  RegisteredMemory registered(mapper);
  AlignedBuffer buffer(1 << 20);
  for (int maps = 0; maps < 2; ++maps) {  // of the region, then of its table
    mapper.maps_left = maps;
    EXPECT_FALSE(registered.add(host, buffer.data(), buffer.size()));
    EXPECT_TRUE(mapper.mapped.empty());
    EXPECT_EQ(registered.bytes(), 0u);
  }
  mapper.maps_left = 100;
  mapper.shift = 512;  // another offset in the page
  EXPECT_FALSE(registered.add(host, buffer.data(), buffer.size()));
  EXPECT_TRUE(mapper.mapped.empty());
  mapper.shift = 0 - reinterpret_cast<std::uintptr_t>(buffer.data()) - 4096;  // the last page of all
  EXPECT_FALSE(registered.add(host, buffer.data(), 8192));
  EXPECT_TRUE(mapper.mapped.empty());
  mapper.shift = 0;
  EXPECT_TRUE(registered.add(host, buffer.data() + 100, 5000));
  EXPECT_EQ(registered.bytes(), 5000u);
  EXPECT_EQ(mapper.mapped.at(buffer.data() + 100), 5000u) << "one region, one mapping";
  EXPECT_EQ(registered.table()->find(reinterpret_cast<std::uintptr_t>(buffer.data() + 99)), nullptr);
  EXPECT_NE(registered.table()->find(reinterpret_cast<std::uintptr_t>(buffer.data() + 100)), nullptr);
  EXPECT_NE(registered.table()->find(reinterpret_cast<std::uintptr_t>(buffer.data() + 5099)), nullptr);
  EXPECT_EQ(registered.table()->find(reinterpret_cast<std::uintptr_t>(buffer.data() + 5100)), nullptr);
  EXPECT_TRUE(registered.revoke());
  EXPECT_TRUE(mapper.mapped.empty());
  EXPECT_FALSE(registered.add(host, buffer.data(), 4096)) << "revoked for good";
}

// Host memory, with one thing wrong.
class BrokenMemory final : public MemoryProvider {
 public:
  enum class Wrong { kNothing, kOtherMemory, kNotMapped, kOnePageElsewhere, kWritesGetLost, kNoAllocation, kNoMap };
  BrokenMemory(DmaMapper& mapper, Wrong wrong) : mapper_(mapper), host_(mapper), wrong_(wrong) {}

  std::string name() const override { return "broken memory"; }
  Result<std::uint64_t> map(void* base, std::size_t bytes) override {
    switch (wrong_) {
      case Wrong::kNoMap:
        return Error{Code::kIo, "no mapping"};
      case Wrong::kNotMapped:
        return std::uint64_t{0x7000} << 32;
      case Wrong::kOtherMemory:
      case Wrong::kWritesGetLost:
        // As a bus that drops what is written to the real place: the controller works on something else.
        shadow_ = AlignedBuffer(bytes, 65536);
        if (wrong_ == Wrong::kWritesGetLost) copy_at_read_ = base;
        return mapper_.map(shadow_.data(), bytes);
      default:
        return mapper_.map(base, bytes);
    }
  }
  Status unmap(void* base) override {
    if (wrong_ == Wrong::kNotMapped) return {};
    return mapper_.unmap(shadow_.size() != 0 ? shadow_.data() : base);
  }
  bool host_accessible() const override { return true; }
  Result<void*> allocate(std::size_t bytes) override {
    if (wrong_ == Wrong::kNoAllocation) return Error{Code::kNoSpace, "no memory"};
    return host_.allocate(bytes);
  }
  void free(void* memory) override { host_.free(memory); }
  Status copy_to(void* memory, std::span<const std::byte> from) override {
    // The controller reads the right bytes from it, but what it writes does not arrive.
    if (copy_at_read_ != nullptr) std::memcpy(shadow_.data(), from.data(), from.size());
    return host_.copy_to(memory, from);
  }
  Status copy_from(const void* memory, std::span<std::byte> to) override {
    auto copied = host_.copy_from(memory, to);
    if (wrong_ == Wrong::kOnePageElsewhere) std::swap_ranges(to.begin(), to.begin() + 4096, to.begin() + 8192);
    return copied;
  }

 private:
  DmaMapper& mapper_;
  HostMemory host_;
  const Wrong wrong_;
  AlignedBuffer shadow_;
  void* copy_at_read_ = nullptr;
};

TEST(NvmeDriverMemory, SelfTestBelievesWhatArrives) {
  for (const auto addresses : {DmaSpaceOptions::Addresses::kIdentity, DmaSpaceOptions::Addresses::kTranslated}) {
    RigOptions options;
    options.addresses = addresses;
    Rig rig(options);
    ASSERT_NE(rig.disk, nullptr);
    AlignedBuffer before(kSelfTestBytes), after(kSelfTestBytes);
    for (std::size_t i = 0; i < kSelfTestBytes; ++i) before.data()[i] = static_cast<std::byte>(i % 251);
    ASSERT_EQ(rig.write(1 << 20, before.data(), kSelfTestBytes), 0);
    HostMemory host(*rig.space);
    const auto bounced = rig.driver->counters().bounced_bytes;
    const auto result = self_test(host, *rig.disk, 1 << 20);
    EXPECT_TRUE(result) << result.error().message;
    // Its own memory went without copies; the five transfers at the other end did not.
    EXPECT_EQ(rig.driver->counters().bounced_bytes - bounced, 4 * kSelfTestBytes);
    ASSERT_EQ(rig.read(1 << 20, after.data(), kSelfTestBytes), 0);
    EXPECT_EQ(std::memcmp(before.data(), after.data(), kSelfTestBytes), 0) << "the scratch blocks were not put back";
  }
}

TEST(NvmeDriverMemory, SelfTestRefusesWhatDoesNotArrive) {
  using Wrong = BrokenMemory::Wrong;
  const std::pair<Wrong, const char*> cases[] = {
      {Wrong::kOtherMemory, "a write from it: expected the bytes that were sent"},
      {Wrong::kWritesGetLost, "a read into it: expected the bytes that were sent"},
      {Wrong::kOnePageElsewhere, "a read into it: expected the bytes that were sent"},
      {Wrong::kNotMapped, "a write from it"},
      {Wrong::kNoAllocation, "allocation"},
      {Wrong::kNoMap, "registration"},
  };
  for (const auto& [wrong, text] : cases) {
    Rig rig({});
    ASSERT_NE(rig.disk, nullptr);
    rig.excused = {ViolationKind::kDma};
    BrokenMemory memory(*rig.space, wrong);
    const auto result = self_test(memory, *rig.disk, 0);
    ASSERT_FALSE(result) << text;
    EXPECT_NE(result.error().message.find("self-test of broken memory"), std::string::npos) << result.error().message;
    EXPECT_NE(result.error().message.find(text), std::string::npos) << result.error().message;
    EXPECT_NE(result.error().message.find("data goes through host memory"), std::string::npos);
    // The drive works as before.
    std::byte page[4096];
    EXPECT_EQ(rig.read(0, page, sizeof page), 0);
    EXPECT_EQ(page[0], std::byte{0}) << "the scratch blocks were not put back";
  }
  Rig rig({});
  BrokenMemory memory(*rig.space, Wrong::kNothing);
  EXPECT_TRUE(self_test(memory, *rig.disk, 0));
}

// Without a write; what cannot be read is passed over.
TEST(NvmeDriverMemory, SelfTestByReads) {
  Rig rig({});
  ASSERT_NE(rig.disk, nullptr);
  for (std::size_t i = 0; i < rig.medium->bytes(); ++i) rig.medium->data()[i] = static_cast<std::byte>(i % 251);
  FaultRule rule;
  rule.kind = FaultKind::kStatus;
  rule.status = kScUnwrittenBlock | kDoNotRetry;
  rule.opcode = static_cast<std::uint8_t>(IoOpcode::kRead);
  rule.last_block = 40;
  rule.count = 0;
  rig.faults->add(rule);
  FaultRule no_writes;
  no_writes.kind = FaultKind::kMediaError;
  no_writes.opcode = static_cast<std::uint8_t>(IoOpcode::kWrite);
  no_writes.count = 0;
  rig.faults->add(no_writes);
  HostMemory host(*rig.space);
  const auto result = self_test_reads(host, *rig.disk);
  EXPECT_TRUE(result) << result.error().message;
  EXPECT_EQ(rig.faults->injected(FaultKind::kMediaError), 0u);
  BrokenMemory lost(*rig.space, BrokenMemory::Wrong::kOnePageElsewhere);
  const auto refused = self_test_reads(lost, *rig.disk);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("a read into it: expected the bytes"), std::string::npos)
      << refused.error().message;
  rule.last_block = ~std::uint64_t{0};
  rig.faults->add(rule);
  EXPECT_FALSE(self_test_reads(host, *rig.disk));
}

TEST(NvmeDriverMemory, SelfTestEndsWithADriveThatFails) {
  Rig rig({});
  FaultRule rule;
  rule.kind = FaultKind::kMediaError;
  rule.count = 0;
  rig.faults->add(rule);
  HostMemory host(*rig.space);
  EXPECT_FALSE(self_test(host, *rig.disk, 0));
}

// Memory that the CPU cannot reach is named to the controller or not used.
class DeviceMemory final : public MemoryProvider {
 public:
  explicit DeviceMemory(DmaMapper& mapper) : host_(mapper) {}
  std::string name() const override { return "device memory"; }
  Result<std::uint64_t> map(void* base, std::size_t bytes) override { return host_.map(base, bytes); }
  Status unmap(void* base) override { return host_.unmap(base); }
  bool host_accessible() const override { return false; }
  Result<void*> allocate(std::size_t bytes) override { return host_.allocate(bytes); }
  void free(void* memory) override { host_.free(memory); }
  Status copy_to(void* memory, std::span<const std::byte> from) override { return host_.copy_to(memory, from); }
  Status copy_from(const void* memory, std::span<std::byte> to) override { return host_.copy_from(memory, to); }

 private:
  HostMemory host_;
};

TEST(NvmeDriverMemory, DeviceMemoryIsNeverCopiedByTheCpu) {
  for (const bool zero_copy : {true, false}) {
    RigOptions options;
    options.soft.sgl = kSglNone;
    options.driver.zero_copy = zero_copy;
    options.block_shift = 9;
    Rig rig(options);
    ASSERT_NE(rig.disk, nullptr);
    DeviceMemory device(*rig.space);
    AlignedBuffer memory(64 << 10);
    const auto registered = rig.driver->register_memory(device, memory.data(), memory.size());
    ASSERT_EQ(static_cast<bool>(registered), zero_copy);
    if (!zero_copy) continue;
    EXPECT_EQ(rig.write(0, memory.data(), 32 << 10), 0);
    EXPECT_EQ(rig.read(0, memory.data() + 2, 4096), EFAULT) << "a PRP cannot name it";
    EXPECT_EQ(rig.driver->counters().bounced_commands, 0u);
    // Nor where the CPU copies what is before and behind it, and it is less than a page.
    AlignedBuffer other(8192);
    for (std::size_t i = 0; i < 8192; ++i) rig.medium->data()[i] = static_cast<std::byte>(i * 5 / 4);
    const iovec mixed[] = {
        {other.data() + 2, 2048}, {memory.data(), 1024}, {memory.data() + 4096, 4096}, {other.data() + 4096, 1024}};
    ASSERT_EQ(rig.move(NamespaceRequest::Op::kRead, 0, mixed), 0);
    EXPECT_EQ(rig.driver->counters().bounced_bytes, 3072u);
    const std::byte* expected = rig.medium->data();
    for (const iovec& piece : mixed) {
      EXPECT_EQ(std::memcmp(piece.iov_base, expected, piece.iov_len), 0);
      expected += piece.iov_len;
    }
    rig.driver->unregister_memory(memory.data());  // before its provider goes
  }
}

TEST(NvmeDriverMemory, GpuMemoryIsNotAvailableAndTheReasonIsSaid) {
  auto provider = find_gpu_memory_provider();
  ASSERT_FALSE(provider);
  EXPECT_NE(provider.error().message.find("not available, because"), std::string::npos) << provider.error().message;
}

// The controller can neither be stopped nor kept from the memory of a request: the process ends, rather than hand it
// back.
TEST(NvmeDriverMemoryDeathTest, MemoryThatCannotBeTakenAwayIsNotHandedBack) {
  class Stubborn final : public DmaMapper {
   public:
    explicit Stubborn(DmaSpace& space) : space_(space) {}
    Result<std::uint64_t> map(void* memory, std::size_t bytes) override { return space_.map(memory, bytes); }
    Status unmap(void* memory) override {
      if (memory == stuck) return Error{Code::kIo, "no"};
      return space_.unmap(memory);
    }
    void* stuck = nullptr;

   private:
    DmaSpace& space_;
  };
  const auto ends = [](bool stopped_by_other_means) {
    RigOptions rig_options;
    rig_options.open = false;
    Rig rig(rig_options);
    Stubborn mapper(*rig.space);
    DriverOptions options;
    options.io_timeout_ms = 20;
    options.abort_grace_ms = 10;
    options.ready_timeout_ms = 50;
    if (stopped_by_other_means) options.function_reset = [] { return Status(); };
    auto opened = Driver::open(rig.controller->window(), mapper, options);
    std::shared_ptr<Driver> driver(std::move(*opened));
    auto disk = NvmeNamespace::open(driver, 1);
    AlignedBuffer memory(4096);
    if (!(*disk)->register_memory(memory.data(), memory.size())) std::exit(2);
    mapper.stuck = memory.data();
    rig.controller->hold_ready(true);
    (void)driver->reset();
    std::exit(3);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(ends(false), "cannot be stopped.*ending the process");
  EXPECT_EXIT(ends(true), ::testing::ExitedWithCode(3), "");
}

}  // namespace
}  // namespace tardis::nvme
