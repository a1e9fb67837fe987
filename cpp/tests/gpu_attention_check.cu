// SPDX-License-Identifier: Apache-2.0
// On a GPU: decode attention against fp64 over pools whose every other byte is NaN: shapes, page sizes, lengths around
// edges of pages and tiles, empty requests, windows, several query tokens, large logits, pages of both kinds of memory,
// replays of a graph with other lengths. Prints a table of errors beside those of a plain kernel that rounds where
// matrix instructions make everybody round. Arguments: how many times (1), a part of the names of the cases that are to
// run (all of them, and a graph). Exit status 0: all as expected; 1: not, or a CUDA error; 77: no GPU here.
#include "gpu_attention_support.cuh"

namespace tardis::attention::testing {
namespace {

struct Case {
  std::string name;
  Shape shape;
  std::vector<std::uint32_t> lengths;
  Mix mix = Mix::kBoth;
  std::uint32_t query_tokens = 1;
  std::int32_t window_left = -1;
  float soft_cap = 0;
  float query_size = 1;  // standard deviation
  float key_scale = 1, value_scale = 1;
  std::uint32_t splits = 0, pad_heads = 0, tuning = 0;
  bool with_lse = true;
  bool equal_keys = false;   // all logits of a row the same
  bool rising_keys = false;  // each tile's logits above those before
};

struct Errors {
  double highest = 0, squares = 0, lse = 0, plain_highest = 0, plain_squares = 0;
  std::uint64_t values = 0;
  double rms() const { return std::sqrt(squares / static_cast<double>(std::max<std::uint64_t>(values, 1))); }
  double plain_rms() const {
    return std::sqrt(plain_squares / static_cast<double>(std::max<std::uint64_t>(values, 1)));
  }
};

int failures = 0;

bool expect(bool holds, const std::string& what) {
  if (!holds) {
    ++failures;
    std::fprintf(stderr, "FAILED %s\n", what.c_str());
  }
  return holds;
}

class Rig {
 public:
  Rig(const Case& c, std::uint64_t seed) : case_(c), random_(seed), normal_(random_()) {
    const Shape& s = c.shape;
    for (const std::uint32_t length : c.lengths) most_ = std::max(most_, length);
    page_row_ = most_ / s.page_tokens + 3;
    std::uint64_t pages = 0;
    for (const std::uint32_t length : c.lengths) pages += (length + s.page_tokens - 1) / s.page_tokens;
    const std::uint64_t pool_pages = pages + 5;  // the others stay NaN
    if (c.mix != Mix::kDevice) pools_[0] = std::make_unique<Pool>(Where::kPinned, s, pool_pages, c.pad_heads);
    if (c.mix != Mix::kHost) pools_[1] = std::make_unique<Pool>(Where::kDevice, s, pool_pages, c.pad_heads);
    free_.resize(pool_pages);
    std::iota(free_.begin(), free_.end(), 0);
    std::shuffle(free_.begin(), free_.end(), random_);
    make_tables();
    make_queries();
  }

  void run() {
    tardis_attention_decode d = parameters();
    const std::uint64_t bytes = workspace_bytes(d);
    Memory workspace(Where::kDevice, bytes + 256);
    workspace.fill(0xFF);
    d.workspace = bytes == 0 ? nullptr : workspace.data();
    d.workspace_bytes = bytes;
    decode(d, stream_);
    stream_.wait();
    std::vector<unsigned char> tail(256);
    workspace.read(tail.data(), 256, bytes);
    expect(std::all_of(tail.begin(), tail.end(), [](unsigned char c) { return c == 0xFF; }),
           case_.name + ": nothing is written behind the workspace");
    compare(d);
  }

  // One graph, other lengths and tables in every replay.
  void run_graph(int replays) {
    tardis_attention_decode d = parameters();
    Memory workspace(Where::kDevice, workspace_bytes(d) + 16);
    d.workspace = workspace.data();
    d.workspace_bytes = workspace.size();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int layer = 0; layer < 3; ++layer) decode(d, stream_);  // they share the workspace
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    for (int replay = 0; replay < replays; ++replay) {
      std::vector<std::int32_t> lengths;
      for (const std::uint32_t most : case_.lengths) lengths.push_back(static_cast<int>(random_() % (most + 1)));
      lengths_->write(lengths.data(), lengths.size() * 4);
      output_->fill(0xFF);
      lse_->fill(0xFF);
      workspace.fill(0xFF);
      check(cudaGraphLaunch(exec, stream_), "cudaGraphLaunch");
      stream_.wait();
      compare(d, replay + 1 == replays);
    }
    check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }

