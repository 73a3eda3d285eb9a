// Four lanes in one register, on x86-64.

MP_VECTOR(float, f32xn, 16);
MP_VECTOR(uint32_t, u32xn, 16);
MP_VECTOR(int32_t, i32xn, 16);
MP_VECTOR(uint16_t, u16x2n, 16);
MP_VECTOR(int16_t, i16x2n, 16);
MP_VECTOR(double, f64xn, 16);

MP_INLINE f32xn square_root(f32xn x) { return as<f32xn>(_mm_sqrt_ps(as<__m128>(x))); }

MP_INLINE f64xn add_square(f64xn acc, f64xn x) { return acc + x * x; }

MP_INLINE f64xn read_few_as_f64(const float* p) {
    return as<f64xn>(_mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)p))));
}

MP_INLINE u32xn read_few_u16(const char* p) {
    return as<u32xn>(_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)p), _mm_setzero_si128()));
}

MP_INLINE i32xn read_few_i16(const char* p) {
    __m128i x = _mm_loadl_epi64((const __m128i*)p);
    return as<i32xn>(_mm_srai_epi32(_mm_unpacklo_epi16(x, x), 16));
}

MP_INLINE i32xn read_few_u8(const char* p) {
    __m128i x = _mm_unpacklo_epi8(_mm_cvtsi32_si128(load<int32_t>(p)), _mm_setzero_si128());
    return as<i32xn>(_mm_unpacklo_epi16(x, _mm_setzero_si128()));
}

MP_INLINE i32xn read_few_i8(const char* p) {
    __m128i x = _mm_cvtsi32_si128(load<int32_t>(p));
    x = _mm_unpacklo_epi8(x, x);
    return as<i32xn>(_mm_srai_epi32(_mm_unpacklo_epi16(x, x), 24));
}

MP_INLINE f32xn read_few_f16(const char* p) {
    f32xn r;
    for (int i = 0; i < 4; ++i) r[i] = half_to_float(load<uint16_t>(p + 2 * i));
    return r;
}

MP_INLINE u16x2n to_few_f16(f32xn a, f32xn b) {
    u16x2n r;
    for (int i = 0; i < 8; ++i) r[i] = float_to_half(i < 4 ? a[i] : b[i - 4]);
    return r;
}

MP_INLINE i32xn to_nearest(f32xn x) { return as<i32xn>(_mm_cvtps_epi32(as<__m128>(x))); }

MP_INLINE u32xn larger(u32xn a, u32xn b) {
    u32xn where = as<u32xn>(a > b);
    return (where & a) | (~where & b);
}

MP_INLINE bool may_have_nan(f32xn a, f32xn b) {
    return _mm_movemask_ps(_mm_cmpunord_ps(as<__m128>(a), as<__m128>(b))) != 0;
}

MP_INLINE bool may_be_set(u16x2n x) { return _mm_movemask_epi8(as<__m128i>(x)) != 0; }

// A bit for each lane of two comparisons.
MP_INLINE uint32_t lanes_true(u16x2n a, u16x2n b) {
    return uint32_t(_mm_movemask_epi8(_mm_packs_epi16(as<__m128i>(a), as<__m128i>(b))));
}

MP_INLINE u16x2n upper(u32xn a, u32xn b) {
    return as<u16x2n>(_mm_packs_epi32(_mm_srai_epi32(as<__m128i>(a), 16), _mm_srai_epi32(as<__m128i>(b), 16)));
}

MP_INLINE u16x2n lower(u32xn a, u32xn b) { return upper(a << 16, b << 16); }

template <bool is_signed>
MP_INLINE void store_few_bytes(char* to, i32xn a, i32xn b, i32xn c, i32xn d) {
    __m128i ab = _mm_packs_epi32(as<__m128i>(a), as<__m128i>(b)), cd = _mm_packs_epi32(as<__m128i>(c), as<__m128i>(d));
    store(to, is_signed ? _mm_packs_epi16(ab, cd) : _mm_max_epu8(_mm_packus_epi16(ab, cd), _mm_set1_epi8(1)));
}

MP_INLINE void store_few_upper_bytes(char* to, u16x2n a, u16x2n b) {
    store(to, _mm_packus_epi16(as<__m128i>(a >> 8), as<__m128i>(b >> 8)));
}

MP_INLINE void store_few_past_caches(char* p, u16x2n value) { _mm_stream_si128((__m128i*)p, as<__m128i>(value)); }

MP_INLINE void finish_streaming() { _mm_sfence(); }
