// SPDX-License-Identifier: Apache-2.0
// Times of restores by where their pages are, as one graph; prints one JSON object for each. The drive is a namespace
// in memory, or a store's files in a tmpfs, of which the software controller's threads serve every command. Arguments:
// a folder for the store (/dev/shm), pages (512), repetitions (15), controller threads (12). Exit status 0; 1: a CUDA
// error, or a page that is not what was stored; 77: no GPU here.
#include <numeric>

#include "gpu_gstore_measure.cuh"
#include "gpu_restore_rig.cuh"

namespace tardis::gstore::testing {
namespace {

constexpr std::uint64_t kUnknown = 1u << 30;  // numbers of objects that nobody stored

class RestoreBench {
 public:
  RestoreBench(const RestoreRigOptions& options, int repetitions)
      : rig_(options), repetitions_(repetitions), most_(options.max_pages) {
    keys_ = device_array<Key>(most_);
    key_words_.resize(most_);
    numbers_ = mapped_array<std::uint64_t>(most_);
    count_ = mapped_array<std::uint32_t>(1);
    results_ = mapped_array<tardis_gpu_restore_result>(most_);
    wrong_ = mapped_array<std::uint32_t>(most_);
    want_ = mapped_array<std::uint32_t>(1);
    scratch_ = device_array<std::uint8_t>(tardis_gpu_blocks_scratch_bytes());
    want_[0] = most_;
    graph_ = std::make_unique<Graph>(stream_, [&] { enqueue(); });
    lookup_ = std::make_unique<Graph>(stream_, [&] {
      const tardis_gpu_restore* const r = &rig_.restore;
      check(tardis_gpu_restore_begin(r, keys_.get(), count_.get(), results_.get(), stream_), "begin");
      check(tardis_gpu_restore_end(r, keys_.get(), count_.get(), results_.get(), stream_), "end");
    });
    to_dram_ = std::make_unique<Graph>(stream_, [&] {
      check(tardis_gpu_restore_to_dram(&rig_.restore, want_.get(), 0, scratch_.get(), 4, stream_), "to_dram");
    });
    to_files_ = std::make_unique<Graph>(stream_, [&] {
      check(tardis_gpu_restore_to_files(&rig_.restore, TARDIS_GPU_DRAM, want_.get(), 0, scratch_.get(), stream_),
            "dram");
      check(tardis_gpu_restore_to_files(&rig_.restore, TARDIS_GPU_HBM, want_.get(), 0, scratch_.get(), stream_), "hbm");
    });
    if (options.raw) {
      write_all();
    } else {
      std::vector<std::uint64_t> all(options.max_pages);
      std::iota(all.begin(), all.end(), std::uint64_t{0});
      rig_.store->set(all);
      rig_.update(stream_);
    }
    cudaGraph_t counted;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue();
    check(cudaStreamEndCapture(stream_, &counted), "cudaStreamEndCapture");
    check(cudaGraphGetNodes(counted, nullptr, &nodes_), "cudaGraphGetNodes");
    check(cudaGraphDestroy(counted), "cudaGraphDestroy");
  }

  void run() {
    const std::string system = std::string(rig_.options.raw ? "namespace in memory" : "store on files") +
                               (rig_.options.digests ? ", digests compared" : ", no digests");
    const double pages_bytes = static_cast<double>(rig_.options.shape.bytes());
    const double link = link_rate();
    const double files = rig_.options.raw ? link : files_rate();
    const std::string shape = std::to_string(rig_.options.shape.bytes() >> 10) + " KiB in " +
                              std::to_string(rig_.options.shape.layers) + " layers";
    if (rig_.options.digests && !rig_.options.raw) {
      row("copy engine, pinned to HBM", "limit", shape, link * 1e-9, "GB/s");
      row("pread by a thread for each core", "limit", shape, files * 1e-9, "GB/s");
    }
    row("nodes of a restore's graph", system.c_str(), shape, static_cast<double>(nodes_), "nodes");
    for (const std::uint32_t n : {std::min(64u, most_), most_}) {
      const std::string size = std::to_string(n) + " x " + shape;
      for (const int source :
           {TARDIS_GPU_SOURCE_HBM, TARDIS_GPU_SOURCE_DRAM, TARDIS_GPU_SOURCE_FILE, TARDIS_GPU_SOURCE_MISS}) {
        static const char* const kNames[] = {"restore from HBM", "restore from pinned memory", "restore from the drive",
                                             "restore of unknown pages"};
        if (source == TARDIS_GPU_SOURCE_HBM) {
          std::vector<double> seconds;
          for (int repetition = 0; repetition < repetitions_; ++repetition) seconds.push_back(one(n, source, *lookup_));
          row("begin and end, hits in HBM", system.c_str(), size, median(seconds) * 1e6, "us", 0,
              quantile(seconds, 0.99) * 1e6);
        }
        std::vector<double> seconds;
        for (int repetition = 0; repetition < repetitions_; ++repetition) seconds.push_back(one(n, source, *graph_));
        row(kNames[source], system.c_str(), size, median(seconds) * 1e6, "us", 0, quantile(seconds, 0.99) * 1e6);
        if (source == TARDIS_GPU_SOURCE_DRAM || source == TARDIS_GPU_SOURCE_FILE) {
          const double limit = source == TARDIS_GPU_SOURCE_DRAM ? link : std::min(link, files);
          row(kNames[source], system.c_str(), size + ", rate", pages_bytes * n / median(seconds) * 1e-9, "GB/s",
              limit * 1e-9);
        }
      }
    }
  }

