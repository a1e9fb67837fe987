// SPDX-License-Identifier: Apache-2.0
// tardis_gpu_check_roots() on the CPU, of memory of this process.
#pragma once

#include "gio/root_digests.h"

namespace tardis::gio {

// False: arguments that the other refuses, too. No addresses but those of `args` are touched.
bool check_roots_on_host(const tardis_gpu_root_args& args);

}  // namespace tardis::gio
