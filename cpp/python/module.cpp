// SPDX-License-Identifier: Apache-2.0
// Python binding of the C ABI: argument conversion and GIL release, no logic. The typed face is sglang_tardis/store.py.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tardis/tardis.h"

namespace py = pybind11;

namespace {

using Bytes2d = py::array_t<std::uint8_t, py::array::c_style>;
using Pieces = py::array_t<std::uint64_t, py::array::c_style>;

struct Text {
  char* text = nullptr;
  ~Text() { tardis_free(text); }
  std::string str() const { return text == nullptr ? std::string() : std::string(text); }
};

// Raised as _core.CoreError(code, message); store.py turns it into the public exceptions.
class CoreError : public std::runtime_error {
 public:
  CoreError(tardis_code code, const std::string& message) : std::runtime_error(message), code(code) {}
  tardis_code code;
};

void check(tardis_code code, const Text& error) {
  if (code != TARDIS_OK) throw CoreError(code, error.str());
}

template <class Body>
tardis_code released(Body body) {
  const py::gil_scoped_release release;
  return body();
}

// Runs a function of the core without the GIL; what it refuses becomes a CoreError.
template <class Body>
void call(Body body) {
  Text error;
  check(released([&] { return body(&error.text); }), error);
}

const std::uint8_t* as_bytes(const std::string& text) { return reinterpret_cast<const std::uint8_t*>(text.data()); }

std::string fingerprint_bytes(const py::bytes& fingerprint) {
  auto bytes = static_cast<std::string>(fingerprint);
  if (bytes.size() != TARDIS_FINGERPRINT_BYTES) throw py::value_error("fingerprint: expected 16 bytes");
  return bytes;
}

std::size_t count_hashes(const Bytes2d& hashes) {
  if (hashes.ndim() != 2 || hashes.shape(1) != TARDIS_HASH_BYTES) {
    throw py::value_error("hashes: expected a C-contiguous uint8 array of shape (n, 32)");
  }
  return static_cast<std::size_t>(hashes.shape(0));
}

tardis_object_layout make_layout(std::uint32_t parts, const std::vector<std::uint64_t>& region_bytes) {
  tardis_object_layout layout{};
  layout.parts = parts;
  layout.regions = static_cast<std::uint32_t>(region_bytes.size());
  for (std::size_t r = 0; r < region_bytes.size() && r < std::size(layout.region_bytes); ++r) {
    layout.region_bytes[r] = region_bytes[r];
  }
  return layout;
}

template <class Number>
void take(const std::string& name, const py::handle& item, Number& option) {
  try {
    option = item.cast<Number>();
  } catch (const py::cast_error&) {
    throw py::value_error("store option " + name + ": expected a whole number of " +
                          std::to_string(8 * sizeof(Number)) + " bits, found " + py::repr(item).cast<std::string>());
  }
}

// What the options point to.
struct OptionTexts {
  std::string shared_memory;
  std::vector<std::string> more_paths;
  std::vector<const char*> more_path_pointers;
};

void take_more_paths(const py::handle& item, OptionTexts& texts, tardis_options& options) {
  if (item.is_none()) return;
  // A text would do as a sequence of texts, each of one character.
  if (!py::isinstance<py::list>(item)) {
    throw py::value_error("store option more_paths: expected a list, found " + py::repr(item).cast<std::string>());
  }
  texts.more_paths = item.cast<std::vector<std::string>>();
  for (const std::string& path : texts.more_paths) texts.more_path_pointers.push_back(path.c_str());
  texts.more_path_pointers.push_back(nullptr);  // so that an empty list is not NULL, which means something else
  options.more_paths = texts.more_path_pointers.data();
  options.more_paths_count = static_cast<std::uint32_t>(texts.more_paths.size());
}

tardis_options make_options(const py::dict& settings, OptionTexts& texts) {
  static const std::map<std::string, std::uint32_t tardis_options::*> kNumbers = {
      {"engine", &tardis_options::engine},
      {"direct", &tardis_options::direct},
      {"placement", &tardis_options::placement},
      {"queue_depth", &tardis_options::queue_depth},
      {"io_workers", &tardis_options::io_workers},
      {"bounce_buffers", &tardis_options::bounce_buffers},
      {"flush_milliseconds", &tardis_options::flush_milliseconds},
      {"checkpoint_seconds", &tardis_options::checkpoint_seconds},
      {"verify_reads", &tardis_options::verify_reads},
  };
  static const std::map<std::string, std::uint64_t tardis_options::*> kSizes = {
      {"capacity_bytes", &tardis_options::capacity_bytes},
      {"segment_bytes", &tardis_options::segment_bytes},
      {"object_bytes_hint", &tardis_options::object_bytes_hint},
      {"free_space_floor", &tardis_options::free_space_floor},
      {"flush_bytes", &tardis_options::flush_bytes},
  };
  tardis_options options;
  tardis_default_options(&options);
  for (const auto& [key, item] : settings) {
    const auto name = key.cast<std::string>();
    if (const auto number = kNumbers.find(name); number != kNumbers.end()) {
      take(name, item, options.*number->second);
    } else if (const auto size = kSizes.find(name); size != kSizes.end()) {
      take(name, item, options.*size->second);
    } else if (name == "shared_memory") {
      texts.shared_memory = item.cast<std::string>();
      options.shared_memory = texts.shared_memory.c_str();
    } else if (name == "more_paths") {
      take_more_paths(item, texts, options);
    } else {
      throw py::value_error("unknown store option: " + name);
    }
  }
  return options;
}

class Store {
 public:
  Store(const std::string& folder, const py::dict& settings, bool create) {
    OptionTexts texts;
    const tardis_options options = make_options(settings, texts);
    tardis_store* raw = nullptr;
    call([&](char** error) { return tardis_open(folder.c_str(), &options, create, &raw, error); });
    store_.reset(raw);
  }

