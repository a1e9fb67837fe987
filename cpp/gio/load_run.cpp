// SPDX-License-Identifier: Apache-2.0
#include "gio/load_run.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <string>

#include "gio/host_layer.h"

namespace tardis::gio {
namespace {

constexpr auto kLook = std::chrono::microseconds(50);  // between two looks at what the loader's thread tells

LoadBoard::Word await(const LoadBoard::Word& word) {
  for (;;) {
    if (const LoadBoard::Word told = LoadBoard::read(word); told != TARDIS_LOAD_PENDING) return told;
    std::this_thread::sleep_for(kLook);
  }
}

Status refuse(const std::string& why) { return Error{Code::kInvalidArgument, "tardis_load_run: " + why}; }

}  // namespace

LayerRunner::LayerRunner(const LoadTerms& terms) : terms_(terms), slots_(terms.shape.most_pages) {
  std::iota(slots_.begin(), slots_.end(), 0u);
  thread_ = std::thread([this] { main(); });
}

LayerRunner::~LayerRunner() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Status LayerRunner::begin(const Load* load, void* board, const tardis_host_load& what) {
  const bool second = what.layers[1] != nullptr;
  if (board == nullptr || what.layers[0] == nullptr || what.page_bytes[0] == 0 || second != (what.page_bytes[1] != 0) ||
      what.pool_page_count == 0) {
    return refuse("expected a board, addresses of layers and the pages of the pools; found NULL or 0");
  }
  if (what.pinned_pages != 0 && (what.pinned_ids == nullptr || what.pinned_objects == nullptr)) {
    return refuse("expected ids and addresses of pages from pinned memory, found NULL");
  }
  const std::uint64_t part = std::uint64_t{what.page_bytes[0]} + what.page_bytes[1];
  if (part != terms_.geometry.part_bytes) {
    return refuse("expected pages of " + std::to_string(terms_.geometry.part_bytes) +
                  " bytes in a layer, as the namespace has them, found " + std::to_string(part));
  }
  if ((load != nullptr) != (what.ring != nullptr)) {
    return refuse("expected a load and a ring together, or neither");
  }
  Run run{load, LoadBoard(board, terms_.shape, terms_.layout), what};
  if (load != nullptr) {
    if (what.ring->pool_pages == nullptr) return refuse("expected the ids of pages from files, found NULL");
    if (load->use_rings()) {
      const tardis_gio_layer& ring = *what.ring;
      if (ring.rings != terms_.shape.rings || ring.block_bytes != terms_.block_bytes || ring.most_bytes == 0 ||
          (part + ring.most_bytes - 1) / ring.most_bytes != terms_.shape.commands_per_page) {
        return refuse("expected " + std::to_string(terms_.shape.rings) + " rings, blocks of " +
                      std::to_string(terms_.block_bytes) + " and " + std::to_string(terms_.shape.commands_per_page) +
                      " commands a page, as the loader was opened with, found " + std::to_string(ring.rings) +
                      " rings, blocks of " + std::to_string(ring.block_bytes) + " and commands of " +
                      std::to_string(ring.most_bytes) + " bytes");
      }
      const tardis_gio_layer first = ring_of(run, 0);
      if (const char* complaint = host_complaint_of(first)) return refuse(complaint);
    }
  }
  {
    const std::lock_guard lock(mutex_);
    runs_.push_back(run);
  }
  changed_.notify_all();
  return {};
}

void LayerRunner::wait(const void* board, std::uint32_t layer) {
  const LoadBoard::Word& done = LoadBoard(const_cast<void*>(board), terms_.shape, terms_.layout).done(layer);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return LoadBoard::read(done) != TARDIS_LOAD_PENDING; });
}

void LayerRunner::left(const Load& load) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    return std::none_of(runs_.begin(), runs_.end(), [&](const Run& run) { return run.load == &load; });
  });
}

void LayerRunner::main() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !runs_.empty(); });
    if (runs_.empty()) return;
    const Run& first = runs_.front();  // in place whatever is put behind it
    lock.unlock();
    run(first);
    lock.lock();
    runs_.pop_front();
    changed_.notify_all();
  }
}

