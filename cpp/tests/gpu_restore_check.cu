// SPDX-License-Identifier: Apache-2.0
// On a GPU: restores from a live store, as one graph that is replayed with other keys: hits in HBM, in pinned memory,
// in the store's files, and unknown pages that are computed and stored. Meanwhile the store drops objects and puts
// others in their place, bytes of its files change, and pages are moved out of HBM. Every page is compared with what
// its key stands for. Arguments: replays (300), a folder for the store (/dev/shm). Exit status 0: all as expected; 1:
// not, or a CUDA error; 77: no GPU here.
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "gpu_restore_rig.cuh"

namespace tardis::gstore::testing {
namespace {

struct Known {
  std::uint64_t handle, generation;
};

class RestoreCheck {
 public:
  RestoreCheck(const RestoreRigOptions& options, std::uint64_t seed)
      : rig_(options), random_(seed), universe_(options.objects / 2) {
    const std::uint32_t most = options.max_pages;
    keys_ = mapped_array<Key>(most);
    numbers_ = mapped_array<std::uint64_t>(most);
    count_ = mapped_array<std::uint32_t>(1);
    results_ = mapped_array<tardis_gpu_restore_result>(most);
    wrong_ = mapped_array<std::uint32_t>(most);
    staging_ = mapped_array<std::uint8_t>(options.shape.bytes() * most);
    want_ = mapped_array<std::uint32_t>(3);
    scratch_ = device_array<std::uint8_t>(tardis_gpu_blocks_scratch_bytes());
    restore_graph_ = capture([&] { enqueue_restore(); });
    evict_graph_ = capture([&] { enqueue_evictions(); });
    cut_graph_ = capture([&] { enqueue_cut(); });
    std::vector<std::uint64_t> stored(universe_ * 3 / 4);
    for (std::uint64_t number = 0; number < stored.size(); ++number) stored[number] = number;
    rig_.store->set(stored);
    for (const std::uint64_t number : stored) intact_.insert(number);
    mirror();
    expect(known_.size() == stored.size(), "mirrored objects", known_.size(), stored.size());
  }
  ~RestoreCheck() {
    check(cudaGraphExecDestroy(restore_graph_), "cudaGraphExecDestroy");
    check(cudaGraphExecDestroy(evict_graph_), "cudaGraphExecDestroy");
    check(cudaGraphExecDestroy(cut_graph_), "cudaGraphExecDestroy");
  }

  void run(int replays) {
    for (int replay = 0; replay < replays; ++replay) {
      if (replay % 4 == 1) disturb();
      if (replay % 10 == 6) cut_short();
      restore();
      if (replay % 4 == 3) mirror();
      if (replay % 2 == 0) evict();
    }
    expect_no_name();
    tardis_gpu_restore_counts counts{};
    check(cudaMemcpy(&counts, tardis_gpu_restore_counts_of(&rig_.restore), sizeof counts, cudaMemcpyDeviceToHost),
          "counts");
    for (int s = 0; s < TARDIS_GPU_SOURCES; ++s) {
      expect(counts.sources[s] == sources_[s], "counter of source " + std::to_string(s), counts.sources[s],
             sources_[s]);
      if (s != TARDIS_GPU_SOURCE_MOVING)
        expect(sources_[s] > 100, "answers of source " + std::to_string(s), sources_[s]);
    }
    for (int o = 0; o < TARDIS_GPU_RESTORE_OUTCOMES; ++o) {
      expect(counts.outcomes[o] == outcomes_[o], "counter of outcome " + std::to_string(o), counts.outcomes[o],
             outcomes_[o]);
    }
    expect(outcomes_[TARDIS_GPU_RESTORE_FAILED] == cut_, "no failed reads but those cut short",
           outcomes_[TARDIS_GPU_RESTORE_FAILED], cut_);
    expect(cut_drams_ > 0 && cut_drams_ < cut_, "pages of both kinds that were cut short", cut_drams_, cut_);
    expect(outcomes_[TARDIS_GPU_RESTORE_LATER] == 0, "nothing that is on its way", outcomes_[TARDIS_GPU_RESTORE_LATER]);
    expect(rig_.attached > 0, "pages that were in memory when the store got them", rig_.attached);
    expect(damaged_corrupt_ > 0, "corrupt pages that were asked for", damaged_corrupt_);
    expect(damaged_gone_ > 0, "pages whose slot has another object", damaged_gone_);
    const std::string complaints = rig_.gpu->rig().violations();
    expect(complaints.empty(), complaints);
    const ObjectShape& shape = rig_.options.shape;
    std::printf(
        "pages of %u layers x %u x %u bytes, %d replays: %llu hits in HBM, %llu in pinned memory, %llu in files, %llu "
        "misses; landed %llu, new %llu, no room %llu, damaged %llu (%llu corrupt, %llu replaced in the store); "
        "%llu pages stored (%llu still in memory when the mirror saw them), %llu compared\n",
        shape.layers, shape.sides, shape.page_bytes, replays, ull(sources_[0]), ull(sources_[1]), ull(sources_[2]),
        ull(sources_[3]), ull(outcomes_[1]), ull(outcomes_[2]), ull(outcomes_[4]), ull(outcomes_[5]),
        ull(damaged_corrupt_), ull(damaged_gone_), ull(persisted_), ull(rig_.attached), ull(compared_));
  }

