// Sixteen lanes, built from several registers of fewer lanes. Compilers keep such structs in registers, but not
// built-in vectors that are longer than a register.

template <class V>
struct Two {
    V low, high;
};

template <class A, class B>
struct As<Two<A>, Two<B>> {
    MP_INLINE Two<A> cast(Two<B> x) { return {as<A>(x.low), as<A>(x.high)}; }
};

template <class V>
struct Memory<Two<V>> {
    MP_INLINE Two<V> load(const void* p) {
        return {Memory<V>::load(p), Memory<V>::load((const char*)p + sizeof(V))};
    }
    MP_INLINE void store(void* p, Two<V> x) {
        Memory<V>::store(p, x.low);
        Memory<V>::store((char*)p + sizeof(V), x.high);
    }
};

template <class V>
struct ElementOf {
    using type = std::remove_reference_t<decltype(std::declval<V&>()[0])>;
};

template <class V>
struct ElementOf<Two<V>> : ElementOf<V> {};

template <class V>
using Element = typename ElementOf<V>::type;

#define MP_OPERATOR(op)                                                                                     \
    template <class V>                                                                                      \
    MP_INLINE auto operator op(Two<V> a, Two<V> b)->Two<decltype(a.low op b.low)> {           \
        return {a.low op b.low, a.high op b.high};                                                          \
    }                                                                                                       \
    template <class V>                                                                                      \
    MP_INLINE auto operator op(Two<V> a, Element<V> b)->Two<decltype(a.low op b)> {                  \
        return {a.low op b, a.high op b};                                                                   \
    }
MP_OPERATOR(+)
MP_OPERATOR(-)
MP_OPERATOR(*)
MP_OPERATOR(/)
MP_OPERATOR(&)
MP_OPERATOR(|)
MP_OPERATOR(^)
MP_OPERATOR(<)
MP_OPERATOR(>)
MP_OPERATOR(==)
MP_OPERATOR(!=)
#undef MP_OPERATOR

template <class V>
MP_INLINE Two<V> operator~(Two<V> x) {
    return {~x.low, ~x.high};
}

template <class V>
MP_INLINE Two<V> operator<<(Two<V> x, int bits) {
    return {x.low << bits, x.high << bits};
}

template <class V>
MP_INLINE Two<V> operator>>(Two<V> x, int bits) {
    return {x.low >> bits, x.high >> bits};
}

// -- types --------------------------------------------------------------------------------------------

constexpr int kFew = sizeof(f32xn) / 4;

#if defined(MP_AVX2)
template <class V>
using Sixteen = Two<V>;
using u16x16 = u16x2n;
using i16x16 = i16x2n;
#else
template <class V>
using Sixteen = Two<Two<V>>;
using u16x16 = Two<u16x2n>;
using i16x16 = Two<i16x2n>;
#endif
using f32x16 = Sixteen<f32xn>;
using u32x16 = Sixteen<u32xn>;
using i32x16 = Sixteen<i32xn>;
using f64x8 = Sixteen<f64xn>;
using u16x32 = Sixteen<u16x2n>;

// -- operations on each lane --------------------------------------------------------------------------

template <class V>
MP_INLINE Two<V> square_root(Two<V> x) {
    return {square_root(x.low), square_root(x.high)};
}

#if !defined(MP_AVX2)
MP_INLINE f32xn add_in_double(f32xn base, f32xn x, float factor) {
    for (int i = 0; i < kFew; ++i) x[i] = float(double(base[i]) + double(x[i]) * double(factor));
    return x;
}
#endif

// Returns base + x * factor, computed in FP64, where the product is exact, and rounded to FP32.
template <class V>
MP_INLINE Two<V> add_in_double(Two<V> base, Two<V> x, float factor) {
    return {add_in_double(base.low, x.low, factor), add_in_double(base.high, x.high, factor)};
}

template <class V>
MP_INLINE Two<V> add_square(Two<V> acc, Two<V> x) {
    return {add_square(acc.low, x.low), add_square(acc.high, x.high)};
}

MP_INLINE f32xn to_float(i32xn x) { return __builtin_convertvector(x, f32xn); }
MP_INLINE i32xn to_whole(f32xn x) { return __builtin_convertvector(x, i32xn); }

template <class V>
MP_INLINE auto to_float(Two<V> x) -> Two<decltype(to_float(x.low))> {
    return {to_float(x.low), to_float(x.high)};
}

template <class V>
MP_INLINE auto to_whole(Two<V> x) -> Two<decltype(to_whole(x.low))> {
    return {to_whole(x.low), to_whole(x.high)};
}

template <class V>
MP_INLINE auto to_nearest(Two<V> x) -> Two<decltype(to_nearest(x.low))> {
    return {to_nearest(x.low), to_nearest(x.high)};
}

template <class V>
MP_INLINE Two<V> larger(Two<V> a, Two<V> b) {
    return {larger(a.low, b.low), larger(a.high, b.high)};
}

