// SPDX-License-Identifier: Apache-2.0
// Rates of scattered pages between pinned host memory and HBM: the movers, beside what else could carry them, after the
// limits of the link. One JSON object a line (bench/bandwidth.py reads them); rates are medians, in GB/s (1e9 bytes).
//   tardis_gpu_gio_bandwidth_bench [--quick] [--movers] [--pool MIB]
// --movers: nothing beside them but the limits.
// Exit status 1: an error, or a page that was not right; 77: no GPU here.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "gio/mover.h"
#include "gio/pieces.h"
#include "gpu_support.h"

namespace {

using namespace tardis::gio;
using namespace tardis::gpu_test;

constexpr std::uint32_t kPages = 1024;  // in flight: of one call
constexpr int kSamples = 7;
constexpr int kBandwidthCtas[] = {1, 2, 4};

enum class Way { kIn, kOut };  // to HBM, from HBM
const char* name_of(Way way) { return way == Way::kIn ? "in" : "out"; }

// --- contents: a word is told by its place, so that no second copy of the data has to be read to compare
// --------------

__host__ __device__ std::uint64_t word_at(std::uint64_t place, std::uint64_t seed) {
  std::uint64_t x = place * 0x9E3779B97F4A7C15 + seed;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

__global__ void fill_words(std::uint64_t* words, std::uint64_t count, std::uint64_t seed) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    words[i] = word_at(i, seed);
  }
}

// One CTA a piece at a time; the source's words are known from their place in `source_pool`.
__global__ void count_wrong(const Piece* pieces, std::uint32_t count, std::uint64_t source_pool, std::uint64_t seed,
                            unsigned long long* wrong) {
  for (std::uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
    const Piece piece = pieces[i];
    const auto* words = reinterpret_cast<const volatile std::uint64_t*>(piece.destination);
    const std::uint64_t first = (piece.source - source_pool) / 8;
    for (std::uint64_t word = threadIdx.x; word < piece.bytes / 8; word += blockDim.x) {
      if (words[word] != word_at(first + word, seed)) atomicAdd(wrong, 1ull);
    }
  }
}

// What SMs do at best: 16 bytes a load, several in flight a thread, one run of bytes.
__global__ void __launch_bounds__(512) plain_copy(uint4* to, const uint4* from, std::uint64_t count) {
  constexpr int kInFlight = 4;
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kInFlight - 1) * step < count; i += kInFlight * step) {
    uint4 values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) values[k] = __ldcg(from + i + k * step);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) to[i + k * step] = values[k];
  }
  for (; i < count; i += step) to[i] = __ldcg(from + i);
}

// --- timing ----------------------------------------------------------------------------------------------------------

template <class Work>
double median_rate(cudaStream_t stream, double bytes, int samples, Work work) {
  Event start, end;
  std::vector<double> rates;
  work(0);
  for (int sample = 0; sample < samples; ++sample) {
    start.record(stream);
    work(sample + 1);
    end.record(stream);
    end.wait();
    rates.push_back(bytes / end.milliseconds_since(start) * 1e-6);
  }
  std::nth_element(rates.begin(), rates.begin() + rates.size() / 2, rates.end());
  return rates[rates.size() / 2];
}

void row(const char* name, const char* system, Way way, const char* order, std::size_t size, double rate, double limit,
         int ctas) {
  std::printf(
      "{\"case\": \"%s\", \"system\": \"%s\", \"way\": \"%s\", \"order\": \"%s\", \"size\": %zu, \"value\": %.3f, "
      "\"limit\": %.3f, \"ctas\": %d}\n",
      name, system, name_of(way), order, size, rate, limit, ctas);
  std::fflush(stdout);
}

// --- the bench -------------------------------------------------------------------------------------------------------

// Calls of kPages pages of one size, every call with pages of its own as far as the pools have them.
struct Calls {
  std::size_t page_bytes;
  std::uint32_t sets;
  std::vector<Piece> pieces;  // [set][page]
  Memory device_pieces, count;

