// SPDX-License-Identifier: Apache-2.0
// The second kernel of tardis_gpu_move_digested(): from digests of chunks to those of parts, and to the words that say
// whether they are the expected ones. For host code that nvcc compiles.
#pragma once

#include <cuda_runtime.h>

#include "gio/mover.h"

namespace tardis::gio {

// Loads the kernel.
cudaError_t prepare_part_digests();

// Behind the kernel that moves and writes digests.chunk_digests, in the same stream. It may start before that one has
// ended, once that one says so, and waits for its end.
cudaError_t enqueue_part_digests(const tardis_gpu_move_args& move, const tardis_gpu_digest_args& digests,
                                 cudaStream_t stream);

}  // namespace tardis::gio
