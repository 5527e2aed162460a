#include "kernels/dispatch.h"

#include <atomic>
#include <stdexcept>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace expertide {
namespace {

#if defined(__x86_64__) || defined(_M_X64)
bool has_avx2() {
  // Also true only when the operating system saves the wide registers.
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
bool has_dot_products() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;  // how other systems tell is not written yet
#endif
}
#endif

// Best first; the last one runs everywhere.
struct Choice {
  const IsaTable* table;
  bool (*is_here)();
  const char* needs;
};

const Choice kChoices[] = {
#if defined(__x86_64__) || defined(_M_X64)
    {&kAvx512Table, has_avx512, "AVX-512 F, BW, DQ, VL or VNNI"},
    {&kAvx2Table, has_avx2, "AVX2, FMA or F16C"},
#elif defined(__aarch64__)
    {&kNeonTable, has_dot_products, "the dot-product instructions (asimddp)"},
#endif
    {&kBaseTable, [] { return true; }, ""},
};

const IsaTable& best() {
  for (const Choice& choice : kChoices) {
    if (choice.is_here()) return *choice.table;
  }
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
  if (name == "auto") return active.store(&best(), std::memory_order_release);
  std::string known = "auto";
  for (const Choice& choice : kChoices) {
    known += std::string(", ") + choice.table->name;
    if (name != choice.table->name) continue;
    if (!choice.is_here()) {
      throw std::invalid_argument("instruction set " + name + ": this processor lacks " + choice.needs);
    }
    return active.store(choice.table, std::memory_order_release);
  }
  throw std::invalid_argument("instruction set '" + name + "' is not known; known: " + known);
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Choice& choice : kChoices) {
    if (choice.is_here()) names.push_back(choice.table->name);
  }
  return names;
}

}  // namespace expertide
