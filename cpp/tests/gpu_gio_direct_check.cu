// SPDX-License-Identifier: Apache-2.0
// On a GPU: rings whose commands land in HBM by copy engines, against the software controller. Random pieces of K and V
// all over 2 GiB, both ways, by SGL and PRP, from memory and from a file; every byte of the pools is compared. Replays
// of a graph with other pages each time. Faults: the flag within the deadline, no byte elsewhere, and none at all after
// renew(). Exit status 0: right; 1: not, or a CUDA error; 77: no GPU here.
#include <cuda.h>

#include <filesystem>
#include <numeric>
#include <random>

#include "base/checksum.h"
#include "tests/gpu_gio_direct_support.cuh"

namespace {

using namespace tardis;
using namespace tardis::gio;
using namespace tardis::gio::testing;

constexpr std::uint64_t kMs = 1'000'000, kMiB = 1 << 20;
constexpr unsigned char kPoison = 0xa5;
constexpr std::uint64_t kPoisonWord = 0xa5a5a5a5a5a5a5a5;
int failures = 0;

void expect(bool good, const char* test, const std::string& what, std::uint64_t found = 0) {
  if (good) return;
  ++failures;
  std::printf("FAILED %s: expected %s (found %llu)\n", test, what.c_str(), static_cast<unsigned long long>(found));
}

__global__ void count_touched(const std::uint64_t* words, std::uint64_t count, unsigned long long* touched) {
  unsigned long long mine = 0;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::uint64_t{gridDim.x} * blockDim.x) {
    mine += words[i] != kPoisonWord;
  }
  if (mine != 0) atomicAdd(touched, mine);
}

__global__ void fill(std::uint64_t* words, std::uint64_t count, std::uint64_t seed) {
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::uint64_t{gridDim.x} * blockDim.x) {
    words[i] = word_at(i, seed);
  }
}

struct Pools {
  explicit Pools(std::uint64_t bytes) : k(Where::kDevice, bytes), v(Where::kDevice, bytes) {}
  void poison() const {
    for (const auto* pool : {&k, &v}) check(cudaMemset(pool->data(), kPoison, pool->size()), "poison");
  }
  std::uint64_t touched() const {
    Array<unsigned long long> words(Where::kMapped, 1);
    for (const auto* pool : {&k, &v}) {
      count_touched<<<264, 512>>>(reinterpret_cast<const std::uint64_t*>(pool->data()), pool->size() / 8, words.data());
    }
    wait_for(nullptr, "touched");
    return words[0];
  }
  std::vector<const Array<std::byte>*> both() const { return {&k, &v}; }
  Array<std::byte> k, v;
};

std::uint64_t run(DirectGpuRig& gpu, const IoControlBlock& block) {
  const std::uint64_t begin = now_ns();
  gpu.enqueue(block, nullptr);
  wait_seldom(nullptr, "ring");
  return now_ns() - begin;
}