  // Of the tardis_store, for what takes one by the C ABI.
  std::uintptr_t handle() const { return reinterpret_cast<std::uintptr_t>(store_.get()); }

  std::uint32_t open_namespace(const py::bytes& fingerprint, const std::string& description, std::uint32_t parts,
                               const std::vector<std::uint64_t>& region_bytes) {
    const std::string id = fingerprint_bytes(fingerprint);
    const tardis_object_layout layout = make_layout(parts, region_bytes);
    std::uint32_t handle = 0;
    call([&](char** error) {
      return tardis_namespace_open(store_.get(), as_bytes(id), description.c_str(), &layout, &handle, error);
    });
    const std::lock_guard lock(pieces_mutex_);
    if (pieces_.size() <= handle) pieces_.resize(handle + 1);
    pieces_[handle] = std::size_t{parts} * region_bytes.size();
    return handle;
  }

  std::size_t lookup(std::uint32_t handle, const Bytes2d& hashes) {
    const std::size_t n = count_hashes(hashes);
    const std::uint8_t* data = hashes.data();
    std::size_t run = 0;
    call([&](char**) { return tardis_lookup(store_.get(), handle, data, n, &run); });
    return run;
  }

  // (ok, code, message): pages may be missing from ok with a reason, which is not an exception.
  py::tuple set(std::uint32_t handle, const Bytes2d& hashes, const Pieces& pieces,
                const std::optional<py::bytes>& parent) {
    const std::size_t n = count_hashes(hashes);
    check_pieces(handle, pieces, n);
    const std::string previous = parent ? static_cast<std::string>(*parent) : std::string();
    if (parent && previous.size() != TARDIS_HASH_BYTES) throw py::value_error("parent: expected 32 bytes");
    py::array_t<bool> ok(static_cast<py::ssize_t>(n));
    auto* flags = reinterpret_cast<std::uint8_t*>(ok.mutable_data());
    const std::uint8_t* keys = hashes.data();
    const std::uint64_t* addresses = pieces.data();
    Text error;
    const tardis_code code = released([&] {
      return tardis_set(store_.get(), handle, keys, parent ? as_bytes(previous) : nullptr, addresses, n, flags,
                        &error.text);
    });
    return py::make_tuple(ok, static_cast<int>(code), error.str());
  }

  py::tuple get(std::uint32_t handle, const Bytes2d& hashes, const Pieces& pieces) {
    const std::size_t n = count_hashes(hashes);
    check_pieces(handle, pieces, n);
    py::array_t<bool> ok(static_cast<py::ssize_t>(n));
    auto* flags = reinterpret_cast<std::uint8_t*>(ok.mutable_data());
    const std::uint8_t* keys = hashes.data();
    const std::uint64_t* addresses = pieces.data();
    Text error;
    const tardis_code code =
        released([&] { return tardis_get(store_.get(), handle, keys, addresses, n, flags, &error.text); });
    return py::make_tuple(ok, static_cast<int>(code), error.str());
  }

