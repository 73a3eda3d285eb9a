// The products of bfloat16 matrices that Muon's iteration is made of: by tiles of AMX, or by AVX-512.
#pragma once

#include <cstdint>

#include "api.h"

namespace mp {

constexpr int64_t kSide = 32;  // rows and columns of a block of results, and products of a step along the inner side

// One matrix of an MpProduct, and memory of one thread.
struct ProductJob {
    const uint16_t *factor, *x;
    uint16_t *out, *left, *right;  // left, right: packed panels
    float* sums;                   // two blocks for each panel of the right factor
};

constexpr int64_t kStepsTogether = 16;  // of a left panel, whose tiles are in the first-level cache meanwhile

constexpr int64_t panels_of(int64_t n) { return (n + kSide - 1) / kSide; }

// Panels of the right factor that are multiplied with one panel of the left after another.
int64_t panels_together(const MpProduct& p);

constexpr int64_t kAlign = 64;

template <class Number>
Number aligned(Number bytes) {
    return (bytes + kAlign - 1) / kAlign * kAlign;
}

inline char* aligned(void* room) { return (char*)aligned(uintptr_t(room)); }

constexpr bool valid_chunk(int64_t chunk) { return chunk >= kSide && chunk % kSide == 0; }

// Bytes that a thread needs for packed panels of the left and of the right factor, and for sums.
struct Room {
    int64_t left, right, sums;

    int64_t bytes() const { return left + right + sums; }
};

Room room_of(const MpProduct& p);
// A matrix of a product, with memory from `packed` on.
ProductJob job_of(const MpProduct& p, int64_t index, char* packed);

bool has_pairs();  // products of pairs of bfloat16, which processors with AMX have, too
// Every `parts`-th row of blocks of the result, from the `part`-th on.
void multiply(const MpProduct& p, const ProductJob& job, int64_t part, int64_t parts);
// The transpose of a matrix: every `parts`-th 32 rows of it, from the `part`-th on.
void turn(const uint16_t* x, int64_t rows, int64_t columns, uint16_t* to, int64_t part, int64_t parts);

}  // namespace mp
