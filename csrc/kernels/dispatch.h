// Chooses the instruction set at run time.
#pragma once

#include <string>
#include <vector>

#include "kernels/isa_table.h"

namespace expertide {

// The table in use. The first call picks the best one that this processor has.
const IsaTable& active_isa();

// "auto", "avx512", "avx2", "neon" or "base". Throws std::invalid_argument for an unknown name or one this processor lacks. Not to be called
// while a kernel runs.
void set_isa(const std::string& name);

// Those that this processor can run, best first.
std::vector<std::string> available_isas();

}  // namespace expertide
