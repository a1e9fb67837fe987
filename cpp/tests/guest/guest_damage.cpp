// SPDX-License-Identifier: Apache-2.0
// What is on a namespace, or in a store's home, is damaged or somebody else's: mended where there is a second copy, and
// refused by name where there is none.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "guest_support.h"
#include "nvme/raw_volume.h"
#include "nvme/volume_home.h"
#include "tests/nvme_store_support.h"

namespace tardis::nvme::testing {
namespace {

using namespace tardis::testing;
using Op = NamespaceRequest::Op;
using Bytes = std::vector<std::byte>;

constexpr std::size_t kPages = 100;  // of two segments

class GuestDamage : public Guest {
 protected:
  void SetUp() override {
    Guest::SetUp();
    if (IsSkipped()) return;
    controller = open();
    ASSERT_NE(controller, nullptr);
    disk = space_of(controller, 1);
    ASSERT_NE(disk, nullptr);
    parent = std::make_unique<TempFolder>("/dev/shm");
    home = folder("home");
    auto store = open_store(home, small_store(8), true, on(disk, {.force = true}));
    ASSERT_NE(store, nullptr);
    ASSERT_EQ(Space(*store, 1, {}).put(1, 0, kPages), kPages);
    ASSERT_TRUE(store->close());
    store.reset();
    superblock = get<VolumeSuperblock>(0);
    ASSERT_EQ(std::string(superblock.magic.data(), 8), "TARDISNV");
    tail = disk->bytes() / 4096 * 4096 - 4096;
    const auto volume = RawVolume::open(*disk, superblock.uuid);
    ASSERT_TRUE(volume);
    files = (*volume)->names().size();
    ASSERT_GE(files, 2u);
  }
  void TearDown() override {
    if (disk != nullptr) put(0, Bytes(1u << 20)), put(disk->bytes() - (1u << 20), Bytes(1u << 20));
  }
  std::string folder(const std::string& name) {
    std::filesystem::create_directories(parent->file(name));
    return parent->file(name);
  }
  void move(Op op, std::uint64_t offset, Bytes& bytes) {
    const iovec range{bytes.data(), bytes.size()};
    NamespaceRequest request{.op = op, .offset = offset, .memory = {&range, 1}, .error = -1};
    disk->run({&request, 1}, nullptr);
    ASSERT_EQ(request.error, 0);
  }
  Bytes read(std::uint64_t offset, std::size_t bytes) {
    Bytes found(bytes);
    move(Op::kRead, offset, found);
    return found;
  }
  void put(std::uint64_t offset, Bytes bytes) { move(Op::kWrite, offset, bytes); }
  template <class T>
  T get(std::uint64_t offset) {
    T value{};
    const Bytes block = read(offset / 4096 * 4096, 4096);
    std::memcpy(static_cast<void*>(&value), block.data() + offset % 4096, sizeof value);
    return value;
  }
  template <class T>
  void set(std::uint64_t offset, const T& value) {
    Bytes block = read(offset / 4096 * 4096, 4096);
    std::memcpy(block.data() + offset % 4096, &value, sizeof value);
    put(offset / 4096 * 4096, block);
  }
  void set_both(const VolumeSuperblock& s) { set(0, s), set(tail, s); }

  std::size_t pages_found() {
    auto store = open_store(home, small_store(8), false, on(disk));
    if (store == nullptr) return 0;
    Space pages(*store, 1, {});
    std::size_t found = 0;
    for (std::uint64_t i = 0; i < kPages; ++i) found += pages.fetch(1, i, 1);
    EXPECT_TRUE(store->close());
    return found;
  }
  Error refusal(const std::string& where) {
    const auto device = NvmeDevice::open(disk, where, {});
    EXPECT_FALSE(device) << "opened";
    return device ? Error{Code::kOk, ""} : device.error();
  }
  void expect_refused(Code code, const std::string& part) {
    const Error why = refusal(home);
    EXPECT_EQ(why.code, code) << why.message;
    EXPECT_NE(why.message.find(part), std::string::npos) << why.message;
  }