// ---- random commands
void random_commands(const char* test, const Pools& pools, GpuRigOptions options, tardis_gpu_copy_calls calls,
                     std::uint32_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const CudaEngine engine(calls);
  DirectGpuRig gpu(options, &engine, pools.both());
  const std::uint64_t block_bytes = std::uint64_t{1} << options.block_shift, most = 64 << 10;
  std::vector<std::byte> written(options.bytes);
  fill_words(written.data(), written.size(), 1);
  if (gpu.rig().media() != nullptr) {
    std::memcpy(gpu.rig().media(), written.data(), written.size());
  } else {
    auto put = gpu.rig().write(0, written.data(), written.size());
    expect(static_cast<bool>(put), test, "the namespace to be written");
  }
  Iocb iocb;
  Array<unsigned long long> wrong(Where::kMapped, 1);
  std::vector<std::uint32_t> places(pools.k.size() / (2 * most));
  for (int round = 0; round < 4; ++round) {
    const bool writes = round == 3;
    std::iota(places.begin(), places.end(), 0u);
    std::shuffle(places.begin(), places.end(), random);
    std::uint64_t words = 0;
    std::vector<IoContext> contexts(count, IoContext{});
    for (std::uint32_t i = 0; i < count; ++i) {
      IoContext& context = contexts[i];
      const std::uint64_t blocks = 1 + random() % (most / block_bytes), bytes = blocks * block_bytes;
      context.op = writes ? IoOp::kWrite : IoOp::kRead;
      context.block = writes ? i * (most / block_bytes) : random() % (options.bytes / block_bytes - blocks + 1);
      std::uint64_t front = bytes, at[2] = {0, 0};
      if (random() % 4 != 0) front = 16 * (1 + random() % (bytes / 16 - 1));
      at[0] = places[i] * 2 * most + 16 * (random() % 256);
      at[1] = places[i] * 2 * most + (options.sgl ? 16 * (random() % 256) : 0);
      if (!options.sgl && front != bytes) at[0] += 4096 - (at[0] + front) % 4096;
      context.memory[0] = reinterpret_cast<std::uint64_t>(pools.k.data()) + at[0];
      context.memory[1] = front == bytes ? 0 : reinterpret_cast<std::uint64_t>(pools.v.data()) + at[1];
      context.bytes[0] = static_cast<std::uint32_t>(front);
      context.bytes[1] = static_cast<std::uint32_t>(bytes - front);
      words += bytes / 8;
    }
    iocb.contexts.upload(contexts);
    iocb.count[0] = count;
    if (writes) {
      for (const auto* pool : pools.both()) {
        fill<<<264, 512>>>(reinterpret_cast<std::uint64_t*>(pool->data()), pool->size() / 8, seed + (pool == &pools.v));
      }
    } else {
      pools.poison();
    }
    check(cudaDeviceSynchronize(), "fill");
    (void)run(gpu, iocb.block(5000 * kMs));
    expect(iocb.flag() == kIoDone, test, "all commands done", iocb.total(gpu.rings()).done);
    if (!writes) {
      compare_landed<<<256, 256>>>(iocb.contexts.data(), iocb.count.data(), 1, options.block_shift, wrong.data());
      wait_for(nullptr, "compare");
      expect(wrong[0] == 0, test, "the namespace's words", wrong[0]);
      const std::uint64_t touched = pools.touched();
      expect(touched == words, test, "no other word to be touched than " + std::to_string(words), touched);
      continue;
    }
    for (const IoContext& context : contexts) {
      auto* to = reinterpret_cast<std::uint64_t*>(written.data() + (context.block << options.block_shift));
      for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
        const auto& pool = piece == 0 ? pools.k : pools.v;
        const std::uint64_t first = (context.memory[piece] - reinterpret_cast<std::uint64_t>(pool.data())) / 8;
        for (std::uint32_t w = 0; w < context.bytes[piece] / 8; ++w) *to++ = word_at(first + w, seed + piece);
      }
    }
    std::vector<std::byte> found(options.bytes);
    auto got = gpu.rig().read(0, found.data(), found.size());
    expect(static_cast<bool>(got), test, "the namespace to be read");
    expect(std::memcmp(found.data(), written.data(), written.size()) == 0, test, "what the GPU wrote");
  }
  expect(gpu.rig().violations().empty(), test, "no complaint of the controller");
  std::printf("%s: %s\n", test, gpu.rig().report().c_str());
}

// ---- graphs
using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

