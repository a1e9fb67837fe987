// SPDX-License-Identifier: Apache-2.0
// On a GPU: rings against the software controller. Bytes of random commands, every fault that can be injected, replays
// of a graph with other pages each time, both ways to wait, and many commands of which none may be lost or doubled.
// Arguments: the millions of commands of that last part (default 10), and the most seconds that it may take (60); or
// "small", for compute-sanitizer: a few commands of every kind.
// Exit status 0: all as expected; 1: not, or a CUDA error; 77: no GPU here.
#include <cuda.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "gio/wait.cuh"
#include "tests/gpu_gio_support.cuh"

namespace {

using namespace tardis;
using namespace tardis::gio;
using namespace tardis::gio::testing;
using nvme::FaultKind;

constexpr std::uint64_t kMs = 1'000'000;
constexpr unsigned char kPoison = 0xa5;
constexpr std::uint64_t kPoisonWord = 0xa5a5a5a5a5a5a5a5;

int failures = 0;

void expect(bool condition, const char* where, const char* what, std::uint64_t found = 0) {
  if (condition) return;
  if (++failures <= 40) {
    std::printf("FAILED %s: expected %s, found %llu\n", where, what, static_cast<unsigned long long>(found));
  }
}

// Counts the words of landed contexts that are not what the namespace holds, and poisons them.
__global__ void verify(const IoContext* contexts, const std::uint32_t* count, std::uint64_t seed,
                       std::uint32_t block_shift, unsigned long long* wrong) {
  unsigned long long bad = 0;
  for (std::uint32_t i = blockIdx.x; i < *count; i += gridDim.x) {
    const IoContext context = contexts[i];
    std::uint64_t word = (context.block << block_shift) / 8;
    for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
      auto* const at = reinterpret_cast<std::uint64_t*>(context.memory[piece]);
      for (std::uint32_t k = threadIdx.x; k < context.bytes[piece] / 8; k += blockDim.x) {
        bad += at[k] != word_at(word + k, seed);
        at[k] = kPoisonWord;
      }
      word += context.bytes[piece] / 8;
    }
  }
  if (bad != 0) atomicAdd(wrong, bad);
}

// A consumer that is on the device before the ring.
__global__ void verify_after(const std::uint32_t* flag, std::uint64_t deadline_ns, std::uint32_t* seen,
                             const IoContext* contexts, const std::uint32_t* count, std::uint64_t seed,
                             std::uint32_t block_shift, unsigned long long* wrong) {
  __shared__ std::uint32_t value;
  if (threadIdx.x == 0) value = wait_cqe(flag, deadline_ns);
  __syncthreads();
  if (threadIdx.x == 0 && blockIdx.x == 0) *seen = value;
  if (value != kIoDone) return;
  unsigned long long bad = 0;
  for (std::uint32_t i = blockIdx.x; i < *count; i += gridDim.x) {
    const IoContext context = contexts[i];
    const std::uint64_t word = (context.block << block_shift) / 8;
    auto* const at = reinterpret_cast<std::uint64_t*>(context.memory[0]);
    for (std::uint32_t k = threadIdx.x; k < context.bytes[0] / 8; k += blockDim.x) {
      bad += __ldcg(reinterpret_cast<const unsigned long long*>(at + k)) != word_at(word + k, seed);
    }
  }
  if (bad != 0) atomicAdd(wrong, bad);
}

// ---- bytes
std::vector<std::uint64_t> digests_of_one(const std::byte* memory, std::uint64_t bytes) {
  std::vector<std::uint64_t> digests;
  for (std::uint64_t at = 0; at < bytes; at += kDigestedBytes) {
    digests.push_back(xxh3_64(memory + at, std::min<std::uint64_t>(kDigestedBytes, bytes - at)));
  }
  return digests;
}

