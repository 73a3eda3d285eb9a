// Level for 64-bit Arm CPUs, all of which have NEON.
#include "level.h"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace mp {
namespace neon {
#define MP_NEON
#include "simd.inl"
#include "kernels.inl"
}  // namespace neon

static bool always() { return true; }

extern const Level kNeon;
const Level kNeon = {"neon",     always,             neon::kRules,
                     neon::lamb_moments, neon::lamb_apply, neon::average, neon::sum_of_squares,
                     neon::muon_momentum, neon::muon_apply, neon::weighted_sum};
}  // namespace mp
#endif
