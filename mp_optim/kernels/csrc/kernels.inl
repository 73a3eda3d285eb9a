// The kernels of a level. Included inside a level's namespace, after simd.inl.

#include "formats.inl"
#include "drivers.inl"
#include "rules.inl"
#include "sums.inl"

static void muon_momentum(const Run& run, const MpMuon& s) {
    const MuonMomentumRule rule(s);
    if (!run_special<MP_NONE, MP_F32, MP_NONE>(run, rule)) run_rule(run, rule);
}

static void muon_apply(const Run& run, float decay, bool cautious_wd, float factor) {
    const MuonApplyRule rule(decay, cautious_wd, factor);
    if (!run_special<MP_NONE, MP_NONE, MP_NONE>(run, rule)) run_rule(run, rule);
}

static void lamb_apply(const Run& run, const MpLamb& s, float ratio) { run_rule(run, LambApplyRule(s, ratio)); }

// Updates a chunk of averages from the stored main params.
template <int32_t rest>
MP_INLINE void average_chunk(const Run& run, int64_t i) {
    alignas(64) float p[kChunk], values[kChunk];
    const float* main = (const float*)run.main.data + i;
    if constexpr (rest != MP_NONE) {
        join<rest>(run.main.data + 2 * i, run.remainder.at(i), p);
        main = p;
    }
    const bool wide = run.average.dtype == MP_F32, starts = run.average_weight == 1.0f;
    float* to = wide ? (float*)run.average.at(i) : values;
    for (int k = 0; k < kChunk; k += kLanes) {
        f32x16 x = load<f32x16>(main + k);
        const char* from = run.old_average.at(i + k);
        f32x16 mean = wide ? load<f32x16>(from) : read_bf16(from);
        store(to + k, starts ? x : mean + (x - mean) * run.average_weight);
    }
    if (!wide) write_by_others<false>(values, run.average.at(i), run.key, run.start + uint32_t(i));
}

template <int32_t rest>
__attribute__((noinline)) static void average_run(const Run& given) {
    for_whole_chunks(given, [](const Run& run, int64_t) {
        for (int64_t i = 0; i < run.numel; i += kChunk) average_chunk<rest>(run, i);
    });
}

static void average(const Run& given) {
    Run run = given;  // Kernels read and write whole chunks only, so the last elements are copied to a buffer and back.
    run.grad.data = run.moment1.data = run.moment2.data = run.output.data = nullptr;
    run.old_main.data = run.old_remainder.data = run.old_moment1.data = run.old_moment2.data = nullptr;
    run.scale1 = run.scale2 = nullptr;
    if (run.remainder.dtype == MP_NONE) return average_run<MP_NONE>(run);
    if (run.remainder.dtype == MP_I16) return average_run<MP_I16>(run);
    if (run.remainder.dtype == MP_I0) return average_run<MP_I0>(run);
    average_run<MP_I8>(run);
}

// Params and directions of at most kBlock elements in FP32, padded with zeros.
struct Directions {
    alignas(64) float params[kBlock], updates[kBlock];

    void find(const Run& run, const MpLamb& s) {
        alignas(64) float p[kChunk], m[kChunk], v[kChunk];
        for_whole_chunks(run, [&](const Run& part, int64_t first_index) {
            for (int64_t i = 0; i < part.numel; i += kChunk) {
                const float *scale1 = scale_at(part.scale1, i), *scale2 = scale_at(part.scale2, i);
                const float* main = read_main<AnyFormats>(part, i, p);
                const float* first = read_moment<1, AnyFormats>(part, i, scale1, m);
                const float* second = read_moment<2, AnyFormats>(part, i, scale2, v);
                find_chunk(main, first, second, s, first_index + i);
            }
        });
        clear_from(run.numel);
    }

    void clear_from(int64_t numel) {
        for (int64_t i = numel; i < kBlock; ++i) params[i] = updates[i] = 0.0f;
    }

private:
    MP_MEMBER void find_chunk(const float* main, const float* first, const float* second, const MpLamb& s, int64_t to) {
        const MaybeFactor decay(s.decay);
        for (int i = 0; i < kChunk; i += kLanes) {
            f32x16 x = load<f32x16>(main + i);
            store(params + to + i, x);
            store(updates + to + i, lamb_direction(x, load<f32x16>(first + i), load<f32x16>(second + i), s, decay));
        }
    }
};

static void lamb_moments(const Run& run, const MpLamb& scalars, double* squares) {
    const MpLamb s = scalars;
    PairSum params, updates;
    Directions directions;
    const LambMomentsRule rule(s);
    const LambWholeRule whole(s, directions.params, directions.updates);
    for (int64_t start = 0; start < run.numel; start += kBlock) {
        Run block = part_of(run, start, run.numel - start < kBlock ? run.numel - start : kBlock);
        if (run_special<MP_NONE, MP_F32, MP_F32>(block, whole)) {
            directions.clear_from(block.numel);
        } else {
            run_rule(block, rule);
            // Compute the directions from the stored moments, because mp_lamb_apply reads only stored moments.
            directions.find(block, s);
        }
        params.add(block_sum(directions.params));
        updates.add(block_sum(directions.updates));
    }
    squares[0] = params.total();
    squares[1] = updates.total();
}
