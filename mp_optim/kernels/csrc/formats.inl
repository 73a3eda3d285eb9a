// Reading and writing of stored elements, 64 at a time (docs/numerics.md, "Compact states"). A call has one dtype for
// each kind of tensor, so branches on dtypes are predicted. Included inside a level's namespace, after simd.inl.

// Number of elements that are decoded, updated and encoded together. It is small enough that the next elements are
// decoded while divisions are in progress.
constexpr int kChunk = 64;
constexpr int kPair = 2 * kLanes;

#include "mix.inl"

// Returns the first or the second moment of a run. Blocks of a second moment, a mean of squares, store its root.
template <int which>
MP_INLINE const Stream& moment_of(const Run& r) { return which == 1 ? r.moment1 : r.moment2; }

template <int which>
MP_INLINE const Stream& old_moment_of(const Run& r) { return which == 1 ? r.old_moment1 : r.old_moment2; }

// Dtypes of a run: read from the run (AnyFormats), or known at compile time (Formats).
struct AnyFormats {
    static constexpr bool kKnown = false;
    MP_INLINE int32_t rest(const Run& r) { return r.remainder.dtype; }
    template <int which>
    MP_INLINE int32_t moment(const Run& r) { return moment_of<which>(r).dtype; }
};

template <int32_t rest_dtype, int32_t first_dtype, int32_t second_dtype>
struct Formats {
    static constexpr bool kKnown = true;
    MP_INLINE int32_t rest(const Run&) { return rest_dtype; }
    template <int which>
    MP_INLINE int32_t moment(const Run&) { return which == 1 ? first_dtype : second_dtype; }
};

// Calls code for any dtypes, which is large, so compile the code once. Pass the argument by reference: a copy of a
// struct that was just written field by field would wait for all earlier writes, which wait for divisions.
template <class Body>
__attribute__((noinline)) static auto outlined(const Body& body) {
    return body();
}

// -- random numbers -----------------------------------------------------------------------------------

// Returns random bits for sixteen elements from `index` on.
MP_INLINE u32x16 random_words(uint32_t key, uint32_t index) {
    static const uint32_t lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return mix((load<u32x16>(lanes) + index) * 0x9e3779b9u + key);
}

// Returns the 16 random bits with which a moment is rounded.
template <bool second>
MP_INLINE u32x16 sixteen_bits(uint32_t key, uint32_t index) {
    u32x16 words = random_words(key, index);
    return second ? words & 0xffff : words >> 16;
}

// -- reading ------------------------------------------------------------------------------------------

template <int dtype>
MP_INLINE f32x16 read_as_f32(const void* p) {
    return dtype == MP_BF16 ? read_bf16(p) : dtype == MP_F16 ? read_f16(p) : load<f32x16>(p);
}

template <int dtype>
MP_INLINE void read_floats(const char* from, float* to) {
    for (int i = 0; i < kChunk; i += kLanes) store(to + i, read_as_f32<dtype>(from + size_of(dtype) * i));
}

// Returns a chunk of gradients in FP32: the stored values if they are FP32, else the filled buffer.
MP_INLINE const float* read_grad(Stream grad, int64_t i, float* buffer) {
    if (grad.dtype == MP_F32) return (const float*)grad.at(i);
    if (grad.dtype == MP_BF16)
        read_floats<MP_BF16>(grad.at(i), buffer);
    else
        read_floats<MP_F16>(grad.at(i), buffer);
    return buffer;
}

template <int dtype>
MP_INLINE void read_block(const char* from, float scale, float* to) {
    for (int i = 0; i < kChunk; i += kLanes) {
        f32x16 code = dtype == MP_F16  ? read_f16(from + 2 * i)
                      : dtype == MP_I8 ? to_float(read_i8(from + i))
                                       : to_float(read_u8(from + i));
        store(to + i, code * scale);
    }
}

// Reads the lower and the upper halves of bytes as whole numbers from -8 to 7.
MP_INLINE void read_pairs(const char* from, float scale, float* to) {
    for (int i = 0; i < kChunk / 2; i += kLanes) {
        i32x16 both = read_u8(from + i), low = ((both & 15) ^ 8) - 8, high = ((both >> 4) ^ 8) - 8;
        store(to + i, to_float(low) * scale);
        store(to + kChunk / 2 + i, to_float(high) * scale);
    }
}

static void square(float* x) {
    for (int i = 0; i < kChunk; i += kLanes) store(x + i, load<f32x16>(x + i) * load<f32x16>(x + i));
}

