// SPDX-License-Identifier: Apache-2.0
#include "attention/instance.cuh"

namespace tardis::attention {

Instance decode_bf16_128() { return InstanceOf<TARDIS_ATTENTION_BF16, 128>::make("bf16:128"); }

}  // namespace tardis::attention
