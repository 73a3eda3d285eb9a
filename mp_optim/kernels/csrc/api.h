// C interface of the kernels: plain structs and functions without exceptions. Python calls the functions through ctypes
// (mp_optim/kernels/native.py).
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define MP_EXPORT extern "C" __declspec(dllexport)
#else
#define MP_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Element types. Moments in MP_F16, MP_I8, MP_U8 and MP_I4 are stored in blocks with a scale each (docs/numerics.md).
// MP_I4 has two codes in a byte: of each run of 64 elements, byte i has element i in its lower half and element i + 32
// in its upper half. MP_I0 is a remainder of 0 bits without a table: only the bfloat16 main param is stored.
enum MpDtype : int32_t {
    MP_NONE = 0, MP_F32 = 1, MP_BF16 = 2, MP_F16 = 3, MP_I8 = 4, MP_U8 = 5, MP_I16 = 6, MP_I4 = 7, MP_I0 = 8
};

enum MpStatus : int32_t { MP_OK = 0, MP_BAD_ARGUMENT = 1, MP_NO_MEMORY = 2, MP_FAILED = 3 };

// Tensors of a call: tables of `count` pointers to row-major contiguous data. A table that the call does not need is
// null, and its dtype is MP_NONE.
struct MpTensors {
    int64_t count;
    const int64_t* numel;
    void* const* main;        // main_dtype: MP_F32, or MP_BF16 with a remainder
    void* const* remainder;   // remainder_dtype: MP_I16, MP_I8 or MP_I0
    void* const* grad;        // grad_dtype: MP_F32, MP_BF16 or MP_F16
    void* const* moment1;     // moment1_dtype: MP_F32, MP_BF16, MP_F16, MP_I8 or MP_I4
    void* const* moment2;     // moment2_dtype: MP_F32, MP_BF16, MP_F16 or MP_U8
    float* const* scale1;     // Scales of first moments in blocks.
    float* const* scale2;
    void* const* output;      // output_dtype: MP_F32, MP_BF16 or MP_F16; only MP_BF16 with a remainder
    const uint32_t* stream;   // Random stream of each tensor, to round state stochastically; null rounds to nearest.
    int32_t main_dtype;
    int32_t remainder_dtype;
    int32_t grad_dtype;
    int32_t moment1_dtype;
    int32_t moment2_dtype;
    int32_t output_dtype;
    uint32_t seed;
    // Current values of main params, remainders, moments and scales, if they must not be overwritten: all of these
    // tables, or none. Kernels do not copy tensors that a rule does not read. mp_lamb_apply takes none of these tables,
    // because mp_lamb_moments has already copied the values.
    const void* const* from_main;
    const void* const* from_remainder;
    const void* const* from_moment1;
    const void* const* from_moment2;
    const float* const* from_scale1;
    const float* const* from_scale2;
    // Averages of main params, updated in the same pass: average + weight * (main - average), or main if the weight is
    // 1. mp_lamb_moments does not update averages.
    void* const* average;     // average_dtype: MP_F32, or MP_BF16, rounded stochastically
    const void* const* from_average;
    int32_t average_dtype;
    float average_weight;
    // A bitmap for each tensor, in words of 64 elements; null if changes are not marked. A kernel sets the bits of
    // weights that get another value or NaN, and clears no bit. The weights are the outputs; without outputs, the main
    // params. The old weight is the rounded old main param.
    uint64_t* const* changed;
    // If not 0, `output` has the model's weights, and the step continues from each weight that is not the rounded main
    // param. Main params are then MP_F32, outputs MP_BF16 or MP_F16, and the `from_` tables are null.
    int32_t follows;
};

// Scalars of the rules, FP32, computed in double by the caller. docs/numerics.md has the formulas.
struct MpAdam {
    float multiplier, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_bias2, decay, l2, cautious_wd;
};

struct MpLamb {
    float multiplier, beta1, grad_weight, beta2, one_minus_beta2, eps, inv_bias1, inv_sqrt_bias2, decay, l2;
};

// Scalars of an interpolation between two values: their difference times a factor is added to the first value, or to
// the second if `from_end` is 1.
struct MpMuon {
    float multiplier, average, ahead;
    int32_t average_from_end, ahead_from_end, nesterov;
};

// All functions return an MpStatus. `threads` >= 1 is the largest number of threads; results do not depend on it.

// Steps tensors by a rule that steps each element independently: a row of kRules in rules.inl, which defines the order
// of its `count` scalars. The first scalar is the multiplier of gradients. A moment that the rule does not need with
// these scalars may be left out.
MP_EXPORT int32_t mp_step(const MpTensors* tensors, const char* rule, const float* scalars, int32_t count, int32_t threads);
// Updates LAMB's moments. sums: FP64, (count, 2): for each tensor, the sum of squares of the param before the step, and
// the sum of squares of the direction.
MP_EXPORT int32_t mp_lamb_moments(const MpTensors* tensors, const MpLamb* scalars, double* sums, int32_t threads);
MP_EXPORT int32_t mp_lamb_apply(const MpTensors* tensors, const MpLamb* scalars, const float* ratios, int32_t threads);
// Updates Muon's momenta in moment1, and writes the tensors to orthogonalize to output. There are no main params.
MP_EXPORT int32_t mp_muon_momentum(const MpTensors* tensors, const MpMuon* scalars, int32_t threads);
// Decays main params, and subtracts the directions in grad, each times its factor. With cautious decay, an element does
// not decay if the step moves it away from 0.
MP_EXPORT int32_t mp_muon_apply(const MpTensors* tensors, float decay, int32_t cautious_wd, const float* factors,
                                int32_t threads);
// Updates only the averages, from the present main params. Needs no gradients.
MP_EXPORT int32_t mp_average(const MpTensors* tensors, int32_t threads);
// sums: FP64 sums of squares of the gradients, (count,). zeros: numbers of zero elements, (count,), or null.
MP_EXPORT int32_t mp_measure(const MpTensors* tensors, double* sums, int64_t* zeros, int32_t threads);

// Computes a checksum modulo 2^64: each element is multiplied by a weight of its row of 1024 and by a weight of its
// column.
MP_EXPORT int32_t mp_weighted_sum(const int16_t* x, int64_t n, int64_t* sum, int32_t threads);

// Name of the level in use: "avx512", "avx2" or "neon". mp_set_level selects another level of this CPU. If mp_levels is
// empty, no kernel may be called.
MP_EXPORT const char* mp_level();
MP_EXPORT const char* mp_levels();  // This CPU's levels, comma separated, best first.
MP_EXPORT int32_t mp_set_level(const char* name);
// Sets GOMP_parallel of the OpenMP library that torch uses; null uses threads of this library.
MP_EXPORT void mp_set_parallel(void* gomp_parallel);
MP_EXPORT int32_t mp_abi();  // The number changes with every change of a struct or signature.
