// Adafactor over runs of FP32 values: docs/numerics.md, "Adafactor" and "Exact sums". Plain loops, which compilers
// turn into vectors: sums are of whole numbers, so their order is free.
// Included inside a level's namespace, after simd.inl.

// Bits of the largest magnitude; those of a NaN are larger than all others.
static int32_t largest_bits(const float* x, int64_t n) {
    int32_t top = 0;
    for (int64_t i = 0; i < n; ++i) {
        int32_t bits = as<int32_t>(x[i]) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    return top;
}

// A square below 1 as two whole numbers of 31 bits. Nothing is rounded.
MP_INLINE void digits_of(float x, double scale, int32_t& high, int32_t& low) {
    double y = double(x) * scale;
    y = y * y * 0x1p31;
    high = int32_t(y);
    low = int32_t((y - double(high)) * 0x1p31);
}

// Adds the digits of all squares to sums[2].
static void total_digits(const float* x, int64_t n, double scale, int64_t* sums) {
    constexpr int64_t kRun = 1024;
    int64_t high_sum = 0, low_sum = 0;
    for (int64_t start = 0; start < n; start += kRun) {
        const int64_t count = n - start < kRun ? n - start : kRun;
        for (int64_t line = 0; line < kRun; line += 16) __builtin_prefetch(x + start + 2 * kRun + line, 0, 2);
        for (int64_t i = start; i < start + count; ++i) {
            int32_t high, low;
            digits_of(x[i], scale, high, low);
            high_sum += high, low_sum += low;
        }
    }
    sums[0] += high_sum, sums[1] += low_sum;
}

// The same, and adds each element's digits to those of its column.
static void row_digits(const float* x, int64_t n, double scale, int64_t* __restrict__ high_columns,
                       int64_t* __restrict__ low_columns, int64_t* sums) {
    int64_t high_sum = 0, low_sum = 0;
    for (int64_t i = 0; i < n; ++i) {
        int32_t high, low;
        digits_of(x[i], scale, high, low);
        high_columns[i] += high, low_columns[i] += low;
        high_sum += high, low_sum += low;
    }
    sums[0] += high_sum, sums[1] += low_sum;
}

// x / sqrt(max(v, floor)); NaN stays NaN.
MP_INLINE float turned(float x, float v, float floor) { return x / __builtin_sqrtf(v < floor ? floor : v); }

static void turn_row(float* __restrict__ x, const float* __restrict__ columns, int64_t n, float weight, float floor) {
    for (int64_t i = 0; i < n; ++i) x[i] = turned(x[i], weight * columns[i], floor);
}

// NaN stays NaN.
MP_INLINE float at_most_largest(float x) { return x > kLargest ? kLargest : x; }

static void turn_by_variance(float* __restrict__ x, float* __restrict__ variance, int64_t n, const MpAdafactor& s) {
    const float keep = s.keep, weight = s.weight, floor = s.squared_floor;
    for (int64_t i = 0; i < n; ++i) {
        variance[i] = at_most_largest(variance[i] * keep + at_most_largest(x[i] * x[i]) * weight);
        x[i] = turned(x[i], variance[i], floor);
    }
}

static void descend(float* __restrict__ main, const float* __restrict__ direction, int64_t n, float decay, float size) {
    if (decay != 0.0f)
        for (int64_t i = 0; i < n; ++i) main[i] = main[i] - main[i] * decay - direction[i] * size;
    else
        for (int64_t i = 0; i < n; ++i) main[i] = main[i] - direction[i] * size;
}
