// SPDX-License-Identifier: Apache-2.0
// On a GPU: cuFile beside preads by as many threads: scattered records of a file into HBM. libcufile is looked for when
// the program runs. Without the nvidia-fs module cuFile works in its compatibility mode: preads into host memory of its
// own and a copy; the rows say which mode it was. One JSON object a line on stdout.
// Arguments: FILE (made, and overwritten), its MiB, passes. Exit status 0, 1 (an error, or wrong bytes), 77 (no GPU or
// no libcufile here).
#include <dlfcn.h>

#include <atomic>

#include "tests/gpu_file_support.cuh"

namespace {

using namespace tardis;
using namespace tardis::gio;
using namespace tardis::gio::testing;

constexpr std::uint64_t kSeed = 11;
constexpr unsigned kThreads = 16, kBatch = 64;

// What is used of cuFile's C ABI (cufile.h of CUDA 13).
struct CuFileError {
  int error;  // 0: success
  int cuda_error;
};
struct CuFileDescription {
  int type;  // 1: a file descriptor
  union {
    int file;
    void* handle;
  } handle;
  const void* operations;
};
static_assert(sizeof(CuFileDescription) == 24);
struct CuFileRequest {
  int mode;  // 1: batch
  void* base;
  off_t file_offset, base_offset;
  std::size_t size;
  void* handle;
  int op;  // 0: read
  void* cookie;
};
static_assert(sizeof(CuFileRequest) == 64 && offsetof(CuFileRequest, base) == 8 &&
              offsetof(CuFileRequest, handle) == 40);
struct CuFileEvent {
  void* cookie;
  int status;  // 16: complete
  std::size_t result;
};
static_assert(sizeof(CuFileEvent) == 24);

class CuFile {
 public:
  bool load() {
    library_ = ::dlopen("libcufile.so.0", RTLD_NOW);
    if (library_ == nullptr) {
      std::printf("skipped: %s\n", ::dlerror());
      return false;
    }
    return find(driver_open, "cuFileDriverOpen") && find(register_file, "cuFileHandleRegister") &&
           find(forget_file, "cuFileHandleDeregister") && find(register_memory, "cuFileBufRegister") &&
           find(forget_memory, "cuFileBufDeregister") && find(read, "cuFileRead") &&
           find(batch_begin, "cuFileBatchIOSetUp") && find(batch_submit, "cuFileBatchIOSubmit") &&
           find(batch_status, "cuFileBatchIOGetStatus") && find(batch_end, "cuFileBatchIODestroy");
  }
  CuFileError (*driver_open)() = nullptr;
  CuFileError (*register_file)(void**, CuFileDescription*) = nullptr;
  void (*forget_file)(void*) = nullptr;
  CuFileError (*register_memory)(const void*, std::size_t, int) = nullptr;
  CuFileError (*forget_memory)(const void*) = nullptr;
  ssize_t (*read)(void*, void*, std::size_t, off_t, off_t) = nullptr;
  CuFileError (*batch_begin)(void**, unsigned) = nullptr;
  CuFileError (*batch_submit)(void*, unsigned, CuFileRequest*, unsigned) = nullptr;
  CuFileError (*batch_status)(void*, unsigned, unsigned*, CuFileEvent*, timespec*) = nullptr;
  void (*batch_end)(void*) = nullptr;