// Returns a chunk of a moment in FP32: the stored values if they are FP32, else the filled buffer.
template <int which, class F>
MP_INLINE const float* read_moment_here(const Run& r, int64_t i, const float* scale, float* buffer) {
    const int32_t dtype = F::template moment<which>(r);
    const char* from = old_moment_of<which>(r).data + bytes_of(dtype, i);
    switch (dtype) {
        case MP_F32: return (const float*)from;
        case MP_BF16: read_floats<MP_BF16>(from, buffer); return buffer;
        case MP_F16: read_block<MP_F16>(from, *scale, buffer); break;
        case MP_I4: read_pairs(from, *scale, buffer); break;
        default: read_block<which == 2 ? MP_U8 : MP_I8>(from, *scale, buffer);
    }
    if (which == 2) square(buffer);
    return buffer;
}

template <int which, class F>
MP_INLINE const float* read_moment(const Run& r, int64_t i, const float* scale, float* buffer) {
    if constexpr (F::kKnown)
        return read_moment_here<which, F>(r, i, scale, buffer);
    else
        return outlined([&] { return read_moment_here<which, F>(r, i, scale, buffer); });
}

// Returns the address for a moment's new FP32 values: the stored tensor if it is FP32, else the buffer, which
// write_moment reads.
template <int which, class F>
MP_INLINE float* place_of_moment(const Run& r, int64_t i, float* buffer) {
    return F::template moment<which>(r) == MP_F32 ? (float*)moment_of<which>(r).data + i : buffer;
}

template <int32_t rest>
MP_INLINE void join(const char* main, const char* remainder, float* to) {
    if (rest == MP_I0) return read_floats<MP_BF16>(main, to);
    for (int i = 0; i < kChunk; i += kLanes) {
        i32x16 low = rest == MP_I16 ? read_i16(remainder + 2 * i) : read_i8(remainder + i) << 8;
        store(to + i, joined(read_upper(main + 2 * i), as<u32x16>(low)));
    }
}

// Returns a chunk of main params in FP32: the stored values if they are FP32, else the filled buffer.
template <class F>
MP_INLINE const float* read_main_here(const Run& r, int64_t i, float* buffer) {
    const char *main = r.old_main.data + 2 * i, *rest = r.old_remainder.at(i);
    switch (F::rest(r)) {
        case MP_NONE: return (const float*)r.old_main.data + i;
        case MP_I16: join<MP_I16>(main, rest, buffer); break;
        case MP_I0: join<MP_I0>(main, rest, buffer); break;
        default: join<MP_I8>(main, rest, buffer);
    }
    return buffer;
}

template <class F>
MP_INLINE const float* read_main(const Run& r, int64_t i, float* buffer) {
    if constexpr (F::kKnown)
        return read_main_here<F>(r, i, buffer);
    else
        return outlined([&] { return read_main_here<F>(r, i, buffer); });
}

template <class F>
MP_INLINE float* place_of_main(const Run& r, int64_t i, float* buffer) {
    return F::rest(r) == MP_NONE ? (float*)r.main.data + i : buffer;
}

// -- writing ------------------------------------------------------------------------------------------

// Rounds 32 FP32 values to 16 bits, to nearest even.
template <int32_t dtype>
MP_INLINE u16x32 in_16_bits(f32x16 a, f32x16 b) {
    if (dtype == MP_BF16) return to_bf16(a, b);
    const u16x16 bits[2] = {to_f16(a), to_f16(b)};
    return load<u16x32>(bits);
}

// Returns a bit for each lane that is NaN.
template <int32_t dtype>
MP_INLINE uint32_t are_nan(u16x32 x) {
    return lanes_above(x & 0x7fff, dtype == MP_F16 ? 0x7c00 : 0x7f80);
}

// Writes a chunk in 16 bits. If `before` is not null, returns a bit for each element that differs from `before`. NaN
// always counts as changed, because the bits of NaN are not specified.
template <int32_t dtype, bool stream>
MP_INLINE uint64_t write_in_16_bits(const float* from, char* to, const char* before = nullptr) {
    uint64_t changed = 0;
    for (int i = 0; i < kChunk; i += kPair) {
        const f32x16 a = load<f32x16>(from + i), b = load<f32x16>(from + i + kLanes);
        const u16x32 bits = in_16_bits<dtype>(a, b);
        stream ? store_past_caches(to + 2 * i, bits) : store(to + 2 * i, bits);
        if (!before) continue;
        changed |= uint64_t(lanes_other(load<u16x32>(before + 2 * i), bits)) << i;
        if (may_have_nan(a, b)) changed |= uint64_t(are_nan<dtype>(bits)) << i;
    }
    return changed;
}

