// SPDX-License-Identifier: Apache-2.0
// What a controller's failures cost a store: a page is given up only where the medium lost it. After anything else
// (time-outs, aborts, resets, a controller that is removed or out of use) the page is there when the drive works again.
#include "base/clock.h"
#include "nvme/command_error.h"
#include "nvme_store_support.h"
#include "nvme_support_soft_stack.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

constexpr std::uint8_t kReadOpcode = static_cast<std::uint8_t>(IoOpcode::kRead);
constexpr std::uint64_t kPages = 12;

FaultRule rule(FaultKind kind, std::uint64_t count, std::optional<std::uint8_t> opcode = kReadOpcode) {
  FaultRule made;
  made.kind = kind;
  made.opcode = opcode;
  made.first_block = 1;  // I/O commands alone
  made.count = count;
  return made;
}
FaultRule with_status(std::uint16_t status) {
  FaultRule made = rule(FaultKind::kStatus, 0);
  made.status = status;
  return made;
}

struct Case {
  const char* name;
  std::function<void(SoftStack&)> inject;
  bool gives_pages_up = false;
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

std::vector<Case> cases() {
  const auto rules = [](std::vector<FaultRule> all) {
    return [all](SoftStack& stack) {
      for (const FaultRule& one : all) stack.faults->add(one);
    };
  };
  return {
      {"CompletionsLost", rules({rule(FaultKind::kLostCompletion, 4)})},
      {"CompletionsLate", rules({[] {
         FaultRule late = rule(FaultKind::kLateCompletion, 4);
         late.delay = std::chrono::milliseconds(60);
         late.late_data = true;
         return late;
       }()})},
      {"WrongIdentifiers", rules({rule(FaultKind::kWrongCommandId, 0)})},
      {"StatusOfNoMeaning", rules({with_status(0x300)})},
      {"InternalErrors", rules({with_status(kScInternal)})},
      {"DataTransferErrors", rules({with_status(kScDataTransferError)})},
      {"AbortedByPowerLoss", rules({with_status(kScPowerLossAbort)})},
      {"PathErrors", rules({with_status(0x370)})},
      {"VendorErrors", rules({with_status(0x7c1)})},
      {"SubmissionQueueDeleted", rules({with_status(kScSqDeleted)})},
      {"NamespaceNotReady", rules({with_status(kScNamespaceNotReady)})},
      {"StuckQueueHead", rules({rule(FaultKind::kStuckSqHead, 0)})},
      {"FatalOnce", rules({rule(FaultKind::kFatal, 1)})},
      {"FatalAgainAndAgain", rules({rule(FaultKind::kFatal, 0)})},
      {"FatalAndNotReadyAgain",
       [](SoftStack& stack) {
         stack.controller->hold_ready(true);
         stack.controller->fail();
       }},
      {"RemovedAllOnes", [](SoftStack& stack) { stack.controller->remove(false); }},
      {"RemovedZeros", [](SoftStack& stack) { stack.controller->remove(true); }},
      {"MediaErrors", rules({rule(FaultKind::kMediaError, 0)}), true},
  };
}

SoftStackOptions impatient() {
  SoftStackOptions options = small_stack(4096);
  options.soft.timeout_ms = 500;
  options.soft.faults = std::make_shared<FaultPlan>();
  options.driver.io_timeout_ms = 30;
  options.driver.abort_grace_ms = 10;
  options.driver.admin_timeout_ms = 400;
  options.driver.ready_timeout_ms = 400;
  return options;
}

class NvmeStoreErrors : public ::testing::TestWithParam<Case> {
 protected:
  NvmeStoreErrors() {
    auto made = MemoryMedium::create(24 * kMiB);
    EXPECT_TRUE(made);
    medium_ = std::shared_ptr<MemoryMedium>(std::move(*made));
  }
  std::unique_ptr<Store> open(const std::shared_ptr<SoftStack>& stack) {
    return open_store(home_.path(), small_store(3), true, on(SoftStack::disk_of(stack)));
  }
  std::shared_ptr<MemoryMedium> medium_;
  TempFolder home_{memory_parent()};
};

// The store was closed in good order before, so that its checkpoint is believed; and it is closed again with what the
// failing drive made of it.
TEST_P(NvmeStoreErrors, OnlyWhatTheMediumLostIsGivenUp) {
  {
    auto store = open(SoftStack::make(medium_, impatient()));
    ASSERT_NE(store, nullptr);
    Space space(*store, 1, {2, {5000, 3000}});
    ASSERT_EQ(space.put(1, 0, kPages), kPages);
    ASSERT_TRUE(store->close());
  }
  {
    const auto stack = SoftStack::make(medium_, impatient());
    ASSERT_NE(stack, nullptr);
    auto store = open(stack);
    ASSERT_NE(store, nullptr);
    Space space(*store, 1, {2, {5000, 3000}});
    GetParam().inject(*stack);
    std::size_t missed = 0;
    for (std::uint64_t page = 0; page < kPages; ++page) {
      const std::uint64_t begin = monotonic_ns();
      missed += space.fetch(1, page, 1) == 0;
      EXPECT_LT(monotonic_ns() - begin, 30'000'000'000u);
    }
    EXPECT_EQ(stats_of(*store).slots_quarantined, GetParam().gives_pages_up ? kPages : 0u);
    if (GetParam().gives_pages_up) {
      EXPECT_EQ(missed, kPages);
    }
    EXPECT_EQ(space.run(1, 0, kPages), GetParam().gives_pages_up ? 0u : kPages);
    stack->faults->clear();
    (void)store->close();
  }
  auto store = open(SoftStack::make(medium_, impatient()));
  ASSERT_NE(store, nullptr);
  Space space(*store, 1, {2, {5000, 3000}});
  if (!GetParam().gives_pages_up) {
    EXPECT_EQ(space.fetch(1, 0, kPages), kPages);
  }
  // What was lost can be stored again.
  EXPECT_EQ(space.put(1, 0, kPages), kPages);
  EXPECT_EQ(space.fetch(1, 0, kPages), kPages);
  expect_slots_conserved(*store);
  EXPECT_TRUE(store->close());
}

INSTANTIATE_TEST_SUITE_P(Faults, NvmeStoreErrors, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// EIO and ENODATA are what a store takes for lost bytes.
TEST(NvmeCommandError, OnlyMediaErrorsAreInputOutputErrors) {
  for (unsigned code = 1; code < 0x800; ++code) {
    const CommandStatus status{static_cast<std::uint16_t>(code)};
    const int error = errno_of(status);
    EXPECT_NE(error, 0);
    EXPECT_NE(error, ENODATA);
    EXPECT_EQ(error == EIO, status.type() == 2) << describe(status);
  }
}

}  // namespace
}  // namespace tardis::nvme::testing
