// The C interface: plain structs, plain functions, no exceptions. Python reads it through ctypes (backends/native).
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define MP_EXPORT extern "C" __declspec(dllexport)
#else
#define MP_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Element types. Moments in MP_F16, MP_I8, MP_U8 and MP_I4 are in blocks with a scale each, see docs/numerics.md.
// MP_I4 is two to a byte: byte i of every 32 has element i of 64 in its lower half and element i + 32 in its upper one.
// MP_I0 is a remainder of no bits, without a table: the bfloat16 main is all there is.
enum MpDtype : int32_t {
    MP_NONE = 0, MP_F32 = 1, MP_BF16 = 2, MP_F16 = 3, MP_I8 = 4, MP_U8 = 5, MP_I16 = 6, MP_I4 = 7, MP_I0 = 8
};

enum MpStatus : int32_t { MP_OK = 0, MP_BAD_ARGUMENT = 1, MP_NO_MEMORY = 2, MP_FAILED = 3 };

// One call's tensors: tables of `count` pointers each, row-major contiguous data. An unused table is null, and its
// dtype MP_NONE.
struct MpTensors {
    int64_t count;
    const int64_t* numel;
    void* const* main;        // main_dtype: MP_F32, or MP_BF16 with a remainder
    void* const* remainder;   // remainder_dtype: MP_I16, MP_I8 or MP_I0
    void* const* grad;        // grad_dtype: MP_F32, MP_BF16 or MP_F16
    void* const* moment1;     // moment1_dtype: MP_F32, MP_BF16, MP_F16, MP_I8 or MP_I4
    void* const* moment2;     // moment2_dtype: MP_F32, MP_BF16, MP_F16 or MP_U8
    float* const* scale1;     // of the first moments, if they are in blocks
    float* const* scale2;
    void* const* output;      // output_dtype: MP_F32, MP_BF16 or MP_F16; beside a remainder only MP_BF16
    const uint32_t* stream;   // of each tensor, to round state stochastically; null: to nearest
    int32_t main_dtype;
    int32_t remainder_dtype;
    int32_t grad_dtype;
    int32_t moment1_dtype;
    int32_t moment2_dtype;
    int32_t output_dtype;
    uint32_t seed;
    // Where the present values of main, remainder, moments and scales are read instead, to be left as they are: all of
    // these tables, or none. What a rule has no use for is not brought. mp_lamb_apply takes none: it goes on with what
    // mp_lamb_moments wrote.
    const void* const* from_main;
    const void* const* from_remainder;
    const void* const* from_moment1;
    const void* const* from_moment2;
    const float* const* from_scale1;
    const float* const* from_scale2;
    // Averages of main params, which take the new ones in the same pass: average + weight * (main - average), or main at
    // weight 1. mp_lamb_moments leaves them alone.
    void* const* average;     // average_dtype: MP_F32, or MP_BF16, rounded stochastically
    const void* const* from_average;
    int32_t average_dtype;
    float average_weight;
    // A bitmap of each tensor, in words of 64 elements: bits of weights (the output; without one, the main param) that get
    // another value, or NaN, are set, none is cleared. Null if nobody asks. The old weight is the old main param, rounded.
    uint64_t* const* changed;
    // Not 0: output holds the model's weights. Where they are not the main params, rounded, the step continues from them.
    // Main params are MP_F32, the output is MP_BF16 or MP_F16, and nothing is read from elsewhere.
    int32_t follows;
};

// Scalars of the rules, all FP32, formed in double by the caller. See docs/numerics.md for what multiplies what.
struct MpAdam {
    float multiplier, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_bias2, decay, l2, cautious_wd;
};

struct MpLamb {
    float multiplier, beta1, grad_weight, beta2, one_minus_beta2, eps, inv_bias1, inv_sqrt_bias2, decay, l2;
};

// A difference times a factor is added to one of the two values it is of: to the second if `from_end`.
struct MpMuon {
    float multiplier, average, ahead;
    int32_t average_from_end, ahead_from_end, nesterov;
};

// All functions return an MpStatus. `threads` >= 1 is an upper bound; results do not depend on it.
// A rule that steps each element by itself: a row of kRules in rules.inl, which knows the order of its `count` scalars; the
// first is what gradients are multiplied with. Moments that a rule does without under its scalars may be left out.
MP_EXPORT int32_t mp_step(const MpTensors* tensors, const char* rule, const float* scalars, int32_t count, int32_t threads);
// sums: (count, 2) FP64, of the param before the step and of the direction.
MP_EXPORT int32_t mp_lamb_moments(const MpTensors* tensors, const MpLamb* scalars, double* sums, int32_t threads);
MP_EXPORT int32_t mp_lamb_apply(const MpTensors* tensors, const MpLamb* scalars, const float* ratios, int32_t threads);
// The momenta, in moment1; output receives what is to be orthogonalised. There is no main.
MP_EXPORT int32_t mp_muon_momentum(const MpTensors* tensors, const MpMuon* scalars, int32_t threads);
// Decays main, if cautiously where the step does not take it away from 0, and subtracts directions, which are in grad, each
// tensor's times its own factor.
MP_EXPORT int32_t mp_muon_apply(const MpTensors* tensors, float decay, int32_t cautious_wd, const float* factors,
                                int32_t threads);
// The averages alone, of main params that are there; needs no gradients.
MP_EXPORT int32_t mp_average(const MpTensors* tensors, int32_t threads);
// sums: (count,) FP64 sums of squares of the gradients; zeros: (count,) numbers of zero elements, or null.
MP_EXPORT int32_t mp_measure(const MpTensors* tensors, double* sums, int64_t* zeros, int32_t threads);

// Sum of elements, each times a number of its row of 1024 and one of its column, modulo 2^64: a checksum of bits.
MP_EXPORT int32_t mp_weighted_sum(const int16_t* x, int64_t n, int64_t* sum, int32_t threads);

// "avx512", "avx2" or "neon": the level in use. mp_set_level forces one that the CPU has.
// Where mp_levels is empty no kernel may be called.
MP_EXPORT const char* mp_level();
MP_EXPORT const char* mp_levels();  // all that can be chosen here, comma separated, best first
MP_EXPORT int32_t mp_set_level(const char* name);
// GOMP_parallel of the OpenMP library that torch uses, or null for threads of our own.
MP_EXPORT void mp_set_parallel(void* gomp_parallel);
MP_EXPORT int32_t mp_abi();  // changes whenever a struct or a signature does
