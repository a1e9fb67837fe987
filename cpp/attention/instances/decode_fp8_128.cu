// SPDX-License-Identifier: Apache-2.0
#include "attention/instance.cuh"

namespace tardis::attention {

Instance decode_fp8_128() { return InstanceOf<TARDIS_ATTENTION_FP8_E4M3, 128>::make("fp8:128"); }

}  // namespace tardis::attention
