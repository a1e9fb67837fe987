// SPDX-License-Identifier: Apache-2.0
// On a GPU: the block table against a model on the host.
//   tardis_gpu_gstore_blocks_check [operations, default 1000000]
// Exit status 0: no difference; 1: some, or a CUDA error; 77: no GPU here.
#include <algorithm>
#include <random>
#include <set>

#include "gpu_gstore_blocks_support.cuh"

namespace tardis::gstore::testing {
namespace {

struct ModelRow {
  bool exists = false, moving = false;
  std::uint64_t handle = kNone, block = kNone, home = kNone, target = kNone;
  std::uint64_t ref = 0, count = 0;
};

struct Model {
  std::uint32_t hbm, dram, file, rows;
  std::vector<ModelRow> row = std::vector<ModelRow>(rows);
  std::set<std::uint64_t> taken = {};  // blocks

  std::uint64_t begin(std::uint32_t tier) const { return tier == 0 ? 0 : tier == 1 ? hbm : std::uint64_t{hbm} + dram; }
  std::uint32_t size(std::uint32_t tier) const { return tier == 0 ? hbm : tier == 1 ? dram : file; }
  bool in(std::uint32_t tier, std::uint64_t block) const {
    return block >= begin(tier) && block < begin(tier) + size(tier);
  }
  std::uint64_t free_in(std::uint32_t tier) const {
    const auto first = taken.lower_bound(begin(tier)), end = taken.lower_bound(begin(tier) + size(tier));
    return size(tier) - static_cast<std::uint64_t>(std::distance(first, end));
  }
  std::uint64_t existing() const {
    return static_cast<std::uint64_t>(
        std::count_if(row.begin(), row.end(), [](const ModelRow& r) { return r.exists; }));
  }
  ModelRow* find(std::uint64_t handle) {
    ModelRow& r = row[number_of(handle) % rows];
    return number_of(handle) < rows && r.exists && r.handle == handle ? &r : nullptr;
  }
  void take(std::uint64_t block, const char* what) { expect(taken.insert(block).second, what, block); }
  void give(std::uint64_t block) { taken.erase(block); }
};

void compare_state(const Blocks& blocks, const Model& model) {
  const auto rows = copy(blocks.table.rows, 2ull * model.rows);
  const auto home = copy(blocks.table.home, model.rows);
  for (std::uint32_t i = 0; i < model.rows; ++i) {
    const Row row = {rows[2 * i], rows[2 * i + 1]};
    const ModelRow& known = model.row[i];
    expect((block_of(row) != kNoBlock) == known.exists, "whether a row exists", i, known.exists);
    if (!known.exists) continue;
    expect(block_of(row) == known.block && refs_of(row) == known.ref && count_of(row) == known.count &&
               moving(row) == known.moving && handle_of(i, row) == known.handle && home[i] == known.home,
           "a row", block_of(row), known.block);
  }
  for (std::uint32_t tier = 0; tier <= TARDIS_GPU_TIERS; ++tier) {
    const bool of_rows = tier == TARDIS_GPU_TIERS;
    const tardis_gpu_pool pool = of_rows ? blocks.table.row_pool : pool_of(blocks.table, tier);
    const auto bits = copy(pool.bits, (pool.size + 31) / 32);
    const auto control = copy(pool.control, 2);
    std::uint32_t free = 0;
    for (std::uint32_t i = 0; i < pool.size; ++i) {
      const bool bit = (bits[i / 32] >> i % 32 & 1) != 0;
      const bool expected = of_rows ? model.row[i].exists : model.taken.count(model.begin(tier) + i) != 0;
      free += !bit;
      expect(bit == expected, "a bit of pool " + std::to_string(tier), i, expected);
    }
    expect(control[0] == free, "the free count of pool " + std::to_string(tier), control[0], free);
  }
}

class RandomOperations {
 public:
  RandomOperations() : model_{300, 500, 2500, 1500}, blocks_(300, 500, 2500, 1500) {}

