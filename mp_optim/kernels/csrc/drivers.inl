// Loop of a rule over a run of elements: decode, update and encode chunk by chunk. Included inside a level's namespace,
// after formats.inl.

// -- chunks -------------------------------------------------------------------------------------------

constexpr Stream Run::* kStreams[] = {&Run::grad,        &Run::old_main, &Run::old_remainder, &Run::old_moment1, &Run::old_moment2,
                                      &Run::old_average, &Run::main,     &Run::remainder,     &Run::moment1,     &Run::moment2,
                                      &Run::output,      &Run::average};
constexpr int kStreamCount = 12, kFirstWritten = 6;

// Returns the part of a run from element `start` on, a multiple of kScaled.
MP_INLINE Run part_of(const Run& run, int64_t start, int64_t numel) {
    Run part = run;
    for (Stream Run::* stream : kStreams)
        if ((run.*stream).data) (part.*stream).data = (run.*stream).at(start);
    if (run.scale1) part.scale1 = run.scale1 + start / kScaled;
    if (run.scale2) part.scale2 = run.scale2 + start / kScaled;
    if (run.scale1) part.old_scale1 = run.old_scale1 + start / kScaled;
    if (run.scale2) part.old_scale2 = run.old_scale2 + start / kScaled;
    if (run.changed) part.changed = run.changed + start / kChanged;
    part.start = run.start + uint32_t(start);
    part.numel = numel;
    return part;
}

// The elements of a run after its last whole block, copied to separate memory and padded with zeros. With any scalars,
// the result of a zero is not larger than the result of any other element. So the padding does not change the largest
// value of a block.
struct Tail {
    alignas(64) char memory[kStreamCount][4 * kScaled];
    Run run;
    int64_t numel;

    __attribute__((noinline)) Tail(const Run& whole, int64_t start)
        : run(part_of(whole, start, (whole.numel - start + kChunk - 1) / kChunk * kChunk)), numel(whole.numel - start) {
        run.stream = run.past = false;
        for (int k = 0; k < kStreamCount; ++k) {
            Stream& mine = run.*kStreams[k];
            if (!mine.data) continue;
            __builtin_memset(memory[k], 0, bytes_of(mine.dtype, run.numel));
            __builtin_memcpy(memory[k], mine.data, bytes_of(mine.dtype, numel));
            mine.data = memory[k];
        }
    }

    __attribute__((noinline)) void write_back(const Run& whole, int64_t start) {
        for (int k = kFirstWritten; k < kStreamCount; ++k) {
            Stream theirs = whole.*kStreams[k];
            if (theirs.data)
                __builtin_memcpy(theirs.at(start), memory[k], bytes_of(theirs.dtype, numel));
        }
    }
};

// Calls body(run, index of its first element) for the whole chunks of a run, then for the rest. With scales, blocks
// instead of chunks must be whole.
template <class Body>
MP_INLINE void for_whole_chunks(const Run& run, Body body) {
    const int64_t unit = run.scale1 || run.scale2 ? kScaled : kChunk, whole = run.numel / unit * unit;
    if (whole) {
        Run part = run;
        part.numel = whole;
        body(part, 0);
    }
    if (whole == run.numel) return;
    Tail tail(run, whole);
    body(tail.run, whole);
    tail.write_back(run, whole);
}

// Prefetch explicitly, because the prefetchers of some processors are slow with four or five streams.
template <bool to_write>
MP_INLINE void fetch_ahead(const Stream& stream, int32_t dtype, int64_t i) {
    const char* from = stream.data + bytes_of(dtype, i);
    for (int64_t line = 0; line < bytes_of(dtype, kChunk); line += 64) __builtin_prefetch(from + line, to_write, 3);
}

template <class F, class Rule>
MP_INLINE void fetch_ahead(const Run& r, int64_t i) {
    const int32_t main = !Rule::kHasMain ? MP_NONE : F::rest(r) == MP_NONE ? MP_F32 : MP_BF16;
    fetch_ahead<false>(r.old_main, main, i);
    fetch_ahead<false>(r.old_remainder, F::rest(r), i);
    fetch_ahead<false>(r.grad, r.grad.dtype, i);
    fetch_ahead<false>(r.old_moment1, F::template moment<1>(r), i);
    fetch_ahead<false>(r.old_moment2, F::template moment<2>(r), i);
    if (Rule::kHasMain && r.follows) fetch_ahead<false>(r.output, r.output.dtype, i);
    if (r.past || (r.main.data == r.old_main.data && r.moment1.data == r.old_moment1.data)) return;
    fetch_ahead<true>(r.main, main, i);
    fetch_ahead<true>(r.remainder, F::rest(r), i);
    fetch_ahead<true>(r.moment1, F::template moment<1>(r), i);
    fetch_ahead<true>(r.moment2, F::template moment<2>(r), i);
}