 private:
  static unsigned long long ull(std::uint64_t value) { return value; }

  template <class Enqueue>
  cudaGraphExec_t capture(Enqueue enqueue) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue();
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return exec;
  }
  PageWords words() const {
    return {results_.get(),          count_.get(),      numbers_.get(), rig_.key_layers.get(),
            rig_.value_layers.get(), rig_.options.shape};
  }
  void enqueue_restore() {
    const tardis_gpu_restore* const r = &rig_.restore;
    check(tardis_gpu_restore_begin(r, keys_.get(), count_.get(), results_.get(), stream_), "tardis_gpu_restore_begin");
    poison_pages<<<64, 256, 0, stream_>>>(words());
    rig_.layers(stream_);
    check(tardis_gpu_restore_end(r, keys_.get(), count_.get(), results_.get(), stream_), "tardis_gpu_restore_end");
    compute_pages<<<64, 256, 0, stream_>>>(words());
    check(tardis_gpu_restore_commit(r, keys_.get(), stream_), "tardis_gpu_restore_commit");
    for (std::uint32_t layer = 0; layer < rig_.options.shape.layers; ++layer) {
      check(tardis_gpu_restore_copy_new(r, layer, reinterpret_cast<std::uint64_t>(staging_.get()),
                                        rig_.options.shape.bytes(), rig_.options.ctas, stream_),
            "tardis_gpu_restore_copy_new");
    }
    compare_pages<<<64, 256, 0, stream_>>>(words(), wrong_.get());
    check(cudaGetLastError(), "launch");
  }
  // Without the last layer, and nothing is computed: as where enqueuing a layer failed.
  void enqueue_cut() {
    const tardis_gpu_restore* const r = &rig_.restore;
    check(tardis_gpu_restore_begin(r, keys_.get(), count_.get(), results_.get(), stream_), "tardis_gpu_restore_begin");
    poison_pages<<<64, 256, 0, stream_>>>(words());
    rig_.layers(stream_, rig_.options.shape.layers - 1);
    check(tardis_gpu_restore_end(r, keys_.get(), count_.get(), results_.get(), stream_), "tardis_gpu_restore_end");
    compare_pages<<<64, 256, 0, stream_>>>(words(), wrong_.get());
    check(cudaGetLastError(), "launch");
  }
  void enqueue_evictions() {
    const tardis_gpu_restore* const r = &rig_.restore;
    check(tardis_gpu_restore_to_files(r, TARDIS_GPU_DRAM, &want_[0], 2, scratch_.get(), stream_), "to_files");
    check(tardis_gpu_restore_to_dram(r, &want_[1], 2, scratch_.get(), rig_.options.ctas, stream_), "to_dram");
    check(tardis_gpu_restore_to_files(r, TARDIS_GPU_HBM, &want_[2], 2, scratch_.get(), stream_), "to_files");
  }

  // Where the block table has this object: a source.
  int source_of(std::uint64_t number, const std::vector<std::uint64_t>& rows) const {
    const auto known = known_.find(number);
    if (known == known_.end()) return TARDIS_GPU_SOURCE_MISS;
    const std::uint32_t row = number_of(known->second.handle);
    const Row found{rows[2 * row], rows[2 * row + 1]};
    if (!is_row_of(found, known->second.handle)) return TARDIS_GPU_SOURCE_MISS;
    if (moving(found)) return TARDIS_GPU_SOURCE_MOVING;
    return static_cast<int>(tier_of(rig_.blocks.table, block_of(found)));
  }

