// The rules for sixteen elements. Each operation is one operation of docs/numerics.md: IEEE, rounded once. A rule
// updates p, m and v, and returns the root of the new v in `root`. It does not change values that it does not use.
// Included inside a level's namespace, after drivers.inl.

// The memory that a rule reads and writes. A rule without main params computes p from g, m and v, and writes only the
// output.
template <bool reads_grad, bool changes_main, bool has_first, bool has_second, bool changes_moments, bool has_main = true>
struct Touches {
    static constexpr bool kGrad = reads_grad, kMain = changes_main, kFirst = has_first, kSecond = has_second,
                          kMoments = changes_moments, kHasMain = has_main;

    // Called with the updated p, m and v of the run's elements [i, i + 16).
    MP_MEMBER void look(int64_t, f32x16, f32x16, f32x16) const {}
};

// A factor whose term is left out if the factor is 0, because 0 * inf is NaN.
struct MaybeFactor {
    f32x16 factor;
    int present;

    explicit MaybeFactor(float value) : factor(splat<f32x16>(value)), present(value != 0.0f) {
        // The asm keeps the flag in a general register, so that a branch on it needs no vector comparison.
        __asm__("" : "+r"(present));
    }
};

// Returns g * multiplier + p * l2, rounded after each operation.
MP_INLINE f32x16 gradient(f32x16 g, float multiplier, const MaybeFactor& l2, f32x16 p) {
    g = g * multiplier;
    if (l2.present) g = g + p * l2.factor;
    return g;
}

// Returns a mask of the lanes where one value is positive and the other negative.
MP_INLINE u32x16 are_opposed(f32x16 a, f32x16 b) {
    return (as<u32x16>(a > 0.0f) & as<u32x16>(b < 0.0f)) | (as<u32x16>(a < 0.0f) & as<u32x16>(b > 0.0f));
}

// Decays p by a factor. With cautious decay, an element does not decay if the step u moves it away from 0.
struct Decay : MaybeFactor {
    int is_cautious;

    Decay(float value, float cautious) : MaybeFactor(value), is_cautious(cautious != 0.0f) {
        __asm__("" : "+r"(is_cautious));
    }
};

MP_INLINE f32x16 decayed(f32x16 p, f32x16 u, const Decay& decay) {
    if (!decay.present) return p;
    f32x16 part = p * decay.factor;
    if (decay.is_cautious) part = as<f32x16>(as<u32x16>(part) & ~are_opposed(p, u));
    return p - part;
}

template <class Scalars>
MP_INLINE f32x16 denominator(f32x16 root, const Scalars& s) {
    return root * s.inv_sqrt_bias2 + s.eps;
}

struct AdamRule : Touches<true, true, true, true, true> {
    MpAdam s;
    MaybeFactor l2{s.l2};
    Decay decay{s.decay, s.cautious_wd};

    explicit AdamRule(const MpAdam& scalars) : s(scalars) {}

    MP_MEMBER void operator()(f32x16 g, f32x16& p, f32x16& m, f32x16& v, f32x16& root) const {
        g = gradient(g, s.multiplier, l2, p);
        m = m * s.beta1 + g * s.one_minus_beta1;
        v = v * s.beta2 + (g * s.one_minus_beta2) * g;
        root = square_root(v);
        const f32x16 u = (m / denominator(root, s)) * s.step_size;
        p = decayed(p, u, decay) - u;
    }
};

struct Sgd {
    float multiplier, lr, momentum, one_minus_dampening, decay, nesterov, first;  // The last two are 0 or 1.
};

template <bool has_buffer>
struct SgdRule : Touches<true, true, has_buffer, false, has_buffer> {
    Sgd s;
    MaybeFactor decay{s.decay}, nesterov{s.nesterov}, starts{s.first};

    explicit SgdRule(const Sgd& scalars) : s(scalars) {}

    MP_MEMBER void operator()(f32x16 g, f32x16& p, f32x16& b, f32x16&, f32x16&) const {
        g = gradient(g, s.multiplier, decay, p);
        if (has_buffer) {
            b = starts.present ? g : bounded(b * s.momentum + g * s.one_minus_dampening, is_finite(g));
            g = nesterov.present ? g + b * s.momentum : b;
        }
        p = p - g * s.lr;
    }
};

// Returns -1, +0 or 1; NaN for NaN.
MP_INLINE f32x16 sign_of(f32x16 x) {
    u32x16 bits = as<u32x16>(x);
    u32x16 one = (bits & 0x80000000) | 0x3f800000;
    u32x16 is_signed = as<u32x16>(x < 0.0f) | as<u32x16>(x > 0.0f), is_nan = as<u32x16>(x != x);
    return as<f32x16>((is_signed & one) | (is_nan & bits));
}

struct Lion {
    float multiplier, beta1, one_minus_beta1, beta2, one_minus_beta2, lr, decay, cautious_wd;
};

struct LionRule : Touches<true, true, true, false, true> {
    Lion s;
    Decay decay{s.decay, s.cautious_wd};

    explicit LionRule(const Lion& scalars) : s(scalars) {}

    MP_MEMBER void operator()(f32x16 g, f32x16& p, f32x16& m, f32x16&, f32x16&) const {
        g = g * s.multiplier;
        const f32x16 u = sign_of(m * s.beta1 + g * s.one_minus_beta1) * s.lr;
        p = decayed(p, u, decay) - u;
        m = m * s.beta2 + g * s.one_minus_beta2;
    }
};

struct LambMomentsRule : Touches<true, false, true, true, true> {
    MpLamb s;
    MaybeFactor l2{s.l2};

