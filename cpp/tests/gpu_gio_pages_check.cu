// SPDX-License-Identifier: Apache-2.0
// On a GPU: KV pages between objects in pinned memory and a pool in HBM, by a CUDA graph that is captured once and
// replayed with other page ids, counts, objects and expected digests each time; every byte of the pool is compared.
// Exit status 0: right; 1: not, or a CUDA error; 77: no GPU here. --small: fewer replays.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "gio/mover.h"
#include "gio/pieces.h"
#include "gpu_support.h"

namespace {

using namespace tardis;
using namespace tardis::gio;
using namespace tardis::gpu_test;

// A model's KV, small: what matters is in the ids.
struct Shape {
  const char* name;
  std::uint32_t layers, page_tokens, sides;  // sides: 2 for K and V, 1 for MLA
  std::uint64_t token_bytes;
  std::uint32_t id_bytes, tokens_per_id;

  std::uint64_t side_bytes() const { return page_tokens * token_bytes; }
  std::uint64_t part_bytes() const { return side_bytes() * sides; }
  std::uint64_t object_bytes() const { return part_bytes() * layers; }
  std::uint32_t chunks() const { return static_cast<std::uint32_t>((part_bytes() + kChunkBytes - 1) / kChunkBytes); }
};

constexpr std::uint32_t kPoolPages = 160, kObjects = 200, kMaxPages = 64;

class Rig {
 public:
  Rig(const Shape& shape, std::mt19937_64& random)
      : shape_(shape),
        random_(random),
        objects_(Where::kPinned, kObjects * shape.object_bytes()),
        found_(Where::kPinned, shape.layers * shape.sides * kPoolPages * shape.side_bytes()),
        pool_(Where::kDevice, found_.size()),
        expected_(found_.size()),
        ids_(Where::kPinned, kMaxPages * 8),
        count_(Where::kPinned, 4),
        addresses_(Where::kPinned, kMaxPages * 8),
        expected_parts_(Where::kPinned, shape.layers * kMaxPages * 8),
        layer_bases_(Where::kDevice, 2 * shape.layers * 8),
        pieces_(Where::kDevice, kMaxPages * 2 * sizeof(Piece)),
        piece_count_(Where::kDevice, 4),
        chunk_digests_(Where::kDevice, std::size_t{kMaxPages} * shape.chunks() * 8),
        status_(Where::kDevice, shape.layers * kMaxPages * 4),
        errors_(Where::kDevice, shape.layers * 4),
        outside_(Where::kDevice, 4) {
    for (std::uint32_t i = 0; i < kObjects; ++i) renew_object(i);
    fill_random(expected_.data(), expected_.size(), random_);
    pool_.write(expected_.data(), expected_.size());
    std::vector<std::uint64_t> bases;
    for (std::uint32_t side = 0; side < shape.sides; ++side) {
      for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
        bases.push_back(pool_.address() + at(layer, side, 0));
    }
    layer_bases_.write(bases.data(), bases.size() * 8);
    outside_.fill(0);
  }
  ~Rig() {
    if (graph_ != nullptr) check(cudaGraphExecDestroy(graph_), "cudaGraphExecDestroy");
  }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  void capture(tardis_gpu_direction direction) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    check(cudaMemsetAsync(errors_.data(), 0, errors_.size(), stream_), "cudaMemsetAsync");
    check(cudaMemsetAsync(status_.data(), 0xEE, status_.size(), stream_), "cudaMemsetAsync");
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const tardis_gpu_page_args pages = {
          ids_.data(),
          count_.data<std::uint32_t>(),
          kMaxPages,
          shape_.id_bytes,
          shape_.tokens_per_id,
          shape_.page_tokens,
          std::uint64_t{kPoolPages} * shape_.page_tokens,
          shape_.token_bytes,
          layer_bases_.data<std::uint64_t>(),
          shape_.sides == 2 ? layer_bases_.data<std::uint64_t>() + shape_.layers : nullptr,
          layer,
          static_cast<std::uint32_t>(direction),
          addresses_.data<std::uint64_t>(),
          0,
          0,
          layer * shape_.part_bytes(),
          pieces_.data<Piece>(),
          piece_count_.data<std::uint32_t>(),
          outside_.data<std::uint32_t>()};
      check(tardis_gpu_page_pieces(&pages, stream_), "tardis_gpu_page_pieces");
      const tardis_gpu_move_args move = {pieces_.data<Piece>(), piece_count_.data<std::uint32_t>(),
                                         kMaxPages * shape_.sides, 2};
      if (direction == TARDIS_GPU_TO_POOL) {
        const tardis_gpu_digest_args digests = {shape_.sides,
                                                shape_.chunks(),
                                                nullptr,
                                                expected_parts_.data<std::uint64_t>() + layer * kMaxPages,
                                                chunk_digests_.data<std::uint64_t>(),
                                                nullptr,
                                                status_.data<std::uint32_t>() + layer * kMaxPages,
                                                errors_.data<std::uint32_t>() + layer};
        check(tardis_gpu_move_digested(&move, &digests, stream_), "tardis_gpu_move_digested");
      } else {
        check(tardis_gpu_move(&move, stream_), "tardis_gpu_move");
      }
    }
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    if (graph_ != nullptr) check(cudaGraphExecDestroy(graph_), "cudaGraphExecDestroy");
    check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }

  // One replay towards the pool with new ids; every 16th meets a flipped bit. Returns what was wrong.
  int restore(int replay) {
    for (int i = 0; i < 4; ++i) renew_object(static_cast<std::uint32_t>(random_() % kObjects));
    const auto count = choose_pages();
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      for (std::uint32_t i = 0; i < count; ++i) {
        expected_parts_.data<std::uint64_t>()[layer * kMaxPages + i] = part_digest(chosen_[i], layer);
      }
    }
    std::vector<std::uint32_t> bad(shape_.layers);  // flips of each layer
    unsigned char* flipped = nullptr;
    std::uint32_t flipped_page = 0, flipped_layer = 0;
    if (replay % 16 == 0 && count > 0) {
      flipped_page = static_cast<std::uint32_t>(random_() % count);
      const std::uint64_t offset = random_() % shape_.object_bytes();
      flipped_layer = static_cast<std::uint32_t>(offset / shape_.part_bytes());
      flipped = object(chosen_[flipped_page]) + offset;
      *flipped ^= 1 << replay / 16 % 8;
      bad[flipped_layer] = 1;
    }
    for (std::uint32_t i = 0; i < count; ++i) {
      for_each_side(i, [&](unsigned char* in_object, std::uint64_t in_pool) {
        std::copy_n(in_object, shape_.side_bytes(), expected_.data() + in_pool);
      });
    }
    launch();
    if (flipped != nullptr) *flipped ^= 1 << replay / 16 % 8;
    pool_.read(found_.data(), found_.size());
    int wrong = !std::equal(expected_.begin(), expected_.end(), found_.data());
    std::vector<std::uint32_t> errors(shape_.layers), status(shape_.layers * kMaxPages);
    errors_.read(errors.data(), errors.size() * 4);
    status_.read(status.data(), status.size() * 4);
    wrong += errors != bad;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      for (std::uint32_t i = 0; i < kMaxPages; ++i) {
        const bool is_bad = flipped != nullptr && layer == flipped_layer && i == flipped_page;
        const std::uint32_t settled = is_bad ? TARDIS_GPU_PART_MISMATCH : TARDIS_GPU_PART_GOOD;
        wrong += status[layer * kMaxPages + i] != (i < count ? settled : 0xEEEEEEEE);
      }
    }
    return wrong;
  }

  // One replay from the pool: objects are random before, and those of the pages chosen equal the pool afterwards.
  int backup() {
    for (int i = 0; i < 4; ++i) renew_object(static_cast<std::uint32_t>(random_() % kObjects));
    const auto count = choose_pages();
    std::vector<unsigned char> expected(objects_.data(), objects_.data() + objects_.size());
    for (std::uint32_t i = 0; i < count; ++i) {
      for_each_side(i, [&](unsigned char* in_object, std::uint64_t in_pool) {
        std::copy_n(expected_.data() + in_pool, shape_.side_bytes(), expected.data() + (in_object - objects_.data()));
      });
    }
    launch();
    return !std::equal(expected.begin(), expected.end(), objects_.data());
  }

  // Ids behind the pool and below it: counted, and their pages as good as not asked for.
  int stray() {
    const auto count = choose_pages(8);
    for (std::uint32_t i = 0; i < count; ++i) {
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        expected_parts_.data<std::uint64_t>()[layer * kMaxPages + i] = part_digest(chosen_[i], layer);
      }
    }
    const std::int64_t steps = shape_.page_tokens / shape_.tokens_per_id;
    const std::int64_t first_outside = shape_.id_bytes == 8 ? (std::int64_t{1} << 62) : kPoolPages * steps;
    set_id(0, first_outside);
    set_id(1, -1);
    set_id(2, kPoolPages * steps);
    if (shape_.tokens_per_id < shape_.page_tokens) set_id(2, kPoolPages * steps - 1);  // starts inside, ends outside
    for (std::uint32_t i = 3; i < count; ++i) {
      for_each_side(i, [&](unsigned char* in_object, std::uint64_t in_pool) {
        std::copy_n(in_object, shape_.side_bytes(), expected_.data() + in_pool);
      });
    }
    outside_.fill(0);
    launch();
    std::uint32_t outside = 0;
    outside_.read(&outside, 4);
    pool_.read(found_.data(), found_.size());
    return (outside != 3 * shape_.layers) + !std::equal(expected_.begin(), expected_.end(), found_.data());
  }

 private:
  std::uint64_t at(std::uint32_t layer, std::uint32_t side, std::uint64_t page) const {
    return ((std::uint64_t{side} * shape_.layers + layer) * kPoolPages + page) * shape_.side_bytes();
  }
  unsigned char* object(std::uint32_t number) const { return objects_.data() + number * shape_.object_bytes(); }
  void renew_object(std::uint32_t number) { fill_random(object(number), shape_.object_bytes(), random_); }

  std::uint64_t part_digest(std::uint32_t number, std::uint32_t layer) const {
    const unsigned char* part = object(number) + layer * shape_.part_bytes();
    std::vector<std::uint64_t> digests;
    for (std::uint64_t done = 0; done < shape_.part_bytes(); done += kChunkBytes) {
      digests.push_back(xxh3_64(part + done, std::min<std::uint64_t>(kChunkBytes, shape_.part_bytes() - done)));
    }
    return xxh3_64(digests.data(), digests.size() * 8);
  }

  void set_id(std::uint32_t page, std::int64_t id) {
    if (shape_.id_bytes == 8) {
      ids_.data<std::int64_t>()[page] = id;
    } else {
      ids_.data<std::int32_t>()[page] = static_cast<std::int32_t>(id);
    }
  }

  std::uint32_t choose_pages(std::uint32_t at_least = 0) {
    const auto count = static_cast<std::uint32_t>(at_least + random_() % (kMaxPages + 1 - at_least));
    places_.resize(kPoolPages);
    std::iota(places_.begin(), places_.end(), 0);
    std::shuffle(places_.begin(), places_.end(), random_);
    chosen_.resize(kObjects);
    std::iota(chosen_.begin(), chosen_.end(), 0);
    std::shuffle(chosen_.begin(), chosen_.end(), random_);
    for (std::uint32_t i = 0; i < kMaxPages; ++i) {  // those behind the count are there too, and not to be taken
      set_id(i, std::int64_t{places_[i]} * shape_.page_tokens / shape_.tokens_per_id);
      addresses_.data<std::uint64_t>()[i] = reinterpret_cast<std::uint64_t>(object(chosen_[i]));
    }
    *count_.data<std::uint32_t>() = count;
    return count;
  }

  template <class Visit>
  void for_each_side(std::uint32_t page, Visit visit) {
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      for (std::uint32_t side = 0; side < shape_.sides; ++side) {
        visit(object(chosen_[page]) + layer * shape_.part_bytes() + side * shape_.side_bytes(),
              at(layer, side, places_[page]));
      }
    }
  }

  void launch() {
    check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    stream_.wait();
  }

  const Shape shape_;
  std::mt19937_64& random_;
  Memory objects_, found_, pool_;
  std::vector<unsigned char> expected_;  // the pool
  Memory ids_, count_, addresses_, expected_parts_;
  Memory layer_bases_, pieces_, piece_count_, chunk_digests_, status_, errors_, outside_;
  Stream stream_;
  cudaGraphExec_t graph_ = nullptr;
  std::vector<std::uint32_t> places_, chosen_;  // of the pages asked for: where in the pool, which object
};

}  // namespace

