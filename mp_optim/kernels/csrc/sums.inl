// Sums of squares in FP64, in the order of docs/numerics.md. Included inside a level's namespace, after formats.inl.

// Returns the sum of squares of a block of FP32 values: 8 rows of 128, rows added one after another, then the 128 sums
// by halving. The values are read from memory, so that conversion to FP64 is a part of the load.
constexpr int kRow = 128;
constexpr int kSums = kRow / 8;

// `ahead`: distance in bytes at which memory is prefetched into the second-level cache, or 0.
MP_INLINE double block_sum(const float* x, int64_t ahead = 0) {
    f64x8 sums[kSums] = {};
#pragma GCC unroll 1
    for (int row = 0; row < kBlock; row += kRow)
#pragma GCC unroll 16
        for (int k = 0; k < kSums; ++k) {
            const float* from = x + row + 8 * k;
            if (ahead && k % 2 == 0) __builtin_prefetch((const char*)from + ahead, 0, 2);
            sums[k] = add_square(sums[k], read_as_f64(from));
        }
#pragma GCC unroll 4
    for (int half = kSums / 2; half >= 1; half /= 2)
#pragma GCC unroll 8
        for (int k = 0; k < half; ++k) sums[k] = sums[k] + sums[k + half];
    double s[8];
    store(s, sums[0]);
    double a = s[0] + s[4], b = s[1] + s[5], c = s[2] + s[6], d = s[3] + s[7];
    return (a + c) + (b + d);
}

// Adds block sums in adjacent pairs, padded with zeros at the end. Only one pending sum per level is kept.
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

// Returns the sum of squares of a block of bfloat16 values. A shift and a mask separate elements with even and odd
// index. So vector 4 j + 2 h + q of a row has the elements 32 j + 16 q + 2 i + h. The sums have the same terms in the
// same order; only their lanes differ.
template <bool zeros>
MP_INLINE double block_sum_bf16(const char* p, int64_t ahead, i32x16& here) {
    constexpr int kPairs = 32;
    f64x8 sums[kSums] = {};
#pragma GCC unroll 1
    for (int row = 0; row < kBlock; row += kRow)
#pragma GCC unroll 4
        for (int j = 0; j < kRow / kPairs; ++j) {
            const char* from = p + 2 * (row + kPairs * j);
            if (ahead) __builtin_prefetch(from + ahead, 0, 2);
            const u32x16 pairs = load<u32x16>(from);
            const f32x16 parts[2] = {as<f32x16>(pairs << 16), as<f32x16>(pairs & 0xffff0000u)};
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
                f64x8* const to = sums + 4 * j + 2 * h;
                to[0] = add_square(to[0], low_as_f64(parts[h]));
                to[1] = add_square(to[1], high_as_f64(parts[h]));
                if (zeros) here = here - (parts[h] == 0.0f);  // A true lane is -1, so subtracting it counts the zero.
            }
        }
#pragma GCC unroll 2
    for (int half = kSums / 2; half >= 4; half /= 2)
#pragma GCC unroll 8
        for (int k = 0; k < half; ++k) sums[k] = sums[k] + sums[k + half];
    double even[8], odd[8];
    store(even, sums[0] + sums[1]);
    store(odd, sums[2] + sums[3]);
    for (int i = 0; i < 4; ++i) even[i] += even[i + 4], odd[i] += odd[i + 4];
    double a = even[0] + even[2], b = odd[0] + odd[2], c = even[1] + even[3], d = odd[1] + odd[3];
    return (a + c) + (b + d);
}

template <int dtype, bool zeros>
MP_INLINE double block_sum_in(const char* p, int64_t ahead, i32x16& here) {
    if constexpr (dtype == MP_BF16) return block_sum_bf16<zeros>(p, ahead, here);
    if (dtype == MP_F32 && !zeros) return block_sum((const float*)p, ahead);
    alignas(64) float values[kBlock];
    for (int i = 0; i < kBlock; i += kLanes) {
        const char* from = p + size_of(dtype) * i;
        if (ahead && (size_of(dtype) == 4 || i % 32 == 0)) __builtin_prefetch(from + ahead, 0, 2);
        f32x16 x = read_as_f32<dtype>(from);
        if (dtype != MP_F32) store(values + i, x);
        if (zeros) here = here - (x == 0.0f);
    }
    return block_sum(dtype == MP_F32 ? (const float*)p : values);
}

template <int dtype, bool zeros>
static double sum_of_squares_in(const Run& run, int64_t* zero_count) {
    PairSum pairs;
    int64_t found = 0;
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
        pairs.add(block_sum_in<dtype, zeros>(p, run.measure_prefetch, here));
        if (zeros) {
            int32_t counts[kLanes];
            store(counts, here);
            for (int32_t count : counts) found += count;
        }
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

// Returns the sum of elements times their weights. A plain loop is enough, because integers can be added in any order.
static int64_t weighted_sum(const int16_t* x, const int32_t* weights, int64_t n) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += int64_t(x[i]) * weights[i];
    return sum;
}