  Calls(const Memory& source, const Memory& destination, std::size_t page_bytes, bool random_order,
        std::mt19937_64& random)
      : page_bytes(page_bytes),
        sets(static_cast<std::uint32_t>(std::min<std::size_t>(16, source.size() / page_bytes / kPages))),
        device_pieces(Where::kDevice, std::size_t{sets} * kPages * sizeof(Piece)),
        count(Where::kDevice, 4) {
    std::vector<std::uint64_t> from(sets * kPages);
    std::iota(from.begin(), from.end(), 0);
    std::vector<std::uint64_t> to = from;
    if (random_order) {
      // From all over the pools, without two pages to one place.
      std::vector<std::uint64_t> places(source.size() / page_bytes);
      std::iota(places.begin(), places.end(), 0);
      for (auto* chosen : {&from, &to}) {
        std::shuffle(places.begin(), places.end(), random);
        std::copy_n(places.begin(), chosen->size(), chosen->begin());
      }
    }
    for (std::size_t i = 0; i < from.size(); ++i) {
      pieces.push_back(
          {source.address() + from[i] * page_bytes, destination.address() + to[i] * page_bytes, page_bytes});
    }
    device_pieces.write(pieces.data(), pieces.size() * sizeof(Piece));
    count.write(&kPages, 4);
  }
  const Piece* set(int call) const { return pieces.data() + std::size_t{call % sets} * kPages; }
  tardis_gpu_move_args args(int call, std::uint32_t ctas) const {
    return {device_pieces.data<Piece>() + std::size_t{call % sets} * kPages, count.data<std::uint32_t>(), kPages, ctas};
  }
  double bytes() const { return static_cast<double>(page_bytes) * kPages; }
};

class Bench {
 public:
  Bench(std::size_t pool_bytes, bool quick, bool only_movers)
      : quick_(quick),
        only_movers_(only_movers),
        host_(Where::kPinned, pool_bytes),
        device_(Where::kDevice, pool_bytes),
        other_(Where::kDevice, pool_bytes),
        wrong_(Where::kDevice, 8),
        random_(fresh_seed()),
        seed_(random_()) {
    check(tardis_gpu_mover_prepare(), "tardis_gpu_mover_prepare");
  }

  int run() {
    for (const Way way : {Way::kIn, Way::kOut}) limits(way);
    for (const Way way : {Way::kIn, Way::kOut}) {
      fill(source(way));
      for (const std::size_t size : sizes()) {
        for (const bool random_order : {false, true}) pages(way, size, random_order);
      }
    }
    if (!only_movers_) {
      inside();
      both_ways();
    }
    return wrong_total_ == 0 ? 0 : 1;
  }

 private:
  const Memory& source(Way way) const { return way == Way::kIn ? host_ : device_; }
  const Memory& destination(Way way) const { return way == Way::kIn ? device_ : host_; }
  double limit(Way way) const { return sm_limit_[static_cast<int>(way)]; }
  std::vector<std::size_t> sizes() const {
    if (quick_) return {4 << 10, 32 << 10, 128 << 10, 512 << 10};
    return {4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20};
  }

  std::vector<int> mover_ctas() const {
    if (only_movers_) return {2, 4};
    return {std::begin(kBandwidthCtas), std::end(kBandwidthCtas)};
  }

  void fill(const Memory& memory) {
    fill_words<<<264, 512, 0, stream_>>>(memory.data<std::uint64_t>(), memory.size() / 8, seed_);
    check(cudaGetLastError(), "fill_words");
    stream_.wait();
  }

  void limits(Way way) {
    const std::size_t bytes = std::min<std::size_t>(host_.size(), 1 << 30);
    const void* from = source(way).data();
    void* to = destination(way).data();
    const int samples = quick_ ? 3 : kSamples;
    const double engine = median_rate(stream_, static_cast<double>(bytes), samples, [&](int) {
      check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
    });
    row("limit", "copy engine", way, "one run", bytes, engine, 0, 0);
    double best = 0;
    for (const int ctas : {8, 16, 32, 64}) {
      const double plain = median_rate(stream_, static_cast<double>(bytes), samples, [&](int) {
        plain_copy<<<ctas, 512, 0, stream_>>>(static_cast<uint4*>(to), static_cast<const uint4*>(from), bytes / 16);
        check(cudaGetLastError(), "plain_copy");
      });
      row("limit", "plain loads", way, "one run", bytes, plain, 0, ctas);
      best = std::max(best, plain);
    }
    sm_limit_[static_cast<int>(way)] = best;
  }

