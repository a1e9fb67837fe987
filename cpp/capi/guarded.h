// SPDX-License-Identifier: Apache-2.0
// What the functions of the C ABI share: errors as codes and messages, exceptions as errors.
#pragma once

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "base/status.h"
#include "tardis/tardis.h"

namespace tardis::capi {

inline char* copy_text(const std::string& text) {
  auto* memory = static_cast<char*>(std::malloc(text.size() + 1));
  if (memory != nullptr) std::memcpy(memory, text.c_str(), text.size() + 1);
  return memory;
}

inline tardis_code fail(const Error& error, char** message) {
  if (message != nullptr) *message = copy_text(error.message);
  return static_cast<tardis_code>(error.code);
}

template <class Body>
tardis_code guarded(char** message, Body body) {
  if (message != nullptr) *message = nullptr;
  try {
    const Status status = body();
    return status ? TARDIS_OK : fail(status.error(), message);
  } catch (const std::bad_alloc&) {
    return fail({Code::kInternal, "out of memory"}, message);
  } catch (const std::exception& error) {
    return fail({Code::kInternal, error.what()}, message);
  }
}

}  // namespace tardis::capi
