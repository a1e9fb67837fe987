// SPDX-License-Identifier: Apache-2.0
// What a handle of the C ABI stands for.
#pragma once

#include <memory>

#include "store/store.h"
#include "tardis/tardis.h"

struct tardis_store {
  std::unique_ptr<tardis::Store> store;
};
