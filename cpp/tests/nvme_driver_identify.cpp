// SPDX-License-Identifier: Apache-2.0
// What the driver takes from Identify data and status, and what it refuses.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>

#include "nvme/command_error.h"
#include "nvme/identify.h"

namespace tardis::nvme {
namespace {

constexpr Capabilities kCapabilities = Capabilities::of(1024, 500, 0, 12, 16);

template <std::size_t N>
void put(char (&field)[N], const char* text) {
  std::memset(field, ' ', N);
  std::memcpy(field, text, std::strlen(text));
}

std::unique_ptr<IdentifyController> good_controller() {
  auto data = std::make_unique<IdentifyController>();
  std::memset(static_cast<void*>(data.get()), 0, sizeof *data);
  data->vendor = 0x144d;
  put(data->serial, "S1");
  put(data->model, "Drive of Tests");
  put(data->firmware, "1.0");
  data->mdts = 5;
  data->sqes = 0x66;
  data->cqes = 0x44;
  data->namespaces = 1;
  return data;
}

std::unique_ptr<IdentifyNamespace> good_namespace() {
  auto data = std::make_unique<IdentifyNamespace>();
  std::memset(static_cast<void*>(data.get()), 0, sizeof *data);
  data->size_blocks = 1000;
  data->formats = 1;
  data->format = 1;
  data->format_table[0].block_shift = 9;
  data->format_table[1].block_shift = 12;
  return data;
}

Result<ControllerInfo> read(const IdentifyController& data, std::span<const Quirk> quirks = {}) {
  return read_controller(data, kCapabilities, 0x20000, quirks);
}

TEST(NvmeDriverIdentify, CapabilitiesThatChangedSinceBringUpAreRefused) {
  const auto data = good_controller();
  ASSERT_TRUE(read(*data));
  for (const Capabilities changed : {Capabilities::of(1, 500, 0, 12, 16), Capabilities::of(1024, 500, 0, 13, 16)}) {
    EXPECT_FALSE(read_controller(*data, changed, 0x20000, {}));
  }
}

TEST(NvmeDriverIdentify, ControllerIsRead) {
  auto data = good_controller();
  data->volatile_cache = 1;
  data->rtd3_entry_us = 1001;
  data->retry_delay_100ms[0] = 2;
  data->retry_delay_100ms[2] = 5;
  data->awupf = 7;
  data->max_commands = 63;
  data->sgls = kSglDword;
  data->sgl_blocks = 16;
  auto info = read(*data);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->vendor, 0x144d);
  EXPECT_EQ(info->serial, "S1");
  EXPECT_EQ(info->model, "Drive of Tests");
  EXPECT_EQ(info->firmware, "1.0");
  EXPECT_EQ(info->max_transfer_bytes, 32u * 4096);
  EXPECT_TRUE(info->volatile_cache);
  EXPECT_EQ(info->shutdown_ms, 2u);
  EXPECT_EQ(info->retry_delay_ms, (std::array<std::uint32_t, 4>{0, 200, 0, 500}));
  EXPECT_EQ(info->power_fail_blocks, 8u);
  EXPECT_EQ(info->most_commands, 63u);
  EXPECT_EQ(info->sgl, SglRule::kDword);
  EXPECT_EQ(info->sgl_blocks, 16u);
  EXPECT_EQ(info->max_queue_entries, 1024u);
}

TEST(NvmeDriverIdentify, LimitsThatAreNotSaid) {
  auto data = good_controller();
  data->mdts = 0;
  auto info = read(*data);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->max_transfer_bytes, std::numeric_limits<std::uint64_t>::max());
  EXPECT_GT(info->sgl_blocks, 65536u);
  EXPECT_EQ(info->shutdown_ms, 0u);
  data->mdts = 255;  // no shift is so wide
  EXPECT_EQ(read(*data)->max_transfer_bytes, std::numeric_limits<std::uint64_t>::max());
}