void replays(const Pools& pools, int times) {
  constexpr std::uint32_t kPages = 256, kPageBytes = 32 << 10;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult state;
  check(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function, 12000, cudaEnableDefault, &state), "entry");
  const auto wait_value = reinterpret_cast<WaitValue>(function);
  GpuRigOptions options;
  options.bytes = 256 * kMiB;
  options.queues = 4;
  options.controller_threads = 4;
  options.slot_bytes = 4096;
  const CudaEngine engine;
  DirectGpuRig gpu(options, &engine, pools.both());
  fill_words(gpu.rig().media(), options.bytes, 7);
  Iocb iocb(Where::kDevice);
  Array<std::uint32_t> memory_ids(Where::kMapped, kPages), file_ids(Where::kMapped, kPages), pages(Where::kMapped, 1);
  Array<unsigned long long> wrong(Where::kMapped, 1);
  LayerPages layer{};
  layer.memory_pages = memory_ids.data();
  layer.file_pages = file_ids.data();
  layer.count = pages.data();
  for (std::uint32_t half = 0; half < 2; ++half) {
    layer.pools[half] = reinterpret_cast<std::uint64_t>((half == 0 ? pools.k : pools.v).data());
    layer.page_stride[half] = layer.page_bytes[half] = kPageBytes;
  }
  layer.blocks_per_page = 2 * kPageBytes >> options.block_shift;
  layer.block_shift = options.block_shift;
  layer.most_bytes = 2 * kPageBytes;
  layer.op = IoOp::kRead;

  cudaStream_t io, compute;
  cudaEvent_t fork, join;
  check(cudaStreamCreateWithFlags(&io, cudaStreamNonBlocking), "stream");
  check(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking), "stream");
  check(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), "event");
  check(cudaEventCreateWithFlags(&join, cudaEventDisableTiming), "event");
  const IoControlBlock block = iocb.block(2'000 * kMs);
  check(cudaStreamBeginCapture(io, cudaStreamCaptureModeGlobal), "capture");
  check(tardis_gpu_gio_clear(&block, io), "clear");
  check(cudaEventRecord(fork, io), "fork");
  check(cudaStreamWaitEvent(compute, fork), "fork");
  const CUresult waits =
      wait_value(compute, reinterpret_cast<CUdeviceptr>(block.flag), kIoDone, CU_STREAM_WAIT_VALUE_GEQ);
  expect(waits == CUDA_SUCCESS, "replays", "the wait to be captured", waits);
  compare_landed<<<128, 256, 0, compute>>>(iocb.contexts.data(), iocb.count.data(), 7, options.block_shift,
                                           wrong.data());
  check(tardis_gpu_gio_prepare(&layer, iocb.contexts.data(), iocb.count.data(), io), "prepare");
  check(tardis_gpu_gio_run(gpu.queues().data(), gpu.rings(), &block, 1, io), "run");
  check(cudaEventRecord(join, compute), "join");
  check(cudaStreamWaitEvent(io, join), "join");
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  check(cudaStreamEndCapture(io, &graph), "capture");
  check(cudaGraphInstantiate(&ready, graph, 0), "instantiate");

  std::mt19937_64 random(11);
  const auto places = static_cast<std::uint32_t>(pools.k.size() / kPageBytes);
  std::vector<std::uint32_t> all(places);
  std::iota(all.begin(), all.end(), 0u);
  std::uint64_t landed = 0;
  for (int i = 0; i < times; ++i) {
    pages[0] = 1 + static_cast<std::uint32_t>(random() % kPages);
    for (std::uint32_t p = 0; p < pages[0]; ++p) {
      std::swap(all[p], all[p + random() % (places - p)]);
      memory_ids[p] = all[p];
      file_ids[p] = static_cast<std::uint32_t>(random() % (options.bytes / (2 * kPageBytes)));
      for (const auto* pool : pools.both()) {
        check(cudaMemsetAsync(pool->data() + std::uint64_t{all[p]} * kPageBytes, kPoison, kPageBytes, io), "poison");
      }
    }
    check(cudaGraphLaunch(ready, io), "launch");
    wait_seldom(io, "replay");
    expect(iocb.flag() == kIoDone, "replays", "a good end of replay " + std::to_string(i), iocb.flag());
    expect(wrong[0] == 0, "replays", "right words in replay " + std::to_string(i), wrong[0]);
    landed += pages[0];
    if (failures > 5) break;
  }
  std::printf("replays: %d, %llu pages\n", times, static_cast<unsigned long long>(landed));
  check(cudaGraphExecDestroy(ready), "graph");
  check(cudaGraphDestroy(graph), "graph");
  for (cudaStream_t stream : {io, compute}) check(cudaStreamDestroy(stream), "stream");
  for (cudaEvent_t event : {fork, join}) check(cudaEventDestroy(event), "event");
}

