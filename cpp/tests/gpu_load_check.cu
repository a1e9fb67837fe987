// SPDX-License-Identifier: Apache-2.0
// On a GPU: loads from pinned memory (movers, copy engines), from a live store's files and from both, each layer
// compared word for word by a stream that waits for its event alone, in pools of poison; damaged bytes, rings that
// cannot, a loader that never answers or answers nonsense, ids outside of the pools; offloads, also beside loads.
// Arguments: loads of each shape (80), a folder for the store (/dev/shm). Exit status 0: all as expected; 1: not, or a
// CUDA error; 77: no GPU here.
#include <numeric>
#include <optional>
#include <random>

#include "gpu_load_player.h"
#include "gpu_load_rig.cuh"

namespace tardis::gstore::testing {
namespace {

using gio::testing::now_ns;
using gio::testing::wait_for;

struct Asked {
  std::uint32_t pinned = 0, files = 0;
  bool use_rings = true;
  std::optional<Playing> playing;  // the loader's part
  std::uint64_t patience_ns = 5'000'000'000;
  bool may_be_bad = false;  // then each layer of a page from files is right or zeros
};

struct Outcome {
  bool good;  // as whoever asked for it would be told
  bool renew;
  std::uint32_t errors, abandoned, repaired;
  std::uint64_t wrong;
  double seconds;
};

class LoadCheck {
 public:
  LoadCheck(const LoadRigOptions& options, std::uint64_t seed)
      : rig_(options),
        random_(seed),
        expected_(mapped_array<std::uint64_t>(options.pool_pages)),
        wrong_(device_array<unsigned long long>(options.shape.layers)),
        numbers_(options.stored) {
    std::iota(numbers_.begin(), numbers_.end(), std::uint64_t{0});
    fill_pinned();
  }

  // Any mixture, with other ids each time.
  void loads(int count) {
    const std::uint32_t most = rig_.options.most_pages;
    std::uint64_t pages = 0, compared = 0;
    for (int i = 0; i < count; ++i) {
      const auto any = [&] { return static_cast<std::uint32_t>(1 + random_() % most); };
      Asked asked;
      if (i % 3 != 1) asked.pinned = any();
      if (i % 3 != 0) asked.files = any();
      const Outcome outcome = load(asked);
      expect_good(outcome, "load " + std::to_string(i));
      expect(outcome.repaired == 0, "no part that was read again", outcome.repaired);
      pages += asked.pinned + asked.files;
      compared += std::uint64_t{rig_.options.pool_pages} * rig_.options.shape.bytes() / 8;
    }
    const ObjectShape& shape = rig_.options.shape;
    std::printf("pages of %u layers x %u x %u bytes: %d loads, %llu pages landed, %llu words compared\n", shape.layers,
                shape.sides, shape.page_bytes, count, ull(pages), ull(compared));
  }

  // From pinned memory by copy engines: runs of any length, in any order.
  void runs(int count) {
    tardis_gpu_link* link = nullptr;
    check(tardis_gpu_link_create(&link), "tardis_gpu_link_create");
    std::uint64_t pages = 0, all = 0, wrong = 0;
    for (int i = 0; i < count; ++i) {
      const std::vector<tardis_gpu_load_run> runs = choose_runs(i % 3 == 0 ? 1 : 1 + i % 13);
      tardis_gpu_load_runs load = runs_of(runs);
      load.link = i % 2 == 0 ? link : nullptr;
      check(cudaMemsetAsync(wrong_.get(), 0, rig_.options.shape.layers * sizeof(unsigned long long), stream_), "wrong");
      rig_.pools.poison(stream_);
      wait_for(stream_, "poison");
      check(tardis_gpu_load_runs_enqueue(&load, stream_), "tardis_gpu_load_runs_enqueue");
      wrong += compare_layers();
      for (const tardis_gpu_load_run& run : runs) pages += run.pages;
      all += runs.size();
    }
    expect(wrong == 0, "words of loads by copy engines", wrong);
    tardis_gpu_link_counters counters{};
    check(tardis_gpu_link_count(link, TARDIS_GPU_LINK_RESTORE, &counters), "tardis_gpu_link_count");
    expect(counters.active == 0 && counters.errors == 0, "users of the link", counters.active);
    check(tardis_gpu_link_destroy(link), "tardis_gpu_link_destroy");
    std::printf("copy engines: %d loads, %llu pages in %llu runs landed\n", count, ull(pages), ull(all));
  }