// -- blocks -------------------------------------------------------------------------------------------

MP_INLINE const float* scale_at(const float* scales, int64_t start) {
    return scales ? scales + start / kScaled : nullptr;
}

template <int which, class F>
MP_INLINE void write_codes_here(const Run& run, Scale scale, const float* from, int64_t i) {
    constexpr bool second = which == 2;
    const int32_t dtype = F::template moment<which>(run);
    char* to = moment_of<which>(run).data + bytes_of(dtype, i);
    if (!scale.good)
        __builtin_memset(to, 0, bytes_of(dtype, kChunk));
    else if (dtype == MP_F16)
        write_halves<second>(from, scale.inverse, to);
    else if (!second && dtype == MP_I4)
        write_pairs(from, scale.inverse, to, run.noisy, run.key, run.start + uint32_t(i));
    else if (run.noisy)
        write_bytes_randomly<second>(from, scale.inverse, to, run.key, run.start + uint32_t(i));
    else
        write_bytes<second>(from, scale.inverse, to);
}

// Writes the codes of a chunk of a moment in blocks.
template <int which, class F>
MP_INLINE void write_codes(const Run& run, Scale scale, const float* from, int64_t i) {
    if constexpr (F::kKnown)
        write_codes_here<which, F>(run, scale, from, i);
    else
        outlined([&] { write_codes_here<which, F>(run, scale, from, i); });
}

template <int which, class F>
__attribute__((noinline)) static void write_block(const Run& run, Scale scale, const float* from, int64_t start) {
    for (int64_t i = start; i < run.numel; i += kChunk) write_codes<which, F>(run, scale, from + i - start, i);
}

// FP32 values of moments that are not encoded yet.
struct Tile {
    alignas(64) float first[kScaled], second[kScaled];
};

// Addresses of a chunk's FP32 values: current values, and memory for new values.
struct Chunk {
    const float *grad, *main, *first, *second;
    float *new_main, *new_first, *new_second;
};

// Updates a chunk. For a second moment in blocks, the root is stored instead of the new value. The largest magnitudes
// are returned in `top1` and `top2`.
template <bool blocked1, bool blocked2, class Rule>
MP_INLINE void update(const Rule& rule, int64_t start, const Chunk& at, u32x16& top1, u32x16& top2) {
    for (int i = 0; i < kChunk; i += kLanes) {
        f32x16 g = {}, p = {}, m = {}, v = {}, root = {};
        if (Rule::kHasMain) p = load<f32x16>(at.main + i);
        if (Rule::kGrad) g = load<f32x16>(at.grad + i);
        if (Rule::kFirst) m = load<f32x16>(at.first + i);
        if (Rule::kSecond) v = load<f32x16>(at.second + i);
        rule(g, p, m, v, root);
        rule.look(start + i, p, m, v);
        if (Rule::kMain) store(at.new_main + i, p);
        if (Rule::kMoments && Rule::kFirst) store(at.new_first + i, m);
        if (Rule::kMoments && Rule::kSecond) store(at.new_second + i, blocked2 ? root : v);
        if (blocked1 && Rule::kFirst) top1 = larger(top1, as<u32x16>(m) & 0x7fffffff);
        // A root has no sign bit, unless it is NaN, so its bits can be compared.
        if (blocked2) top2 = larger(top2, as<u32x16>(root));
    }
}