  void run(std::uint32_t operations) {
    std::uint32_t done = 0;
    for (std::uint32_t round = 0; done < operations; ++round) {
      batch_.poison();
      batch_.count[0] = 1 + static_cast<std::uint32_t>(random_() % std::min(kRoom, operations - done));
      if (round % 3 != 0) batch_.count[0] = std::min<std::uint32_t>(batch_.count[0], 64);
      n_ = batch_.count[0];
      switch (random_() % 9) {
        case 0:
          alloc();
          break;
        case 1:
          adopt();
          break;
        case 2:
          use(TARDIS_GPU_REF);
          break;
        case 3:
        case 4:
          use(TARDIS_GPU_UNREF);
          break;
        case 5:
          free();
          break;
        default:
          swap();
      }
      if (n_ < kRoom) expect(batch_.statuses[n_] == 0xEE, "a status beyond the count");
      done += n_;
      if (round % 100 == 0) compare_state(blocks_, model_);
      if (round % 50 == 0) candidates();
    }
    compare_state(blocks_, model_);
    std::printf("%u operations on %u rows; by status:", done, model_.rows);
    for (const std::uint64_t n : seen_) std::printf(" %llu", static_cast<unsigned long long>(n));
    std::printf("\n");
    for (const std::uint64_t n : seen_) expect(n > 0 || operations < 100'000, "operations with each status", n, 1);
  }

 private:
  std::uint8_t status(std::uint32_t i) { return ++seen_[batch_.statuses[i] % 8], batch_.statuses[i]; }

  // Handles of rows, some of them gone or never there. Distinct ones for operations that are not the same twice.
  void choose(bool distinct) {
    std::set<std::uint64_t> used;
    for (std::uint32_t i = 0; i < n_; ++i) {
      std::uint64_t handle = kNone;
      for (int tries = 0; tries < 50; ++tries) {
        const ModelRow& row = model_.row[random_() % model_.rows];
        handle = row.handle == kNone ? random_() % 8 << 32 | random_() % (model_.rows * 2) : row.handle;
        if (random_() % 50 == 0) handle += std::uint64_t{1} << 32;
        if (!distinct || used.insert(handle & 0xFFFFFFFF).second) break;
        handle = kNone;
      }
      batch_.handles[i] = handle;
    }
  }

  void occupy_row(std::uint32_t i, std::uint64_t block, std::uint64_t refs) {
    const std::uint64_t handle = batch_.handles[i];
    expect(number_of(handle) < model_.rows, "the row of a handle", number_of(handle), model_.rows);
    ModelRow& row = model_.row[number_of(handle) % model_.rows];
    expect(!row.exists, "a new row is not one that exists", handle);
    expect(row.handle == kNone || row.handle != handle, "a handle is not given twice", handle);
    row = {true, false, handle, block, model_.in(TARDIS_GPU_FILE, block) ? block : kNone, kNone, refs, 0};
    model_.take(block, "a block is given once");
  }

  void alloc() {
    const auto tier = static_cast<std::uint32_t>(random_() % 3);
    const std::uint64_t room = model_.free_in(tier), rows = model_.rows - model_.existing();
    check(
        tardis_gpu_blocks_alloc(&blocks_.table, tier, batch_.count.get(), kRoom, batch_.handles.get(), batch_.ids.get(),
                                batch_.statuses.get(), batch_.ticket.get(), batch_.report.get(), nullptr),
        "tardis_gpu_blocks_alloc");
    batch_.wait();
    std::uint64_t good = 0;
    for (std::uint32_t i = 0; i < n_; ++i) {
      if (status(i) == TARDIS_GPU_BLOCKS_OK) {
        ++good;
        expect(model_.in(tier, batch_.ids[i]), "the tier of a new block", batch_.ids[i], tier);
        occupy_row(i, batch_.ids[i], 1);
      } else {
        expect(batch_.handles[i] == kNone && batch_.ids[i] == kNone, "an element without a block");
      }
    }
    // Rows that find no block are given back while others look for one: with few left, some may see none.
    const std::uint64_t most = std::min({std::uint64_t{n_}, room, rows});
    const bool tight = rows < n_;
    expect(tight ? good <= most : good == most, "blocks that were given", good, most);
    expect(batch_.report[0].totals[0] == good, "totals of a report", batch_.report[0].totals[0], good);
  }

  void adopt() {
    std::uint64_t good = 0;
    const std::uint64_t rows = model_.rows - model_.existing();
    std::set<std::uint32_t> names;
    while (names.size() < n_) names.insert(static_cast<std::uint32_t>(random_() % (model_.file + 20)));
    std::copy(names.begin(), names.end(), batch_.files.get());
    check(tardis_gpu_blocks_adopt(&blocks_.table, batch_.files.get(), batch_.count.get(), kRoom, batch_.handles.get(),
                                  batch_.statuses.get(), batch_.ticket.get(), batch_.report.get(), nullptr),
          "tardis_gpu_blocks_adopt");
    batch_.wait();
    for (std::uint32_t i = 0; i < n_; ++i) {
      const std::uint64_t block = model_.begin(TARDIS_GPU_FILE) + batch_.files[i];
      const bool may = batch_.files[i] < model_.file && model_.taken.count(block) == 0;
      if (status(i) == TARDIS_GPU_BLOCKS_OK) {
        ++good;
        expect(may, "a file block that may be adopted", block);
        occupy_row(i, block, 0);
      } else {
        expect(!may || batch_.statuses[i] == TARDIS_GPU_BLOCKS_NO_ROW, "status of adopt", batch_.statuses[i]);
        expect(batch_.handles[i] == kNone, "an element without a row");
      }
    }
    expect(good <= rows, "rows that were given", good, rows);
  }

  void use(std::uint32_t use) {
    choose(false);
    check(tardis_gpu_blocks_use(&blocks_.table, use, batch_.handles.get(), batch_.count.get(), kRoom, batch_.ids.get(),
                                batch_.statuses.get(), batch_.ticket.get(), batch_.report.get(), nullptr),
          "tardis_gpu_blocks_use");
    batch_.wait();
    for (std::uint32_t i = 0; i < n_; ++i) {
      ModelRow* row = model_.find(batch_.handles[i]);
      const std::uint8_t is = status(i);
      std::uint8_t expected = TARDIS_GPU_BLOCKS_STALE;
      if (row != nullptr) expected = TARDIS_GPU_BLOCKS_OK;
      if (row != nullptr && use == TARDIS_GPU_REF && row->moving) expected = TARDIS_GPU_BLOCKS_MOVING;
      // Which of several that give one reference back finds none is open, but not how many do.
      if (row != nullptr && use == TARDIS_GPU_UNREF && is == TARDIS_GPU_BLOCKS_NOT_REFERENCED) {
        const auto asked = std::count(batch_.handles.get(), batch_.handles.get() + n_, batch_.handles[i]);
        expect(row->ref == 0 || asked > 1, "a reference that was there", row->ref);
        continue;
      }
      expect(is == expected, "status of use", is, expected);
      if (is != TARDIS_GPU_BLOCKS_OK || row == nullptr) continue;
      expect(batch_.ids[i] == row->block, "where a used row is", batch_.ids[i], row->block);
      if (use == TARDIS_GPU_REF) {
        ++row->ref;
        ++row->count;
      } else {
        expect(row->ref > 0, "no more references given back than there were", i);
        --row->ref;
      }
    }
  }

  void free() {
    choose(true);
    check(tardis_gpu_blocks_free(&blocks_.table, batch_.handles.get(), batch_.count.get(), kRoom, batch_.statuses.get(),
                                 batch_.ticket.get(), batch_.report.get(), nullptr),
          "tardis_gpu_blocks_free");
    batch_.wait();
    for (std::uint32_t i = 0; i < n_; ++i) {
      ModelRow* row = model_.find(batch_.handles[i]);
      std::uint8_t expected = TARDIS_GPU_BLOCKS_STALE;
      if (row != nullptr) {
        expected = row->moving     ? TARDIS_GPU_BLOCKS_MOVING
                   : row->ref != 0 ? TARDIS_GPU_BLOCKS_REFERENCED
                                   : TARDIS_GPU_BLOCKS_OK;
      }
      expect(status(i) == expected, "status of free", batch_.statuses[i], expected);
      if (expected != TARDIS_GPU_BLOCKS_OK || row == nullptr) continue;
      model_.give(row->block);
      if (row->home != kNone) model_.give(row->home);
      row->exists = false;
    }
  }

  void swap() {
    choose(true);
    const auto tier = static_cast<std::uint32_t>(random_() % 3), holders = static_cast<std::uint32_t>(random_() % 2);
    const std::uint64_t room = model_.free_in(tier);
    check(tardis_gpu_blocks_swap_begin(&blocks_.table, tier, holders, batch_.handles.get(), batch_.count.get(), kRoom,
                                       batch_.ids.get(), batch_.to.get(), batch_.statuses.get(), batch_.ticket.get(),
                                       batch_.report.get(), nullptr),
          "tardis_gpu_blocks_swap_begin");
    batch_.wait();
    std::uint64_t fresh = 0, refused = 0;
    for (std::uint32_t i = 0; i < n_; ++i) {
      ModelRow* row = model_.find(batch_.handles[i]);
      std::uint8_t expected = TARDIS_GPU_BLOCKS_STALE;
      if (row != nullptr) {
        expected = row->moving                   ? TARDIS_GPU_BLOCKS_MOVING
                   : model_.in(tier, row->block) ? TARDIS_GPU_BLOCKS_THERE
                   : row->ref > holders          ? TARDIS_GPU_BLOCKS_REFERENCED
                                                 : TARDIS_GPU_BLOCKS_OK;
      }
      const std::uint8_t is = status(i);
      if (expected == TARDIS_GPU_BLOCKS_OK && is == TARDIS_GPU_BLOCKS_NO_BLOCK) {
        ++refused;
        continue;
      }
      expect(is == expected, "status of swap_begin", is, expected);
      if (is != TARDIS_GPU_BLOCKS_OK || row == nullptr) continue;
      const std::uint64_t to = batch_.to[i];
      expect(batch_.ids[i] == row->block && model_.in(tier, to), "from and to of a swap", to, tier);
      const bool home = tier == TARDIS_GPU_FILE && row->home != kNone;
      if (home) expect(to == row->home, "a row goes back to its file block", to, row->home);
      if (!home) {
        ++fresh;
        model_.take(to, "a block of a swap is given once");
      }
      row->moving = true;
      row->target = to;
    }
    expect(refused == 0 || fresh == room, "swaps without a block while there were some", fresh, room);
    // Mostly ended at once, sometimes later, in parts, and not always well.
    for (std::uint32_t i = 0; i < n_; ++i) {
      if (random_() % 4 == 0) {
        const ModelRow& other = model_.row[random_() % model_.rows];
        const bool known = std::count(batch_.handles.get(), batch_.handles.get() + n_, other.handle) != 0;
        if (other.exists && other.moving && !known) {
          batch_.handles[i] = other.handle;
          batch_.to[i] = other.target;
        } else {
          batch_.to[i] = kNone;
        }
      }
      batch_.good[i] = random_() % 3 != 0;
    }
    check(tardis_gpu_blocks_swap_end(&blocks_.table, batch_.handles.get(), batch_.to.get(), batch_.good.get(),
                                     batch_.count.get(), kRoom, batch_.statuses.get(), batch_.ticket.get(),
                                     batch_.report.get(), nullptr),
          "tardis_gpu_blocks_swap_end");
    batch_.wait();
    for (std::uint32_t i = 0; i < n_; ++i) {
      const bool asked = batch_.to[i] != kNone;
      expect(batch_.statuses[i] == (asked ? TARDIS_GPU_BLOCKS_OK : TARDIS_GPU_BLOCKS_NO_BLOCK), "status of swap_end",
             batch_.statuses[i]);
      ModelRow* row = model_.find(batch_.handles[i]);
      if (!asked || row == nullptr) continue;
      const bool to_file = model_.in(TARDIS_GPU_FILE, row->target);
      if (batch_.good[i] != 0) {
        if (!model_.in(TARDIS_GPU_FILE, row->block)) model_.give(row->block);
        row->block = row->target;
        if (to_file) row->home = row->target;
      } else if (row->target != row->home) {
        model_.give(row->target);
      }
      row->moving = false;
    }
  }

  void candidates() {
    const auto tier = static_cast<std::uint32_t>(random_() % 3), bonus = static_cast<std::uint32_t>(random_() % 100);
    auto scratch = device_array<std::uint8_t>(tardis_gpu_blocks_scratch_bytes(), 0xEE);
    auto found_memory = device_array<std::uint32_t>(1, 0xEE);
    batch_.count[0] = static_cast<std::uint32_t>(random_() % kRoom);
    std::memset(batch_.ids.get(), 0xEE, kRoom * 8);
    check(tardis_gpu_blocks_candidates(&blocks_.table, tier, bonus, batch_.count.get(), kRoom, batch_.ids.get(),
                                       found_memory.get(), scratch.get(), nullptr),
          "tardis_gpu_blocks_candidates");
    batch_.wait();
    const auto found = copy(found_memory.get(), 1);
    const auto used = copy(blocks_.table.used, model_.rows);
    const std::uint32_t clock = copy(blocks_.table.clock, 1)[0];
    std::vector<std::uint32_t> ranks;
    for (std::uint32_t i = 0; i < model_.rows; ++i) {
      const ModelRow& row = model_.row[i];
      if (!row.exists || row.moving || row.ref != 0 || !model_.in(tier, row.block)) continue;
      ranks.push_back(eviction_rank(clock, used[i], static_cast<std::uint32_t>(row.count), bonus));
    }
    std::sort(ranks.rbegin(), ranks.rend());
    const auto expected = std::min<std::size_t>(ranks.size(), batch_.count[0]);
    expect(found[0] == expected, "candidates", found[0], expected);
    std::vector<std::uint32_t> got;
    std::set<std::uint64_t> distinct;
    for (std::uint32_t i = 0; i < std::min<std::size_t>(found[0], expected); ++i) {
      const ModelRow* row = model_.find(batch_.ids[i]);
      expect(row != nullptr && row->ref == 0 && !row->moving && model_.in(tier, row->block), "a candidate", i);
      distinct.insert(batch_.ids[i]);
      if (row == nullptr) continue;
      got.push_back(eviction_rank(clock, used[number_of(row->handle)], static_cast<std::uint32_t>(row->count), bonus));
    }
    std::sort(got.rbegin(), got.rend());
    ranks.resize(std::min(expected, ranks.size()));
    expect(got == ranks && distinct.size() == expected, "the ranks of the candidates", distinct.size(), expected);
    ++asked_;
  }

  std::mt19937_64 random_{7};
  Model model_;
  Blocks blocks_;
  Batch batch_;
  std::uint32_t n_ = 0, asked_ = 0;
  std::uint64_t seen_[8] = {};
};

// Many ranks in the upper half: a clock that runs far.
void far_clock() {
  constexpr std::uint32_t kRows = 100'000;
  Blocks blocks(kRows, 0, 0, kRows);
  auto count = mapped_array<std::uint32_t>(1);
  auto handles = device_array<std::uint64_t>(kRows);
  auto ticket = device_array<tardis_gpu_ticket>(1);
  count[0] = kRows;
  check(tardis_gpu_blocks_alloc(&blocks.table, TARDIS_GPU_HBM, count.get(), kRows, handles.get(), nullptr, nullptr,
                                ticket.get(), nullptr, nullptr),
        "tardis_gpu_blocks_alloc");
  check(tardis_gpu_blocks_use(&blocks.table, TARDIS_GPU_UNREF, handles.get(), count.get(), kRows, nullptr, nullptr,
                              ticket.get(), nullptr, nullptr),
        "tardis_gpu_blocks_use");
  std::mt19937_64 random(5);
  std::vector<std::uint32_t> used(kRows);
  for (auto& u : used) u = static_cast<std::uint32_t>(random());
  const std::uint32_t clock = 12345;
  check(cudaMemcpy(blocks.table.used, used.data(), kRows * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaMemcpy(blocks.table.clock, &clock, 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  auto scratch = device_array<std::uint8_t>(tardis_gpu_blocks_scratch_bytes());
  auto found_memory = device_array<std::uint32_t>(1, 0xEE);
  auto chosen = mapped_array<std::uint64_t>(kRows);
  std::vector<std::uint32_t> ranks;
  for (const std::uint32_t u : used) ranks.push_back(eviction_rank(clock, u, 0, 0));
  std::sort(ranks.rbegin(), ranks.rend());
  for (const std::uint32_t want : {1u, 2u, 777u, 65'536u, kRows - 1, kRows}) {
    count[0] = want;
    check(tardis_gpu_blocks_candidates(&blocks.table, TARDIS_GPU_HBM, 0, count.get(), kRows, chosen.get(),
                                       found_memory.get(), scratch.get(), nullptr),
          "tardis_gpu_blocks_candidates");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const auto found = copy(found_memory.get(), 1);
    expect(found[0] == want, "candidates of many ranks", found[0], want);
    std::vector<std::uint32_t> got;
    for (std::uint32_t i = 0; i < std::min(found[0], want); ++i) {
      got.push_back(eviction_rank(clock, used[number_of(chosen[i]) % kRows], 0, 0));
    }
    std::sort(got.rbegin(), got.rend());
    expect(std::equal(got.begin(), got.end(), ranks.begin()), "the ranks of candidates of many ranks", want);
  }
  std::printf("candidates among %u ranks of 32 bits\n", kRows);
}

// HBM blocks that somebody else has, in turn with rows that get the others.
void marked_blocks() {
  constexpr std::uint32_t kHbm = 700, kFiles = 300;
  Blocks blocks(kHbm, 0, kFiles, kHbm + kFiles);
  Batch batch;
  auto ids = mapped_array<std::int64_t>(kRoom);
  const auto mark = [&](const std::vector<std::int64_t>& which, std::uint32_t taken, std::uint8_t status) {
    std::copy(which.begin(), which.end(), ids.get());
    batch.count[0] = static_cast<std::uint32_t>(which.size());
    check(tardis_gpu_blocks_mark(&blocks.table, taken, ids.get(), batch.count.get(), kRoom, batch.statuses.get(),
                                 batch.ticket.get(), nullptr, nullptr),
          "tardis_gpu_blocks_mark");
    batch.wait();
    for (std::size_t i = 0; i < which.size(); ++i) expect(batch.statuses[i] == status, "a mark", batch.statuses[i]);
  };
  const auto alloc = [&](std::uint32_t tier, std::uint32_t n) {
    batch.count[0] = n;
    check(tardis_gpu_blocks_alloc(&blocks.table, tier, batch.count.get(), kRoom, batch.handles.get(), batch.ids.get(),
                                  batch.statuses.get(), batch.ticket.get(), nullptr, nullptr),
          "tardis_gpu_blocks_alloc");
    batch.wait();
    std::set<std::uint64_t> got;
    for (std::uint32_t i = 0; i < n; ++i) {
      if (batch.statuses[i] == TARDIS_GPU_BLOCKS_OK) got.insert(batch.ids[i]);
    }
    return got;
  };
  std::mt19937_64 random(17);
  std::vector<std::int64_t> numbers(kHbm);
  for (std::uint32_t i = 0; i < kHbm; ++i) numbers[i] = i;
  std::shuffle(numbers.begin(), numbers.end(), random);
  const std::vector<std::int64_t> theirs(numbers.begin(), numbers.begin() + 250);
  mark(theirs, 1, TARDIS_GPU_BLOCKS_OK);
  mark(theirs, 1, TARDIS_GPU_BLOCKS_NO_BLOCK);
  mark({-1, kHbm}, 1, TARDIS_GPU_BLOCKS_STALE);
  auto ours = alloc(TARDIS_GPU_HBM, kHbm);
  expect(ours.size() == kHbm - theirs.size(), "blocks that are left", ours.size(), kHbm - theirs.size());
  for (const std::int64_t id : theirs) expect(ours.count(static_cast<std::uint64_t>(id)) == 0, "a block of theirs");
  const std::vector<std::int64_t> back(theirs.begin(), theirs.begin() + 100);
  mark(back, 0, TARDIS_GPU_BLOCKS_OK);
  mark(back, 0, TARDIS_GPU_BLOCKS_NO_BLOCK);
  ours = alloc(TARDIS_GPU_HBM, 200);
  expect(ours == std::set<std::uint64_t>(back.begin(), back.end()), "the blocks that came back", ours.size(), 100);

  // File blocks for rows in HBM: what goes to files then goes there.
  batch.count[0] = 100;
  for (std::uint32_t i = 0; i < 100; ++i) batch.files[i] = 299 - i;
  std::vector<std::uint64_t> handles;
  for (std::uint32_t i = 0; i < 200; ++i) {
    if (batch.statuses[i] == TARDIS_GPU_BLOCKS_OK) handles.push_back(batch.handles[i]);
  }
  std::copy(handles.begin(), handles.end(), batch.handles.get());
  for (const std::uint8_t status : {TARDIS_GPU_BLOCKS_OK, TARDIS_GPU_BLOCKS_THERE}) {
    check(tardis_gpu_blocks_attach(&blocks.table, batch.handles.get(), batch.files.get(), batch.count.get(), kRoom,
                                   batch.statuses.get(), batch.ticket.get(), nullptr, nullptr),
          "tardis_gpu_blocks_attach");
    batch.wait();
    for (std::uint32_t i = 0; i < 100; ++i) expect(batch.statuses[i] == status, "an attached row", batch.statuses[i]);
  }
  check(tardis_gpu_blocks_swap_begin(&blocks.table, TARDIS_GPU_FILE, 1, batch.handles.get(), batch.count.get(), kRoom,
                                     batch.ids.get(), batch.to.get(), batch.statuses.get(), batch.ticket.get(), nullptr,
                                     nullptr),
        "tardis_gpu_blocks_swap_begin");
  batch.wait();
  for (std::uint32_t i = 0; i < 100; ++i) expect(batch.to[i] == kHbm + 299 - i, "the attached file block", batch.to[i]);
  expect(alloc(TARDIS_GPU_FILE, kFiles).size() == kFiles - 100, "file blocks that are left");
  std::printf("blocks of HBM that others have, and file blocks of rows in HBM\n");
}

}  // namespace
}  // namespace tardis::gstore::testing

int main(int argc, char** argv) {
  using namespace tardis::gstore::testing;
  if (!has_gpu()) return kSkipped;
  far_clock();
  marked_blocks();
  RandomOperations().run(argc > 1 ? static_cast<std::uint32_t>(std::strtoul(argv[1], nullptr, 10)) : 1'000'000);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
