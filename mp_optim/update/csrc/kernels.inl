// The rules over one run of elements. One operation here is one operation of docs/numerics.md: IEEE, rounded once.
// Included inside a level's namespace, after simd.inl.

// -- elements of any dtype ----------------------------------------------------------------------------

template <int dtype>
MP_INLINE f32x16 load_as_f32(const void* p, int64_t i) {
    if (dtype == MP_BF16) return from_bf16(load<u16x16>((const uint16_t*)p + i));
    if (dtype == MP_F16) return from_f16(load<u16x16>((const uint16_t*)p + i));
    return load<f32x16>((const float*)p + i);
}

template <int dtype>
MP_INLINE void store_from_f32(void* p, int64_t i, f32x16 value, bool stream) {
    if (dtype == MP_NONE) return;
    if (dtype == MP_F32) {
        store((float*)p + i, value);
        return;
    }
    u16x16 bits = dtype == MP_BF16 ? to_bf16(value) : to_f16(value);
    if (stream)
        store_past_caches((uint16_t*)p + i, bits);
    else
        store((uint16_t*)p + i, bits);
}

constexpr int64_t size_of(int dtype) { return dtype == MP_F32 ? 4 : dtype == MP_NONE ? 0 : 2; }

// Moments are FP32 or bfloat16, rounded to nearest even. The dtype is the same for a whole call, so the branch is free.
MP_INLINE f32x16 load_moment(const void* p, int64_t i, int32_t dtype) {
    return dtype == MP_BF16 ? load_as_f32<MP_BF16>(p, i) : load_as_f32<MP_F32>(p, i);
}

MP_INLINE void store_moment(void* p, int64_t i, f32x16 value, int32_t dtype) {
    if (dtype == MP_BF16)
        store_from_f32<MP_BF16>(p, i, value, false);
    else
        store_from_f32<MP_F32>(p, i, value, false);
}

MP_INLINE void copy(void* to, const void* from, int64_t bytes) {
    if (to && from) __builtin_memcpy(to, from, bytes);
}

// The last, incomplete sixteen elements of a run, in memory of their own.
struct Tail {
    alignas(64) float main[kLanes] = {}, grad[kLanes] = {}, moment1[kLanes] = {}, moment2[kLanes] = {},
                      output[kLanes] = {};
    Run run;

    explicit Tail(const Run& whole, int64_t start) : run(whole) {
        int64_t n = whole.numel - start;
        copy(main, whole.main ? whole.main + start : nullptr, 4 * n);
        copy(grad, from(whole.grad, start, whole.grad_dtype), n * size_of(whole.grad_dtype));
        copy(moment1, from(whole.moment1, start, whole.moment1_dtype), n * size_of(whole.moment1_dtype));
        copy(moment2, from(whole.moment2, start, whole.moment2_dtype), n * size_of(whole.moment2_dtype));
        run.main = main;
        run.grad = grad;
        run.moment1 = whole.moment1 ? moment1 : nullptr;
        run.moment2 = moment2;
        run.output = output;
        run.numel = kLanes;
        run.stream = false;
    }

    void write_back(const Run& whole, int64_t start) {
        int64_t n = whole.numel - start;
        copy(whole.main + start, main, 4 * n);
        copy(from(whole.moment1, start, whole.moment1_dtype), moment1, n * size_of(whole.moment1_dtype));
        copy(from(whole.moment2, start, whole.moment2_dtype), moment2, n * size_of(whole.moment2_dtype));
        copy(from(whole.output, start, whole.output_dtype), output, n * size_of(whole.output_dtype));
    }

    static char* from(const void* p, int64_t start, int32_t dtype) {
        return p ? (char*)p + start * size_of(dtype) : nullptr;
    }
};

// Elements ahead of use that are fetched: with four or five streams the hardware's own prefetching falls behind.
constexpr int64_t kAhead = 512;

MP_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }

template <int grad_dtype>
MP_INLINE void fetch_ahead(const Run& run, int64_t i) {
    fetch(run.main + i + kAhead);
    if (run.moment1) fetch((const char*)run.moment1 + (i + kAhead) * size_of(run.moment1_dtype));
    if (run.moment2) fetch((const char*)run.moment2 + (i + kAhead) * size_of(run.moment2_dtype));
    fetch((const char*)run.grad + (i + kAhead) * size_of(grad_dtype));
}

