// The run-time compiler and its cache in onefold._core: where to look for NVRTC, and what
// `onefold cache` shows and does.
#include "jit/jit.h"

#include <nanobind/nanobind.h>

#include <string>

#include "arguments.h"
#include "jit/settings.h"
#include "jit/store.h"

namespace nb = nanobind;

namespace onefold::python {
namespace {

jit::Store store() { return jit::Store(jit::cache_folders()); }

nb::list cache_folders() {
  nb::list folders;
  for (const auto& folder : jit::cache_folders()) folders.append(text(folder.string()));
  return folders;
}

nb::list cache_entries() {
  nb::list entries;
  for (const jit::Store::Entry& entry : store().list()) {
    const jit::Binary& binary = entry.binary;
    nb::list warnings;
    for (const std::string& warning : binary.facts.warnings) warnings.append(text(warning));
    nb::dict fields;
    fields["folder"] = text(entry.folder);
    fields["name"] = text(binary.name);
    fields["target"] = text(binary.target);
    fields["nvrtc"] = text(binary.nvrtc);
    fields["registers"] = binary.facts.registers;
    fields["spill_bytes"] = binary.facts.spill_store_bytes + binary.facts.spill_load_bytes;
    fields["compile_seconds"] = binary.facts.compile_seconds;
    fields["warnings"] = warnings;
    fields["bytes"] = entry.bytes;
    fields["last_used"] = entry.last_used;
    entries.append(fields);
  }
  return entries;
}

}  // namespace

void define_jit(nb::module_& m) {
  m.def("add_compiler_path", [](const nb::bytes& folder) { jit::add_search_path(folder.c_str()); });
  m.def("compiler_info", [] { return text(jit::info()); });
  m.def("cache_folders", &cache_folders);
  m.def("cache_entries", &cache_entries);
  m.def("cache_clear", [] { return store().clear(); });
  m.def("cache_export", [](const nb::bytes& folder) { return store().copy_to(folder.c_str()); });
}

}  // namespace onefold::python