  void expect_refused_runs() {
    const std::uint32_t pages = rig_.options.pool_pages;
    const tardis_gpu_load_run good{rig_.pinned_address(0), 0, 1};
    const auto refused = [&](tardis_gpu_load_run run, auto change, const char* what) {
      const std::vector<tardis_gpu_load_run> runs{good, run};
      tardis_gpu_load_runs load = runs_of(runs);
      change(load);
      expect(tardis_gpu_load_runs_enqueue(&load, stream_) == cudaErrorInvalidValue, what);
    };
    const auto same = [](auto&) {};
    rig_.pools.poison(stream_);
    wait_for(stream_, "poison");
    refused({good.object, 0, 0}, same, "a run without pages refused");
    refused({good.object, pages, 1}, same, "a run behind the pools refused");
    refused({good.object, pages - 1, 2}, same, "a run beyond the pools refused");
    refused({good.object, 0xFFFFFFFFu, 2}, same, "a run from no page refused");
    refused({0, 0, 1}, same, "a run without objects refused");
    refused(
        good, [](auto& load) { load.object_stride -= 16; }, "objects that overlap refused");
    refused(
        good, [](auto& load) { load.events = nullptr; }, "a load without events refused");
    refused(
        good, [](auto& load) { load.link_class = TARDIS_GPU_LINK_CLASSES; }, "another class refused");
    std::fill_n(expected_.get(), pages, kNobody);
    check(cudaMemsetAsync(wrong_.get(), 0, rig_.options.shape.layers * sizeof(unsigned long long), stream_), "wrong");
    for (cudaEvent_t event : rig_.events) check(cudaEventRecord(event, stream_), "cudaEventRecord");
    expect(compare_layers() == 0, "nothing that was written");
  }

  void rings_that_cannot() {
    const std::uint32_t layers = rig_.options.shape.layers;
    Asked asked;
    asked.pinned = 5;
    asked.files = 7;
    asked.use_rings = false;
    Outcome outcome = load(asked);
    expect_good(outcome, "rings that are not used");
    expect(outcome.repaired == 7 * layers, "parts by the host", outcome.repaired, 7 * layers);

    asked.use_rings = true;
    nvme::FaultRule rule;
    rule.kind = nvme::FaultKind::kStatus;
    rule.opcode = 2;
    rule.skip = 9;
    rule.count = 6;
    rig_.gpu->rig().faults().add(rule);
    outcome = load(asked);
    rig_.gpu->rig().faults().clear();
    expect_good(outcome, "commands that failed");
    expect(outcome.repaired >= 2 && outcome.repaired <= 6, "parts of 6 commands that failed", outcome.repaired);

    rig_.ring.deadline_ns = 100'000'000;
    rule.kind = nvme::FaultKind::kLostCompletion;
    rule.skip = 9;
    rule.count = 1;
    rig_.gpu->rig().faults().add(rule);
    outcome = load(asked);
    expect_good(outcome, "a completion that was lost");
    expect(outcome.renew, "queue pairs that are of no use");
    expect(outcome.repaired > layers - 3, "parts behind it", outcome.repaired, layers);
    outcome = load(asked);
    expect_good(outcome, "queue pairs that are down");
    expect(outcome.repaired > 0, "parts that were read again", outcome.repaired);
    rig_.ring.deadline_ns = rig_.options.deadline_ns;
    rig_.renew();
    outcome = load(asked);
    expect_good(outcome, "queue pairs made anew");
    expect(outcome.repaired == 0 && !outcome.renew, "no part that was read again", outcome.repaired);
    std::printf("rings that cannot, fail, end: read again by the host\n");
  }

  void damage(int times) {
    std::uint32_t told = 0;
    for (int i = 0; i < times; ++i) {
      const std::uint32_t files = rig_.options.most_pages / 2;
      choose(0, files);
      const std::uint64_t number = file_numbers_[random_() % files];
      rig_.store->corrupt(number, random_() % rig_.options.shape.bytes());
      Asked asked;
      asked.files = files;
      asked.may_be_bad = true;
      expect_pages(asked);
      const Outcome outcome = run(asked);
      expect(!outcome.good, "a load with damaged bytes that is told bad", number);
      expect(outcome.errors == 0, "no page outside and no wait without end", outcome.errors);
      expect(outcome.wrong == 0, "damaged bytes: words neither right nor zero", outcome.wrong);
      told += !outcome.good;
      expect(!rig_.store->has(number), "a damaged object that is not offered again", number);
      rig_.store->set({number});
    }
    Asked asked;
    asked.files = rig_.options.most_pages;
    expect_good(load(asked), "objects stored again");
    std::printf("damaged bytes: %u of %d loads told bad\n", told, times);
  }

