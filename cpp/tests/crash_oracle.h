// SPDX-License-Identifier: Apache-2.0
// What a store has promised about its pages at each moment of a journal, and whether a store keeps it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>

#include "store_support.h"

namespace tardis::testing {

struct PageId {
  std::size_t space = 0;
  std::uint64_t chain = 0, index = 0;
  auto operator<=>(const PageId&) const = default;
};

struct PagePromise {
  // The bytes that may be there. Deleting a page begins a new version, and no older one may ever be seen again.
  std::set<std::uint32_t> versions;
  std::uint32_t version = 0;  // of what is stored from now on
  bool durable = false;       // must be there
};

struct Oracle {
  std::map<PageId, PagePromise> pages;
  std::uint64_t damaged = 0;  // pages whose bytes were changed behind the store's back
};

// The oracle along a journal.
class OracleLog {
 public:
  using Change = std::function<void(Oracle&)>;
  struct Mark {
    std::size_t events;  // holds once so many events of the journal have happened
    Change change;
  };

  explicit OracleLog(Oracle first) : first_(first), now_(std::move(first)) {}
  const Oracle& first() const { return first_; }
  const Oracle& now() const { return now_; }
  void add(std::size_t events, Change change) {
    change(now_);
    const auto later = std::upper_bound(marks_.begin(), marks_.end(), events,
                                        [](std::size_t number, const Mark& mark) { return number < mark.events; });
    marks_.insert(later, {events, std::move(change)});
  }
  const std::vector<Mark>& marks() const { return marks_; }

 private:
  Oracle first_, now_;
  std::vector<Mark> marks_;
};

// The oracle after a number of events that only rises.
class OracleCursor {
 public:
  explicit OracleCursor(const OracleLog& log) : log_(log), oracle_(log.first()) {}
  const Oracle& at(std::size_t events) {
    for (; next_ < log_.marks().size() && log_.marks()[next_].events <= events; ++next_) {
      log_.marks()[next_].change(oracle_);
    }
    return oracle_;
  }

 private:
  const OracleLog& log_;
  std::size_t next_ = 0;
  Oracle oracle_;
};

// The bytes of pages, made once.
class PageBytes {
 public:
  explicit PageBytes(const std::array<Layout, 2>& layouts) : layouts_(layouts) {}
  const Layout& layout(std::size_t space) const { return layouts_[space]; }
  const std::vector<std::uint8_t>& of(const PageId& page, std::uint32_t version) {
    const std::uint64_t seed =
        mix(page_seed(static_cast<std::uint32_t>(page.space), page_key(page.chain, page.index)) + version);
    std::vector<std::uint8_t>& bytes = made_[seed];
    if (bytes.empty()) {
      bytes.resize(page_bytes(page.space));
      fill_page(bytes.data(), bytes.size(), seed);
    }
    return bytes;
  }
  std::uint64_t page_bytes(std::size_t space) const {
    std::uint64_t part = 0;
    for (const std::uint64_t bytes : layouts_[space].regions) part += bytes;
    return part * layouts_[space].parts;
  }

 private:
  std::array<Layout, 2> layouts_;
  std::unordered_map<std::uint64_t, std::vector<std::uint8_t>> made_;
};

// What is deleted: pages of one namespace or of all, of which so many first hexadecimal digits of the key agree.
struct Deletion {
  std::optional<std::size_t> space;
  Hash256 key{};
  std::uint32_t digits = 0;

  bool has(const PageId& page) const {
    if (space && page.space != *space) return false;
    const Hash256 other = page_key(page.chain, page.index);
    for (std::uint32_t i = 0; i < digits; ++i) {
      const int shift = i % 2 == 0 ? 4 : 0;
      if (((key[i / 2] ^ other[i / 2]) >> shift & 15) != 0) return false;
    }
    return true;
  }
};

// An open store with its two namespaces.
class OpenPages {
 public:
  static Fingerprint fingerprint(std::size_t space) { return {static_cast<std::uint8_t>(space + 1), 0xC5}; }