  void mirror() {
    const MirrorBatch changes = rig_.update(stream_);
    const auto number_of_key = [&](const tardis_gpu_index_entry& entry) {
      const auto found = numbers_of_keys_.find(entry.key[0]);
      return found == numbers_of_keys_.end() ? ~std::uint64_t{0} : found->second;
    };
    if (numbers_of_keys_.empty()) {
      for (std::uint64_t number = 0; number < universe_; ++number) numbers_of_keys_[key_of(number).word[0]] = number;
      for (std::uint64_t number = 0; number < 4 * universe_; ++number) {
        numbers_of_keys_[key_of(kFillers + number).word[0]] = kFillers + number;
      }
    }
    for (const auto& erase : changes.erases) {
      const std::uint64_t number = number_of_key(erase);
      const auto known = known_.find(number);
      if (known != known_.end() && known->second.generation <= erase.generation) known_.erase(known);
    }
    for (const auto& put : changes.puts) {
      const std::uint64_t number = number_of_key(put);
      expect(number != ~std::uint64_t{0}, "an object that was stored");
      known_[number] = {put.location, put.generation};
    }
    gone_.clear();
  }

  // What happens to a store between two updates of its mirror.
  void disturb() {
    std::vector<std::uint64_t> fillers;
    for (int i = 0; i < 12; ++i) {
      const std::uint64_t number = random_() % universe_;
      if (intact_.count(number) == 0) continue;
      if (i % 3 == 0) {
        rig_.store->corrupt(number, random_() % rig_.options.shape.bytes());
        corrupt_.insert(number);
      } else {
        rig_.store->remove(number);
        gone_.insert(number);
        fillers.push_back(kFillers + next_filler_++);
      }
      intact_.erase(number);
    }
    // Others take the slots that have become free, if they do not take some that were free before.
    for (int i = 0; i < 4; ++i) fillers.push_back(kFillers + next_filler_++);
    rig_.store->set(fillers);
    for (std::size_t i = 0; i + 1 < fillers.size(); i += 2) rig_.store->remove(fillers[i]);
  }

  void restore() {
    const std::uint32_t n = 1 + static_cast<std::uint32_t>(random_() % rig_.options.max_pages);
    std::set<std::uint64_t> chosen;
    for (const std::uint64_t number : corrupt_) {
      if (chosen.size() < n / 8) chosen.insert(number);
    }
    for (const std::uint64_t number : gone_) {
      if (chosen.size() < n / 4) chosen.insert(number);
    }
    while (chosen.size() < n) chosen.insert(random_() % 3 == 0 ? random_() % universe_ : random_() % (universe_ / 4));
    std::vector<std::uint64_t> asked(chosen.begin(), chosen.end());
    std::shuffle(asked.begin(), asked.end(), random_);
    for (std::uint32_t i = 0; i < n; ++i) {
      keys_[i] = key_of(asked[i]);
      numbers_[i] = asked[i];
    }
    count_[0] = n;
    std::memset(results_.get(), 0xEE, sizeof(tardis_gpu_restore_result) * rig_.options.max_pages);
    std::memset(wrong_.get(), 0, sizeof(std::uint32_t) * rig_.options.max_pages);
    std::memset(staging_.get(), 0xEE, rig_.options.shape.bytes() * rig_.options.max_pages);
    const auto rows = copy(rig_.blocks.table.rows, 2 * std::size_t{rig_.options.rows});
    check(cudaGraphLaunch(restore_graph_, stream_), "cudaGraphLaunch");
    gio::testing::wait_for(stream_, "restore");

    std::vector<std::uint64_t> held, fresh;
    for (std::uint32_t i = 0; i < n; ++i) {
      const tardis_gpu_restore_result& result = results_[i];
      const std::uint64_t number = asked[i];
      const int source = source_of(number, rows);
      expect(static_cast<int>(result.source) == source, "source of a key", result.source, source);
      if (result.outcome >= TARDIS_GPU_RESTORE_OUTCOMES) {
        expect(false, "an outcome", result.outcome);
        continue;
      }
      ++sources_[source];
      ++outcomes_[result.outcome];
      const bool has_page = result.outcome <= TARDIS_GPU_RESTORE_NEW;
      expect(has_page == (result.page < rig_.options.hbm), "a page where there is one", result.page);
      expect(wrong_[i] == 0, "no word of a page that is wrong", wrong_[i]);
      compared_ += has_page;
      if (has_page) held.push_back(result.handle);
      const bool bad = corrupt_.count(number) != 0, gone = gone_.count(number) != 0;
      if (source == TARDIS_GPU_SOURCE_HBM) expect(result.outcome == TARDIS_GPU_RESTORE_HIT, "a hit", result.outcome);
      if (source == TARDIS_GPU_SOURCE_DRAM) {
        expect(result.outcome == TARDIS_GPU_RESTORE_LANDED || result.outcome == TARDIS_GPU_RESTORE_NO_ROOM,
               "landed from pinned memory", result.outcome);
      }
      if (source == TARDIS_GPU_SOURCE_FILE && result.outcome != TARDIS_GPU_RESTORE_NO_ROOM) {
        if (bad) {
          expect(result.outcome == TARDIS_GPU_RESTORE_DAMAGED, "a corrupt page, not served", result.outcome);
        } else if (!gone) {
          expect(result.outcome == TARDIS_GPU_RESTORE_LANDED, "landed from a file", result.outcome);
        }
      }
      if (result.outcome == TARDIS_GPU_RESTORE_DAMAGED) {
        expect(bad || gone, "a page that was damaged", number);
        (bad ? damaged_corrupt_ : damaged_gone_) += 1;
        known_.erase(number);
      }
      if (source == TARDIS_GPU_SOURCE_MISS) {
        expect(result.outcome == TARDIS_GPU_RESTORE_NEW || result.outcome == TARDIS_GPU_RESTORE_NO_ROOM, "a new page",
               result.outcome);
      }
      if (result.outcome == TARDIS_GPU_RESTORE_NEW) {
        known_[number] = {result.handle, 0};
        fresh.push_back(number);
      }
    }
    persist(fresh);
    rig_.unref(held, stream_);
    std::set<std::uint64_t> pages;
    for (std::uint32_t i = 0; i < n; ++i) {
      if (results_[i].outcome <= TARDIS_GPU_RESTORE_NEW) {
        expect(pages.insert(results_[i].page).second, "a page that no other key has", results_[i].page);
      }
    }
  }

