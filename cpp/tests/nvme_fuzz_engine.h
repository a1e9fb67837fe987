// SPDX-License-Identifier: Apache-2.0
// A small mutational fuzzer. An input is a header and records of fixed size; inputs that show something new are kept
// and mutated further. Each target runs in a process of its own, whose parent knows the input if it dies or hangs.
#pragma once

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_set>
#include <vector>

#include "base/clock.h"

namespace tardis::nvme::fuzz {

using Random = std::mt19937_64;
using Bytes = std::vector<std::uint8_t>;
using Input = std::span<const std::uint8_t>;

inline constexpr std::size_t kMostBytes = 2048;                  // of an input; its file has hexadecimal digits
inline constexpr std::uint64_t kFnvBasis = 0xcbf29ce484222325u;  // FNV-1a

inline std::uint64_t hash_of(const void* data, std::size_t bytes, std::uint64_t hash = kFnvBasis) {
  const auto* at = static_cast<const std::uint8_t*>(data);
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 0x100000001b3u;
  return hash;
}

// What one execution showed.
class Findings {
 public:
  explicit Findings(bool aloud = false) : aloud_(aloud) {}

  void note(std::string_view kind, std::uint64_t a = 0, std::uint64_t b = 0) {
    const std::uint64_t values[2] = {a, b};
    const bool is_new = features_.insert(hash_of(values, sizeof values, hash_of(kind.data(), kind.size()))).second;
    if (aloud_ && is_new) {
      std::printf("  %.*s %#llx %#llx\n", static_cast<int>(kind.size()), kind.data(),
                  static_cast<unsigned long long>(a), static_cast<unsigned long long>(b));
    }
  }
  // A text, of which only plain words count: names and numbers in it say nothing new.
  void note_text(std::string_view kind, const std::string& text) {
    std::uint64_t hash = hash_of(kind.data(), kind.size());
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = std::min(text.find(' ', at), text.size());
      const std::string_view word = std::string_view(text).substr(at, end - at);
      const bool plain = std::all_of(word.begin(), word.end(), [](char c) { return c >= 'a' && c <= 'z'; });
      if (plain) hash = hash_of(word.data(), word.size(), hash);
      at = end + 1;
    }
    const bool is_new = features_.insert(hash).second;
    if (aloud_ && is_new) {
      std::printf("  %.*s: %s\n", static_cast<int>(kind.size()), kind.data(), text.empty() ? "well" : text.c_str());
    }
  }
  // An oracle: the process ends if it does not hold.
  void expect(bool holds, const std::string& what) const {
    if (holds) return;
    std::fflush(stdout);
    std::fprintf(stderr, "broken: %s\n", what.c_str());
    std::abort();
  }
  const std::unordered_set<std::uint64_t>& features() const { return features_; }

 private:
  const bool aloud_;
  std::unordered_set<std::uint64_t> features_;
};

struct Field {
  std::size_t offset, bytes;
};
struct Shape {
  std::size_t header_bytes, record_bytes;
  std::size_t most_records;
  std::vector<Field> fields;  // of a record
};

class Target {
 public:
  virtual ~Target() = default;
  virtual const char* name() const = 0;
  virtual Shape shape() const = 0;
  // A record that has some chance to make sense; zeroed before.
  virtual void make_record(Random& random, std::span<std::uint8_t> record) const = 0;
  // Of any input. The same input does the same, as far as threads do.
  virtual void execute(Input input, Findings& findings) = 0;
};

// Reads an input front to back; zeros behind its end.
class Reader {
 public:
  explicit Reader(Input input) : input_(input) {}
  bool empty() const { return input_.empty(); }
  Input take(std::size_t bytes) {
    const Input part = input_.first(std::min(bytes, input_.size()));
    input_ = input_.subspan(part.size());
    return part;
  }
  template <class T>
  T get() {
    T value{};
    const Input part = take(sizeof value);
    if (!part.empty()) std::memcpy(&value, part.data(), part.size());
    return value;
  }

 private:
  Input input_;
};

// ---- mutation

inline std::uint64_t interesting(Random& random) {
  static constexpr std::uint64_t kValues[] = {
      0,     1,     2,       3,        7,          8,          15,   16,         31,         63,         64,
      127,   128,   255,     256,      511,        512,        4095, 4096,       4097,       32767,      32768,
      65535, 65536, 0xfffff, 1u << 20, 0x7fffffff, 0x80000000, ~0u,  1ull << 32, ~0ull >> 1, 1ull << 63, ~0ull};
  const std::uint64_t value = kValues[random() % std::size(kValues)];
  switch (random() % 4) {
    case 0:
      return ~value;
    case 1:
      return random() >> random() % 64;
    default:
      return value;
  }
}

