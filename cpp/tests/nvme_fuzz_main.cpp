// SPDX-License-Identifier: Apache-2.0
// Fuzzes the NVMe code:
//   tardis_nvme_fuzz [target=all] [seconds=10] [seed=1] [corpus=FOLDER] [keep=FOLDER] [input=FILE] [times=1] [hang=30]
// Targets: controller, queue, driver, volume, store; `all` shares the seconds among them. `corpus` has a folder of
// inputs for each target, which are executed first; `keep` is one to which the best inputs of this run are written.
// `input` executes one file, `times` over, and prints what it shows. An input that breaks something, or does not end in
// `hang` seconds, is written to the current folder and named; then the exit status is 1. Target `self` is not one of
// all: it breaks at will, to show that it is noticed.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "nvme_fuzz_controller.h"
#include "nvme_fuzz_driver.h"
#include "nvme_fuzz_queue.h"
#include "nvme_fuzz_store.h"
#include "nvme_fuzz_volume.h"

namespace {

using namespace tardis::nvme::fuzz;

template <class T>
MakeTarget maker() {
  return [] { return std::make_unique<T>(); };
}

class SelfTarget final : public Target {
 public:
  const char* name() const override { return "self"; }
  Shape shape() const override { return {1, 1, 4, {}}; }
  void make_record(Random& random, std::span<std::uint8_t> record) const override {
    record[0] = static_cast<std::uint8_t>(random());
  }
  void execute(Input input, Findings& findings) override {
    const int first = input.empty() ? 0 : input[0];
    findings.expect(first != 0x2a, "the input begins with 2a");
    while (first == 0x2b) std::this_thread::sleep_for(std::chrono::seconds(1));
    if (first == 0x2c) std::raise(SIGSEGV);
    if (first == 0x2d) std::exit(7);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::pair<std::string, MakeTarget>> targets = {
      {"controller", maker<ControllerTarget>()}, {"queue", maker<QueueTarget>()}, {"driver", maker<DriverTarget>()},
      {"volume", maker<VolumeTarget>()},         {"store", maker<StoreTarget>()}, {"self", maker<SelfTarget>()},
  };
  std::map<std::string, std::string> arguments{{"target", "all"}, {"seconds", "10"}, {"seed", "1"},  {"corpus", ""},
                                               {"keep", ""},      {"input", ""},     {"times", "1"}, {"hang", "30"}};
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const auto equals = text.find('=');
    if (equals == std::string::npos || !arguments.contains(text.substr(0, equals))) {
      stop("unknown argument '" + text + "'");
    }
    arguments[text.substr(0, equals)] = text.substr(equals + 1);
  }
  std::vector<std::pair<std::string, MakeTarget>> chosen;
  for (const auto& target : targets) {
    if ((arguments["target"] == "all" && target.first != "self") || arguments["target"] == target.first)
      chosen.push_back(target);
  }
  if (chosen.empty()) {
    std::string names = "all";
    for (const auto& target : targets) names += ", " + target.first;
    stop("unknown target '" + arguments["target"] + "'; expected one of: " + names);
  }
  std::optional<Bytes> only;
  if (!arguments["input"].empty()) {
    if (chosen.size() != 1) stop("input=FILE is for one target: name it");
    only = read_input(arguments["input"]);
  }
  Plan plan;
  plan.seconds = std::atof(arguments["seconds"].c_str()) / static_cast<double>(chosen.size());
  plan.seed = std::strtoull(arguments["seed"].c_str(), nullptr, 10);
  plan.corpus = arguments["corpus"];
  plan.keep = arguments["keep"];
  plan.times = std::strtoull(arguments["times"].c_str(), nullptr, 10);
  plan.hang_seconds = std::atof(arguments["hang"].c_str());
  for (const auto& target : chosen) {  // here, for a fault of the corpus is none of the target
    if (plan.corpus.empty() || only) break;
    for (const auto& file : list_inputs(plan.corpus / target.first)) (void)read_input(file);
  }
  bool well = true;
  for (const auto& [name, make] : chosen) well &= supervise(name.c_str(), make, plan, only);
  return well ? 0 : 1;
}
