// Sixteen floats at a time, by the compilers' vector extensions; what those cannot say is said once per level.
// Included inside a level's namespace, with MP_AVX512, MP_AVX2, MP_SSE2, MP_NEON or nothing defined.

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
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

// -- whole numbers ------------------------------------------------------------------------------------

// Sixteen whole numbers of fewer bits. GCC's own conversion of so many lanes takes a detour.
MP_INLINE u32x16 widen(u16x16 x) {
#if defined(MP_AVX512)
    return as<u32x16>(_mm512_cvtepu16_epi32(as<__m256i>(x)));
#elif defined(MP_AVX2)
    __m256i halves[2] = {_mm256_cvtepu16_epi32(load<__m128i>(&x)), _mm256_cvtepu16_epi32(load<__m128i>((const char*)&x + 16))};
    return load<u32x16>(halves);
#else
    return __builtin_convertvector(x, u32x16);
#endif
}

MP_INLINE i32x16 widen(i16x16 x) {
#if defined(MP_AVX512)
    return as<i32x16>(_mm512_cvtepi16_epi32(as<__m256i>(x)));
#elif defined(MP_AVX2)
    __m256i halves[2] = {_mm256_cvtepi16_epi32(load<__m128i>(&x)), _mm256_cvtepi16_epi32(load<__m128i>((const char*)&x + 16))};
    return load<i32x16>(halves);
#else
    return __builtin_convertvector(x, i32x16);
#endif
}

MP_INLINE i32x16 widen(i8x16 x) {
#if defined(MP_AVX512)
    return as<i32x16>(_mm512_cvtepi8_epi32(as<__m128i>(x)));
#elif defined(MP_AVX2)
    __m256i halves[2] = {_mm256_cvtepi8_epi32(as<__m128i>(x)), _mm256_cvtepi8_epi32(_mm_srli_si128(as<__m128i>(x), 8))};
    return load<i32x16>(halves);
#else
    return __builtin_convertvector(x, i32x16);
#endif
}

MP_INLINE i32x16 widen(u8x16 x) {
#if defined(MP_AVX512)
    return as<i32x16>(_mm512_cvtepu8_epi32(as<__m128i>(x)));
#elif defined(MP_AVX2)
    __m256i halves[2] = {_mm256_cvtepu8_epi32(as<__m128i>(x)), _mm256_cvtepu8_epi32(_mm_srli_si128(as<__m128i>(x), 8))};
    return load<i32x16>(halves);
#else
    return __builtin_convertvector(x, i32x16);
#endif
}

MP_INLINE f32x16 to_float(i32x16 x) {
#if defined(MP_AVX512)
    return as<f32x16>(_mm512_cvtepi32_ps(as<__m512i>(x)));
#else
    return __builtin_convertvector(x, f32x16);
#endif
}

// x, + y in the lanes where x is neither 0 nor the sign bit alone.
MP_INLINE u32x16 add_unless_zero(u32x16 x, u32x16 y) {
#if defined(MP_AVX512)
    __mmask16 here = _mm512_test_epi32_mask(as<__m512i>(x), _mm512_set1_epi32(0x7fffffff));
    return as<u32x16>(_mm512_mask_add_epi32(as<__m512i>(x), here, as<__m512i>(x), as<__m512i>(y)));
#else
    return x + (y & as<u32x16>((x & 0x7fffffff) != 0));
#endif
}

// The whole number nearest to each lane, ties to even; of numbers below 2^22.
MP_INLINE i32x16 to_nearest(f32x16 x) {
#if defined(MP_AVX512)
    return as<i32x16>(_mm512_cvtps_epi32(as<__m512>(x)));
#elif defined(MP_AVX2)
    i32x16 r;
    for (int i = 0; i < 2; ++i)
        _mm256_storeu_si256((__m256i*)&r + i, _mm256_cvtps_epi32(_mm256_loadu_ps((const float*)&x + 8 * i)));
    return r;
#else
    return as<i32x16>(x + 0x1.8p23f) - 0x4b400000;  // the sum's last bit is worth 1
#endif
}

