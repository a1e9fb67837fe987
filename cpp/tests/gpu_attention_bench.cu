// SPDX-License-Identifier: Apache-2.0
// Times of decode attention over KV in pinned host memory and in HBM, after the limits of both, and of the ways in
// which tensor copies can ask for the same bytes. One JSON object a line (bench/attention.py reads them); medians, GB/s
// (1e9 bytes) of K and V. Calls are nodes of a graph, each over pages of its own, so that none finds anything in L2.
//   tardis_gpu_attention_bench [parts (lchdvst)] [MiB of K, and of V (512)]
// l: limits; c: copies; h, d: contexts in host memory, in HBM; v: other shapes; s: splits; t: boxes and promotion.
// Exit status 1: an error; 77: no GPU here.
#include <functional>

#include "attention/tensor_copy.cuh"
#include "attention/tensor_map.h"
#include "gpu_attention_support.cuh"

namespace tardis::attention::testing {
namespace {

constexpr int kRepeats = 7;
constexpr std::uint32_t kChunk = 16 << 10, kProbeStages = 6;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Seconds of what is enqueued, once before it counts.
double seconds(cudaStream_t stream, const std::function<void()>& enqueue, int repeats = kRepeats) {
  enqueue();
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    Event start, end;
    start.record(stream);
    enqueue();
    end.record(stream);
    end.wait();
    times.push_back(end.milliseconds_since(start) * 1e-3);
  }
  return median(times);
}

// --- limits
// --------------------------------------------------------------------------------------------------------------

__global__ void read_plainly(const uint4* from, std::uint64_t count, unsigned* sink) {
  unsigned sum = 0;
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 values[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) values[k] = __ldcs(from + i + k * step);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum ^= values[k].x ^ values[k].y ^ values[k].z ^ values[k].w;
  }
  for (; i < count; i += step) sum ^= from[i].x;
  if (sum == 0x12345678) *sink = sum;
}

enum class Copy : std::uint32_t {
  kBulk,        // 16 KiB that lie side by side
  kHead,        // 64 tokens of one head, in boxes of 64 columns: what the decode kernel does
  kHeadsLater,  // 8 tokens of 8 heads in one box, token by token for each 64 columns
  kHeadsFirst,  // the same box in the order of memory
};

// One thread of a CTA loads chunks into a ring and waits for them; nobody looks at them.
__global__ void __launch_bounds__(32)
    load_chunks(const __grid_constant__ CUtensorMap map, std::uint64_t address, Copy copy, std::uint32_t chunks) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ std::uint64_t filled[kProbeStages];
  if (threadIdx.x != 0) return;
  for (std::uint64_t& barrier : filled) barrier_init(&barrier, 1);
  fence_barrier_init();
  const auto load = [&](std::uint32_t chunk, std::uint32_t stage) {
    unsigned char* const to = shared + stage * kChunk;
    barrier_arrive_expecting(&filled[stage], kChunk);
    if (copy == Copy::kBulk) {
      gio::bulk_load(to, address + std::uint64_t{chunk} * kChunk, kChunk, &filled[stage]);
    } else if (copy == Copy::kHead) {
      for (int block = 0; block < 2; ++block) {
        load_box(to + block * kBlockBytes, &map, static_cast<int>(chunk / 8 * 64), block, static_cast<int>(chunk % 8),
                 &filled[stage]);
      }
    } else if (copy == Copy::kHeadsLater) {
      load_box(to, &map, static_cast<int>(chunk * 8), 0, 0, &filled[stage]);
    } else {
      load_box(to, &map, 0, 0, static_cast<int>(chunk * 8), &filled[stage]);
    }
  };
  std::uint32_t next = blockIdx.x, stage = 0, parity = 0;
  for (std::uint32_t i = 0; i < kProbeStages; ++i, next += gridDim.x) {
    if (next < chunks) load(next, i);
  }
  for (std::uint32_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x, next += gridDim.x) {
    wait_for(&filled[stage], parity);
    if (next < chunks) load(next, stage);
    if (++stage == kProbeStages) stage = 0, parity ^= 1;
  }
}