  // Null, and a failed test, if it cannot be opened.
  static std::unique_ptr<OpenPages> open(const std::string& folder, const StoreOptions& options,
                                         const Store::DeviceFactory& device, PageBytes& bytes) {
    auto pages = try_open(folder, options, device, bytes);
    if (pages) return std::move(*pages);
    ADD_FAILURE() << "the store cannot be opened: " << pages.error().message;
    return nullptr;
  }
  static Result<std::unique_ptr<OpenPages>> try_open(const std::string& folder, const StoreOptions& options,
                                                     const Store::DeviceFactory& device, PageBytes& bytes) {
    auto store = Store::open(folder, options, /*create=*/true, device);
    if (!store) return store.error();
    auto pages = std::make_unique<OpenPages>(std::move(*store), bytes);
    for (std::size_t space = 0; space < 2; ++space) {
      const Layout& layout = bytes.layout(space);
      auto id = pages->store().open_namespace(fingerprint(space), "{\"crash\": " + std::to_string(space) + "}",
                                              layout.parts, layout.regions);
      if (!id) return id.error();
      pages->spaces_[space] = *id;
    }
    return pages;
  }
  OpenPages(std::unique_ptr<Store> store, PageBytes& bytes) : store_(std::move(store)), bytes_(bytes) {}

  Store& store() { return *store_; }
  bool has(const PageId& page) {
    const Hash256 key = page_key(page.chain, page.index);
    auto run = store_->lookup(spaces_[page.space], &key, 1);
    return run && *run == 1;
  }
  // Stores pages of one chain, each in its version; returns how many were.
  std::size_t put(const PageId& first, const std::vector<std::uint32_t>& versions) {
    Status status;
    const std::size_t stored = put(first, versions, status);
    EXPECT_TRUE(status || status.error().code == Code::kNoSpace) << status.error().message;
    return stored;
  }
  std::size_t put(const PageId& first, const std::vector<std::uint32_t>& versions, Status& status) {
    const std::size_t count = versions.size();
    std::vector<std::uint64_t> pieces;
    std::vector<Hash256> keys;
    for (std::size_t i = 0; i < count; ++i) {
      const PageId page{first.space, first.chain, first.index + i};
      keys.push_back(page_key(page.chain, page.index));
      add_pieces(pieces, page.space, const_cast<std::uint8_t*>(bytes_.of(page, versions[i]).data()));
    }
    const Hash256 before = first.index > 0 ? page_key(first.chain, first.index - 1) : Hash256{};
    std::vector<std::uint8_t> ok(count);
    status = store_->set(spaces_[first.space], keys.data(), first.index > 0 ? &before : nullptr, pieces.data(), count,
                         ok.data());
    const auto stored = static_cast<std::size_t>(std::find(ok.begin(), ok.end(), 0) - ok.begin());
    EXPECT_EQ(stored == count, static_cast<bool>(status));
    return stored;
  }
  // Loads one page into memory that lasts until the next call; null: a miss.
  const std::uint8_t* get(const PageId& page) {
    Status status;
    return get(page, status);
  }
  const std::uint8_t* get(const PageId& page, Status& status) {
    memory_.assign(bytes_.page_bytes(page.space), 0xA5);
    std::vector<std::uint64_t> pieces;
    add_pieces(pieces, page.space, memory_.data());
    const Hash256 key = page_key(page.chain, page.index);
    std::uint8_t ok = 0;
    status = store_->get(spaces_[page.space], &key, pieces.data(), 1, &ok);
    return ok != 0 ? memory_.data() : nullptr;
  }
  // Whether a page that was read has the bytes of one of these versions.
  bool holds(const PageId& page, const std::uint8_t* memory, const std::set<std::uint32_t>& versions) {
    return std::any_of(versions.begin(), versions.end(), [&](std::uint32_t version) {
      const std::vector<std::uint8_t>& bytes = bytes_.of(page, version);
      return std::memcmp(memory, bytes.data(), bytes.size()) == 0;
    });
  }