// Whole numbers rounded down.
MP_INLINE i32x16 to_floor(f32x16 x) {
    i32x16 cut = __builtin_convertvector(x, i32x16);
    return cut + (to_float(cut) > x);  // a true lane is -1
}

MP_INLINE i32x16 choose(i32x16 where, i32x16 a, i32x16 b) { return (where & a) | (~where & b); }

MP_INLINE i32x16 within(i32x16 x, int32_t low, int32_t high) {
    i32x16 least = i32x16{} + low, most = i32x16{} + high;
    x = choose(x < least, least, x);
    return choose(x > most, most, x);
}

// Larger of each lane.
MP_INLINE u32x16 larger(u32x16 a, u32x16 b) {
#if defined(MP_AVX512)
    return as<u32x16>(_mm512_max_epu32(as<__m512i>(a), as<__m512i>(b)));
#elif defined(MP_AVX2)
    u32x16 r;
    for (int i = 0; i < 2; ++i)
        _mm256_storeu_si256((__m256i*)&r + i, _mm256_max_epu32(_mm256_loadu_si256((const __m256i*)&a + i),
                                                               _mm256_loadu_si256((const __m256i*)&b + i)));
    return r;
#else
    return as<u32x16>(choose(as<i32x16>(a > b), as<i32x16>(a), as<i32x16>(b)));
#endif
}