// ---- digests
void digests(const Pools& pools) {
  constexpr std::uint32_t kCommands = 1000, kMost = 96 << 10, kChunks = kMost / kDigestedBytes;
  constexpr const char* kTest = "digests";
  std::mt19937_64 random(31);
  GpuRigOptions options;
  options.bytes = kCommands * std::uint64_t{kMost};
  options.block_shift = 9;
  options.queues = options.controller_threads = 4;
  options.slot_bytes = 4096;
  const CudaEngine engine;
  DirectGpuRig gpu(options, &engine, pools.both());
  fill_words(gpu.rig().media(), options.bytes, 5);
  Iocb iocb;
  const Verifier verifier(4);
  Array<std::uint64_t> words(Where::kMapped, std::size_t{kCommands} * kChunks);
  std::vector<IoContext> contexts(kCommands, IoContext{});
  std::vector<bool> damaged(kCommands, false);
  const auto bytes_of = [](const IoContext& context) { return context.bytes[0] + context.bytes[1]; };
  for (std::uint32_t i = 0; i < kCommands; ++i) {
    IoContext& context = contexts[i];
    const std::uint32_t bytes = 512 * (1 + static_cast<std::uint32_t>(random() % (kMost / 512)));
    context.bytes[0] = random() % 4 == 0 ? bytes : 16 * (1 + static_cast<std::uint32_t>(random() % (bytes / 16 - 1)));
    context.bytes[1] = bytes - context.bytes[0];
    context.block = std::uint64_t{i} * kMost >> 9;
    for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
      const auto& pool = piece == 0 ? pools.k : pools.v;
      context.memory[piece] = reinterpret_cast<std::uint64_t>(pool.data()) + std::uint64_t{i} * kMost + 16 * (i % 7);
    }
    context.tag = i;
    context.digests = i % 9 == 8 ? 0 : reinterpret_cast<std::uint64_t>(words.data() + std::size_t{i} * kChunks);
    const std::byte* const at = gpu.rig().media() + (context.block << 9);
    for (std::uint32_t first = 0, chunk = 0; first < bytes; first += kDigestedBytes, ++chunk) {
      words[std::size_t{i} * kChunks + chunk] = xxh3_64(at + first, std::min(kDigestedBytes, bytes - first));
    }
  }
  iocb.count[0] = kCommands;
  const auto go = [&](IoOp op) {
    for (IoContext& context : contexts) context.op = op;
    iocb.contexts.upload(contexts);
    const IoControlBlock block = iocb.block(3000 * kMs);
    gpu.enqueue(block, nullptr);
    verifier.enqueue(block, nullptr);
    wait_seldom(nullptr, kTest);
  };
  go(IoOp::kRead);
  expect(verifier.flag() == kIoDone && verifier.damaged() == 0, kTest, "no damage", verifier.damaged());
  // One bit of each, anywhere.
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < kCommands; ++i) {
    if (random() % 5 != 0) continue;
    gpu.rig().media()[(contexts[i].block << 9) + random() % bytes_of(contexts[i])] ^= std::byte{0x10};
    damaged[i] = contexts[i].digests != 0;
    count += damaged[i];
  }
  go(IoOp::kRead);
  expect(verifier.flag() == kIoError, kTest, "the error flag", verifier.flag());
  expect(verifier.damaged() == count, kTest, "as many damaged as flipped: " + std::to_string(count),
         verifier.damaged());
  for (std::uint32_t i = 0; i < kCommands; ++i) {
    expect(iocb.status(i).end() == (damaged[i] ? IoEnd::kDamaged : IoEnd::kDone), kTest, "its status", i);
  }
  // Written: made.
  std::memset(words.data(), 0, words.size() * 8);
  go(IoOp::kWrite);
  expect(verifier.flag() == kIoDone, kTest, "a good end of writes", verifier.flag());
  for (std::uint32_t i = 0; i < kCommands; ++i) {
    const std::byte* const at = gpu.rig().media() + (contexts[i].block << 9);
    for (std::uint32_t first = 0, chunk = 0; first < bytes_of(contexts[i]); first += kDigestedBytes, ++chunk) {
      const std::uint64_t want =
          contexts[i].digests == 0 ? 0 : xxh3_64(at + first, std::min(kDigestedBytes, bytes_of(contexts[i]) - first));
      expect(words[std::size_t{i} * kChunks + chunk] == want, kTest, "the digest of what was written", i);
    }
  }
  std::printf("digests: %u commands, %u flipped\n", kCommands, count);
}