template <bool stream>
__attribute__((noinline)) static uint64_t write_in_f16(const float* from, char* to, const char* before) {
    return write_in_16_bits<MP_F16, stream>(from, to, before);
}

// Writes a chunk as bfloat16. The bits of NaN may differ from those of write_in_16_bits.
MP_INLINE void keep_in_bf16(const float* from, char* to) {
    for (int i = 0; i < kChunk; i += kPair)
        store(to + 2 * i, rounded_halves(load<u32x16>(from + i), load<u32x16>(from + i + kLanes)));
}

MP_INLINE void write_past_caches(const float* from, char* to) {
    for (int i = 0; i < kChunk; i += kLanes) store_past_caches(to + 4 * i, load<u16x32>(from + i));
}

// Rounds 32 FP32 values to bfloat16, and clamps finite values that would become infinite. Checking all results for an
// exponent of ones is faster than checking which inputs would overflow.
template <class Round>
MP_INLINE u16x32 rounded_below_inf(f32x16 a, f32x16 b, Round round) {
    constexpr uint32_t largest_bf16 = 0x7f7f0000;
    const u16x32 bits = round(a, b);
    if (!any_above(bits + bits, 0xfeff)) return bits;
    return round(finite_within(a, largest_bf16), finite_within(b, largest_bf16));
}

// Adds random bits to the lower 16 bits of finite values. The caller cuts the lower 16 bits off.
template <bool second>
MP_INLINE u32x16 dithered(f32x16 x, uint32_t key, uint32_t index) {
    u32x16 bits = quiet_bits(x), is_finite = as<u32x16>((bits & 0x7f800000) != 0x7f800000);
    return bits + (sixteen_bits<second>(key, index) & is_finite);
}

template <bool second>
static void write_bf16_randomly(const float* from, char* to, uint32_t key, uint32_t index) {
    for (int i = 0; i < kChunk; i += kPair) {
        const auto round = [&](f32x16 a, f32x16 b) {
            u16x32 low, high;
            halves(dithered<second>(a, key, index + i), dithered<second>(b, key, index + i + kLanes), low, high);
            return high;
        };
        store(to + 2 * i, rounded_below_inf(load<f32x16>(from + i), load<f32x16>(from + i + kLanes), round));
    }
}

MP_INLINE void write_bf16_moment(const float* from, char* to) {
    for (int i = 0; i < kChunk; i += kPair)
        store(to + 2 * i, rounded_below_inf(load<f32x16>(from + i), load<f32x16>(from + i + kLanes), to_bf16));
}

// Writes a chunk of a moment that is not in blocks.
template <int which, class F>
MP_INLINE void write_moment_here(const Run& r, int64_t i, const float* values) {
    const int32_t dtype = F::template moment<which>(r);
    char* to = moment_of<which>(r).data + bytes_of(dtype, i);
    if (dtype == MP_F32 && r.past) write_past_caches(values, to);
    if (dtype != MP_BF16) return;  // FP32 values were written by the update already.
    if (r.noisy)
        write_bf16_randomly<which == 2>(values, to, r.key, r.start + uint32_t(i));
    else
        write_bf16_moment(values, to);
}

template <int which, class F>
MP_INLINE void write_moment(const Run& r, int64_t i, const float* values) {
    if constexpr (F::kKnown)
        write_moment_here<which, F>(r, i, values);
    else
        outlined([&] { write_moment_here<which, F>(r, i, values); });
}

// Returns random bits that are independent of the bits for rounding moments.
MP_INLINE u32x16 other_bits(u32x16 words) { return mix(words ^ 0x9e3779b9u); }

// Adds random bits of other_bits() to the lower 16 bits of finite values: the upper 16 random bits for averages, the
// lower 16 random bits for main params. The caller cuts the lower 16 bits of the values off.
template <bool is_main>
MP_INLINE u32x16 dithered_by_others(f32x16 x, uint32_t key, uint32_t index) {
    u32x16 bits = quiet_bits(x), is_finite = as<u32x16>((bits & 0x7f800000) != 0x7f800000);
    u32x16 others = other_bits(random_words(key, index));
    return bits + ((is_main ? others & 0xffff : others >> 16) & is_finite);
}

