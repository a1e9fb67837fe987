// SPDX-License-Identifier: Apache-2.0
#include "gio/loader.h"

#include <string>

namespace tardis::gio {
namespace {

constexpr std::uint32_t kMostLoads = 16;
constexpr std::uint32_t kStagingAlign = 4096, kBoardAlign = 64;

Status refuse(const std::string& why) { return Error{Code::kInvalidArgument, "tardis_loader_options: " + why}; }

Status check(const tardis_loader_options& options, const ObjectGeometry& geometry, std::uint32_t read_align) {
  const tardis_load_shape& shape = options.shape;
  if (shape.layers != geometry.parts || shape.chunks != geometry.chunks_per_part) {
    return refuse("expected the shape of the namespace's objects, " + std::to_string(geometry.parts) + " layers of " +
                  std::to_string(geometry.chunks_per_part) + " digests, found " + std::to_string(shape.layers) +
                  " of " + std::to_string(shape.chunks));
  }
  if (options.block_bytes != 512 && options.block_bytes != 4096) {
    return refuse("expected blocks of 512 or 4096 bytes, found " + std::to_string(options.block_bytes));
  }
  if (options.loads == 0 || options.loads > kMostLoads) {
    return refuse("expected 1 to 16 loads at once, found " + std::to_string(options.loads));
  }
  if (read_align > kStagingAlign) {
    return refuse("the store reads multiples of " + std::to_string(read_align) +
                  " bytes, which do not fit into staging");
  }
  const std::uint64_t wanted =
      std::uint64_t{options.loads} * shape.most_repairs * round_up(geometry.part_bytes, kStagingAlign);
  if (options.staging == nullptr || reinterpret_cast<std::uintptr_t>(options.staging) % kStagingAlign != 0 ||
      options.staging_bytes < wanted) {
    return refuse("expected staging of " + std::to_string(wanted) + " bytes at a multiple of " +
                  std::to_string(kStagingAlign) + ", found " + std::to_string(options.staging_bytes) + " bytes");
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Loader>> Loader::open(Store& store, const tardis_loader_options& options) {
  auto geometry = store.object_geometry(options.name_space);
  if (!geometry) return geometry.error();
  auto layout = board_layout_of(options.shape);
  if (!layout) return layout.error();
  if (auto checked = check(options, *geometry, store.read_geometry().offset_align); !checked) return checked.error();
  return std::make_unique<Loader>(Passkey(), store, options, *geometry, *layout);
}

Loader::Loader(Passkey, Store& store, const tardis_loader_options& options, const ObjectGeometry& geometry,
               const tardis_load_board_layout& layout)
    : terms_{store, options.name_space, options.shape, layout, geometry, options.block_bytes, counters_},
      runner_(terms_) {
  const std::uint64_t each = terms_.shape.most_repairs * terms_.part_room();
  for (std::uint32_t i = 0; i < options.loads; ++i) {
    threads_.push_back(std::make_unique<LoadThread>(terms_, static_cast<std::byte*>(options.staging) + i * each));
  }
}

Result<LoadThread*> Loader::begin(const Hash256* hashes, std::uint32_t n, bool use_rings, void* board) {
  if (hashes == nullptr || n == 0 || n > terms_.shape.most_pages || board == nullptr ||
      reinterpret_cast<std::uintptr_t>(board) % kBoardAlign != 0) {
    return Error{Code::kInvalidArgument, "tardis_load_begin: expected a board at a multiple of 64 and 1 to " +
                                             std::to_string(terms_.shape.most_pages) + " objects, found " +
                                             std::to_string(n)};
  }
  for (const auto& thread : threads_) {
    if (!thread->begin(hashes, n, use_rings, board)) continue;
    counters_.loads += 1;
    counters_.pages += n;
    return thread.get();
  }
  return Error{Code::kBusy, "tardis_load_begin: " + std::to_string(threads_.size()) +
                                " loads are under way, which is the most; end one first"};
}

tardis_load_result Loader::end(LoadThread& load, bool cancelled) {
  runner_.left(load.load());
  counters_.abandoned += LoadBoard::read(load.load().board().head().abandoned) != 0;
  return load.end(cancelled);
}

tardis_loader_counters Loader::counters() const {
  const auto now = [](const std::atomic<std::uint64_t>& count) { return count.load(std::memory_order_relaxed); };
  return {now(counters_.loads),         now(counters_.pages),          now(counters_.missing),
          now(counters_.unproven),      now(counters_.repaired_parts), now(counters_.failed_pages),
          now(counters_.damaged_pages), now(counters_.abandoned)};
}

}  // namespace tardis::gio
