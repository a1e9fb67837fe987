// SPDX-License-Identifier: Apache-2.0
// The doorbells of a controller that another process has.
#pragma once

#include <cstdint>
#include <utility>

#include "nvme/broker/shared_memory.h"
#include "nvme/register_window.h"
#include "nvme/spec.h"

namespace tardis::nvme::broker {

class DoorbellPage final : public Doorbells {
 public:
  // `memory`: of the file, from kRegDoorbells on.
  explicit DoorbellPage(Mapping memory) : memory_(std::move(memory)) {}
  volatile std::uint32_t* doorbells() override { return reinterpret_cast<volatile std::uint32_t*>(memory_.data()); }
  std::uint32_t bytes() const override { return static_cast<std::uint32_t>(kRegDoorbells + memory_.bytes()); }
  void unmap() { memory_.reset(); }

 private:
  Mapping memory_;
};

}  // namespace tardis::nvme::broker
