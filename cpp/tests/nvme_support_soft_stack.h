// SPDX-License-Identifier: Apache-2.0
// A software controller on a medium, and a driver on that: what a store on a raw namespace has below it.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "nvme/driver.h"
#include "nvme/nvme_device.h"
#include "nvme/nvme_namespace.h"
#include "nvme/soft/controller.h"

namespace tardis::nvme::testing {

struct SoftStackOptions {
  std::uint32_t block_bytes = 4096;
  SoftControllerOptions soft;
  DriverOptions driver;
};

// Made often and used briefly.
inline SoftStackOptions small_stack(std::uint32_t block_bytes) {
  SoftStackOptions options;
  options.block_bytes = block_bytes;
  options.soft.queue_pairs = 2;
  options.soft.spin = std::chrono::microseconds(10);
  options.driver.queues = 2;
  options.driver.queue_entries = 32;
  options.driver.bounce_buffers = 4;
  return options;
}

// Members go in the reverse order: the driver shuts its controller down before that goes.
class SoftStack {
 public:
  // Null, and a failed test, if it cannot be brought up. The namespace keeps all of it alive.
  static std::shared_ptr<SoftStack> make(std::shared_ptr<Medium> medium, SoftStackOptions options) {
    auto stack = try_make(std::move(medium), std::move(options));
    if (stack) return *stack;
    ADD_FAILURE() << stack.error().message;
    return nullptr;
  }
  static Result<std::shared_ptr<SoftStack>> try_make(std::shared_ptr<Medium> medium, SoftStackOptions options) {
    auto stack = std::make_shared<SoftStack>();
    options.soft.namespaces = {{.medium = std::move(medium), .block_shift = options.block_bytes == 512 ? 9u : 12u}};
    stack->faults = options.soft.faults;
    auto controller = SoftController::create(std::move(options.soft), stack->space);
    if (!controller) return controller.error();
    stack->controller = std::move(*controller);
    auto driver = Driver::open(stack->controller->window(), stack->space, options.driver);
    if (!driver) return driver.error();
    stack->driver = std::move(*driver);
    auto disk = NvmeNamespace::open(stack->driver, 1);
    if (!disk) return disk.error();
    stack->disk = std::move(*disk);
    return stack;
  }
  static std::shared_ptr<RawNamespace> disk_of(const std::shared_ptr<SoftStack>& stack) {
    return {stack, stack->disk.get()};
  }

  ~SoftStack() {
    disk.reset();
    driver.reset();
    if (controller == nullptr) return;
    const auto violations = controller->violations();
    // What faults made of the rings is not the driver's doing.
    EXPECT_TRUE(faults != nullptr || violations.empty()) << describe(violations);
    EXPECT_EQ(space.mapped_ranges(), 0u) << "the driver left memory mapped";
  }

  DmaSpace space{DmaSpaceOptions{.addresses = DmaSpaceOptions::Addresses::kTranslated}};
  std::unique_ptr<SoftController> controller;
  std::shared_ptr<Driver> driver;
  std::unique_ptr<NvmeNamespace> disk;
  std::shared_ptr<FaultPlan> faults;  // null: none
};

}  // namespace tardis::nvme::testing