 private:
  template <class F>
  bool find(F& function, const char* name) {
    function = reinterpret_cast<F>(::dlsym(library_, name));
    if (function == nullptr) std::printf("skipped: libcufile.so.0 has no %s\n", name);
    return function != nullptr;
  }
  void* library_ = nullptr;  // stays: cuFile has threads of its own
};

__global__ void compare_records(const std::uint64_t* pool, const std::uint64_t* records, std::uint32_t count,
                                std::uint64_t words, std::uint64_t seed, unsigned long long* wrong) {
  unsigned long long bad = 0;
  for (std::uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
    for (std::uint64_t k = threadIdx.x; k < words; k += blockDim.x) {
      bad += pool[i * words + k] != word_at(records[i] * words + k, seed);
    }
  }
  if (bad != 0) atomicAdd(wrong, bad);
}

// Runs work(i, thread) for i < count on so many threads; seconds, or < 0 if one failed.
template <class Work>
double on_threads(std::size_t count, unsigned threads, Work work) {
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<std::thread> all;
  const std::uint64_t begin = now_ns();
  for (unsigned t = 0; t < threads; ++t) {
    all.emplace_back([&, t] {
      check(cudaSetDevice(0), "cudaSetDevice");
      for (std::size_t i; (i = next.fetch_add(1)) < count && !failed.load();) {
        if (!work(i, t)) failed.store(true);
      }
    });
  }
  for (std::thread& thread : all) thread.join();
  return failed.load() ? -1 : static_cast<double>(now_ns() - begin) * 1e-9;
}

class Bench {
 public:
  Bench(CuFile& cufile, const std::string& name, std::uint64_t bytes, int passes)
      : cufile_(cufile),
        file_(name, O_RDWR),
        pool_(Where::kDevice, bytes),
        host_(Where::kMapped, std::size_t{kThreads} * kMostRecord),
        bytes_(bytes),
        passes_(passes) {
    CuFileDescription description{};
    description.type = 1;
    description.handle.file = file_.get();
    const CuFileError error = cufile_.register_file(&handle_, &description);
    if (error.error != 0) {
      std::printf("skipped: cuFileHandleRegister: error %d\n", error.error);
      std::fflush(stdout);
      std::_Exit(gpu_test::kSkipped);
    }
    registered_ = cufile_.register_memory(pool_.data(), pool_.size(), 0).error == 0;
  }
  ~Bench() {
    if (registered_) (void)cufile_.forget_memory(pool_.data());
    cufile_.forget_file(handle_);
  }

  int measure(std::uint64_t record) {
    const std::vector<std::uint64_t> order = shuffled_records(bytes_, record, record);
    std::vector<double> rates;
    for (int pass = 0; pass < passes_; ++pass) {
      const double seconds = on_threads(order.size(), kThreads, [&](std::size_t i, unsigned thread) {
        file_.read(host_.data() + thread * kMostRecord, record, order[i] * record);
        return true;
      });
      rates.push_back(static_cast<double>(bytes_) / seconds * 1e-9);
    }
    const double limit = median(rates);
    row("pread, 16 threads, to host memory only", record, limit, 0, 0);
    const int failures = measured("cuFileRead, 16 threads", record, order, limit, [&] {
      return on_threads(order.size(), kThreads, [&](std::size_t i, unsigned) {
        return cufile_.read(handle_, pool_.data(), record, static_cast<off_t>(order[i] * record),
                            static_cast<off_t>(i * record)) == static_cast<ssize_t>(record);
      });
    });
    if (!batches_) return failures;
    // A few: batches may be a hundred times slower than reads.
    const std::vector<std::uint64_t> some(
        order.begin(), order.begin() + std::min<std::ptrdiff_t>(4 * kBatch, static_cast<std::ptrdiff_t>(order.size())));
    return failures + measured("cuFileBatchIO, one thread, 64 a batch", record, some, limit, [&] {
             return on_threads((some.size() + kBatch - 1) / kBatch, 1,
                               [&](std::size_t i, unsigned) { return batch(some, record, i * kBatch); });
           });
  }

  static constexpr std::uint64_t kMostRecord = 2 << 20;