MP_INLINE uint32_t largest(u32xn x) {
    uint32_t most = 0;
    for (int i = 0; i < kFew; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

template <class V>
MP_INLINE uint32_t largest(Two<V> x) {
    return largest(larger(x.low, x.high));
}

template <class V>
MP_INLINE bool may_have_nan(Two<V> a, Two<V> b) {
    return int(may_have_nan(a.low, b.low)) | int(may_have_nan(a.high, b.high));
}

MP_INLINE u32x16 joined(u32x16 x, u32x16 y) {
    const u32x16 sum = x + (y & as<u32x16>((x & 0x7fffffff) != 0));
    const u32x16 over = as<u32x16>((x & 0x7fffffff) == 0x7f800000) & as<u32x16>(sum > x);
    return (x & over) | (sum & ~over);
}

MP_INLINE u16x32 add_one_where_above(u16x32 x, u16x32 y, uint16_t limit) {
    return x - as<u16x32>(y > limit);  // A true lane is -1, so subtracting it adds 1.
}

template <class V>
MP_INLINE bool may_be_set(Two<V> x) {
    return int(may_be_set(x.low)) | int(may_be_set(x.high));
}

// Returns a bit for each lane of a comparison.
MP_INLINE uint32_t lanes_true(Two<u16x2n> x) { return lanes_true(x.low, x.high); }

template <class V>
MP_INLINE uint32_t lanes_true(Two<Two<V>> x) {
    return lanes_true(x.low) | lanes_true(x.high) << (2 * sizeof(V) / sizeof(Element<V>));
}

// Returns a bit for each lane: lanes that differ, and lanes above a limit.
MP_INLINE uint32_t lanes_other(u16x32 x, u16x32 y) { return ~lanes_true(as<u16x32>(x == y)); }
MP_INLINE uint32_t lanes_above(u16x32 x, uint16_t limit) { return lanes_true(as<u16x32>(x > limit)); }

// Returns true if any lane is above the limit. May return true without a check if the check is slow on this CPU.
MP_INLINE bool any_above(u16x32 x, uint16_t limit) { return may_be_set(as<u16x32>(x > limit)); }

// -- reading 8 and 16 bits ----------------------------------------------------------------------------

// Reads sixteen elements of N bytes, as many at a time as a register has lanes.
template <class R, int bytes>
struct Reader {
    template <class V, class Few>
    MP_INLINE void read(V& to, const char* p, Few few) {
        to = few(p);
    }
    template <class V, class Few>
    MP_INLINE void read(Two<V>& to, const char* p, Few few) {
        read(to.low, p, few);
        read(to.high, p + bytes * (sizeof(V) / sizeof(Element<V>)), few);
    }
};

#define MP_READ(name, type, bytes)                            \
    MP_INLINE type read_##name(const void* p) {               \
        type r;                                               \
        Reader<type, bytes>::read(r, (const char*)p, read_few_##name); \
        return r;                                             \
    }
MP_READ(u16, u32x16, 2)
MP_READ(i16, i32x16, 2)
MP_READ(u8, i32x16, 1)
MP_READ(i8, i32x16, 1)
MP_READ(f16, f32x16, 2)
#undef MP_READ

MP_INLINE u32x16 read_upper(const void* p) { return read_u16(p) << 16; }

MP_INLINE f64xn read_few_f64(const char* p) { return read_few_as_f64((const float*)p); }

MP_INLINE f64x8 read_as_f64(const float* p) {
    f64x8 r;
    Reader<f64x8, 4>::read(r, (const char*)p, read_few_f64);
    return r;
}

// Returns the first and the last eight lanes.
MP_INLINE f64x8 low_as_f64(f32x16 x) {
    float lanes[kLanes];
    store(lanes, x);
    return read_as_f64(lanes);
}

MP_INLINE f64x8 high_as_f64(f32x16 x) {
    float lanes[kLanes];
    store(lanes, x);
    return read_as_f64(lanes + 8);
}

// -- narrowing ----------------------------------------------------------------------------------------

#if defined(MP_AVX2)
#define MP_PAIRS(few, a, b) {few(a.low, a.high), few(b.low, b.high)}
#else
#define MP_PAIRS(few, a, b)                                            \
    {{few(a.low.low, a.low.high), few(a.high.low, a.high.high)},        \
     {few(b.low.low, b.low.high), few(b.high.low, b.high.high)}}
#endif

MP_INLINE u16x32 lower(u32x16 a, u32x16 b) { return MP_PAIRS(lower, a, b); }
MP_INLINE u16x32 upper(u32x16 a, u32x16 b) { return MP_PAIRS(upper, a, b); }

MP_INLINE void halves(u32x16 a, u32x16 b, u16x32& low, u16x32& high) { low = lower(a, b), high = upper(a, b); }

#if defined(MP_AVX2)
MP_INLINE u16x16 to_f16(f32x16 x) { return to_few_f16(x.low, x.high); }

template <bool is_signed>
MP_INLINE void store_bytes(char* to, i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
    store_few_bytes<is_signed>(to, a.low, a.high, b.low, b.high);
    store_few_bytes<is_signed>(to + 32, c.low, c.high, d.low, d.high);
}

MP_INLINE void store_upper_bytes(char* to, u16x32 x) { store_few_upper_bytes(to, x.low, x.high); }
#else
MP_INLINE u16x16 to_f16(f32x16 x) {
    return {to_few_f16(x.low.low, x.low.high), to_few_f16(x.high.low, x.high.high)};
}

template <bool is_signed>
MP_INLINE void store_bytes(char* to, i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
    store_few_bytes<is_signed>(to, a.low.low, a.low.high, a.high.low, a.high.high);
    store_few_bytes<is_signed>(to + 16, b.low.low, b.low.high, b.high.low, b.high.high);
    store_few_bytes<is_signed>(to + 32, c.low.low, c.low.high, c.high.low, c.high.high);
    store_few_bytes<is_signed>(to + 48, d.low.low, d.low.high, d.high.low, d.high.high);
}

MP_INLINE void store_upper_bytes(char* to, u16x32 x) {
    store_few_upper_bytes(to, x.low.low, x.low.high);
    store_few_upper_bytes(to + 16, x.high.low, x.high.high);
}
#endif
#undef MP_PAIRS

MP_INLINE void store_past_caches(char* p, u16x2n value) { store_few_past_caches(p, value); }

template <class V>
MP_INLINE void store_past_caches(char* p, Two<V> value) {
    store_past_caches(p, value.low);
    store_past_caches(p + sizeof(V), value.high);
}