  // All of these pages, of one namespace after the other, in few calls; visit(page, memory or null).
  template <class Visit>
  void read_many(const std::vector<PageId>& wanted, const Visit& visit) {
    for (std::size_t first = 0, end = 0; first < wanted.size(); first = end) {
      while (end < wanted.size() && wanted[end].space == wanted[first].space) ++end;
      const std::size_t space = wanted[first].space, count = end - first;
      const std::uint64_t bytes = bytes_.page_bytes(space);
      many_.assign(count * bytes, 0xA5);
      std::vector<std::uint64_t> pieces;
      std::vector<Hash256> keys;
      for (std::size_t i = 0; i < count; ++i) {
        add_pieces(pieces, space, many_.data() + i * bytes);
        keys.push_back(page_key(wanted[first + i].chain, wanted[first + i].index));
      }
      std::vector<std::uint8_t> ok(count);
      (void)store_->get(spaces_[space], keys.data(), pieces.data(), count, ok.data());
      // After one that is refused the call may have left others out.
      for (std::size_t i = 0; i < count; ++i) {
        visit(wanted[first + i], ok[i] != 0 ? many_.data() + i * bytes : get(wanted[first + i]));
      }
    }
  }

  void remove(const Deletion& deletion) {
    const auto space = deletion.space ? std::optional(fingerprint(*deletion.space)) : std::nullopt;
    const auto removed = store_->remove({space, deletion.key, deletion.digits});
    EXPECT_TRUE(removed) << removed.error().message;
  }

  // Every promise of the oracle; returns the pages that are there.
  std::set<PageId> check(const Oracle& oracle) {
    std::set<PageId> there;
    std::vector<PageId> found;
    for (const auto& [page, promise] : oracle.pages) {
      const bool here = has(page);
      EXPECT_FALSE(here && promise.versions.empty()) << name_of(page) << " came back after it was deleted";
      EXPECT_TRUE(here || !promise.durable) << name_of(page) << " was flushed and is lost";
      if (here) found.push_back(page);
    }
    read_many(found, [&](const PageId& page, const std::uint8_t* memory) {
      const PagePromise& promise = oracle.pages.at(page);
      EXPECT_FALSE(promise.durable && memory == nullptr) << name_of(page) << " was flushed and is refused";
      if (memory == nullptr) return;
      there.insert(page);
      if (holds(page, memory, promise.versions)) return;
      std::uint32_t older = promise.version;
      while (older > 0 && !holds(page, memory, {older})) --older;
      ADD_FAILURE() << name_of(page) << ": wrong bytes"
                    << (holds(page, memory, {older}) ? ", those that were deleted" : "");
    });
    const tardis_stats s = stats_of(*store_);
    EXPECT_EQ(s.slots_total, s.slots_live + s.slots_free + s.slots_quarantined + s.slots_writing) << "slots lost";
    EXPECT_EQ(s.slots_writing, 0u);
    EXPECT_EQ(s.slots_live, there.size()) << "slots that nobody can reach, or one page in two slots";
    EXPECT_LE(s.slots_quarantined, oracle.damaged) << "a crash was taken for corruption";
    EXPECT_LE(s.get_pages_corrupt, oracle.damaged) << "a crash was taken for corruption";
    EXPECT_EQ(s.get_pages_failed, 0u);
    EXPECT_EQ(s.segments_unreadable, 0u);
    return there;
  }

 private:
  static std::string name_of(const PageId& page) {
    return "page " + std::to_string(page.index) + " of chain " + std::to_string(page.chain) + " in namespace " +
           std::to_string(page.space);
  }
  void add_pieces(std::vector<std::uint64_t>& pieces, std::size_t space, std::uint8_t* memory) const {
    auto at = reinterpret_cast<std::uint64_t>(memory);
    const Layout& layout = bytes_.layout(space);
    for (std::uint32_t part = 0; part < layout.parts; ++part) {
      for (const std::uint64_t region : layout.regions) {
        pieces.push_back(at);
        at += region;
      }
    }
  }

  std::unique_ptr<Store> store_;
  PageBytes& bytes_;
  std::array<NamespaceId, 2> spaces_{};
  std::vector<std::uint8_t> memory_, many_;
};

}  // namespace tardis::testing