 private:
  std::uint32_t batch() const { return static_cast<std::uint32_t>(case_.lengths.size()); }
  std::uint32_t rows() const { return case_.query_tokens * case_.shape.query_heads; }
  std::uint64_t row_bytes() const { return std::uint64_t{case_.shape.row()} * 2; }
  static constexpr std::uint64_t kGap = 64;  // bytes between rows of the output, which must stay as they are

  void make_tables() {
    const Shape& s = case_.shape;
    std::vector<std::int32_t> tables(batch() * page_row_, 0x7FFFFFFF), lengths;
    std::size_t next = 0;
    for (std::uint32_t request = 0; request < batch(); ++request) {
      const std::uint32_t length = case_.lengths[request];
      lengths.push_back(static_cast<int>(length));
      for (std::uint32_t token = 0; token < length; token += s.page_tokens) {
        const bool second = case_.mix == Mix::kDevice || (case_.mix == Mix::kBoth && random_() % 2 == 0);
        const std::uint32_t page = free_[next++];
        tables[request * page_row_ + token / s.page_tokens] =
            static_cast<std::int32_t>(page | (second ? TARDIS_ATTENTION_SECOND_POOL : 0));
        write_page(second ? 1 : 0, page, token, std::min(length - token, s.page_tokens));
      }
    }
    pages_ = std::make_unique<Memory>(Where::kDevice, tables.size() * 4);
    pages_->write(tables.data(), tables.size() * 4);
    lengths_ = std::make_unique<Memory>(Where::kDevice, lengths.size() * 4);
    lengths_->write(lengths.data(), lengths.size() * 4);
  }

  void write_page(int pool, std::uint32_t page, std::uint32_t token, std::uint32_t tokens) {
    const Shape& s = case_.shape;
    const std::uint32_t size = stored_bytes(s.type), row = s.kv_heads * s.head_dim;
    const std::uint64_t slot_bytes = pools_[pool]->slot_bytes();
    for (const bool values : {false, true}) {
      std::vector<unsigned char> bytes(tokens * slot_bytes, 0xFF);
      for (std::uint32_t t = 0; t < tokens; ++t) {
        for (std::uint32_t i = 0; i < row; ++i) {
          float value = normal_();
          if (!values && case_.equal_keys) value = 0.5F;
          if (!values && case_.rising_keys) value += static_cast<float>((token + t) / 64) * 0.25F;
          unsigned char* const at = bytes.data() + t * slot_bytes + i * size;
          if (size == 1) {
            *at = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
          } else {
            const std::uint16_t word = encoded16(value, is_half(s.type));
            std::memcpy(at, &word, 2);
          }
        }
      }
      pools_[pool]->side(values).write(bytes.data(), bytes.size(), std::uint64_t{page} * s.page_tokens * slot_bytes);
    }
  }

  void make_queries() {
    const std::uint64_t all = std::uint64_t{batch()} * case_.query_tokens;
    std::vector<std::uint16_t> words(all * case_.shape.row());
    for (std::uint16_t& word : words) {
      float value = normal_() * case_.query_size;
      if (case_.rising_keys) value = std::fabs(value);
      word = encoded16(value, is_half(case_.shape.type));
    }
    queries_ = std::make_unique<Memory>(Where::kDevice, words.size() * 2);
    queries_->write(words.data(), words.size() * 2);
    output_ = std::make_unique<Memory>(Where::kDevice, all * (row_bytes() + kGap));
    output_->fill(0xFF);
    lse_ = std::make_unique<Memory>(Where::kDevice, std::uint64_t{batch()} * rows() * 4);
    lse_->fill(0xFF);
  }

  tardis_attention_decode parameters() const {
    const Shape& s = case_.shape;
    tardis_attention_decode d{};
    for (int i = 0; i < 2; ++i) {
      if (pools_[i] != nullptr) d.pools[i] = pools_[i]->parameters();
    }
    d.queries = queries_->data();
    d.output = output_->data();
    d.lse = case_.with_lse ? lse_->data<float>() : nullptr;
    d.pages = pages_->data<std::int32_t>();
    d.lengths = lengths_->data<std::int32_t>();
    d.query_row_bytes = row_bytes();
    d.output_row_bytes = row_bytes() + kGap;
    d.page_row = page_row_;
    d.scale = 1 / std::sqrt(static_cast<float>(s.head_dim));
    d.soft_cap = case_.soft_cap;
    d.key_scale = case_.key_scale;
    d.value_scale = case_.value_scale;
    d.window_left = case_.window_left;
    d.batch = batch();
    d.query_tokens = case_.query_tokens;
    d.query_heads = s.query_heads;
    d.kv_heads = s.kv_heads;
    d.head_dim = s.head_dim;
    d.page_tokens = s.page_tokens;
    d.type = s.type;
    d.max_tokens = std::max(most_, 1U);
    d.splits = case_.splits;
    d.tuning = case_.tuning;
    return d;
  }

