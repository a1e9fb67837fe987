// SPDX-License-Identifier: Apache-2.0
// Fuzz target: the driver on a controller that a script leads. Whatever the controller does, each call ends, memory is
// given back, and no request succeeds of which the controller has not said so. Commands name mapped memory only, and
// data is right unless the controller lied.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "nvme/driver.h"
#include "nvme/nvme_namespace.h"
#include "nvme_fuzz_fake_controller.h"

namespace tardis::nvme::fuzz {

class DriverTarget final : public Target {
 public:
  using Head = FakeController::Head;
  using Step = FakeController::Step;

  const char* name() const override { return "driver"; }
  Shape shape() const override {
    return {sizeof(Head),
            sizeof(Step),
            48,
            {{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 2}, {8, 4}, {12, 4}, {20, 2}, {22, 2}, {24, 2}, {26, 2}}};
  }
  void make_record(Random& random, std::span<std::uint8_t> record) const override {
    Step step{};
    step.action = static_cast<std::uint8_t>(random() % FakeController::kActions);
    step.good_before = static_cast<std::uint8_t>(random() % 3 == 0 ? 0 : random() % 24);
    step.argument = static_cast<std::uint8_t>(random());
    step.width = static_cast<std::uint8_t>(random() % 3);
    static constexpr std::uint16_t kPlaces[] = {0,   4,   8,   24,  25,  26,  29,  33,  34,  46,
                                                64,  77,  80,  84,  99,  128, 130, 256, 258, 512,
                                                513, 514, 516, 520, 525, 526, 536, 538, 768, 1803};
    step.place =
        random() % 4 == 0 ? static_cast<std::uint16_t>(random() % 4096) : kPlaces[random() % std::size(kPlaces)];
    step.value = static_cast<std::uint32_t>(interesting(random));
    for (std::size_t at = 0; at < sizeof step.entry; ++at) {
      reinterpret_cast<std::uint8_t*>(&step.entry)[at] = static_cast<std::uint8_t>(random() % 2 ? random() : 0);
    }
    std::memcpy(record.data(), &step, sizeof step);
  }

  void execute(Input input, Findings& findings) override {
    Reader reader(input);
    const auto head = reader.get<Head>();
    std::vector<Step> script;
    while (!reader.empty()) script.push_back(reader.get<Step>());
    TrackingMapper mapper(findings);
    {
      FakeController controller(head, script, mapper, findings);
      Client(controller, mapper, head.options, findings).run();
    }
    findings.expect(mapper.empty(), "the driver left memory mapped");
  }

 private:
  enum Option : std::uint16_t { kUseSgl = 1, kZeroCopy = 2, kReset = 4, kGetCache = 8, kTwoQueues = 16, kShallow = 32 };
  static constexpr std::uint64_t kLongestNs = 15'000'000'000;  // of a call, whose time-outs are milliseconds

  class Client {
   public:
    Client(FakeController& controller, TrackingMapper& mapper, std::uint16_t options, Findings& findings)
        : controller_(controller), mapper_(mapper), options_(options), findings_(findings), memory_(1u << 20) {}

    // Declared first: its result is deduced.
    template <class Call>
    auto timed(const char* what, const Call& call) {
      const std::uint64_t start = monotonic_ns();
      auto result = call();
      findings_.expect(monotonic_ns() - start < kLongestNs, std::string(what) + " takes too long");
      return result;
    }

    void run() {
      DriverOptions options;
      options.queues = (options_ & kTwoQueues) != 0 ? 2 : 1;
      options.queue_entries = (options_ & kShallow) != 0 ? 3 : 32;
      options.bounce_buffers = 2;
      options.bounce_bytes = 16384;
      options.max_command_bytes = 65536;
      options.zero_copy = (options_ & kZeroCopy) != 0;
      options.use_sgl = (options_ & kUseSgl) != 0;
      options.io_timeout_ms = options.abort_grace_ms = options.admin_timeout_ms = options.ready_timeout_ms =
          options.shutdown_timeout_ms = 2;
      options.max_retry_delay_ms = 2;
      options.retries = 2;
      auto opened = timed("open", [&] { return Driver::open(controller_, mapper_, options); });
      if (!opened) return findings_.note_text("open", opened.error().message);
      const std::shared_ptr<Driver> driver = std::move(*opened);
      findings_.note("queue pairs", driver->queue_pairs(), driver->queue_depth());
      for (const std::string& why : driver->refused_namespaces()) findings_.note_text("refused", why);
      for (const NamespaceInfo& info : driver->namespaces()) use(driver, info);
      if ((options_ & kReset) != 0) {
        const Status reset = timed("reset", [&] { return driver->reset(); });
        findings_.note_text("reset", reset ? "" : reset.error().message);
        if (!driver->namespaces().empty()) use(driver, driver->namespaces().front());
      }
      if ((options_ & kGetCache) != 0) {
        const Result<bool> cache = timed("get features", [&] { return driver->volatile_cache_enabled(); });
        findings_.note_text("cache", cache ? (*cache ? "on" : "off") : cache.error().message);
      }
      note_counters(driver->counters());
      const Status shut = timed("shut down", [&] { return driver->shut_down(); });
      findings_.note_text("shut down", shut ? "" : shut.error().message);
      findings_.note("state", static_cast<std::uint64_t>(driver->state()));
    }

