// Interface of an instruction-set level: kernels over a run of elements of one tensor.
#pragma once

#include <utility>

#include "api.h"

namespace mp {

constexpr int64_t kBlock = 1024;          // Number of elements that are summed together (docs/numerics.md).
constexpr int64_t kPiece = 128 * kBlock;  // Number of elements whose block sums one thread adds.
// Number of elements of a moment with a common scale. A run starts at a multiple of kBlock, and so of kScaled.
constexpr int64_t kScaled = 256;

constexpr int64_t kChanged = 64;          // Number of elements in a word of MpTensors' bitmaps.
constexpr int64_t kPacked = 64;           // Number of elements of MP_I4 that are packed together.

// Returns the bytes of an element of any dtype except MP_I4.
constexpr int64_t size_of(int32_t dtype) {
    return dtype == MP_NONE || dtype == MP_I0 ? 0 : dtype == MP_F32 ? 4 : dtype == MP_I8 || dtype == MP_U8 ? 1 : 2;
}

// Returns the bytes of n elements that start at a multiple of kPacked.
constexpr int64_t bytes_of(int32_t dtype, int64_t n) {
    return dtype == MP_I4 ? (n + kPacked - 1) / kPacked * (kPacked / 2) : n * size_of(dtype);
}

constexpr bool is_blocked(int32_t dtype) {
    return dtype == MP_F16 || dtype == MP_I8 || dtype == MP_U8 || dtype == MP_I4;
}

// Elements of one kind in memory; null if the call has none.
struct Stream {
    char* data;
    int32_t dtype;

    // For MP_I4, `i` must be a multiple of kPacked.
    char* at(int64_t i) const { return data + bytes_of(dtype, i); }
};

// Neighboring elements of one tensor. The pointers are those of the first element.
struct Run {
    Stream main, remainder, grad, moment1, moment2, output;
    // Streams of the current values; mostly the same memory as the written streams.
    Stream old_main, old_remainder, old_moment1, old_moment2;
    Stream average, old_average;
    float average_weight;
    uint64_t* changed;  // A bit for each element; null if changes are not marked.
    float *scale1, *scale2;  // Scales of moments in blocks: one for each kScaled elements.
    const float *old_scale1, *old_scale2;
    int64_t numel;
    uint32_t start;  // Index of the first element in its tensor, modulo 2^32.
    uint32_t key;    // Key of the tensor's random bits.
    bool noisy;      // Round stochastically.
    bool follows;    // Continue from the output where it is not the rounded main param.
    bool stream;     // Write the output past the caches, because the launch is much larger than the caches.
    // Write FP32 main params and moments past the caches, because the kernel does not read that memory.
    bool past;
    int32_t prefetch, measure_prefetch;  // Prefetch distances: elements in an update, bytes in a measurement.
};

// A rule that steps each element independently.
struct ElementRule {
    const char* name;  // Null at the end of a list.
    int32_t scalars;
    int moments;  // Required moments: the sum of 1 for the first moment and 2 for the second.
    void (*step)(const Run&, const float* scalars);
};

struct Level {
    const char* name;
    bool (*supported)();
    const ElementRule* rules;
    // `squares` gets the sums of squares of params and directions.
    void (*lamb_moments)(const Run&, const MpLamb&, double* squares);
    void (*lamb_apply)(const Run&, const MpLamb&, float ratio);
    void (*average)(const Run&);  // Updates averages from the stored main params.
    double (*sum_of_squares)(const Run&, int64_t* zeros);
    void (*muon_momentum)(const Run&, const MpMuon&);
    void (*muon_apply)(const Run&, float decay, bool cautious_wd, float factor);
    int64_t (*weighted_sum)(const int16_t* x, const int32_t* weights, int64_t n);
};

// Levels of this build, best first; null at the end.
extern const Level* const kLevels[];

// Returns the level in use.
const Level& level();

}  // namespace mp
