// What every machine of the architecture has: SSE2 on x86-64, NEON on 64-bit Arm, plain C++ elsewhere.
#include "level.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#define MP_SSE2
#elif defined(__aarch64__)
#include <arm_neon.h>
#define MP_NEON
#endif

namespace mp {
namespace baseline {
#include "simd.inl"
#include "kernels.inl"
}  // namespace baseline

static bool always() { return true; }

#if defined(MP_NEON)
#define MP_BASELINE_NAME "neon"
#else
#define MP_BASELINE_NAME "baseline"
#endif

extern const Level kBaseline;
const Level kBaseline = {MP_BASELINE_NAME, always,                 baseline::kRules,       baseline::adam,
                         baseline::lamb_moments, baseline::lamb_apply, baseline::average, baseline::sum_of_squares,
                         baseline::muon_momentum, baseline::muon_apply,
                         baseline::largest_bits, baseline::total_digits, baseline::row_digits,
                         baseline::turn_row, baseline::turn_by_variance, baseline::descend, baseline::clip_sums, baseline::weighted_sum};
}  // namespace mp