// Calls step(run, i) for every sixteen elements; the tail through a copy.
template <int grad_dtype, class Step>
MP_INLINE void for_each_vector(const Run& run, Step step) {
    int64_t whole = run.numel / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) {
        fetch_ahead<grad_dtype>(run, i);
        step(run, i);
    }
    if (whole < run.numel) {
        Tail tail(run, whole);
        step(tail.run, int64_t(0));
        tail.write_back(run, whole);
    }
    if (run.stream) finish_streaming();
}

// Calls body<grad dtype, output dtype>() for the dtypes of a run.
template <class Body>
MP_INLINE void with_dtypes(const Run& run, Body body) {
    Run r = run;
    r.stream = run.stream && (uintptr_t)run.output % 32 == 0;
    switch (run.grad_dtype * 4 + run.output_dtype) {
#define MP_CASE(G, O) \
    case G * 4 + O:   \
        body.template operator()<G, O>(r); \
        break;
        MP_CASE(MP_F32, MP_NONE)
        MP_CASE(MP_F32, MP_F32)
        MP_CASE(MP_F32, MP_BF16)
        MP_CASE(MP_F32, MP_F16)
        MP_CASE(MP_BF16, MP_NONE)
        MP_CASE(MP_BF16, MP_F32)
        MP_CASE(MP_BF16, MP_BF16)
        MP_CASE(MP_BF16, MP_F16)
        MP_CASE(MP_F16, MP_NONE)
        MP_CASE(MP_F16, MP_F32)
        MP_CASE(MP_F16, MP_BF16)
        MP_CASE(MP_F16, MP_F16)
#undef MP_CASE
    }
}

// g * multiplier, then + p * l2.
template <int dtype>
MP_INLINE f32x16 gradient(const Run& r, int64_t i, float multiplier, float l2, f32x16 p) {
    f32x16 g = load_as_f32<dtype>(r.grad, i) * multiplier;
    if (l2 != 0.0f) g = g + p * l2;
    return g;
}

template <class Scalars>
MP_INLINE f32x16 denominator(f32x16 v, const Scalars& s) {
    return square_root(v) * s.inv_sqrt_bias2 + s.eps;
}

// -- Adam ---------------------------------------------------------------------------------------------

struct AdamBody {
    const MpAdam& s;

    template <int G, int O>
    void operator()(const Run& run) const {
        const MpAdam s = this->s;
        for_each_vector<G>(run, [s](const Run& r, int64_t i) __attribute__((always_inline)) {
            f32x16 p = load<f32x16>(r.main + i);
            f32x16 g = gradient<G>(r, i, s.multiplier, s.l2, p);
            f32x16 m = load_moment(r.moment1, i, r.moment1_dtype) * s.beta1 + g * s.one_minus_beta1;
            f32x16 v = load_moment(r.moment2, i, r.moment2_dtype) * s.beta2 + (g * s.one_minus_beta2) * g;
            f32x16 u = (m / denominator(v, s)) * s.step_size;
            if (s.decay != 0.0f) p = p - p * s.decay;
            p = p - u;
            store_moment(r.moment1, i, m, r.moment1_dtype);
            store_moment(r.moment2, i, v, r.moment2_dtype);
            store(r.main + i, p);
            store_from_f32<O>(r.output, i, p, r.stream);
        });
    }
};

static void adam(const Run& run, const MpAdam& s) { with_dtypes(run, AdamBody{s}); }

// -- SGD ----------------------------------------------------------------------------------------------

struct SgdBody {
    const MpSgd& s;

    template <int G, int O>
    void operator()(const Run& run) const {
        const MpSgd s = this->s;
        for_each_vector<G>(run, [s](const Run& r, int64_t i) __attribute__((always_inline)) {
            f32x16 p = load<f32x16>(r.main + i);
            f32x16 g = gradient<G>(r, i, s.multiplier, s.decay, p);
            if (r.moment1) {
                f32x16 b = s.first ? g : load_moment(r.moment1, i, r.moment1_dtype) * s.momentum + g * s.one_minus_dampening;
                store_moment(r.moment1, i, b, r.moment1_dtype);
                g = s.nesterov ? g + b * s.momentum : b;
            }
            p = p - g * s.lr;
            store(r.main + i, p);
            store_from_f32<O>(r.output, i, p, r.stream);
        });
    }
};

