// Takes a rule over a run of elements: chunk by chunk decodes, updates and encodes them.
// Included inside a level's namespace, after formats.inl.

// -- chunks -------------------------------------------------------------------------------------------

constexpr Stream Run::* kStreams[] = {&Run::main,    &Run::remainder, &Run::grad,
                                      &Run::moment1, &Run::moment2,   &Run::output};  // the output last
constexpr int kStreamCount = 6;

// The part of a run from `start` on, a multiple of kScaled.
MP_INLINE Run part_of(const Run& run, int64_t start, int64_t numel) {
    Run part = run;
    for (Stream Run::* stream : kStreams)
        if ((run.*stream).data) (part.*stream).data = (run.*stream).at(start);
    if (run.scale1) part.scale1 = run.scale1 + start / kScaled;
    if (run.scale2) part.scale2 = run.scale2 + start / kScaled;
    part.start = run.start + uint32_t(start);
    part.numel = numel;
    return part;
}

// The last, incomplete chunk of a run, filled up with zeros in memory of its own. Whatever the scalars are, what
// becomes of a zero is not larger than what becomes of any other element: the largest of a block is among the others.
struct Tail {
    alignas(64) char memory[kStreamCount][4 * kChunk];
    Run run;
    int64_t numel;

    __attribute__((noinline)) void fill(const Run& whole, int64_t start) {
        run = whole;
        run.start = whole.start + uint32_t(start);
        run.stream = false;
        numel = whole.numel - start;
        __builtin_memset(memory, 0, sizeof(memory));
        for (int k = 0; k < kStreamCount; ++k) {
            Stream& mine = run.*kStreams[k];
            if (!mine.data) continue;
            __builtin_memcpy(memory[k], mine.at(start), numel * size_of(mine.dtype));
            mine.data = memory[k];
        }
    }

    __attribute__((noinline)) void write_back(const Run& whole, int64_t start) {
        for (int k = 0; k < kStreamCount; ++k) {
            Stream theirs = whole.*kStreams[k];
            if (theirs.data && kStreams[k] != &Run::grad)
                __builtin_memcpy(theirs.at(start), memory[k], numel * size_of(theirs.dtype));
        }
    }
};

// Calls body(run, index in it, index in the block) for the chunks of a block of n elements, the tail through a copy.
template <class Body>
MP_INLINE void for_each_chunk(const Run& run, int64_t start, int64_t n, Tail& tail, Body body) {
    for (int64_t at = 0; at < n; at += kChunk) {
        const bool is_whole = n - at >= kChunk;
        if (!is_whole) tail.fill(run, start + at);
        body(is_whole ? run : tail.run, is_whole ? start + at : 0, at);
        if (!is_whole) tail.write_back(run, start + at);
    }
}

// Elements ahead of use that are fetched: with four or five streams the hardware's own prefetching falls behind.
constexpr int64_t kAhead = 512;

MP_INLINE void fetch_ahead(const char* data, int32_t dtype, int64_t i) {
    const char* from = data + (i + kAhead) * size_of(dtype);
    for (int64_t line = 0; line < kChunk * size_of(dtype); line += 64) __builtin_prefetch(from + line, 0, 3);
}

template <class F>
MP_INLINE void fetch_ahead(const Run& r, int64_t i) {
    fetch_ahead(r.main.data, F::rest(r) == MP_NONE ? MP_F32 : MP_BF16, i);
    fetch_ahead(r.remainder.data, F::rest(r), i);
    fetch_ahead(r.grad.data, r.grad.dtype, i);
    fetch_ahead(r.moment1.data, F::template moment<false>(r), i);
    fetch_ahead(r.moment2.data, F::template moment<true>(r), i);
}

// -- blocks -------------------------------------------------------------------------------------------

MP_INLINE const float* scale_at(const float* scales, int64_t start) {
    return scales ? scales + start / kScaled : nullptr;
}

// Writes a moment's blocks as codes, one block behind the update: a block's scale is known after its last element,
// and the next block's divisions leave the time to write them.
template <bool second, class F>
class Coder {
public:
    explicit Coder(const Run& run)
        : run_(run), moment_(second ? run.moment2 : run.moment1), scales_(second ? run.scale2 : run.scale1) {}

    // The block of n elements from `start` on has these values, and this is its largest.
    void take(const float* values, int64_t start, int64_t n, u32x16 top) {
        values_ = values, start_ = start, left_ = n, done_ = 0;
        scale_ = scale_of(largest(top), moment_.dtype);
        scales_[start / kScaled] = scale_.scale;
    }

    // Write the next chunk of the block taken last.
    MP_MEMBER void write_chunk() {
        if (left_ > 0) write_next();
    }

    __attribute__((noinline)) void finish() {
        while (left_ > 0) write_next();
    }

private:
    MP_MEMBER void write_next() {
        int64_t i = start_ + done_;
        if (left_ >= kChunk) {
            encode(values_ + done_, moment_.at(i), i);
        } else {
            alignas(64) char codes[2 * kChunk];
            encode(values_ + done_, codes, i);
            __builtin_memcpy(moment_.at(i), codes, left_ * size_of(moment_.dtype));
        }
        done_ += kChunk, left_ -= kChunk;
    }

    MP_MEMBER void encode(const float* from, char* to, int64_t i) {
        if constexpr (F::kKnown)
            encode_here(from, to, i);
        else
            outlined([&] { encode_here(from, to, i); });
    }

