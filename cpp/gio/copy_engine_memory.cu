// SPDX-License-Identifier: Apache-2.0
#include "gio/copy_engine_memory.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "nvme/ordering.h"

namespace tardis::gio {
namespace {

using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

struct Engine {
  int device = 0;
  bool batches = false;
  WriteValue write_value = nullptr;
  std::string name;
};

cudaError_t set_device(const Engine& engine) { return cudaSetDevice(engine.device); }

// The copies of one direction, in order, each batch with a number that the stream writes to host memory behind it: to
// look there takes no call of the driver, which would hold its lock against those who start copies.
class Flow {
 public:
  explicit Flow(const Engine& engine) : engine_(engine) {}
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;

  cudaError_t open() {
    int least = 0, greatest = 0;
    cudaError_t result = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (result == cudaSuccess) result = cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest);
    if (result == cudaSuccess) {
      result = cudaHostAlloc(reinterpret_cast<void**>(&ended_), 64, cudaHostAllocMapped | cudaHostAllocPortable);
    }
    if (result != cudaSuccess) return result;
    *ended_ = 0;
    return cudaHostGetDevicePointer(&ended_there_, ended_, 0);
  }
  // Returns when no copy runs.
  void close() {
    if (stream_ != nullptr) {
      (void)cudaStreamSynchronize(stream_);  // an error of it: the device is gone, and its copies with it
      (void)cudaStreamDestroy(stream_);
    }
    if (ended_ != nullptr) (void)cudaFreeHost(ended_);
  }

