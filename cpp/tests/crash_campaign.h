// SPDX-License-Identifier: Apache-2.0
// The power goes after every single write, flush, rename and unlink of a store at work; of what was not flushed then,
// the drive keeps any part. Each such state is opened, checked against what the store had promised, and used on.
#pragma once

#include <cstdlib>
#include <unordered_set>

#include "crash_point.h"
#include "crash_session.h"

namespace tardis::testing {

inline constexpr std::uint64_t kSessionsPerSeed = 6;  // each begins with what a crash or a kill left of the one before
inline constexpr int kSessionSteps = 28;
inline constexpr std::size_t kStatesPerPoint = 4;

inline const Workload kCrashWorkloads[] = {
    // Both namespaces in one slot class, and room for all: everything flushed stays.
    {"Keep", {{{2, {5000, 3000}}, {1, {16384}}}}, 2, 6, 8, false, {20, 6, 8, 1, 1, 2, 0}},
    {"Delete", {{{2, {5000, 3000}}, {1, {16384}}}}, 2, 5, 8, false, {24, 4, 10, 5, 8, 3, 0}},
    // Closing and opening writes and reads whatever the store keeps between the two.
    {"Reopen", {{{1, {40000}}, {2, {9000}}}}, 3, 5, 8, false, {20, 4, 6, 1, 1, 14, 0}},
    // Always full: what is stored takes the place of something else; in the second, segments also change their class.
    {"Evict", {{{1, {150'000}}, {2, {75'000}}}}, 1, 12, 6, true, {28, 8, 8, 1, 1, 3, 0}},
    {"Reclass", {{{2, {20000, 12345}}, {1, {300'000}}}}, 2, 12, 8, true, {28, 6, 8, 1, 1, 3, 0}},
    // Groups end by size while others are written.
    {"SmallGroups", {{{1, {40000}}, {1, {100'000}}}}, 2, 10, 8, true, {28, 6, 4, 1, 1, 2, 0}, 1, 128 * 1024},
    {"Damage", {{{1, {40000}}, {2, {9000}}}}, 2, 4, 8, false, {20, 8, 12, 1, 2, 5, 12}},
    // Two users of one store at once, each with its own flush groups.
    {"TwoUsers", {{{1, {16384}}, {2, {9000}}}}, 4, 6, 8, false, {24, 6, 10, 1, 3, 6, 0}, 2},
    {"TwoUsersFull", {{{1, {100'000}}, {2, {50'000}}}}, 3, 12, 8, true, {28, 6, 8, 1, 1, 4, 0}, 2},
    // Segments in two folders, which may be on two drives.
    {"TwoPaths", {{{1, {100'000}}, {2, {50'000}}}}, 4, 6, 8, false, {24, 6, 10, 2, 3, 8, 0}, 1, 256u << 20, true},
    {"TwoPathsFull", {{{1, {150'000}}, {2, {75'000}}}}, 3, 14, 8, true, {28, 6, 8, 1, 1, 5, 0}, 2, 256u << 20, true},
    // Each segment in both.
    {"TwoPathsStriped",
     {{{2, {50'000}}, {4, {20'000, 5000}}}},
     4,
     6,
     8,
     false,
     {24, 6, 10, 2, 3, 8, 6},
     1,
     256u << 20,
     true,
     Placement::kLayers},
    {"TwoPathsStripedFull",
     {{{2, {75'000}}, {1, {300'000}}}},
     3,
     14,
     8,
     true,
     {28, 6, 8, 1, 1, 5, 0},
     2,
     256u << 20,
     true,
     Placement::kLayers},
};

inline std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

class CrashCampaign : public ::testing::TestWithParam<Workload> {
 protected:
  CrashCampaign() : bytes_(GetParam().layouts), parent_(memory_parent()) {}

  // What the segments of these stores are on.
  virtual FolderImage first_image() { return {}; }
  virtual DeviceFactory device(RecordedDrive& drive) { return recorded(drive); }
  // A drive with this image for tools that know no RecordedDrive.
  virtual DeviceFactory put_image(const FolderImage& image, const std::string& folder) = 0;

  // Of a session. All of its crash points are tried, whatever number of states was asked for.
  virtual int steps() const { return kSessionSteps; }

  void TearDown() override {
    RecordProperty("states", std::to_string(states_));
    RecordProperty("distinct_states", std::to_string(distinct_));
    RecordProperty("crash_points", std::to_string(points_));
    RecordProperty("sessions", std::to_string(sessions_));
    RecordProperty("pages_read", std::to_string(pages_read_));
    RecordProperty("flushed_pages_checked", std::to_string(promised_));
    RecordProperty("deleted_pages_checked", std::to_string(deleted_));
    RecordProperty("states_on_real_files", std::to_string(with_tools_));
  }

  // What a crash left, and what may be expected of it.
  struct Left {
    FolderImage image;
    std::optional<FolderImage> durable;  // of a killed process, which leaves more than a power cut would
    Oracle oracle;
  };

  void campaign(std::uint64_t wanted) {
    for (std::uint64_t seed = setting("TARDIS_CRASH_SEED", 1); states_ < wanted && !HasFailure(); ++seed) {
      std::mt19937_64 random(seed);
      Left left;
      left.image = first_image();
      for (std::uint64_t number = 0; number < kSessionsPerSeed && states_ < wanted && !HasFailure(); ++number) {
        SCOPED_TRACE("seed " + std::to_string(seed) + ", session " + std::to_string(number));
        left = session(std::move(left), random);
      }
    }
    EXPECT_GT(distinct_, wanted / 2) << "too few different states to prove anything";
    EXPECT_GT(pages_read_, states_);
    EXPECT_GT(promised_, 0u);
    EXPECT_TRUE(deleted_ > 0 || wanted < 2000);
  }

  // Works with a store and crashes it everywhere; returns one of the things that this left.
  Left session(Left start, std::mt19937_64& random) {
    Left left = start;
    std::unordered_set<std::uint64_t> seen;
    const std::string folder = fresh_folder();
    RecordedDrive drive(folder, start.image, /*record=*/true, start.durable ? &*start.durable : nullptr);
    if (setting("TARDIS_CRASH_LYING_DRIVE", 0) != 0) drive.lie();
    Session session(drive, device(drive), GetParam(), bytes_, std::move(start.oracle), random);
    session.run(steps());
    if (HasFailure()) return left;
    CrashPoint point(drive.first(), drive.events());
    OracleCursor promises(session.log());
    std::uint64_t candidates = 0;
    while (true) {
      const Oracle& oracle = promises.at(point.at());
      const std::size_t choices = point.pending() == 0 ? 1 : kStatesPerPoint;
      std::set<std::uint64_t> here;
      for (std::size_t choice = 0; choice < choices; ++choice) {
        CrashPoint::State state = point.choose(random);
        if (!here.insert(state.signature).second) continue;
        SCOPED_TRACE("power cut after event " + std::to_string(point.at()) + " of " +
                     std::to_string(drive.events().size()) + ": " + state.told);
        distinct_ += seen.insert(state.signature).second;
        check(state.image, oracle, random);
        if (HasFailure()) return left;
        if (random() % ++candidates != 0) continue;
        left = {std::move(state.image), std::nullopt, oracle};
        if (random() % 3 == 0) left = {point.cached(random), point.durable(random), oracle};
      }
      // Few points are like that, and what is found there after a kill must not be taken for durable.
      if (point.names_pending() && random() % 8 == 0) {
        left = {point.cached(random), point.durable(random), oracle};
        ++candidates;
      }
      ++points_;
      if (point.at_end()) break;
      point.advance();
    }
    ++sessions_;
    std::filesystem::remove_all(folder);
    return left;
  }

  void check(const FolderImage& image, const Oracle& oracle, std::mt19937_64& random) {
    ++states_;
    const std::string folder = fresh_folder();
    {
      RecordedDrive drive(folder, image, /*record=*/false);
      Oracle known = oracle;
      const auto again = random() % 4 == 0;
      use(device(drive), folder, known, &drive, again);
      if (again && !HasFailure()) use(device(drive), folder, known, &drive, false);
    }
    if (random() % kToolsEvery == 0 && !HasFailure()) check_with_tools(image, oracle);
    if (!HasFailure()) std::filesystem::remove_all(folder);
  }

  // Opens the store, checks it, stores something new and reads it. With `keep`, `known` learns what must be there
  // from now on.
  void use(const Store::DeviceFactory& device, const std::string& folder, Oracle& known, RecordedDrive* drive,
           bool keep) {
    auto pages = OpenPages::open(folder, options_of(GetParam(), folder), device, bytes_);
    if (pages == nullptr) return;
    std::set<PageId> there = pages->check(known);
    pages_read_ += there.size();
    if (drive != nullptr) {
      EXPECT_EQ(stats_of(pages->store()).slots_total, slots_of(*drive)) << "slots lost or doubled";
    }
    for (const auto& [page, promise] : known.pages) {
      promised_ += promise.durable;
      deleted_ += promise.versions.empty();
    }
    if (HasFailure()) return;
    for (std::size_t space = 0; space < 2; ++space) {
      const PageId fresh{space, kFreshChain + fresh_++, 0};
      EXPECT_EQ(pages->put(fresh, {0}), 1u) << "a recovered store takes no page";
      EXPECT_TRUE(pages->get(fresh) != nullptr) << "a recovered store does not give back what it took";
      known.pages[fresh].versions = {0};
      there.insert(fresh);
    }
    if (keep) {
      for (auto& [page, promise] : known.pages) promise.durable = there.contains(page) && pages->has(page);
    }
    const Status status = pages->store().close();
    EXPECT_TRUE(status) << status.error().message;
  }

  // As the segments themselves say.
  static std::uint64_t slots_of(RecordedDrive& drive) {
    std::uint64_t slots = 0;
    for (const auto& [path, file] : drive.segments()) {
      SegmentSuperblock s;
      file.read(0, &s, sizeof s);
      if (sealed(s)) slots += s.slots;
    }
    return slots;
  }

  // The same with the tool that checks a closed store.
  void check_with_tools(const FolderImage& image, const Oracle& oracle) {
    SCOPED_TRACE("with the tools");
    ++with_tools_;
    const std::string folder = fresh_folder();
    const DeviceFactory device = put_image(image, folder);
    Oracle known = oracle;
    use(device, folder, known, nullptr, true);
    if (HasFailure()) return;
    auto verified = verify_store(folder, /*repair=*/with_tools_ % 2 == 0, {}, device);
    ASSERT_TRUE(verified) << verified.error().message;
    EXPECT_EQ(verified->report.bad_headers, 0u);
    EXPECT_LE(verified->report.bad_payloads + verified->report.quarantined, oracle.damaged)
        << (verified->problems.empty() ? "" : verified->problems.front());
    use(device, folder, known, nullptr, false);
    if (!HasFailure()) std::filesystem::remove_all(folder);
  }

  std::string fresh_folder() {
    std::string folder = parent_.path() + "/" + std::to_string(folders_++);
    std::filesystem::create_directory(folder);
    return folder;
  }

  static constexpr std::uint64_t kFreshChain = 1'000'000;
  static constexpr std::uint64_t kToolsEvery = 400;

  PageBytes bytes_;
  TempFolder parent_;
  std::uint64_t folders_ = 0, fresh_ = 0;
  std::uint64_t states_ = 0, distinct_ = 0, points_ = 0, sessions_ = 0, pages_read_ = 0, promised_ = 0, deleted_ = 0,
                with_tools_ = 0;
};

}  // namespace tardis::testing
