// SPDX-License-Identifier: Apache-2.0
#include "attention/instance.cuh"

namespace tardis::attention {

Instance decode_fp16_128() { return InstanceOf<TARDIS_ATTENTION_FP16, 128>::make("fp16:128"); }

}  // namespace tardis::attention