template <bool is_main>
MP_INLINE void write_by_others(const float* from, char* to, uint32_t key, uint32_t index) {
    for (int i = 0; i < kChunk; i += kPair) {
        u16x32 low, high;
        halves(dithered_by_others<is_main>(load<f32x16>(from + i), key, index + i),
               dithered_by_others<is_main>(load<f32x16>(from + i + kLanes), key, index + i + kLanes), low, high);
        store(to + 2 * i, high);
    }
}

// Splits FP32 bits into upper halves, rounded to nearest with ties away from zero, and remainders, the lower halves as
// signed integers.
MP_INLINE u16x32 split(u32x16 a, u32x16 b, u16x32& low) {
    u16x32 high;
    halves(a, b, low, high);
    return high + (low >> 15);
}

MP_INLINE void split_16(const float* from, char* main, char* remainder, char* output) {
    for (int i = 0; i < kChunk; i += kPair) {
        u32x16 a, b;
        quiet_bits(load<f32x16>(from + i), load<f32x16>(from + i + kLanes), a, b);
        u16x32 low, high = split(a, b, low);
        store(main + 2 * i, high);
        store(remainder + 2 * i, low);
        if (output) store(output + 2 * i, high);
    }
}

// Rounds FP32 bits to the upper 24 bits, to nearest even or stochastically.
MP_INLINE u32x16 upper_24(f32x16 x, bool noisy, uint32_t key, uint32_t index) {
    u32x16 bits = quiet_bits(x);
    u32x16 added = noisy ? other_bits(random_words(key, index)) & 0xff : ((bits >> 8) & 1) + 0x7f;
    // The lower 8 bits of inf and of the quiet NaN are zeros, so both stay unchanged.
    return (bits + added) & 0xffffff00;
}

static void split_8(const float* from, char* main, char* remainder, char* output, bool noisy, uint32_t key,
                    uint32_t index) {
    for (int i = 0; i < kChunk; i += kPair) {
        u16x32 low, high = split(upper_24(load<f32x16>(from + i), noisy, key, index + i),
                                 upper_24(load<f32x16>(from + i + kLanes), noisy, key, index + i + kLanes), low);
        store(main + 2 * i, high);
        store_upper_bytes(remainder + i, low);
        if (output) store(output + 2 * i, high);
    }
}

// Writes bfloat16 main params without remainders, and copies the new main params to the output, if there is one.
static void write_lone(const float* from, char* main, char* output, bool noisy, uint32_t key, uint32_t index) {
    noisy ? write_by_others<true>(from, main, key, index) : void(write_in_16_bits<MP_BF16, false>(from, main));
    if (output) __builtin_memcpy(output, main, 2 * kChunk);
}

// -- changed weights ----------------------------------------------------------------------------------

// Stores a chunk of weights before the step, to compare them with the new weights.
template <class F>
MP_INLINE void keep_weights(const Run& r, int64_t i, const float* values, char* to) {
    if (F::rest(r) != MP_NONE)
        __builtin_memcpy(to, r.old_main.data + 2 * i, 2 * kChunk);
    else if (r.output.dtype == MP_BF16)
        keep_in_bf16(values, to);
    else if (r.output.dtype == MP_F16)
        write_in_f16<false>(values, to, nullptr);
    else
        __builtin_memcpy(to, values, 4 * kChunk);
}

// Returns true if all weights of a chunk are the rounded main params.
template <int32_t dtype>
MP_INLINE bool are_rounded(const float* mains, const char* weights) {
    uint32_t others = 0;
    for (int i = 0; i < kChunk; i += kPair)
        others |= lanes_other(load<u16x32>(weights + 2 * i), in_16_bits<dtype>(load<f32x16>(mains + i), load<f32x16>(mains + i + kLanes)));
    return !others;
}

// Returns main params with weights in place of main params that do not round to the weight. NaN counts as equal to NaN.
template <int32_t dtype>
__attribute__((noinline)) static const float* merged(const float* mains, const char* weights, float* to) {
    alignas(64) char rounded[2 * kChunk];
    write_in_16_bits<dtype, false>(mains, rounded);
    for (int i = 0; i < kChunk; i += kLanes) {
        const f32x16 p = load<f32x16>(mains + i), now = read_as_f32<dtype>(weights + 2 * i), then = read_as_f32<dtype>(rounded + 2 * i);
        const u32x16 same = as<u32x16>(as<u32x16>(now) == as<u32x16>(then)) | (as<u32x16>(now != now) & as<u32x16>(p != p));
        store(to + i, as<f32x16>(choose(same, as<u32x16>(p), as<u32x16>(now))));
    }
    return to;
}

