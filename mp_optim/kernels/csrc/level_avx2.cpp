// Level for CPUs with AVX2, FMA and F16C.
#include "level.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace mp {
namespace avx2 {
#define MP_AVX2
#include "simd.inl"
#include "kernels.inl"
}  // namespace avx2
}  // namespace mp

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace mp {
static bool has_avx2() {
    // Every CPU with AVX2 has F16C, so do not check it.
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
extern const Level kAvx2;
const Level kAvx2 = {"avx2",     has_avx2,           avx2::kRules,
                     avx2::lamb_moments, avx2::lamb_apply, avx2::average, avx2::sum_of_squares,
                     avx2::muon_momentum, avx2::muon_apply, avx2::weighted_sum};
}  // namespace mp
#endif