// ---- faults
struct Fault {
  const char* name;
  nvme::FaultKind kind;
  int delay_ms = 0;
  bool late_data = false;
  RingError error = RingError::kDeadline;
};

const Fault kFaults[] = {
    {"completion lost", nvme::FaultKind::kLostCompletion},
    {"completion lost, data late", nvme::FaultKind::kLostCompletion, 400, true},
    {"data and completion later than the deadline", nvme::FaultKind::kLateCompletion, 400, true},
    {"completion posted twice", nvme::FaultKind::kDuplicate, 0, false, RingError::kQueueFault},
    {"wrong identifier", nvme::FaultKind::kWrongCommandId, 0, false, RingError::kQueueFault},
    {"media error", nvme::FaultKind::kMediaError, 0, false, RingError::kCommands},
    {"drive stalls", nvme::FaultKind::kSlow, 400},
    {"CFS", nvme::FaultKind::kFatal},
};

void faults() {
  constexpr std::uint32_t kCommands = 200, kBytes = 16 << 10;
  const Pools pools(8 * kMiB);
  for (const Fault& fault : kFaults) {
    GpuRigOptions options;
    options.bytes = 32 * kMiB;
    options.queues = 2;
    options.controller_threads = 2;
    options.entries = 64;
    options.slot_bytes = 4096;
    const CudaEngine engine;
    DirectGpuRig gpu(options, &engine, pools.both());
    fill_words(gpu.rig().media(), options.bytes, 3);
    pools.poison();
    Iocb iocb;
    std::vector<IoContext> contexts(kCommands, IoContext{});
    for (std::uint32_t i = 0; i < kCommands; ++i) {
      contexts[i].op = IoOp::kRead;
      contexts[i].block = std::uint64_t{i} * (kBytes >> 12);
      contexts[i].memory[0] = reinterpret_cast<std::uint64_t>(pools.k.data()) + std::uint64_t{i} * kBytes;
      contexts[i].memory[1] = reinterpret_cast<std::uint64_t>(pools.v.data()) + std::uint64_t{i} * kBytes;
      contexts[i].bytes[0] = contexts[i].bytes[1] = kBytes / 2;
    }
    iocb.contexts.upload(contexts);
    iocb.count[0] = kCommands;
    nvme::FaultRule rule;
    rule.kind = fault.kind;
    rule.queue = gpu.queues().front().id;
    rule.skip = 20;
    rule.count = 2;
    rule.delay = std::chrono::milliseconds(fault.delay_ms);
    rule.late_data = fault.late_data;
    gpu.rig().faults().add(rule);
    const std::uint64_t ns = run(gpu, iocb.block(200 * kMs));
    const RingReport report = iocb.total(gpu.rings());
    expect(report.error == fault.error, fault.name, "its error", static_cast<std::uint64_t>(report.error));
    expect(iocb.flag() == kIoError, fault.name, "the error flag", iocb.flag());
    expect(ns < 1200 * kMs, fault.name, "an end by the deadline, ms", ns / kMs);
    std::uint64_t done = 0;
    for (std::uint32_t i = 0; i < kCommands; ++i) done += iocb.status(i).end() == IoEnd::kDone;
    std::vector<std::byte> found(kBytes / 2);
    for (std::uint32_t i = 0; i < kCommands; ++i) {
      const IoEnd end = iocb.status(i).end();
      if (end == IoEnd::kTimedOut) continue;  // its memory is the controller's yet
      for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
        check(cudaMemcpy(found.data(), reinterpret_cast<void*>(contexts[i].memory[piece]), found.size(),
                         cudaMemcpyDefault),
              "found");
        const std::byte* const want = gpu.rig().media() + contexts[i].block * 4096 + piece * found.size();
        const bool right = end == IoEnd::kDone ? std::memcmp(found.data(), want, found.size()) == 0
                                               : std::all_of(found.begin(), found.end(), [](std::byte byte) {
                                                   return byte == static_cast<std::byte>(kPoison);
                                                 });
        expect(right, fault.name, "the bytes that its status says", i);
      }
    }
    gpu.rig().faults().clear();
    auto renewed = gpu.rig().renew();
    expect(static_cast<bool>(renewed), fault.name, "renew()");
    pools.poison();
    check(cudaDeviceSynchronize(), "poison");
    std::this_thread::sleep_for(std::chrono::milliseconds(fault.late_data ? 2 * fault.delay_ms : 20));
    expect(pools.touched() == 0, fault.name, "nothing to land after renew()", pools.touched());
    gpu.start();
    (void)run(gpu, iocb.block(2000 * kMs));
    expect(iocb.flag() == kIoDone, fault.name, "a good run afterwards", iocb.flag());
    Array<unsigned long long> wrong(Where::kMapped, 1);
    compare_landed<<<64, 256>>>(iocb.contexts.data(), iocb.count.data(), 3, 12, wrong.data());
    wait_for(nullptr, "compare");
    expect(wrong[0] == 0, fault.name, "right words afterwards", wrong[0]);
    std::printf("fault: %s: %llu of %u done, %.0f ms\n", fault.name, static_cast<unsigned long long>(done), kCommands,
                static_cast<double>(ns) * 1e-6);
  }
}

}  // namespace

