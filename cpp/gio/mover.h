/* SPDX-License-Identifier: Apache-2.0 */
/* Movers: kernels that copy scattered pieces between pinned host memory and HBM with bulk copies (TMA) on 1 to 4 SMs,
 * in any direction, and check digests on the way (docs/gio.md). C ABI of libtardis_gpu.so.
 *
 * Everything here can be captured in a CUDA graph: nothing is allocated and nothing waits. Counts, ids, pieces and
 * expected digests are read by the device when the call's turn comes, from device or mapped host memory, and may change
 * between replays; what the structs below hold is fixed at capture. A stream is a cudaStream_t, NULL the default
 * stream. Calls return a cudaError_t: cudaErrorInvalidValue for what a comment forbids, else that of the launch. */
#ifndef TARDIS_GIO_MOVER_H_
#define TARDIS_GIO_MOVER_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TARDIS_GPU_API __attribute__((visibility("default")))

enum { TARDIS_GPU_MAX_MOVER_CTAS = 4 };

/* Addresses as the device sees them: HBM, or pinned host memory that is mapped. Any address and size is right. What is
 * a multiple of 16 in all three goes at link speed, and other sizes too but for their last 16 KiB; an address that is
 * not goes byte by byte, many times slower. Pieces of one call must not overlap in their destinations. */
struct tardis_gpu_piece {
  uint64_t source;
  uint64_t destination;
  uint64_t bytes; /* 0: nothing */
};

struct tardis_gpu_move_args {
  const struct tardis_gpu_piece* pieces;
  const uint32_t* piece_count; /* one word, read by the device; more than max_pieces counts as max_pieces */
  uint32_t max_pieces;
  uint32_t ctas; /* 1 .. TARDIS_GPU_MAX_MOVER_CTAS; each fills one SM's shared memory */
};

/* Loads the kernels and raises their limit of shared memory on the current device. The calls below do so themselves;
 * calling it at start keeps the loading of a kernel from waiting behind one that polls. */
TARDIS_GPU_API int tardis_gpu_mover_prepare(void);

/* Enqueues the copy of pieces[0 .. *piece_count). */
TARDIS_GPU_API int tardis_gpu_move(const struct tardis_gpu_move_args* move, void* stream);

enum tardis_gpu_part_status {
  TARDIS_GPU_PART_GOOD = 0,     /* landed; equal to what was expected, where something was */
  TARDIS_GPU_PART_MISMATCH = 1, /* landed, and a digest is not the expected one */
  TARDIS_GPU_PART_TOO_LONG = 2, /* landed, but it has more chunks than chunks_per_part: no digests */
};

/* A part is one layer of one object: `pieces_per_part` consecutive pieces (K then V, or one), digested as one run of
 * bytes: XXH3-64 of each 16 KiB (the last is shorter; one may span K and V), and of those digests as 8-byte integers
 * (docs/on-disk-format.md). A part of no bytes leaves its words below as they are. Device memory all of it. */
struct tardis_gpu_digest_args {
  uint32_t pieces_per_part;        /* 1 or 2 */
  uint32_t chunks_per_part;        /* words from one part to the next in the [part][chunk] arrays */
  const uint64_t* expected_chunks; /* [part][chunk], or NULL */
  const uint64_t* expected_parts;  /* [part], or NULL */
  uint64_t* chunk_digests;         /* out, [part][chunk] */
  uint64_t* part_digests;          /* out, [part], or NULL */
  uint32_t* status;                /* out, [part]: enum tardis_gpu_part_status; written for every part with bytes */
  uint32_t* errors;                /* one word (the layer's error flag): increased by one for each part not good */
};

/* The same copy, with digests of chunks made from shared memory while the bytes land, and a second kernel behind it
 * that makes those of parts and compares: what does not fit has landed all the same, and is told by status and errors.
 * Pieces and *piece_count stay as they are until then. *piece_count should be a multiple of pieces_per_part; a rest is
 * not copied. */
TARDIS_GPU_API int tardis_gpu_move_digested(const struct tardis_gpu_move_args* move,
                                            const struct tardis_gpu_digest_args* digests, void* stream);

enum tardis_gpu_direction {
  TARDIS_GPU_TO_POOL = 0,   /* restore: objects are the source */
  TARDIS_GPU_FROM_POOL = 1, /* backup: the pool is the source */
};

/* One layer of pages between a KV pool and objects of bytes [layer][K,V][token][head][dim]. The pool keeps each layer's
 * K and V apart, a token's bytes ([head][dim]) after the other's; MLA has one buffer a layer. A page's tokens must be
 * contiguous there, and so must a part's in its object. */
struct tardis_gpu_page_args {
  const void* page_ids;       /* device: int32 or int64 */
  const uint32_t* page_count; /* one word, read by the device; more than max_pages counts as max_pages */
  uint32_t max_pages;
  uint32_t id_bytes;      /* 4 or 8 */
  uint32_t tokens_per_id; /* page_tokens where ids number pages; 1 where they are a page's first token slot */
  uint32_t page_tokens;
  uint64_t pool_tokens;         /* a page that ends behind it is not touched and counts as an error */
  uint64_t token_bytes;         /* of K or of V (MLA: of the latent) in one layer, without a gap to the next token */
  const uint64_t* key_layers;   /* device: address of each layer's K buffer (MLA: of the one buffer) */
  const uint64_t* value_layers; /* device: of each layer's V buffer, or NULL (MLA) */
  uint32_t layer;
  uint32_t direction;      /* enum tardis_gpu_direction */
  const uint64_t* objects; /* device: address of each page's object, or NULL: object_base + page * object_stride */
  uint64_t object_base;
  uint64_t object_stride;
  uint64_t part_offset;            /* of the layer in its object */
  struct tardis_gpu_piece* pieces; /* out: 2 a page (K, V), or 1 (MLA), in the order of page_ids */
  uint32_t* piece_count;           /* out */
  uint32_t* errors; /* one word, increased by one for each page outside of the pool; its pieces are empty */
};

/* Enqueues the making of a layer's pieces; a move behind it in the stream (or graph) takes them. */
TARDIS_GPU_API int tardis_gpu_page_pieces(const struct tardis_gpu_page_args* pages, void* stream);

#ifdef __cplusplus
}
#endif
#endif
