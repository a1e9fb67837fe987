// SPDX-License-Identifier: Apache-2.0
// tardis_torture: uses a store in every way at once until it is killed, and says afterwards whether the store kept its
// word. bench/kill_campaign.py drives it. Only the C ABI is used.
//
//   tardis_torture write FOLDER SEED ENGINE LOG MODE
//     until killed, or for SECONDS (the environment variable TORTURE_SECONDS)
//   tardis_torture check FOLDER SEED ENGINE LOG MODE
//     one line of JSON; exit status 1 if a promise was broken
//   tardis_torture campaign FOLDER SEED ENGINE MODE KILLS PROCESSES SECONDS
//     writes and checks in turn, in processes of its own that it forks and kills: lines of JSON; ends after KILLS, or
//     after SECONDS, or with exit status 1 at the first broken promise. Stores and logs are made in FOLDER; what broke
//     is left there.
//
// ENGINE: io_uring, sync, or auto. MODE: `keep` (a capacity that never evicts: what was flushed must be there) or
// `evict` (two page sizes in a store that is always full: only wrong bytes and lost slots count). With `-dirty` behind
// it, `check` leaves the store unclosed; with `-repair`, it ends with tardis_verify(repair).
#include "torture_campaign.h"

using namespace tardis::testing;

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const auto number = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
  if (what == "campaign" && argc == 9) {
    return TortureCampaign(argv[2], number(3), argv[4], argv[5], number(7))
        .run(number(6), std::strtod(argv[8], nullptr));
  }
  if ((what != "write" && what != "check") || argc != 7) {
    die("usage: tardis_torture write|check FOLDER SEED ENGINE LOG keep|evict[-dirty|-repair]\n"
        "       tardis_torture campaign FOLDER SEED ENGINE keep|evict KILLS PROCESSES SECONDS",
        2);
  }
  const Mode mode = parse_mode(argv[6]);
  if (what == "check") return check_torture(argv[2], argv[4], mode, number(3), argv[5]);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // not to outlive a campaign that was stopped
  const char* seconds = std::getenv("TORTURE_SECONDS");
  const auto board = std::make_unique<TortureBoard>();
  TortureWriter(argv[2], argv[4], mode, number(3), argv[5], *board, 0, false)
      .run(seconds != nullptr ? std::strtod(seconds, nullptr) : 3600);
  return 0;
}