   private:
    void use(const std::shared_ptr<Driver>& driver, const NamespaceInfo& info) {
      auto disk = NvmeNamespace::open(driver, info.id);
      findings_.expect(static_cast<bool>(disk), "a namespace of the list cannot be opened");
      findings_.expect((*disk)->block_bytes() == 512 || (*disk)->block_bytes() == 4096, "a block of another size");
      if ((options_ & kZeroCopy) != 0) {
        const Status registered = (*disk)->register_memory(memory_.data(), memory_.size() / 2);
        findings_.note_text("register", registered ? "" : registered.error().message);
      }
      for (const auto op : {NamespaceRequest::Op::kWrite, NamespaceRequest::Op::kRead}) {
        transfer(**disk, info, op);
      }
      const std::uint64_t before = controller_.flushes();
      const Status flushed = timed("flush", [&] { return (*disk)->flush(); });
      findings_.note_text("flush", flushed ? "" : flushed.error().message);
      findings_.expect(!flushed || !driver->controller().volatile_cache || controller_.flushes() > before,
                       "a flush succeeds of which the controller has not said so");
      if ((options_ & kZeroCopy) != 0) (*disk)->unregister_memory(memory_.data());
    }

    void transfer(NvmeNamespace& disk, const NamespaceInfo& info, NamespaceRequest::Op op) {
      const std::uint32_t block = disk.block_bytes();
      std::byte* const registered = memory_.data();
      std::byte* const other = memory_.data() + memory_.size() / 2;
      const std::array<std::vector<iovec>, 7> memory = {{
          {{registered, block}},
          {{registered + 4096, 65536}},
          {{registered + 131072 + 512, 7 * 4096}},
          {{registered + 262144 + 4, 4096}, {registered + 300004, 8192}},
          {{other + 3, 4096 - 5}, {other + 8192, 5}, {registered + 400000, 12288}},
          {{other + 65536, 131072}},
          {{registered + 41 * 4096, 4 * 4096}, {registered + 48 * 4096, 8 * 4096}},
      }};
      std::array<NamespaceRequest, 7> requests;
      std::array<int, 7> ends{};
      for (std::size_t i = 0; i < requests.size(); ++i) {
        requests[i] = {op, i * 131072, memory[i], -1};
        std::uint64_t at = requests[i].offset;
        for (const iovec& piece : memory[i]) {
          auto* const bytes = static_cast<std::uint8_t*>(piece.iov_base);
          if (op == NamespaceRequest::Op::kWrite) {
            fill_pattern(at, bytes, piece.iov_len);
          } else {
            std::memset(bytes, 0xee, piece.iov_len);
          }
          at += piece.iov_len;
        }
      }
      controller_.set_block_bytes(block);
      controller_.succeeded().clear();
      timed(op == NamespaceRequest::Op::kRead ? "read" : "write", [&] {
        disk.run(requests,
                 [&](NamespaceRequest& request) { ++ends[static_cast<std::size_t>(&request - requests.data())]; });
        return 0;
      });
      const auto opcode =
          static_cast<std::uint8_t>(op == NamespaceRequest::Op::kRead ? IoOpcode::kRead : IoOpcode::kWrite);
      for (std::size_t i = 0; i < requests.size(); ++i) {
        findings_.expect(ends[i] == 1, "a request ends " + std::to_string(ends[i]) + " times");
        findings_.expect(requests[i].error >= 0, "a request has no result");
        findings_.note("io", static_cast<std::uint64_t>(requests[i].error), i);
        if (requests[i].error != 0) continue;
        std::uint64_t bytes = 0;
        for (const iovec& piece : memory[i]) bytes += piece.iov_len;
        findings_.expect(requests[i].offset + bytes <= info.blocks * block, "a request beyond the namespace succeeds");
        for (std::uint64_t at = requests[i].offset / block; at < (requests[i].offset + bytes) / block; ++at) {
          findings_.expect(controller_.succeeded().contains({opcode, at}),
                           "a request succeeds of which the controller has not said so");
        }
        findings_.expect(controller_.lied() || holds_pattern(requests[i]), "a request succeeds with wrong data");
      }
    }

    static bool holds_pattern(const NamespaceRequest& request) {
      std::uint64_t at = request.offset;
      std::vector<std::uint8_t> expected;
      for (const iovec& piece : request.memory) {
        expected.resize(piece.iov_len);
        fill_pattern(at, expected.data(), expected.size());
        if (std::memcmp(piece.iov_base, expected.data(), expected.size()) != 0) return false;
        at += piece.iov_len;
      }
      return true;
    }

    void note_counters(const DriverCounters& counters) {
      const auto some = [](std::uint64_t value) { return value == 0 ? 0u : value == 1 ? 1u : 2u; };
      findings_.note("retries", some(counters.retries), some(counters.timeouts));
      findings_.note("faults", some(counters.queue_faults), some(counters.aborts));
      findings_.note("ends", some(counters.queue_deletions), some(counters.resets));
      findings_.note("quarantined", some(counters.quarantined), some(counters.aborted));
    }

    FakeController& controller_;
    TrackingMapper& mapper_;
    const std::uint16_t options_;
    Findings& findings_;
    AlignedBuffer memory_;
  };
};

}  // namespace tardis::nvme::fuzz
