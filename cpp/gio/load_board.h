// SPDX-License-Identifier: Apache-2.0
// The board of a load as the host sees it: where its words are, and how each is told and read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "gio/iocb.h"
#include "tardis/loads.h"

namespace tardis::gio {

static_assert(sizeof(tardis_load_board) == 64 && offsetof(tardis_load_board, errors) == 8);
static_assert(sizeof(tardis_load_repair) == 16 && offsetof(tardis_load_repair, page) == 8);
static_assert(sizeof(tardis_load_board_layout) == 80 && sizeof(tardis_load_shape) == 24);

Result<tardis_load_board_layout> board_layout_of(const tardis_load_shape& shape);

class LoadBoard {
 public:
  using Word = std::uint32_t;

  LoadBoard() = default;
  LoadBoard(void* memory, const tardis_load_shape& shape, const tardis_load_board_layout& layout)
      : memory_(static_cast<std::byte*>(memory)), shape_(&shape), layout_(&layout) {}

  // Acquire: what its writer wrote before it is seen after this.
  static Word read(const Word& word) {
    return std::atomic_ref(const_cast<Word&>(word)).load(std::memory_order_acquire);
  }
  // Release: what was written before is seen by who reads it.
  static void tell(Word& word, Word value) { std::atomic_ref(word).store(value, std::memory_order_release); }

  void* memory() const { return memory_; }
  tardis_load_board& head() const { return *reinterpret_cast<tardis_load_board*>(memory_); }
  Word& landed(std::uint32_t layer) const { return at<Word>(layout_->landed)[layer]; }
  Word& repaired(std::uint32_t layer) const { return at<Word>(layout_->repaired)[layer]; }
  Word& repairs(std::uint32_t layer) const { return at<Word>(layout_->repairs)[layer]; }
  Word& done(std::uint32_t layer) const { return at<Word>(layout_->done)[layer]; }
  tardis_load_repair* list() const { return at<tardis_load_repair>(layout_->list); }
  std::uint64_t* blocks() const { return at<std::uint64_t>(layout_->blocks); }
  std::uint64_t* digests() const { return at<std::uint64_t>(layout_->digests); }
  // Of page `page` in a layer.
  std::uint64_t* digests(std::uint32_t page, std::uint32_t layer) const {
    return digests() + (std::size_t{page} * shape_->layers + layer) * shape_->chunks;
  }
  std::uint32_t* statuses() const { return at<std::uint32_t>(layout_->statuses); }
  RingReport* reports(std::uint32_t layer) const {
    return at<RingReport>(layout_->reports) + std::size_t{layer} * shape_->rings;
  }

 private:
  template <class T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }

  std::byte* memory_ = nullptr;
  const tardis_load_shape* shape_ = nullptr;
  const tardis_load_board_layout* layout_ = nullptr;
};

}  // namespace tardis::gio