  void bad_loaders() {
    Asked asked;
    asked.pinned = 5;
    asked.files = 7;
    asked.may_be_bad = true;
    asked.patience_ns = 50'000'000;
    asked.playing = Playing::kNeverReady;
    expect_abandoned(load(asked), "a loader that is never ready");
    asked.playing = Playing::kNoAnswer;
    expect_abandoned(load(asked), "a loader that does not answer");
    for (const Playing playing : {Playing::kUnknownPage, Playing::kTooMany}) {
      asked.playing = playing;
      const Outcome outcome = load(asked);
      expect(outcome.errors != 0 && outcome.abandoned == 0, "nonsense by the loader that is told", outcome.errors);
      expect(outcome.wrong == 0, "nonsense by the loader: words neither right nor zero", outcome.wrong);
    }
    asked = {};
    asked.files = 3;
    expect_good(load(asked), "a load behind bad ones");
    std::printf("loaders that never answer, or nonsense: nothing hangs, and it is told\n");
  }

  void ids_outside() {
    choose(6, 6);
    const std::uint32_t pages = rig_.options.pool_pages;
    for (const std::uint32_t i : {1u, 4u}) {
      rig_.pinned_ids[i] = i == 1 ? pages : 0xFFFFFFFFu;
      rig_.file_ids[i] = i == 1 ? 0x80000000u : pages;
    }
    Asked asked;
    asked.pinned = asked.files = 6;
    expect_pages(asked);
    const Outcome outcome = run(asked);
    expect(outcome.errors == 4, "ids outside of the pools", outcome.errors, 4);
    expect(outcome.wrong == 0, "no other page that is touched", outcome.wrong);
    std::printf("ids outside: counted, nothing else touched\n");
  }

  // Pages to objects and back; beside loads on another stream, by the arbiter's rules.
  void offloads(int count) {
    const LoadRigOptions& o = rig_.options;
    const std::uint64_t words = o.shape.bytes() / 8;
    Pools pools(o.shape, o.pool_pages);
    TransferWork work(o.shape, o.most_pages);
    const auto numbers = mapped_array<std::uint64_t>(o.pool_pages);
    const auto ids = mapped_array<std::uint32_t>(o.most_pages);
    const auto objects = mapped_array<std::uint64_t>(o.most_pages);
    const auto errors = mapped_array<std::uint32_t>(1);
    const auto memory = mapped_array<std::uint8_t>(o.shape.bytes() * o.most_pages);
    const auto expected = mapped_array<std::uint64_t>(o.most_pages);
    const auto wrong = device_array<unsigned long long>(1);
    gpu_test::Stream stream;
    tardis_gpu_link* link = nullptr;
    check(tardis_gpu_link_create(&link), "tardis_gpu_link_create");
    words_ = tardis_gpu_link_words_of(link);
    std::uint32_t outside = 0;
    for (int i = 0; i < count; ++i) {
      const auto n = static_cast<std::uint32_t>(1 + random_() % o.most_pages);
      std::vector<std::uint32_t> all(o.pool_pages), places(o.most_pages);
      std::iota(all.begin(), all.end(), 0u);
      std::iota(places.begin(), places.end(), 0u);
      std::shuffle(all.begin(), all.end(), random_);
      std::shuffle(places.begin(), places.end(), random_);
      for (std::uint32_t page = 0; page < o.pool_pages; ++page) numbers[page] = random_() % 1'000'000;
      std::fill_n(expected.get(), o.most_pages, kNobody);
      for (std::uint32_t page = 0; page < n; ++page) {
        const bool bad = random_() % 40 == 0;
        outside += bad;
        ids[page] = bad ? o.pool_pages + all[page] : all[page];
        objects[page] = reinterpret_cast<std::uint64_t>(memory.get()) + places[page] * o.shape.bytes();
        if (!bad) expected[places[page]] = numbers[all[page]];
      }
      std::memset(memory.get(), kPoison, o.shape.bytes() * o.most_pages);
      for (std::uint32_t layer = 0; layer < o.shape.layers; ++layer) {
        fill_layer<<<64, 256, 0, stream>>>(pools.args, layer, numbers.get());
      }
      tardis_gpu_offload offload{};
      offload.pools = pools.args;
      offload.work = work.args;
      offload.ids = ids.get();
      offload.objects = objects.get();
      offload.pages = n;
      offload.ctas = 1 + static_cast<std::uint32_t>(i) % 2;
      offload.errors = errors.get();
      offload.traffic = {words_, TARDIS_GPU_LINK_WRITE_BEHIND, TARDIS_GPU_LINK_OUT, i % 2 == 0 ? 0u : 4u};
      check(tardis_gpu_offload_enqueue(&offload, stream), "tardis_gpu_offload_enqueue");
      Asked asked;
      asked.pinned = 1 + static_cast<std::uint32_t>(random_() % o.most_pages);
      asked.files = 1 + static_cast<std::uint32_t>(random_() % o.most_pages);
      expect_good(load(asked), "a load beside an offload");
      compare_objects<<<64, 256, 0, stream>>>(reinterpret_cast<const unsigned long long*>(memory.get()), o.most_pages,
                                              words, expected.get(), wrong.get());
      wait_for(stream, "offload");
    }
    unsigned long long bad = 0;
    check(cudaMemcpy(&bad, wrong.get(), sizeof bad, cudaMemcpyDeviceToHost), "wrong words");
    expect(bad == 0, "words of offloaded objects", bad);
    expect(errors[0] == outside, "ids of offloads outside of the pools", errors[0], outside);
    for (const std::uint32_t link_class : {TARDIS_GPU_LINK_RESTORE, TARDIS_GPU_LINK_WRITE_BEHIND}) {
      tardis_gpu_link_counters counters{};
      check(tardis_gpu_link_count(link, link_class, &counters), "tardis_gpu_link_count");
      expect(counters.active == 0 && counters.errors == 0 && counters.bytes > 0, "users of the link", counters.active);
    }
    words_ = nullptr;
    check(tardis_gpu_link_destroy(link), "tardis_gpu_link_destroy");
    std::printf("%d offloads beside loads: every word right, %u ids outside counted\n", count, outside);
  }

