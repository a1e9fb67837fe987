// SPDX-License-Identifier: Apache-2.0
#include "gpu_restore_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <thread>

#include "base/aligned_buffer.h"
#include "capi/store_handle.h"
#include "gstore/mirror.h"
#include "nvme/soft/store_medium.h"

namespace tardis::gstore::testing {
namespace {

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "store: %s\n", why.c_str());
  std::fflush(stderr);
  std::_Exit(1);
}
void need(const tardis::Status& status, const char* what) {
  if (!status) stop(std::string(what) + ": " + status.error().message);
}

Hash256 hash_of(std::uint64_t number) {
  const Key key = key_of(number);
  Hash256 hash;
  static_assert(sizeof hash == sizeof key);
  std::memcpy(hash.data(), &key, sizeof key);
  return hash;
}

class Rig final : public RestoreStore {
 public:
  Rig(const std::string& parent, const ObjectShape& shape, std::uint64_t objects) : shape_(shape) {
    folder_ = parent + "/tardis-restore-XXXXXX";
    if (::mkdtemp(folder_.data()) == nullptr) stop("no folder at " + parent);
    StoreOptions options;
    options.segment_bytes = std::max<std::uint64_t>(64u << 20, round_up(8 * shape.bytes(), 1u << 20));
    const std::uint64_t in_one = (options.segment_bytes - (4u << 20)) / shape.bytes();
    options.capacity_bytes =
        (objects / std::max<std::uint64_t>(1, in_one) + 2) * options.segment_bytes + kMetadataBytes;
    options.object_bytes_hint = shape.bytes();
    options.checkpoint_seconds = 0;
    auto opened = Store::open(folder_, options, true);
    if (!opened) stop(opened.error().message);
    handle_.store = std::move(*opened);
    const std::vector<std::uint64_t> regions(shape.sides, shape.page_bytes);
    auto space = store()->open_namespace(kFingerprint, "{}", shape.layers, regions);
    if (!space) stop(space.error().message);
    space_ = *space;
  }
  ~Rig() override {
    mirror_.reset();
    handle_.store.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  Store* store() override { return handle_.store.get(); }
  tardis_store* handle() override { return &handle_; }
  std::uint32_t space() const override { return space_; }

  void set(const std::vector<std::uint64_t>& numbers) override {
    constexpr std::size_t kTogether = 64;
    AlignedBuffer memory(kTogether * shape_.bytes());
    for (std::size_t first = 0; first < numbers.size(); first += kTogether) {
      const std::size_t n = std::min(kTogether, numbers.size() - first);
      const unsigned threads = std::min<unsigned>(12, std::max(1u, std::thread::hardware_concurrency()));
      std::vector<std::thread> makers;
      for (unsigned t = 0; t < threads; ++t) {
        makers.emplace_back([&, t] {
          for (std::size_t i = t; i < n; i += threads) {
            auto* const words = reinterpret_cast<std::uint64_t*>(memory.data() + i * shape_.bytes());
            for (std::uint64_t w = 0; w < shape_.bytes() / 8; ++w) words[w] = object_word(numbers[first + i], w);
          }
        });
      }
      for (std::thread& maker : makers) maker.join();
      std::vector<std::uint64_t> addresses;
      for (std::size_t i = 0; i < n; ++i) {
        addresses.push_back(reinterpret_cast<std::uint64_t>(memory.data() + i * shape_.bytes()));
      }
      const auto begin = numbers.begin() + static_cast<std::ptrdiff_t>(first);
      set_from({begin, begin + static_cast<std::ptrdiff_t>(n)}, addresses);
    }
  }
  void set_from(const std::vector<std::uint64_t>& numbers, const std::vector<std::uint64_t>& addresses) override {
    std::vector<Hash256> hashes;
    std::vector<std::uint64_t> pieces;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      hashes.push_back(hash_of(numbers[i]));
      for (std::uint32_t piece = 0; piece < shape_.layers * shape_.sides; ++piece) {
        pieces.push_back(addresses[i] + std::uint64_t{piece} * shape_.page_bytes);
      }
    }
    std::vector<std::uint8_t> ok(numbers.size());
    // Objects of their own: each in a call, so that none counts as another one's extension.
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      need(store()->set(space_, &hashes[i], nullptr, pieces.data() + i * shape_.layers * shape_.sides, 1, &ok[i]),
           "set");
    }
  }
  void remove(std::uint64_t number) override {
    auto removed = store()->remove({kFingerprint, hash_of(number), 64});
    if (!removed) stop(removed.error().message);
  }
  bool has(std::uint64_t number) override {
    const Hash256 hash = hash_of(number);
    auto found = store()->lookup(space_, &hash, 1);
    return found && *found == 1;
  }
  void corrupt(std::uint64_t number, std::uint64_t byte) override {
    const Hash256 hash = hash_of(number);
    auto lease = store()->acquire(space_, &hash, 1);
    if (!lease || lease->size() != 1) stop("nothing to corrupt");
    const std::uint64_t address = lease->extents(0, byte, 1).front().address;
    const SegmentAddresses addresses = store()->segment_addresses();
    char name[64];
    std::snprintf(name, sizeof name, "/segments/%06u.seg", addresses.segment_of(address).number);
    const int fd = ::open((folder_ + name).c_str(), O_RDWR | O_CLOEXEC);
    const auto offset = static_cast<off_t>(address % addresses.stride);
    unsigned char old = 0;
    if (fd < 0 || ::pread(fd, &old, 1, offset) != 1) stop("cannot read a segment");
    old ^= 0x40;
    if (::pwrite(fd, &old, 1, offset) != 1) stop("cannot write a segment");
    ::close(fd);
  }
  bool get(std::uint64_t number) override {
    AlignedBuffer memory(shape_.bytes());
    std::vector<std::uint64_t> pieces;
    for (std::uint32_t piece = 0; piece < shape_.layers * shape_.sides; ++piece) {
      pieces.push_back(reinterpret_cast<std::uint64_t>(memory.data()) + std::uint64_t{piece} * shape_.page_bytes);
    }
    const Hash256 hash = hash_of(number);
    std::uint8_t ok = 0;
    if (!store()->get(space_, &hash, pieces.data(), 1, &ok) || ok == 0) return false;
    const auto* const words = reinterpret_cast<const std::uint64_t*>(memory.data());
    for (std::uint64_t w = 0; w < shape_.bytes() / 8; ++w) {
      if (words[w] != object_word(number, w)) return false;
    }
    return true;
  }

  double read_rate(unsigned threads, void* memory, std::uint64_t window, std::uint64_t bytes,
                   std::uint64_t each) override {
    std::vector<int> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ + "/segments")) {
      files.push_back(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    }
    const auto file_bytes = static_cast<std::uint64_t>(::lseek(files.front(), 0, SEEK_END));
    const std::uint64_t pieces = bytes / each, in_file = (file_bytes - (2u << 20)) / each;
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> readers;
    for (unsigned t = 0; t < threads; ++t) {
      readers.emplace_back([&, t] {
        for (std::uint64_t i = t; i < pieces; i += threads) {
          const int fd = files[i / in_file % files.size()];
          const auto offset = static_cast<off_t>((2u << 20) + i % in_file * each);
          if (::pread(fd, static_cast<std::byte*>(memory) + i % (window / each) * each, each, offset) < 0)
            stop("pread");
        }
      });
    }
    for (std::thread& reader : readers) reader.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    for (const int fd : files) ::close(fd);
    return static_cast<double>(pieces * each) / seconds;
  }

  void start_mirror(std::uint32_t file_blocks, std::uint32_t block_shift, std::uint64_t* page_blocks,
                    std::uint64_t* digests) override {
    MirrorOptions options;
    options.space = space_;
    options.file_blocks = file_blocks;
    options.block_shift = block_shift;
    options.page_blocks = page_blocks;
    options.digests = digests;
    auto made = Mirror::create(*store(), options);
    if (!made) stop(made.error().message);
    mirror_.emplace(std::move(*made));
  }
  void scan(MirrorBatch& batch) override { need(mirror_->scan(batch), "scan"); }
  void expect(std::uint64_t number, std::uint64_t handle) override {
    mirror_->expect(entry_of(key_of(number), 0, 0, TARDIS_GPU_INDEX_PUT), handle);
  }
  void attached(MirrorBatch& batch, const std::uint8_t* statuses) override { mirror_->attached(batch, statuses); }
  void adopted(MirrorBatch& batch, const std::uint64_t* handles) override { mirror_->adopted(batch, handles); }
  void left(const MirrorBatch& batch, const std::uint8_t* statuses) override { mirror_->left(batch, statuses); }

 private:
  static constexpr Fingerprint kFingerprint{'r', 'e', 's', 't', 'o', 'r', 'e'};

  const ObjectShape shape_;
  std::string folder_;
  tardis_store handle_;
  NamespaceId space_ = 0;
  std::optional<Mirror> mirror_;
};

}  // namespace

std::unique_ptr<RestoreStore> RestoreStore::open(const std::string& parent, const ObjectShape& shape,
                                                 std::uint64_t objects) {
  return std::make_unique<Rig>(parent, shape, objects);
}

}  // namespace tardis::gstore::testing
