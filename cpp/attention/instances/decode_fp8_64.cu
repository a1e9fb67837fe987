// SPDX-License-Identifier: Apache-2.0
#include "attention/instance.cuh"

namespace tardis::attention {

Instance decode_fp8_64() { return InstanceOf<TARDIS_ATTENTION_FP8_E4M3, 64>::make("fp8:64"); }

}  // namespace tardis::attention
