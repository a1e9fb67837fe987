// SPDX-License-Identifier: Apache-2.0
// On a GPU: the PRP and SGL code, built for the device, against the same code on the host: tables in device memory and
// in mapped host memory, and lists that a thread builds for itself.
// Exit status 0: equal; 1: not, or a CUDA error; 77: no GPU here.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "gpu_support.h"
#include "nvme/prp.h"
#include "nvme/sgl.h"

namespace {

using namespace tardis::nvme;
using tardis::gpu_test::check;

constexpr std::uint64_t kRegionBytes = 3000ull * kPageBytes - 512;
constexpr std::uint64_t kGranule = 64 << 10;
constexpr std::uint32_t kQueries = 1 << 13;
constexpr std::uint32_t kLists = 2, kSegments = 3, kSegmentSlots = 3, kBlocks = 5;  // of a thread that builds
constexpr std::uint64_t kTableBus = 0x700000000;

struct Query {
  std::uint64_t offset, length;
};

// Everything that the code tells of one query, without padding, to be compared as bytes.
struct Answer {
  std::uint64_t prp_longest, sgl_longest;
  PrpPair prp, built_prp;
  SglDescriptor sgl, built_sgl;
  std::uint32_t prp_status, sgl_status, built_prp_status, built_sgl_status;
};
static_assert(sizeof(Answer) == 96);

// Bus addresses of a buffer whose pages are apart from each other.
struct PageAddress {
  std::uint64_t base;
  TARDIS_HD std::uint64_t operator()(std::uint64_t page) const { return base + page * 3 * kPageBytes; }
};

// List and descriptor memory of one query.
struct Scratch {
  std::uint64_t words[kLists * kPrpSlots];
  SglDescriptor entries[kSegments * kSegmentSlots];
};

TARDIS_HD Answer answer(const PrpTable& prps, const SglTable& sgls, const Query& query, Scratch& scratch) {
  Answer out = {};
  out.prp_longest = prps.longest(query.offset);
  out.sgl_longest = sgls.longest(query.offset, query.length);
  out.prp_status = static_cast<std::uint32_t>(prps.describe(query.offset, query.length, out.prp));
  out.sgl_status = static_cast<std::uint32_t>(sgls.describe(query.offset, query.length, out.sgl));

  const std::uint64_t bus = 0x100000000 + query.offset / 8 * 8;  // somewhere in its page
  const PrpList lists[kLists] = {{scratch.words + bus % kPageBytes / 8, bus}, {scratch.words + kPrpSlots, 0x200000000}};
  out.built_prp_status = static_cast<std::uint32_t>(build_prp(
      PageAddress{0x400000000}, query.offset % kPageBytes / 4 * 4, query.length, lists, kLists, out.built_prp));
  SglRange ranges[kBlocks] = {};
  for (std::uint32_t i = 0; i < kBlocks; ++i) ranges[i] = {query.offset + i * query.length * 2, query.length};
  SglMemory memory[kSegments] = {};
  for (std::uint32_t i = 0; i < kSegments; ++i) {
    memory[i] = {scratch.entries + i * kSegmentSlots, 0x300000000 + i * std::uint64_t{kPageBytes}, kSegmentSlots};
  }
  const auto blocks = static_cast<std::uint32_t>(1 + query.length % kBlocks);
  out.built_sgl_status = static_cast<std::uint32_t>(build_sgl(SglRules::of(kSglAnyAlignment, 0), ranges, blocks,
                                                              blocks * query.length, memory, kSegments, out.built_sgl));
  return out;
}

__global__ void answer_all(PrpTable prps, SglTable sgls, const Query* queries, Answer* answers, Scratch* scratch) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kQueries) answers[i] = answer(prps, sgls, queries[i], scratch[i]);
}

template <class T>
T* device_copy(const std::vector<T>& from) {
  T* memory = nullptr;
  check(cudaMalloc(&memory, from.size() * sizeof(T)), "cudaMalloc");
  check(cudaMemcpy(memory, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return memory;
}

int compare(const char* where, const PrpTable& prps, const SglTable& sgls, const std::vector<Query>& queries,
            const std::vector<Answer>& expected, const std::vector<Scratch>& expected_scratch) {
  const Query* device_queries = device_copy(queries);
  Answer* device_answers = device_copy(std::vector<Answer>(queries.size()));
  Scratch* device_scratch = device_copy(std::vector<Scratch>(queries.size()));
  answer_all<<<(kQueries + 127) / 128, 128>>>(prps, sgls, device_queries, device_answers, device_scratch);
  check(cudaGetLastError(), "answer_all");
  std::vector<Answer> answers(queries.size());
  std::vector<Scratch> scratch(queries.size());
  check(cudaMemcpy(answers.data(), device_answers, answers.size() * sizeof(Answer), cudaMemcpyDeviceToHost), "answers");
  check(cudaMemcpy(scratch.data(), device_scratch, scratch.size() * sizeof(Scratch), cudaMemcpyDeviceToHost), "lists");
  check(cudaFree(const_cast<Query*>(device_queries)), "cudaFree");
  check(cudaFree(device_answers), "cudaFree");
  check(cudaFree(device_scratch), "cudaFree");
  int wrong = 0;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    const bool same_answer = std::memcmp(&answers[i], &expected[i], sizeof(Answer)) == 0;
    const bool same_lists = std::memcmp(&scratch[i], &expected_scratch[i], sizeof(Scratch)) == 0;
    if (same_answer && same_lists) continue;
    if (wrong++ < 5) {
      std::fprintf(stderr, "%s, %llu bytes from %llu: %s differ from the host's\n", where,
                   static_cast<unsigned long long>(queries[i].length),
                   static_cast<unsigned long long>(queries[i].offset), same_answer ? "lists" : "answers");
    }
  }
  std::printf("%s: %zu queries, %d wrong\n", where, queries.size(), wrong);
  return wrong;
}

}  // namespace

