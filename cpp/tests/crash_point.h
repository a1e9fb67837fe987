// SPDX-License-Identifier: Apache-2.0
// What a power cut could have left of a drive: everything that was flushed, and of what was not, any part, sector by
// sector and in any order.
#pragma once

#include <bit>
#include <random>
#include <set>

#include "recording_device.h"
#include "store_pages.h"

namespace tardis::testing {

// Walks through a journal. At each point it makes images of what may be on the drive if the power goes there.
class CrashPoint {
 public:
  CrashPoint(Drive durable, const std::vector<Event>& events) : durable_(std::move(durable)), events_(events) {}

  std::size_t at() const { return at_; }
  bool at_end() const { return at_ == events_.size(); }
  // How many choices the drive has here; with none, there is one image.
  std::size_t pending() const {
    std::size_t count = 0;
    for (const auto& [file, writes] : writes_) count += writes.size();
    for (const auto& [file, lengths] : lengths_) count += lengths.size();
    for (const auto& [file, texts] : texts_) count += texts.size();
    for (const auto& [folder, names] : names_) count += names.size();
    return count;
  }

  // A file was made, renamed or removed, and its folder is not durable yet.
  bool names_pending() const { return !names_.empty(); }

  void advance() {
    const Event& event = events_[at_];
    switch (event.kind) {
      case Event::Kind::kWrite:
        writes_[event.file].push_back(at_);
        break;
      case Event::Kind::kLength:
        lengths_[event.file].push_back(event.offset);
        break;
      case Event::Kind::kFlush:
        flush(event.file);
        break;
      case Event::Kind::kDamage:
        ++epoch_;
        if (event.offset / 8 < durable_.segments[event.file].bytes()) {
          flip_bit_of(durable_.segments[event.file], event.offset);
        }
        break;
      case Event::Kind::kText:
        texts_[event.file].push_back(&event.data);
        break;
      case Event::Kind::kSyncText:
        sync_text(event.file);
        break;
      case Event::Kind::kNames:
        names_[event.folder].push_back(&event.names);
        break;
      case Event::Kind::kSyncFolder:
        sync_folder(event.folder);
        break;
    }
    ++at_;
  }

  struct State {
    FolderImage image;
    std::uint64_t signature;  // equal for images that are equal, and only by chance for others
    std::string told;         // what was kept, for a person
  };
  State choose(std::mt19937_64& random) const { return choose(random, static_cast<Style>(random() % kStyles)); }
  // What is durable, and what the operating system shows.
  FolderImage durable(std::mt19937_64& random) const { return choose(random, Style::kNothing).image; }
  FolderImage cached(std::mt19937_64& random) const { return choose(random, Style::kEverything).image; }

 private:
  enum class Style { kNothing, kEverything, kWholeWrites, kSectors, kOneTorn, kOnlyOne, kAllButOne };
  static constexpr std::size_t kStyles = 7;
  static constexpr std::array<const char*, kStyles> kStyleNames = {
      "nothing kept",   "everything kept", "some writes kept",       "some sectors kept",
      "one write torn", "one write kept",  "all but one write kept",
  };

  State choose(std::mt19937_64& random, Style style) const {
    State state{{}, mix(epoch_), ""};
    std::size_t kept = 0;
    const std::size_t odd =
        writes_in_all() == 0 ? 0 : random() % writes_in_all();  // the one that kOnlyOne, kAllButOne mean
    const unsigned percent = std::array<unsigned, 3>{10, 50, 90}[random() % 3];
    std::size_t number = 0;
    for (const char* folder : kStoreFolders) {
      const auto names = choose_names(folder, style, random, state);
      for (const auto& [name, file] : names) {
        const std::string path = *folder == 0 ? name : std::string(folder) + "/" + name;
        if (holds_segments(folder)) {
          state.image.segments[path] = choose_segment(file, style, percent, odd, number, kept, random, state.signature);
        } else {
          // What the lock file says is news to nobody after a crash: it makes no state of its own.
          std::uint64_t none = 0;
          std::mt19937_64 other(at_);
          const bool lock = path == "LOCK";
          state.image.texts[path] = choose_text(file, style, lock ? other : random, lock ? none : state.signature);
        }
      }
    }
    if (durable_.segments.contains(kRawNamespace)) {
      state.image.raw = choose_segment(kRawNamespace, style, percent, odd, number, kept, random, state.signature);
    }
    state.told += std::string(kStyleNames[static_cast<std::size_t>(style)]) + ", " + std::to_string(kept) + " of " +
                  std::to_string(writes_in_all()) + " writes";
    return state;
  }

  std::size_t writes_in_all() const {
    std::size_t count = 0;
    for (const auto& [file, writes] : writes_) count += writes.size();
    return count;
  }

  void flush(ino_t file) {
    if (!writes_.contains(file) && !lengths_.contains(file)) return;
    ++epoch_;
    BlockFile& segment = durable_.segments[file];
    for (const std::uint64_t bytes : lengths_[file]) segment.resize(std::max(segment.bytes(), bytes));
    for (const std::size_t write : writes_[file]) {
      segment.write(events_[write].offset, events_[write].data.data(), events_[write].data.size());
    }
    lengths_.erase(file);
    writes_.erase(file);
  }
  void sync_text(ino_t file) {
    if (!texts_.contains(file)) return;
    ++epoch_;
    durable_.texts[file] = *texts_[file].back();
    texts_.erase(file);
  }
  void sync_folder(const std::string& folder) {
    if (!names_.contains(folder)) return;
    ++epoch_;
    durable_.names[folder] = *names_[folder].back();
    names_.erase(folder);
  }