  template <class Real>
  std::vector<Real> plain(const tardis_attention_decode& d, std::vector<Real>* lse) const {
    const std::uint64_t all = std::uint64_t{batch()} * rows();
    Memory out(Where::kDevice, all * case_.shape.head_dim * sizeof(Real)), sums(Where::kDevice, all * sizeof(Real));
    Memory scratch(Where::kDevice, all * d.max_tokens * sizeof(Real));
    plain_attention<Real>
        <<<dim3(rows(), batch()), 256, 0, stream_>>>(d, out.data<Real>(), sums.data<Real>(), scratch.data<Real>());
    check(cudaGetLastError(), "plain_attention");
    stream_.wait();
    std::vector<Real> result(all * case_.shape.head_dim);
    lse->resize(all);
    out.read(result.data(), out.size());
    sums.read(lse->data(), sums.size());
    return result;
  }

  void compare(const tardis_attention_decode& d, bool print = true) const {
    std::vector<double> expected_lse;
    std::vector<float> rounded_lse;
    const std::vector<double> expected = plain<double>(d, &expected_lse);
    const std::vector<float> rounded = plain<float>(d, &rounded_lse);
    std::vector<unsigned char> bytes(output_->size());
    std::vector<float> lse(expected_lse.size());
    output_->read(bytes.data(), bytes.size());
    lse_->read(lse.data(), lse.size() * 4);
    const std::uint64_t stride = row_bytes() + kGap, row = case_.shape.row();
    Errors errors;
    bool numbers = true, gaps = true, sums = true;
    int told = 0;
    for (std::uint64_t r = 0; r < std::uint64_t{batch()} * case_.query_tokens; ++r) {
      for (std::uint64_t i = 0; i < kGap; ++i) gaps = gaps && bytes[r * stride + row_bytes() + i] == 0xFF;
      for (std::uint64_t i = 0; i < row; ++i) {
        std::uint16_t word;
        std::memcpy(&word, bytes.data() + r * stride + i * 2, 2);
        const double value = decoded16(word, is_half(case_.shape.type)), wanted = expected[r * row + i];
        if (!std::isfinite(value)) numbers = false;
        const double error = std::fabs(value - wanted), other = std::fabs(double{rounded[r * row + i]} - wanted);
        if (!(error <= 0.1 + 2 * other) && ++told <= 6) {
          std::fprintf(stderr, "%s: request token %llu, head %llu, column %llu: expected %g, found %g\n",
                       case_.name.c_str(), static_cast<unsigned long long>(r),
                       static_cast<unsigned long long>(i / case_.shape.head_dim),
                       static_cast<unsigned long long>(i % case_.shape.head_dim), wanted, value);
        }
        errors.highest = std::max(errors.highest, error);
        errors.plain_highest = std::max(errors.plain_highest, other);
        errors.squares += error * error;
        errors.plain_squares += other * other;
        ++errors.values;
      }
    }
    for (std::size_t i = 0; i < lse.size(); ++i) {
      if (!case_.with_lse) {
        sums = sums && std::isnan(lse[i]);  // as it was
      } else if (std::isinf(expected_lse[i])) {
        sums = sums && std::isinf(lse[i]) && lse[i] < 0;
      } else {
        const double error = std::fabs(lse[i] - expected_lse[i]) / std::max(1.0, std::fabs(expected_lse[i]) / 16);
        errors.lse = error <= errors.lse ? errors.lse : error;  // NaN stays
        sums = sums && error < 1e-3;
      }
    }
    bool good = expect(numbers, case_.name + ": all of the output are numbers");
    good = expect(gaps, case_.name + ": nothing is written between the rows of the output") && good;
    good = expect(sums, case_.name + ": the lse is that of the reference") && good;
    good =
        expect(errors.rms() <= 1.5 * errors.plain_rms() + 1e-7, case_.name + ": the error is that of rounding") && good;
    good = expect(errors.highest <= 2 * errors.plain_highest + 1e-6, case_.name + ": no element is far off") && good;
    if (print || !good) {
      std::printf(
          "{\"case\": \"%s\", \"type\": \"%s\", \"head_dim\": %u, \"heads\": \"%u/%u\", \"page\": %u, \"pages_in\": "
          "\"%s\", "
          "\"rms\": %.3g, \"plain_rms\": %.3g, \"ratio\": %.3f, \"max\": %.3g, \"plain_max\": %.3g, \"lse\": %.3g, "
          "\"good\": %s}\n",
          case_.name.c_str(), type_text(case_.shape.type), case_.shape.head_dim, case_.shape.query_heads,
          case_.shape.kv_heads, case_.shape.page_tokens, text_of(case_.mix), errors.rms(), errors.plain_rms(),
          errors.plain_rms() > 0 ? errors.rms() / errors.plain_rms() : 0, errors.highest, errors.plain_highest,
          errors.lse, good ? "true" : "false");
      std::fflush(stdout);
    }
  }

