// The products of bfloat16 matrices that Muon's iteration is made of, by the tiles of AMX.
#pragma once

#include <cstdint>

#include "api.h"

namespace mp {

constexpr int64_t kSide = 32;  // rows and columns of a block of results, and products of a step along the inner side

// One matrix of an MpProduct, and memory of one thread.
struct ProductJob {
    const uint16_t *factor, *x;
    uint16_t *out, *left, *right;  // left, right: packed panels
};

constexpr int64_t panels_of(int64_t n) { return (n + kSide - 1) / kSide; }

// Panels of the right factor that are multiplied with one panel of the left after another.
int64_t panels_together(int64_t inner);

bool has_amx();
// Every `parts`-th row of blocks of the result, from the `part`-th on.
void multiply(const MpProduct& p, const ProductJob& job, int64_t part, int64_t parts);

}  // namespace mp
