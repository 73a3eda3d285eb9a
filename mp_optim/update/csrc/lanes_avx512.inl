// Sixteen lanes in one register.

MP_VECTOR(float, f32x16, 64);
MP_VECTOR(uint32_t, u32x16, 64);
MP_VECTOR(int32_t, i32x16, 64);
MP_VECTOR(uint16_t, u16x32, 64);
MP_VECTOR(uint16_t, u16x16, 32);
MP_VECTOR(int16_t, i16x16, 32);
MP_VECTOR(double, f64x8, 64);

// Correctly rounded square root of each lane.
MP_INLINE f32x16 square_root(f32x16 x) { return as<f32x16>(_mm512_sqrt_ps(as<__m512>(x))); }

// acc + x * x. The square of an FP32 value is exact in FP64, so a fused multiply-add rounds the same way.
MP_INLINE f64x8 add_square(f64x8 acc, f64x8 x) {
    return as<f64x8>(_mm512_fmadd_pd(as<__m512d>(x), as<__m512d>(x), as<__m512d>(acc)));
}

MP_INLINE f64x8 read_as_f64(const float* p) { return as<f64x8>(_mm512_cvtps_pd(_mm256_loadu_ps(p))); }

// -- reading fewer bits -------------------------------------------------------------------------------

MP_INLINE u32x16 read_u16(const void* p) { return as<u32x16>(_mm512_cvtepu16_epi32(load<__m256i>(p))); }
MP_INLINE i32x16 read_i16(const void* p) { return as<i32x16>(_mm512_cvtepi16_epi32(load<__m256i>(p))); }
MP_INLINE i32x16 read_u8(const void* p) { return as<i32x16>(_mm512_cvtepu8_epi32(load<__m128i>(p))); }
MP_INLINE i32x16 read_i8(const void* p) { return as<i32x16>(_mm512_cvtepi8_epi32(load<__m128i>(p))); }
MP_INLINE f32x16 read_f16(const void* p) { return as<f32x16>(_mm512_cvtph_ps(load<__m256i>(p))); }

// -- lanes --------------------------------------------------------------------------------------------

MP_INLINE f32x16 to_float(i32x16 x) { return as<f32x16>(_mm512_cvtepi32_ps(as<__m512i>(x))); }
MP_INLINE i32x16 to_whole(f32x16 x) { return as<i32x16>(_mm512_cvttps_epi32(as<__m512>(x))); }

// The whole number nearest to each lane, ties to even; of numbers below 2^22.
MP_INLINE i32x16 to_nearest(f32x16 x) { return as<i32x16>(_mm512_cvtps_epi32(as<__m512>(x))); }

MP_INLINE u32x16 larger(u32x16 a, u32x16 b) {
    return as<u32x16>(_mm512_max_epu32(as<__m512i>(a), as<__m512i>(b)));
}

MP_INLINE uint32_t largest(u32x16 x) { return _mm512_reduce_max_epu32(as<__m512i>(x)); }

// x, + y in the lanes where x is neither 0 nor the sign bit alone.
MP_INLINE u32x16 add_unless_zero(u32x16 x, u32x16 y) {
    __mmask16 here = _mm512_test_epi32_mask(as<__m512i>(x), _mm512_set1_epi32(0x7fffffff));
    return as<u32x16>(_mm512_mask_add_epi32(as<__m512i>(x), here, as<__m512i>(x), as<__m512i>(y)));
}

MP_INLINE u16x32 add_one_where_above(u16x32 x, u16x32 y, uint16_t limit) {
    __mmask32 here = _mm512_cmpgt_epu16_mask(as<__m512i>(y), _mm512_set1_epi16(short(limit)));
    return as<u16x32>(_mm512_mask_add_epi16(as<__m512i>(x), here, as<__m512i>(x), _mm512_set1_epi16(1)));
}

MP_INLINE bool may_have_nan(f32x16 a, f32x16 b) {
    return __builtin_expect(_mm512_cmp_ps_mask(as<__m512>(a), as<__m512>(b), _CMP_UNORD_Q) != 0, 0);
}

// -- narrowing ----------------------------------------------------------------------------------------

// The lower and the upper halves of two times sixteen lanes.
MP_INLINE u16x32 lower(u32x16 a, u32x16 b) {
    const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                                          24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return as<u16x32>(_mm512_permutex2var_epi16(as<__m512i>(a), even, as<__m512i>(b)));
}

MP_INLINE u16x32 upper(u32x16 a, u32x16 b) {
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return as<u16x32>(_mm512_permutex2var_epi16(as<__m512i>(a), odd, as<__m512i>(b)));
}

// Four times sixteen lanes as bytes: of numbers within the bounds of the byte, signed or not.
template <bool is_signed>
MP_INLINE void store_bytes(void* to, i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
    __m512i ab = _mm512_packs_epi32(as<__m512i>(a), as<__m512i>(b));
    __m512i cd = _mm512_packs_epi32(as<__m512i>(c), as<__m512i>(d));
    __m512i bytes = is_signed ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    store(to, _mm512_permutexvar_epi32(order, bytes));
}

// The upper halves of 32 lanes.
MP_INLINE void store_upper_bytes(void* to, u16x32 x) { store(to, _mm512_cvtepi16_epi8(as<__m512i>(x >> 8))); }

MP_INLINE u16x16 to_f16(f32x16 x) { return as<u16x16>(_mm512_cvtps_ph(as<__m512>(x), _MM_FROUND_TO_NEAREST_INT)); }

// 64 bytes to an address that is a multiple of 32, past the caches where the machine can.
MP_INLINE void store_past_caches(void* p, u16x32 value) {
    __m512i bits = as<__m512i>(value);
    _mm256_stream_si256((__m256i*)p, _mm512_castsi512_si256(bits));
    _mm256_stream_si256((__m256i*)p + 1, _mm512_extracti64x4_epi64(bits, 1));
}

MP_INLINE void finish_streaming() { _mm_sfence(); }
