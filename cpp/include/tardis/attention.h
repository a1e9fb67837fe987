/* SPDX-License-Identifier: Apache-2.0 */
/* Decode attention over KV pages that lie in pinned host memory, in HBM, or in both (docs/attention.md). C ABI of
 * libtardis_gpu.so.
 *
 * A call enqueues one kernel, or two where the context is split, and can be captured in a CUDA graph: nothing is
 * allocated and nothing waits. Lengths and page tables are read by the device when its turn comes and may change
 * between replays; what the struct below holds is fixed at capture. */
#ifndef TARDIS_ATTENTION_H_
#define TARDIS_ATTENTION_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TARDIS_ATTENTION_API __attribute__((visibility("default")))

/* Elements of K and V, of which queries and output follow. */
enum tardis_attention_type {
  TARDIS_ATTENTION_BF16 = 0,
  TARDIS_ATTENTION_FP16 = 1,
  TARDIS_ATTENTION_FP8_E4M3 = 2, /* queries and output are bf16 */
  TARDIS_ATTENTION_TYPES = 3,
};

enum {
  TARDIS_ATTENTION_POOLS = 2,
  TARDIS_ATTENTION_SECOND_POOL = 1 << 30, /* in an entry of a page table: the page is one of pools[1] */
  TARDIS_ATTENTION_MOST_ROWS = 64,        /* query_tokens * query_heads / kv_heads */
  TARDIS_ATTENTION_MOST_SPLITS = 256,
  TARDIS_ATTENTION_MOST_HEAD_DIM = 256,
};

/* K and V of one layer, [slots][kv_heads][head_dim] each, in memory that the device reaches at these addresses: HBM, or
 * pinned host memory that is mapped. Addresses and strides are multiples of 16; those of slots below 2^40 bytes. */
typedef struct tardis_attention_pool {
  uint64_t keys, values; /* slot 0, head 0; both 0 in a pool that no page table names */
  uint64_t slots;        /* whole pages; what an entry names beyond them reads as zeros */
  uint64_t key_slot_bytes, key_head_bytes;
  uint64_t value_slot_bytes, value_head_bytes;
} tardis_attention_pool;

typedef struct tardis_attention_decode {
  tardis_attention_pool pools[TARDIS_ATTENTION_POOLS];
  const void* queries; /* [batch * query_tokens][query_heads][head_dim], rows of query_row_bytes */
  void* output;        /* the same, rows of output_row_bytes */
  float* lse;          /* [batch * query_tokens][query_heads]: natural logarithm of the sum of exponentials; or NULL */
  /* Of each request, where its tokens are: entry i is the page of tokens i * page_tokens and on. What lies beyond its
   * length is not read. */
  const int32_t* pages;   /* [batch], rows of page_row entries: page number, perhaps TARDIS_ATTENTION_SECOND_POOL */
  const int32_t* lengths; /* [batch]: tokens, the query's own included; more than max_tokens counts as that. None: zeros
                           * are the output, and -inf the lse. */
  void* workspace;        /* HBM, multiple of 16; tardis_gpu_attention_workspace(); contents do not matter */
  uint64_t workspace_bytes;
  uint64_t query_row_bytes, output_row_bytes; /* multiples of 16 */
  uint64_t page_row;
  float scale;     /* of the products of queries and keys; above 0 */
  float soft_cap;  /* 0: none; else products become soft_cap * tanh(product / soft_cap) */
  float key_scale; /* what a stored key is to be multiplied with; above 0 */
  float value_scale;
  int32_t window_left;   /* so many tokens before its own does a query see; -1: all */
  uint32_t batch;        /* requests, at most 65,535 */
  uint32_t query_tokens; /* of each request, the last of its tokens, in order: each sees those before it and itself */
  uint32_t query_heads, kv_heads; /* a multiple of the other */
  uint32_t head_dim;              /* 64, 128 or 256 */
  uint32_t page_tokens;           /* 16, 32, 64 or 128 */
  uint32_t type;                  /* enum tardis_attention_type */
  uint32_t max_tokens;            /* bound of the lengths; at most 2^30 */
  uint32_t splits; /* parts of a context that work beside each other; 0: chosen from batch, heads and max_tokens */
  uint32_t tuning; /* for measurements; 0 */
  uint32_t reserved;
} tardis_attention_decode;

/* New rows of K and V for the slots of a layer's pools. */
typedef struct tardis_attention_store {
  tardis_attention_pool pools[TARDIS_ATTENTION_POOLS];
  const void *keys, *values; /* [tokens][kv_heads][head_dim]: fp16 for pools of that, else bf16; multiples of 16 */
  uint64_t key_row_bytes, value_row_bytes; /* multiples of 16; heads lie side by side */
  const int64_t* slots;   /* [tokens]: page * page_tokens + place in it. Outside of all pools: the row is left out */
  const int32_t* entries; /* of each page that slots name, its entry in page tables; NULL: the page itself */
  uint64_t entry_count;
  float key_scale, value_scale; /* fp8: rows are divided by these, and become the nearest number that there is */
  uint32_t tokens;              /* 0: nothing is enqueued */
  uint32_t kv_heads, head_dim, page_tokens, type;
  uint32_t reserved;
} tardis_attention_store;

/* Enqueues the storing of rows: K and V, each by 16 bytes of a thread. Kernels behind it in the stream see them, in
 * host memory too. Two tokens of one call must not have one slot. Returns and says as the call below. */
TARDIS_ATTENTION_API int tardis_gpu_attention_store(const tardis_attention_store* store, void* stream, char* error,
                                                    size_t error_bytes);

/* Enqueues the attention. Returns a cudaError_t: cudaErrorInvalidValue for what a comment above forbids,
 * cudaErrorNotSupported for a shape that was not built or a GPU that cannot run it, else that of the launch. In these
 * cases `error` (if not NULL) gets a sentence of at most error_bytes, its terminating zero included. */
TARDIS_ATTENTION_API int tardis_gpu_attention_decode(const tardis_attention_decode* decode, void* stream, char* error,
                                                     size_t error_bytes);

/* Bytes of workspace that the call above wants for these parameters on the current device, of which addresses and
 * workspace_bytes are not looked at; may be 0. Largest for the largest batch and max_tokens of otherwise equal
 * parameters only if `splits` is given. */
TARDIS_ATTENTION_API int tardis_gpu_attention_workspace(const tardis_attention_decode* decode, uint64_t* bytes,
                                                        char* error, size_t error_bytes);

/* Loads the kernels of all shapes built on the current device: a kernel that is loaded at its first launch waits for
 * whatever runs. */
TARDIS_ATTENTION_API int tardis_gpu_attention_load(void);

/* What was built, as "bf16:64 bf16:128 ... fp8:256": the form of the CMake variable TARDIS_ATTENTION_SHAPES. */
TARDIS_ATTENTION_API const char* tardis_gpu_attention_shapes(void);

/* sizeof the structs, for those who declare them in another language. */
TARDIS_ATTENTION_API uint32_t tardis_gpu_attention_decode_bytes(void);
TARDIS_ATTENTION_API uint32_t tardis_gpu_attention_store_bytes(void);

#ifdef __cplusplus
}
static_assert(sizeof(tardis_attention_pool) == 56, "between two libraries");
static_assert(sizeof(tardis_attention_decode) == 256, "between two libraries");
static_assert(sizeof(tardis_attention_store) == 200, "between two libraries");
#endif
#endif