  // Nothing is landed of which a layer is missing: pages stay where they are, without a reference.
  void cut_short() {
    std::set<std::uint64_t> chosen;
    while (chosen.size() < rig_.options.max_pages / 4) {
      const std::uint64_t number = random_() % universe_;
      if (corrupt_.count(number) == 0 && gone_.count(number) == 0) chosen.insert(number);
    }
    const std::vector<std::uint64_t> asked(chosen.begin(), chosen.end());
    for (std::size_t i = 0; i < asked.size(); ++i) {
      keys_[i] = key_of(asked[i]);
      numbers_[i] = asked[i];
    }
    count_[0] = static_cast<std::uint32_t>(asked.size());
    std::memset(wrong_.get(), 0, sizeof(std::uint32_t) * rig_.options.max_pages);
    const auto before = copy(rig_.blocks.table.rows, 2 * std::size_t{rig_.options.rows});
    check(cudaGraphLaunch(cut_graph_, stream_), "cudaGraphLaunch");
    gio::testing::wait_for(stream_, "restore without its last layer");
    const auto after = copy(rig_.blocks.table.rows, 2 * std::size_t{rig_.options.rows});
    std::vector<std::uint64_t> held;
    for (std::size_t i = 0; i < asked.size(); ++i) {
      const tardis_gpu_restore_result& result = results_[i];
      const int source = source_of(asked[i], before);
      expect(static_cast<int>(result.source) == source, "source of a key", result.source, source);
      if (result.outcome >= TARDIS_GPU_RESTORE_OUTCOMES) {
        expect(false, "an outcome", result.outcome);
        continue;
      }
      ++sources_[source];
      ++outcomes_[result.outcome];
      if (result.outcome == TARDIS_GPU_RESTORE_HIT) {
        expect(wrong_[i] == 0, "no word of a page that is wrong", wrong_[i]);
      }
      if (result.outcome == TARDIS_GPU_RESTORE_HIT || result.outcome == TARDIS_GPU_RESTORE_NEW) {
        held.push_back(result.handle);  // new ones are never committed
        continue;
      }
      expect(result.page == kNone && result.handle == kNone, "neither page nor reference", result.page, result.handle);
      if (source != TARDIS_GPU_SOURCE_DRAM && source != TARDIS_GPU_SOURCE_FILE) continue;
      const bool full = result.outcome == TARDIS_GPU_RESTORE_NO_ROOM;
      expect(full || result.outcome == TARDIS_GPU_RESTORE_FAILED, "not landed", result.outcome);
      cut_ += !full;
      cut_drams_ += !full && source == TARDIS_GPU_SOURCE_DRAM;
      const std::uint32_t row = number_of(known_.at(asked[i]).handle);
      expect(after[2 * row] == before[2 * row], "a row that is where it was", after[2 * row], before[2 * row]);
      expect(refs_of({after[2 * row], after[2 * row + 1]}) == 0, "a row without a reference", row);
    }
    rig_.unref(held, stream_);
  }