  // Poisons the destinations of a set, runs, and compares every word.
  template <class Work>
  void verify(const Calls& calls, Way way, const char* system, Work work) {
    check(cudaMemsetAsync(wrong_.data(), 0, 8, stream_), "cudaMemsetAsync");
    fill_words<<<264, 512, 0, stream_>>>(destination(way).data<std::uint64_t>(), destination(way).size() / 8, ~seed_);
    work(0);
    count_wrong<<<264, 512, 0, stream_>>>(calls.device_pieces.data<Piece>(), kPages, source(way).address(), seed_,
                                          wrong_.data<unsigned long long>());
    check(cudaGetLastError(), "count_wrong");
    stream_.wait();
    std::uint64_t wrong = 0;
    wrong_.read(&wrong, 8);
    if (wrong == 0) return;
    std::fprintf(stderr, "%s, %s, pages of %zu: %llu wrong words\n", system, name_of(way), calls.page_bytes,
                 static_cast<unsigned long long>(wrong));
    ++wrong_total_;
  }

  // Enough calls back to back that launching is seen as little as in a long transfer, and one by itself.
  template <class Work>
  void measure(const Calls& calls, const char* system, Way way, const char* order, int ctas, Work work) {
    const int chain = static_cast<int>(std::clamp(256e6 / calls.bytes(), 1.0, 32.0));
    const int samples = quick_ ? 3 : kSamples;
    int call = 0;
    const double rate = median_rate(stream_, calls.bytes() * chain, samples, [&](int) {
      for (int i = 0; i < chain; ++i) work(call++);
    });
    row("pages", system, way, order, calls.page_bytes, rate, limit(way), ctas);
    if (chain == 1) return;
    const double single = median_rate(stream_, calls.bytes(), samples, [&](int) { work(call++); });
    row("pages, one call", system, way, order, calls.page_bytes, single, limit(way), ctas);
  }

  void pages(Way way, std::size_t size, bool random_order) {
    const char* order = random_order ? "random" : "sequential";
    const Calls calls(source(way), destination(way), size, random_order, random_);
    const DigestBuffers digests(size, calls.sets);
    for (const int ctas : mover_ctas()) {
      const auto plain = [&](int call) {
        const auto args = calls.args(call, ctas);
        check(tardis_gpu_move(&args, stream_), "tardis_gpu_move");
      };
      if (ctas == mover_ctas().front()) verify(calls, way, "mover", plain);
      measure(calls, "mover", way, order, ctas, plain);
    }
    for (std::uint32_t set = 0; set < calls.sets; ++set) {
      const auto args = calls.args(static_cast<int>(set), TARDIS_GPU_MAX_MOVER_CTAS);
      const auto digest_args = digests.args(set, true);
      check(tardis_gpu_move_digested(&args, &digest_args, stream_), "tardis_gpu_move_digested");
    }
    for (const int ctas : mover_ctas()) {
      const auto digesting = [&](int call) {
        const auto args = calls.args(call, ctas);
        const auto digest_args = digests.args(call % calls.sets, false);
        check(tardis_gpu_move_digested(&args, &digest_args, stream_), "tardis_gpu_move_digested");
      };
      if (ctas == mover_ctas().front()) verify(calls, way, "mover with digests", digesting);
      measure(calls, "mover with digests", way, order, ctas, digesting);
    }
    std::uint32_t mismatches = 0;
    digests.errors.read(&mismatches, 4);
    if (mismatches != 0) {
      std::fprintf(stderr, "%s, pages of %zu: %u digests were not those of the first pass\n", name_of(way), size,
                   mismatches);
      ++wrong_total_;
    }
    if (only_movers_) return;
    measure(calls, "cudaMemcpyAsync a page", way, order, 0, [&](int call) {
      const Piece* set = calls.set(call);
      for (std::uint32_t i = 0; i < kPages; ++i) {
        check(cudaMemcpyAsync(reinterpret_cast<void*>(set[i].destination), reinterpret_cast<const void*>(set[i].source),
                              size, cudaMemcpyDefault, stream_),
              "cudaMemcpyAsync");
      }
    });
#if CUDART_VERSION >= 13000
    std::vector<void*> to(kPages);
    std::vector<const void*> from(kPages);
    std::vector<std::size_t> bytes(kPages, size);
    measure(calls, "cudaMemcpyBatchAsync", way, order, 0, [&](int call) {
      const Piece* set = calls.set(call);
      for (std::uint32_t i = 0; i < kPages; ++i) {
        to[i] = reinterpret_cast<void*>(set[i].destination);
        from[i] = reinterpret_cast<const void*>(set[i].source);
      }
      cudaMemcpyAttributes attributes = {};
      attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
      std::size_t first = 0;
      check(cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), kPages, &attributes, &first, 1, stream_),
            "cudaMemcpyBatchAsync");
    });