static void sgd(const Run& run, const MpSgd& s) { with_dtypes(run, SgdBody{s}); }

// -- Lion ---------------------------------------------------------------------------------------------

// -1, +0 or 1; NaN stays NaN.
MP_INLINE f32x16 sign_of(f32x16 x) {
    u32x16 bits = as<u32x16>(x);
    u32x16 one = (bits & 0x80000000) | 0x3f800000;
    u32x16 is_signed = as<u32x16>(x < 0.0f) | as<u32x16>(x > 0.0f), is_nan = as<u32x16>(x != x);
    return as<f32x16>((is_signed & one) | (is_nan & bits));
}

struct LionBody {
    const MpLion& s;

    template <int G, int O>
    void operator()(const Run& run) const {
        const MpLion s = this->s;
        for_each_vector<G>(run, [s](const Run& r, int64_t i) __attribute__((always_inline)) {
            f32x16 p = load<f32x16>(r.main + i);
            f32x16 g = gradient<G>(r, i, s.multiplier, 0.0f, p);
            f32x16 m = load_moment(r.moment1, i, r.moment1_dtype);
            f32x16 u = sign_of(m * s.beta1 + g * s.one_minus_beta1) * s.lr;
            if (s.decay != 0.0f) p = p - p * s.decay;
            p = p - u;
            store_moment(r.moment1, i, m * s.beta2 + g * s.one_minus_beta2, r.moment1_dtype);
            store(r.main + i, p);
            store_from_f32<O>(r.output, i, p, r.stream);
        });
    }
};

static void lion(const Run& run, const MpLion& s) { with_dtypes(run, LionBody{s}); }

// -- sums of squares ----------------------------------------------------------------------------------

// Sum of squares of a block of FP32 values: 8 rows of 128, rows added one after another, the 128 sums by halving.
// Reading from memory lets the widening be part of the load.
constexpr int kRow = 128;
constexpr int kSums = kRow / 8;

MP_INLINE double block_sum(const float* x) {
    f64x8 sums[kSums] = {};
    for (int row = 0; row < kBlock; row += kRow)
#pragma GCC unroll 16
        for (int k = 0; k < kSums; ++k) sums[k] = add_square(sums[k], load_as_f64(x + row + 8 * k));
#pragma GCC unroll 4
    for (int half = kSums / 2; half >= 1; half /= 2)
#pragma GCC unroll 8
        for (int k = 0; k < half; ++k) sums[k] = sums[k] + sums[k + half];
    f64x8 s = sums[0];
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
        const char* p = (const char*)run.grad + start * size_of(dtype);
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
        for (int64_t ahead = 0; ahead < kBlock * size_of(dtype); ahead += 64) __builtin_prefetch(p + 8192 + ahead, 0, 2);
        if (dtype != MP_F32 || zeros)
            for (int i = 0; i < kBlock; i += kLanes) {
                f32x16 x = load_as_f32<dtype>(p, i);
                if (dtype != MP_F32) store(values + i, x);
                if (zeros) here -= as<i32x16>(x == 0.0f);
            }
        if (zeros)
            for (int k = 0; k < kLanes; ++k) found += here[k];
        pairs.add(block_sum(dtype == MP_F32 ? (const float*)p : values));
    }
    if (zeros) *zero_count = found;
    return pairs.total();
}

static double sum_of_squares(const Run& run, int64_t* zeros) {
    switch (run.grad_dtype) {
        case MP_BF16: return zeros ? sum_of_squares_in<MP_BF16, true>(run, zeros) : sum_of_squares_in<MP_BF16, false>(run, zeros);
        case MP_F16: return zeros ? sum_of_squares_in<MP_F16, true>(run, zeros) : sum_of_squares_in<MP_F16, false>(run, zeros);
        default: return zeros ? sum_of_squares_in<MP_F32, true>(run, zeros) : sum_of_squares_in<MP_F32, false>(run, zeros);
    }
}