  // Names of one folder change in order.
  std::map<std::string, ino_t> choose_names(const std::string& folder, Style style, std::mt19937_64& random,
                                            State& state) const {
    const auto durable = durable_.names.find(folder);
    const auto pending = names_.find(folder);
    const std::size_t changes = pending == names_.end() ? 0 : pending->second.size();
    const std::size_t kept = style == Style::kNothing      ? 0
                             : style == Style::kEverything ? changes
                                                           : random() % (changes + 1);
    state.signature = mix(state.signature ^ kept);
    if (changes > 0) {
      state.told +=
          "names in /" + folder + " " + std::to_string(kept) + " of " + std::to_string(changes) + " changes, ";
    }
    if (kept > 0) return *pending->second[kept - 1];
    return durable == durable_.names.end() ? std::map<std::string, ino_t>() : durable->second;
  }

  std::string choose_text(ino_t file, Style style, std::mt19937_64& random, std::uint64_t& signature) const {
    const auto durable = durable_.texts.find(file);
    const std::string before = durable == durable_.texts.end() ? "" : durable->second;
    const auto pending = texts_.find(file);
    if (pending == texts_.end() || style == Style::kNothing) {
      signature = mix(signature);
      return before;
    }
    const std::string& after =
        style == Style::kEverything ? *pending->second.back() : *pending->second[random() % pending->second.size()];
    std::string text = after;
    if (style != Style::kEverything && random() % 2 == 0) {
      // Its length and its sectors reach the drive in any order; a hole reads as zeros.
      text.resize(random() % (after.size() + 1));
      for (std::size_t at = 0; at < text.size(); at += kSector) {
        if (random() % 2 == 0) continue;
        const std::size_t n = std::min<std::size_t>(kSector, text.size() - at);
        for (std::size_t i = at; i < at + n; ++i) text[i] = i < before.size() ? before[i] : '\0';
      }
    }
    signature = mix(signature ^ std::hash<std::string>()(text));
    return text;
  }

  BlockFile choose_segment(ino_t file, Style style, unsigned percent, std::size_t odd, std::size_t& number,
                           std::size_t& kept, std::mt19937_64& random, std::uint64_t& signature) const {
    const auto durable = durable_.segments.find(file);
    BlockFile segment = durable == durable_.segments.end() ? BlockFile() : durable->second;
    if (const auto lengths = lengths_.find(file); lengths != lengths_.end()) {
      std::uint64_t bytes = lengths->second.back();
      if (style != Style::kEverything && random() % 3 == 0)
        bytes = random() % 2 == 0 ? 0 : random() % bytes / 4096 * 4096;
      if (style == Style::kNothing) bytes = 0;
      segment.resize(std::max(segment.bytes(), bytes));
      signature = mix(signature ^ segment.bytes());
    }
    const auto writes = writes_.find(file);
    if (writes == writes_.end()) return segment;
    for (const std::size_t index : writes->second) {
      const bool marked = number++ == odd, likely = random() % 100 < percent;
      bool keep = false, torn = false;
      switch (style) {
        case Style::kNothing:
          break;
        case Style::kEverything:
          keep = true;
          break;
        case Style::kWholeWrites:
          keep = likely;
          break;
        case Style::kSectors:
          torn = true;
          break;
        case Style::kOneTorn:
          keep = likely, torn = marked;
          break;
        case Style::kOnlyOne:
          keep = marked;
          break;
        case Style::kAllButOne:
          keep = !marked;
          break;
      }
      const std::uint64_t sectors = events_[index].data.size() / kSector;
      std::uint64_t done = 0, which = 0;
      // A torn write leaves a beginning, or sectors from anywhere.
      const std::uint64_t prefix = torn && random() % 2 == 0 ? random() % (sectors + 1) : sectors;
      for (std::uint64_t sector = 0; sector < sectors; ++sector) {
        const bool here = torn ? sector < prefix && (prefix < sectors || random() % 100 < percent) : keep;
        const std::uint64_t at = events_[index].offset + sector * kSector;
        if (!here || at + kSector > segment.bytes()) continue;
        segment.write(at, events_[index].data.data() + sector * kSector, kSector);
        ++done;
        which = mix(which ^ sector);
      }
      kept += done > 0;
      if (done == sectors) which = 1;
      if (done > 0) signature = mix(signature ^ mix(index * 2 + 1) ^ which);
    }
    return segment;
  }

  Drive durable_;
  const std::vector<Event>& events_;
  std::size_t at_ = 0;
  std::uint64_t epoch_ = 0;  // changes with every change of what is durable
  std::map<ino_t, std::vector<std::size_t>> writes_;
  std::map<ino_t, std::vector<std::uint64_t>> lengths_;
  std::map<ino_t, std::vector<const std::string*>> texts_;
  std::map<std::string, std::vector<const std::map<std::string, ino_t>*>> names_;
};

}  // namespace tardis::testing
