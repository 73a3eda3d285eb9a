// What one instruction-set level provides: kernels over a run of elements of one tensor.
#pragma once

#include <utility>

#include "api.h"

namespace mp {

constexpr int64_t kBlock = 1024;          // elements that are summed together, see docs/numerics.md
constexpr int64_t kPiece = 128 * kBlock;  // elements whose block sums are added by one thread
constexpr int64_t kScaled = 256;          // elements of a moment that share a scale; a run starts at a multiple of both

constexpr int64_t kChanged = 64;          // elements of a word of MpTensors' bitmaps
constexpr int64_t kPacked = 64;           // elements of MP_I4 that are packed together

// Bytes of an element, but for MP_I4.
constexpr int64_t size_of(int32_t dtype) {
    return dtype == MP_NONE || dtype == MP_I0 ? 0 : dtype == MP_F32 ? 4 : dtype == MP_I8 || dtype == MP_U8 ? 1 : 2;
}

// Bytes of so many elements from a multiple of kPacked on.
constexpr int64_t bytes_of(int32_t dtype, int64_t n) {
    return dtype == MP_I4 ? (n + kPacked - 1) / kPacked * (kPacked / 2) : n * size_of(dtype);
}

constexpr bool is_blocked(int32_t dtype) {
    return dtype == MP_F16 || dtype == MP_I8 || dtype == MP_U8 || dtype == MP_I4;
}

// Elements in memory; null where a call has none.
struct Stream {
    char* data;
    int32_t dtype;

    // Of MP_I4, at multiples of kPacked only.
    char* at(int64_t i) const { return data + bytes_of(dtype, i); }
};

// One tensor, its pointers moved to the first element of the run.
struct Run {
    Stream main, remainder, grad, moment1, moment2, output;
    Stream old_main, old_remainder, old_moment1, old_moment2;  // where present values are read: mostly the same places
    Stream average, old_average;
    float average_weight;
    uint64_t* changed;  // a bit for each element; null if nobody asks
    float *scale1, *scale2;  // of moments in blocks: one for each kScaled elements
    const float *old_scale1, *old_scale2;
    int64_t numel;
    uint32_t start;  // index of the first element in its tensor, modulo 2^32
    uint32_t key;    // of the tensor's random bits
    bool noisy;      // round stochastically
    bool follows;    // continue from the output where it is not the rounded main param
    bool stream;     // write the output past the caches: the launch is much larger than they are
    bool past;       // so FP32 main params and moments, which are not read there either
    int32_t prefetch, measure_prefetch;  // in elements of an update, in bytes of a measurement
};

// A rule that steps each element by itself.
struct ElementRule {
    const char* name;  // null at the end of a list
    int32_t scalars;
    int moments;  // those it cannot do without: the sum of 1 for the first and 2 for the second
    void (*step)(const Run&, const float* scalars);
};

struct Level {
    const char* name;
    bool (*supported)();
    const ElementRule* rules;
    void (*lamb_moments)(const Run&, const MpLamb&, double* squares);  // of params and directions
    void (*lamb_apply)(const Run&, const MpLamb&, float ratio);
    void (*average)(const Run&);  // of main params as they are in memory
    double (*sum_of_squares)(const Run&, int64_t* zeros);
    void (*muon_momentum)(const Run&, const MpMuon&);
    void (*muon_apply)(const Run&, float decay, bool cautious_wd, float factor);
    int64_t (*weighted_sum)(const int16_t* x, const int32_t* weights, int64_t n);
};

// Best first; null at the end.
extern const Level* const kLevels[];

// The one in use.
const Level& level();

}  // namespace mp