// Puts 1, 2, 4 or 8 bytes of `value` into a record, wherever `offset` falls.
template <class Record>
void set_field(Record& record, std::uint32_t offset, std::uint8_t width, std::uint64_t value) {
  const std::size_t bytes = std::size_t{1} << width % 4;
  std::memcpy(reinterpret_cast<std::uint8_t*>(&record) + offset % (sizeof record - bytes + 1), &value, bytes);
}

class Mutator {
 public:
  Mutator(const Target& target, Random& random) : target_(target), shape_(target.shape()), random_(random) {}

  Bytes fresh() const {
    Bytes input(shape_.header_bytes);
    for (auto& byte : input) byte = static_cast<std::uint8_t>(random_() % 3 == 0 ? random_() : 0);
    for (std::size_t n = 1 + random_() % std::min<std::size_t>(12, shape_.most_records); n > 0; --n) append(input);
    return input;
  }
  Bytes mutate(Bytes input, const Bytes& other) const {
    for (std::size_t n = std::size_t{1} << random_() % 4; n > 0; --n) step(input, other);
    input.resize(
        std::min(input.size(), std::min(kMostBytes, shape_.header_bytes + shape_.most_records * shape_.record_bytes)));
    return input;
  }

 private:
  void append(Bytes& input) const { insert(input, input.size()); }
  void insert(Bytes& input, std::size_t at) const {
    Bytes record(shape_.record_bytes);
    target_.make_record(random_, record);
    input.insert(input.begin() + static_cast<std::ptrdiff_t>(std::min(at, input.size())), record.begin(), record.end());
  }
  std::size_t records(const Bytes& input) const {
    return input.size() > shape_.header_bytes ? (input.size() - shape_.header_bytes) / shape_.record_bytes : 0;
  }
  std::size_t place(std::size_t record) const { return shape_.header_bytes + record * shape_.record_bytes; }
  auto iterator(Bytes& input, std::size_t at) const { return input.begin() + static_cast<std::ptrdiff_t>(at); }

  void put(Bytes& input, std::size_t at, std::size_t bytes) const {
    if (at + bytes > input.size()) return;
    std::uint64_t value = interesting(random_);
    if (random_() % 3 == 0) {  // near what is there
      std::uint64_t before = 0;
      std::memcpy(&before, &input[at], bytes);
      value = before + random_() % 17 - 8;
    }
    std::memcpy(&input[at], &value, bytes);
  }

  void step(Bytes& input, const Bytes& other) const {
    if (input.empty()) input.push_back(0);
    const std::size_t n = records(input);
    switch (random_() % 11) {
      case 0:
        input[random_() % input.size()] ^= static_cast<std::uint8_t>(1u << random_() % 8);
        break;
      case 1:
        input[random_() % input.size()] = static_cast<std::uint8_t>(random_());
        break;
      case 2:
        put(input, random_() % input.size(), std::size_t{1} << random_() % 4);
        break;
      case 3:  // one more record, or another one
        insert(input, place(random_() % (n + 1)));
        break;
      case 4:
        if (n > 0) {
          const std::size_t at = place(random_() % n);
          input.erase(iterator(input, at), iterator(input, at + shape_.record_bytes));
        }
        break;
      case 5:  // a record again
        if (n > 0) {
          const std::size_t at = place(random_() % n);
          const Bytes copy(iterator(input, at), iterator(input, at + shape_.record_bytes));
          input.insert(iterator(input, place(random_() % (n + 1))), copy.begin(), copy.end());
        }
        break;
      case 6:  // the records of another input
        if (other.size() > shape_.header_bytes) {
          const std::size_t from = place(random_() % std::max<std::size_t>(1, records(other)));
          input.resize(std::min(input.size(), place(random_() % (n + 1))));
          input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(std::min(from, other.size())),
                       other.end());
        }
        break;
      case 7:
        for (std::size_t i = 0; i < shape_.header_bytes && i < input.size(); ++i) {
          if (random_() % 8 == 0) input[i] = static_cast<std::uint8_t>(interesting(random_));
        }
        break;
      default:
        if (n > 0 && !shape_.fields.empty()) {
          const Field field = shape_.fields[random_() % shape_.fields.size()];
          put(input, place(random_() % n) + field.offset, field.bytes);
        }
        break;
    }
  }

  const Target& target_;
  const Shape shape_;
  Random& random_;
};