    MP_MEMBER void encode_here(const float* from, char* to, int64_t i) {
        const int32_t dtype = F::template moment<second>(run_);
        if (!scale_.good)
            __builtin_memset(to, 0, kChunk * size_of(dtype));
        else if (dtype == MP_F16)
            write_halves<second>(from, scale_.inverse, to);
        else if (run_.noisy)
            write_bytes_randomly<second>(from, scale_.inverse, to, run_.key, run_.start + uint32_t(i));
        else
            write_bytes<second>(from, scale_.inverse, to);
    }

    const Run& run_;
    Stream moment_;
    float* scales_;
    const float* values_ = nullptr;
    int64_t start_ = 0, left_ = 0, done_ = 0;
    Scale scale_ = {};
};

// FP32 values of moments on their way to codes.
struct Tile {
    alignas(64) float first[kScaled], second[kScaled];
};

// Updates a chunk in place. Of a second moment in blocks the root is left, and of both the largest magnitude is kept.
template <bool blocked1, bool blocked2, class Rule>
MP_INLINE void update(const Rule& rule, int64_t start, const float* grad, float* main, float* first, float* second,
                      u32x16& top1, u32x16& top2) {
    for (int i = 0; i < kChunk; i += kLanes) {
        f32x16 g = {}, p = load<f32x16>(main + i), m = {}, v = {}, root = {};
        if (Rule::kGrad) g = load<f32x16>(grad + i);
        if (Rule::kFirst) m = load<f32x16>(first + i);
        if (Rule::kSecond) v = load<f32x16>(second + i);
        rule(g, p, m, v, root);
        rule.look(start + i, p, m, v);
        if (Rule::kMain) store(main + i, p);
        if (Rule::kMoments && Rule::kFirst) store(first + i, m);
        if (Rule::kMoments && Rule::kSecond) store(second + i, blocked2 ? root : v);
        if (blocked1) top1 = larger(top1, as<u32x16>(m) & 0x7fffffff);
        if (blocked2) top2 = larger(top2, as<u32x16>(root));  // not negative, unless it is NaN
    }
}

template <bool blocked1, bool blocked2, class F, class Rule>
static void run_blocks(const Run& run, const Rule& given) {
    const Rule rule = given;
    Coder<false, F> coder1(run);
    Coder<true, F> coder2(run);
    Tile tiles[2];
    Tail tail;
    alignas(64) float main_buffer[kChunk], grad_buffer[kChunk];
    for (int64_t start = 0; start < run.numel; start += kScaled) {
        Tile& tile = tiles[start / kScaled % 2];
        const int64_t n = run.numel - start < kScaled ? run.numel - start : kScaled;
        const float *scale1 = scale_at(run.scale1, start), *scale2 = scale_at(run.scale2, start);
        u32x16 top1 = {}, top2 = {};
        for_each_chunk(run, start, n, tail, [&](const Run& r, int64_t i, int64_t at) __attribute__((always_inline)) {
            fetch_ahead<F>(r, i);
            float *main = read_main<F>(r, i, main_buffer), *first = nullptr, *second = nullptr;
            const float* grad = Rule::kGrad ? read_grad(r.grad, i, grad_buffer) : nullptr;
            if (Rule::kFirst) first = read_moment<false, F>(r, i, scale1, tile.first + at);
            if (Rule::kSecond) second = read_moment<true, F>(r, i, scale2, tile.second + at);
            update<blocked1, blocked2>(rule, start + at, grad, main, first, second, top1, top2);
            if constexpr (blocked1) coder1.write_chunk();
            if constexpr (blocked2) coder2.write_chunk();
            if (Rule::kMain) write_main<F>(r, i, main);
            if (Rule::kMoments && Rule::kFirst && !blocked1) write_moment<false, F>(r, i, first);
            if (Rule::kMoments && Rule::kSecond && !blocked2) write_moment<true, F>(r, i, second);
        });
        if constexpr (blocked1) coder1.finish(), coder1.take(tile.first, start, n, top1);
        if constexpr (blocked2) coder2.finish(), coder2.take(tile.second, start, n, top2);
    }
    if constexpr (blocked1) coder1.finish();
    if constexpr (blocked2) coder2.finish();
    if (run.stream) finish_streaming();
}

// The rule over a run, for the kinds of moments that it changes.
template <class Rule>
MP_INLINE void run_rule(const Run& given, const Rule& rule) {
    Run run = given;
    run.stream = given.stream && given.output.data && uintptr_t(given.output.data) % 32 == 0;
    constexpr bool first = Rule::kMoments && Rule::kFirst, second = Rule::kMoments && Rule::kSecond;
    const bool blocked1 = first && is_blocked(run.moment1.dtype), blocked2 = second && is_blocked(run.moment2.dtype);
    if (blocked1 && blocked2) return run_blocks<first, second, AnyFormats>(run, rule);
    if (blocked1) return run_blocks<first, false, AnyFormats>(run, rule);
    if (blocked2) return run_blocks<false, second, AnyFormats>(run, rule);
    run_blocks<false, false, AnyFormats>(run, rule);
}

// The same where the dtypes are these, which are worth code of their own.
template <int32_t rest, int32_t first, int32_t second, class Rule>
MP_INLINE bool run_special(const Run& given, const Rule& rule) {
    if (given.remainder.dtype != rest || given.moment1.dtype != first || given.moment2.dtype != second) return false;
    Run run = given;
    run.stream = given.stream && given.output.data && uintptr_t(given.output.data) % 32 == 0;
    run_blocks<is_blocked(first), is_blocked(second), Formats<rest, first, second>>(run, rule);
    return true;
}
