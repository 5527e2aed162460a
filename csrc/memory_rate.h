// Reading memory as fast as it comes: the bound that the kernels are held against.
#pragma once

#include <cstdint>

#include "thread_pool.h"

namespace expertide {

// Exclusive or of words[0..num_words). The result is there so that no compiler may leave the reading out.
uint64_t xor_words(ThreadPool& pool, const uint64_t* words, int64_t num_words);

}  // namespace expertide