// ---- files of inputs

[[noreturn]] inline void stop(const std::string& message) {
  std::fprintf(stderr, "tardis_nvme_fuzz: %s\n", message.c_str());
  std::exit(2);
}
inline Bytes read_input(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) stop(path.string() + " cannot be read");
  Bytes input;
  for (std::string word; file >> word;) {
    if (word.size() % 2 != 0 || word.find_first_not_of("0123456789abcdef") != std::string::npos) {
      stop(path.string() + ": expected bytes as pairs of hexadecimal digits, found " + word);
    }
    for (std::size_t i = 0; i < word.size(); i += 2) {
      input.push_back(static_cast<std::uint8_t>(std::strtoul(word.substr(i, 2).c_str(), nullptr, 16)));
    }
  }
  if (input.size() > kMostBytes)
    stop(path.string() + ": an input has " + std::to_string(kMostBytes) + " bytes at most");
  return input;
}
inline void write_input(const std::filesystem::path& path, Input input) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path);
  char digits[4];
  for (std::size_t i = 0; i < input.size(); ++i) {
    std::snprintf(digits, sizeof digits, "%02x%s", input[i], i % 32 == 31 ? "\n" : "");
    file << digits;
  }
  if (input.size() % 32 != 0) file << '\n';
}
// The inputs of a folder, by name.
inline std::vector<std::filesystem::path> list_inputs(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(folder)) {
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      if (file.path().extension() == ".hex") files.push_back(file.path());
    }
  }
  if (files.empty()) stop(folder.string() + " has no inputs");
  std::sort(files.begin(), files.end());
  return files;
}
inline std::string input_name(Input input) {
  char text[24];
  std::snprintf(text, sizeof text, "%016llx.hex", static_cast<unsigned long long>(hash_of(input.data(), input.size())));
  return text;
}

// ---- the run of one target

struct Plan {
  double seconds = 10;
  std::uint64_t seed = 1;
  std::filesystem::path corpus;  // FOLDER/<target>/*.hex
  std::filesystem::path keep;    // where the best inputs of the run are written; empty: nowhere
  std::size_t most_kept = 20;
  double hang_seconds = 30;  // the most that one input may take, on a machine that does much else
  std::uint64_t times = 1;   // that a single input is executed: what threads do is not always the same
};

// What the process of a target and its parent share.
struct Progress {
  std::atomic<std::uint64_t> started_ns;  // of the input, or of what comes before the first
  std::atomic<std::uint64_t> corpus, executions, features, pool, longest_ns;
  std::atomic<std::uint64_t> bytes;
  std::uint8_t input[kMostBytes];
};

class Fuzzer {
 public:
  Fuzzer(Target& target, const Plan& plan, Progress& progress)
      : target_(target), plan_(plan), progress_(progress), random_(plan.seed), mutator_(target, random_) {}

  void run() {
    const std::uint64_t end = monotonic_ns() + static_cast<std::uint64_t>(plan_.seconds * 1e9);
    if (!plan_.corpus.empty()) {
      for (const auto& file : list_inputs(plan_.corpus / target_.name())) {
        attempt(read_input(file));
        progress_.corpus.fetch_add(1);
      }
    }
    do {
      const bool fresh = pool_.empty() || random_() % 16 == 0;
      attempt(fresh ? mutator_.fresh() : mutator_.mutate(choose(), choose()));
    } while (monotonic_ns() < end);
    if (!plan_.keep.empty()) keep_best();
  }
  Findings attempt(const Bytes& input, bool aloud = false) {
    progress_.bytes.store(std::min(input.size(), kMostBytes));
    if (!input.empty()) std::memcpy(progress_.input, input.data(), std::min(input.size(), kMostBytes));
    const std::uint64_t start = monotonic_ns();
    progress_.started_ns.store(start);
    Findings findings(aloud);
    target_.execute({progress_.input, static_cast<std::size_t>(progress_.bytes.load())}, findings);
    const std::uint64_t end = monotonic_ns();
    progress_.started_ns.store(end);
    progress_.longest_ns.store(std::max(progress_.longest_ns.load(), end - start));
    progress_.executions.fetch_add(1);
    bool novel = false;
    for (const std::uint64_t feature : findings.features()) novel |= seen_.insert(feature).second;
    if (novel) pool_.push_back({input, findings.features()});
    progress_.features.store(seen_.size());
    progress_.pool.store(pool_.size());
    return findings;
  }

