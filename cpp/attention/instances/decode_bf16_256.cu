// SPDX-License-Identifier: Apache-2.0
#include "attention/instance.cuh"

namespace tardis::attention {

Instance decode_bf16_256() { return InstanceOf<TARDIS_ATTENTION_BF16, 256>::make("bf16:256"); }

}  // namespace tardis::attention
