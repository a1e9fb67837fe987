// SPDX-License-Identifier: Apache-2.0
#include "gio/session.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "block/block_device.h"
#include "gio/grant.h"
#include "gio/session_direct.h"
#include "nvme/nvme_namespace.h"
#include "nvme/soft/controller.h"
#include "nvme/soft/file_medium.h"
#include "nvme/soft/store_medium.h"

namespace tardis::gio {
namespace {

GrantOptions grant_options(const SessionOptions& options) {
  GrantOptions grant;
  grant.queues = options.queues;
  grant.entries = options.entries;
  grant.commands = options.commands;
  grant.slot_bytes = options.slot_bytes;
  return grant;
}

nvme::SoftControllerOptions controller_options(const SessionOptions& options) {
  nvme::SoftControllerOptions soft;
  soft.max_queue_entries = std::max(256u, options.entries);
  soft.queue_pairs = kMostQueues + 1;
  soft.mdts = options.mdts;
  soft.sgl = options.sgl ? nvme::kSglAnyAlignment : nvme::kSglNone;
  soft.aborts = options.aborts;
  soft.threads = options.controller_threads;
  soft.cpus = options.cpus;
  soft.most_sleep = std::chrono::milliseconds(Session::kUnexpectedMs);
  return soft;
}

// Addresses of their own, so that a pointer is never taken for one.
nvme::DmaSpaceOptions addresses() {
  nvme::DmaSpaceOptions options;
  options.addresses = nvme::DmaSpaceOptions::Addresses::kTranslated;
  return options;
}

class SoftSession final : public Session {
 public:
  SoftSession(const SessionOptions& options, std::byte* memory)
      : options_(options), memory_(memory), space_(addresses()) {}

  Status start() {
    if (auto made = make_medium(); !made) return made;
    nvme::SoftControllerOptions soft = controller_options(options_);
    soft.namespaces.push_back({medium_, options_.block_shift, 0, 0});
    soft.faults = faults_;
    soft.registers = memory_;
    soft.registers_bytes = nvme::register_bytes(soft);
    auto controller = nvme::SoftController::create(soft, space_);
    if (!controller) return controller.error();
    controller_ = std::move(*controller);
    expect(true);
    direct_ = std::make_unique<SessionDirect>(space_, *controller_, *medium_);
    return connect();
  }

  const std::vector<GrantedQueue>& queues() const override { return grant_->queues(); }
  std::vector<std::uint64_t> prp_table() const override {
    const auto table = grant_->prp_table();
    return {table.begin(), table.end()};
  }
  std::vector<nvme::SglDescriptor> sgl_table() const override {
    const auto table = grant_->sgl_table();
    return {table.begin(), table.end()};
  }
  Status read(std::uint64_t offset, void* memory, std::size_t bytes) override {
    return move(nvme::NamespaceRequest::Op::kRead, offset, memory, bytes);
  }
  Status write(std::uint64_t offset, void* memory, std::size_t bytes) override {
    return move(nvme::NamespaceRequest::Op::kWrite, offset, memory, bytes);
  }
  Status flush() override { return disk_->flush(); }
  std::size_t direct_list_bytes() const override { return grant_->direct_list_bytes(); }
  Status use_direct(const tardis_copy_engine& engine, void* lists) override {
    return direct_->start(nvme::make_copy_engine(engine), lists, *grant_, *disk_);
  }
  Status add_region(void* base, std::size_t bytes) override { return direct_->add(*grant_, base, bytes); }
  Status remove_region(void* base) override { return direct_->remove(*grant_, base); }
  const std::vector<DirectRegion>& regions() const override { return grant_->regions(); }
  DirectLanding direct(std::size_t queue) const override { return grant_->direct(queue); }
  void rest(std::uint32_t spin_us, std::uint32_t sleep_us) override {
    controller_->rest_while_armed(std::chrono::microseconds(spin_us), std::chrono::microseconds(sleep_us));
  }
  void expect(bool commands) override {
    if (commands == (armed_ != nullptr)) return;
    armed_ = commands ? std::make_unique<nvme::SoftController::Armed>(*controller_) : nullptr;
  }
  bool alive() override { return grant_->alive(); }
  Status renew() override { return grant_->renew(); }
  Status reopen() override {
    grant_.reset();
    disk_.reset();
    driver_.reset();
    controller_->insert();
    if (auto connected = connect(); !connected) return connected;
    return direct_->connect(*grant_);
  }
  std::string report() const override { return driver_->report() + "; " + direct_->report(); }

  std::byte* media() override { return bytes_; }
  nvme::FaultPlan& faults() override { return *faults_; }
  std::uint64_t commands() const override { return controller_->counters().commands; }
  std::uint64_t completions() const override { return controller_->counters().completions; }
  std::string violations() override { return nvme::describe(controller_->take_violations()); }

