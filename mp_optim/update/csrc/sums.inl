// Sums of squares in FP64, in the order of docs/numerics.md. Included inside a level's namespace, after formats.inl.

// Sum of squares of a block of FP32 values: 8 rows of 128, rows added one after another, the 128 sums by halving.
// Reading from memory lets the widening be part of the load.
constexpr int kRow = 128;
constexpr int kSums = kRow / 8;

MP_INLINE double block_sum(const float* x) {
    f64x8 sums[kSums] = {};
    for (int row = 0; row < kBlock; row += kRow)
#pragma GCC unroll 16
        for (int k = 0; k < kSums; ++k) sums[k] = add_square(sums[k], read_as_f64(x + row + 8 * k));
#pragma GCC unroll 4
    for (int half = kSums / 2; half >= 1; half /= 2)
#pragma GCC unroll 8
        for (int k = 0; k < half; ++k) sums[k] = sums[k] + sums[k + half];
    double s[8];
    store(s, sums[0]);
    double a = s[0] + s[4], b = s[1] + s[5], c = s[2] + s[6], d = s[3] + s[7];
    return (a + c) + (b + d);
}

// Adds block sums in adjacent pairs, zero filled at the end, keeping only one pending sum per level.
struct PairSum {
    double pending[48];
    uint64_t count = 0;

    void add(double value) {
        uint64_t bits = count++;
        int level = 0;
        for (; bits & 1; bits >>= 1) value = pending[level++] + value;
        pending[level] = value;
    }

    double total() const {
        double sum = 0.0;
        bool any = false;
        for (int level = 0; level < 48; ++level) {
            if (!(count >> level & 1)) continue;
            sum = any ? pending[level] + sum : pending[level];
            any = true;
        }
        return sum;
    }
};

template <int dtype, bool zeros>
static double sum_of_squares_in(const Run& run, int64_t* zero_count) {
    PairSum pairs;
    int64_t found = 0;
    alignas(64) float values[kBlock];
    for (int64_t start = 0; start < run.numel; start += kBlock) {
        const char* p = run.grad.at(start);
        alignas(64) char padded[kBlock * 4];
        if (run.numel - start < kBlock) {
            int64_t left = run.numel - start;
            __builtin_memset(padded, 0, sizeof(padded));
            __builtin_memcpy(padded, p, left * size_of(dtype));
            p = padded;
            if (zeros) found -= kBlock - left;
        }
        i32x16 here = {};
        // One stream: far ahead, and only into the second-level cache.
        constexpr int64_t bytes = kBlock * size_of(dtype);
        for (int64_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(p + 8192 + ahead, 0, 2);
        if (dtype != MP_F32 || zeros)
            for (int i = 0; i < kBlock; i += kLanes) {
                f32x16 x = read_as_f32<dtype>(p + size_of(dtype) * i);
                if (dtype != MP_F32) store(values + i, x);
                if (zeros) here = here - (x == 0.0f);  // a true lane is -1
            }
        if (zeros) {
            int32_t counts[kLanes];
            store(counts, here);
            for (int32_t count : counts) found += count;
        }
        pairs.add(block_sum(dtype == MP_F32 ? (const float*)p : values));
    }
    if (zeros) *zero_count = found;
    return pairs.total();
}

template <int dtype>
MP_INLINE double sum_of_squares_in(const Run& run, int64_t* zeros) {
    return zeros ? sum_of_squares_in<dtype, true>(run, zeros) : sum_of_squares_in<dtype, false>(run, zeros);
}

static double sum_of_squares(const Run& run, int64_t* zeros) {
    switch (run.grad.dtype) {
        case MP_BF16: return sum_of_squares_in<MP_BF16>(run, zeros);
        case MP_F16: return sum_of_squares_in<MP_F16>(run, zeros);
        default: return sum_of_squares_in<MP_F32>(run, zeros);
    }
}
