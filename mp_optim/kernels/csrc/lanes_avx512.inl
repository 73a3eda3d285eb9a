// Vectors of AVX-512: sixteen FP32 lanes in a register.

MP_VECTOR(float, f32x16, 64);
MP_VECTOR(uint32_t, u32x16, 64);
MP_VECTOR(int32_t, i32x16, 64);
MP_VECTOR(uint16_t, u16x32, 64);
MP_VECTOR(uint16_t, u16x16, 32);
MP_VECTOR(int16_t, i16x16, 32);
MP_VECTOR(double, f64x8, 64);

// Returns the correctly rounded square root of each lane.
MP_INLINE f32x16 square_root(f32x16 x) { return as<f32x16>(_mm512_sqrt_ps(as<__m512>(x))); }

// Returns acc + x * x. The square of an FP32 value is exact in FP64, so a fused multiply-add gives the same result.
MP_INLINE f64x8 add_square(f64x8 acc, f64x8 x) {
    return as<f64x8>(_mm512_fmadd_pd(as<__m512d>(x), as<__m512d>(x), as<__m512d>(acc)));
}

MP_INLINE f64x8 read_as_f64(const float* p) { return as<f64x8>(_mm512_cvtps_pd(_mm256_loadu_ps(p))); }

// Returns the first and the last eight lanes.
MP_INLINE f64x8 low_as_f64(f32x16 x) { return as<f64x8>(_mm512_cvtps_pd(_mm512_castps512_ps256(as<__m512>(x)))); }
MP_INLINE f64x8 high_as_f64(f32x16 x) { return as<f64x8>(_mm512_cvtps_pd(_mm512_extractf32x8_ps(as<__m512>(x), 1))); }

// Returns base + x * factor, computed in FP64, where the product is exact, and rounded to FP32.
MP_INLINE f32x16 add_in_double(f32x16 base, f32x16 x, float factor) {
    const __m512d factors = _mm512_set1_pd(double(factor));
    __m512d low = _mm512_fmadd_pd(as<__m512d>(low_as_f64(x)), factors, as<__m512d>(low_as_f64(base)));
    __m512d high = _mm512_fmadd_pd(as<__m512d>(high_as_f64(x)), factors, as<__m512d>(high_as_f64(base)));
    return as<f32x16>(_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1));
}

// -- reading 8 and 16 bits ----------------------------------------------------------------------------

// Returns sixteen 16-bit integers as the upper halves of 32-bit lanes.
MP_INLINE u32x16 read_upper(const void* p) {
    const __m512i order = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4,
                                           0, 3, 0, 2, 0, 1, 0, 0, 0);
    __m512i words = _mm512_castsi256_si512(load<__m256i>(p));
    return as<u32x16>(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, order, words));
}

MP_INLINE i32x16 read_i16(const void* p) { return as<i32x16>(_mm512_cvtepi16_epi32(load<__m256i>(p))); }
MP_INLINE i32x16 read_u8(const void* p) { return as<i32x16>(_mm512_cvtepu8_epi32(load<__m128i>(p))); }
MP_INLINE i32x16 read_i8(const void* p) { return as<i32x16>(_mm512_cvtepi8_epi32(load<__m128i>(p))); }
MP_INLINE f32x16 read_f16(const void* p) { return as<f32x16>(_mm512_cvtph_ps(load<__m256i>(p))); }

// -- lanes --------------------------------------------------------------------------------------------

MP_INLINE f32x16 to_float(i32x16 x) { return as<f32x16>(_mm512_cvtepi32_ps(as<__m512i>(x))); }
MP_INLINE i32x16 to_whole(f32x16 x) { return as<i32x16>(_mm512_cvttps_epi32(as<__m512>(x))); }

// Returns the integer nearest to each lane, ties to even, for magnitudes below 2^22.
MP_INLINE i32x16 to_nearest(f32x16 x) { return as<i32x16>(_mm512_cvtps_epi32(as<__m512>(x))); }

MP_INLINE u32x16 larger(u32x16 a, u32x16 b) {
    return as<u32x16>(_mm512_max_epu32(as<__m512i>(a), as<__m512i>(b)));
}

MP_INLINE uint32_t largest(u32x16 x) { return _mm512_reduce_max_epu32(as<__m512i>(x)); }

