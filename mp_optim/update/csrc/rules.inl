// The rules over sixteen elements. One operation here is one operation of docs/numerics.md: IEEE, rounded once.
// A rule changes p, m and v, and says what the root of the new v is; what it does not use or keep is left alone.
// Included inside a level's namespace, after simd.inl.

// What a rule does with memory.
template <bool reads_grad, bool changes_main, bool has_first, bool has_second, bool changes_moments>
struct Touches {
    static constexpr bool kGrad = reads_grad, kMain = changes_main, kFirst = has_first, kSecond = has_second,
                          kMoments = changes_moments;
};

// g * multiplier, then + p * l2.
MP_INLINE f32x16 gradient(f32x16 g, float multiplier, float l2, f32x16 p) {
    g = g * multiplier;
    if (l2 != 0.0f) g = g + p * l2;
    return g;
}

template <class Scalars>
MP_INLINE f32x16 denominator(f32x16 root, const Scalars& s) {
    return root * s.inv_sqrt_bias2 + s.eps;
}

struct AdamRule : Touches<true, true, true, true, true> {
    MpAdam s;

    MP_MEMBER void operator()(f32x16 g, f32x16& p, f32x16& m, f32x16& v, f32x16& root) const {
        g = gradient(g, s.multiplier, s.l2, p);
        m = m * s.beta1 + g * s.one_minus_beta1;
        v = v * s.beta2 + (g * s.one_minus_beta2) * g;
        root = square_root(v);
        f32x16 u = (m / denominator(root, s)) * s.step_size;
        if (s.decay != 0.0f) p = p - p * s.decay;
        p = p - u;
    }
};

template <bool has_buffer>
struct SgdRule : Touches<true, true, has_buffer, false, has_buffer> {
    MpSgd s;

    MP_MEMBER void operator()(f32x16 g, f32x16& p, f32x16& b, f32x16&, f32x16&) const {
        g = gradient(g, s.multiplier, s.decay, p);
        if (has_buffer) {
            b = s.first ? g : b * s.momentum + g * s.one_minus_dampening;
            g = s.nesterov ? g + b * s.momentum : b;
        }
        p = p - g * s.lr;
    }
};

// -1, +0 or 1; NaN stays NaN.
MP_INLINE f32x16 sign_of(f32x16 x) {
    u32x16 bits = as<u32x16>(x);
    u32x16 one = (bits & 0x80000000) | 0x3f800000;
    u32x16 is_signed = as<u32x16>(x < 0.0f) | as<u32x16>(x > 0.0f), is_nan = as<u32x16>(x != x);
    return as<f32x16>((is_signed & one) | (is_nan & bits));
}

struct LionRule : Touches<true, true, true, false, true> {
    MpLion s;

    MP_MEMBER void operator()(f32x16 g, f32x16& p, f32x16& m, f32x16&, f32x16&) const {
        g = g * s.multiplier;
        f32x16 u = sign_of(m * s.beta1 + g * s.one_minus_beta1) * s.lr;
        if (s.decay != 0.0f) p = p - p * s.decay;
        p = p - u;
        m = m * s.beta2 + g * s.one_minus_beta2;
    }
};

struct LambMomentsRule : Touches<true, false, true, true, true> {
    MpLamb s;

    MP_MEMBER void operator()(f32x16 g, f32x16& p, f32x16& m, f32x16& v, f32x16& root) const {
        g = gradient(g, s.multiplier, s.l2, p);
        m = m * s.beta1 + g * s.grad_weight;
        v = v * s.beta2 + (g * s.one_minus_beta2) * g;
        root = square_root(v);
    }
};

MP_INLINE f32x16 lamb_direction(f32x16 p, f32x16 m, f32x16 v, const MpLamb& s) {
    f32x16 u = (m * s.inv_bias1) / denominator(square_root(v), s);
    if (s.decay != 0.0f) u = u + p * s.decay;
    return u;
}

struct LambApplyRule : Touches<false, true, true, true, false> {
    MpLamb s;
    float ratio;

    MP_MEMBER void operator()(f32x16, f32x16& p, f32x16& m, f32x16& v, f32x16&) const {
        p = p - lamb_direction(p, m, v, s) * ratio;
    }
};