 private:
  void enqueue() {
    const tardis_gpu_restore* const r = &rig_.restore;
    check(tardis_gpu_restore_begin(r, keys_.get(), count_.get(), results_.get(), stream_), "begin");
    rig_.layers(stream_);
    check(tardis_gpu_restore_end(r, keys_.get(), count_.get(), results_.get(), stream_), "end");
    check(tardis_gpu_restore_commit(r, keys_.get(), stream_), "commit");
  }

  // New pages, that rings write.
  void write_all() {
    ask(most_, 0);
    const tardis_gpu_restore* const r = &rig_.restore;
    const PageWords words{results_.get(),          count_.get(),      numbers_.get(), rig_.key_layers.get(),
                          rig_.value_layers.get(), rig_.options.shape};
    enqueue();
    compute_pages<<<256, 256, 0, stream_>>>(words);
    check(cudaGetLastError(), "compute");
    check(tardis_gpu_restore_write_begin(r, stream_), "write_begin");
    for (std::uint32_t layer = 0; layer < rig_.options.shape.layers; ++layer) {
      check(tardis_gpu_restore_write_layer(r, layer, rig_.gpu->queues().data(), rig_.gpu->rings(), 4,
                                           RestoreRig::kDeadlineNs, stream_),
            "write_layer");
    }
    check(tardis_gpu_restore_write_end(r, stream_), "write_end");
    check(cudaStreamSynchronize(stream_), "write_all");
    std::vector<std::uint64_t> handles;
    for (std::uint32_t i = 0; i < most_; ++i) handles.push_back(results_[i].handle);
    rig_.unref(handles, stream_);
    to_files_->launch(stream_);
    check(cudaStreamSynchronize(stream_), "to_files");
  }