// Returns x + y in the lanes where x is neither +0 nor -0. An infinity stays if the sum would be NaN.
MP_INLINE u32x16 joined(u32x16 x, u32x16 y) {
    // GCC loads this constant from memory, whereas it would build an integer constant with shuffles.
    const __m512 magnitude = _mm512_set1_ps(as<float>(0x7fffffff));
    const __m512i upper = as<__m512i>(x);
    const __mmask16 here = _mm512_test_epi32_mask(upper, as<__m512i>(magnitude));
    const __mmask16 infinite =
        _mm512_cmpeq_epi32_mask(_mm512_and_si512(upper, as<__m512i>(magnitude)), _mm512_set1_epi32(0x7f800000));
    const __m512i sum = _mm512_mask_add_epi32(upper, here, upper, as<__m512i>(y));
    return as<u32x16>(_mm512_mask_min_epu32(sum, infinite, sum, upper));
}

MP_INLINE u16x32 add_one_where_above(u16x32 x, u16x32 y, uint16_t limit) {
    __mmask32 here = _mm512_cmpgt_epu16_mask(as<__m512i>(y), _mm512_set1_epi16(short(limit)));
    return as<u16x32>(_mm512_mask_add_epi16(as<__m512i>(x), here, as<__m512i>(x), _mm512_set1_epi16(1)));
}

// Returns a bit for each lane: lanes that differ, and lanes above a limit.
MP_INLINE uint32_t lanes_other(u16x32 x, u16x32 y) { return _mm512_cmpneq_epi16_mask(as<__m512i>(x), as<__m512i>(y)); }
MP_INLINE uint32_t lanes_above(u16x32 x, uint16_t limit) {
    return _mm512_cmpgt_epu16_mask(as<__m512i>(x), _mm512_set1_epi16(short(limit)));
}

// Returns true if any lane is above the limit.
MP_INLINE bool any_above(u16x32 x, uint16_t limit) { return __builtin_expect(lanes_above(x, limit) != 0, 0); }

MP_INLINE bool may_have_nan(f32x16 a, f32x16 b) {
    return __builtin_expect(_mm512_cmp_ps_mask(as<__m512>(a), as<__m512>(b), _CMP_UNORD_Q) != 0, 0);
}

// -- narrowing ----------------------------------------------------------------------------------------

// Returns the lower and the upper halves of 32 lanes. Halves are first joined within 128 bits: two 16-bit shuffles of
// two registers would take three times as long as 64-bit shuffles.
MP_INLINE void halves(u32x16 a, u32x16 b, u16x32& low, u16x32& high) {
    const __m512i apart = _mm512_broadcast_i32x4(_mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0));
    const __m512i lows = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0), highs = _mm512_set_epi64(15, 13, 11, 9, 7, 5, 3, 1);
    __m512i from_a = _mm512_shuffle_epi8(as<__m512i>(a), apart), from_b = _mm512_shuffle_epi8(as<__m512i>(b), apart);
    low = as<u16x32>(_mm512_permutex2var_epi64(from_a, lows, from_b));
    high = as<u16x32>(_mm512_permutex2var_epi64(from_a, highs, from_b));
}

// Converts 64 lanes to bytes. Values are within the range of the byte; unsigned codes are at least 1.
template <bool is_signed>
MP_INLINE void store_bytes(void* to, i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
    __m512i ab = _mm512_packs_epi32(as<__m512i>(a), as<__m512i>(b));
    __m512i cd = _mm512_packs_epi32(as<__m512i>(c), as<__m512i>(d));
    __m512i bytes = is_signed ? _mm512_packs_epi16(ab, cd)
                              : _mm512_max_epu8(_mm512_packus_epi16(ab, cd), _mm512_set1_epi8(1));
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    store(to, _mm512_permutexvar_epi32(order, bytes));
}

// Returns the upper halves of 32 lanes.
MP_INLINE void store_upper_bytes(void* to, u16x32 x) { store(to, _mm512_cvtepi16_epi8(as<__m512i>(x >> 8))); }

MP_INLINE u16x16 to_f16(f32x16 x) { return as<u16x16>(_mm512_cvtps_ph(as<__m512>(x), _MM_FROUND_TO_NEAREST_INT)); }

// Stores 64 bytes at a multiple of 32, past the caches if the CPU supports that.
MP_INLINE void store_past_caches(void* p, u16x32 value) {
    __m512i bits = as<__m512i>(value);
    _mm256_stream_si256((__m256i*)p, _mm512_castsi512_si256(bits));
    _mm256_stream_si256((__m256i*)p + 1, _mm512_extracti64x4_epi64(bits, 1));
}

MP_INLINE void finish_streaming() { _mm_sfence(); }