void check_bytes(const GpuRigOptions& options, std::uint64_t seed) {
  char where[200];
  std::snprintf(where, sizeof where, "bytes, %u queues of %u entries and %u commands, slots of %u, blocks of %u, %s",
                options.queues, options.entries, options.commands, options.slot_bytes, 1u << options.block_shift,
                options.sgl ? "SGL" : "PRP");
  std::mt19937_64 random(seed);
  GpuRig gpu(options);
  fill_words(gpu.rig().media(), options.bytes, seed);
  std::vector<std::byte> expected(gpu.rig().media(), gpu.rig().media() + options.bytes);
  const std::uint64_t block = 1u << options.block_shift, slots = options.slot_bytes / block;
  const std::size_t pages = std::min<std::uint64_t>(kMostContexts, options.bytes / options.slot_bytes);
  const std::size_t pitch = options.slot_bytes + 64, pool_bytes = 2 * pages * pitch;
  Array<std::byte> pool(Where::kDevice, pool_bytes);
  std::vector<std::byte> image(pool_bytes), found(pool_bytes);
  // In rounds with digests: as many as a slot has chunks, and one that nobody may touch.
  const std::size_t chunks = (options.slot_bytes + kDigestedBytes - 1) / kDigestedBytes, row = chunks + 1;
  Array<std::uint64_t> digests(Where::kDevice, pages * row);
  std::vector<std::uint64_t> told(pages * row), made(pages * row);
  Iocb iocb;
  for (int round = 0; round < 4; ++round) {
    const bool digested = round % 2 == 1;
    std::vector<bool> bad(pages);
    std::fill(told.begin(), told.end(), kPoisonWord);
    std::memset(image.data(), kPoison, pool_bytes);
    std::vector<std::size_t> places(2 * pages);
    std::iota(places.begin(), places.end(), std::size_t{0});
    std::shuffle(places.begin(), places.end(), random);
    const std::size_t count = round < 2 ? pages : random() % (pages + 1);
    std::vector<IoContext> contexts(count);
    for (std::size_t i = 0; i < count; ++i) {
      IoContext& context = contexts[i];
      const std::uint64_t blocks = random() % 4 == 0 ? slots : 1 + random() % slots;
      const std::uint64_t bytes = blocks * block,
                          front = random() % 3 == 0 ? bytes : 16 * (1 + random() % (bytes / 16 - 1));
      context.block = i * slots + random() % (slots - blocks + 1);
      context.op = random() % 3 == 0 ? IoOp::kWrite : IoOp::kRead;
      context.bytes[0] = static_cast<std::uint32_t>(front);
      context.bytes[1] = static_cast<std::uint32_t>(bytes - front);
      for (int half = 0; half < 2; ++half) {
        context.memory[half] = reinterpret_cast<std::uint64_t>(pool.data()) + places[2 * i + half] * pitch;
      }
      context.digests = digested && random() % 4 != 0 ? reinterpret_cast<std::uint64_t>(digests.data() + i * row) : 0;
      if (context.op == IoOp::kRead) {
        if (context.digests == 0) continue;
        std::byte* const media = gpu.rig().media() + context.block * block;
        const auto expected_digests = digests_of_one(media, bytes);
        std::copy(expected_digests.begin(), expected_digests.end(), told.begin() + i * row);
        if (random() % 8 != 0) continue;
        // A bit of the medium, often at a chunk's end, or of what is expected.
        bad[i] = true;
        const std::uint64_t any = random() % bytes,
                            at = random() % 2 == 0 ? any : any / kDigestedBytes * kDigestedBytes;
        if (random() % 2 == 0) {
          media[at] ^= std::byte{1} << random() % 8;
          expected[context.block * block + at] = media[at];
        } else {
          told[i * row + at / kDigestedBytes] ^= std::uint64_t{1} << random() % 64;
        }
        continue;
      }
      for (int half = 0; half < 2; ++half) {
        auto* const at = reinterpret_cast<std::uint64_t*>(image.data() + places[2 * i + half] * pitch);
        for (std::uint32_t k = 0; k < context.bytes[half] / 8; ++k) at[k] = random();
      }
    }
    digests.upload(told);
    const std::size_t damaged = static_cast<std::size_t>(std::count(bad.begin(), bad.end(), true));
    check(cudaMemcpy(pool.data(), image.data(), pool_bytes, cudaMemcpyHostToDevice), "pool");
    std::copy(contexts.begin(), contexts.end(), iocb.contexts.data());
    iocb.count[0] = static_cast<std::uint32_t>(count);
    std::memset(iocb.statuses.data(), 0, iocb.statuses.size() * 4);
    gpu.run(iocb.block(10'000 * kMs, digested));
    const RingReport total = iocb.total(gpu.rings());
    expect(iocb.flag() == (damaged == 0 ? kIoDone : kIoError), where, "the flag", iocb.flag());
    expect(total.done == count - damaged, where, "all commands done but the damaged", total.done);
    expect(total.damaged == damaged, where, "those damaged whose bytes or digests were", total.damaged);
    for (std::size_t i = 0; i < count; ++i) {
      const IoContext& context = contexts[i];
      expect(iocb.status(i).end() == (bad[i] ? IoEnd::kDamaged : IoEnd::kDone), where, "the status", iocb.statuses[i]);
      std::byte* const media = expected.data() + context.block * block;
      for (int half = 0; half < 2; ++half) {
        std::byte* const place = image.data() + places[2 * i + half] * pitch;
        std::byte* const there = media + (half == 0 ? 0 : context.bytes[0]);
        if (context.op == IoOp::kRead) {
          std::memcpy(place, there, context.bytes[half]);
        } else {
          std::memcpy(there, place, context.bytes[half]);
        }
      }
      if (context.op == IoOp::kWrite && context.digests != 0) {
        const auto written = digests_of_one(media, context.bytes[0] + context.bytes[1]);
        std::copy(written.begin(), written.end(), told.begin() + i * row);
      }
    }
    check(cudaMemcpy(made.data(), digests.data(), made.size() * 8, cudaMemcpyDeviceToHost), "digests");
    expect(made == told, where, "the digests of what was written, and no word besides");
    check(cudaMemcpy(found.data(), pool.data(), pool_bytes, cudaMemcpyDeviceToHost), "pool");
    expect(std::memcmp(found.data(), image.data(), pool_bytes) == 0, where, "equal bytes in HBM");
    expect(std::memcmp(expected.data(), gpu.rig().media(), expected.size()) == 0, where, "equal bytes on the medium");
  }
  const std::string complaints = gpu.rig().violations();
  expect(complaints.empty(), where, complaints.c_str());
}

// ---- faults
struct Fault {
  const char* name;
  FaultKind kind;
  int delay_ms;
  bool late_data;
  std::uint64_t count;
  std::uint16_t status;
  RingError error;
  bool gone;
};
const Fault kFaults[] = {
    {"completion lost", FaultKind::kLostCompletion, 0, false, 1, 0, RingError::kDeadline, false},
    {"completion lost, data late", FaultKind::kLostCompletion, 300, true, 1, 0, RingError::kDeadline, false},
    {"completion late, within the deadline", FaultKind::kLateCompletion, 30, false, 1, 0, RingError::kNone, false},
    {"completion later than the deadline", FaultKind::kLateCompletion, 300, false, 1, 0, RingError::kDeadline, false},
    {"data later than the deadline", FaultKind::kLateCompletion, 300, true, 1, 0, RingError::kDeadline, false},
    {"completion posted twice", FaultKind::kDuplicate, 0, false, 1, 0, RingError::kQueueFault, false},
    {"completions in any order", FaultKind::kReorder, 0, false, 60, 0, RingError::kNone, false},
    {"wrong command identifier", FaultKind::kWrongCommandId, 0, false, 1, 0, RingError::kQueueFault, false},
    {"error status", FaultKind::kStatus, 0, false, 3, nvme::kScInternal, RingError::kCommands, false},
    {"SC = 0 with SCT != 0", FaultKind::kStatus, 0, false, 1, 0x300, RingError::kCommands, false},
    {"media error", FaultKind::kMediaError, 0, false, 2, 0, RingError::kCommands, false},
    {"submission queue head stuck", FaultKind::kStuckSqHead, 0, false, 1, 0, RingError::kQueueFault, false},
    {"drive stalls", FaultKind::kSlow, 300, false, 1, 0, RingError::kDeadline, false},
    {"CFS", FaultKind::kFatal, 0, false, 1, 0, RingError::kDeadline, false},
    {"removed, reads as ones", FaultKind::kRemovedAllOnes, 0, false, 1, 0, RingError::kDeadline, true},
    {"removed, reads as zeros", FaultKind::kRemovedZeros, 0, false, 1, 0, RingError::kDeadline, true},
};

void check_faults(std::uint32_t queues, std::uint32_t entries, std::uint32_t slot_bytes) {
  constexpr std::uint64_t kDeadline = 150 * kMs, kSlack = 300 * kMs;
  constexpr std::size_t kPages = 400;
  constexpr std::uint32_t kBytes = 8192;
  GpuRigOptions options;
  options.queues = queues;
  options.entries = entries;
  options.slot_bytes = slot_bytes;
  options.controller_threads = 2;
  options.aborts = false;
  GpuRig gpu(options);
  fill_words(gpu.rig().media(), options.bytes, entries);
  Array<std::byte> pool(Where::kDevice, kPages * kBytes);
  std::vector<std::byte> found(kPages * kBytes);
  const std::vector<std::byte> poison(kBytes, std::byte{kPoison});
  Iocb iocb;
  for (std::size_t i = 0; i < kPages; ++i) {
    IoContext& context = iocb.contexts[i];
    context = {};
    context.op = IoOp::kRead;
    context.block = 2 * i;
    context.memory[0] = reinterpret_cast<std::uint64_t>(pool.data() + i * kBytes);
    context.memory[1] = context.memory[0] + kBytes / 2;
    context.bytes[0] = context.bytes[1] = kBytes / 2;
  }
  iocb.count[0] = kPages;
  const auto run = [&] {
    check(cudaMemset(pool.data(), kPoison, pool.size()), "poison");
    std::memset(iocb.statuses.data(), 0, iocb.statuses.size() * 4);
    const std::uint64_t ns = gpu.run(iocb.block(kDeadline));
    check(cudaMemcpy(found.data(), pool.data(), found.size(), cudaMemcpyDeviceToHost), "pool");
    return ns;
  };
  const auto right = [&](std::size_t i) {
    return std::memcmp(found.data() + i * kBytes, gpu.rig().media() + i * kBytes, kBytes) == 0;
  };
  for (const Fault& fault : kFaults) {
    nvme::FaultRule rule;
    rule.kind = fault.kind;
    rule.queue = gpu.queues().front().id;
    rule.skip = 37;
    rule.count = fault.count;
    rule.delay = std::chrono::milliseconds(fault.delay_ms);
    rule.late_data = fault.late_data;
    rule.status = fault.status;
    gpu.rig().faults().add(rule);
    const std::uint64_t before = gpu.rig().faults().injected(fault.kind);
    const std::uint64_t ns = run();
    const RingReport total = iocb.total(gpu.rings());
    expect(gpu.rig().faults().injected(fault.kind) == before + fault.count, fault.name, "the fault to be injected");
    expect(ns <= kDeadline + kSlack, fault.name, "the end soon after the deadline, ns", ns);
    expect(total.error == fault.error, fault.name, "the fault's error", static_cast<std::uint64_t>(total.error));
    expect(iocb.flag() == (fault.error == RingError::kNone ? kIoDone : kIoError), fault.name, "the flag", iocb.flag());
    std::size_t done = 0;
    for (std::size_t i = 0; i < kPages; ++i) {
      const IoEnd end = iocb.status(i).end();
      done += end == IoEnd::kDone;
      expect(end != IoEnd::kNone, fault.name, "a status of every context");
      const bool untouched = std::memcmp(found.data() + i * kBytes, poison.data(), kBytes) == 0;
      expect(end == IoEnd::kDone ? right(i) : untouched, fault.name, "bytes of the done, and no others", i);
    }
    if (ends_queue(fault.error)) {
      run();
      expect(iocb.total(gpu.rings()).error == RingError::kQueueDown || gpu.rings() > 1, fault.name,
             "a queue that is down");
    }
    gpu.rig().faults().clear();
    const Status renewed = fault.gone ? gpu.rig().reopen() : gpu.rig().renew();
    expect(static_cast<bool>(renewed), fault.name, renewed ? "" : renewed.error().message.c_str());
    (void)gpu.rig().violations();
    gpu.start();
    run();
    std::size_t equal = 0;
    for (std::size_t i = 0; i < kPages; ++i) equal += right(i);
    expect(iocb.flag() == kIoDone && equal == kPages, fault.name, "a new grant that works", equal);
    std::printf("  %-40s error %u, fault %u, %4zu of %zu done, %.1f ms\n", fault.name,
                static_cast<unsigned>(total.error), total.fault, done, kPages, static_cast<double>(ns) * 1e-6);
  }
}

// ---- graphs
using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

WaitValue find_wait_value() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t result =
      cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function, 12000, cudaEnableDefault, &found);
  if (result != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<WaitValue>(function);
}

// A layer of some KV pool: pages of K and V, or of one buffer.
struct Layout {
  const char* name;
  std::uint32_t page_bytes;  // of K, and of V
  std::uint32_t halves;
  std::uint32_t gap;         // between pages in the pool
  std::uint32_t most_bytes;  // of a command
  bool digested = false;
};

void check_replays(const Layout& layout, int replays) {
  constexpr std::uint32_t kPages = 512;
  const std::uint32_t object = layout.halves * layout.page_bytes, stride = layout.page_bytes + layout.gap;
  GpuRigOptions options;
  options.bytes = std::uint64_t{4096} * object;
  options.queues = 2;
  options.controller_threads = 2;
  options.slot_bytes = layout.most_bytes;
  GpuRig gpu(options);
  fill_words(gpu.rig().media(), options.bytes, 7);
  const auto file_pages = static_cast<std::uint32_t>(options.bytes / object);
  Array<std::byte> pool(Where::kDevice, std::size_t{layout.halves} * kPages * stride);
  check(cudaMemset(pool.data(), kPoison, pool.size()), "poison");
  Iocb iocb(Where::kDevice);
  Array<std::uint32_t> memory_ids(Where::kMapped, kPages), file_ids(Where::kMapped, kPages), pages(Where::kMapped, 1);
  Array<unsigned long long> wrong(Where::kMapped, 1);
  LayerPages layer{};
  layer.memory_pages = memory_ids.data();
  layer.file_pages = file_ids.data();
  layer.count = pages.data();
  for (std::uint32_t half = 0; half < layout.halves; ++half) {
    layer.pools[half] = reinterpret_cast<std::uint64_t>(pool.data()) + std::uint64_t{half} * kPages * stride;
    layer.page_stride[half] = stride;
    layer.page_bytes[half] = layout.page_bytes;
  }
  layer.blocks_per_page = object >> options.block_shift;
  layer.block_shift = options.block_shift;
  layer.most_bytes = layout.most_bytes;
  layer.op = IoOp::kRead;
  // Of each file page, and of the pages of a replay where the contexts look for them.
  const std::uint32_t chunks = (object + kDigestedBytes - 1) / kDigestedBytes;
  std::vector<std::uint64_t> known;
  Array<std::uint64_t> expected(Where::kMapped, std::size_t{kPages} * chunks);
  for (std::uint32_t i = 0; i < file_pages && layout.digested; ++i) {
    const auto page = digests_of_one(gpu.rig().media() + std::uint64_t{i} * object, object);
    known.insert(known.end(), page.begin(), page.end());
  }
  if (layout.digested) {
    layer.digests = reinterpret_cast<std::uint64_t>(expected.data());
    layer.digest_stride = chunks * 8;
  }
  const auto tell_expected = [&] {
    for (std::uint32_t k = 0; k < kPages && layout.digested; ++k) {
      std::copy_n(known.begin() + std::size_t{file_ids[k]} * chunks, chunks, expected.data() + std::size_t{k} * chunks);
    }
  };

  cudaStream_t io, compute;
  cudaEvent_t fork, join;
  check(cudaStreamCreateWithFlags(&io, cudaStreamNonBlocking), "stream");
  check(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking), "stream");
  check(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), "event");
  check(cudaEventCreateWithFlags(&join, cudaEventDisableTiming), "event");
  const WaitValue wait_value = find_wait_value();
  expect(wait_value != nullptr, "replays", "cuStreamWaitValue32");
  const IoControlBlock block = iocb.block(2'000 * kMs, layout.digested);
  check(cudaStreamBeginCapture(io, cudaStreamCaptureModeGlobal), "capture");
  check(tardis_gpu_gio_clear(&block, io), "clear");
  check(cudaEventRecord(fork, io), "fork");
  check(cudaStreamWaitEvent(compute, fork), "fork");
  if (wait_value != nullptr) {
    const CUresult waits =
        wait_value(compute, reinterpret_cast<CUdeviceptr>(block.flag), kIoDone, CU_STREAM_WAIT_VALUE_GEQ);
    expect(waits == CUDA_SUCCESS, "replays", "the wait to be captured", waits);
    verify<<<128, 256, 0, compute>>>(iocb.contexts.data(), iocb.count.data(), 7, options.block_shift, wrong.data());
  }
  check(tardis_gpu_gio_prepare(&layer, iocb.contexts.data(), iocb.count.data(), io), "prepare");
  check(tardis_gpu_gio_run(gpu.queues().data(), gpu.rings(), &block, options.ctas, io), "run");
  check(cudaEventRecord(join, compute), "join");
  check(cudaStreamWaitEvent(io, join), "join");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamEndCapture(io, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  std::mt19937_64 random(11);
  std::vector<std::uint32_t> memory_pages(kPages);
  std::iota(memory_pages.begin(), memory_pages.end(), 0u);
  std::uint64_t commands = 0, done = 0;
  const std::uint64_t begin = now_ns();
  for (int i = 0; i < replays; ++i) {
    std::shuffle(memory_pages.begin(), memory_pages.end(), random);
    std::copy(memory_pages.begin(), memory_pages.end(), memory_ids.data());
    for (std::uint32_t k = 0; k < kPages; ++k) file_ids[k] = static_cast<std::uint32_t>(random() % file_pages);
    pages[0] = static_cast<std::uint32_t>(random() % (kPages + 1));
    commands += std::uint64_t{pages[0]} * layer.commands_per_page();
    tell_expected();
    const bool spoiled = layout.digested && pages[0] != 0 && i % 3 == 0;
    const std::uint64_t word = spoiled ? random() % (std::uint64_t{pages[0]} * chunks) : 0;
    if (spoiled) expected[word] ^= std::uint64_t{1} << random() % 64;
    check(cudaGraphLaunch(exec, io), "replay");
    wait_for(io, "replay");
    const RingReport total = iocb.total(gpu.rings());
    done += total.done + total.damaged;
    expect(total.error == (spoiled ? RingError::kCommands : RingError::kNone), layout.name, "the error",
           static_cast<std::uint64_t>(total.error));
    expect(total.damaged == (spoiled ? 1 : 0), layout.name, "the one command damaged", total.damaged);
    const std::uint64_t command =
        word / chunks * layer.commands_per_page() + word % chunks * kDigestedBytes / layout.most_bytes;
    expect(!spoiled || iocb.status(command).end() == IoEnd::kDamaged, layout.name, "that of the spoiled digest",
           command);
  }
  expect(done == commands, "replays", "every command once", done);
  expect(wrong[0] == 0, "replays", "no wrong word", wrong[0]);
  std::printf(
      "  %s: %d replays, %llu commands, %.1f GB/s with everything\n", layout.name, replays,
      static_cast<unsigned long long>(commands),
      static_cast<double>(commands) * object / layer.commands_per_page() / static_cast<double>(now_ns() - begin));

  // The wait in a kernel that is there first.
  Array<std::uint32_t> seen(Where::kMapped, 1);
  pages[0] = kPages;
  tell_expected();
  check(tardis_gpu_gio_prepare(&layer, iocb.contexts.data(), iocb.count.data(), io), "prepare");
  check(tardis_gpu_gio_clear(&block, io), "clear");
  wait_for(io, "prepare");
  verify_after<<<8, 256, 0, compute>>>(block.flag, 3'000 * kMs, seen.data(), iocb.contexts.data(), iocb.count.data(), 7,
                                       options.block_shift, wrong.data());
  check(cudaGetLastError(), "verify_after");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  check(tardis_gpu_gio_run(gpu.queues().data(), gpu.rings(), &block, options.ctas, io), "run");
  wait_for(io, "ring");
  wait_for(compute, "wait_cqe");
  expect(seen[0] == kIoDone && wrong[0] == 0, "wait_cqe", "done, no wrong word", wrong[0]);
  verify<<<128, 256, 0, io>>>(iocb.contexts.data(), iocb.count.data(), 7, options.block_shift, wrong.data());
  // One that nothing comes for ends too.
  check(tardis_gpu_gio_clear(&block, io), "clear");
  wait_for(io, "clear");
  verify_after<<<1, 32, 0, compute>>>(block.flag, 50 * kMs, seen.data(), iocb.contexts.data(), iocb.count.data(), 7,
                                      options.block_shift, wrong.data());
  wait_for(compute, "wait_cqe");
  expect(seen[0] == kIoPending && wrong[0] == 0, "wait_cqe", "pending after its deadline", seen[0]);
  check(cudaGraphExecDestroy(exec), "graph");
  check(cudaGraphDestroy(graph), "graph");
  check(cudaStreamDestroy(io), "stream");
  check(cudaStreamDestroy(compute), "stream");
}

// ---- many
void check_many(std::uint64_t wanted, double seconds) {
  GpuRigOptions options;
  options.bytes = 512 << 20;
  options.queues = 4;
  options.entries = 1024;
  options.commands = 512;
  options.controller_threads = 4;
  options.slot_bytes = 4096;
  GpuRig gpu(options);
  fill_words(gpu.rig().media(), options.bytes, 3);
  Array<std::byte> pool(Where::kDevice, std::size_t{kMostContexts} * 4096);
  Array<std::uint32_t> memory_ids(Where::kDevice, kMostContexts), pages(Where::kMapped, 1);
  constexpr std::uint32_t kSets = 64;
  const auto blocks = static_cast<std::uint32_t>(options.bytes >> 12);
  Array<std::uint32_t> file_ids(Where::kDevice, std::size_t{kSets} * kMostContexts);
  std::mt19937_64 random(5);
  std::vector<std::uint32_t> places(kMostContexts), ids(file_ids.size());
  std::iota(places.begin(), places.end(), 0u);
  std::shuffle(places.begin(), places.end(), random);
  for (std::uint32_t& id : ids) id = static_cast<std::uint32_t>(random() % blocks);
  memory_ids.upload(places);
  file_ids.upload(ids);
  pages[0] = kMostContexts;
  Array<unsigned long long> wrong(Where::kMapped, 1);
  check(cudaMemset(pool.data(), kPoison, pool.size()), "poison");
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  std::vector<std::unique_ptr<Iocb>> iocbs;
  for (std::uint32_t i = 0; i < kSets; ++i) iocbs.push_back(std::make_unique<Iocb>(Where::kDevice));
  const std::uint64_t fetched = gpu.rig().commands(), completed = gpu.rig().completions();
  std::uint64_t sent = 0, done = 0;
  const std::uint64_t begin = now_ns();
  while (sent < wanted && static_cast<double>(now_ns() - begin) < seconds * 1e9) {
    for (std::uint32_t i = 0; i < kSets; ++i) {
      LayerPages layer{};
      layer.memory_pages = memory_ids.data();
      layer.file_pages = file_ids.data() + std::size_t{i} * kMostContexts;
      layer.count = pages.data();
      layer.pools[0] = reinterpret_cast<std::uint64_t>(pool.data());
      layer.page_stride[0] = layer.page_bytes[0] = 4096;
      layer.blocks_per_page = 1;
      layer.block_shift = 12;
      layer.most_bytes = 4096;
      layer.op = IoOp::kRead;
      const Iocb& iocb = *iocbs[i];
      check(tardis_gpu_gio_prepare(&layer, iocb.contexts.data(), iocb.count.data(), stream), "prepare");
      gpu.enqueue(iocb.block(2'000 * kMs), stream);
      verify<<<256, 256, 0, stream>>>(iocb.contexts.data(), iocb.count.data(), 3, 12, wrong.data());
      sent += kMostContexts;
    }
    wait_for(stream, "many", 200);
    for (const auto& iocb : iocbs) done += iocb->total(gpu.rings()).done;
    if (wrong[0] != 0 || done != sent) break;
  }
  const double took = static_cast<double>(now_ns() - begin) * 1e-9;
  expect(done == sent, "many", "every command done once", done);
  expect(wrong[0] == 0, "many", "no wrong word", wrong[0]);
  const std::uint64_t fetched_now = gpu.rig().commands() - fetched, completed_now = gpu.rig().completions() - completed;
  expect(fetched_now == sent, "many", "as many commands fetched as sent", fetched_now);
  expect(completed_now == sent, "many", "as many completions posted as commands sent", completed_now);
  expect(sent >= wanted, "many", "the commands within the time", sent);
  const std::string complaints = gpu.rig().violations();
  expect(complaints.empty(), "many", complaints.c_str());
  std::printf("  %llu commands of 4 KiB, each verified, in %.1f s: %.2f M/s with preparation and verification\n",
              static_cast<unsigned long long>(sent), took, static_cast<double>(sent) / took * 1e-6);
  check(cudaStreamDestroy(stream), "stream");
}

}  // namespace

int main(int argc, char** argv) {
  // Before CUDA starts: a kernel that is loaded on its first launch waits for the device.
  (void)::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (!gpu_test::has_gpu()) return gpu_test::kSkipped;
  const bool small = argc > 1 && std::strcmp(argv[1], "small") == 0;
  const double millions = argc > 1 ? std::atof(argv[1]) : 10, seconds = argc > 2 ? std::atof(argv[2]) : 60;
  check(tardis_gpu_gio_load(), "load");
  check(tardis_gpu_gio_prepare_load(), "load");
  std::uint64_t seed = 1;
  const std::uint64_t begin = now_ns();
  const auto lap = [&](const char* what) {
    std::printf("%s: %d failures so far, %.1f s\n", what, failures, static_cast<double>(now_ns() - begin) * 1e-9);
    std::fflush(stdout);
  };
  if (small) {
    for (const std::uint32_t slot_bytes : {8u << 10, 48u << 10}) {
      for (const std::uint32_t commands : {2u, 40u}) {
        GpuRigOptions options;
        options.entries = commands + 1;
        options.queues = commands > 2 ? 3 : 1;
        options.ctas = 2;
        options.slot_bytes = slot_bytes;
        options.bytes = 3 << 20;
        check_bytes(options, ++seed);
      }
    }
    lap("small");
    return failures == 0 ? 0 : 1;
  }
  for (const std::uint32_t slot_bytes : {8u << 10, 64u << 10}) {
    for (const std::uint32_t commands : {1u, 2u, 6u, 63u, 1022u}) {
      for (const bool sgl : {true, false}) {
        GpuRigOptions options;
        options.entries = commands + 1;
        options.sgl = sgl;
        options.queues = commands > 1000 ? 1 + sgl * 3 : 1 + (commands * 5 + sgl * 3) % 12;
        options.controller_threads = 2;
        options.block_shift = sgl ? 12 : 9;
        options.slot_bytes = commands > 1000 ? 8u << 10 : slot_bytes;
        options.bytes = 32 << 20;
        options.ctas = commands > 1000 ? 4 : 1 + (commands + sgl) % 4;
        check_bytes(options, ++seed);
      }
    }
  }
  for (const std::uint32_t slot_bytes : {4u << 10, 12u << 10, 128u << 10, 1u << 20, 2u << 20}) {
    GpuRigOptions options;
    options.entries = 32;
    options.commands = 16;
    options.queues = options.controller_threads = 4;
    options.slot_bytes = slot_bytes;
    options.bytes = 64 << 20;
    check_bytes(options, ++seed);
  }
  lap("bytes");
  check_faults(1, 64, 8 << 10);
  check_faults(3, 300, 16 << 10);
  lap("faults");
  check_replays({"16 KiB of K and of V, a command a page", 16 << 10, 2, 0, 32 << 10}, 1000);
  check_replays({"4 KiB of K and of V, a command a page, pages apart", 4 << 10, 2, 256, 8 << 10}, 200);
  check_replays({"72 KiB of one buffer (MLA), three commands a page", 72 << 10, 1, 0, 32 << 10}, 200);
  check_replays({"40 KiB of K and of V, three commands a page, pages apart", 40 << 10, 2, 64, 32 << 10}, 200);
  check_replays({"16 KiB of K and of V, with digests", 16 << 10, 2, 0, 32 << 10, true}, 200);
  check_replays({"72 KiB of one buffer (MLA), three commands a page, with digests", 72 << 10, 1, 0, 32 << 10, true},
                200);
  check_replays({"40 KiB of K and of V, a command a page, with digests", 40 << 10, 2, 64, 80 << 10, true}, 200);
  lap("replays");
  check_many(static_cast<std::uint64_t>(millions * 1e6), seconds);
  lap("many");
  std::printf(failures == 0 ? "all as expected\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
