// Vectors of AVX2: eight FP32 lanes in a register.

MP_VECTOR(float, f32xn, 32);
MP_VECTOR(uint32_t, u32xn, 32);
MP_VECTOR(int32_t, i32xn, 32);
MP_VECTOR(uint16_t, u16x2n, 32);
MP_VECTOR(int16_t, i16x2n, 32);
MP_VECTOR(double, f64xn, 32);

MP_INLINE f32xn square_root(f32xn x) { return as<f32xn>(_mm256_sqrt_ps(as<__m256>(x))); }

MP_INLINE f64xn add_square(f64xn acc, f64xn x) {
    return as<f64xn>(_mm256_fmadd_pd(as<__m256d>(x), as<__m256d>(x), as<__m256d>(acc)));
}

MP_INLINE f64xn read_few_as_f64(const float* p) { return as<f64xn>(_mm256_cvtps_pd(_mm_loadu_ps(p))); }

MP_INLINE __m128 add_four_in_double(__m128 base, __m128 x, __m256d factors) {
    return _mm256_cvtpd_ps(_mm256_fmadd_pd(_mm256_cvtps_pd(x), factors, _mm256_cvtps_pd(base)));
}

MP_INLINE f32xn add_in_double(f32xn base, f32xn x, float factor) {
    const __m256d factors = _mm256_set1_pd(double(factor));
    __m256 b = as<__m256>(base), y = as<__m256>(x);
    __m128 low = add_four_in_double(_mm256_castps256_ps128(b), _mm256_castps256_ps128(y), factors);
    return as<f32xn>(_mm256_set_m128(
        add_four_in_double(_mm256_extractf128_ps(b, 1), _mm256_extractf128_ps(y, 1), factors), low));
}

MP_INLINE u32xn read_few_u16(const char* p) { return as<u32xn>(_mm256_cvtepu16_epi32(load<__m128i>(p))); }
MP_INLINE i32xn read_few_i16(const char* p) { return as<i32xn>(_mm256_cvtepi16_epi32(load<__m128i>(p))); }
MP_INLINE i32xn read_few_u8(const char* p) {
    return as<i32xn>(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
MP_INLINE i32xn read_few_i8(const char* p) {
    return as<i32xn>(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
MP_INLINE f32xn read_few_f16(const char* p) { return as<f32xn>(_mm256_cvtph_ps(load<__m128i>(p))); }

MP_INLINE i32xn to_nearest(f32xn x) { return as<i32xn>(_mm256_cvtps_epi32(as<__m256>(x))); }

MP_INLINE u32xn larger(u32xn a, u32xn b) { return as<u32xn>(_mm256_max_epu32(as<__m256i>(a), as<__m256i>(b))); }

MP_INLINE bool may_have_nan(f32xn a, f32xn b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(as<__m256>(a), as<__m256>(b), _CMP_UNORD_Q)) != 0;
}

MP_INLINE bool may_be_set(u16x2n x) { return _mm256_movemask_epi8(as<__m256i>(x)) != 0; }

// Returns a bit for each lane of two comparisons.
MP_INLINE uint32_t lanes_true(u16x2n a, u16x2n b) {
    __m256i bytes = _mm256_packs_epi16(as<__m256i>(a), as<__m256i>(b));
    return uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0xd8)));
}

MP_INLINE u16x2n lower(u32xn a, u32xn b) {
    const __m256i half = _mm256_set1_epi32(0xffff);
    __m256i low_a = _mm256_and_si256(as<__m256i>(a), half), low_b = _mm256_and_si256(as<__m256i>(b), half);
    __m256i packed = _mm256_packus_epi32(low_a, low_b);
    return as<u16x2n>(_mm256_permute4x64_epi64(packed, 0xd8));
}

MP_INLINE u16x2n upper(u32xn a, u32xn b) {
    __m256i packed = _mm256_packus_epi32(as<__m256i>(a >> 16), as<__m256i>(b >> 16));
    return as<u16x2n>(_mm256_permute4x64_epi64(packed, 0xd8));
}

template <bool is_signed>
MP_INLINE void store_few_bytes(char* to, i32xn a, i32xn b, i32xn c, i32xn d) {
    __m256i ab = _mm256_packs_epi32(as<__m256i>(a), as<__m256i>(b));
    __m256i cd = _mm256_packs_epi32(as<__m256i>(c), as<__m256i>(d));
    __m256i bytes = is_signed ? _mm256_packs_epi16(ab, cd)
                              : _mm256_max_epu8(_mm256_packus_epi16(ab, cd), _mm256_set1_epi8(1));
    store(to, _mm256_permutevar8x32_epi32(bytes, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0)));
}

MP_INLINE void store_few_upper_bytes(char* to, u16x2n a, u16x2n b) {
    __m256i bytes = _mm256_packus_epi16(as<__m256i>(a >> 8), as<__m256i>(b >> 8));
    store(to, _mm256_permute4x64_epi64(bytes, 0xd8));
}

MP_INLINE u16x2n to_few_f16(f32xn a, f32xn b) {
    return as<u16x2n>(_mm256_set_m128i(_mm256_cvtps_ph(as<__m256>(b), _MM_FROUND_TO_NEAREST_INT),
                                       _mm256_cvtps_ph(as<__m256>(a), _MM_FROUND_TO_NEAREST_INT)));
}

MP_INLINE void store_few_past_caches(char* p, u16x2n value) { _mm256_stream_si256((__m256i*)p, as<__m256i>(value)); }

MP_INLINE void finish_streaming() { _mm_sfence(); }
