// SPDX-License-Identifier: Apache-2.0
#include "gio/host_roots.h"

#include <algorithm>

#include "base/checksum.h"

namespace tardis::gio {
namespace {

tardis_gpu_root_status status_of(const tardis_gpu_root_args& args, std::uint64_t address, std::uint64_t expected,
                                 std::uint64_t* layer_digests) {
  if (address == 0 || address % sizeof(std::uint64_t) != 0) return TARDIS_GPU_ROOT_REFUSED;
  const auto* const digests = reinterpret_cast<const std::uint64_t*>(static_cast<std::uintptr_t>(address));
  for (std::uint32_t layer = 0; layer < args.layers; ++layer) {
    layer_digests[layer] =
        xxh3_64(digests + std::size_t{layer} * args.chunks_per_layer, args.chunks_per_layer * sizeof(std::uint64_t));
  }
  const std::uint64_t root = xxh3_64(layer_digests, args.layers * sizeof(std::uint64_t));
  return root == expected ? TARDIS_GPU_ROOT_GOOD : TARDIS_GPU_ROOT_MISMATCH;
}

}  // namespace

bool check_roots_on_host(const tardis_gpu_root_args& args) {
  if (args.object_count == nullptr || args.max_objects == 0 || args.layers == 0 || args.chunks_per_layer == 0 ||
      args.expected_roots == nullptr || args.layer_digests == nullptr || args.status == nullptr ||
      args.errors == nullptr) {
    return false;
  }
  const std::uint32_t objects = std::min(*args.object_count, args.max_objects);
  for (std::uint32_t i = 0; i < objects; ++i) {
    const std::uint64_t address = args.objects != nullptr ? args.objects[i] : args.object_base + i * args.object_stride;
    args.status[i] =
        status_of(args, address, args.expected_roots[i], args.layer_digests + std::size_t{i} * args.layers);
    *args.errors += args.status[i] != TARDIS_GPU_ROOT_GOOD;
  }
  return true;
}

}  // namespace tardis::gio