  void register_memory(std::uint64_t address, std::uint64_t bytes) {
    call([&](char** error) {
      return tardis_register_memory(store_.get(), reinterpret_cast<void*>(address), bytes, error);
    });
  }

  void unregister_memory(std::uint64_t address) {
    released([&] { return tardis_unregister_memory(store_.get(), reinterpret_cast<void*>(address)); });
  }

  std::uint64_t repair_headers() {
    std::uint64_t slots = 0;
    call([&](char** error) { return tardis_repair_headers(store_.get(), &slots, error); });
    return slots;
  }

  void flush() {
    call([&](char** error) { return tardis_flush(store_.get(), error); });
  }

  std::uint64_t clear(const std::optional<py::bytes>& fingerprint) {
    const std::string only = fingerprint ? fingerprint_bytes(*fingerprint) : std::string();
    std::uint64_t pages = 0;
    call([&](char** error) {
      return tardis_clear(store_.get(), fingerprint ? as_bytes(only) : nullptr, &pages, error);
    });
    return pages;
  }

  // `prefix`: bytes of the key, of which the first `nibbles` half bytes count.
  std::uint64_t remove(const py::bytes& prefix, std::uint32_t nibbles, const std::optional<py::bytes>& fingerprint) {
    const std::string only = fingerprint ? fingerprint_bytes(*fingerprint) : std::string();
    const auto key = static_cast<std::string>(prefix);
    if (key.size() < (nibbles + 1) / 2) throw py::value_error("key prefix: fewer bytes than digits");
    std::uint64_t pages = 0;
    call([&](char** error) {
      return tardis_remove(store_.get(), fingerprint ? as_bytes(only) : nullptr, as_bytes(key), nibbles, &pages, error);
    });
    return pages;
  }

  std::uint64_t prune(std::uint64_t target_bytes, const std::optional<py::bytes>& fingerprint) {
    const std::string only = fingerprint ? fingerprint_bytes(*fingerprint) : std::string();
    std::uint64_t pages = 0;
    call([&](char** error) {
      return tardis_prune(store_.get(), fingerprint ? as_bytes(only) : nullptr, target_bytes, &pages, error);
    });
    return pages;
  }

  void close() {
    call([&](char** error) { return tardis_close(store_.get(), error); });
  }

  std::string path_report() {
    Text json;
    check(tardis_path_report(store_.get(), &json.text), {});
    return json.str();
  }

  py::dict stats() {
    tardis_stats s;
    tardis_get_stats(store_.get(), &s);
    py::dict d;
#define TARDIS_PUT(field) d[#field] = s.field;
    TARDIS_STATS_SUMS(TARDIS_PUT)
    TARDIS_STATS_LEVELS(TARDIS_PUT)
#undef TARDIS_PUT
    return d;
  }

 private:
  struct Destroy {
    void operator()(tardis_store* store) const { tardis_destroy(store); }
  };

  void check_pieces(std::uint32_t handle, const Pieces& pieces, std::size_t n) {
    std::size_t expected = 0;
    {
      const std::lock_guard lock(pieces_mutex_);
      if (handle >= pieces_.size()) throw py::value_error("namespace handle: not opened");
      expected = pieces_[handle];
    }
    if (pieces.ndim() != 2 || static_cast<std::size_t>(pieces.shape(0)) != n ||
        static_cast<std::size_t>(pieces.shape(1)) != expected) {
      throw py::value_error("pieces: expected a C-contiguous uint64 array of shape (" + std::to_string(n) + ", " +
                            std::to_string(expected) + ")");
    }
  }