  const Case case_;
  std::mt19937_64 random_;
  Normal normal_;
  Stream stream_;
  std::uint32_t most_ = 0;
  std::uint64_t page_row_ = 0;
  std::vector<std::uint32_t> free_;
  std::unique_ptr<Pool> pools_[2];
  std::unique_ptr<Memory> pages_, lengths_, queries_, output_, lse_;
};

// The reference itself against a loop on the host, of one request whose pages lie in order in one pool.
void check_reference(std::uint64_t seed) {
  constexpr std::uint32_t kTokens = 37, kDim = 64, kHeads = 4, kKvHeads = 2;
  Normal normal(seed);
  Memory keys(Where::kPinned, 48 * kKvHeads * kDim * 2), values(Where::kPinned, 48 * kKvHeads * kDim * 2);
  Memory queries(Where::kPinned, kHeads * kDim * 2), pages(Where::kPinned, 12), length(Where::kPinned, 4);
  for (Memory* const memory : {&keys, &values, &queries}) {
    for (std::size_t i = 0; i < memory->size() / 2; ++i) memory->data<std::uint16_t>()[i] = encoded16(normal(), false);
  }
  for (int i = 0; i < 3; ++i) pages.data<std::int32_t>()[i] = i;
  *length.data<std::int32_t>() = kTokens;
  tardis_attention_decode d{};
  d.pools[0] = {keys.address(), values.address(), 48, kKvHeads * kDim * 2, kDim * 2, kKvHeads * kDim * 2, kDim * 2};
  d.queries = queries.data();
  d.pages = pages.data<std::int32_t>();
  d.lengths = length.data<std::int32_t>();
  d.query_row_bytes = kHeads * kDim * 2;
  d.page_row = 3;
  d.scale = 0.125F;
  d.key_scale = d.value_scale = 1;
  d.window_left = 20;
  d.batch = d.query_tokens = 1;
  d.query_heads = kHeads;
  d.kv_heads = kKvHeads;
  d.head_dim = kDim;
  d.page_tokens = 16;
  d.max_tokens = 48;
  Memory out(Where::kPinned, kHeads * kDim * 8), lse(Where::kPinned, kHeads * 8),
      scratch(Where::kDevice, kHeads * 48 * 8);
  plain_attention<double><<<dim3(kHeads, 1), 256>>>(d, out.data<double>(), lse.data<double>(), scratch.data<double>());
  check(cudaDeviceSynchronize(), "plain_attention");
  const auto at = [](const Memory& memory, std::size_t i) {
    return double{decoded16(memory.data<std::uint16_t>()[i], false)};
  };
  double worst = 0;
  for (std::uint32_t head = 0; head < kHeads; ++head) {
    double weights[kTokens] = {}, sum = 0;
    for (std::uint32_t t = kTokens - 21; t < kTokens; ++t) {
      double product = 0;
      for (std::uint32_t i = 0; i < kDim; ++i) {
        product += at(queries, head * kDim + i) * at(keys, (t * kKvHeads + head / 2) * kDim + i);
      }
      sum += weights[t] = std::exp(product * 0.125);
    }
    for (std::uint32_t i = 0; i < kDim; ++i) {
      double total = 0;
      for (std::uint32_t t = 0; t < kTokens; ++t) {
        total += weights[t] / sum * at(values, (t * kKvHeads + head / 2) * kDim + i);
      }
      worst = std::max(worst, std::fabs(total - out.data<double>()[head * kDim + i]));
    }
    worst = std::max(worst, std::fabs(std::log(sum) - lse.data<double>()[head]));
  }
  expect(worst < 1e-12, "the reference is what a loop on the host computes, off by " + std::to_string(worst));
}

// Entries that name no page are as a page of zeros, however far out they are.
void check_entries_outside(std::uint64_t seed) {
  constexpr std::uint32_t kPages = 4, kPage = 64, kDim = 128, kTokens = 2 * kPage;
  constexpr std::uint64_t kRow = kDim * 2, kPoolBytes = kPages * kPage * kRow;
  Normal normal(seed);
  Memory keys(Where::kDevice, kPoolBytes), values(Where::kDevice, kPoolBytes), queries(Where::kDevice, kRow);
  for (Memory* const memory : {&keys, &values, &queries}) {
    std::vector<std::uint16_t> words(memory->size() / 2);
    for (std::uint16_t& word : words) word = encoded16(normal(), false);
    if (memory != &queries) std::fill(words.end() - kPage * kDim, words.end(), std::uint16_t{0});  // the last page
    memory->write(words.data(), memory->size());
  }
  Memory pages(Where::kDevice, 8), length(Where::kDevice, 4), output(Where::kDevice, kRow);
  const std::int32_t tokens = kTokens;
  length.write(&tokens, 4);
  tardis_attention_decode d{};
  d.pools[0] = {keys.address(), values.address(), kPages * kPage, kRow, kRow, kRow, kRow};
  d.queries = queries.data();
  d.output = output.data();
  d.pages = pages.data<std::int32_t>();
  d.lengths = length.data<std::int32_t>();
  d.query_row_bytes = d.output_row_bytes = kRow;
  d.page_row = 2;
  d.scale = d.key_scale = d.value_scale = 1;
  d.window_left = -1;
  d.batch = d.query_tokens = d.query_heads = d.kv_heads = d.splits = 1;
  d.head_dim = kDim;
  d.page_tokens = kPage;
  d.max_tokens = kTokens;
  Stream stream;
  const auto found = [&](std::int32_t entry) {
    const std::int32_t table[2] = {0, entry};
    pages.write(table, sizeof table);
    output.fill(0xFF);
    decode(d, stream);
    stream.wait();
    std::vector<std::uint16_t> words(kDim);
    output.read(words.data(), kRow);
    return words;
  };
  const std::vector<std::uint16_t> expected = found(kPages - 1);
  // From 2^26 on, slots of 64-token pages come around in 32 bits.
  for (const std::int64_t entry :
       {std::int64_t{kPages}, std::int64_t{1} << 25, std::int64_t{1} << 26, (std::int64_t{1} << 26) + 1,
        (std::int64_t{1} << 30) - 1, std::int64_t{-1}, -(std::int64_t{1} << 31), (std::int64_t{1} << 30) + (1 << 26)}) {
    expect(found(static_cast<std::int32_t>(entry)) == expected, "entry " + std::to_string(entry) + " reads as zeros");
  }
}

std::vector<Case> all_cases(std::mt19937_64& random) {
  std::vector<Case> cases;
  const auto add = [&](Case c) { cases.push_back(std::move(c)); };
  const std::vector<std::uint32_t> ragged = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 700, 0, 1234};
  add({"one tile, one split", {}, {64}, Mix::kDevice, 1, -1, 0, 1, 1, 1, 1});
  add({"one tile, one split", {}, {64}, Mix::kHost, 1, -1, 0, 1, 1, 1, 1});
  const std::string built = std::string(tardis_gpu_attention_shapes()) + " ";
  for (std::uint32_t type = 0; type < TARDIS_ATTENTION_TYPES; ++type) {
    for (const std::uint32_t dim : {64U, 128U, 256U}) {
      if (built.find(std::string(type_text(type)) + ":" + std::to_string(dim) + " ") == std::string::npos) continue;
      const float scale = type == TARDIS_ATTENTION_FP8_E4M3 ? 0.37F : 1;
      add({"ragged", {type, dim, 16, 4, 32}, ragged, Mix::kBoth, 1, -1, 0, 1, scale, 1 / scale});
      add({"ragged, one split", {type, dim, 8, 8, 16}, ragged, Mix::kHost, 1, -1, 0, 1, scale, 1.5F * scale, 1});
      add({"window", {type, dim, 8, 2, 64}, ragged, Mix::kBoth, 1, 99, 0, 1, 1, scale});
      add({"large logits", {type, dim, 8, 1, 128}, {1000, 333}, Mix::kBoth, 1, -1, 0, 40, 1, 1});
    }
  }
  for (const std::uint32_t page : {16U, 32U, 64U, 128U}) {
    add({"pages of " + std::to_string(page),
         {0, 128, 32, 8, page},
         {page - 1, page, page + 1, 2 * page, 3 * page + 1}});
    add({"boxes of 16", {0, 128, 32, 8, page}, {777, 64, 1}, Mix::kBoth, 1, -1, 0, 1, 1, 1, 0, 0, 5});
  }
  for (const std::uint32_t group : {1U, 2U, 3U, 5U, 7U, 8U, 12U, 16U}) {
    add({"groups of " + std::to_string(group), {0, 128, group * 2, 2, 64}, {500, 1, 0, 65}});
  }
  for (const std::uint32_t tokens : {2U, 3U, 4U}) {
    add({std::to_string(tokens) + " query tokens",
         {0, 128, 16, 2, 16},
         {1, 2, 3, 4, 64, 65, 130, 801},
         Mix::kBoth,
         tokens});
    add({std::to_string(tokens) + " query tokens, window",
         {0, 64, 32, 2, 64},
         {1, 3, 64, 67, 801, 0},
         Mix::kBoth,
         tokens,
         63});
  }
  for (const std::int32_t window : {0, 1, 62, 63, 64, 65, 127, 128, 4096}) {
    add({"window of " + std::to_string(window),
         {0, 128, 8, 2, 64},
         {1, 63, 64, 65, 128, 129, 1000},
         Mix::kBoth,
         1,
         window});
  }
  add({"soft cap", {0, 256, 8, 4, 64}, ragged, Mix::kBoth, 1, -1, 50, 8});
  add({"soft cap and window", {0, 128, 8, 4, 64}, ragged, Mix::kBoth, 1, 128, 30, 8});
  add({"equal logits", {0, 128, 8, 2, 64}, {3000, 65}, Mix::kBoth, 1, -1, 0, 1, 1, 1, 0, 0, 0, true, true});
  add({"rising logits", {0, 128, 8, 2, 64}, {2000, 65}, Mix::kBoth, 1, -1, 0, 1, 1, 1, 2, 0, 0, true, false, true});
  add({"more splits than tiles", {0, 128, 8, 2, 64}, {100, 0, 3000}, Mix::kBoth, 1, -1, 0, 1, 1, 1, 256});
  add({"seven splits", {0, 128, 8, 2, 64}, {100, 0, 3000, 1}, Mix::kBoth, 1, -1, 0, 1, 1, 1, 7});
  add({"strided pools, no lse", {0, 128, 32, 8, 64}, {100, 700}, Mix::kBoth, 1, -1, 0, 1, 1, 1, 0, 8, 0, false});
  add({"long", {0, 128, 32, 8, 64}, {12345, 4096}, Mix::kBoth});
  add({"all empty", {0, 128, 32, 8, 64}, {0, 0}, Mix::kHost});
  std::vector<std::uint32_t> lengths;
  for (int i = 0; i < 40; ++i) lengths.push_back(static_cast<std::uint32_t>(random() % 1500));
  add({"batch of 40", {0, 128, 32, 8, 64}, lengths});
  return cases;
}

}  // namespace
}  // namespace tardis::attention::testing

int main(int count, char** arguments) {
  using namespace tardis::attention::testing;
  if (!has_gpu()) return kSkipped;
  std::mt19937_64 random(fresh_seed());
  const int times = count > 1 ? std::atoi(arguments[1]) : 1;
  const std::string named = count > 2 ? arguments[2] : "";
  std::printf("built: %s\n", tardis_gpu_attention_shapes());
  check(tardis_gpu_attention_load(), "tardis_gpu_attention_load");
  check_reference(random());
  check_entries_outside(random());
  for (int i = 0; i < times; ++i) {
    const std::vector<Case> cases = all_cases(random);
    std::size_t run = 0;
    for (const Case& c : cases) {
      if (c.name.find(named) == std::string::npos) continue;
      Rig(c, random()).run();
      ++run;
    }
    if (named.empty()) Rig({"graph", {0, 128, 32, 8, 64}, {2000, 64, 900, 1500}}, random()).run_graph(20);
    std::printf("%zu cases%s\n", run, named.empty() ? " and a graph of 20 replays" : "");
    if (run == 0) ++failures;
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