__attribute__((noinline)) static const float* follow_f16(const float* mains, const char* weights, float* buffer) {
    return are_rounded<MP_F16>(mains, weights) ? mains : merged<MP_F16>(mains, weights, buffer);
}

// Returns a chunk of FP32 main params that continues from the model's weights. The buffer is filled only if weights
// differ.
MP_INLINE const float* follow_weights(const Run& r, int64_t i, const float* mains, float* buffer) {
    const char* weights = r.output.data + 2 * i;
    if (r.output.dtype == MP_F16) return follow_f16(mains, weights, buffer);
    return are_rounded<MP_BF16>(mains, weights) ? mains : merged<MP_BF16>(mains, weights, buffer);
}

// Returns a bit for each bfloat16 value of a chunk that has changed or is NaN.
__attribute__((noinline)) static uint64_t changed_in_bf16(const char* before, const char* now) {
    uint64_t changed = 0;
    for (int i = 0; i < kChunk; i += kPair) {
        const u16x32 bits = load<u16x32>(now + 2 * i);
        changed |= uint64_t(lanes_other(load<u16x32>(before + 2 * i), bits) | are_nan<MP_BF16>(bits)) << i;
    }
    return changed;
}

// Returns a value that is not 0 in each lane that has changed or is NaN.
MP_INLINE u32x16 differs(const char* before, const float* now) {
    const u32x16 bits = load<u32x16>(now);
    return (load<u32x16>(before) ^ bits) | as<u32x16>((bits & 0x7fffffff) > 0x7f800000);
}

// Returns a bit for each FP32 value of a chunk that has changed or is NaN.
__attribute__((noinline)) static uint64_t changed_in_f32(const char* before, const float* now) {
    uint64_t changed = 0;
    for (int i = 0; i < kChunk; i += kPair) {
        u16x32 low, high;
        halves(differs(before + 4 * i, now + i), differs(before + 4 * (i + kLanes), now + i + kLanes), low, high);
        changed |= uint64_t(lanes_other(low | high, u16x32{})) << i;
    }
    return changed;
}

// -- writing main params ------------------------------------------------------------------------------

// Writes a chunk of FP32 main params and of outputs, if there are outputs. Returns a bit for each changed weight.
MP_INLINE uint64_t write_whole(const Run& r, int64_t i, const float* values, const char* before) {
    char* output = r.output.at(i);
    if (r.past) write_past_caches(values, r.main.data + 4 * i);
    switch (r.output.dtype) {
        case MP_BF16:
            return r.stream ? write_in_16_bits<MP_BF16, true>(values, output, before)
                            : write_in_16_bits<MP_BF16, false>(values, output, before);
        case MP_F16:
            return r.stream ? write_in_f16<true>(values, output, before) : write_in_f16<false>(values, output, before);
        case MP_F32: __builtin_memcpy(output, values, 4 * kChunk);
    }
    return before ? changed_in_f32(before, values) : 0;
}

// Writes a chunk of bfloat16 main params with remainders, and of outputs, if there are outputs.
template <class F>
MP_INLINE void write_halves_of(const Run& r, int64_t i, const float* values) {
    char *main = r.main.data + 2 * i, *output = r.output.at(i);
    const uint32_t index = r.start + uint32_t(i);
    switch (F::rest(r)) {
        case MP_I0: return write_lone(values, main, output, r.noisy, r.key, index);
        case MP_I16: return split_16(values, main, r.remainder.data + 2 * i, output);
        default: return split_8(values, main, r.remainder.data + i, output, r.noisy, r.key, index);
    }
}

// Writes a chunk of main params, and of outputs, if there are outputs. If changes are marked, marks the weights that
// differ from `before`.
template <class F>
MP_INLINE void write_main_here(const Run& r, int64_t i, const float* values, const char* before) {
    uint64_t changed = 0;
    if (F::rest(r) == MP_NONE) {
        changed = write_whole(r, i, values, before);
    } else {
        write_halves_of<F>(r, i, values);
        if (before) changed = changed_in_bf16(before, r.main.data + 2 * i);
    }
    if (changed) r.changed[i / kChanged] |= changed;
}

template <class F>
MP_INLINE void write_main(const Run& r, int64_t i, const float* values, const char* before) {
    if constexpr (F::kKnown)
        write_main_here<F>(r, i, values, before);
    else
        outlined([&] { write_main_here<F>(r, i, values, before); });
}

// -- blocks -------------------------------------------------------------------------------------------

