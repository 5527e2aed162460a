#include "kernels/dispatch.h"

#include <atomic>
#include <stdexcept>

namespace expertide {
namespace {

bool has_avx2() {
#if defined(__x86_64__) || defined(_M_X64)
  // Also true only when the operating system saves the wide registers.
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

const IsaTable& best() {
#if defined(__x86_64__) || defined(_M_X64)
  if (has_avx2()) return kAvx2Table;
#endif
  return kBaseTable;
}

std::atomic<const IsaTable*> active{nullptr};

}  // namespace

const IsaTable& active_isa() {
  const IsaTable* table = active.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = &best();
    active.store(table, std::memory_order_release);
  }
  return *table;
}

void set_isa(const std::string& name) {
  if (name == "auto") {
    active.store(&best(), std::memory_order_release);
  } else if (name == "base") {
    active.store(&kBaseTable, std::memory_order_release);
  } else if (name == "avx2") {
    if (!has_avx2()) throw std::invalid_argument("instruction set avx2: this processor lacks AVX2, FMA or F16C");
    active.store(&best(), std::memory_order_release);
  } else {
    throw std::invalid_argument("instruction set '" + name + "' is not known; known: auto, avx2, base");
  }
}

}  // namespace expertide
