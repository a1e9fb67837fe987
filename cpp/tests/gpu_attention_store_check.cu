// SPDX-License-Identifier: Apache-2.0
// On a GPU: rows of K and V stored into pools of both kinds of memory, every byte of the pools compared: those of other
// slots and the gaps between rows must stay as they were. Argument: how many times (1). Exit status 0: all as expected;
// 1: not, or a CUDA error; 77: no GPU here.
#include "gpu_attention_support.cuh"

namespace tardis::attention::testing {
namespace {

struct Case {
  Shape shape;
  std::uint32_t tokens;
  bool entries;  // pages are named through a table
  std::uint32_t pad_heads = 0;
  float key_scale = 1, value_scale = 1;
};

int failures = 0;

class Rig {
 public:
  Rig(const Case& c, std::uint64_t seed)
      : case_(c),
        random_(seed),
        pools_{{Where::kPinned, c.shape, kPages, c.pad_heads}, {Where::kDevice, c.shape, kPages, c.pad_heads}} {}

  void run() {
    const Shape& s = case_.shape;
    const std::uint32_t row = s.kv_heads * s.head_dim, most = 2 * kPages * s.page_tokens;
    // Virtual pages: those of both pools, shuffled. Without a table: pages of the first pool.
    std::vector<std::int32_t> entries;
    for (std::uint32_t page = 0; page < kPages; ++page) {
      entries.push_back(static_cast<std::int32_t>(page));
      entries.push_back(static_cast<std::int32_t>(page | TARDIS_ATTENTION_SECOND_POOL));
    }
    std::shuffle(entries.begin(), entries.end(), random_);
    std::vector<std::int64_t> slots(case_.entries ? most : most / 2);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random_);
    slots.resize(case_.tokens);
    for (std::size_t i = 0; i < slots.size(); i += 7) {  // not to be stored
      slots[i] = i % 2 == 0 ? -1 - static_cast<std::int64_t>(random_() % 1000)
                            : most + static_cast<std::int64_t>(random_() >> 2);
    }
    std::vector<std::uint16_t> rows[2];
    for (auto& side : rows) {
      side.resize(std::uint64_t{case_.tokens} * (row + kGap));
      Normal normal(random_());
      for (std::uint16_t& word : side) word = encoded16(normal() * 30, is_half(s.type));
    }
    Memory keys(Where::kDevice, rows[0].size() * 2), values(Where::kPinned, rows[1].size() * 2);
    Memory places(Where::kDevice, slots.size() * 8), table(Where::kDevice, entries.size() * 4);
    keys.write(rows[0].data(), keys.size());
    values.write(rows[1].data(), values.size());
    places.write(slots.data(), places.size());
    table.write(entries.data(), table.size());

    tardis_attention_store store{};
    store.pools[0] = pools_[0].parameters();
    store.pools[1] = pools_[1].parameters();
    store.keys = keys.data();
    store.values = values.data();
    store.key_row_bytes = store.value_row_bytes = (row + kGap) * 2;
    store.slots = places.data<std::int64_t>();
    store.entries = case_.entries ? table.data<std::int32_t>() : nullptr;
    store.entry_count = case_.entries ? entries.size() : 0;
    store.key_scale = case_.key_scale;
    store.value_scale = case_.value_scale;
    store.tokens = case_.tokens;
    store.kv_heads = s.kv_heads;
    store.head_dim = s.head_dim;
    store.page_tokens = s.page_tokens;
    store.type = s.type;
    char error[512] = "";
    Stream stream;
    const int result = tardis_gpu_attention_store(&store, stream, error, sizeof error);
    if (result != cudaSuccess) std::fprintf(stderr, "%s\n", error);
    check(result, "tardis_gpu_attention_store");
    stream.wait();

    std::uint64_t stored = 0, wrong = 0;
    for (const bool side : {false, true}) {
      const float factor = 1 / (side ? case_.value_scale : case_.key_scale);
      std::vector<unsigned char> expected[2], found[2];
      for (int i = 0; i < 2; ++i) {
        expected[i].assign(pools_[i].side(side).size(), 0xFF);
        found[i].resize(expected[i].size());
        pools_[i].side(side).read(found[i].data(), found[i].size());
      }
      for (std::uint32_t token = 0; token < case_.tokens; ++token) {
        const std::int64_t slot = slots[token], page = slot / s.page_tokens;
        const std::int64_t pages = case_.entries ? 2 * kPages : kPages;
        if (slot < 0 || page >= pages) continue;
        const std::int32_t entry = case_.entries ? entries[page] : static_cast<std::int32_t>(page);
        const int pool = (entry & TARDIS_ATTENTION_SECOND_POOL) != 0;
        const std::uint64_t at =
            std::uint64_t(entry & ~TARDIS_ATTENTION_SECOND_POOL) * s.page_tokens + slot % s.page_tokens;
        unsigned char* const to = expected[pool].data() + at * pools_[pool].slot_bytes();
        const std::uint16_t* const from = rows[side].data() + std::uint64_t{token} * (row + kGap);
        for (std::uint32_t i = 0; i < row; ++i) {
          if (s.type == TARDIS_ATTENTION_FP8_E4M3) {
            to[i] = __nv_cvt_float_to_fp8(decoded16(from[i], false) * factor, __NV_SATFINITE, __NV_E4M3);
          } else {
            std::memcpy(to + 2 * i, from + i, 2);
          }
        }
        ++stored;
      }
      for (int i = 0; i < 2; ++i) {
        for (std::size_t k = 0; k < found[i].size(); ++k) wrong += found[i][k] != expected[i][k];
      }
    }
    const bool good = wrong == 0 && stored > 0;
    if (!good) ++failures;
    std::printf(
        "{\"case\": \"store\", \"type\": \"%s\", \"head_dim\": %u, \"kv_heads\": %u, \"page\": %u, \"tokens\": %u, "
        "\"table\": %s, \"rows\": %llu, \"wrong_bytes\": %llu}\n",
        type_text(s.type), s.head_dim, s.kv_heads, s.page_tokens, case_.tokens, case_.entries ? "true" : "false",
        static_cast<unsigned long long>(stored), static_cast<unsigned long long>(wrong));
  }

 private:
  static constexpr std::uint32_t kPages = 24, kGap = 8;
  const Case case_;
  std::mt19937_64 random_;
  Pool pools_[2];
};

}  // namespace
}  // namespace tardis::attention::testing

int main(int count, char** arguments) {
  using namespace tardis::attention::testing;
  if (!has_gpu()) return kSkipped;
  std::mt19937_64 random(fresh_seed());
  const int times = count > 1 ? std::atoi(arguments[1]) : 1;
  for (int i = 0; i < times; ++i) {
    for (std::uint32_t type = 0; type < TARDIS_ATTENTION_TYPES; ++type) {
      for (const std::uint32_t dim : {64U, 128U, 256U}) {
        for (const std::uint32_t heads : {1U, 8U}) {
          Rig({{type, dim, heads, heads, 16}, 300, true, 2, 0.3F, 2.5F}, random()).run();
          Rig({{type, dim, heads, heads, 64}, 15, false}, random()).run();
        }
      }
    }
    Rig({{0, 128, 32, 32, 128}, 2000, true}, random()).run();
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
