// What one instruction-set level provides: kernels over a run of elements of one tensor.
#pragma once

#include "api.h"

namespace mp {

constexpr int64_t kBlock = 1024;        // elements that are summed together, see docs/numerics.md
constexpr int64_t kPiece = 128 * kBlock;  // elements whose block sums are added by one thread

// Pointers of one tensor, moved to the first element of the run.
struct Run {
    float* main;
    const void* grad;
    void* moment1;
    void* moment2;
    void* output;
    int64_t numel;
    int32_t grad_dtype;
    int32_t output_dtype;
    int32_t moment1_dtype;
    int32_t moment2_dtype;
    bool stream;  // write the output past the caches: the launch is much larger than they are
};

struct Level {
    const char* name;
    bool (*supported)();
    void (*adam)(const Run&, const MpAdam&);
    void (*sgd)(const Run&, const MpSgd&);
    void (*lion)(const Run&, const MpLion&);
    void (*lamb_moments)(const Run&, const MpLamb&, double* param_square, double* update_square);
    void (*lamb_apply)(const Run&, const MpLamb&, float ratio);
    double (*sum_of_squares)(const Run&, int64_t* zeros);
};

// Best first; null at the end.
extern const Level* const kLevels[];

}  // namespace mp