MP_INLINE uint32_t largest(u32x16 x) {
#if defined(MP_AVX512)
    return _mm512_reduce_max_epu32(as<__m512i>(x));
#else
    uint32_t most = 0;
    for (int i = 0; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// The lower halves of two times sixteen lanes.
MP_INLINE u16x32 lower(u32x16 a, u32x16 b) {
#if defined(MP_AVX512)
    const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                                          24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return as<u16x32>(_mm512_permutex2var_epi16(as<__m512i>(a), even, as<__m512i>(b)));
#elif defined(MP_AVX2)
    u16x32 r;
    const __m256i half = _mm256_set1_epi32(0xffff);
    for (int i = 0; i < 2; ++i) {
        const __m256i* x = (const __m256i*)(i ? &b : &a);
        __m256i packed = _mm256_packus_epi32(_mm256_and_si256(_mm256_loadu_si256(x), half),
                                             _mm256_and_si256(_mm256_loadu_si256(x + 1), half));
        _mm256_storeu_si256((__m256i*)&r + i, _mm256_permute4x64_epi64(packed, 0xd8));
    }
    return r;
#else
    u16x16 halves[2] = {__builtin_convertvector(a, u16x16), __builtin_convertvector(b, u16x16)};
    return load<u16x32>(halves);
#endif
}

// The upper ones.
MP_INLINE u16x32 upper(u32x16 a, u32x16 b) {
#if defined(MP_AVX512)
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return as<u16x32>(_mm512_permutex2var_epi16(as<__m512i>(a), odd, as<__m512i>(b)));
#else
    return lower(a >> 16, b >> 16);
#endif
}

// The upper halves of 32 lanes.
MP_INLINE void store_upper_bytes(void* to, u16x32 x) {
    x = x >> 8;
#if defined(MP_AVX512)
    store(to, _mm512_cvtepi16_epi8(as<__m512i>(x)));
#elif defined(MP_AVX2)
    const __m256i* halves = (const __m256i*)&x;
    __m256i bytes = _mm256_packus_epi16(_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(bytes, 0xd8));
#else
    u16x16 halves[2];
    store(halves, x);
    for (int i = 0; i < 2; ++i) store((char*)to + 16 * i, __builtin_convertvector(halves[i], u8x16));
#endif
}

// Four times sixteen lanes as bytes: of numbers within the bounds of the byte, signed or not.
template <bool is_signed>
MP_INLINE void store_bytes(void* to, i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
#if defined(MP_AVX512)
    __m512i ab = _mm512_packs_epi32(as<__m512i>(a), as<__m512i>(b));
    __m512i cd = _mm512_packs_epi32(as<__m512i>(c), as<__m512i>(d));
    __m512i bytes = is_signed ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
#elif defined(MP_AVX2)
    const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
    for (int i = 0; i < 2; ++i) {
        const __m256i *x = (const __m256i*)(i ? &c : &a), *y = (const __m256i*)(i ? &d : &b);
        __m256i xs = _mm256_packs_epi32(_mm256_loadu_si256(x), _mm256_loadu_si256(x + 1));
        __m256i ys = _mm256_packs_epi32(_mm256_loadu_si256(y), _mm256_loadu_si256(y + 1));
        __m256i bytes = is_signed ? _mm256_packs_epi16(xs, ys) : _mm256_packus_epi16(xs, ys);
        _mm256_storeu_si256((__m256i*)to + i, _mm256_permutevar8x32_epi32(bytes, order));
    }
#else
    const i32x16 all[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) store((char*)to + 16 * i, __builtin_convertvector(as<u32x16>(all[i]), u8x16));
#endif
}

// -- 16-bit floats ------------------------------------------------------------------------------------

// FP32 bits whose upper halves are given.
MP_INLINE u32x16 shifted_up(u16x16 bits) { return widen(bits) << 16; }

MP_INLINE f32x16 from_bf16(u16x16 bits) { return as<f32x16>(shifted_up(bits)); }

MP_INLINE u32x16 quiet_bits(f32x16 x) {
    u32x16 bits = as<u32x16>(x), is_nan = as<u32x16>((bits & 0x7fffffff) > 0x7f800000);
    return (is_nan & 0x7fc00000) | (~is_nan & bits);
}

// The bits of two times sixteen floats; every NaN becomes the quiet one.
MP_INLINE void quiet_bits(f32x16 a, f32x16 b, u32x16& a_bits, u32x16& b_bits) {
#if defined(MP_AVX512)
    a_bits = as<u32x16>(a), b_bits = as<u32x16>(b);
    if (__builtin_expect(_mm512_cmp_ps_mask(as<__m512>(a), as<__m512>(b), _CMP_UNORD_Q) == 0, 1)) return;
#endif
    a_bits = quiet_bits(a), b_bits = quiet_bits(b);
}

// To nearest even: one more if the lower half is above its middle, or in the middle and the upper half odd.
MP_INLINE u16x32 to_bf16(f32x16 a, f32x16 b) {
    u32x16 a_bits, b_bits;
    quiet_bits(a, b, a_bits, b_bits);
    u16x32 high = upper(a_bits, b_bits), low = lower(a_bits, b_bits);
#if defined(MP_AVX512)
    const __m512i one = _mm512_set1_epi16(1), middle = _mm512_set1_epi16(short(0x8000));
    __m512i rest = _mm512_ternarylogic_epi32(as<__m512i>(low), as<__m512i>(high), one, 0xf8);  // low | (high & 1)
    return as<u16x32>(_mm512_mask_add_epi16(as<__m512i>(high), _mm512_cmpgt_epu16_mask(rest, middle), as<__m512i>(high), one));
#else
    return high - as<u16x32>((low | (high & 1)) > 0x8000);  // a true lane is -1
#endif
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

// 64 bytes to an address that is a multiple of 32, past the caches where the machine can.
MP_INLINE void store_past_caches(void* p, u16x32 value) {
#if defined(MP_AVX512) || defined(MP_AVX2)
    for (int i = 0; i < 2; ++i) _mm256_stream_si256((__m256i*)p + i, load<__m256i>((const __m256i*)&value + i));
#elif defined(MP_SSE2)
    for (int i = 0; i < 4; ++i) _mm_stream_si128((__m128i*)p + i, load<__m128i>((const __m128i*)&value + i));
#else
    store(p, value);
#endif
}

MP_INLINE void finish_streaming() {
#if defined(MP_AVX512) || defined(MP_AVX2) || defined(MP_SSE2)
    _mm_sfence();
#endif
}