// Whatever a controller says of itself, shutting it down ends within a minute.
TEST(NvmeDriverIdentify, ShutdownsAreBounded) {
  auto data = good_controller();
  data->rtd3_entry_us = 59'000'001;
  EXPECT_EQ(read(*data)->shutdown_ms, 59'001u);
  data->rtd3_entry_us = ~0u;
  EXPECT_EQ(read(*data)->shutdown_ms, 60'000u);
}

TEST(NvmeDriverIdentify, SglSupportAndQuirks) {
  auto data = good_controller();
  for (const auto& [sgls, rule] : {std::pair{kSglNone + 0u, SglRule::kNone},
                                   {kSglAnyAlignment + 0u, SglRule::kAnyAlignment},
                                   {kSglDword + 0u, SglRule::kDword},
                                   {3u, SglRule::kNone},
                                   {kSglAnyAlignment | kSglBitBucket, SglRule::kAnyAlignment}}) {
    data->sgls = sgls;
    EXPECT_EQ(read(*data)->sgl, rule) << sgls;
  }
  data->sgls = kSglAnyAlignment;
  const auto with = [&](std::uint16_t vendor, const char* model) {
    const Quirk quirk{vendor, model, Quirk::kDoNotUseSgl};
    return read(*data, {&quirk, 1})->sgl;
  };
  EXPECT_EQ(with(0x144d, "Drive"), SglRule::kNone);
  EXPECT_EQ(with(0x144d, ""), SglRule::kNone);
  EXPECT_EQ(with(0x144d, "Other"), SglRule::kAnyAlignment);
  EXPECT_EQ(with(0x8086, "Drive"), SglRule::kAnyAlignment);
}

TEST(NvmeDriverIdentify, ControllersThatAreRefused) {
  auto data = good_controller();
  data->sqes = 0x77;
  EXPECT_FALSE(read(*data));
  data = good_controller();
  data->cqes = 0x55;
  EXPECT_FALSE(read(*data));

  EXPECT_TRUE(check_capabilities(kCapabilities));
  EXPECT_FALSE(check_capabilities(Capabilities::of(1024, 500, 0, 13, 16)));  // pages of 8 KiB at least
  EXPECT_FALSE(check_capabilities(Capabilities::of(1024, 500, 0, 13, 12)));
  EXPECT_FALSE(check_capabilities(Capabilities::of(1, 500, 0, 12, 12)));
  EXPECT_FALSE(check_capabilities({kCapabilities.raw & ~(std::uint64_t{1} << 37)}));  // no NVM command set
}

TEST(NvmeDriverIdentify, NamespaceIsRead) {
  const ControllerInfo controller = *read(*good_controller());
  auto data = good_namespace();
  data->optimal_boundary = 256;
  data->attributes = 1;
  auto info = read_namespace(3, *data, controller);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->id, 3u);
  EXPECT_EQ(info->blocks, 1000u);
  EXPECT_EQ(info->block_bytes, 4096u);
  EXPECT_EQ(info->boundary_blocks, 256u);
  EXPECT_TRUE(info->read_only);
}

TEST(NvmeDriverIdentify, FormatsThatAreRefused) {
  const ControllerInfo controller = *read(*good_controller());
  const auto refusal = [&](auto change) {
    auto data = good_namespace();
    change(*data);
    auto info = read_namespace(1, *data, controller);
    return info ? std::string() : info.error().message;
  };
  EXPECT_NE(refusal([](auto& d) { d.format_table[1].metadata_bytes = 8; }).find("metadata"), std::string::npos);
  EXPECT_NE(refusal([](auto& d) { d.protection = 1; }).find("protection"), std::string::npos);
  EXPECT_NE(refusal([](auto& d) { d.format_table[1].block_shift = 13; }).find("512 or 4096"), std::string::npos);
  EXPECT_NE(refusal([](auto& d) { d.format_table[1].block_shift = 0; }).find("512 or 4096"), std::string::npos);
  EXPECT_NE(refusal([](auto& d) { d.format_table[1].block_shift = 255; }).find("512 or 4096"), std::string::npos);
  EXPECT_NE(refusal([](auto& d) { d.format = 2; }).find("format of 0 to 1"), std::string::npos);
  EXPECT_NE(refusal([](auto& d) { d.size_blocks = 0; }).find("0 blocks"), std::string::npos);
  EXPECT_NE(refusal([](auto& d) { d.size_blocks = ~std::uint64_t{0}; }).find("2^64"), std::string::npos);
}

TEST(NvmeDriverIdentify, AtomicWritesAcrossAPowerFailure) {
  auto identify = good_controller();
  identify->awupf = 7;
  const ControllerInfo controller = *read(*identify);
  const auto atomic = [&](auto change) {
    auto data = good_namespace();
    change(*data);
    return read_namespace(1, *data, controller)->atomic_blocks;
  };
  EXPECT_EQ(atomic([](auto&) {}), 8u);                    // the controller's
  EXPECT_EQ(atomic([](auto& d) { d.nawupf = 31; }), 8u);  // not said to hold
  EXPECT_EQ(atomic([](auto& d) { d.nsfeat = 2, d.nawupf = 31; }), 32u);
  EXPECT_EQ(atomic([](auto& d) { d.nsfeat = 2, d.nawupf = 4; }), 4u);  // aligned: a power of two
  EXPECT_EQ(atomic([](auto& d) { d.nsfeat = 2, d.nawupf = 31, d.nabspf = 15; }), 16u);
  EXPECT_EQ(atomic([](auto& d) { d.nsfeat = 2, d.nawupf = 31, d.nabspf = 11; }), 4u);
  EXPECT_EQ(atomic([](auto& d) { d.nsfeat = 2, d.nawupf = 31, d.nabspf = 15, d.nabo = 1; }), 1u);
}

TEST(NvmeDriverIdentify, OtherCommandSetsAreRefusedByName) {
  const auto controller = read(*good_controller());
  ASSERT_TRUE(controller);
  const auto refusal = [&](std::vector<int> bytes, std::size_t size = 64) {
    std::vector<std::byte> list(size);
    for (std::size_t i = 0; i < std::min(size, bytes.size()); ++i) list[i] = static_cast<std::byte>(bytes[i]);
    const auto checked = check_command_set(7, list, *controller);
    if (checked) return std::string();
    EXPECT_EQ(checked.error().code, Code::kUnsupportedFormat);
    EXPECT_NE(checked.error().message.find("namespace 7 of 'Drive of Tests'"), std::string::npos);
    return checked.error().message;
  };
  EXPECT_EQ(refusal({4, 1, 0, 0, kCommandSetNvm}), "");
  EXPECT_EQ(refusal({1, 8, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9, 4, 1, 0, 0, kCommandSetNvm}), "") << "behind an EUI64";
  EXPECT_NE(refusal({4, 1, 0, 0, kCommandSetZoned}).find("zoned"), std::string::npos);
  EXPECT_NE(refusal({1, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 1, 0, 0, kCommandSetZoned}).find("zoned"),
            std::string::npos);
  EXPECT_NE(refusal({4, 1, 0, 0, kCommandSetKeyValue}).find("key value"), std::string::npos);
  EXPECT_NE(refusal({4, 1, 0, 0, kCommandSetLocalMemory}).find("local memory"), std::string::npos);
  EXPECT_NE(refusal({4, 1, 0, 0, kCommandSetPrograms}).find("programs"), std::string::npos);
  EXPECT_NE(refusal({4, 1, 0, 0, 0x30}).find("command set 48"), std::string::npos);
  // Nothing is taken for NVM that does not say so.
  const std::vector<std::vector<int>> silent = {{}, {2, 4, 0, 0, 4, 1, 0, 0, 0}, {4, 0, 0, 0, 0}, {4, 2, 0, 0, 0, 0}};
  for (const auto& bytes : silent) EXPECT_NE(refusal(bytes).find("no descriptor"), std::string::npos);
  for (std::size_t size = 0; size < 5; ++size) {
    EXPECT_NE(refusal({4, 1, 0, 0, kCommandSetNvm}, size).find("no descriptor"), std::string::npos) << size;
  }
  EXPECT_NE(refusal({9, 255, 0, 0}).find("no descriptor"), std::string::npos) << "beyond the list";
}

TEST(NvmeDriverIdentify, NamespaceLists) {
  const auto ids = [](std::vector<std::uint32_t> list) { return read_namespace_list(list); };
  EXPECT_EQ(ids({1, 2, 9, 0, 10}), (std::vector<std::uint32_t>{1, 2, 9}));
  EXPECT_EQ(ids({0}), std::vector<std::uint32_t>{});
  EXPECT_EQ(ids({5, 5}), std::vector<std::uint32_t>{5});
  EXPECT_EQ(ids({5, 4, 6}), std::vector<std::uint32_t>{5});
  EXPECT_EQ(ids({1, 0xffffffff}), std::vector<std::uint32_t>{1});
}

// Every status of 11 bits: success exactly if both parts are 0.
TEST(NvmeDriverStatus, OnlySuccessIsNoError) {
  for (std::uint32_t raw = 0; raw < 0x8000; ++raw) {
    const CommandStatus status{static_cast<std::uint16_t>(raw)};
    ASSERT_EQ(errno_of(status) == 0, (raw & 0x7ff) == 0) << raw;
  }
}

TEST(NvmeDriverStatus, Errnos) {
  const auto error = [](std::uint16_t code) { return errno_of({code}); };
  EXPECT_EQ(error(kScLbaOutOfRange), EINVAL);
  EXPECT_EQ(error(kScInvalidField), EINVAL);
  EXPECT_EQ(error(kScCapacityExceeded), ENOSPC);
  EXPECT_EQ(error(kScUnrecoveredRead), EIO);
  EXPECT_EQ(error(kScWriteFault), EIO);
  EXPECT_EQ(error(kScAbortRequested), ETIMEDOUT);
  EXPECT_EQ(error(0x300), EREMOTEIO);  // SC = 0 of the path type
  EXPECT_EQ(error(0x7ff), EREMOTEIO);
  EXPECT_EQ(describe({kScLbaOutOfRange | 1 << 14}), "LBA out of range (SCT 0h, SC 80h, do not retry)");
  EXPECT_EQ(describe({0x300}), "unknown status (SCT 3h, SC 00h)");
}

}  // namespace
}  // namespace tardis::nvme
