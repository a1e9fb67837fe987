// SPDX-License-Identifier: Apache-2.0
// A store at work on a recorded drive, and what it promised at each moment.
#pragma once

#include <chrono>
#include <cstdlib>
#include <ostream>
#include <thread>

#include "crash_oracle.h"
#include "recording_device.h"

namespace tardis::testing {

enum class Action : std::size_t { kSet, kGet, kFlush, kClear, kRemove, kReopen, kDamage };

struct Workload {
  const char* name;
  std::array<Layout, 2> layouts;
  std::uint64_t segments;
  std::uint64_t chains, chain_pages;
  bool evicts;
  std::array<unsigned, 7> weights;  // by Action
  std::size_t users = 1;
  std::uint64_t flush_bytes = 256u << 20;
  bool two_paths = false;
  Placement placement = Placement::kObjects;
};

inline void PrintTo(const Workload& workload, std::ostream* out) { *out << workload.name; }

inline StoreOptions options_of(const Workload& workload, const std::string& folder) {
  StoreOptions options = small_store(workload.segments);
  options.more_paths.emplace();
  if (workload.two_paths) options.more_paths->push_back(folder + "/more");
  options.placement = workload.placement;
  options.flush_bytes = workload.flush_bytes;
  return options;
}

// One life of a store, from opening it; what it promises stands in the log.
class Session {
 public:
  Session(RecordedDrive& drive, DeviceFactory device, const Workload& workload, PageBytes& bytes, Oracle first,
          std::mt19937_64& random)
      : drive_(drive),
        device_(std::move(device)),
        workload_(workload),
        bytes_(bytes),
        log_(std::move(first)),
        random_(random),
        users_(workload.users) {}

  void run(int steps) {
    for (std::size_t i = 0; i < users_.size(); ++i) open(i);
    for (int step = 0; step < steps && !::testing::Test::HasFailure(); ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      user_ = &users_[random_() % users_.size()];
      switch (choose_action()) {
        case Action::kSet:
          set();
          break;
        case Action::kGet:
          get();
          break;
        case Action::kFlush:
          flush();
          break;
        case Action::kClear:
          remove({random_() % 2 == 0 ? std::optional<std::size_t>(random_() % 2) : std::nullopt});
          break;
        case Action::kRemove:
          remove_some();
          break;
        case Action::kReopen:
          reopen();
          break;
        case Action::kDamage:
          damage();
          break;
      }
    }
    for (User& user : users_) {
      if (random_() % 2 == 0) close(user);  // else the journal ends with a store in use
    }
    drive_.stop();
  }
  const OracleLog& log() const { return log_; }

 private:
  struct User {
    std::unique_ptr<OpenPages> pages;
    std::set<PageId> unflushed;  // stored by this one, and maybe not durable yet
  };

  void open(std::size_t number) {
    users_[number].pages = OpenPages::open(drive_.folder(), options_of(workload_, drive_.folder()), device_, bytes_);
    if (users_[number].pages != nullptr) users_[number].pages->check(log_.now());
  }
  OpenPages& pages() { return *user_->pages; }

  Action choose_action() {
    unsigned sum = 0;
    for (const unsigned weight : workload_.weights) sum += weight;
    std::uint64_t pick = random_() % sum;
    std::size_t action = 0;
    while (pick >= workload_.weights[action]) pick -= workload_.weights[action++];
    return static_cast<Action>(action);
  }

  void set() {
    PageId first{random_() % 2, random_() % workload_.chains, 0};
    while (first.index < workload_.chain_pages && pages().has(first)) ++first.index;
    // Usually the chain grows; now and then its end is stored again.
    first.index -= std::min<std::uint64_t>(first.index, random_() % 3);
    const std::size_t count = std::min<std::uint64_t>(1 + random_() % 5, workload_.chain_pages - first.index);
    if (count == 0) return;
    std::vector<PageId> meant;
    std::vector<std::uint32_t> versions;
    for (std::size_t i = 0; i < count; ++i) {
      meant.push_back({first.space, first.chain, first.index + i});
      const auto known = log_.now().pages.find(meant.back());
      versions.push_back(known == log_.now().pages.end() ? 0 : known->second.version);
    }
    const std::size_t begin = drive_.length();
    log_.add(begin + 1, [=](Oracle& oracle) {
      for (std::size_t i = 0; i < count; ++i) oracle.pages[meant[i]].versions.insert(versions[i]);
    });
    const std::size_t stored = pages().put(first, versions);
    EXPECT_TRUE(stored == count || workload_.evicts) << "a store that has room took " << stored << " of " << count;
    user_->unflushed.insert(meant.begin(), meant.begin() + static_cast<std::ptrdiff_t>(stored));
    forget_evicted(begin);
  }

  void prune() {
    const std::size_t begin = drive_.length();
    const auto pruned = pages().store().prune(stats_of(pages().store()).payload_bytes / 2, std::nullopt);
    EXPECT_TRUE(pruned) << pruned.error().message;
    forget_evicted(begin);
  }

  // What was evicted is no longer promised, from the first moment of the call.
  void forget_evicted(std::size_t begin) {
    // Nor will who stored it promise it: what is found under its name later may be another user's, who has not flushed.
    for (User& user : users_) std::erase_if(user.unflushed, [&](const PageId& page) { return !pages().has(page); });
    std::vector<PageId> evicted;
    for (const auto& [page, promise] : log_.now().pages) {
      if (promise.durable && !pages().has(page)) evicted.push_back(page);
    }
    if (evicted.empty()) return;
    EXPECT_TRUE(workload_.evicts) << "evicted from a store that has room";
    log_.add(begin + 1, [=](Oracle& oracle) {
      for (const PageId& page : evicted) oracle.pages[page].durable = false;
    });
  }

