// Vectors of NEON on 64-bit Arm: four FP32 lanes in a register.

MP_VECTOR(float, f32xn, 16);
MP_VECTOR(uint32_t, u32xn, 16);
MP_VECTOR(int32_t, i32xn, 16);
MP_VECTOR(uint16_t, u16x2n, 16);
MP_VECTOR(int16_t, i16x2n, 16);
MP_VECTOR(double, f64xn, 16);

MP_INLINE f32xn square_root(f32xn x) { return as<f32xn>(vsqrtq_f32(as<float32x4_t>(x))); }

MP_INLINE f64xn add_square(f64xn acc, f64xn x) { return acc + x * x; }

MP_INLINE f64xn read_few_as_f64(const float* p) { return as<f64xn>(vcvt_f64_f32(vld1_f32(p))); }

MP_INLINE u32xn read_few_u16(const char* p) { return as<u32xn>(vmovl_u16(load<uint16x4_t>(p))); }
MP_INLINE i32xn read_few_i16(const char* p) { return as<i32xn>(vmovl_s16(load<int16x4_t>(p))); }

MP_INLINE i32xn read_few_u8(const char* p) {
    uint8x8_t x = vreinterpret_u8_u32(vdup_n_u32(load<uint32_t>(p)));
    return as<i32xn>(vmovl_u16(vget_low_u16(vmovl_u8(x))));
}

MP_INLINE i32xn read_few_i8(const char* p) {
    int8x8_t x = vreinterpret_s8_u32(vdup_n_u32(load<uint32_t>(p)));
    return as<i32xn>(vmovl_s16(vget_low_s16(vmovl_s8(x))));
}

MP_INLINE f32xn read_few_f16(const char* p) {
    return as<f32xn>(vcvt_f32_f16(vreinterpret_f16_u16(load<uint16x4_t>(p))));
}

MP_INLINE u16x2n to_few_f16(f32xn a, f32xn b) {
    return as<u16x2n>(vcombine_u16(vreinterpret_u16_f16(vcvt_f16_f32(as<float32x4_t>(a))),
                                   vreinterpret_u16_f16(vcvt_f16_f32(as<float32x4_t>(b)))));
}

MP_INLINE i32xn to_nearest(f32xn x) { return as<i32xn>(vcvtnq_s32_f32(as<float32x4_t>(x))); }

MP_INLINE u32xn larger(u32xn a, u32xn b) { return as<u32xn>(vmaxq_u32(as<uint32x4_t>(a), as<uint32x4_t>(b))); }

MP_INLINE bool may_have_nan(f32xn, f32xn) { return true; }
MP_INLINE bool may_be_set(u16x2n) { return true; }

// Returns a bit for each lane of two comparisons.
MP_INLINE uint32_t lanes_true(u16x2n a, u16x2n b) {
    const u16x2n bits = {1, 2, 4, 8, 16, 32, 64, 128};
    return vaddvq_u16(as<uint16x8_t>(a & bits)) | uint32_t(vaddvq_u16(as<uint16x8_t>(b & bits))) << 8;
}

MP_INLINE u16x2n lower(u32xn a, u32xn b) {
    return as<u16x2n>(vuzp1q_u16(as<uint16x8_t>(a), as<uint16x8_t>(b)));
}

MP_INLINE u16x2n upper(u32xn a, u32xn b) {
    return as<u16x2n>(vuzp2q_u16(as<uint16x8_t>(a), as<uint16x8_t>(b)));
}

template <bool is_signed>
MP_INLINE void store_few_bytes(char* to, i32xn a, i32xn b, i32xn c, i32xn d) {
    uint16x8_t ab = vuzp1q_u16(as<uint16x8_t>(a), as<uint16x8_t>(b));
    uint16x8_t cd = vuzp1q_u16(as<uint16x8_t>(c), as<uint16x8_t>(d));
    uint8x16_t bytes = vuzp1q_u8(as<uint8x16_t>(ab), as<uint8x16_t>(cd));
    store(to, is_signed ? bytes : vmaxq_u8(bytes, vdupq_n_u8(1)));
}

MP_INLINE void store_few_upper_bytes(char* to, u16x2n a, u16x2n b) {
    store(to, vuzp2q_u8(as<uint8x16_t>(a), as<uint8x16_t>(b)));
}

MP_INLINE void store_few_past_caches(char* p, u16x2n value) { store(p, value); }

MP_INLINE void finish_streaming() {}