int main(int argc, char** argv) {
  if (!has_gpu()) return kSkipped;
  const bool small = argc > 1 && std::string(argv[1]) == "--small";
  const int replays = small ? 20 : 1000;
  std::mt19937_64 random(fresh_seed());
  int wrong = 0;
  for (const Shape& shape :
       {Shape{"K and V, page 4", 4, 4, 2, 2048, 8, 4}, Shape{"K and V, page 1", 3, 1, 2, 2048, 8, 1},
        Shape{"K and V, page 16, by token slot", 2, 16, 2, 1024, 4, 1}, Shape{"MLA, page 32", 3, 32, 1, 1152, 4, 32}}) {
    Rig rig(shape, random);
    rig.capture(TARDIS_GPU_TO_POOL);
    int restored = 0, strayed = 0, stored = 0;
    for (int replay = 0; replay < replays; ++replay) restored += rig.restore(replay);
    for (int replay = 0; replay < 5; ++replay) strayed += rig.stray();
    rig.capture(TARDIS_GPU_FROM_POOL);
    for (int replay = 0; replay < replays / 10; ++replay) stored += rig.backup();
    std::printf("%-32s %d restores: %d wrong, %d backups: %d wrong, stray ids: %d wrong\n", shape.name, replays,
                restored, replays / 10, stored, strayed);
    std::fflush(stdout);
    wrong += restored + strayed + stored;
  }
  return wrong == 0 ? 0 : 1;
}
