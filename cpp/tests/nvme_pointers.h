// SPDX-License-Identifier: Apache-2.0
// Helpers of the PRP and SGL tests: vector files, memory by bus address, what a transfer must touch.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace tardis::nvme::testing::pointers {

// Bytes of a transfer that lie side by side.
struct Piece {
  std::uint64_t address;
  std::uint64_t length;
  bool operator==(const Piece&) const = default;
};
inline void PrintTo(const Piece& piece, std::ostream* out) {
  *out << "0x" << std::hex << piece.address << "+0x" << piece.length << std::dec;
}

// What a test knows of a controller's view of memory: ranges of T at bus addresses, and nothing else.
template <class T>
class BusMemory {
 public:
  void clear() { ranges_.clear(); }
  void add(std::uint64_t bus, T* items, std::size_t count) { ranges_.push_back({bus, count * sizeof(T), items}); }
  // Null where no memory of lists is.
  T* at(std::uint64_t bus) const {
    for (const Range& range : ranges_) {
      const std::uint64_t offset = bus - range.bus;
      if (offset < range.bytes && offset % sizeof(T) == 0) return range.items + offset / sizeof(T);
    }
    return nullptr;
  }

 private:
  struct Range {
    std::uint64_t bus;
    std::uint64_t bytes;
    T* items;
  };
  std::vector<Range> ranges_;
};

inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  if (text.empty() || text == "-") return parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

inline std::uint64_t number(const std::string& text) {
  std::size_t used = 0;
  std::uint64_t value = 0;
  try {
    value = std::stoull(text, &used, 0);
  } catch (const std::exception&) {
  }
  if (used != text.size() || text.empty()) ADD_FAILURE() << "expected a number, found '" << text << "'";
  return value;
}

// "BASE+STRIDE" or "BASE-STRIDE": address i is BASE + i * STRIDE, or less.
class AddressRule {
 public:
  explicit AddressRule(const std::string& text) {
    const std::size_t sign = text.find_first_of("+-");
    if (sign == std::string::npos) {
      ADD_FAILURE() << "expected BASE+STRIDE or BASE-STRIDE, found '" << text << "'";
      return;
    }
    base_ = number(text.substr(0, sign));
    stride_ = number(text.substr(sign + 1));
    if (text[sign] == '-') stride_ = -stride_;
  }
  std::uint64_t operator()(std::uint64_t i) const { return base_ + i * stride_; }

 private:
  std::uint64_t base_ = 0, stride_ = 0;
};

// A line of a vector file; the file tells the format.
struct Vector {
  std::string kind, name;
  std::map<std::string, std::string> fields;

  bool has(const std::string& key) const { return fields.count(key) != 0; }
  std::string text(const std::string& key) const {
    const auto found = fields.find(key);
    if (found == fields.end()) ADD_FAILURE() << "no field '" << key << "'";
    return found == fields.end() ? std::string() : found->second;
  }
  std::uint64_t value(const std::string& key) const { return number(text(key)); }
  // Does `status`, numbers in hexadecimal with | between, have this one?
  bool allows(std::uint16_t status) const {
    for (const std::string& one : split(text("status"), '|')) {
      if (std::strtoul(one.c_str(), nullptr, 16) == status) return true;
    }
    return false;
  }
};

inline std::vector<Vector> read_vectors(const std::string& file) {
  // Where the source tree is not: in a guest.
  const char* const elsewhere = std::getenv("TARDIS_TEST_DATA");
  const auto folder =
      elsewhere != nullptr ? std::filesystem::path(elsewhere) : std::filesystem::path(__FILE__).parent_path() / "data";
  const auto path = folder / file;
  std::ifstream in(path);
  if (!in)
    ADD_FAILURE() << "expected to read " << path
                  << "; tests run from the source tree they were built from, "
                     "or with TARDIS_TEST_DATA";
  std::vector<Vector> vectors;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    Vector vector;
    words >> vector.kind >> vector.name;
    for (std::string word; words >> word;) {
      const std::size_t equals = word.find('=');
      if (equals == std::string::npos) {
        ADD_FAILURE() << vector.name << ": expected key=value, found '" << word << "'";
        continue;
      }
      vector.fields[word.substr(0, equals)] = word.substr(equals + 1);
    }
    vectors.push_back(std::move(vector));
  }
  return vectors;
}

// splitmix64: the campaigns draw some ten numbers a case, which std::mt19937_64 would take a second for.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t operator()() { return mix(state_ += 0x9e3779b97f4a7c15); }
  std::uint64_t below(std::uint64_t bound) { return (*this)() % bound; }
  std::uint64_t between(std::uint64_t least, std::uint64_t most) { return least + below(most - least + 1); }
  bool one_in(std::uint64_t times) { return below(times) == 0; }

  static std::uint64_t mix(std::uint64_t value) {
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27) * 0x94d049bb133111eb;
    return value ^ value >> 31;
  }

 private:
  std::uint64_t state_;
};

// Cases of a long test: `base`, times the number in TARDIS_NVME_CAMPAIGN if there is one.
inline std::uint64_t campaign(std::uint64_t base) {
  const char* factor = std::getenv("TARDIS_NVME_CAMPAIGN");
  const double times = factor == nullptr ? 1.0 : std::strtod(factor, nullptr);
  return times > 0 ? static_cast<std::uint64_t>(static_cast<double>(base) * times) : base;
}

}  // namespace tardis::nvme::testing::pointers
