// SPDX-License-Identifier: Apache-2.0
// Writers that are killed at random moments, each time in a process of its own that this one forks; what they leave is
// checked in another. Forking a small process is what makes tens of thousands of kills possible.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "torture_check.h"
#include "torture_writer.h"

namespace tardis::testing {

class TortureCampaign {
 public:
  TortureCampaign(std::string folder, std::uint64_t seed, std::string engine, std::string mode, std::uint64_t processes)
      : folder_(std::move(folder)),
        seed_(seed),
        engine_(std::move(engine)),
        mode_(std::move(mode)),
        processes_(processes),
        random_(mix(seed)),
        board_(shared_board()) {
    if (processes == 0 || processes > TortureBoard::kProcesses) die("PROCESSES: expected 1 to 16", 2);
    if (board_ == nullptr) die("no shared memory", 4);
  }
  ~TortureCampaign() { ::munmap(board_, sizeof(TortureBoard)); }
  TortureCampaign(const TortureCampaign&) = delete;
  TortureCampaign& operator=(const TortureCampaign&) = delete;

  int run(std::uint64_t kills, double seconds) {
    const std::uint64_t end = monotonic_ns() + static_cast<std::uint64_t>(seconds * 1e9);
    std::filesystem::create_directories(folder_);
    for (std::uint64_t number = 0; killed_ < kills && monotonic_ns() < end; ++number) {
      store_ = folder_ + "/" + mode_ + "-" + engine_ + "-" + std::to_string(number);
      log_ = store_ + ".log";
      store_seed_ = (seed_ * 1000 + number) * 1024;
      for (auto& word : board_->chains) word.store(0);
      const std::uint64_t last = std::min(kills, killed_ + kKillsPerStore);
      while (killed_ < last && monotonic_ns() < end) {
        if (!round(last)) return 1;
      }
      std::error_code ignored;
      std::filesystem::remove_all(store_, ignored);
      std::filesystem::remove(log_, ignored);
      std::filesystem::remove(log_ + ".gate", ignored);
    }
    return 0;
  }

 private:
  static constexpr std::uint64_t kKillsPerStore = 60;
  static constexpr unsigned kPatienceSeconds = 60;

  static TortureBoard* shared_board() {
    void* memory = ::mmap(nullptr, sizeof(TortureBoard), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<TortureBoard*>(memory);
  }

  template <class Body>
  static pid_t start(Body body) {
    std::fflush(stdout);
    const pid_t child = ::fork();
    if (child < 0) die("fork failed", 4);
    if (child != 0) return child;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // not to outlive a campaign that was stopped
    std::_Exit(body());
  }
  pid_t start_writer(std::size_t self) {
    return start([this, self] {
      TortureWriter(store_, engine_, parse_mode(mode_), store_seed_ + started_ % 1024, log_, *board_, self,
                    processes_ > 1)
          .run(3600);
      return 0;
    });
  }

  // Kills one writer after the other, those that stay going on meanwhile, then the rest at once; then the check.
  bool round(std::uint64_t last) {
    std::vector<pid_t> writers;
    for (std::size_t i = 0; i < processes_; ++i) {
      ++started_;
      writers.push_back(start_writer(i));
    }
    const std::uint64_t single = processes_ == 1 ? 0 : random_() % 8;
    const std::uint64_t left = last - killed_;
    bool kept = true;
    for (std::uint64_t i = 0; kept && i < single && i + processes_ < left; ++i) {
      sleep_somewhat();
      const std::size_t victim = random_() % processes_;
      kept = kill_writer(writers[victim]) && others_go_on(writers, victim);
      ++started_;
      writers[victim] = start_writer(victim);
    }
    sleep_somewhat();
    for (const pid_t writer : writers) kept = (writer == 0 || kill_writer(writer)) && kept;
    if (!std::filesystem::exists(store_ + "/tardis.store")) {
      std::filesystem::remove_all(store_);
      std::printf("{\"kills\": %lu, \"killed_before_creation\": 1}\n", killed_ - told_);
      told_ = killed_;
      return kept;
    }
    return kept && check(last);
  }

  void sleep_somewhat() {
    // Short and long lives: half of them hardly get the store open.
    const std::uint64_t most = random_() % 2 == 0 ? 25'000 : 110'000;
    ::usleep(static_cast<useconds_t>(1000 + random_() % most));
  }

  bool kill_writer(pid_t writer) {
    ::kill(writer, SIGKILL);
    int status = 0;
    if (::waitpid(writer, &status, 0) != writer) die("waitpid failed", 4);
    ++killed_;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return true;
    std::fprintf(stderr, "%s: a writer ended by itself, status %d\n", store_.c_str(), status);
    return false;
  }

  // A dead process must not hold up those that live.
  bool others_go_on(std::vector<pid_t>& writers, std::size_t dead) {
    std::vector<std::uint64_t> before;
    for (std::size_t i = 0; i < writers.size(); ++i) before.push_back(board_->calls[i].load());
    const std::uint64_t end = monotonic_ns() + kPatienceSeconds * 1'000'000'000ull;
    for (std::size_t i = 0; i < writers.size(); ++i) {
      while (i != dead && board_->calls[i].load() == before[i]) {
        int status = 0;
        if (::waitpid(writers[i], &status, WNOHANG) == writers[i]) {
          std::fprintf(stderr, "%s: a writer ended by itself, status %d\n", store_.c_str(), status);
          writers[i] = 0;
          return false;
        }
        if (monotonic_ns() > end) {
          std::fprintf(stderr, "%s: process %d hangs since another was killed\n", store_.c_str(), writers[i]);
          return false;
        }
        ::usleep(500);
      }
    }
    return true;
  }

  bool check(std::uint64_t last) {
    // The last check of a store closes it, so that nothing of it stays in shared memory.
    const std::uint64_t pick = killed_ >= last ? 0 : random_() % 10;
    const std::string ending = pick < 6 ? "" : pick < 9 ? "-dirty" : "-repair";
    const pid_t checker = start([&] {
      ::alarm(kPatienceSeconds);
      return check_torture(store_, engine_, parse_mode(mode_ + ending), store_seed_, log_);
    });
    int status = 0;
    if (::waitpid(checker, &status, 0) != checker) die("waitpid failed", 4);
    const bool kept = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    std::printf("{\"kills\": %lu, \"checks\": 1, \"broken\": %d}\n", killed_ - told_, kept ? 0 : 1);
    told_ = killed_;
    if (!kept) std::fprintf(stderr, "%s: the check%s ended with status %d\n", store_.c_str(), ending.c_str(), status);
    return kept;
  }

  const std::string folder_;
  const std::uint64_t seed_;
  const std::string engine_, mode_;
  const std::uint64_t processes_;
  std::mt19937_64 random_;
  TortureBoard* board_;
  std::string store_, log_;
  std::uint64_t store_seed_ = 0, started_ = 0, killed_ = 0, told_ = 0;
};

}  // namespace tardis::testing