#endif
  }

  // HBM to HBM: no link, so no limit of it.
  void inside() {
    for (const std::size_t size : {std::size_t{32} << 10, std::size_t{512} << 10}) {
      const Calls calls(device_, other_, size, true, random_);
      for (const int ctas : kBandwidthCtas) {
        const double rate = median_rate(stream_, calls.bytes(), kSamples, [&](int call) {
          const auto args = calls.args(call, ctas);
          check(tardis_gpu_move(&args, stream_), "tardis_gpu_move");
        });
        row("HBM to HBM", "mover", Way::kIn, "random", size, rate, 0, ctas);
      }
    }
  }

  // In and out at once, two CTAs each.
  void both_ways() {
    const std::size_t size = 128 << 10;
    const std::size_t half = host_.size() / 2;
    Stream second;
    const Calls in(host_, device_, size, false, random_);
    Calls out(device_, host_, size, false, random_);
    for (Piece& piece : out.pieces) {
      piece.source += half;
      piece.destination += half;
    }
    out.device_pieces.write(out.pieces.data(), out.pieces.size() * sizeof(Piece));
    Event started, ended;
    const double rate = median_rate(stream_, 8 * (in.bytes() + out.bytes()), kSamples, [&](int) {
      started.record(stream_);
      check(cudaStreamWaitEvent(second, event_of(started)), "cudaStreamWaitEvent");
      for (int call = 0; call < 8; ++call) {
        const auto in_args = in.args(0, 2), out_args = out.args(0, 2);
        check(tardis_gpu_move(&in_args, stream_), "tardis_gpu_move");
        check(tardis_gpu_move(&out_args, second), "tardis_gpu_move");
      }
      ended.record(second);
      check(cudaStreamWaitEvent(stream_, event_of(ended)), "cudaStreamWaitEvent");
    });
    row("both ways, sum", "mover", Way::kIn, "sequential", size, rate, limit(Way::kIn) + limit(Way::kOut), 4);
  }
  static cudaEvent_t event_of(const Event& event) { return event.get(); }

  // Of a layer of kPages pages, each one piece; what is expected, by set of pages.
  struct DigestBuffers {
    std::uint32_t chunks;
    Memory chunk_digests, expected, status, errors;
    DigestBuffers(std::size_t page_bytes, std::uint32_t sets)
        : chunks(static_cast<std::uint32_t>((page_bytes + kChunkBytes - 1) / kChunkBytes)),
          chunk_digests(Where::kDevice, std::size_t{kPages} * chunks * 8),
          expected(Where::kDevice, std::size_t{sets} * kPages * 8),
          status(Where::kDevice, kPages * 4),
          errors(Where::kDevice, 4) {
      errors.fill(0);
    }
    tardis_gpu_digest_args args(std::uint32_t set, bool learn) const {
      auto* const of_set = expected.data<std::uint64_t>() + std::size_t{set} * kPages;
      return {1,
              chunks,
              nullptr,
              learn ? nullptr : of_set,
              chunk_digests.data<std::uint64_t>(),
              learn ? of_set : nullptr,
              status.data<std::uint32_t>(),
              errors.data<std::uint32_t>()};
    }
  };

  const bool quick_, only_movers_;
  Stream stream_;
  Memory host_, device_, other_, wrong_;
  std::mt19937_64 random_;
  const std::uint64_t seed_;
  double sm_limit_[2] = {};
  int wrong_total_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (!has_gpu()) return kSkipped;
  bool quick = false, only_movers = false;
  std::size_t pool_mib = 2048;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--quick") {
      quick = true;
    } else if (argument == "--movers") {
      only_movers = true;
    } else if (argument == "--pool" && i + 1 < argc) {
      pool_mib = std::strtoull(argv[++i], nullptr, 10);
    } else {
      std::fprintf(stderr, "usage: %s [--quick] [--movers] [--pool MIB]\n", argv[0]);
      return 1;
    }
  }
  return Bench(pool_mib << 20, quick, only_movers).run();
}
