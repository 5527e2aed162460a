// The Python module: what lives where is in bind_memory.cpp, bind_kernels.cpp, bind_attention.cpp and bind_layers.cpp.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_memory(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_layers(nb::module_& m);

NB_MODULE(_native, m) {
  m.doc() = "Native half of Expertide: file reader, thread pool, residency table, CPU kernels. Knows addresses, not tensors.";
  bind_memory(m);
  bind_kernels(m);
  bind_attention(m);
  bind_layers(m);
}
