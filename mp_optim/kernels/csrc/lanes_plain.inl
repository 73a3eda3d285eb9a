// Four lanes, by the vector extensions alone.

MP_VECTOR(float, f32xn, 16);
MP_VECTOR(uint32_t, u32xn, 16);
MP_VECTOR(int32_t, i32xn, 16);
MP_VECTOR(uint16_t, u16x2n, 16);
MP_VECTOR(int16_t, i16x2n, 16);
MP_VECTOR(double, f64xn, 16);

MP_INLINE f32xn square_root(f32xn x) {
    for (int i = 0; i < 4; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
}

MP_INLINE f64xn add_square(f64xn acc, f64xn x) { return acc + x * x; }

MP_INLINE f64xn read_few_as_f64(const float* p) { return f64xn{double(p[0]), double(p[1])}; }

template <class V, class T>
MP_INLINE V read_few(const char* p) {
    V r{};
    for (int i = 0; i < 4; ++i) r[i] = load<T>(p + sizeof(T) * i);
    return r;
}

MP_INLINE u32xn read_few_u16(const char* p) { return read_few<u32xn, uint16_t>(p); }
MP_INLINE i32xn read_few_i16(const char* p) { return read_few<i32xn, int16_t>(p); }
MP_INLINE i32xn read_few_u8(const char* p) { return read_few<i32xn, uint8_t>(p); }
MP_INLINE i32xn read_few_i8(const char* p) { return read_few<i32xn, int8_t>(p); }

MP_INLINE f32xn read_few_f16(const char* p) {
    f32xn r{};
    for (int i = 0; i < 4; ++i) r[i] = half_to_float(load<uint16_t>(p + 2 * i));
    return r;
}

MP_INLINE u16x2n to_few_f16(f32xn a, f32xn b) {
    u16x2n r{};
    for (int i = 0; i < 8; ++i) r[i] = float_to_half(i < 4 ? a[i] : b[i - 4]);
    return r;
}

MP_INLINE i32xn to_nearest(f32xn x) { return as<i32xn>(x + 0x1.8p23f) - 0x4b400000; }  // the sum's last bit is worth 1

MP_INLINE u32xn larger(u32xn a, u32xn b) {
    u32xn where = as<u32xn>(a > b);
    return (where & a) | (~where & b);
}

MP_INLINE bool may_have_nan(f32xn, f32xn) { return true; }
MP_INLINE bool may_be_set(u16x2n) { return true; }

// A bit for each lane of two comparisons.
MP_INLINE uint32_t lanes_true(u16x2n a, u16x2n b) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; ++i) bits |= uint32_t((i < 8 ? a[i] : b[i - 8]) & 1) << i;
    return bits;
}

MP_INLINE u16x2n lower(u32xn a, u32xn b) {
    u16x2n r{};
    for (int i = 0; i < 8; ++i) r[i] = uint16_t(i < 4 ? a[i] : b[i - 4]);
    return r;
}

MP_INLINE u16x2n upper(u32xn a, u32xn b) { return lower(a >> 16, b >> 16); }

template <bool is_signed>
MP_INLINE void store_few_bytes(char* to, i32xn a, i32xn b, i32xn c, i32xn d) {
    const i32xn all[4] = {a, b, c, d};
    for (int i = 0; i < 16; ++i) {
        int32_t x = all[i / 4][i % 4];
        to[i] = char(is_signed || x > 0 ? x : 1);
    }
}

MP_INLINE void store_few_upper_bytes(char* to, u16x2n a, u16x2n b) {
    for (int i = 0; i < 16; ++i) to[i] = char((i < 8 ? a[i] : b[i - 8]) >> 8);
}

MP_INLINE void store_few_past_caches(char* p, u16x2n value) { store(p, value); }

MP_INLINE void finish_streaming() {}
