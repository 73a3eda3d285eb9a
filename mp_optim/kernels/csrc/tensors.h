// Tensors of a call, for what goes through them matrix by matrix.
#pragma once

#include <vector>

#include "level.h"

namespace mp {

constexpr int64_t kLargeLaunch = 4 << 20;  // elements: well beyond the caches with main params and two moments

// A part of a tensor. Present values are where new ones go, or if `apart` where the call says.
Run run_at(const MpTensors& t, int64_t index, int64_t start, int64_t count, bool stream, bool apart);
// The square root of a sum of squares, as a bfloat16 not less than 1e-7.
float norm_of(double sum);
// Adds the sums of a tensor's pieces in adjacent pairs, zero filled.
double add_pairs(std::vector<double>& values);

}  // namespace mp