  void expect_refusals() {
    choose(1, 1);
    const auto refused = [&](auto change, const char* what) {
      struct tardis_gpu_load load = rig_.load_of(1, 1);
      change(load);
      expect(tardis_gpu_load_enqueue(&load, stream_) == cudaErrorInvalidValue, what);
    };
    refused([](auto& load) { load.ctas = 5; }, "five CTAs refused");
    refused([](auto& load) { load.traffic.direction = TARDIS_GPU_LINK_OUT; }, "a load going out refused");
    refused([&](auto& load) { load.pinned_pages = rig_.options.most_pages + 1; }, "too many pages refused");
    refused([&](auto& load) { load.file_pages = rig_.options.most_pages + 1; }, "too many files refused");
    refused([](auto& load) { load.ring = nullptr; }, "files without rings refused");
    refused([](auto& load) { load.board = nullptr; }, "a load without a board refused");
    refused([](auto& load) { load.shape.commands_per_page += 1; }, "other commands refused");
    refused([](auto& load) { load.pools.page_bytes[0] += 16; }, "other pages refused");
    wait_for(stream_, "nothing enqueued");
  }

 private:
  static unsigned long long ull(std::uint64_t value) { return value; }

  void fill_pinned() {
    const std::uint64_t words = rig_.options.shape.bytes() / 8;
    fill_objects<<<64, 256, 0, stream_>>>(reinterpret_cast<unsigned long long*>(rig_.pinned.get()), rig_.options.pinned,
                                          words, LoadRig::kPinnedNumbers);
    wait_for(stream_, "objects in pinned memory");
  }
  // Pages of the pools and objects, all different.
  void choose(std::uint32_t pinned, std::uint32_t files) {
    std::vector<std::uint32_t> ids(rig_.options.pool_pages), objects(rig_.options.pinned);
    std::iota(ids.begin(), ids.end(), 0u);
    std::iota(objects.begin(), objects.end(), 0u);
    std::shuffle(ids.begin(), ids.end(), random_);
    std::shuffle(objects.begin(), objects.end(), random_);
    std::shuffle(numbers_.begin(), numbers_.end(), random_);
    for (std::uint32_t i = 0; i < pinned; ++i) {
      rig_.pinned_ids[i] = ids[i];
      rig_.pinned_objects[i] = rig_.pinned_address(objects[i]);
    }
    chosen_objects_ = objects;
    for (std::uint32_t i = 0; i < files; ++i) rig_.file_ids[i] = ids[pinned + i];
    file_numbers_.assign(numbers_.begin(), numbers_.begin() + files);
  }
  void expect_pages(const Asked& asked) {
    std::fill_n(expected_.get(), rig_.options.pool_pages, kNobody);
    for (std::uint32_t i = 0; i < asked.pinned; ++i) {
      if (rig_.pinned_ids[i] < rig_.options.pool_pages) {
        expected_[rig_.pinned_ids[i]] = LoadRig::kPinnedNumbers + chosen_objects_[i];
      }
    }
    for (std::uint32_t i = 0; i < asked.files; ++i) {
      if (rig_.file_ids[i] < rig_.options.pool_pages) {
        expected_[rig_.file_ids[i]] = file_numbers_[i] + (asked.may_be_bad ? kOrZeros : 0);
      }
    }
  }
  // Starts of pieces of these lengths among `total` places, in any order and with gaps or without.
  std::vector<std::uint32_t> starts(const std::vector<std::uint32_t>& lengths, std::uint32_t total) {
    std::vector<std::size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random_);
    std::uint32_t at = 0, spare = total - std::accumulate(lengths.begin(), lengths.end(), 0u);
    std::vector<std::uint32_t> all(lengths.size());
    for (const std::size_t i : order) {
      const auto gap = static_cast<std::uint32_t>(random_() % 2 == 0 ? 0 : random_() % (spare + 1));
      all[i] = at + gap;
      at += gap + lengths[i];
      spare -= gap;
    }
    return all;
  }
  std::vector<tardis_gpu_load_run> choose_runs(std::uint32_t longest) {
    const std::uint32_t most = std::min(rig_.options.pinned, rig_.options.pool_pages);
    std::vector<std::uint32_t> lengths;
    for (std::uint32_t left = 1 + static_cast<std::uint32_t>(random_() % most); left > 0; left -= lengths.back()) {
      lengths.push_back(1 + static_cast<std::uint32_t>(random_() % std::min(longest, left)));
    }
    const auto objects = starts(lengths, rig_.options.pinned), pages = starts(lengths, rig_.options.pool_pages);
    std::fill_n(expected_.get(), rig_.options.pool_pages, kNobody);
    std::vector<tardis_gpu_load_run> runs;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      runs.push_back({rig_.pinned_address(objects[i]), pages[i], lengths[i]});
      for (std::uint32_t page = 0; page < lengths[i]; ++page) {
        expected_[pages[i] + page] = LoadRig::kPinnedNumbers + objects[i] + page;
      }
    }
    return runs;
  }
  tardis_gpu_load_runs runs_of(const std::vector<tardis_gpu_load_run>& runs) const {
    return {rig_.pools.args,
            runs.data(),
            rig_.options.shape.bytes(),
            nullptr,
            reinterpret_cast<void* const*>(rig_.events.data()),
            static_cast<std::uint32_t>(runs.size()),
            TARDIS_GPU_LINK_RESTORE};
  }
  // Each layer behind its event alone; the words that are wrong.
  std::uint64_t compare_layers() {
    const std::uint32_t layers = rig_.options.shape.layers;
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      check(cudaStreamWaitEvent(reader_, rig_.events[layer]), "cudaStreamWaitEvent");
      compare_layer<<<48, 256, 0, reader_>>>(rig_.pools.args, layer, expected_.get(), wrong_.get() + layer);
    }
    check(cudaGetLastError(), "compare");
    wait_for(stream_, "load");
    wait_for(reader_, "its reader");
    std::uint64_t all = 0;
    for (const unsigned long long wrong : copy(wrong_.get(), layers)) all += wrong;
    return all;
  }
  Outcome load(const Asked& asked) {
    choose(asked.pinned, asked.files);
    expect_pages(asked);
    return run(asked);
  }
  Outcome run(const Asked& asked) {
    const std::uint32_t layers = rig_.options.shape.layers;
    check(cudaMemsetAsync(wrong_.get(), 0, layers * sizeof(unsigned long long), stream_), "wrong");
    rig_.pools.poison(stream_);
    wait_for(stream_, "poison");
    rig_.clear_board();
    struct tardis_gpu_load load = rig_.load_of(asked.pinned, asked.files);
    load.patience_ns = asked.patience_ns;
    load.traffic.words = words_;
    const std::uint64_t begin = now_ns();
    std::optional<LoadPlayer> player;
    tardis_load* loading = nullptr;
    if (asked.playing.has_value()) {
      player.emplace(*asked.playing, rig_.shape, rig_.layout, rig_.board_memory.get(), rig_.staging);
    } else if (asked.files != 0) {
      loading = rig_.begin(file_numbers_, asked.use_rings);
    }
    check(tardis_gpu_load_enqueue(&load, stream_), "tardis_gpu_load_enqueue");
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      check(cudaStreamWaitEvent(reader_, rig_.events[layer]), "cudaStreamWaitEvent");
      compare_layer<<<48, 256, 0, reader_>>>(rig_.pools.args, layer, expected_.get(), wrong_.get() + layer);
    }
    check(cudaGetLastError(), "compare");
    wait_for(stream_, "load");
    wait_for(reader_, "its reader");
    Outcome outcome{};
    outcome.seconds = static_cast<double>(now_ns() - begin) * 1e-9;
    outcome.errors = rig_.board()->errors;
    outcome.abandoned = rig_.board()->abandoned;
    outcome.good = outcome.errors == 0;
    if (loading != nullptr) {
      const tardis_load_result result = rig_.end(loading);
      outcome.good = result.good != 0;
      outcome.renew = result.renew != 0;
      outcome.repaired = result.repaired_parts;
      expect(result.pages == asked.files, "pages of a load", result.pages, asked.files);
      expect(!outcome.good || outcome.errors == 0, "no load told good with errors", outcome.errors);
    }
    for (const unsigned long long wrong : copy(wrong_.get(), layers)) outcome.wrong += wrong;
    return outcome;
  }

  void expect_good(const Outcome& outcome, const std::string& what) {
    expect(outcome.good, what + ": good", outcome.errors);
    expect(outcome.wrong == 0, what + ": words that are wrong", outcome.wrong);
  }
  void expect_abandoned(const Outcome& outcome, const std::string& what) {
    expect(outcome.errors == 1 && outcome.abandoned == 1, what + ": one wait without end", outcome.errors, 1);
    expect(!outcome.good, what + ": told bad");
    expect(outcome.wrong == 0, what + ": words neither right nor zero", outcome.wrong);
    expect(outcome.seconds > 0.05 && outcome.seconds < 1, what + ": milliseconds",
           static_cast<unsigned long long>(outcome.seconds * 1e3), 50);
  }

  LoadRig rig_;
  std::mt19937_64 random_;
  MappedArray<std::uint64_t> expected_;
  DeviceArray<unsigned long long> wrong_;
  std::vector<std::uint64_t> numbers_, file_numbers_;
  std::vector<std::uint32_t> chosen_objects_;
  tardis_gpu_link_words* words_ = nullptr;
  gpu_test::Stream stream_, reader_;
};

}  // namespace
}  // namespace tardis::gstore::testing

