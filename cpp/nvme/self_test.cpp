// SPDX-License-Identifier: Apache-2.0
#include "nvme/self_test.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

namespace tardis::nvme {
namespace {

using Bytes = std::vector<std::byte>;
using Op = NamespaceRequest::Op;

// No two pages are alike, so that one in the place of another is seen.
Bytes pattern(std::uint64_t seed) {
  Bytes bytes(kSelfTestBytes);
  std::uint64_t state = seed;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

class Test {
 public:
  Test(MemoryProvider& provider, NvmeNamespace& space, std::uint64_t scratch)
      : provider_(provider), space_(space), scratch_(scratch) {}

  Status run() {
    return with_memory([this] { return both_ways(); });
  }
  Status run_reads() {
    return with_memory([this] { return reads(); });
  }

 private:
  template <class Body>
  Status with_memory(Body body) {
    auto memory = provider_.allocate(kSelfTestBytes);
    if (!memory) return refused("allocation", memory.error());
    memory_ = *memory;
    Status result = space_.driver().register_memory(provider_, memory_, kSelfTestBytes);
    if (result) {
      result = body();
      space_.unregister_memory(memory_);
    } else {
      result = refused("registration", result.error());
    }
    provider_.free(memory_);
    return result;
  }

  Status both_ways() {
    Bytes before(kSelfTestBytes);
    Status result = move(Op::kRead, before.data(), "reading what is in the scratch blocks");
    if (result) {
      result = transfers();
      const Status restored = move(Op::kWrite, before.data(), "putting the scratch blocks back");
      if (result) result = restored;
    }
    return result;
  }

  Status reads() {
    constexpr int kTries = 256;  // blocks may never have been written
    const Bytes poison = pattern(3);
    Bytes expected(kSelfTestBytes), found(kSelfTestBytes);
    Status read = refused("size", {Code::kInvalidArgument, "expected " + std::to_string(kSelfTestBytes) +
                                                               " bytes in the namespace, found fewer"});
    for (int i = 0; i < kTries && scratch_ + kSelfTestBytes <= space_.bytes(); ++i) {
      read = move(Op::kRead, expected.data(), "a read into host memory");
      if (read) break;
      scratch_ += kSelfTestBytes;
    }
    if (!read) return read;
    if (auto put = provider_.copy_to(memory_, poison); !put) return refused("copy to it", put.error());
    if (auto moved = move(Op::kRead, memory_, "a read into it"); !moved) return moved;
    if (auto got = provider_.copy_from(memory_, found); !got) return refused("copy from it", got.error());
    return compare(found, expected, "a read into it");
  }

  Status transfers() {
    const Bytes first = pattern(1), second = pattern(2), poison = pattern(3);
    Bytes found(kSelfTestBytes);
    if (auto put = provider_.copy_to(memory_, first); !put) return refused("copy to it", put.error());
    if (auto moved = move(Op::kWrite, memory_, "a write from it"); !moved) return moved;
    if (auto moved = move(Op::kRead, found.data(), "a read of what was written from it"); !moved) return moved;
    if (auto same = compare(found, first, "a write from it"); !same) return same;

    Bytes source = second;
    if (auto moved = move(Op::kWrite, source.data(), "a write of the second pattern"); !moved) return moved;
    if (auto put = provider_.copy_to(memory_, poison); !put) return refused("copy to it", put.error());
    if (auto moved = move(Op::kRead, memory_, "a read into it"); !moved) return moved;
    if (auto got = provider_.copy_from(memory_, found); !got) return refused("copy from it", got.error());
    return compare(found, second, "a read into it");
  }

  Status move(Op op, void* memory, const char* what) {
    const iovec range{memory, kSelfTestBytes};
    NamespaceRequest request{.op = op, .offset = scratch_, .memory = {&range, 1}, .error = -1};
    space_.run({&request, 1}, nullptr);
    if (request.error == 0) return {};
    return refused(what, errno_error(request.error, "NVMe"));
  }

  Status compare(const Bytes& found, const Bytes& expected, const char* what) const {
    const auto differs = std::mismatch(found.begin(), found.end(), expected.begin());
    if (differs.first == found.end()) return {};
    return refused(what, {Code::kCorrupt, "expected the bytes that were sent, found others from byte " +
                                              std::to_string(differs.first - found.begin()) + " on"});
  }

  Error refused(const char* what, const Error& why) const {
    return {why.code,
            "self-test of " + provider_.name() + " with " + space_.name() + ": " + what + ": " + why.message +
                "; it is not used, data goes through host memory",
            why.os_error};
  }

  MemoryProvider& provider_;
  NvmeNamespace& space_;
  std::uint64_t scratch_;
  void* memory_ = nullptr;
};

}  // namespace

Status self_test(MemoryProvider& provider, NvmeNamespace& space, std::uint64_t scratch) {
  return Test(provider, space, scratch).run();
}

Status self_test_reads(MemoryProvider& provider, NvmeNamespace& space) { return Test(provider, space, 0).run_reads(); }

}  // namespace tardis::nvme
