// Vectors of sixteen lanes, with the compilers' vector extensions. Each level defines the operations that the
// extensions do not have. Included inside a level's namespace, with MP_AVX512, MP_AVX2 or MP_NEON defined.

#define MP_INLINE static inline __attribute__((always_inline))
#define MP_MEMBER inline __attribute__((always_inline))
#define MP_VECTOR(type, name, bytes) typedef type name __attribute__((vector_size(bytes)))

constexpr int kLanes = 16;

// True if the bits of a type can be read as another type of the same size.
template <class To, class From>
struct As {
    MP_INLINE To cast(From value) {
        static_assert(sizeof(To) == sizeof(From), "as() reinterprets bits");
        To result;
        __builtin_memcpy(&result, &value, sizeof(To));
        return result;
    }
};

template <class T>
struct Memory {
    MP_INLINE T load(const void* p) {
        T value;
        __builtin_memcpy(&value, p, sizeof(T));
        return value;
    }
    MP_INLINE void store(void* p, T value) { __builtin_memcpy(p, &value, sizeof(T)); }
};

template <class To, class From>
MP_INLINE To as(From value) {
    return As<To, From>::cast(value);
}

template <class T>
MP_INLINE T load(const void* p) {
    return Memory<T>::load(p);
}

template <class T>
MP_INLINE void store(void* p, T value) {
    Memory<T>::store(p, value);
}

#if defined(MP_AVX512)
#include "lanes_avx512.inl"
#else
#if defined(MP_AVX2)
#include "lanes_avx2.inl"
#else
#include "lanes_neon.inl"
#endif
#include "lanes_two.inl"
#endif

template <class V, class T>
MP_INLINE V splat(T value) {
    return V{} + value;
}

// -- integers -----------------------------------------------------------------------------------------

template <class V>
MP_INLINE V choose(V where, V a, V b) {
    return (where & a) | (~where & b);
}

// Rounds down to integers, for magnitudes below 2^31.
MP_INLINE i32x16 to_floor(f32x16 x) {
    i32x16 cut = to_whole(x);
    return cut + (to_float(cut) > x);  // A true lane is -1, so adding it subtracts 1.
}

MP_INLINE i32x16 within(i32x16 x, int32_t low, int32_t high) {
    i32x16 least = splat<i32x16>(low), most = splat<i32x16>(high);
    x = choose(x < least, least, x);
    return choose(x > most, most, x);
}

// -- bits of floats -----------------------------------------------------------------------------------

constexpr float kLargest = 0x1.fffffep127f;

MP_INLINE u32x16 is_finite(f32x16 x) { return as<u32x16>((as<u32x16>(x) & 0x7fffffff) < 0x7f800000); }

// Replaces overflows of finite inputs by the largest number with the same sign.
MP_INLINE f32x16 bounded(f32x16 x, u32x16 made_of_finite) {
    u32x16 bits = as<u32x16>(x), is_inf = as<u32x16>((bits & 0x7fffffff) == 0x7f800000);
    // A true lane is -1, so adding it to the bits of inf gives the largest number.
    return as<f32x16>(bits + (is_inf & made_of_finite));
}

// Clamps finite values to a magnitude, which is given by its bits.
MP_INLINE f32x16 finite_within(f32x16 x, uint32_t most) {
    u32x16 bits = as<u32x16>(x), magnitude = bits & 0x7fffffff;
    u32x16 above = as<u32x16>(magnitude > most) & as<u32x16>(magnitude < 0x7f800000);
    return as<f32x16>(choose(above, (bits ^ magnitude) | most, bits));
}

MP_INLINE u32x16 quiet_bits(f32x16 x) {
    u32x16 bits = as<u32x16>(x), is_nan = as<u32x16>((bits & 0x7fffffff) > 0x7f800000);
    return choose(is_nan, splat<u32x16>(0x7fc00000u), bits);
}

// Returns the bits of 32 floats, with every NaN replaced by the quiet NaN.
MP_INLINE void quiet_bits(f32x16 a, f32x16 b, u32x16& a_bits, u32x16& b_bits) {
    a_bits = as<u32x16>(a), b_bits = as<u32x16>(b);
    if (may_have_nan(a, b)) a_bits = quiet_bits(a), b_bits = quiet_bits(b);
}

// Rounds upper halves to nearest even: adds 1 if the lower half is above its middle, or is the middle and the upper
// half is odd.
MP_INLINE u16x32 rounded_halves(u32x16 a, u32x16 b) {
    u16x32 high, low;
    halves(a, b, low, high);
    return add_one_where_above(high, low | (high & 1), 0x8000);
}

MP_INLINE u16x32 to_bf16(f32x16 a, f32x16 b) {
    u32x16 a_bits, b_bits;
    quiet_bits(a, b, a_bits, b_bits);
    return rounded_halves(a_bits, b_bits);
}

MP_INLINE f32x16 read_bf16(const void* p) { return as<f32x16>(read_upper(p)); }