void encode(CUtensorMap* map, std::uint64_t address, std::uint64_t slots, Copy copy, MapPromotion promotion) {
  constexpr std::uint64_t kSlot = 2048, kHead = 256;
  const bool ordered = copy == Copy::kHeadsFirst;
  const cuuint64_t sizes[2][4] = {{64, slots, 2, 8}, {64, 2, 8, slots}};
  const cuuint64_t strides[2][3] = {{kSlot, 128, kHead}, {128, kHead, kSlot}};
  const cuuint32_t boxes[2][4] = {{64, 8, 2, 8}, {64, 2, 8, 8}}, head[4] = {64, 64, 1, 1}, steps[4] = {1, 1, 1, 1};
  constexpr CUtensorMapL2promotion kPromotions[] = {CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  const CUresult result = tensor_map_encoder().call(
      map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, reinterpret_cast<void*>(address), sizes[ordered], strides[ordered],
      copy == Copy::kHead ? head : boxes[ordered], steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      kPromotions[static_cast<int>(promotion)], CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
}

// --- decode
// --------------------------------------------------------------------------------------------------------------

struct Call {
  std::string name;
  Shape shape;
  std::uint32_t batch = 1, tokens = 8192;
  std::uint32_t splits = 0, tuning = 0;
};

class Bench {
 public:
  explicit Bench(std::size_t bytes) : bytes_(bytes), sink_(Where::kDevice, 4), random_(fresh_seed()) {
    for (const Where where : {Where::kPinned, Where::kDevice}) {
      memory_[static_cast<int>(where)].reserve(2);
      Memory& keys = memory_[static_cast<int>(where)].emplace_back(where, bytes);
      Memory& values = memory_[static_cast<int>(where)].emplace_back(where, bytes);
      // The same small number everywhere, in every type: times do not depend on what is multiplied, and power does.
      keys.fill(0x3B);
      values.fill(0x3B);
    }
    check(tardis_gpu_attention_load(), "tardis_gpu_attention_load");
    check(cudaGetDevice(&device_), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device_), "cudaDeviceGetAttribute");
  }

  // Both give the best of what they tried, for later rows.
  void limits() {
    for (const Where where : {Where::kPinned, Where::kDevice}) {
      double best = 0;
      for (const int ctas : {sms_, sms_ * 4, sms_ * 8}) {
        const double rate = rate_of(2 * bytes_, [&] {
          for (const Memory& memory : memory_[static_cast<int>(where)]) {
            read_plainly<<<ctas, 512, 0, stream_>>>(memory.data<uint4>(), bytes_ / 16, sink_.data<unsigned>());
          }
        });
        row("limit", std::string("16-byte loads, ") + std::to_string(ctas) + " CTAs", name_of(where), "", rate, 0);
        best = std::max(best, rate);
      }
      const double bulk = copies(where, Copy::kBulk, sms_ * 2, MapPromotion::kNone);
      row("limit", "bulk copies of 16 KiB", name_of(where), "", bulk, 0);
      limit_[static_cast<int>(where)] = std::max(best, bulk);
    }
  }

  void tensor_copies() {
    constexpr const char* kNames[] = {"bulk copies", "64 tokens of a head", "8 tokens of 8 heads, by columns",
                                      "8 tokens of 8 heads, as in memory"};
    constexpr const char* kPromoted[] = {"none", "128 bytes", "256 bytes"};
    for (const Where where : {Where::kPinned, Where::kDevice}) {
      for (std::uint32_t copy = 0; copy < 4; ++copy) {
        for (std::uint32_t promotion = 0; promotion < 3; ++promotion) {
          if (copy == 0 && promotion != 0) continue;
          for (const int ctas : {8, 32, sms_, sms_ * 2}) {
            if (where == Where::kDevice && ctas < sms_) continue;
            const double rate = copies(where, static_cast<Copy>(copy), ctas, static_cast<MapPromotion>(promotion));
            row("copies", kNames[copy], name_of(where),
                std::string("promotion ") + kPromoted[promotion] + ", " + std::to_string(ctas) + " CTAs", rate,
                limit_of(where));
          }
        }
      }
    }
  }

  void decode_of(Where where, const Call& call) {
    const Shape& s = call.shape;
    const std::uint64_t slot_bytes = std::uint64_t{s.kv_heads} * s.head_dim * stored_bytes(s.type);
    const std::uint64_t slots = bytes_ / slot_bytes / s.page_tokens * s.page_tokens, pages = slots / s.page_tokens;
    const std::uint64_t request_pages = (call.tokens + s.page_tokens - 1) / s.page_tokens;
    const std::uint64_t call_pages = request_pages * call.batch;
    if (call_pages > pages) return;
    const std::uint64_t calls = std::min<std::uint64_t>(pages / call_pages, 32);
    std::vector<std::int32_t> table(pages);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random_);
    std::vector<std::int32_t> lengths(call.batch, static_cast<std::int32_t>(call.tokens));
    Memory tables(Where::kDevice, pages * 4), sizes(Where::kDevice, call.batch * 4);
    tables.write(table.data(), pages * 4);
    sizes.write(lengths.data(), lengths.size() * 4);
    const std::uint64_t row_bytes = std::uint64_t{s.row()} * 2;
    Memory queries(Where::kDevice, row_bytes * call.batch), output(Where::kDevice, row_bytes * call.batch);
    queries.fill(0x3B);
    const std::uint64_t head_bytes = std::uint64_t{s.head_dim} * stored_bytes(s.type);
    const std::vector<Memory>& sides = memory_[static_cast<int>(where)];
    tardis_attention_decode d{};
    d.pools[0] = {sides[0].address(), sides[1].address(), slots, slot_bytes, head_bytes, slot_bytes, head_bytes};
    d.queries = queries.data();
    d.output = output.data();
    d.lengths = sizes.data<std::int32_t>();
    d.query_row_bytes = d.output_row_bytes = row_bytes;
    d.page_row = request_pages;
    d.scale = 1 / std::sqrt(static_cast<float>(s.head_dim));
    d.key_scale = d.value_scale = 1;
    d.window_left = -1;
    d.batch = call.batch;
    d.query_tokens = 1;
    d.query_heads = s.query_heads;
    d.kv_heads = s.kv_heads;
    d.head_dim = s.head_dim;
    d.page_tokens = s.page_tokens;
    d.type = s.type;
    d.max_tokens = call.tokens;
    d.splits = call.splits;
    d.tuning = call.tuning;
    Memory workspace(Where::kDevice, workspace_bytes(d) + 16);
    d.workspace = workspace.data();
    d.workspace_bytes = workspace.size();

    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (std::uint64_t i = 0; i < calls; ++i) {
      d.pages = tables.data<std::int32_t>() + i * call_pages;
      decode(d, stream_);
    }
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    const double time = seconds(stream_, [&] { check(cudaGraphLaunch(exec, stream_), "cudaGraphLaunch"); }) /
                        static_cast<double>(calls);
    check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    const double bytes = 2.0 * static_cast<double>(slot_bytes) * call.tokens * call.batch;
    const std::string what = std::string(type_text(s.type)) + ", " + std::to_string(s.query_heads) + "/" +
                             std::to_string(s.kv_heads) + " heads of " + std::to_string(s.head_dim) + ", page " +
                             std::to_string(s.page_tokens);
    row("decode", what + call.name, name_of(where),
        "batch " + std::to_string(call.batch) + ", " + std::to_string(call.tokens) + " tokens", bytes / time * 1e-9,
        limit_of(where), time * 1e6);
  }

 private:
  double limit_of(Where where) const { return limit_[static_cast<int>(where)]; }

  double rate_of(std::size_t bytes, const std::function<void()>& enqueue) {
    const double time = seconds(
        stream_,
        [&] {
          enqueue();
          check(cudaGetLastError(), "launch");
        },
        5);
    return static_cast<double>(bytes) / time * 1e-9;
  }

  double copies(Where where, Copy copy, int ctas, MapPromotion promotion) {
    const Memory& memory = memory_[static_cast<int>(where)][0];
    CUtensorMap map{};
    if (copy != Copy::kBulk) encode(&map, memory.address(), bytes_ / 2048, copy, promotion);
    check(cudaFuncSetAttribute(load_chunks, cudaFuncAttributeMaxDynamicSharedMemorySize, kProbeStages * kChunk),
          "cudaFuncSetAttribute");
    // An eighth will do.
    const auto chunks = static_cast<std::uint32_t>(bytes_ / 8 / kChunk);
    return rate_of(std::size_t{chunks} * kChunk, [&] {
      load_chunks<<<ctas, 32, kProbeStages * kChunk, stream_>>>(map, memory.address(), copy, chunks);
    });
  }

  void row(const char* what, const std::string& name, const char* where, const std::string& size, double rate,
           double limit, double us = 0) const {
    std::printf(
        "{\"case\": \"%s\", \"system\": \"%s\", \"memory\": \"%s\", \"size\": \"%s\", \"value\": %.2f, \"unit\": "
        "\"GB/s\", ",
        what, name.c_str(), where, size.c_str(), rate);
    if (limit > 0)
      std::printf("\"limit\": %.2f, \"ratio\": %.4f", limit, rate / limit);
    else
      std::printf("\"limit\": null, \"ratio\": null");
    if (us > 0) std::printf(", \"us\": %.1f", us);
    std::printf("}\n");
    std::fflush(stdout);
  }

  const std::size_t bytes_;
  std::vector<Memory> memory_[2];
  Memory sink_;
  Stream stream_;
  std::mt19937_64 random_;
  int device_ = 0, sms_ = 0;
  double limit_[2] = {0, 0};
};