int main() {
  (void)std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was found is seen even if the process is ended
  (void)::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (!gpu_test::has_gpu()) return gpu_test::kSkipped;
  check(tardis_gpu_gio_load(), "load");
  check(tardis_gpu_gio_prepare_load(), "load");
  check(tardis_gpu_gio_verify_load(), "load");
  {
    const Pools pools(1024 * kMiB);
    GpuRigOptions options;
    options.bytes = 256 * kMiB;
    options.queues = 4;
    options.controller_threads = 4;
    options.slot_bytes = 4096;  // of no matter
    random_commands("SGL", pools, options, TARDIS_GPU_COPY_CALLS_BEST, 2048, 21);
    random_commands("single calls", pools, options, TARDIS_GPU_COPY_CALLS_SINGLE, 2048, 22);
    options.sgl = false;
    options.block_shift = 9;
    random_commands("PRP", pools, options, TARDIS_GPU_COPY_CALLS_BEST, 2048, 23);
    options.sgl = true;
    options.block_shift = 12;
    options.bytes = 32 * kMiB;
    options.file = "gio_direct_check.namespace";
    random_commands("from a file", pools, options, TARDIS_GPU_COPY_CALLS_BEST, 400, 24);
    std::filesystem::remove(options.file);
    replays(pools, 200);
    digests(pools);
  }
  faults();
  std::printf(failures == 0 ? "gio direct check: right\n" : "gio direct check: %d FAILED\n", failures);
  return failures == 0 ? 0 : 1;
}