  std::shared_ptr<VfioController> controller;
  std::shared_ptr<NvmeNamespace> disk;
  std::unique_ptr<TempFolder> parent;
  std::string home;
  VolumeSuperblock superblock{};
  std::uint64_t tail = 0;
  std::size_t files = 0;  // of the volume
};

TEST_F(GuestDamage, EachCopyIsMendedFromTheOther) {
  const std::uint64_t places[] = {0, tail, superblock.directory_offset[0], superblock.directory_offset[1]};
  for (const std::uint64_t place : places) {
    for (const std::byte fill : {std::byte{0}, std::byte{0xff}}) {
      SCOPED_TRACE("at " + std::to_string(place));
      put(place, Bytes(4096, fill));
      const auto volume = RawVolume::open(*disk, superblock.uuid);
      ASSERT_TRUE(volume) << volume.error().message;
      EXPECT_GT((*volume)->mended(), 0u);
      EXPECT_EQ((*volume)->lost(), 0u);
      EXPECT_EQ((*volume)->names().size(), files);
      const auto again = RawVolume::open(*disk, superblock.uuid);
      ASSERT_TRUE(again);
      EXPECT_EQ((*again)->mended(), 0u) << "it was not written";
    }
  }
  put(superblock.directory_offset[1], Bytes(4096, std::byte{0xff}));
  {
    const auto device = NvmeDevice::open(disk, home, {});
    ASSERT_TRUE(device) << device.error().message;
    EXPECT_NE((*device)->report().reason.find("were mended"), std::string::npos) << (*device)->report().reason;
  }
  EXPECT_EQ(pages_found(), kPages);
}

TEST_F(GuestDamage, WhatHasNoCopyLeftIsRefused) {
  VolumeSuperblock s = superblock;
  s.crc ^= 1;
  set_both(s);
  expect_refused(Code::kCorrupt, "both superblocks");
  s = superblock;
  s.format_version = 2;
  set_both(s);
  expect_refused(Code::kUnsupportedFormat, "upgrade");
  s = superblock;
  s.magic[0] = 'x';
  set_both(s);
  expect_refused(Code::kCorrupt, "something else");
  s = superblock;
  s.uuid[0] ^= 1;
  seal(s);
  set_both(s);
  expect_refused(Code::kInvalidArgument, "expects volume");
  s = superblock;
  s.namespace_bytes += 1u << 20;
  seal(s);
  set_both(s);
  expect_refused(Code::kInvalidArgument, "give it its old size");
  s = superblock;
  s.block_bytes = disk->block_bytes() == 512 ? 4096 : 512;
  seal(s);
  set_both(s);
  expect_refused(Code::kInvalidArgument, "blocks of");
  set_both(VolumeSuperblock{});
  expect_refused(Code::kNotFound, "attach the right namespace");
  set_both(superblock);
  EXPECT_EQ(pages_found(), kPages) << "what was refused was changed";
}

TEST_F(GuestDamage, EntriesThatContradictAreNotBelieved) {
  const auto entry = [&](std::size_t copy, std::uint64_t number) {
    return superblock.directory_offset[copy] + number * sizeof(VolumeEntry);
  };
  const auto first = get<VolumeEntry>(entry(0, 0)), second = get<VolumeEntry>(entry(0, 1));
  ASSERT_TRUE(sealed(first) && sealed(second));
  const auto open_with = [&](VolumeEntry changed) {
    changed.number = 1;
    changed.generation = second.generation + 10;
    seal(changed);
    set(entry(0, 1), changed), set(entry(1, 1), changed);
    const auto volume = RawVolume::open(*disk, superblock.uuid);
    EXPECT_FALSE(volume);
    return volume ? std::string() : volume.error().message;
  };
  EXPECT_NE(open_with(first).find("is there twice"), std::string::npos);
  VolumeEntry overlapping = second;
  overlapping.offset = first.offset;
  EXPECT_NE(open_with(overlapping).find("shares its range"), std::string::npos);

  // Of an entry both copies are damaged: its file is lost, the other is not.
  VolumeEntry damaged = second;
  damaged.crc ^= 1;
  set(entry(0, 1), damaged), set(entry(1, 1), damaged);
  {
    const auto volume = RawVolume::open(*disk, superblock.uuid);
    ASSERT_TRUE(volume) << volume.error().message;
    EXPECT_EQ((*volume)->lost(), 1u);
    EXPECT_EQ((*volume)->names().size(), files - 1);
  }
  const std::size_t found = pages_found();
  EXPECT_GT(found, 0u);
  EXPECT_LT(found, kPages);
}

TEST_F(GuestDamage, FilesOfAVolume) {
  ASSERT_TRUE(RawVolume::format(*disk, superblock.uuid));
  const auto opened = RawVolume::open(*disk, superblock.uuid);
  ASSERT_TRUE(opened);
  RawVolume& volume = **opened;
  const std::uint64_t all = volume.free_bytes();
  ASSERT_TRUE(volume.create("a", 3 << 20, 1 << 20));
  EXPECT_EQ(volume.create("a", 1 << 20, 0).error().code, Code::kInternal);
  EXPECT_EQ(volume.create("", 1 << 20, 0).error().code, Code::kInvalidArgument);
  EXPECT_EQ(volume.create(std::string(500, 'x'), 1 << 20, 0).error().code, Code::kInvalidArgument);
  EXPECT_EQ(volume.create("b", 0, 0).error().code, Code::kInvalidArgument);
  EXPECT_EQ(volume.create("b", all, 0).error().code, Code::kNoSpace);
  ASSERT_TRUE(volume.create("b", 1, 0));
  EXPECT_EQ(volume.free_bytes(), all - (4u << 20));
  EXPECT_TRUE(volume.remove({"a", "not there"}));
  const auto again = volume.create("c", 2 << 20, 0);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->offset, volume.superblock().data_offset) << "the range of what was removed is not used again";
}

TEST_F(GuestDamage, HomesThatAreNotItsOwn) {
  const std::string file = home + "/" + kVolumeFile;
  const auto good = [&] {
    std::ifstream in(file, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }();
  const auto write_home = [&](const std::string& text) { std::ofstream(file, std::ios::binary) << text; };
  std::string damaged = good;
  damaged[20] = static_cast<char>(damaged[20] ^ 1);
  write_home(damaged);
  expect_refused(Code::kCorrupt, "restore it from a backup");
  VolumeBinding newer{};
  std::memcpy(static_cast<void*>(&newer), good.data(), sizeof newer);
  newer.format_version = kBindingVersion + 1;
  seal(newer);
  write_home(std::string(reinterpret_cast<const char*>(&newer), sizeof newer));
  expect_refused(Code::kUnsupportedFormat, "upgrade");
  write_home(good);

  {
    const auto device = NvmeDevice::open(disk, home, {});
    ASSERT_TRUE(device) << device.error().message;
    EXPECT_NE(refusal(folder("other")).message.find("another store of this process"), std::string::npos);
  }
  // A store whose segments are files.
  const std::string files = folder("files");
  {
    auto store = open_store(files, small_store(2));
    ASSERT_NE(store, nullptr);
    ASSERT_EQ(Space(*store, 1, {}).put(1, 0, 2), 2u);
    EXPECT_TRUE(store->close());
  }
  EXPECT_NE(refusal(files).message.find("keeps its segments in files"), std::string::npos);
  std::filesystem::create_directories(folder("odd") + "/" + kVolumeFile);
  EXPECT_FALSE(NvmeDevice::open(disk, folder("odd"), {}));

  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto held = VolumeHome::lock(home);
    const char byte = held ? 'y' : 'n';
    (void)!::write(ready[1], &byte, 1);
    ::pause();
    ::_exit(0);
  }
  char byte = 0;
  EXPECT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(byte, 'y');
  expect_refused(Code::kBusy, "pid " + std::to_string(child));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]), ::close(ready[1]);
  EXPECT_EQ(pages_found(), kPages);
}

}  // namespace
}  // namespace tardis::nvme::testing