void run(const std::string& parts, std::size_t bytes) {
  Bench bench(bytes);
  const auto wants = [&](char part) { return parts.find(part) != std::string::npos; };
  if (wants('l')) bench.limits();
  if (wants('c')) bench.tensor_copies();
  for (const auto& [part, where] : {std::pair{'h', Where::kPinned}, std::pair{'d', Where::kDevice}}) {
    if (!wants(part)) continue;
    for (const std::uint32_t batch : {1U, 4U, 16U}) {
      for (std::uint32_t tokens = 1024; tokens <= 131072; tokens *= 2) bench.decode_of(where, {"", {}, batch, tokens});
    }
  }
  if (wants('v')) {
    for (const Where where : {Where::kPinned, Where::kDevice}) {
      for (std::uint32_t type = 0; type < 3; ++type) {
        for (const std::uint32_t dim : {64U, 128U, 256U})
          bench.decode_of(where, {"", {type, dim, 32, 8, 64}, 1, 32768});
      }
      for (const std::uint32_t page : {16U, 32U, 128U}) bench.decode_of(where, {"", {0, 128, 32, 8, page}, 1, 32768});
      for (const std::uint32_t heads : {1U, 2U, 4U, 16U, 32U}) {
        bench.decode_of(where, {"", {0, 128, 32, heads, 64}, 1, 32768});
      }
      bench.decode_of(where, {"", {0, 128, 64, 4, 64}, 1, 32768});
    }
  }
  if (wants('s')) {
    for (const Where where : {Where::kPinned, Where::kDevice}) {
      for (const std::uint32_t tokens : {8192U, 32768U}) {
        for (const std::uint32_t splits : {1U, 2U, 4U, 8U, 16U, 33U, 66U, 128U}) {
          bench.decode_of(where, {", " + std::to_string(splits) + " splits", {}, 1, tokens, splits});
        }
      }
    }
  }
  if (wants('t')) {
    for (const Where where : {Where::kPinned, Where::kDevice}) {
      for (const std::uint32_t box : {5U, 6U, 7U}) {
        for (const std::uint32_t promotion : {1U, 2U, 3U}) {
          bench.decode_of(where, {", boxes of " + std::to_string(1U << (box - 1)) + ", promotion " +
                                      std::to_string(promotion == 1 ? 0 : 64 << (promotion - 1)),
                                  {},
                                  1,
                                  32768,
                                  0,
                                  box | promotion << 4});
        }
      }
    }
  }
}

}  // namespace
}  // namespace tardis::attention::testing

int main(int count, char** arguments) {
  using namespace tardis::attention::testing;
  if (!has_gpu()) return kSkipped;
  const std::size_t megabytes = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 512;
  run(count > 1 ? arguments[1] : "lchdvst", megabytes << 20);
  return 0;
}