  cudaError_t start(bool to_remote, const tardis_copy* copies, std::size_t count, std::uint64_t batch) {
    cudaError_t result = set_device(engine_);
    if (result != cudaSuccess) return result;
    const cudaMemcpyKind kind = to_remote ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    if (engine_.batches && count > 1) {
      result = start_batch(to_remote, copies, count);
    } else {
      for (std::size_t i = 0; i < count && result == cudaSuccess; ++i) {
        void* const to = to_remote ? copies[i].remote : copies[i].host;
        result = cudaMemcpyAsync(to, to_remote ? copies[i].host : copies[i].remote, copies[i].bytes, kind, stream_);
      }
    }
    const std::uint32_t number = ++started_;
    // Without the flag that takes it away, a barrier for all of memory comes first: who sees the number sees the bytes.
    const bool marked = engine_.write_value(stream_, reinterpret_cast<CUdeviceptr>(ended_there_), number,
                                            CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS;
    // Some may run, whatever the calls said: it ends as what was started.
    const cudaError_t error = result != cudaSuccess ? result : marked ? cudaSuccess : cudaErrorUnknown;
    waiting_.push_back({batch, number, error});
    if (error != cudaSuccess) (void)cudaGetLastError();  // not the caller's
    if (waiting_.size() == 1) looked_ = Clock::now();
    return cudaSuccess;
  }

  std::size_t poll(tardis_copy_end* ends, std::size_t most) {
    std::size_t found = 0;
    if (waiting_.empty() || most == 0) return 0;
    // Acquire: forbids that the host reads what a batch brought before the number behind it.
    std::uint32_t ended = nvme::load_acquire(ended_);
    cudaError_t lost = cudaSuccess;
    if (before(ended, waiting_.front().number)) {
      if (Clock::now() - looked_ < kPatience) return 0;
      // Late: a device that failed, or a number that could not be written.
      looked_ = Clock::now();
      lost = set_device(engine_);
      if (lost == cudaSuccess) lost = cudaStreamQuery(stream_);
      if (lost == cudaErrorNotReady) return 0;
      ended = started_;  // the stream is empty, or gone
    }
    while (found < most && !waiting_.empty() && !before(ended, waiting_.front().number)) {
      const Waiting& first = waiting_.front();
      ends[found++] = {first.batch, first.error != cudaSuccess ? first.error : lost, 0};
      waiting_.pop_front();
      looked_ = Clock::now();
    }
    return found;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kPatience{2};
  struct Waiting {
    std::uint64_t batch;
    std::uint32_t number;
    cudaError_t error;  // of the calls
  };

  static bool before(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) < 0; }

  cudaError_t start_batch(bool to_remote, const tardis_copy* copies, std::size_t count) {
#if CUDART_VERSION >= 12080
    to_.resize(count);
    from_.resize(count);
    sizes_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      to_[i] = to_remote ? copies[i].remote : copies[i].host;
      from_[i] = to_remote ? copies[i].host : copies[i].remote;
      sizes_[i] = copies[i].bytes;
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync(to_.data(), from_.data(), sizes_.data(), count, &attributes, &first, 1, stream_);
#else
    std::size_t failed = 0;
    return cudaMemcpyBatchAsync(to_.data(), from_.data(), sizes_.data(), count, &attributes, &first, 1, &failed,
                                stream_);
#endif
#else
    (void)to_remote, (void)copies, (void)count;
    return cudaErrorNotSupported;
#endif
  }

  const Engine& engine_;
  cudaStream_t stream_ = nullptr;
  std::uint32_t* ended_ = nullptr;
  void* ended_there_ = nullptr;
  std::uint32_t started_ = 0;
  std::deque<Waiting> waiting_;
  Clock::time_point looked_;
  std::vector<void*> to_, from_;
  std::vector<std::size_t> sizes_;
};

struct Lane {
  explicit Lane(const Engine& engine) : engine(engine), flows{Flow(engine), Flow(engine)} {}
  const Engine& engine;
  std::array<Flow, 2> flows;  // to the host, to the device
};

Engine& engine_of(void* context) { return *static_cast<Engine*>(context); }

int allocate(void* context, std::uint64_t bytes, void** remote) {
  const cudaError_t result = set_device(engine_of(context));
  if (result != cudaSuccess) return result;
  constexpr std::uint64_t kUnit = 2 << 20;  // whole units are aligned as such
  return cudaMalloc(remote, (bytes + kUnit - 1) / kUnit * kUnit);
}

int release(void* context, void* remote) {
  const cudaError_t result = set_device(engine_of(context));
  return result != cudaSuccess ? result : cudaFree(remote);
}

int copy(void* context, const tardis_copy* copy, int to_remote) {
  const cudaError_t result = set_device(engine_of(context));
  if (result != cudaSuccess) return result;
  void* const to = to_remote != 0 ? copy->remote : copy->host;
  return cudaMemcpy(to, to_remote != 0 ? copy->host : copy->remote, copy->bytes, cudaMemcpyDefault);
}

int pin(void* context, void* host, std::uint64_t bytes) {
  const cudaError_t result = set_device(engine_of(context));
  return result != cudaSuccess ? result : cudaHostRegister(host, bytes, cudaHostRegisterPortable);
}

int unpin(void* context, void* host) {
  const cudaError_t result = set_device(engine_of(context));
  return result != cudaSuccess ? result : cudaHostUnregister(host);
}

void close_lane(void* memory) {
  const std::unique_ptr<Lane> lane(static_cast<Lane*>(memory));
  (void)set_device(lane->engine);
  for (Flow& flow : lane->flows) flow.close();
}

int open_lane(void* context, void** opened) {
  const Engine& engine = engine_of(context);
  cudaError_t result = set_device(engine);
  if (result != cudaSuccess) return result;
  auto lane = std::unique_ptr<Lane>(new (std::nothrow) Lane(engine));
  if (lane == nullptr) return cudaErrorMemoryAllocation;
  for (Flow& flow : lane->flows) {
    if (result == cudaSuccess) result = flow.open();
  }
  if (result == cudaSuccess) {
    *opened = lane.release();
  } else {
    close_lane(lane.release());
  }
  return result;
}

int start(void* lane, int to_remote, const tardis_copy* copies, std::size_t count, std::uint64_t batch) {
  return static_cast<Lane*>(lane)->flows[to_remote != 0 ? 1 : 0].start(to_remote != 0, copies, count, batch);
}

std::size_t poll(void* lane, tardis_copy_end* ends, std::size_t most) {
  std::size_t found = 0;
  for (Flow& flow : static_cast<Lane*>(lane)->flows) found += flow.poll(ends + found, most - found);
  return found;
}

// Moves two pieces there and back by a lane. Whether they came back.
bool try_out(const Engine& engine) {
  constexpr std::size_t kBytes = 4096;
  void *lane = nullptr, *host = nullptr, *device = nullptr;
  bool good = cudaHostAlloc(&host, 4 * kBytes, cudaHostAllocPortable) == cudaSuccess &&
              cudaMalloc(&device, 2 * kBytes) == cudaSuccess && open_lane(const_cast<Engine*>(&engine), &lane) == 0;
  if (good) {
    auto* const bytes = static_cast<unsigned char*>(host);
    for (std::size_t i = 0; i < 2 * kBytes; ++i) bytes[i] = static_cast<unsigned char>(i * 7 + i / kBytes);
    std::memset(bytes + 2 * kBytes, 0xa5, 2 * kBytes);
    for (int to_remote = 1; good && to_remote >= 0; --to_remote) {
      tardis_copy copies[2];
      for (std::size_t i = 0; i < 2; ++i) {
        copies[i] = {bytes + (to_remote != 0 ? i : i + 2) * kBytes, static_cast<unsigned char*>(device) + i * kBytes,
                     kBytes};
      }
      tardis_copy_end end{};
      good = start(lane, to_remote, copies, 2, 7) == 0;
      const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(5);
      while (good && poll(lane, &end, 1) == 0) good = std::chrono::steady_clock::now() < give_up;
      good = good && end.batch == 7 && end.error == 0;
    }
    good = good && std::memcmp(bytes, bytes + 2 * kBytes, 2 * kBytes) == 0;
  }
  if (lane != nullptr) close_lane(lane);
  (void)cudaFree(device);
  (void)cudaFreeHost(host);
  (void)cudaGetLastError();  // what is not there is found out so
  return good;
}

// Many batches on many lanes at once. What the driver has to allocate for that it may get only when running kernels
// have ended; and a ring that runs would wait for its copies, until its deadline.
bool warm_up(const Engine& engine) {
  constexpr std::size_t kLanes = 16, kBatches = 4, kCopies = 32, kBytes = 16 << 10;
  void *host = nullptr, *device = nullptr;
  std::array<void*, kLanes> lanes{};
  bool good = cudaHostAlloc(&host, kCopies * kBytes, cudaHostAllocPortable) == cudaSuccess &&
              cudaMalloc(&device, kCopies * kBytes) == cudaSuccess;
  for (void*& lane : lanes) good = good && open_lane(const_cast<Engine*>(&engine), &lane) == 0;
  if (good) {
    std::array<tardis_copy, kCopies> copies;
    for (std::size_t i = 0; i < kCopies; ++i) {
      copies[i] = {static_cast<unsigned char*>(host) + i * kBytes, static_cast<unsigned char*>(device) + i * kBytes,
                   kBytes};
    }
    for (std::size_t batch = 0; batch < kBatches; ++batch) {
      for (void* lane : lanes) {
        for (const int to_remote : {0, 1}) {
          good = good && start(lane, to_remote, copies.data(), copies.size(), batch) == 0;
        }
      }
    }
  }
  for (void* lane : lanes) {
    if (lane != nullptr) close_lane(lane);  // when its copies have ended
  }
  (void)cudaFree(device);
  (void)cudaFreeHost(host);
  return good && cudaGetLastError() == cudaSuccess;
}

WriteValue find_write_value() {
  constexpr unsigned kVersion = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state;
  const cudaError_t result =
      cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &found, kVersion, cudaEnableDefault, &state);
  if (result != cudaSuccess || state != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<WriteValue>(found);
}

}  // namespace
}  // namespace tardis::gio

