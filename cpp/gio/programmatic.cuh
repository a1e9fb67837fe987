// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: a kernel that is launched behind another may start before that one's end, to have its
// own start behind it.
#pragma once

namespace tardis::gio {

// By one thread of each CTA of the first kernel: the second may be started now. Without one it means nothing.
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// By every thread of the second that reads what the first wrote, and by one of every CTA at least, so that its end is
// not before the first one's. Forbids that anything is read before the first kernel has ended.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace tardis::gio
