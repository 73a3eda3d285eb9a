// Level for CPUs with AVX-512 F, BW, VL and DQ.
#include "level.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

namespace mp {
namespace avx512 {
#define MP_AVX512
#include "simd.inl"
#include "kernels.inl"
}  // namespace avx512
}  // namespace mp

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace mp {
static bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
extern const Level kAvx512;
const Level kAvx512 = {"avx512",     has_avx512,           avx512::kRules,
                       avx512::lamb_moments, avx512::lamb_apply, avx512::average, avx512::sum_of_squares,
                       avx512::muon_momentum, avx512::muon_apply, avx512::weighted_sum};
}  // namespace mp
#endif
