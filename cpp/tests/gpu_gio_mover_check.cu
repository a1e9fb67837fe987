// SPDX-License-Identifier: Apache-2.0
// On a GPU: the movers (gio/mover.h) against copies by the host. Sources are fresh random bytes; every byte of the
// destinations is random beforehand and compared afterwards, those between and around the pieces too.
// Exit status 0: right; 1: not, or a CUDA error; 77: no GPU here.
//   tardis_gpu_gio_mover_check [--small] [refusals|sizes|counts|digests|long|flips]
// --small: less of everything, for compute-sanitizer.
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

struct Direction {
  Where from, to;
};
constexpr Direction kDirections[] = {
    {Where::kPinned, Where::kDevice}, {Where::kDevice, Where::kPinned}, {Where::kDevice, Where::kDevice}};

std::string name_of(const Direction& direction) {
  return std::string(gpu_test::name_of(direction.from)) + " -> " + gpu_test::name_of(direction.to);
}

int wrong_total = 0;

void tell(const std::string& what, int wrong) {
  std::printf("%-64s %s\n", what.c_str(), wrong == 0 ? "right" : "WRONG");
  std::fflush(stdout);
  wrong_total += wrong != 0;
}

// Two memories, and what the host knows to be in them.
struct Field {
  Direction direction;
  Memory source, destination;
  std::vector<unsigned char> source_bytes, expected, found;

  Field(Direction direction, std::size_t bytes, std::mt19937_64& random)
      : direction(direction),
        source(direction.from, bytes),
        destination(direction.to, bytes),
        source_bytes(bytes),
        expected(bytes),
        found(bytes) {
    fill_random(source_bytes.data(), bytes, random);
    source.write(source_bytes.data(), bytes);
    fill_random(expected.data(), bytes, random);
    destination.write(expected.data(), bytes);
  }
  // The piece as the device is told it; offsets become addresses.
  Piece piece(std::size_t from, std::size_t to, std::size_t bytes) {
    std::copy_n(source_bytes.data() + from, bytes, expected.data() + to);
    return {source.address() + from, destination.address() + to, bytes};
  }
  int compare() {
    destination.read(found.data(), found.size());
    if (found == expected) return 0;
    const auto at = std::mismatch(found.begin(), found.end(), expected.begin()).first - found.begin();
    std::fprintf(stderr, "%s: first wrong byte at %td of %zu\n", name_of(direction).c_str(), at, found.size());
    return 1;
  }
};

