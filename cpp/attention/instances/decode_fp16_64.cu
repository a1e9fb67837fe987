// SPDX-License-Identifier: Apache-2.0
#include "attention/instance.cuh"

namespace tardis::attention {

Instance decode_fp16_64() { return InstanceOf<TARDIS_ATTENTION_FP16, 64>::make("fp16:64"); }

}  // namespace tardis::attention
