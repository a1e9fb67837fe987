// SPDX-License-Identifier: Apache-2.0
// The two matrix instructions of decode attention, of the one shape that it uses: 64 x 64, a sum over 16, 16-bit
// elements, fp32 sums. All four warps of a warp group call these together.
//
// A thread holds 32 of the 64 x 64 sums: sum[i] is of row 16 * warp + lane / 4 + 8 * (i / 2 % 2) and column
// 8 * (i / 4) + 2 * (lane % 4) + i % 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tardis::attention {

constexpr int kSums = 32;

// Forbids that matrix instructions meet registers, or shared memory that a proxy fence has covered, before what was
// written there by the instructions in front of it.
__device__ __forceinline__ void matrix_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all matrix instructions of this warp group have ended.
__device__ __forceinline__ void matrix_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Forbids that the compiler moves what reads or writes sums across it: it does not know that they change meanwhile.
__device__ __forceinline__ void pin_sums(float (&sum)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

// Operands 0 to 31 of the instructions below: the 32 sums of a thread.
#define TARDIS_SUM_PLACES                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, "         \
  "%8, %9, %10, %11, %12, %13, %14, %15, "   \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define TARDIS_EIGHT_SUMS(i)                                                                              \
  "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), "+f"(sum[i + 5]), \
      "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define TARDIS_SUMS TARDIS_EIGHT_SUMS(0), TARDIS_EIGHT_SUMS(8), TARDIS_EIGHT_SUMS(16), TARDIS_EIGHT_SUMS(24)
#define TARDIS_MULTIPLY_ROWS(type)                                              \
  asm volatile(                                                                 \
      "{\n"                                                                     \
      ".reg .pred p;\n"                                                         \
      "setp.ne.b32 p, %34, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type " {" TARDIS_SUM_PLACES \
      "}, %32, %33, p, 1, 1, 0, 0;\n"                                           \
      "}\n"                                                                     \
      : TARDIS_SUMS                                                             \
      : "l"(left), "l"(right), "r"(add ? 1 : 0)                                 \
      : "memory")
#define TARDIS_MULTIPLY_ADD(type)                                               \
  asm volatile(                                                                 \
      "{\n"                                                                     \
      ".reg .pred p;\n"                                                         \
      "setp.ne.b32 p, 1, 0;\n"                                                  \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type " {" TARDIS_SUM_PLACES \
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"                             \
      "}\n"                                                                     \
      : TARDIS_SUMS                                                             \
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right)      \
      : "memory")

// sum = (add ? sum : 0) + left * right^T, both [64][16] along the columns in shared memory (block_descriptor).
template <class Element>
__device__ __forceinline__ void multiply_rows(float (&sum)[kSums], std::uint64_t left, std::uint64_t right, bool add) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    TARDIS_MULTIPLY_ROWS("bf16.bf16");
  } else {
    static_assert(std::is_same_v<Element, __half>);
    TARDIS_MULTIPLY_ROWS("f16.f16");
  }
}

// sum += left * right: left [64][16] in registers, columns 2 * (lane % 4) and the next of row 16 * warp + lane / 4 in
// left[0] and of the row 8 below in left[1], the same 8 columns on in left[2] and left[3]; right [16][64] in shared
// memory (block_descriptor).
template <class Element>
__device__ __forceinline__ void multiply_add(float (&sum)[kSums], const std::uint32_t (&left)[4], std::uint64_t right) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    TARDIS_MULTIPLY_ADD("bf16.bf16");
  } else {
    static_assert(std::is_same_v<Element, __half>);
    TARDIS_MULTIPLY_ADD("f16.f16");
  }
}

#undef TARDIS_MULTIPLY_ADD
#undef TARDIS_MULTIPLY_ROWS
#undef TARDIS_SUMS
#undef TARDIS_EIGHT_SUMS
#undef TARDIS_SUM_PLACES

}  // namespace tardis::attention