// Steps a run of whole blocks, or of some chunks of one block. The codes of a block are written while the next block is
// updated, because the scale is known only after the last element. Main params are encoded one chunk later: otherwise
// instructions that wait for divisions would fill the processor's queues.
template <bool blocked1, bool blocked2, class F, class Rule>
__attribute__((noinline)) static void run_chunks(const Run& given_run, const Rule& given, int64_t first_index) {
    const Rule rule = given;
    const Run run = given_run;
    const bool marks = Rule::kMain && Rule::kHasMain && run.changed, follows = Rule::kHasMain && run.follows;
    // Two buffers: the main params of this chunk and of the previous chunk.
    alignas(64) float mains[2][kChunk];
    alignas(64) char weights[2][4 * kChunk];
    const float* to_write = nullptr;
    Tile tiles[2];
    Scale code1 = {}, code2 = {};
    for (int64_t start = 0; start < run.numel; start += kScaled) {
        auto &tile = tiles[start / kScaled % 2], &last = tiles[1 - start / kScaled % 2];
        const int64_t left = run.numel - start, n = left < kScaled ? left : kScaled;
        const float *scale1 = scale_at(run.old_scale1, start), *scale2 = scale_at(run.old_scale2, start);
        u32x16 top1 = {}, top2 = {};
#pragma GCC unroll 1
        for (int64_t at = 0; at < n; at += kChunk) {
            const int64_t i = start + at;
            const int which = i / kChunk % 2;
            float* const p = mains[which];
            alignas(64) float g[kChunk], m[kChunk], v[kChunk];
            if (run.prefetch) fetch_ahead<F, Rule>(run, i + run.prefetch);
            Chunk chunk = {};
            if (Rule::kHasMain) chunk.main = read_main<F>(run, i, p);
            chunk.new_main = run.past || !Rule::kHasMain ? p : place_of_main<F>(run, i, p);
            if (Rule::kGrad) chunk.grad = read_grad(run.grad, i, g);
            if (marks) keep_weights<F>(run, i, chunk.main, weights[which]);
            if (follows) chunk.main = follow_weights(run, i, chunk.main, p);
            if (Rule::kFirst) chunk.first = read_moment<1, F>(run, i, scale1, m);
            if (Rule::kSecond) chunk.second = read_moment<2, F>(run, i, scale2, v);
            chunk.new_first = blocked1 ? tile.first + at : run.past ? m : place_of_moment<1, F>(run, i, m);
            chunk.new_second = blocked2 ? tile.second + at : run.past ? v : place_of_moment<2, F>(run, i, v);
            update<blocked1, blocked2>(rule, first_index + i, chunk, top1, top2);
            if (blocked1 && start > 0) write_codes<1, F>(run, code1, last.first + at, i - kScaled);
            if (blocked2 && start > 0) write_codes<2, F>(run, code2, last.second + at, i - kScaled);
            if (Rule::kMain && i) write_main<F>(run, i - kChunk, to_write, marks ? weights[1 - which] : nullptr);
            to_write = chunk.new_main;
            if (Rule::kMoments && Rule::kFirst && !blocked1) write_moment<1, F>(run, i, chunk.new_first);
            if (Rule::kMoments && Rule::kSecond && !blocked2) write_moment<2, F>(run, i, chunk.new_second);
        }
        if (blocked1) code1 = scale_of(bring_within<false>(tile.first, n, largest(top1)), F::template moment<1>(run));
        if (blocked2) code2 = scale_of(bring_within<true>(tile.second, n, largest(top2)), F::template moment<2>(run));
        if (blocked1) run.scale1[start / kScaled] = code1.scale;
        if (blocked2) run.scale2[start / kScaled] = code2.scale;
    }
    const int64_t rest = run.numel - kChunk, end = (run.numel - 1) / kScaled;
    if (Rule::kMain) write_main<AnyFormats>(run, rest, to_write, marks ? weights[rest / kChunk % 2] : nullptr);
    if (blocked1) write_block<1, F>(given_run, code1, tiles[end % 2].first, end * kScaled);
    if (blocked2) write_block<2, F>(given_run, code2, tiles[end % 2].second, end * kScaled);
    if (run.stream || run.past) finish_streaming();
}

template <bool blocked1, bool blocked2, class F, class Rule>
MP_INLINE void run_blocks(const Run& run, const Rule& rule) {
    for_whole_chunks(run, [&](const Run& part, int64_t first_index) __attribute__((always_inline)) {
        run_chunks<blocked1, blocked2, F>(part, rule, first_index);
    });
}

// Decides how a run's results are written: to the caches, or past them.
MP_INLINE Run with_ways(const Run& given) {
    auto can_stream = [](const Stream& to) { return uintptr_t(to.data) % 32 == 0; };
    Run run = given;
    run.stream = given.stream && given.output.data && can_stream(given.output);
    // Averages read the new main params again, so write main params to the caches if there are averages.
    run.past = !given.average.data && given.main.data != given.old_main.data && can_stream(given.main) && can_stream(given.moment1) &&
               can_stream(given.moment2);
    return run;
}

// Steps a run by a rule, with the code for the kinds of moments that the rule changes.
template <class Rule>
MP_INLINE void run_rule(const Run& given, const Rule& rule) {
    const Run run = with_ways(given);
    constexpr bool first = Rule::kMoments && Rule::kFirst, second = Rule::kMoments && Rule::kSecond;
    const bool blocked1 = first && is_blocked(run.moment1.dtype), blocked2 = second && is_blocked(run.moment2.dtype);
    if (blocked1 && blocked2) return run_blocks<first, second, AnyFormats>(run, rule);
    if (blocked1) return run_blocks<first, false, AnyFormats>(run, rule);
    if (blocked2) return run_blocks<false, second, AnyFormats>(run, rule);
    run_blocks<false, false, AnyFormats>(run, rule);
}

// Steps a run by a rule if it has exactly these dtypes, which are common enough for specialized code. Returns false for
// other dtypes.
template <int32_t rest, int32_t first, int32_t second, class Rule>
MP_INLINE bool run_special(const Run& given, const Rule& rule) {
    if (given.remainder.dtype != rest || given.moment1.dtype != first || given.moment2.dtype != second) return false;
    const Run run = with_ways(given);
    run_blocks<is_blocked(first), is_blocked(second), Formats<rest, first, second>>(run, rule);
    return true;
}
