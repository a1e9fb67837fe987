// SPDX-License-Identifier: Apache-2.0
#include "attention/decode.h"

#include <algorithm>

#include "attention/decode_check.h"
#include "attention/decode_plan.h"
#include "attention/tensor_map.h"

namespace tardis::attention {
namespace {

using Decode = tardis_attention_decode;

constexpr int kMinimumMajor = 9;  // the instances are of sm_90a

const Instance* find_instance(const Decode& decode, Complaint& complaint) {
  std::size_t count = 0;
  const Instance* const built = instances(&count);
  for (std::size_t i = 0; i < count; ++i) {
    if (built[i].type == decode.type && built[i].head_dim == decode.head_dim) return &built[i];
  }
  complaint.say(
      "expected one of the shapes that were built (%s), found %s:%u; configure with -DTARDIS_ATTENTION_SHAPES=%s:%u "
      "added, "
      "or =all",
      tardis_gpu_attention_shapes(), type_name(decode.type), decode.head_dim, type_name(decode.type), decode.head_dim);
  return nullptr;
}

struct Place {
  const Instance* instance;
  DecodePlan plan;
};

cudaError_t find_place(const Decode& decode, Complaint& complaint, Place* place) {
  place->instance = find_instance(decode, complaint);
  if (place->instance == nullptr) return cudaErrorNotSupported;
  int device = 0, sms = 0, major = 0;
  cudaError_t result = cudaGetDevice(&device);
  if (result == cudaSuccess) result = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (result == cudaSuccess) result = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (result != cudaSuccess) {
    complaint.say("the current device could not be asked: %s", cudaGetErrorString(result));
    return result;
  }
  if (major != kMinimumMajor) {
    complaint.say(
        "expected a GPU of compute capability 9.0 (H100, H200, GH200), found %d.x; use another attention backend",
        major);
    return cudaErrorNotSupported;
  }
  place->plan =
      plan_of(decode, static_cast<std::uint32_t>(sms), place->instance->enough_ctas, place->instance->ctas_per_sm);
  return cudaSuccess;
}

std::uint32_t shift_of(std::uint32_t power) { return static_cast<std::uint32_t>(__builtin_ctz(power)); }

// Bits 0 to 3: log2 of a box's tokens plus one, or 0: chosen. Bits 4 and 5: promotion, likewise.
struct Tuning {
  std::uint32_t box_shift;
  MapPromotion promotion;
};

Tuning tuning_of(const Decode& decode) {
  const std::uint32_t most = std::min(shift_of(decode.page_tokens), shift_of(kTileRows));
  const std::uint32_t box = decode.tuning & 15, promotion = decode.tuning >> 4 & 3;
  return {box == 0 ? most : std::min(std::max(box - 1, 4U), most),
          promotion == 0 ? MapPromotion::k128 : static_cast<MapPromotion>(promotion - 1)};
}

bool encode_maps(const Decode& decode, const Tuning& tuning, PoolMaps (&maps)[TARDIS_ATTENTION_POOLS],
                 Complaint& complaint) {
  const std::uint32_t element = decode.type == TARDIS_ATTENTION_FP8_E4M3 ? 1 : 2;
  for (int i = 0; i < TARDIS_ATTENTION_POOLS; ++i) {
    // A pool that nobody names has the maps of the other one.
    const tardis_attention_pool& pool = decode.pools[i].keys != 0 ? decode.pools[i] : decode.pools[1 - i];
    const PoolTensor keys = {pool.keys,       pool.slots, pool.key_slot_bytes, pool.key_head_bytes, decode.kv_heads,
                             decode.head_dim, element};
    const PoolTensor values = {
        pool.values,     pool.slots, pool.value_slot_bytes, pool.value_head_bytes, decode.kv_heads,
        decode.head_dim, element};
    const std::uint32_t box = 1U << tuning.box_shift;
    CUresult result = encode_pool_map(&maps[i].keys, keys, box, tuning.promotion);
    if (result == CUDA_SUCCESS) result = encode_pool_map(&maps[i].values, values, box, tuning.promotion);
    if (result != CUDA_SUCCESS) {
      return complaint.say(
          "the driver refused a tensor map of pool %d (CUresult %d): expected memory of this device or pinned host "
          "memory that is mapped, found keys at %#llx with %llu slots",
          i, int{result}, static_cast<unsigned long long>(pool.keys), static_cast<unsigned long long>(pool.slots));
    }
  }
  return true;
}

cudaError_t enqueue(const Decode& decode, const Place& place, cudaStream_t stream, Complaint& complaint) {
  const DecodePlan& plan = place.plan;
  const Tuning tuning = tuning_of(decode);
  DecodeParams params{};
  if (tensor_map_encoder().error != cudaSuccess) {
    complaint.say("the driver has no cuTensorMapEncodeTiled: expected one of CUDA 12.0 or newer");
    return tensor_map_encoder().error;
  }
  if (!encode_maps(decode, tuning, params.pools, complaint)) return cudaErrorInvalidValue;
  params.queries = decode.queries;
  params.output = decode.output;
  params.lse = decode.lse;
  params.pages = decode.pages;
  params.lengths = decode.lengths;
  params.partial_output = static_cast<float*>(decode.workspace);
  params.partial_lse = params.partial_output + plan.output_bytes / sizeof(float);
  params.query_row_bytes = decode.query_row_bytes;
  params.output_row_bytes = decode.output_row_bytes;
  params.page_row = decode.page_row;
  params.logit_scale = decode.scale * decode.key_scale;
  params.soft_cap = decode.soft_cap;
  params.value_scale = decode.value_scale;
  params.window_left = decode.window_left;
  params.query_tokens = decode.query_tokens;
  params.query_heads = decode.query_heads;
  params.kv_heads = decode.kv_heads;
  params.group = decode.query_heads / decode.kv_heads;
  params.splits = plan.splits;
  params.max_tokens = decode.max_tokens;
  params.page_shift = shift_of(decode.page_tokens);
  params.box_shift = tuning.box_shift;

  const Instance& instance = *place.instance;
  cudaError_t result = cudaFuncSetAttribute(instance.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(instance.shared_bytes));
  void* arguments[] = {&params};
  if (result == cudaSuccess) {
    result = cudaLaunchKernel(instance.kernel, dim3(decode.kv_heads, plan.splits, decode.batch), dim3(instance.threads),
                              arguments, instance.shared_bytes, stream);
  }
  if (result == cudaSuccess && plan.splits > 1) {
    const CombineParams combine = {params.partial_output,
                                   params.partial_lse,
                                   decode.output,
                                   decode.lse,
                                   decode.output_row_bytes,
                                   decode.query_tokens,
                                   decode.query_heads,
                                   decode.head_dim,
                                   plan.splits,
                                   decode.batch,
                                   decode.type == TARDIS_ATTENTION_FP16};
    result = launch_combine(combine, stream);
  }
  if (result != cudaSuccess) complaint.say("launch of %s: %s", instance.name, cudaGetErrorString(result));
  return result;
}

}  // namespace
}  // namespace tardis::attention