// -- LAMB ---------------------------------------------------------------------------------------------

MP_INLINE f32x16 lamb_direction(f32x16 p, f32x16 m, f32x16 v, const MpLamb& s) {
    f32x16 u = (m * s.inv_bias1) / denominator(v, s);
    if (s.decay != 0.0f) u = u + p * s.decay;
    return u;
}

template <int dtype>
static void lamb_moments_in(const Run& run, const MpLamb& scalars, double* param_square, double* update_square) {
    const MpLamb s = scalars;
    PairSum params, updates;
    alignas(64) float squares[2][kBlock];
    for (int64_t start = 0; start < run.numel; start += kBlock) {
        int64_t n = run.numel - start < kBlock ? run.numel - start : kBlock;
        if (n < kBlock) __builtin_memset(squares, 0, sizeof(squares));
        Run block = run;
        block.main = run.main + start;
        block.grad = (const char*)run.grad + start * size_of(dtype);
        block.moment1 = (char*)run.moment1 + start * size_of(run.moment1_dtype);
        block.moment2 = (char*)run.moment2 + start * size_of(run.moment2_dtype);
        block.output = nullptr;
        block.output_dtype = MP_NONE;
        block.numel = n;
        auto step = [&](const Run& r, int64_t i, float* ps, float* us) __attribute__((always_inline)) {
            f32x16 p = load<f32x16>(r.main + i);
            f32x16 g = gradient<dtype>(r, i, s.multiplier, s.l2, p);
            f32x16 m = load_moment(r.moment1, i, r.moment1_dtype) * s.beta1 + g * s.grad_weight;
            f32x16 v = load_moment(r.moment2, i, r.moment2_dtype) * s.beta2 + (g * s.one_minus_beta2) * g;
            store_moment(r.moment1, i, m, r.moment1_dtype);
            store_moment(r.moment2, i, v, r.moment2_dtype);
            store(ps, p);
            // The direction is that of the moments as they are stored: the second pass has nothing else.
            store(us, lamb_direction(p, load_moment(r.moment1, i, r.moment1_dtype),
                                     load_moment(r.moment2, i, r.moment2_dtype), s));
        };
        int64_t whole = n / kLanes * kLanes;
        for (int64_t i = 0; i < whole; i += kLanes) {
            fetch_ahead<dtype>(block, i);
            step(block, i, squares[0] + i, squares[1] + i);
        }
        if (whole < n) {
            Tail tail(block, whole);
            alignas(64) float ps[kLanes], us[kLanes];
            step(tail.run, 0, ps, us);
            tail.write_back(block, whole);
            __builtin_memcpy(squares[0] + whole, ps, 4 * (n - whole));
            __builtin_memcpy(squares[1] + whole, us, 4 * (n - whole));
        }
        params.add(block_sum(squares[0]));
        updates.add(block_sum(squares[1]));
    }
    *param_square = params.total();
    *update_square = updates.total();
}

static void lamb_moments(const Run& run, const MpLamb& s, double* param_square, double* update_square) {
    switch (run.grad_dtype) {
        case MP_BF16: lamb_moments_in<MP_BF16>(run, s, param_square, update_square); break;
        case MP_F16: lamb_moments_in<MP_F16>(run, s, param_square, update_square); break;
        default: lamb_moments_in<MP_F32>(run, s, param_square, update_square);
    }
}

struct LambBody {
    const MpLamb& s;
    float ratio;

    template <int G, int O>
    void operator()(const Run& run) const {
        const MpLamb s = this->s;
        const float ratio = this->ratio;
        for_each_vector<G>(run, [s, ratio](const Run& r, int64_t i) __attribute__((always_inline)) {
            f32x16 p = load<f32x16>(r.main + i);
            p = p - lamb_direction(p, load_moment(r.moment1, i, r.moment1_dtype), load_moment(r.moment2, i, r.moment2_dtype), s) * ratio;
            store(r.main + i, p);
            store_from_f32<O>(r.output, i, p, r.stream);
        });
    }
};

static void lamb_apply(const Run& run, const MpLamb& s, float ratio) { with_dtypes(run, LambBody{s, ratio}); }
