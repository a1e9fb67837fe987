// SPDX-License-Identifier: Apache-2.0
// What `tardis nvme` does, by the C ABI, on a drive that the kernel's driver has at first and at the end;
// tests/qemu/test_cli.py says when which of these runs.
#include <filesystem>
#include <fstream>

#include "guest_answers.h"
#include "guest_scenario.h"
#include "tests/nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;

Answer format(const std::string& home, bool erase) {
  return ask([&](char** json, char** error) {
    return tardis_nvme_format_store(nullptr, drive().c_str(), 1, home.c_str(), erase ? 1 : 0, json, error);
  });
}
Answer doorbells(tardis_nvme_reader reader) {
  return ask([&](char** json, char** error) {
    return tardis_nvme_check_doorbells(nullptr, drive().c_str(), reader, json, error);
  });
}
std::string driver_of_drive() {
  return std::filesystem::read_symlink("/sys/bus/pci/devices/" + drive() + "/driver").filename();
}

int honest(void* memory, uint64_t bytes, const uint32_t* offsets, uint32_t* values, uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    if (offsets[i] + 4 > bytes) return 1;
    values[i] = *reinterpret_cast<volatile std::uint32_t*>(static_cast<std::byte*>(memory) + offsets[i]);
  }
  return 0;
}
// The file system of its namespace is mounted.
TEST(ScenarioCli, ADriveInUseStays) {
  const Answer all = list();
  EXPECT_EQ(all.code, TARDIS_OK);
  expect_has(all, {drive().c_str(), R"("driver":"nvme")", R"("controller":"nvme0")", R"("model":"QEMU NVMe Ctrl")",
                   R"("serial":"tardis)", R"("name":"nvme0n1")", R"("block_bytes":512)", "is mounted on /mnt",
                   R"("volatile_cache":true)"});
  const Answer refused = release("vfio-pci", true);
  EXPECT_EQ(refused.code, TARDIS_BUSY);
  expect_has(refused, {"is mounted on /mnt"});
  EXPECT_EQ(driver_of_drive(), "nvme");
  const Answer unreleased =
      ask([](char** json, char** error) { return tardis_nvme_identify(nullptr, drive().c_str(), json, error); });
  EXPECT_EQ(unreleased.code, TARDIS_BUSY);
}

TEST(ScenarioCli, ADriveIsReleased) {
  const Answer plan = release("vfio-pci", false);
  EXPECT_EQ(plan.code, TARDIS_OK);
  expect_has(plan, {"driver_override", "unbind", "drivers_probe", R"("done":false)"});
  EXPECT_EQ(driver_of_drive(), "nvme");
  expect_has(release("vfio-pci", true), {R"("done":true)", "chown USER /dev/vfio/"});
  EXPECT_EQ(driver_of_drive(), "vfio-pci");
  expect_has(release("vfio-pci", true), {R"("commands":[],"done":true)"});
  expect_has(list(), {R"("driver":"vfio-pci")", R"("vfio_file_usable":true,"refusal":"")"});
}

TEST(ScenarioCli, AReleasedDriveIsDescribed) {
  const Answer known =
      ask([](char** json, char** error) { return tardis_nvme_identify(nullptr, drive().c_str(), json, error); });
  ASSERT_EQ(known.code, TARDIS_OK);
  expect_has(known,
             {R"("model":"QEMU NVMe Ctrl")", R"("mdts":7,"max_transfer_bytes":524288)", R"("sgl":"any alignment")",
              R"("volatile_cache":true)", R"("volatile_cache_enabled":true)", R"("awupf_blocks":1)",
              R"("queue_grant":64)", R"("shadow_doorbells":true)", R"("max_queue_entries":2048)",
              R"("id":1,"blocks":131072,)", R"("block_bytes":512,"metadata_bytes":0,"performance":0,"in_use":true)",
              R"("block_bytes":4096,"metadata_bytes":0)", R"("refusal":"")"});
  const Answer health =
      ask([](char** json, char** error) { return tardis_nvme_health(nullptr, drive().c_str(), json, error); });
  ASSERT_EQ(health.code, TARDIS_OK);
  expect_has(health, {R"("critical_warning":0,"warnings":[])", R"("temperature_celsius":50)", R"("units_written":)",
                      R"("media_errors":0)"});
  EXPECT_FALSE(health.has(R"("write_commands":0,)")) << "mke2fs wrote to it";

  expect_has(doorbells(honest), {R"("reached":true)", "were read as by the host"});
}

TEST(ScenarioCli, ANamespaceIsFormattedForAStore) {
  const TempFolder folder(setting("TARDIS_GUEST_FOLDER"));
  const std::string home = folder.file("store");
  const Answer refused = format(home, false);
  EXPECT_EQ(refused.code, TARDIS_INVALID_ARGUMENT);
  expect_has(refused, {"ext"});
  EXPECT_FALSE(std::filesystem::exists(home)) << "a refusal leaves no folder behind";
  expect_has(format(home, true), {R"("formatted":true)", R"("found":"an ext)"});
  const Answer again = format(home, true);
  expect_has(again, {R"("formatted":false)"});

  {
    auto space = open_vfio_namespace(drive(), 1, guest_options());
    ASSERT_TRUE(space) << space.error().message;
    auto store = open_store(home, small_store(8), true, on(*space));
    ASSERT_NE(store, nullptr);
    Space pages(*store, 1, Layout{4, {16 << 10, 16 << 10}});
    EXPECT_EQ(pages.put(1, 0, 40), 40u);
    EXPECT_TRUE(store->flush());
    EXPECT_EQ(pages.fetch(1, 0, 40), 40u);
    const Answer busy = release("nvme", true);
    EXPECT_EQ(busy.code, TARDIS_BUSY);
    expect_has(busy, {"/dev/vfio/", "is open in process", "(tardis_nvme_gue)"});
    EXPECT_TRUE(store->close());
  }
  const Answer elsewhere = format(folder.file("other"), false);
  EXPECT_EQ(elsewhere.code, TARDIS_INVALID_ARGUMENT) << "it has a store now";
}

TEST(ScenarioCli, ADriveIsGivenBack) {
  expect_has(release("nvme", true), {R"("from":"vfio-pci","to":"nvme")", R"("done":true,"remaining":"")"});
  EXPECT_EQ(driver_of_drive(), "nvme");
  // The kernel looks for namespaces in a thread of its own.
  for (int i = 0; i < 500 && !std::filesystem::exists("/dev/nvme0n1"); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  expect_has(list(), {R"("driver":"nvme")", R"("name":"nvme0n1")"});
}

}  // namespace
}  // namespace tardis::nvme::testing