 private:
  Status make_medium() {
    if (options_.store != nullptr) return use_store();
    if (options_.file.empty()) {
      auto made = nvme::MemoryMedium::create(options_.bytes);
      if (!made) return made.error();
      bytes_ = (*made)->data();
      medium_ = std::shared_ptr<nvme::Medium>(std::move(*made));
      (void)::madvise(bytes_, options_.bytes, MADV_HUGEPAGE);  // only a matter of speed
      return {};
    }
    const std::filesystem::path file = std::filesystem::absolute(options_.file);
    auto device = open_block_device(file.parent_path().string(), {}, -1);
    if (!device) return device.error();
    device_ = std::move(*device);
    auto opened = device_->open_file(file.string(), true, true);
    if (!opened) return opened.error();
    if (auto sized = device_->preallocate(*opened, options_.bytes); !sized) return sized;
    auto made = nvme::FileMedium::create(*device_, {{*opened, options_.bytes}});
    if (!made) return made.error();
    medium_ = std::shared_ptr<nvme::Medium>(std::move(*made));
    return {};
  }

  Status use_store() {
    if (!options_.file.empty()) {
      return Error{Code::kInvalidArgument, "gio session: expected a file or a store, found both; leave `file` empty"};
    }
    auto made = nvme::StoreMedium::create(*options_.store);
    if (!made) return made.error();
    if ((*made)->granularity() > std::uint64_t{1} << options_.block_shift) {
      return Error{Code::kInvalidArgument, "gio session over a store: expected blocks of at least " +
                                               std::to_string((*made)->granularity()) +
                                               " bytes, which the store's files ask for, found " +
                                               std::to_string(1u << options_.block_shift) + "; raise block_bytes"};
    }
    medium_ = std::shared_ptr<nvme::Medium>(std::move(*made));
    return {};
  }

  Status connect() {
    nvme::DriverOptions driver;
    driver.queues = 1;
    driver.external_queues = options_.queues;
    driver.max_command_bytes = nvme::kPageBytes << std::min<std::uint32_t>(options_.mdts, 12);
    auto opened = nvme::Driver::open(controller_->window(), space_, driver);
    if (!opened) return opened.error();
    driver_ = std::shared_ptr<nvme::Driver>(std::move(*opened));
    auto disk = nvme::NvmeNamespace::open(driver_, 1);
    if (!disk) return disk.error();
    disk_ = std::move(*disk);
    const std::size_t registers = nvme::register_bytes(controller_->options());
    GrantMemory memory;
    memory.rings = memory_ + registers;
    memory.bounce = memory_ + registers + grant_options(options_).ring_bytes();
    auto granted = Grant::open(driver_, memory, grant_options(options_));
    if (!granted) return granted.error();
    grant_ = std::move(*granted);
    return {};
  }

  Status move(nvme::NamespaceRequest::Op op, std::uint64_t offset, void* memory, std::size_t bytes) {
    const iovec range{memory, bytes};
    nvme::NamespaceRequest request{};
    request.op = op;
    request.offset = offset;
    request.memory = {&range, 1};
    disk_->run({&request, 1}, nullptr);
    if (request.error == 0) return {};
    return errno_error(request.error, "namespace of the software controller, " + std::to_string(bytes) + " bytes at " +
                                          std::to_string(offset));
  }

  const SessionOptions options_;
  std::byte* const memory_;
  nvme::DmaSpace space_;
  std::unique_ptr<BlockDevice> device_;
  std::shared_ptr<nvme::FaultPlan> faults_ = std::make_shared<nvme::FaultPlan>();
  std::shared_ptr<nvme::Medium> medium_;
  std::byte* bytes_ = nullptr;
  std::unique_ptr<nvme::SoftController> controller_;
  std::unique_ptr<nvme::SoftController::Armed> armed_;
  std::unique_ptr<SessionDirect> direct_;
  std::shared_ptr<nvme::Driver> driver_;
  std::unique_ptr<nvme::NvmeNamespace> disk_;
  std::unique_ptr<Grant> grant_;
};

}  // namespace

std::size_t Session::memory_bytes(const SessionOptions& options) {
  const GrantOptions grant = grant_options(options);
  return nvme::register_bytes(controller_options(options)) + grant.ring_bytes() + grant.bounce_bytes();
}

Result<std::unique_ptr<Session>> Session::open(const SessionOptions& options, void* memory) {
  if (options.queues == 0 || options.queues > kMostQueues || options.entries < nvme::kMinQueueEntries ||
      options.entries > nvme::kMaxQueueEntries) {
    return Error{Code::kInvalidArgument, "gio session: expected 1 to " + std::to_string(kMostQueues) +
                                             " queues of 2 to 65536 entries, found " + std::to_string(options.queues) +
                                             " of " + std::to_string(options.entries)};
  }
  if (memory == nullptr || reinterpret_cast<std::uintptr_t>(memory) % nvme::kPageBytes != 0) {
    return Error{Code::kInvalidArgument, "gio session: expected page-aligned memory"};
  }
  auto session = std::make_unique<SoftSession>(options, static_cast<std::byte*>(memory));
  if (auto started = session->start(); !started) return started.error();
  return std::unique_ptr<Session>(std::move(session));
}

}  // namespace tardis::gio
