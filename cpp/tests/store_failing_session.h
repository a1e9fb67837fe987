// SPDX-License-Identifier: Apache-2.0
// A store at work on a drive that fails or loses its power. The oracle learns what the store promised, whatever its
// calls returned.
#pragma once

#include <functional>

#include "crash_oracle.h"

namespace tardis::testing {

struct FailingWorkload {
  std::array<Layout, 2> layouts;
  std::uint64_t segments;
  std::uint64_t chains, chain_pages;
  bool evicts;
};

class FailingSession {
 public:
  // Both are asked when a call has returned. `excused`: it may have failed. `counts`: what it said counts; it does not
  // if whoever would have heard it was gone by then.
  using Question = std::function<bool()>;
  FailingSession(const FailingWorkload& workload, Oracle& oracle, std::mt19937_64& random, Question excused,
                 Question counts)
      : workload_(workload),
        oracle_(oracle),
        random_(random),
        excused_(std::move(excused)),
        counts_(std::move(counts)) {}

  void step(OpenPages& pages) {
    const std::uint64_t choice = random_() % 100;
    if (choice < 50) return set(pages);
    if (choice < 60) return get(pages);
    if (choice < 78) return flush(pages);
    if (choice < 84) return remove(pages);
    if (choice < 90 && workload_.evicts) return prune(pages);
    const auto saved = pages.store().checkpoint();
    if (!saved) judge(saved.error(), "checkpoint");
  }

  // Also of a store that cannot keep its promise any more.
  void close(OpenPages& pages) {
    const std::vector<PageId> stored = still_there(pages);
    const Status status = pages.store().close();
    if (judge(status, "close")) promise(stored);
    unflushed_.clear();
  }

  // What is not there any more was evicted. A store that has room does so too where its drive keeps it from using that.
  void forget_evicted(OpenPages& pages) {
    if (!workload_.evicts && stats_of(pages.store()).evicted_pages == 0) return;
    for (auto& [page, promise] : oracle_.pages) {
      if (promise.durable && !pages.has(page)) promise.durable = false;
    }
  }

  std::uint64_t failed_calls() const { return failed_; }
  std::uint64_t pages_read() const { return read_; }

 private:
  // Whether what the call said counts and was success.
  bool judge(const Status& status, const char* call) {
    if (!status) {
      ++failed_;
      EXPECT_TRUE(excused_()) << call << ": " << status.error().message;
    }
    return status && counts_();
  }
  void promise(const std::vector<PageId>& stored) {
    for (const PageId& page : stored) oracle_.pages[page].durable = true;
  }
  std::vector<PageId> still_there(OpenPages& pages) {
    std::vector<PageId> result;
    std::copy_if(unflushed_.begin(), unflushed_.end(), std::back_inserter(result),
                 [&](const PageId& page) { return pages.has(page); });
    return result;
  }

  void set(OpenPages& pages) {
    PageId first{random_() % 2, random_() % workload_.chains, 0};
    while (first.index < workload_.chain_pages && pages.has(first)) ++first.index;
    first.index -= std::min<std::uint64_t>(first.index, random_() % 3);  // the end of the chain is stored again
    const std::size_t count = std::min<std::uint64_t>(1 + random_() % 5, workload_.chain_pages - first.index);
    if (count == 0) return;
    std::vector<std::uint32_t> versions;
    for (std::size_t i = 0; i < count; ++i) {
      PagePromise& promise = oracle_.pages[{first.space, first.chain, first.index + i}];
      promise.versions.insert(promise.version);
      versions.push_back(promise.version);
    }
    Status status;
    const std::size_t stored = pages.put(first, versions, status);
    if (status || status.error().code != Code::kNoSpace) (void)judge(status, "set");
    for (std::size_t i = 0; i < stored; ++i) unflushed_.insert({first.space, first.chain, first.index + i});
    forget_evicted(pages);
  }
  void get(OpenPages& pages) {
    for (const auto& [page, promise] : oracle_.pages) {
      if (random_() % 4 != 0) continue;
      Status status;
      const std::uint8_t* memory = pages.get(page, status);
      (void)judge(status, "get");
      if (memory == nullptr) continue;
      ++read_;
      EXPECT_TRUE(pages.holds(page, memory, promise.versions)) << "wrong bytes";
    }
  }
  void flush(OpenPages& pages) {
    const std::vector<PageId> stored = still_there(pages);
    if (judge(pages.store().flush(), "flush")) promise(stored);
    unflushed_.clear();
  }
  void remove(OpenPages& pages) {
    Deletion deletion{random_() % 2 == 0 ? std::optional<std::size_t>(random_() % 2) : std::nullopt};
    deletion.key = page_key(random_() % workload_.chains, random_() % workload_.chain_pages);
    deletion.digits = std::array<std::uint32_t, 4>{0, 1, 2, 64}[random_() % 4];
    if (deletion.digits == 0 && random_() % 3 != 0) return;
    const auto meant = [&](const PageId& page) { return deletion.has(page); };
    for (auto& [page, promise] : oracle_.pages) {
      if (meant(page)) promise.durable = false;
    }
    std::erase_if(unflushed_, meant);
    const auto space = deletion.space ? std::optional(OpenPages::fingerprint(*deletion.space)) : std::nullopt;
    const auto removed = pages.store().remove({space, deletion.key, deletion.digits});
    if (!judge(removed ? Status() : Status(removed.error()), "remove")) return;
    for (auto& [page, promise] : oracle_.pages) {
      if (!meant(page)) continue;
      promise.versions.clear();
      ++promise.version;
    }
  }
  void prune(OpenPages& pages) {
    const auto pruned = pages.store().prune(stats_of(pages.store()).payload_bytes / 2, std::nullopt);
    (void)judge(pruned ? Status() : Status(pruned.error()), "prune");
    forget_evicted(pages);
  }

  const FailingWorkload& workload_;
  Oracle& oracle_;
  std::mt19937_64& random_;
  const Question excused_, counts_;
  std::set<PageId> unflushed_;  // stored, and maybe not durable yet
  std::uint64_t failed_ = 0, read_ = 0;
};

}  // namespace tardis::testing
