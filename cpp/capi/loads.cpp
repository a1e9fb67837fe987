// SPDX-License-Identifier: Apache-2.0
// The C ABI of loads.
#include "tardis/loads.h"

#include <memory>
#include <string>

#include "capi/guarded.h"
#include "capi/store_handle.h"
#include "gio/loader.h"

struct tardis_loader {
  std::unique_ptr<tardis::gio::Loader> loader;
};

struct tardis_load {
  tardis::gio::Loader* loader;
  tardis::gio::LoadThread* thread;
};

namespace {

using namespace tardis;
using capi::guarded;

static_assert(sizeof(tardis_loader_options) == 56 && sizeof(tardis_loader_counters) == 64);
static_assert(sizeof(tardis_load_result) == 16 && sizeof(tardis_host_load) == 56);

Status refuse(const char* call, const char* why) {
  return Error{Code::kInvalidArgument, std::string(call) + ": " + why};
}

}  // namespace

tardis_code tardis_load_board_layout_of(const tardis_load_shape* shape, tardis_load_board_layout* layout,
                                        char** error) {
  return guarded(error, [&]() -> Status {
    if (shape == nullptr || layout == nullptr) {
      return refuse("tardis_load_board_layout_of", "expected a shape and a place for the layout, found NULL");
    }
    auto made = gio::board_layout_of(*shape);
    if (!made) return made.error();
    *layout = *made;
    return {};
  });
}

tardis_code tardis_loader_open(tardis_store* store, const tardis_loader_options* options, tardis_loader** loader,
                               char** error) {
  return guarded(error, [&]() -> Status {
    if (store == nullptr || options == nullptr || loader == nullptr) {
      return refuse("tardis_loader_open", "expected a store, options and a place for the loader, found NULL");
    }
    *loader = nullptr;
    auto opened = gio::Loader::open(*store->store, *options);
    if (!opened) return opened.error();
    *loader = std::make_unique<tardis_loader>(std::move(*opened)).release();
    return {};
  });
}

void tardis_loader_close(tardis_loader* loader) { delete loader; }

void tardis_loader_get_counters(tardis_loader* loader, tardis_loader_counters* counters) {
  *counters = loader->loader->counters();
}

tardis_code tardis_load_begin(tardis_loader* loader, const uint8_t* hashes, uint32_t n, int use_rings, void* board,
                              tardis_load** load, char** error) {
  return guarded(error, [&]() -> Status {
    if (loader == nullptr || load == nullptr) {
      return refuse("tardis_load_begin", "expected a loader and a place for the load, found NULL");
    }
    *load = nullptr;
    auto made = std::make_unique<tardis_load>();
    auto begun = loader->loader->begin(reinterpret_cast<const Hash256*>(hashes), n, use_rings != 0, board);
    if (!begun) return begun.error();
    *made = {loader->loader.get(), *begun};
    *load = made.release();
    return {};
  });
}

tardis_code tardis_load_end(tardis_load* load, int cancelled, tardis_load_result* result, char** error) {
  return guarded(error, [&]() -> Status {
    if (load == nullptr || result == nullptr) {
      return refuse("tardis_load_end", "expected a load and a place for the result, found NULL");
    }
    const std::unique_ptr<tardis_load> ended(load);
    *result = load->loader->end(*load->thread, cancelled != 0);
    return {};
  });
}

tardis_code tardis_load_run(tardis_loader* loader, tardis_load* load, void* board, const tardis_host_load* run,
                            char** error) {
  return guarded(error, [&]() -> Status {
    if (loader == nullptr || run == nullptr)
      return refuse("tardis_load_run", "expected a loader and a run, found NULL");
    const gio::Load* const from_files = load == nullptr ? nullptr : &load->thread->load();
    void* const its_board = from_files == nullptr ? board : from_files->board().memory();
    return loader->loader->runner().begin(from_files, its_board, *run);
  });
}

tardis_code tardis_load_wait(tardis_loader* loader, const void* board, uint32_t layer, char** error) {
  return guarded(error, [&]() -> Status {
    if (loader == nullptr || board == nullptr || layer >= loader->loader->shape().layers) {
      return refuse("tardis_load_wait", "expected a loader, a board and one of its layers");
    }
    loader->loader->runner().wait(board, layer);
    return {};
  });
}

void tardis_load_sizes_of(tardis_load_sizes* sizes) {
  *sizes = {sizeof(tardis_load_board),  sizeof(tardis_load_repair),    sizeof(tardis_load_board_layout),
            sizeof(tardis_load_shape),  sizeof(tardis_loader_options), sizeof(tardis_loader_counters),
            sizeof(tardis_load_result), sizeof(tardis_host_load)};
}