using namespace tardis::attention;

int tardis_gpu_attention_decode(const tardis_attention_decode* decode, void* stream, char* error,
                                std::size_t error_bytes) {
  Complaint complaint(error, error_bytes);
  if (decode == nullptr) {
    complaint.say("decode: expected parameters, found a null pointer");
    return cudaErrorInvalidValue;
  }
  if (!is_valid_call(*decode, complaint)) return cudaErrorInvalidValue;
  Place place{};
  const cudaError_t found = find_place(*decode, complaint, &place);
  if (found != cudaSuccess) return found;
  const std::uint64_t wanted = place.plan.workspace_bytes();
  if (wanted != 0 && (decode->workspace == nullptr || decode->workspace_bytes < wanted ||
                      reinterpret_cast<std::uintptr_t>(decode->workspace) % 16 != 0)) {
    complaint.say(
        "workspace: expected %llu bytes of HBM at a multiple of 16 (tardis_gpu_attention_workspace), found %llu at %p",
        static_cast<unsigned long long>(wanted), static_cast<unsigned long long>(decode->workspace_bytes),
        decode->workspace);
    return cudaErrorInvalidValue;
  }
  return enqueue(*decode, place, static_cast<cudaStream_t>(stream), complaint);
}

int tardis_gpu_attention_workspace(const tardis_attention_decode* decode, std::uint64_t* bytes, char* error,
                                   std::size_t error_bytes) {
  Complaint complaint(error, error_bytes);
  if (decode == nullptr || bytes == nullptr) {
    complaint.say("expected parameters and a place for the answer, found a null pointer");
    return cudaErrorInvalidValue;
  }
  if (!is_valid_shape(*decode, complaint)) return cudaErrorInvalidValue;
  Place place{};
  const cudaError_t found = find_place(*decode, complaint, &place);
  if (found == cudaSuccess) *bytes = place.plan.workspace_bytes();
  return found;
}

int tardis_gpu_attention_load() {
  if (tensor_map_encoder().error != cudaSuccess) return tensor_map_encoder().error;
  std::size_t count = 0;
  const Instance* const built = instances(&count);
  for (std::size_t i = 0; i < count; ++i) {
    const cudaError_t result = cudaFuncSetAttribute(built[i].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    static_cast<int>(built[i].shared_bytes));
    if (result != cudaSuccess) return result;
  }
  const cudaError_t result = load_combine();
  return result != cudaSuccess ? result : load_store();
}

std::uint32_t tardis_gpu_attention_decode_bytes() { return sizeof(tardis_attention_decode); }