int main(int argc, char** argv) {
  using namespace tardis::gstore::testing;
  if (!has_gpu()) return kSkipped;
  const int loads = argc > 1 ? std::atoi(argv[1]) : 80;
  const std::uint64_t seed = tardis::gpu_test::fresh_seed();
  LoadRigOptions options;
  if (argc > 2) options.parent = argv[2];
  {
    options.shape = {8, 2, 16 << 10};
    options.command_bytes = 32 << 10;
    options.pool_pages = 128;
    LoadCheck check(options, seed);
    check.expect_refusals();
    check.expect_refused_runs();
    check.loads(loads);
    check.runs(loads);
    check.rings_that_cannot();
    check.damage(12);
    check.bad_loaders();
    check.ids_outside();
    check.offloads(30);
  }
  {
    options.shape = {6, 1, 36 << 10};  // as MLA has it; three commands a page, the last one shorter
    options.command_bytes = 16 << 10;
    LoadCheck check(options, seed + 1);
    check.loads(loads);
    check.runs(loads);
    check.rings_that_cannot();
    check.damage(4);
    check.offloads(10);
  }
  {
    options.shape = {32, 2, 128 << 10};  // of Llama-3.1-8B, 64 tokens
    options.command_bytes = 256 << 10;
    options.stored = options.pinned = 40;
    options.pool_pages = 80;
    options.most_pages = 32;
    LoadCheck check(options, seed + 2);
    check.loads(loads);
    check.runs(loads);
    check.offloads(4);
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
