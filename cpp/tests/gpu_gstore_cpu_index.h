// SPDX-License-Identifier: Apache-2.0
// The store's own index over the same objects, asked by one thread or by all cores together: what the GPU's is measured
// against.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gpu_gstore_objects.h"

namespace tardis::gstore::testing {

class CpuIndex {
 public:
  // Entries 0 .. n - 1 with key_of(number) as keys. `shared_folder`: a tmpfs.
  CpuIndex(const std::string& shared_folder, std::uint64_t entries, unsigned threads);
  ~CpuIndex();

  double load_seconds() const;  // by all threads, as from a checkpoint
  // Seconds for `n` publications of new objects, and for as many unpublications, by one thread.
  struct Changes {
    double publish, unpublish;
  };
  Changes change(std::uint32_t n);
  // Whether every key of the batch was found; the calling thread only.
  bool find_all(const Key* keys, std::uint32_t n) const;
  // The same, cut into a slice for each thread; they wait for work without sleeping.
  bool find_all_together(const Key* keys, std::uint32_t n);
  void start_threads();
  void stop_threads();
  unsigned threads() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tardis::gstore::testing