  // Rows that were never committed have no name; when they left, nothing came into the index for them.
  void expect_no_name() {
    const auto answers = mapped_array<tardis_gpu_index_answer>(1);
    const auto ticket = device_array<tardis_gpu_ticket>(1);
    keys_[0] = Key{};
    count_[0] = 1;
    check(tardis_gpu_index_lookup(&rig_.table.index, keys_.get(), count_.get(), 1, 0, answers.get(), ticket.get(),
                                  nullptr, 0, stream_),
          "tardis_gpu_index_lookup");
    gio::testing::wait_for(stream_, "lookup");
    expect(answers[0].status != TARDIS_GPU_INDEX_FOUND, "nothing under a key of zeros", answers[0].location);
  }

  // By the host, from pinned memory: some of the new pages; those whose stored copy is corrupt are stored anew.
  void persist(const std::vector<std::uint64_t>& fresh) {
    const std::uint64_t bytes = rig_.options.shape.bytes();
    std::vector<std::uint64_t> numbers, addresses;
    for (std::size_t k = 0; k < fresh.size(); ++k) {
      const auto* const at = reinterpret_cast<const std::uint64_t*>(staging_.get() + k * bytes);
      for (std::uint64_t w = 0; w < bytes / 8; w += 61) {
        expect(at[w] == object_word(fresh[k], w), "bytes of a new page in pinned memory", k);
      }
      if (fresh[k] % 3 == 0 || rig_.store->has(fresh[k])) continue;
      if (fresh[k] % 2 == 0) rig_.store->expect(fresh[k], known_.at(fresh[k]).handle);
      numbers.push_back(fresh[k]);
      addresses.push_back(reinterpret_cast<std::uint64_t>(at));
      intact_.insert(fresh[k]);
      corrupt_.erase(fresh[k]);
    }
    rig_.store->set_from(numbers, addresses);
    persisted_ += numbers.size();
    for (std::size_t i = 0; i < numbers.size(); i += 5) {
      expect(rig_.store->get(numbers[i]), "a new page in the store", numbers[i]);
    }
  }

  void evict() {
    want_[0] = static_cast<std::uint32_t>(random_() % 60);
    want_[1] = static_cast<std::uint32_t>(random_() % rig_.options.max_pages);
    want_[2] = static_cast<std::uint32_t>(random_() % rig_.options.max_pages);
    check(cudaGraphLaunch(evict_graph_, stream_), "cudaGraphLaunch");
    gio::testing::wait_for(stream_, "evictions");
  }

  static constexpr std::uint64_t kFillers = 1u << 30;

  RestoreRig rig_;
  std::mt19937_64 random_;
  const std::uint64_t universe_;
  gpu_test::Stream stream_;
  MappedArray<Key> keys_;
  MappedArray<std::uint64_t> numbers_;
  MappedArray<std::uint32_t> count_, wrong_, want_;
  MappedArray<tardis_gpu_restore_result> results_;
  MappedArray<std::uint8_t> staging_;
  DeviceArray<std::uint8_t> scratch_;
  cudaGraphExec_t restore_graph_ = nullptr, evict_graph_ = nullptr, cut_graph_ = nullptr;

  std::map<std::uint64_t, Known> known_;  // what the index says
  std::map<std::uint64_t, std::uint64_t> numbers_of_keys_;
  std::set<std::uint64_t> intact_, corrupt_, gone_;  // stored; damaged there; removed since the mirror's last update
  std::uint64_t next_filler_ = 0;
  std::uint64_t sources_[TARDIS_GPU_SOURCES] = {}, outcomes_[TARDIS_GPU_RESTORE_OUTCOMES] = {};
  std::uint64_t cut_ = 0, cut_drams_ = 0;  // that were not landed; those from pinned memory
  std::uint64_t persisted_ = 0, compared_ = 0, damaged_corrupt_ = 0, damaged_gone_ = 0;
};

}  // namespace
}  // namespace tardis::gstore::testing

int main(int argc, char** argv) {
  using namespace tardis::gstore::testing;
  if (!has_gpu()) return kSkipped;
  const int replays = argc > 1 ? std::atoi(argv[1]) : 300;
  const std::uint64_t seed = tardis::gpu_test::fresh_seed();
  RestoreRigOptions options;
  if (argc > 2) options.parent = argv[2];
  options.objects = 2400;
  options.shape = {8, 2, 16 << 10};
  RestoreCheck(options, seed).run(replays);
  options.shape = {3, 1, 36 << 10};  // as MLA has it; three commands a page, the last one shorter
  options.command_bytes = 16 << 10;
  RestoreCheck(options, seed + 1).run(replays);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
