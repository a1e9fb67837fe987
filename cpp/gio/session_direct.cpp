// SPDX-License-Identifier: Apache-2.0
#include "gio/session_direct.h"

#include <algorithm>

#include "nvme/self_test.h"

namespace tardis::gio {
namespace {

// Each has streams of its own for copies. With 12, copies shared a hardware queue with work that waited for the ring,
// and the ring waited for them until its deadline (docs/gio-ring.md); 4 reach what a copy engine does.
constexpr std::uint32_t kMostThreads = 4;

}  // namespace

Status SessionDirect::start(std::unique_ptr<nvme::CopyEngine> engine, void* lists, Grant& grant,
                            nvme::NvmeNamespace& disk) {
  if (engine_ != nullptr) return Error{Code::kInvalidArgument, "direct landing: expected one engine, found a second"};
  engine_ = std::move(engine);
  refused_.clear();
  auto begun = begin(lists, grant, disk);
  if (!begun) {
    refused_ = begun.error().message;
    stop();
  }
  return begun;
}

Status SessionDirect::begin(void* lists, Grant& grant, nvme::NvmeNamespace& disk) {
  if (const std::uint32_t threads = controller_.options().threads; threads > kMostThreads) {
    return Error{
        Code::kInvalidArgument,
        "direct landing: expected at most " + std::to_string(kMostThreads) + " controller threads, found " +
            std::to_string(threads) +
            "; with more, copies may wait for a ring in a hardware queue that they share, and fewer are as fast"};
  }
  if (std::byte* const bytes = medium_.in_memory(); bytes != nullptr) {
    if (auto pinned = engine_->pin(bytes, medium_.bytes()); !pinned) return pinned;
    pinned_ = true;
  }
  if (auto attached = controller_.attach(*engine_); !attached) return attached;
  memory_.emplace(space_, *engine_);
  if (auto good = test(disk); !good) return good;
  if (auto used = grant.use_direct(lists); !used) return used;
  lists_ = lists;
  return {};
}

Status SessionDirect::test(nvme::NvmeNamespace& disk) {
  const nvme::NamespaceInfo& space = *disk.driver().find_namespace(1);
  if (space.read_only) return nvme::self_test_reads(*memory_, disk);
  const std::uint64_t bytes = space.blocks * space.block_bytes;
  if (bytes < nvme::kSelfTestBytes) {
    return Error{Code::kInvalidArgument, "direct landing: the self-test needs a namespace of " +
                                             std::to_string(nvme::kSelfTestBytes) + " bytes, found " +
                                             std::to_string(bytes)};
  }
  return nvme::self_test(*memory_, disk, bytes - nvme::kSelfTestBytes);
}

Status SessionDirect::add(Grant& grant, void* base, std::size_t bytes) {
  if (lists_ == nullptr) {
    return Error{Code::kInvalidArgument,
                 "direct landing: expected an engine that passed its self-test before a region is registered, found " +
                     (refused_.empty() ? std::string("none") : refused_)};
  }
  if (auto added = grant.add_region(*memory_, base, bytes); !added) return added;
  regions_.push_back({base, bytes});
  return {};
}

Status SessionDirect::remove(Grant& grant, void* base) {
  if (std::erase_if(regions_, [base](const Registered& each) { return each.base == base; }) == 0) {
    return Error{Code::kNotFound, "direct landing: expected the start of a registered region"};
  }
  grant.remove_region(base);
  return {};
}

Status SessionDirect::connect(Grant& grant) {
  if (lists_ == nullptr) return {};
  if (auto used = grant.use_direct(lists_); !used) return used;
  for (const Registered& each : regions_) {
    if (auto added = grant.add_region(*memory_, each.base, each.bytes); !added) return added;
  }
  return {};
}

// No memory of the engine is mapped any more.
void SessionDirect::stop() {
  lists_ = nullptr;
  regions_.clear();
  if (engine_ == nullptr) return;
  controller_.detach(*engine_);
  memory_.reset();
  if (std::exchange(pinned_, false)) engine_->unpin(medium_.in_memory());
  engine_.reset();
}

std::string SessionDirect::report() const {
  if (lists_ == nullptr) return "landing: bounce slots" + (refused_.empty() ? "" : " (" + refused_ + ")");
  std::size_t bytes = 0;
  for (const Registered& each : regions_) bytes += each.bytes;
  return "landing: direct (" + engine_->name() + ", self-test passed), " + std::to_string(regions_.size()) +
         " regions of " + std::to_string(bytes) + " bytes, " + (pinned_ ? "from the namespace's memory" : "staged") +
         "; bounce slots elsewhere";
}

}  // namespace tardis::gio