void LayerRunner::run(const Run& run) {
  if (run.load != nullptr) await(run.board.head().ready);
  bool good = true;
  for (std::uint32_t layer = 0; layer < terms_.shape.layers; ++layer) {
    copy_pinned(run, layer);
    if (run.load != nullptr) good = land_files(run, layer) && good;
    const bool whole = good && LoadBoard::read(run.board.head().errors) == 0;
    {
      // Under the lock, or who has just looked would wait for ever.
      const std::lock_guard lock(mutex_);
      LoadBoard::tell(run.board.done(layer), whole ? TARDIS_LOAD_GOOD : TARDIS_LOAD_BAD);
    }
    changed_.notify_all();
  }
}

void LayerRunner::copy_page(const Run& run, std::uint32_t layer, std::uint32_t id, std::uint64_t from) {
  if (id >= run.what.pool_page_count) {
    LoadBoard::tell(run.board.head().errors, run.board.head().errors + 1);  // nobody else writes it
    return;
  }
  for (int half = 0; half < 2 && run.what.layers[half] != nullptr; ++half) {
    const std::uint64_t bytes = run.what.page_bytes[half], to = run.what.layers[half][layer] + id * bytes;
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    from += bytes;
  }
}

// Damaged bytes may have landed, and be NaN in a forward that runs before anybody hears of it.
void LayerRunner::zero_files(const Run& run, std::uint32_t layer) {
  for (std::uint32_t i = 0; i < run.load->pages(); ++i) {
    const std::uint32_t id = run.what.ring->pool_pages[i];
    if (id >= run.what.pool_page_count) continue;
    for (int half = 0; half < 2 && run.what.layers[half] != nullptr; ++half) {
      const std::uint64_t bytes = run.what.page_bytes[half];
      std::memset(reinterpret_cast<void*>(run.what.layers[half][layer] + id * bytes), 0, bytes);
    }
  }
}

void LayerRunner::copy_pinned(const Run& run, std::uint32_t layer) {
  for (std::uint32_t i = 0; i < run.what.pinned_pages; ++i) {
    copy_page(run, layer, run.what.pinned_ids[i],
              run.what.pinned_objects[i] + std::uint64_t{layer} * terms_.geometry.part_bytes);
  }
}

tardis_gio_layer LayerRunner::ring_of(const Run& run, std::uint32_t layer) {
  tardis_gio_layer ring = *run.what.ring;
  ring.slots = slots_.data();
  ring.count = &run.board.head().ring_pages;
  ring.slot_blocks = run.board.blocks();
  ring.most_pages = ring.slot_count = run.load->pages();
  ring.pool_page_count = run.what.pool_page_count;
  for (int half = 0; half < 2; ++half) {
    ring.pools[half] = run.what.layers[half] == nullptr ? 0 : run.what.layers[half][layer];
    ring.page_stride[half] = ring.page_bytes[half] = run.what.page_bytes[half];
  }
  ring.op = TARDIS_GIO_READ;
  ring.first_block = layer * terms_.geometry.part_stride / terms_.block_bytes;
  ring.digests = reinterpret_cast<std::uintptr_t>(run.board.digests(0, layer));
  ring.digest_stride = std::uint64_t{terms_.geometry.chunks()} * sizeof(std::uint64_t);
  ring.statuses = run.board.statuses();
  ring.reports = run.board.reports(layer);
  ring.flag = &flag_;
  return ring;
}

// Of a layer that the rings could not read, the loader's thread tells the parts that it has read again.
bool LayerRunner::land_files(const Run& run, std::uint32_t layer) {
  const LoadBoard& board = run.board;
  const bool hopeless = LoadBoard::read(board.repaired(layer)) == TARDIS_LOAD_BAD;
  flag_ = kIoError;
  if (!hopeless && board.head().ring_pages != 0) {
    flag_ = kIoPending;
    run_host_layer(ring_of(run, layer));
  }
  LoadBoard::tell(board.landed(layer), flag_ == kIoDone ? TARDIS_LOAD_GOOD : TARDIS_LOAD_BAD);
  if (flag_ == kIoDone) return true;
  if (await(board.repaired(layer)) != TARDIS_LOAD_GOOD) {
    zero_files(run, layer);
    return false;
  }
  for (std::uint32_t i = 0; i < board.repairs(layer); ++i) {
    const tardis_load_repair& part = board.list()[i];
    copy_page(run, layer, run.what.ring->pool_pages[part.page], part.address);
  }
  return true;
}

}  // namespace tardis::gio