struct Scale {
    float scale, inverse;
    bool good;  // If false, all codes of the block are 0.
};

// Clamps the values of a block so that decoded codes are finite; for roots, infinite values stay infinite after
// decoding. Takes and returns the bits of the block's largest magnitude.
template <bool roots>
MP_INLINE uint32_t bring_within(float* x, int64_t n, uint32_t top) {
    constexpr uint32_t most = roots ? 0x60000000 : 0x7f7fe000;  // The bits of 2^65, or of (1 - 2^-11) 2^128.
    if (top <= most || top >= 0x7f800000u + roots) return top;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = as<uint32_t>(x[i]), magnitude = bits & 0x7fffffff;
        if (magnitude > most) x[i] = as<float>((bits ^ magnitude) | most);
    }
    return most;
}

// Computes a block's scale from the bits of its largest magnitude.
MP_INLINE Scale scale_of(uint32_t top, int32_t dtype) {
    if (top >= 0x7f800000) return {as<float>(0x7fc00000), 0.0f, false};
    if (top < uint32_t(127 - 100) << 23) return {0.0f, 0.0f, false};
    if (dtype == MP_F16) {
        uint32_t exponent = ((top + 0x1000) & 0x7f800000) - (14u << 23);
        return {as<float>(exponent), as<float>((254u << 23) - exponent), true};
    }
    if (dtype == MP_I4) {
        float cut = as<float>(as<uint32_t>(as<float>(top) / 7.0f) & 0xffffff00);
        return {cut, 1.0f / cut, true};
    }
    float exact = as<float>(top) / (dtype == MP_U8 ? 255.0f : 127.0f);
    float scale = as<float>((as<uint32_t>(exact) + 0xff) & 0xffffff00);
    return {scale, 1.0f / scale, true};
}

template <bool roots>
MP_INLINE void write_bytes(const float* from, float inverse, char* to) {
    i32x16 codes[kChunk / kLanes];
    for (int k = 0; k < kChunk / kLanes; ++k) codes[k] = to_nearest(load<f32x16>(from + kLanes * k) * inverse);
    store_bytes<!roots>(to, codes[0], codes[1], codes[2], codes[3]);
}

template <bool roots>
static void write_bytes_randomly(const float* from, float inverse, char* to, uint32_t key, uint32_t index) {
    i32x16 codes[kChunk / kLanes];
    for (int k = 0; k < kChunk / kLanes; ++k) {
        u32x16 bits = sixteen_bits<roots>(key, index + kLanes * k);
        f32x16 fraction = to_float(as<i32x16>(bits)) * 0x1p-16f;
        i32x16 code = to_floor(load<f32x16>(from + kLanes * k) * inverse + fraction);
        codes[k] = within(code, roots ? 1 : -127, roots ? 255 : 127);
    }
    store_bytes<!roots>(to, codes[0], codes[1], codes[2], codes[3]);
}

// Writes 4-bit codes from -7 to 7.
static void write_pairs(const float* from, float inverse, char* to, bool noisy, uint32_t key, uint32_t index) {
    i32x16 codes[kChunk / kLanes];
    for (int k = 0; k < kChunk / kLanes; ++k) {
        f32x16 scaled = load<f32x16>(from + kLanes * k) * inverse;
        if (noisy) {
            u32x16 bits = sixteen_bits<false>(key, index + kLanes * k);
            // The fraction is never 0, so a decoded value keeps its code.
            f32x16 fraction = (to_float(as<i32x16>(bits)) + 0.5f) * 0x1p-16f;
            codes[k] = within(to_floor(scaled + fraction), -7, 7);
        } else {
            codes[k] = to_nearest(scaled);
        }
    }
    alignas(64) char bytes[kChunk];
    i32x16 first = (codes[0] & 15) | (codes[2] << 4), last = (codes[1] & 15) | (codes[3] << 4);
    store_bytes<true>(bytes, first, last, first, last);
    __builtin_memcpy(to, bytes, kChunk / 2);
}

template <bool roots>
static void write_halves(const float* from, float inverse, char* to) {
    for (int i = 0; i < kChunk; i += kLanes) {
        i16x16 bits = as<i16x16>(to_f16(load<f32x16>(from + i) * inverse));
        if (roots) {
            i16x16 one = splat<i16x16>(int16_t(1));
            // The bits of -0 are below those of 1, too, so -0 also becomes the code 1.
            bits = choose(i16x16(bits < one), one, bits);
        }
        store(to + 2 * i, bits);
    }
}
