// SPDX-License-Identifier: Apache-2.0
// Host memory that a GPU reads and writes in place: mapped, placed beside the GPU, touched, then pinned in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/memory_limits.h"
#include "base/status.h"

namespace tardis::attention {

// Who pins: the CUDA runtime (host_pool.cu), or a test. 0: done; else an error of its own, which `text` names.
struct Pinner {
  int (*pin)(void* context, void* memory, std::size_t bytes);
  int (*unpin)(void* context, void* memory);
  std::string (*text)(int error);
  void* context = nullptr;
};

// What the pages of a mapping are.
enum class Pages {
  kSmall,
  kTransparent,  // the kernel makes them huge where it can
  kReserved,     // huge pages that were set aside (vm.nr_hugepages)
};

struct HostMemoryOptions {
  // Of a call that pins: hundreds of GiB in one would be refused.
  std::size_t step_bytes = std::size_t{64} << 30;
  std::optional<int> node;          // where pages are taken first; others serve when it is full
  unsigned threads = 16;            // that touch
  bool check_limits = true;         // against what memory_limits() finds
  bool reserved_huge_pages = true;  // use them if there are enough
};

class HostMemory {
 public:
  // Zeroed. Whole huge pages are taken: size() is `bytes`, rounded up. Nothing is left behind by one that fails.
  static Result<HostMemory> create(std::size_t bytes, const HostMemoryOptions& options, const Pinner& pinner);
  ~HostMemory();
  HostMemory(HostMemory&& other) noexcept;
  HostMemory& operator=(HostMemory&&) = delete;
  HostMemory(const HostMemory&) = delete;

  void* data() const { return memory_; }
  std::size_t size() const { return size_; }
  Pages pages() const { return pages_; }
  std::size_t pinned_pieces() const { return pinned_.size(); }
  bool on_node() const { return on_node_; }  // the kernel took the wish for a node

  // Gives it back, as the end of its life does. False: it could not be unpinned and is kept until the process ends.
  bool release();

  // Forget it, with what it pins: a device may still write there, or the process ends.
  void abandon();

 private:
  explicit HostMemory(const Pinner& pinner) : pinner_(pinner) {}
  Status map(std::size_t bytes, const HostMemoryOptions& options);
  Status touch(unsigned threads);
  Status pin(std::size_t step);

  Pinner pinner_;
  void* memory_ = nullptr;
  std::size_t size_ = 0;
  Pages pages_ = Pages::kSmall;
  bool on_node_ = false;
  std::vector<void*> pinned_;
};

}  // namespace tardis::attention