// Pieces of those sizes, one after the other in the destination with gaps between them.
std::vector<Piece> lay_out(Field& field, const std::vector<std::size_t>& sizes, std::size_t align,
                           std::mt19937_64& random) {
  std::vector<Piece> pieces;
  std::size_t to = 0;
  for (const std::size_t bytes : sizes) {
    to = (to + random() % 64 + align - 1) / align * align;
    if (to + bytes > field.expected.size()) break;
    const std::size_t from = random() % (field.source_bytes.size() - bytes + 1) / align * align;
    pieces.push_back(field.piece(from, to, bytes));
    to += bytes;
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

// Lists of pieces on the device.
struct PieceList {
  Memory pieces, count;
  std::uint32_t size;
  PieceList(const std::vector<Piece>& list, Where where)
      : pieces(where, std::max<std::size_t>(list.size(), 1) * sizeof(Piece)),
        count(where, sizeof(std::uint32_t)),
        size(static_cast<std::uint32_t>(list.size())) {
    pieces.write(list.data(), list.size() * sizeof(Piece));
    count.write(&size, sizeof size);
  }
  tardis_gpu_move_args args(std::uint32_t ctas) const {
    return {pieces.data<Piece>(), count.data<std::uint32_t>(), size, ctas};
  }
};

int move_and_compare(Field& field, const std::vector<Piece>& list, std::uint32_t ctas, Where where) {
  const PieceList pieces(list, where);
  const tardis_gpu_move_args args = pieces.args(ctas);
  check(tardis_gpu_move(&args, nullptr), "tardis_gpu_move");
  check(cudaDeviceSynchronize(), "the mover");
  return field.compare();
}

void check_sizes(Direction direction, bool small, std::mt19937_64& random) {
  std::vector<std::size_t> sizes = {0,    1,     15,    16,    17,    31,    32,    33,    4095,  4096,
                                    4097, 16368, 16383, 16384, 16385, 16400, 32767, 32768, 32769, 49152 + 1};
  for (int i = 0; i < (small ? 20 : 2000); ++i) sizes.push_back(random() % (i % 2 == 0 ? 300 : 70000));
  for (const std::size_t align : {16, 1, 4, 8}) {
    Field field(direction, small ? 4 << 20 : 128 << 20, random);
    const std::uint32_t ctas = 1 + random() % TARDIS_GPU_MAX_MOVER_CTAS;
    const int wrong = move_and_compare(field, lay_out(field, sizes, align, random), ctas, Where::kDevice);
    tell(name_of(direction) + ", edge sizes, addresses at multiples of " + std::to_string(align), wrong);
  }
}

void check_counts(Direction direction, bool small, std::mt19937_64& random) {
  for (std::uint32_t ctas = 1; ctas <= TARDIS_GPU_MAX_MOVER_CTAS; ++ctas) {
    for (const std::size_t count : {0, 1, 2, 31, 32, 33, 1024}) {
      Field field(direction, 16 << 20, random);
      const auto list = lay_out(field, std::vector<std::size_t>(count, 16 * (1 + random() % 512)), 16, random);
      const int wrong = move_and_compare(field, list, ctas, Where::kPinned);
      if (wrong != 0 || count == 1024) {
        tell(name_of(direction) + ", " + std::to_string(count) + " pieces, " + std::to_string(ctas) + " CTAs", wrong);
      }
    }
    if (small) break;
  }
  {
    // More told than there may be: those behind max_pieces stay.
    Field field(direction, 1 << 20, random);
    auto list = lay_out(field, std::vector<std::size_t>(10, 4096), 16, random);
    const auto kept = list.size() - 3;
    PieceList pieces(list, Where::kDevice);
    auto args = pieces.args(2);
    args.max_pieces = static_cast<std::uint32_t>(kept);
    check(tardis_gpu_move(&args, nullptr), "tardis_gpu_move");
    check(cudaDeviceSynchronize(), "the mover");
    std::vector<unsigned char> whole = field.expected, found(whole.size());
    field.destination.read(found.data(), found.size());
    int wrong = 0;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::size_t to = list[i].destination - field.destination.address();
      const bool copied = std::equal(found.begin() + to, found.begin() + to + 4096, whole.begin() + to);
      wrong += copied != (i < kept);
    }
    tell(name_of(direction) + ", a count beyond max_pieces", wrong);
  }
  if (small) return;
  Field field(direction, 300 << 20, random);
  tell(name_of(direction) + ", one piece of 256 MiB and 5 bytes",
       move_and_compare(field, lay_out(field, {(256 << 20) + 5}, 16, random), 4, Where::kDevice));
  std::vector<std::size_t> many(100'000);
  for (auto& bytes : many) bytes = 16 * (random() % 128);
  tell(name_of(direction) + ", 100,000 pieces of up to 2 KiB",
       move_and_compare(field, lay_out(field, many, 16, random), 3, Where::kDevice));
}

// --- digests ---------------------------------------------------------------------------------------------------------

struct PartShape {
  std::size_t first, second;  // bytes of K and V; no V: one piece
  std::uint32_t parts;
};

// Device words of one digested move.
struct DigestWords {
  std::uint32_t parts, chunks;                             // chunks a part
  std::vector<std::uint64_t> chunk_digests, part_digests;  // as the library has them
  Memory expected_chunks, expected_parts, chunk_words, part_words, status, errors;

  DigestWords(std::uint32_t parts, std::uint32_t chunks)
      : parts(parts),
        chunks(chunks),
        chunk_digests(std::size_t{parts} * chunks),
        part_digests(parts),
        expected_chunks(Where::kDevice, chunk_digests.size() * 8),
        expected_parts(Where::kDevice, parts * 8),
        chunk_words(Where::kDevice, chunk_digests.size() * 8),
        part_words(Where::kDevice, parts * 8),
        status(Where::kDevice, parts * 4),
        errors(Where::kDevice, 4) {}
  void learn(std::uint32_t part, const std::vector<unsigned char>& bytes) {
    std::uint64_t* const digests = &chunk_digests[std::size_t{part} * chunks];
    for (std::uint32_t i = 0; i < chunks; ++i) {
      const std::size_t at = std::size_t{i} * kChunkBytes;
      digests[i] = xxh3_64(bytes.data() + at, std::min<std::size_t>(kChunkBytes, bytes.size() - at));
    }
    part_digests[part] = xxh3_64(digests, chunks * 8);
  }
  void expect() {
    expected_chunks.write(chunk_digests.data(), expected_chunks.size());
    expected_parts.write(part_digests.data(), expected_parts.size());
  }
  void poison() {
    for (Memory* words : {&chunk_words, &part_words, &status}) words->fill(0xEE);
    errors.fill(0);
  }
  tardis_gpu_digest_args args(std::uint32_t pieces, bool by_chunks, bool by_parts) const {
    return {pieces,
            chunks,
            by_chunks ? expected_chunks.data<std::uint64_t>() : nullptr,
            by_parts ? expected_parts.data<std::uint64_t>() : nullptr,
            chunk_words.data<std::uint64_t>(),
            part_words.data<std::uint64_t>(),
            status.data<std::uint32_t>(),
            errors.data<std::uint32_t>()};
  }
  template <class T>
  static std::vector<T> words(const Memory& memory) {
    std::vector<T> out(memory.size() / sizeof(T));
    memory.read(out.data(), memory.size());
    return out;
  }
  // Wrong status words, with `bad` the parts whose bytes are not the expected ones.
  int compare_status(const std::vector<bool>& bad) const {
    const auto found = words<std::uint32_t>(status);
    int wrong = 0;
    std::uint32_t expected_errors = 0;
    for (std::uint32_t i = 0; i < parts; ++i) {
      wrong += found[i] != (bad[i] ? TARDIS_GPU_PART_MISMATCH : TARDIS_GPU_PART_GOOD);
      expected_errors += bad[i];
    }
    wrong += words<std::uint32_t>(errors)[0] != expected_errors;
    return wrong;
  }
};

void check_digests(Direction direction, const PartShape& shape, std::size_t align, std::mt19937_64& random) {
  const std::size_t part_bytes = shape.first + shape.second;
  const std::uint32_t pieces_per_part = shape.second == 0 ? 1 : 2;
  Field field(direction, (part_bytes + 256) * shape.parts + 4096, random);
  DigestWords words(shape.parts, static_cast<std::uint32_t>((part_bytes + kChunkBytes - 1) / kChunkBytes));
  std::vector<Piece> list;
  std::size_t to = 0;
  for (std::uint32_t part = 0; part < shape.parts; ++part) {
    std::vector<unsigned char> bytes;
    for (const std::size_t size : {shape.first, shape.second}) {
      if (size == 0) continue;
      to = (to + random() % 64 + align - 1) / align * align;
      const std::size_t from = random() % (field.source_bytes.size() - size + 1) / align * align;
      list.push_back(field.piece(from, to, size));
      bytes.insert(bytes.end(), field.source_bytes.begin() + from, field.source_bytes.begin() + from + size);
      to += size;
    }
    words.learn(part, bytes);
  }
  words.expect();
  const PieceList pieces(list, Where::kDevice);
  const auto run = [&](bool by_chunks, bool by_parts) {
    words.poison();
    const auto move = pieces.args(1 + random() % TARDIS_GPU_MAX_MOVER_CTAS);
    const auto digests = words.args(pieces_per_part, by_chunks, by_parts);
    check(tardis_gpu_move_digested(&move, &digests, nullptr), "tardis_gpu_move_digested");
    check(cudaDeviceSynchronize(), "the digesting mover");
  };
  run(true, true);
  std::vector<bool> bad(shape.parts);
  int wrong = field.compare() + words.compare_status(bad);
  wrong += DigestWords::words<std::uint64_t>(words.chunk_words) != words.chunk_digests;
  wrong += DigestWords::words<std::uint64_t>(words.part_words) != words.part_digests;

  // One bit of what is expected, so that exactly one part does not fit; by chunk digests, by part digests, by neither.
  const auto flipped = static_cast<std::uint32_t>(random() % shape.parts);
  bad[flipped] = true;
  words.chunk_digests[std::size_t{flipped} * words.chunks + random() % words.chunks] ^= 1ull << random() % 64;
  words.part_digests[flipped] ^= 1ull << random() % 64;
  words.expect();
  for (const bool by_chunks : {true, false}) {
    run(by_chunks, !by_chunks);
    wrong += words.compare_status(bad);
  }
  run(false, false);
  wrong += words.compare_status(std::vector<bool>(shape.parts));
  tell(name_of(direction) + ", digests, parts of " + std::to_string(shape.first) + " + " +
           std::to_string(shape.second) + ", multiples of " + std::to_string(align),
       wrong);
}

// Many calls over pages from all over a large pool, whose loads complete in any order: a digest that is made of a stage
// before its bytes are there, or after the next ones, shows here.
void check_digests_for_long(Direction direction, std::size_t part_bytes, int calls, std::mt19937_64& random) {
  constexpr std::uint32_t kParts = 1024;
  Field field(direction, 256 << 20, random);
  DigestWords words(kParts, static_cast<std::uint32_t>((part_bytes + kChunkBytes - 1) / kChunkBytes));
  std::vector<std::size_t> places(field.expected.size() / part_bytes);
  std::iota(places.begin(), places.end(), 0);
  std::vector<std::size_t> targets = places;
  std::shuffle(places.begin(), places.end(), random);
  std::shuffle(targets.begin(), targets.end(), random);
  std::vector<Piece> list;
  for (std::uint32_t part = 0; part < kParts; ++part) {
    const std::size_t from = places[part] * part_bytes;
    list.push_back(field.piece(from, targets[part] * part_bytes, part_bytes));
    words.learn(part, {field.source_bytes.begin() + from, field.source_bytes.begin() + from + part_bytes});
  }
  words.expect();
  words.poison();
  const PieceList pieces(list, Where::kDevice);
  for (int call = 0; call < calls; ++call) {
    const auto move = pieces.args(1 + call % TARDIS_GPU_MAX_MOVER_CTAS);
    const auto digests = words.args(1, call % 2 == 0, call % 3 == 0);
    check(tardis_gpu_move_digested(&move, &digests, nullptr), "tardis_gpu_move_digested");
  }
  check(cudaDeviceSynchronize(), "the digesting mover");
  const int wrong = field.compare() + words.compare_status(std::vector<bool>(kParts));
  tell(name_of(direction) + ", " + std::to_string(calls) + " calls, digests of parts of " + std::to_string(part_bytes),
       wrong);
}

// A bit of the data flips on its way: the part's flag, and no other's.
void check_flips(std::mt19937_64& random) {
  constexpr std::size_t kSide = 40 << 10;
  constexpr std::uint32_t kParts = 100;
  Field field(kDirections[0], 2 * kSide * kParts, random);
  DigestWords words(kParts, 2 * kSide / kChunkBytes);
  std::vector<Piece> list;
  for (std::uint32_t part = 0; part < kParts; ++part) {
    const std::size_t at = 2 * kSide * part;
    list.push_back(field.piece(at, at + kSide, kSide));
    list.push_back(field.piece(at + kSide, at, kSide));
    words.learn(part, {field.source_bytes.begin() + at, field.source_bytes.begin() + at + 2 * kSide});
  }
  words.expect();
  const PieceList pieces(list, Where::kDevice);
  int wrong = 0;
  for (int round = 0; round < 20; ++round) {
    std::vector<bool> bad(kParts);
    std::vector<std::size_t> flips;
    for (int i = 0; i < round; ++i) {
      const std::size_t bit = random() % (2 * kSide * kParts * 8);
      if (bad[bit / 8 / (2 * kSide)]) continue;
      bad[bit / 8 / (2 * kSide)] = true;
      flips.push_back(bit);
    }
    for (const std::size_t bit : flips) field.source.data()[bit / 8] ^= 1 << bit % 8;
    words.poison();
    const auto move = pieces.args(4);
    const auto digests = words.args(2, round % 2 == 0, round % 2 != 0);
    check(tardis_gpu_move_digested(&move, &digests, nullptr), "tardis_gpu_move_digested");
    check(cudaDeviceSynchronize(), "the digesting mover");
    wrong += words.compare_status(bad);
    for (const std::size_t bit : flips) field.source.data()[bit / 8] ^= 1 << bit % 8;
  }
  tell("flipped bits raise the flags of their parts", wrong);

  // Fewer words than chunks: told, and nothing written behind them.
  words.poison();
  const auto move = pieces.args(2);
  auto digests = words.args(2, true, false);
  digests.chunks_per_part = words.chunks - 1;
  check(tardis_gpu_move_digested(&move, &digests, nullptr), "tardis_gpu_move_digested");
  check(cudaDeviceSynchronize(), "the digesting mover");
  wrong = DigestWords::words<std::uint32_t>(words.errors)[0] != kParts;
  for (const auto status : DigestWords::words<std::uint32_t>(words.status)) {
    wrong += status != TARDIS_GPU_PART_TOO_LONG;
  }
  for (const auto word : DigestWords::words<std::uint64_t>(words.chunk_words)) wrong += word != 0xEEEEEEEEEEEEEEEE;
  tell("parts with more chunks than words are told", wrong + field.compare());
}

void check_digest_shapes(Direction direction, std::uint32_t few, std::mt19937_64& random) {
  for (const PartShape& shape :
       {PartShape{16 << 10, 16 << 10, few}, PartShape{2 << 10, 2 << 10, few}, PartShape{40 << 10, 40 << 10, few},
        PartShape{128 << 10, 128 << 10, few}, PartShape{48, 64, few}, PartShape{73728, 0, few}, PartShape{16, 0, few},
        PartShape{(16 << 10) - 16, 32, few}, PartShape{245760, 0, few}, PartShape{1 << 20, 1 << 20, few / 15 + 1}}) {
    check_digests(direction, shape, 16, random);
  }
  for (const PartShape& shape : {PartShape{12345, 777, few}, PartShape{1, 1, few}, PartShape{20000, 0, few}}) {
    for (const std::size_t align : {16, 1}) check_digests(direction, shape, align, random);
  }
}

void check_refusals() {
  const Memory words(Where::kDevice, 4096);
  const tardis_gpu_move_args good = {words.data<Piece>(), words.data<std::uint32_t>(), 1, 1};
  int wrong = tardis_gpu_move(nullptr, nullptr) != cudaErrorInvalidValue;
  for (const std::uint32_t ctas : {0u, 5u}) {
    auto bad = good;
    bad.ctas = ctas;
    wrong += tardis_gpu_move(&bad, nullptr) != cudaErrorInvalidValue;
  }
  auto bad = good;
  bad.piece_count = nullptr;
  wrong += tardis_gpu_move(&bad, nullptr) != cudaErrorInvalidValue;
  tardis_gpu_digest_args digests = {};
  digests.pieces_per_part = 3;
  wrong += tardis_gpu_move_digested(&good, &digests, nullptr) != cudaErrorInvalidValue;
  tardis_gpu_page_args pages = {};
  wrong += tardis_gpu_page_pieces(&pages, nullptr) != cudaErrorInvalidValue;
  check(cudaDeviceSynchronize(), "refused calls");
  tell("arguments that make no sense are refused", wrong);
}

}  // namespace

int main(int argc, char** argv) {
  if (!has_gpu()) return kSkipped;
  bool small = false;
  std::string only;  // one section of the checks; empty: all
  for (int i = 1; i < argc; ++i) (std::string(argv[i]) == "--small" ? void(small = true) : void(only = argv[i]));
  const auto wanted = [&](const char* section) { return only.empty() || only == section; };
  std::mt19937_64 random(fresh_seed());
  check(tardis_gpu_mover_prepare(), "tardis_gpu_mover_prepare");
  if (wanted("refusals")) check_refusals();
  for (const Direction& direction : kDirections) {
    if (wanted("sizes")) check_sizes(direction, small, random);
    if (wanted("counts")) check_counts(direction, small, random);
    if (wanted("digests")) check_digest_shapes(direction, small ? 3 : 150, random);
    if (!small && wanted("long")) {
      for (const std::size_t bytes : {4 << 10, 16 << 10, 128 << 10}) {
        check_digests_for_long(direction, bytes, 400, random);
      }
    }
  }
  if (wanted("flips")) check_flips(random);
  std::printf("%d wrong\n", wrong_total);
  return wrong_total == 0 ? 0 : 1;
}