 private:
  bool batch(const std::vector<std::uint64_t>& order, std::uint64_t record, std::size_t first) const {
    const auto count = static_cast<unsigned>(std::min<std::size_t>(kBatch, order.size() - first));
    std::vector<CuFileRequest> requests(count);
    std::vector<CuFileEvent> events(count);
    for (unsigned k = 0; k < count; ++k) {
      requests[k] = {1,
                     pool_.data(),
                     static_cast<off_t>(order[first + k] * record),
                     static_cast<off_t>((first + k) * record),
                     record,
                     handle_,
                     0,
                     nullptr};
    }
    void* id = nullptr;
    if (const CuFileError error = cufile_.batch_begin(&id, count); error.error != 0) {
      return refused("cuFileBatchIOSetUp", error.error, 0);
    }
    const CuFileError submitted = cufile_.batch_submit(id, count, requests.data(), 0);
    bool good = submitted.error == 0 || refused("cuFileBatchIOSubmit", submitted.error, 0);
    const std::uint64_t begin = now_ns();
    for (unsigned done = 0; good && done < count;) {
      unsigned found = count;
      timespec patience{1, 0};
      const CuFileError told = cufile_.batch_status(id, 1, &found, events.data(), &patience);
      if (told.error != 0) good = refused("cuFileBatchIOGetStatus", told.error, done);
      for (unsigned k = 0; good && k < found; ++k) {
        const bool complete = events[k].status == 16 && events[k].result == record;
        good = complete || refused("an event's status", events[k].status, done + k);
      }
      done += found;
      if (good && done < count && now_ns() - begin > 3'000'000'000) good = refused("no event for 3 s", 0, done);
    }
    cufile_.batch_end(id);
    return good;
  }
  // Says so, and that no further batches are tried.
  bool refused(const char* what, int code, unsigned done) const {
    std::printf("cuFileBatchIO: %s: %d, after %u of a batch\n", what, code, done);
    std::fflush(stdout);
    batches_ = false;
    return false;
  }

  template <class Pass>
  int measured(const char* system, std::uint64_t record, const std::vector<std::uint64_t>& order, double limit,
               Pass pass) {
    check(cudaMemset(pool_.data(), 0xa5, pool_.size()), "poison");
    if (pass() < 0) {
      std::printf("%s, records of %llu bytes: not available here\n", system, static_cast<unsigned long long>(record));
      return 0;
    }
    const Array<std::uint64_t> records(Where::kDevice, order.size());
    records.upload(order);
    const Array<unsigned long long> wrong(Where::kMapped, 1);
    compare_records<<<256, 256>>>(reinterpret_cast<const std::uint64_t*>(pool_.data()), records.data(),
                                  static_cast<std::uint32_t>(order.size()), record / 8, kSeed, wrong.data());
    check(cudaGetLastError(), "compare");
    wait_for(nullptr, "compare");
    std::vector<double> rates;
    for (int i = 0; i < passes_; ++i) rates.push_back(static_cast<double>(order.size() * record) / pass() * 1e-9);
    row(system, record, median(rates), limit, wrong[0]);
    return wrong[0] != 0;
  }

  void row(const char* system, std::uint64_t record, double value, double limit, unsigned long long wrong) const {
    std::printf("{\"case\": \"file, random read\", \"system\": \"%s\", \"size\": %llu, \"value\": %.4g, ", system,
                static_cast<unsigned long long>(record), value);
    std::printf("\"unit\": \"GB/s\", \"limit\": ");
    limit > 0 ? std::printf("%.4g, \"ratio\": %.3f", limit, value / limit) : std::printf("null, \"ratio\": null");
    std::printf(", \"direct\": %s, \"memory_registered\": %s, \"wrong_words\": %llu}\n",
                file_.direct() ? "true" : "false", registered_ ? "true" : "false", wrong);
    std::fflush(stdout);
  }

  CuFile& cufile_;
  File file_;
  Array<std::byte> pool_, host_;
  const std::uint64_t bytes_;
  const int passes_;
  void* handle_ = nullptr;
  bool registered_ = false;
  mutable bool batches_ = true;  // they work here, as far as is known
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s FILE MIB PASSES\n", argv[0]);
    return 1;
  }
  if (!gpu_test::has_gpu()) return gpu_test::kSkipped;
  CuFile cufile;
  if (!cufile.load()) return gpu_test::kSkipped;
  const bool module = ::access("/proc/driver/nvidia-fs/version", R_OK) == 0;
  if (const CuFileError error = cufile.driver_open(); error.error != 0) {
    std::printf("skipped: cuFileDriverOpen: error %d\n", error.error);
    return gpu_test::kSkipped;
  }
  std::printf("cuFile: %s\n", module ? "nvidia-fs module" : "compatibility mode (no nvidia-fs module)");
  const std::uint64_t bytes = std::strtoull(argv[2], nullptr, 10) << 20;
  fill_file(argv[1], bytes, kSeed);
  Bench bench(cufile, argv[1], bytes, std::max(1, std::atoi(argv[3])));
  int failures = 0;
  for (const std::uint64_t record : {32u << 10, 64u << 10, 256u << 10, 1u << 20, 2u << 20}) {
    failures += bench.measure(record);
  }
  return failures == 0 ? 0 : 1;
}