int tardis_gpu_copy_engine_open(int device, int calls, tardis_copy_engine* table) {
  using namespace tardis::gio;
  if (table == nullptr || (calls != TARDIS_GPU_COPY_CALLS_BEST && calls != TARDIS_GPU_COPY_CALLS_SINGLE)) {
    return cudaErrorInvalidValue;
  }
  auto engine = std::unique_ptr<Engine>(new (std::nothrow) Engine);
  if (engine == nullptr) return cudaErrorMemoryAllocation;
  engine->device = device;
  if (const cudaError_t result = set_device(*engine); result != cudaSuccess) return result;
  engine->write_value = find_write_value();
  if (engine->write_value == nullptr) return cudaErrorNotSupported;
  engine->batches = calls == TARDIS_GPU_COPY_CALLS_BEST;
  if (engine->batches) engine->batches = try_out(*engine);
  if (!engine->batches && !try_out(*engine)) return cudaErrorNotSupported;
  if (!warm_up(*engine)) return cudaErrorUnknown;
  engine->name = "copy engines of GPU " + std::to_string(device) +
                 (engine->batches ? " (cudaMemcpyBatchAsync)" : " (cudaMemcpyAsync a piece)");
  *table = {};
  table->name = engine->name.c_str();
  table->allocate = allocate;
  table->release = release;
  table->copy = copy;
  table->pin = pin;
  table->unpin = unpin;
  table->open_lane = open_lane;
  table->close_lane = close_lane;
  table->start = start;
  table->poll = poll;
  table->context = engine.release();
  return cudaSuccess;
}

int tardis_gpu_copy_engine_close(tardis_copy_engine* table) {
  if (table == nullptr || table->context == nullptr) return cudaErrorInvalidValue;
  const std::unique_ptr<tardis::gio::Engine> engine(static_cast<tardis::gio::Engine*>(table->context));
  *table = {};
  return cudaSuccess;
}
