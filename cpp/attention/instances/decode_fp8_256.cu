// SPDX-License-Identifier: Apache-2.0
#include "attention/instance.cuh"

namespace tardis::attention {

Instance decode_fp8_256() { return InstanceOf<TARDIS_ATTENTION_FP8_E4M3, 256>::make("fp8:256"); }

}  // namespace tardis::attention
