// SPDX-License-Identifier: Apache-2.0
#include "attention/instance.cuh"

namespace tardis::attention {

Instance decode_bf16_64() { return InstanceOf<TARDIS_ATTENTION_BF16, 64>::make("bf16:64"); }

}  // namespace tardis::attention
