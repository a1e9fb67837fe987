// SPDX-License-Identifier: Apache-2.0
// Calls that are enqueued one after the other, each of which may fail. For CUDA code on the host.
#pragma once

#include <cuda_runtime.h>

namespace tardis::gio {

// The first error of a sequence; what follows it is not tried.
class Sequence {
 public:
  template <class Call>
  Sequence& then(Call call) {
    if (error_ == cudaSuccess) error_ = call();
    return *this;
  }
  int error() const { return error_; }

 private:
  int error_ = cudaSuccess;
};

}  // namespace tardis::gio
