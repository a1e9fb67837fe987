// SPDX-License-Identifier: Apache-2.0
#include "attention/instance.cuh"

namespace tardis::attention {

Instance decode_fp16_256() { return InstanceOf<TARDIS_ATTENTION_FP16, 256>::make("fp16:256"); }

}  // namespace tardis::attention