int main() {
  if (!tardis::gpu_test::has_gpu()) return tardis::gpu_test::kSkipped;
  const std::uint64_t prp_bytes = PrpTable::memory_bytes(kRegionBytes),
                      sgl_bytes = SglTable::memory_bytes(kRegionBytes);
  std::uint64_t* prp_words = nullptr;
  SglDescriptor* sgl_entries = nullptr;
  check(cudaHostAlloc(&prp_words, prp_bytes, cudaHostAllocMapped), "cudaHostAlloc");
  check(cudaHostAlloc(&sgl_entries, sgl_bytes, cudaHostAllocMapped), "cudaHostAlloc");
  PrpTable prps;
  SglTable sgls;
  if (PrpTable::make(kRegionBytes, PrpTable::kDefaultBridge, {prp_words, kTableBus}, prp_bytes, prps) !=
          PrpStatus::kOk ||
      prps.fill(PageAddress{0x800000000}) != PrpStatus::kOk ||
      SglTable::make(SglRules::of(kSglDword, 8), kRegionBytes, kGranule, sgl_entries, kTableBus, sgl_bytes, sgls) !=
          SglStatus::kOk ||
      sgls.fill([](std::uint64_t i) { return 0x900000000 + (i + i / 4) * kGranule; }) != SglStatus::kOk) {
    std::fprintf(stderr, "expected tables of a region to be made, found an error\n");
    return 1;
  }

  // Aligned and not, in range and not.
  std::mt19937_64 random(1);
  std::vector<Query> queries;
  for (std::uint32_t i = 0; i < kQueries; ++i) {
    Query query = {random() % (kRegionBytes + kPageBytes), 1 + random() % (i % 2 == 0 ? 4 << 20 : 256 << 10)};
    if (i % 3 != 0) query = {query.offset / 4 * 4, (query.length + 3) / 4 * 4};
    if (i % 4 == 0) query = {query.offset / kGranule * kGranule, (query.length / kGranule + 1) * kGranule};
    queries.push_back(query);
  }
  std::vector<Answer> expected(kQueries);
  std::vector<Scratch> scratch(kQueries);
  std::uint32_t described = 0, built = 0;
  for (std::uint32_t i = 0; i < kQueries; ++i) {
    expected[i] = answer(prps, sgls, queries[i], scratch[i]);
    described += expected[i].prp_status == 0 && expected[i].sgl_status == 0;
    built += expected[i].built_prp_status == 0 && expected[i].built_sgl_status == 0;
  }
  std::printf("%u of %u queries answered by both tables, %u by both builders\n", described, kQueries, built);
  if (described < kQueries / 20 || built < kQueries / 20) {
    std::fprintf(stderr, "expected more queries with an answer\n");
    return 1;
  }

  std::uint64_t* words_dev = nullptr;
  SglDescriptor* entries_dev = nullptr;
  check(cudaHostGetDevicePointer(&words_dev, prp_words, 0), "cudaHostGetDevicePointer");
  check(cudaHostGetDevicePointer(&entries_dev, sgl_entries, 0), "cudaHostGetDevicePointer");
  int wrong = compare("tables in mapped host memory", prps.seen_at(words_dev), sgls.seen_at(entries_dev), queries,
                      expected, scratch);
  check(cudaMalloc(&words_dev, prp_bytes), "cudaMalloc");
  check(cudaMalloc(&entries_dev, sgl_bytes), "cudaMalloc");
  check(cudaMemcpy(words_dev, prp_words, prp_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaMemcpy(entries_dev, sgl_entries, sgl_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  wrong += compare("tables in device memory", prps.seen_at(words_dev), sgls.seen_at(entries_dev), queries, expected,
                   scratch);
  check(cudaFree(words_dev), "cudaFree");
  check(cudaFree(entries_dev), "cudaFree");
  check(cudaFreeHost(prp_words), "cudaFreeHost");
  check(cudaFreeHost(sgl_entries), "cudaFreeHost");
  return wrong == 0 ? 0 : 1;
}