  void get() {
    if (workload_.evicts && random_() % 4 == 0) return prune();
    for (const auto& [page, promise] : log_.now().pages) {
      if (random_() % 4 == 0) (void)pages().get(page);
    }
  }

  // From now on, what this user stored is promised, if it was there when the call began.
  void promise(User& user, const std::vector<PageId>& stored) {
    log_.add(drive_.length(), [=](Oracle& oracle) {
      for (const PageId& page : stored) oracle.pages[page].durable = true;
    });
    user.unflushed.clear();
  }
  static std::vector<PageId> still_there(User& user) {
    std::vector<PageId> result;
    std::copy_if(user.unflushed.begin(), user.unflushed.end(), std::back_inserter(result),
                 [&](const PageId& page) { return user.pages->has(page); });
    return result;
  }
  void flush() {
    const Status status = pages().store().flush();
    EXPECT_TRUE(status) << status.error().message;
    promise(*user_, still_there(*user_));
  }
  void close(User& user) {
    if (user.pages == nullptr) return;
    const std::vector<PageId> stored = still_there(user);
    const Status status = user.pages->store().close();
    EXPECT_TRUE(status) << status.error().message;
    user.pages.reset();
    promise(user, stored);
  }
  void reopen() {
    // Several users: at times all of them leave, and the last one tidies up.
    const bool all = random_() % 2 == 0;
    for (User& user : users_) {
      if (all || &user == user_) close(user);
    }
    for (std::size_t i = 0; i < users_.size(); ++i) {
      if (users_[i].pages == nullptr) open(i);
    }
  }

  void remove_some() {
    Deletion deletion{random_() % 2 == 0 ? std::optional<std::size_t>(random_() % 2) : std::nullopt};
    deletion.key = page_key(random_() % workload_.chains, random_() % workload_.chain_pages);
    deletion.digits = std::array<std::uint32_t, 4>{1, 1, 2, 64}[random_() % 4];
    remove(deletion);
  }
  void remove(const Deletion& deletion) {
    log_.add(drive_.length() + 1, [=](Oracle& oracle) {
      for (auto& [page, promise] : oracle.pages) {
        if (deletion.has(page)) promise.durable = false;  // gone or not, if the power goes amid the call
      }
    });
    pages().remove(deletion);
    for (User& user : users_) std::erase_if(user.unflushed, [&](const PageId& page) { return deletion.has(page); });
    log_.add(drive_.length(), [=](Oracle& oracle) {
      for (auto& [page, promise] : oracle.pages) {
        if (!deletion.has(page)) continue;
        promise.versions.clear();
        ++promise.version;
      }
    });
  }

  // A bit of a durable page changes on the medium. The next read finds out, and its slot is put aside.
  void damage() {
    std::vector<PageId> durable;
    for (const auto& [page, promise] : log_.now().pages) {
      if (promise.durable) durable.push_back(page);
    }
    if (durable.empty()) return;
    const PageId page = durable[random_() % durable.size()];
    const auto where = find_payload(page);
    if (!where) {
      ADD_FAILURE() << "a durable page has no header";
      return;
    }
    log_.add(drive_.length() + 1, [=](Oracle& oracle) {
      oracle.pages[page].durable = false;
      oracle.damaged += 1;
    });
    drive_.damage(where->first, where->second * 8 + random_() % 8);
    const std::size_t before = drive_.length();
    EXPECT_EQ(pages().get(page), nullptr) << "a damaged page was served";
    // The store puts the slot aside in the background.
    for (int wait = 0; wait < 20 && drive_.length() == before; ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  // A byte of the page's newest copy: segment and offset.
  std::optional<std::pair<std::string, std::uint64_t>> find_payload(const PageId& page) {
    const Hash256 key = page_key(page.chain, page.index);
    std::optional<std::pair<std::string, std::uint64_t>> found;
    std::uint64_t newest = 0;
    for (const auto& [name, file] : drive_.segments()) {
      SegmentSuperblock s;
      file.read(0, &s, sizeof s);
      for (std::uint32_t slot = 0; sealed(s) && slot < s.slots; ++slot) {
        SlotHeader h;
        file.read(s.header_table_offset + slot * kHeaderBytes, &h, sizeof h);
        if (!sealed(h) || h.key != key || h.fingerprint != OpenPages::fingerprint(page.space)) continue;
        if (h.segment_epoch != s.epoch || h.generation < newest) continue;
        newest = h.generation;
        const std::uint64_t byte = random_() % h.part_count * h.part_stride + random_() % h.part_bytes;
        found = {name, s.payload_offset + slot * s.slot_bytes + byte};
        if (s.stripes > 0) found = in_stripes(s, found->second);
      }
    }
    return found;
  }

  static std::pair<std::string, std::uint64_t> in_stripes(const SegmentSuperblock& s, std::uint64_t offset) {
    std::pair<std::string, std::uint64_t> found;
    StripeMap{s.payload_offset, s.stripe_unit, s.stripes}.pieces(
        offset, 1, [&](std::uint32_t file, std::uint64_t at, std::uint64_t) {
          char name[32];
          if (file == 0) {
            std::snprintf(name, sizeof name, "%06u.seg", s.segment);
          } else {
            std::snprintf(name, sizeof name, "%06u-%02u.part", s.segment, s.stripe_paths[0]);
          }
          found = {std::string(s.stripe_paths[file] == 0 ? "" : "more/") + "segments/" + name, at};
        });
    return found;
  }

  RecordedDrive& drive_;
  const DeviceFactory device_;
  const Workload& workload_;
  PageBytes& bytes_;
  OracleLog log_;
  std::mt19937_64& random_;
  std::vector<User> users_;
  User* user_ = nullptr;  // who acts in this step
};

}  // namespace tardis::testing
