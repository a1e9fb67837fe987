// SPDX-License-Identifier: Apache-2.0
// Loads of a store's objects: the host's side (tardis/loads.h, docs/loads.md).
#pragma once

#include <memory>
#include <vector>

#include "gio/load_run.h"
#include "gio/load_thread.h"

namespace tardis::gio {

class Loader {
  struct Passkey {
    explicit Passkey() = default;
  };

 public:
  // What each function promises: tardis/loads.h. `store` outlives the loader.
  static Result<std::unique_ptr<Loader>> open(Store& store, const tardis_loader_options& options);
  Loader(Passkey, Store& store, const tardis_loader_options& options, const ObjectGeometry& geometry,
         const tardis_load_board_layout& layout);
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // No I/O; takes no lock that is held during I/O. The load is its thread until end().
  Result<LoadThread*> begin(const Hash256* hashes, std::uint32_t n, bool use_rings, void* board);
  tardis_load_result end(LoadThread& load, bool cancelled);
  LayerRunner& runner() { return runner_; }
  const tardis_load_shape& shape() const { return terms_.shape; }
  tardis_loader_counters counters() const;

 private:
  LoadCounters counters_;
  const LoadTerms terms_;
  std::vector<std::unique_ptr<LoadThread>> threads_;
  LayerRunner runner_;
};

}  // namespace tardis::gio
