// Sixteen floats at a time, by the compilers' vector extensions; what those cannot say is said once per level.
// Included inside a level's namespace, with MP_AVX512, MP_AVX2, MP_SSE2, MP_NEON or nothing defined.

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));

#define MP_INLINE static inline __attribute__((always_inline))

constexpr int kLanes = 16;

template <class To, class From>
MP_INLINE To as(const From& value) {
    static_assert(sizeof(To) == sizeof(From), "as() reinterprets bits");
    To result;
    __builtin_memcpy(&result, &value, sizeof(To));
    return result;
}

template <class T>
MP_INLINE T load(const void* p) {
    T value;
    __builtin_memcpy(&value, p, sizeof(T));
    return value;
}

template <class T>
MP_INLINE void store(void* p, const T& value) {
    __builtin_memcpy(p, &value, sizeof(T));
}

MP_INLINE f32x16 splat(float x) { return f32x16{} + x; }

// Correctly rounded square root of each lane.
MP_INLINE f32x16 square_root(f32x16 x) {
#if defined(MP_AVX512)
    return as<f32x16>(_mm512_sqrt_ps(as<__m512>(x)));
#else
    f32x16 r;
#if defined(MP_AVX2)
    for (int i = 0; i < 2; ++i)
        _mm256_storeu_ps((float*)&r + 8 * i, _mm256_sqrt_ps(_mm256_loadu_ps((const float*)&x + 8 * i)));
#elif defined(MP_SSE2)
    for (int i = 0; i < 4; ++i) _mm_storeu_ps((float*)&r + 4 * i, _mm_sqrt_ps(_mm_loadu_ps((const float*)&x + 4 * i)));
#elif defined(MP_NEON)
    for (int i = 0; i < 4; ++i) vst1q_f32((float*)&r + 4 * i, vsqrtq_f32(vld1q_f32((const float*)&x + 4 * i)));
#else
    for (int i = 0; i < kLanes; ++i) r[i] = __builtin_sqrtf(x[i]);
#endif
    return r;
#endif
}

// acc + x * x. The square of an FP32 value is exact in FP64, so a fused multiply-add rounds the same way.
MP_INLINE f64x8 add_square(f64x8 acc, f64x8 x) {
#if defined(MP_AVX512)
    return as<f64x8>(_mm512_fmadd_pd(as<__m512d>(x), as<__m512d>(x), as<__m512d>(acc)));
#elif defined(MP_AVX2)
    f64x8 r;
    for (int i = 0; i < 2; ++i) {
        __m256d half = _mm256_loadu_pd((const double*)&x + 4 * i);
        _mm256_storeu_pd((double*)&r + 4 * i, _mm256_fmadd_pd(half, half, _mm256_loadu_pd((const double*)&acc + 4 * i)));
    }
    return r;
#else
    return acc + x * x;
#endif
}

// Eight floats in memory as doubles, in one instruction where there is one.
MP_INLINE f64x8 load_as_f64(const float* p) {
#if defined(MP_AVX512)
    return as<f64x8>(_mm512_cvtps_pd(_mm256_loadu_ps(p)));
#else
    return __builtin_convertvector(load<f32x8>(p), f64x8);
#endif
}

// -- 16-bit floats ------------------------------------------------------------------------------------

MP_INLINE f32x16 from_bf16(u16x16 bits) { return as<f32x16>(__builtin_convertvector(bits, u32x16) << 16); }

// To nearest even; every NaN becomes the quiet one.
MP_INLINE u16x16 to_bf16(f32x16 x) {
    u32x16 bits = as<u32x16>(x);
    u32x16 rounded = (bits + (((bits >> 16) & 1) + 0x7fff)) >> 16;
    u32x16 is_nan = as<u32x16>((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), u16x16);
}

MP_INLINE float half_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) return as<float>(sign | 0x7f800000 | ((magnitude & 0x3ff) << 13));
    if (magnitude >= 0x0400) return as<float>(sign | ((magnitude + 0x1c000) << 13));
    float tiny = float(magnitude) * 0x1p-24f;  // exact
    return as<float>(sign | as<uint32_t>(tiny));
}

MP_INLINE uint16_t float_to_half(float x) {
    uint32_t bits = as<uint32_t>(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and above
    if (magnitude < 0x38800000)  // below the normal range: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
        return uint16_t(sign | (as<uint32_t>(as<float>(magnitude) + 0.5f) - 0x3f000000));
    return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

MP_INLINE f32x16 from_f16(u16x16 bits) {
#if defined(MP_AVX512)
    return as<f32x16>(_mm512_cvtph_ps(as<__m256i>(bits)));
#else
    f32x16 r;
#if defined(MP_AVX2)
    for (int i = 0; i < 2; ++i)
        _mm256_storeu_ps((float*)&r + 8 * i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)&bits + i)));
#elif defined(MP_NEON)
    for (int i = 0; i < 4; ++i)
        vst1q_f32((float*)&r + 4 * i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)&bits + 4 * i))));
#else
    for (int i = 0; i < kLanes; ++i) r[i] = half_to_float(bits[i]);
#endif
    return r;
#endif
}

MP_INLINE u16x16 to_f16(f32x16 x) {
#if defined(MP_AVX512)
    return as<u16x16>(_mm512_cvtps_ph(as<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
#else
    u16x16 r;
#if defined(MP_AVX2)
    for (int i = 0; i < 2; ++i)
        _mm_storeu_si128((__m128i*)&r + i,
                         _mm256_cvtps_ph(_mm256_loadu_ps((const float*)&x + 8 * i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(MP_NEON)
    for (int i = 0; i < 4; ++i)
        vst1_u16((uint16_t*)&r + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32((const float*)&x + 4 * i))));
#else
    for (int i = 0; i < kLanes; ++i) r[i] = float_to_half(x[i]);
#endif
    return r;
#endif
}

// 32 bytes to an address that is a multiple of 32, past the caches where the machine can.
MP_INLINE void store_past_caches(void* p, u16x16 value) {
#if defined(MP_AVX512) || defined(MP_AVX2)
    _mm256_stream_si256((__m256i*)p, as<__m256i>(value));
#elif defined(MP_SSE2)
    for (int i = 0; i < 2; ++i) _mm_stream_si128((__m128i*)p + i, load<__m128i>((const __m128i*)&value + i));
#else
    store(p, value);
#endif
}

MP_INLINE void finish_streaming() {
#if defined(MP_AVX512) || defined(MP_AVX2) || defined(MP_SSE2)
    _mm_sfence();
#endif
}