  std::unique_ptr<tardis_store, Destroy> store_;
  std::mutex pieces_mutex_;
  std::vector<std::size_t> pieces_;  // parts * regions, by namespace handle
};

std::string probe(const std::string& folder, const py::dict& settings) {
  OptionTexts texts;
  const tardis_options options = make_options(settings, texts);
  Text json;
  call([&](char** error) { return tardis_probe(folder.c_str(), &options, &json.text, error); });
  return json.str();
}

std::string inspect(const std::string& folder) {
  Text json;
  call([&](char** error) { return tardis_inspect(folder.c_str(), &json.text, error); });
  return json.str();
}

using Progress = std::function<bool(std::uint64_t, std::uint64_t)>;

int call_progress(void* context, std::uint64_t done, std::uint64_t total) {
  const py::gil_scoped_acquire acquire;
  try {
    return (*static_cast<Progress*>(context))(done, total) ? 0 : 1;
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("verify progress");
    return 1;
  }
}

// Packed as sglang_tardis.store reads it.
py::bytes list_objects(const std::string& folder) {
  static_assert(sizeof(tardis_object_info) == 104);
  std::string packed;
  const auto visit = [](void* context, const tardis_object_info* object) {
    static_cast<std::string*>(context)->append(reinterpret_cast<const char*>(object), sizeof *object);
    return 0;
  };
  call([&](char** error) { return tardis_list(folder.c_str(), visit, &packed, error); });
  return packed;
}

py::tuple verify(const std::string& folder, bool repair, bool live, const std::optional<Progress>& progress) {
  tardis_verify_report r{};
  Text problems;
  Progress callback = progress.value_or(Progress());
  const tardis_progress step = progress ? &call_progress : nullptr;
  call([&](char** error) {
    return live ? tardis_verify_live(folder.c_str(), step, &callback, &r, &problems.text, error)
                : tardis_verify(folder.c_str(), repair, step, &callback, &r, &problems.text, error);
  });
  py::dict d;
  d["segments"] = r.segments;
  d["slots"] = r.slots;
  d["objects"] = r.objects;
  d["bytes"] = r.bytes;
  d["bad_headers"] = r.bad_headers;
  d["bad_payloads"] = r.bad_payloads;
  d["torn"] = r.torn;
  d["unreadable_segments"] = r.unreadable_segments;
  d["free_slots"] = r.free_slots;
  d["quarantined"] = r.quarantined;
  return py::make_tuple(d, problems.str());
}

std::uint64_t digest(std::uint32_t parts, const std::vector<std::uint64_t>& region_bytes, const Pieces& pieces) {
  const tardis_object_layout layout = make_layout(parts, region_bytes);
  if (static_cast<std::size_t>(pieces.size()) != std::size_t{parts} * region_bytes.size()) {
    throw py::value_error("pieces: expected parts * regions addresses");
  }
  const std::uint64_t* addresses = pieces.data();
  std::uint64_t root = 0;
  call([&](char**) { return tardis_digest(&layout, addresses, nullptr, nullptr, &root); });
  return root;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Binding of the tardis core (use sglang_tardis.store)";
  m.attr("version") = tardis_version();
  static py::exception<CoreError> core_error(m, "CoreError");
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const CoreError& error) {
      PyErr_SetObject(core_error.ptr(), py::make_tuple(static_cast<int>(error.code), error.what()).ptr());
    }
  });
  py::class_<Store>(m, "Store")
      .def(py::init<const std::string&, const py::dict&, bool>(), py::arg("folder"), py::arg("settings"),
           py::arg("create"))
      .def_property_readonly("handle", &Store::handle)
      .def("open_namespace", &Store::open_namespace)
      .def("lookup", &Store::lookup, py::arg("handle"), py::arg("hashes").noconvert())
      .def("set", &Store::set, py::arg("handle"), py::arg("hashes").noconvert(), py::arg("pieces").noconvert(),
           py::arg("parent"))
      .def("get", &Store::get, py::arg("handle"), py::arg("hashes").noconvert(), py::arg("pieces").noconvert())
      .def("register_memory", &Store::register_memory)
      .def("unregister_memory", &Store::unregister_memory)
      .def("flush", &Store::flush)
      .def("repair_headers", &Store::repair_headers)
      .def("clear", &Store::clear)
      .def("remove", &Store::remove)
      .def("prune", &Store::prune)
      .def("close", &Store::close)
      .def("path_report", &Store::path_report)
      .def("stats", &Store::stats);
  m.def("probe", &probe);
  m.def("inspect", &inspect);
  m.def("list_objects", &list_objects);
  m.def("verify", &verify);
  m.def("digest", &digest, py::arg("parts"), py::arg("region_bytes"), py::arg("pieces").noconvert());
}
