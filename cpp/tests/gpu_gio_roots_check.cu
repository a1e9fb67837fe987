// SPDX-License-Identifier: Apache-2.0
// On a GPU: tardis_gpu_check_roots() against the same on the host, of digests in HBM and in pinned host memory, right
// ones and ones with a flipped bit anywhere; then how long a call takes.
// Exit status 0: right; 1: not, or a CUDA error; 77: no GPU here.
#include <algorithm>
#include <vector>

#include "base/checksum.h"
#include "gio/host_roots.h"
#include "gpu_support.h"

namespace {

using namespace tardis;
using namespace tardis::gio;
using namespace tardis::gpu_test;

struct Shape {
  std::uint32_t layers, chunks;
};

int check_shape(const Shape& shape, std::uint32_t objects, Where where, std::mt19937_64& random) {
  const std::size_t words = std::size_t{shape.layers} * shape.chunks, stride = words + 3;  // in words
  Memory digests(where, objects * stride * 8), addresses(Where::kDevice, objects * 8), count(Where::kDevice, 4),
      roots(Where::kDevice, objects * 8), layers(Where::kDevice, std::size_t{objects} * shape.layers * 8),
      status(Where::kDevice, objects * 4), errors(Where::kDevice, 4);
  std::vector<std::uint64_t> host(objects * stride), host_addresses(objects), host_roots(objects),
      host_layers(std::size_t{objects} * shape.layers), found_layers(host_layers.size());
  std::vector<std::uint32_t> host_status(objects), found_status(objects);
  std::uint32_t host_errors = 0, found_errors = 0;
  fill_random(host.data(), host.size() * 8, random);
  for (std::uint32_t i = 0; i < objects; ++i) host_addresses[i] = reinterpret_cast<std::uintptr_t>(&host[i * stride]);
  tardis_gpu_root_args on_host = {host_addresses.data(),
                                  0,
                                  0,
                                  &objects,
                                  objects,
                                  shape.layers,
                                  shape.chunks,
                                  0,
                                  host_roots.data(),
                                  host_layers.data(),
                                  host_status.data(),
                                  &host_errors};
  check_roots_on_host(on_host);
  for (std::uint32_t i = 0; i < objects; ++i) {
    host_roots[i] = xxh3_64(&host_layers[std::size_t{i} * shape.layers], shape.layers * 8);
  }
  int wrong = 0;
  for (int round = 0; round < 3; ++round) {
    for (std::uint32_t i = 0; i < objects && round > 0; i += 1 + random() % 5) {
      host[i * stride + random() % words] ^= std::uint64_t{1} << random() % 64;
    }
    std::vector<std::uint64_t> told(objects);
    for (std::uint32_t i = 0; i < objects; ++i) told[i] = digests.address() + i * stride * 8;
    if (round == 2) {
      for (const std::uint32_t i : {0u, objects / 2}) {
        host_addresses[i] = i == 0 ? 0 : host_addresses[i] + 4;
        told[i] = i == 0 ? 0 : told[i] + 4;
      }
    }
    digests.write(host.data(), digests.size());
    addresses.write(told.data(), addresses.size());
    count.write(&objects, 4);
    roots.write(host_roots.data(), roots.size());
    layers.fill(0xEE);
    status.fill(0xEE);
    errors.fill(0);
    std::fill(host_layers.begin(), host_layers.end(), 0xEEEEEEEEEEEEEEEE);
    host_errors = 0;
    check_roots_on_host(on_host);
    const tardis_gpu_root_args args = {round == 1 ? nullptr : addresses.data<std::uint64_t>(),
                                       digests.address(),
                                       stride * 8,
                                       count.data<std::uint32_t>(),
                                       objects + 100,
                                       shape.layers,
                                       shape.chunks,
                                       0,
                                       roots.data<std::uint64_t>(),
                                       layers.data<std::uint64_t>(),
                                       status.data<std::uint32_t>(),
                                       errors.data<std::uint32_t>()};
    check(tardis_gpu_check_roots(&args, nullptr), "tardis_gpu_check_roots");
    check(cudaDeviceSynchronize(), "check_roots");
    layers.read(found_layers.data(), layers.size());
    status.read(found_status.data(), status.size());
    errors.read(&found_errors, 4);
    wrong += found_layers != host_layers;
    wrong += found_status != host_status;
    wrong += found_errors != host_errors;
    wrong += (host_errors == 0) != (round == 0);
    if (round != 0) continue;
    Event begin, end;
    std::vector<double> us;
    for (int i = 0; i < 9; ++i) {
      begin.record(nullptr);
      check(tardis_gpu_check_roots(&args, nullptr), "tardis_gpu_check_roots");
      end.record(nullptr);
      end.wait();
      us.push_back(end.milliseconds_since(begin) * 1e3);
    }
    std::sort(us.begin(), us.end());
    std::printf(
        "{\"case\": \"roots\", \"memory\": \"%s\", \"objects\": %u, \"layers\": %u, \"chunks\": %u, \"us\": %.1f}\n",
        name_of(where), objects, shape.layers, shape.chunks, us[us.size() / 2]);
  }
  if (wrong != 0) {
    std::printf("%u layers of %u chunks, %s: WRONG\n", shape.layers, shape.chunks, name_of(where));
  }
  return wrong;
}

}  // namespace

int main() {
  if (!has_gpu()) return kSkipped;
  std::mt19937_64 random(fresh_seed());
  check(tardis_gpu_check_roots_load(), "load");
  int wrong = 0;
  for (const Where where : {Where::kDevice, Where::kPinned}) {
    for (const Shape& shape : {Shape{1, 1}, Shape{2, 2}, Shape{32, 8}, Shape{80, 1}, Shape{61, 31}, Shape{30, 30},
                               Shape{31, 2}, Shape{1, 128}, Shape{128, 33}}) {
      for (const std::uint32_t objects : {3u, 1024u}) wrong += check_shape(shape, objects, where, random);
    }
  }
  tardis_gpu_root_args nothing = {};
  wrong += tardis_gpu_check_roots(&nothing, nullptr) != cudaErrorInvalidValue;
  wrong += tardis_gpu_check_roots(nullptr, nullptr) != cudaErrorInvalidValue;
  std::printf("%d wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}