 private:
  struct Kept {
    Bytes input;
    std::unordered_set<std::uint64_t> features;
  };
  const Bytes& choose() {
    // The newer half twice as often as the older.
    const std::size_t half = random_() % 3 == 0 ? 0 : pool_.size() / 2;
    return pool_[half + random_() % (pool_.size() - half)].input;
  }
  // A few inputs that together show as much as so few can.
  void keep_best() {
    std::unordered_set<std::uint64_t> shown;
    for (std::size_t n = 0; n < plan_.most_kept; ++n) {
      std::size_t best = 0, best_new = 0;
      for (std::size_t i = 0; i < pool_.size(); ++i) {
        const auto fresh =
            static_cast<std::size_t>(std::count_if(pool_[i].features.begin(), pool_[i].features.end(),
                                                   [&](std::uint64_t feature) { return !shown.contains(feature); }));
        if (fresh > best_new) best = i, best_new = fresh;
      }
      if (best_new == 0) break;
      shown.insert(pool_[best].features.begin(), pool_[best].features.end());
      write_input(plan_.keep / target_.name() / input_name(pool_[best].input), pool_[best].input);
    }
  }

  Target& target_;
  const Plan& plan_;
  Progress& progress_;
  Random random_;
  Mutator mutator_;
  std::unordered_set<std::uint64_t> seen_;
  std::vector<Kept> pool_;
};

using MakeTarget = std::function<std::unique_ptr<Target>()>;

// Where a target may keep files; the parent deletes it, whatever becomes of the process. In memory where it can be.
inline std::filesystem::path scratch_folder(pid_t process) {
  const std::filesystem::path shared = "/dev/shm";
  return (std::filesystem::is_directory(shared) ? shared : std::filesystem::temp_directory_path()) /
         ("tardis-nvme-fuzz-" + std::to_string(process));
}

// Fuzzes, or executes one input, in a process of its own. False if that died, hung or said that something is broken:
// then the input is in a file.
inline bool supervise(const char* name, const MakeTarget& make, const Plan& plan, const std::optional<Bytes>& only) {
  void* const shared = ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) {
    std::perror("mmap");
    return false;
  }
  auto* const progress = new (shared) Progress{};
  const std::uint64_t began = monotonic_ns();
  progress->started_ns.store(began);
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const std::unique_ptr<Target> target = make();
    Fuzzer fuzzer(*target, plan, *progress);
    if (only) {
      for (std::uint64_t n = 0; n < plan.times; ++n) fuzzer.attempt(*only, /*aloud=*/n == 0);
    } else {
      fuzzer.run();
    }
    std::exit(0);
  }
  int status = -1;
  bool hung = false;
  while (child > 0 && ::waitpid(child, &status, WNOHANG) == 0) {
    const std::uint64_t started = progress->started_ns.load();
    if (static_cast<double>(monotonic_ns()) - static_cast<double>(started) > plan.hang_seconds * 1e9) {
      hung = true;
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (child > 0) std::filesystem::remove_all(scratch_folder(child));
  const double seconds = static_cast<double>(monotonic_ns() - began) * 1e-9;
  const bool well = child > 0 && !hung && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  std::printf(
      "%s: seed %llu, %llu of the corpus, %llu executions in %.1f s, %llu features, %llu inputs, longest %.1f ms\n",
      name, static_cast<unsigned long long>(plan.seed), static_cast<unsigned long long>(progress->corpus.load()),
      static_cast<unsigned long long>(progress->executions.load()), seconds,
      static_cast<unsigned long long>(progress->features.load()),
      static_cast<unsigned long long>(progress->pool.load()), static_cast<double>(progress->longest_ns.load()) * 1e-6);
  if (!well) {
    const Input input{progress->input, static_cast<std::size_t>(progress->bytes.load())};
    const std::filesystem::path file =
        std::filesystem::absolute(std::string("failed-") + name + "-" + input_name(input));
    write_input(file, input);
    std::printf("%s: FAILED (%s); run again with target=%s input=%s\n", name,
                hung                  ? "no end"
                : WIFSIGNALED(status) ? ::strsignal(WTERMSIG(status))
                                      : "the process ended with an error",
                name, file.c_str());
  }
  std::fflush(stdout);
  ::munmap(shared, sizeof(Progress));
  return well;
}

}  // namespace tardis::nvme::fuzz