    explicit LambMomentsRule(const MpLamb& scalars) : s(scalars) {}

    MP_MEMBER void operator()(f32x16 g, f32x16& p, f32x16& m, f32x16& v, f32x16& root) const {
        g = gradient(g, s.multiplier, l2, p);
        m = bounded(m * s.beta1 + g * s.grad_weight, is_finite(g));
        v = v * s.beta2 + (g * s.one_minus_beta2) * g;
        root = square_root(v);
    }
};

MP_INLINE f32x16 lamb_direction(f32x16 p, f32x16 m, f32x16 v, const MpLamb& s, const MaybeFactor& decay) {
    f32x16 u = bounded(m * s.inv_bias1, is_finite(m)) / denominator(square_root(v), s);
    if (decay.present) u = u + p * decay.factor;
    return u;
}

// Also computes LAMB's direction from the new moments. The direction must be that of the stored moments, so use this rule
// only if moments are stored in FP32.
struct LambWholeRule : LambMomentsRule {
    MaybeFactor decay{s.decay};
    float *params, *updates;

    LambWholeRule(const MpLamb& scalars, float* to_params, float* to_updates)
        : LambMomentsRule(scalars), params(to_params), updates(to_updates) {}

    MP_MEMBER void look(int64_t i, f32x16 p, f32x16 m, f32x16 v) const {
        store(params + i, p);
        store(updates + i, lamb_direction(p, m, v, s, decay));
    }
};

struct LambApplyRule : Touches<false, true, true, true, false> {
    MpLamb s;
    float ratio;
    MaybeFactor decay{s.decay};

    LambApplyRule(const MpLamb& scalars, float its_ratio) : s(scalars), ratio(its_ratio) {}

    MP_MEMBER void operator()(f32x16, f32x16& p, f32x16& m, f32x16& v, f32x16&) const {
        p = p - lamb_direction(p, m, v, s, decay) * ratio;
    }
};

// Returns one of two values plus a multiple of their difference, like torch.lerp. Product and sum are computed in FP64
// and rounded once. A difference of finite values is clamped if it overflows.
MP_INLINE f32x16 blended(f32x16 start, f32x16 end, float factor, bool from_end) {
    return add_in_double(from_end ? end : start, bounded(end - start, is_finite(start) & is_finite(end)), factor);
}

struct MuonMomentumRule : Touches<true, true, true, false, true, false> {
    MpMuon s;

    explicit MuonMomentumRule(const MpMuon& scalars) : s(scalars) {}

    MP_MEMBER void operator()(f32x16 g, f32x16& p, f32x16& m, f32x16&, f32x16&) const {
        g = g * s.multiplier;
        m = blended(m, g, s.average, s.average_from_end);
        p = s.nesterov ? blended(g, m, s.ahead, s.ahead_from_end) : m;
    }
};

struct MuonApplyRule : Touches<true, true, false, false, false> {
    Decay decay;
    float factor;

    MuonApplyRule(float its_decay, bool cautious_wd, float its_factor) : decay(its_decay, cautious_wd), factor(its_factor) {}

    MP_MEMBER void operator()(f32x16 g, f32x16& p, f32x16&, f32x16&, f32x16&) const {
        const f32x16 u = g * factor;
        p = decayed(p, u, decay) - u;
    }
};

// -- rules that step each element independently -------------------------------------------------------

// Runs a rule with moments of these dtypes and main params of any dtype.
template <int32_t first, int32_t second, class Rule>
MP_INLINE bool run_special_moments(const Run& run, const Rule& rule) {
    return run_special<MP_NONE, first, second>(run, rule) || run_special<MP_I16, first, second>(run, rule) ||
           run_special<MP_I8, first, second>(run, rule);
}

static void adam(const Run& run, const MpAdam& s) {
    const AdamRule rule(s);
    if (!run_special<MP_NONE, MP_F32, MP_F32>(run, rule) && !run_special<MP_I16, MP_F32, MP_F32>(run, rule) &&
        !run_special_moments<MP_BF16, MP_BF16>(run, rule) && !run_special_moments<MP_F16, MP_F16>(run, rule) &&
        !run_special_moments<MP_I8, MP_U8>(run, rule) && !run_special_moments<MP_I4, MP_U8>(run, rule))
        run_rule(run, rule);
}

static void sgd(const Run& run, const Sgd& s) {
    if (run.moment1.data)
        run_rule(run, SgdRule<true>(s));
    else
        run_rule(run, SgdRule<false>(s));
}

static void lion(const Run& run, const Lion& s) { run_rule(run, LionRule(s)); }

template <class Scalars>
MP_INLINE Scalars read_scalars(const float* from) {
    Scalars scalars;
    __builtin_memcpy(&scalars, from, sizeof(scalars));
    return scalars;
}

// A row of kRules. `moments` are the moments that the rule requires.
template <class Scalars, void (*step)(const Run&, const Scalars&), int moments>
constexpr ElementRule row_of(const char* name) {
    static_assert(sizeof(Scalars) % sizeof(float) == 0, "scalars are floats");
    return {name, int32_t(sizeof(Scalars) / sizeof(float)),
            moments,
            [](const Run& run, const float* s) { step(run, read_scalars<Scalars>(s)); }};
}

// All rules that step each element independently. The scalars are in the order of the rule's class in
// kernels/kernel_args.py.
static const ElementRule kRules[] = {
    row_of<MpAdam, adam, 1 | 2>("adam"),
    row_of<Sgd, sgd, 0>("sgd"),
    row_of<Lion, lion, 1>("lion"),
    {nullptr, 0, 0, nullptr},
};