  // All is in files before, and again after.
  double one(std::uint32_t n, int source, const Graph& graph) {
    ask(n, 0);
    if (source == TARDIS_GPU_SOURCE_HBM || source == TARDIS_GPU_SOURCE_DRAM) {
      (void)timed(n, TARDIS_GPU_SOURCE_FILE, *graph_);
      if (source == TARDIS_GPU_SOURCE_DRAM) {
        to_dram_->launch(stream_);
        check(cudaStreamSynchronize(stream_), "to_dram");
      }
    }
    if (source == TARDIS_GPU_SOURCE_MISS) ask(n, kUnknown);
    const double seconds = timed(n, source, graph);
    to_files_->launch(stream_);
    check(cudaStreamSynchronize(stream_), "to_files");
    return seconds;
  }
  void ask(std::uint32_t n, std::uint64_t first) {
    for (std::uint32_t i = 0; i < n; ++i) {
      numbers_[i] = first + i;
      key_words_[i] = key_of(first + i);
    }
    check(cudaMemcpy(keys_.get(), key_words_.data(), n * sizeof(Key), cudaMemcpyDefault), "keys");
    count_[0] = n;
  }
  double timed(std::uint32_t n, int source, const Graph& graph) {
    check(cudaMemsetAsync(rig_.pools.get(), source == TARDIS_GPU_SOURCE_HBM ? 0 : 0xA5,
                          source == TARDIS_GPU_SOURCE_HBM ? 0 : rig_.options.shape.bytes() * rig_.options.hbm, stream_),
          "poison");
    Timer timer(stream_);
    const double seconds = timer.seconds([&] { graph.launch(stream_); });
    std::vector<std::uint64_t> handles;
    std::uint32_t right = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
      right += static_cast<int>(results_[i].source) == source && results_[i].outcome <= TARDIS_GPU_RESTORE_NEW;
      if (results_[i].outcome <= TARDIS_GPU_RESTORE_NEW) handles.push_back(results_[i].handle);
    }
    expect(right == n, "pages of source " + std::to_string(source), right, n);
    if (source != TARDIS_GPU_SOURCE_MISS) {
      std::memset(wrong_.get(), 0, n * sizeof(std::uint32_t));
      const PageWords words{results_.get(),          count_.get(),      numbers_.get(), rig_.key_layers.get(),
                            rig_.value_layers.get(), rig_.options.shape};
      compare_pages<<<256, 256, 0, stream_>>>(words, wrong_.get());
      check(cudaGetLastError(), "compare");
      check(cudaStreamSynchronize(stream_), "compare");
      for (std::uint32_t i = 0; i < n; ++i) expect(wrong_[i] == 0, "words that are wrong", wrong_[i]);
    }
    rig_.unref(handles, stream_);
    return seconds;
  }
  double link_rate() {
    const std::uint64_t bytes = rig_.options.shape.bytes() * std::min(rig_.options.dram, rig_.options.hbm);
    std::vector<double> rates;
    Timer timer(stream_);
    for (int i = 0; i < 7; ++i) {
      const double seconds = timer.seconds([&] {
        check(cudaMemcpyAsync(rig_.pools.get(), rig_.dram.get(), bytes, cudaMemcpyHostToDevice, stream_), "copy");
      });
      rates.push_back(static_cast<double>(bytes) / seconds);
    }
    return median(rates);
  }
  double files_rate() {
    std::vector<double> rates;
    const std::uint64_t bytes = rig_.options.shape.bytes() * std::min(rig_.options.dram, rig_.options.max_pages);
    const std::uint64_t window = std::uint64_t{rig_.gpu->rings()} * rig_.options.entries * rig_.options.command_bytes;
    for (int i = 0; i < 5; ++i) {
      rates.push_back(rig_.store->read_rate(std::thread::hardware_concurrency(), rig_.dram.get(), window, bytes,
                                            rig_.options.shape.layer_bytes()));
    }
    return median(rates);
  }

  RestoreRig rig_;
  const int repetitions_;
  const std::uint32_t most_;
  gpu_test::Stream stream_;
  DeviceArray<Key> keys_;
  std::vector<Key> key_words_;
  MappedArray<std::uint64_t> numbers_;
  MappedArray<std::uint32_t> count_, wrong_, want_;
  MappedArray<tardis_gpu_restore_result> results_;
  DeviceArray<std::uint8_t> scratch_;
  std::unique_ptr<Graph> graph_, lookup_, to_dram_, to_files_;
  std::size_t nodes_ = 0;
};

}  // namespace
}  // namespace tardis::gstore::testing

int main(int argc, char** argv) {
  using namespace tardis::gstore::testing;
  if (!has_gpu()) return kSkipped;
  RestoreRigOptions options;
  if (argc > 1) options.parent = argv[1];
  options.max_pages = argc > 2 ? static_cast<std::uint32_t>(std::atoi(argv[2])) : 512;
  const int repetitions = argc > 3 ? std::atoi(argv[3]) : 15;
  options.controller_threads = argc > 4 ? static_cast<std::uint32_t>(std::atoi(argv[4])) : 12;
  options.queues = options.controller_threads;
  options.entries = 64;
  options.objects = options.max_pages + 16;
  options.hbm = options.max_pages + 16;
  options.dram = options.max_pages;
  options.rows = 8 * options.max_pages;
  for (const std::uint32_t page_bytes : {32u << 10, 16u << 10}) {
    options.shape = {32, 2, page_bytes};
    options.command_bytes = 2 * page_bytes;
    for (const bool raw : {true, false}) {
      for (const bool digests : {true, false}) {
        options.raw = raw;
        options.digests = digests;
        RestoreBench(options, repetitions).run();
      }
    }
  }
  if (failures != 0) std::fprintf(stderr, "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
