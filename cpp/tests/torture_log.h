// SPDX-License-Identifier: Apache-2.0
// The log of a torture: what was attempted and what the store acknowledged, and what follows from it.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "store_pages.h"

namespace tardis::testing {

enum class Event : std::uint32_t {
  kAttempt = 1,   // pages may be in the store from now on
  kFlushed = 2,   // pages were stored and flushed
  kClearing = 3,  // pages of the namespace may be gone from now on
  kCleared = 4,   // pages of the namespace that were attempted before are gone for good
};

// One record of the log. A write() of it is in the page cache when it returns and so survives SIGKILL.
struct Record {
  Event event;
  std::uint32_t space;
  std::uint64_t chain;
  std::uint32_t first, count;
  std::uint64_t check;
  std::uint64_t sum() const {
    return mix(mix(mix(static_cast<std::uint64_t>(event) << 32 | space) ^ chain) ^
               (std::uint64_t{first} << 32 | count));
  }
};

[[noreturn]] inline void die(const std::string& why, int status) {
  std::fprintf(stderr, "tardis_torture: %s\n", why.c_str());
  std::_Exit(status);
}

struct Expected {
  std::vector<bool> attempted, flushed;
};

struct Expectations {
  std::map<std::pair<std::uint32_t, std::uint64_t>, Expected> chains;            // what may or must be there
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::vector<bool>> cleared;  // what must not
};

inline Expectations read_log(const std::string& path) {
  Expectations result;
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return result;  // killed before the first record
  Record r;
  while (std::fread(&r, sizeof r, 1, file) == 1) {
    if (r.check != r.sum()) die("the log is damaged", 4);
    if (r.event == Event::kAttempt || r.event == Event::kFlushed) {
      Expected& chain = result.chains[{r.space, r.chain}];
      std::vector<bool>& marks = r.event == Event::kAttempt ? chain.attempted : chain.flushed;
      if (marks.size() < r.first + r.count) marks.resize(r.first + r.count);
      std::fill_n(marks.begin() + r.first, r.count, true);
      continue;
    }
    for (auto it = result.chains.begin(); it != result.chains.end();) {
      if (it->first.first != r.space) {
        ++it;
        continue;
      }
      it->second.flushed.clear();
      if (r.event == Event::kCleared) {
        std::vector<bool>& gone = result.cleared[it->first];
        gone.resize(std::max(gone.size(), it->second.attempted.size()));
        for (std::size_t i = 0; i < it->second.attempted.size(); ++i) gone[i] = gone[i] || it->second.attempted[i];
        it = result.chains.erase(it);
      } else {
        ++it;
      }
    }
  }
  std::fclose(file);
  return result;
}

}  // namespace tardis::testing
