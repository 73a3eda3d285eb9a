// Functions of the C interface: they cut the elements of a call into parts, and run the level's kernels on threads.
#include "api.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "arguments.h"
#include "level.h"
#include "pool.h"

namespace mp {

#if defined(__x86_64__)
extern const Level kAvx512, kAvx2;
#elif defined(__aarch64__)
extern const Level kNeon;
#endif

const Level* const kLevels[] = {
#if defined(__x86_64__)
    &kAvx512, &kAvx2,
#elif defined(__aarch64__)
    &kNeon,
#endif
    nullptr};

namespace {

#include "mix.inl"

const Level* best_level() {
    for (int i = 0; kLevels[i]; ++i)
        if (kLevels[i]->supported()) return kLevels[i];
    return nullptr;
}

std::atomic<const Level*> chosen{nullptr};

// Distances at which kernels prefetch memory: elements in an update, bytes in a measurement. The distances do not change
// results.
constexpr int32_t kPrefetch = 512, kMeasurePrefetch = 8192;

// Returns the run of `count` elements of a tensor from `start` on. If `apart`, current values are read from the `from_`
// tables; otherwise kernels read them from the memory that they write.
Run run_at(const MpTensors& t, int64_t index, int64_t start, int64_t count, bool stream, bool apart) {
    auto at = [&](auto table, int32_t dtype) {
        return Stream{table ? (char*)table[index] + bytes_of(dtype, start) : nullptr, dtype};
    };
    auto scale_at = [&](auto table) { return table ? table[index] + start / kScaled : nullptr; };
    Run run;
    run.main = at(t.main, t.main_dtype);
    run.remainder = at(t.remainder, t.remainder_dtype);
    run.grad = at(t.grad, t.grad_dtype);
    run.moment1 = at(t.moment1, t.moment1_dtype);
    run.moment2 = at(t.moment2, t.moment2_dtype);
    run.output = at(t.output, t.output_dtype);
    run.scale1 = scale_at(t.scale1);
    run.scale2 = scale_at(t.scale2);
    run.old_main = apart ? at(t.from_main, t.main_dtype) : run.main;
    run.old_remainder = apart ? at(t.from_remainder, t.remainder_dtype) : run.remainder;
    run.old_moment1 = apart ? at(t.from_moment1, t.moment1_dtype) : run.moment1;
    run.old_moment2 = apart ? at(t.from_moment2, t.moment2_dtype) : run.moment2;
    run.average = at(t.average, t.average_dtype);
    run.old_average = apart ? at(t.from_average, t.average_dtype) : run.average;
    run.average_weight = t.average_weight;
    run.changed = t.changed ? t.changed[index] + start / kChanged : nullptr;
    run.old_scale1 = apart ? scale_at(t.from_scale1) : run.scale1;
    run.old_scale2 = apart ? scale_at(t.from_scale2) : run.scale2;
    run.follows = t.follows != 0;
    run.numel = count;
    run.start = uint32_t(start);
    run.noisy = t.stream != nullptr;
    run.key = run.noisy ? mix(t.seed ^ t.stream[index]) : 0;
    run.stream = stream;
    run.prefetch = kPrefetch;
    run.measure_prefetch = kMeasurePrefetch;
    return run;
}

// Smallest number of elements of a large launch, whose main params and moments do not fit into the caches.
constexpr int64_t kLargeLaunch = 4 << 20;

// Adds the sums of a tensor's pieces in adjacent pairs, padded with zeros.
double add_pairs(std::vector<double>& values) {
    while (values.size() > 1) {
        if (values.size() % 2) values.push_back(0.0);
        for (size_t i = 0; i < values.size() / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
        values.resize(values.size() / 2);
    }
    return values.empty() ? 0.0 : values[0];
}

// Copies the current values of a part of a tensor from the `from_` tables to the memory that kernels write.
void copy_sources_in_place(const MpTensors& t, int64_t index, int64_t start, int64_t count) {
    auto copy = [&](const auto* from, const auto* to, int64_t first, int64_t bytes) {
        if (from) std::memcpy((char*)to[index] + first, (const char*)from[index] + first, size_t(bytes));
    };
    auto elements = [&](const void* const* from, void* const* to, int32_t dtype) {
        copy(from, to, bytes_of(dtype, start), bytes_of(dtype, count));
    };
    int64_t scale = start / kScaled * int64_t(sizeof(float));
    int64_t scales = (count + kScaled - 1) / kScaled * int64_t(sizeof(float));
    elements(t.from_main, t.main, t.main_dtype);
    elements(t.from_remainder, t.remainder, t.remainder_dtype);
    elements(t.from_moment1, t.moment1, t.moment1_dtype);
    elements(t.from_moment2, t.moment2, t.moment2_dtype);
    elements(t.from_average, t.average, t.average_dtype);
    copy(t.from_scale1, t.scale1, scale, scales);
    copy(t.from_scale2, t.scale2, scale, scales);
}

// Prefetches the start of a tensor. The processor's prefetcher cannot predict addresses of the next tensor, which would
// cost most for small tensors.
void fetch_beginning(const MpTensors& t, int64_t index) {
    if (index >= t.count) return;
    auto fetch = [&](auto table) {
        if (!table) return;
        for (int64_t line = 0; line < 256; line += 64) __builtin_prefetch((const char*)table[index] + line, 0, 3);
    };
    fetch(t.grad);
    fetch(t.main);
    fetch(t.moment1);
    fetch(t.moment2);
    fetch(t.output);
    fetch(t.average);
}

// The elements of a call, counted in units: pieces or blocks of a tensor. A tensor's last unit may be shorter.
class Units {
public:
    Units(const MpTensors& t, int64_t unit) : tensors_(t), unit_(unit), first_(t.count + 1, 0) {
        for (int64_t i = 0; i < t.count; ++i) {
            first_[i + 1] = first_[i] + (t.numel[i] + unit - 1) / unit;
            elements_ += t.numel[i];
        }
    }

    int64_t total() const { return first_.back(); }
    int64_t first_of(int64_t tensor) const { return first_[tensor]; }
    int64_t elements() const { return elements_; }

    // Calls body(tensor, first unit, start, count) for each tensor with units in [from, to).
    template <class Body>
    void for_runs(int64_t from, int64_t to, Body body) const {
        int64_t i = std::upper_bound(first_.begin(), first_.end(), from) - first_.begin() - 1;
        for (; from < to; ++i) {
            int64_t end = std::min(to, first_[i + 1]);
            if (end == from) continue;
            int64_t start = (from - first_[i]) * unit_, stop = std::min((end - first_[i]) * unit_, tensors_.numel[i]);
            body(i, from, start, stop - start);
            from = end;
        }
    }

private:
    const MpTensors& tensors_;
    int64_t unit_;
    std::vector<int64_t> first_;
    int64_t elements_ = 0;
};

// Returns the number of parts of a call. Each thread gets several, so that a thread that starts late delays the call
// little. Each part is large enough to be worth the cost of scheduling.
int parts_for(const Units& units, int32_t threads) {
    constexpr int64_t kPartsPerThread = 4, kWorthAPart = 1 << 15;
    return int(std::max<int64_t>(
        1, std::min({threads * kPartsPerThread, units.total(), units.elements() / kWorthAPart})));
}

template <class Body>
void split(const Units& units, int32_t threads, Body body) {
    int parts = parts_for(units, threads);
    run_parts(parts, threads, [&](int part) {
        int64_t total = units.total();
        units.for_runs(total * part / parts, total * (part + 1) / parts, body);
    });
}

// Number of elements whose new main params stay in the cache until their averages are computed.
constexpr int64_t kTile = 8 * kBlock;

// Calls kernel(run, tensor) for all elements. With averages, a run is a tile, whose averages are computed while it is
// in the cache.
template <class Kernel>
void elementwise(const MpTensors& t, int32_t threads, Kernel kernel) {
    Units units(t, kBlock);
    const bool stream = units.elements() >= kLargeLaunch, apart = is_apart(t);
    split(units, threads, [&](int64_t i, int64_t, int64_t start, int64_t count) {
        fetch_beginning(t, i + 1);
        if (!t.average) return kernel(run_at(t, i, start, count, stream, apart), i);
        for (int64_t done = 0; done < count; done += kTile) {
            Run run = run_at(t, i, start + done, std::min(kTile, count - done), stream, apart);
            kernel(run, i);
            level().average(run);
        }
    });
}

// Calls kernel(run, sums of the piece) for all pieces, then adds the sums of each tensor's pieces: `width` sums per
// tensor.
template <class Kernel>
void reduce_pieces(const MpTensors& t, int width, double* sums, int32_t threads, Kernel kernel) {
    Units units(t, kPiece);
    std::vector<double> found(units.total() * width);
    split(units, threads, [&](int64_t i, int64_t unit, int64_t start, int64_t count) {
        fetch_beginning(t, i + 1);
        for (int64_t done = 0; done < count; done += kPiece, ++unit) {
            if (t.from_main) copy_sources_in_place(t, i, start + done, std::min(kPiece, count - done));
            kernel(run_at(t, i, start + done, std::min(kPiece, count - done), false, false), unit, &found[unit * width]);
        }
    });
    std::vector<double> values;
    for (int64_t i = 0; i < t.count; ++i)
        for (int which = 0; which < width; ++which) {
            values.clear();
            for (int64_t unit = units.first_of(i); unit < units.first_of(i + 1); ++unit)
                values.push_back(found[unit * width + which]);
            sums[i * width + which] = add_pairs(values);
        }
}

constexpr int kMostScalars = 16;

// Returns the rule of a call; null if name, number of scalars or tensors do not fit a rule.
const ElementRule* rule_for(const MpTensors* t, const char* name, const float* scalars, int32_t count, int32_t threads) {
    if (!t || !name || !scalars || count > kMostScalars) return nullptr;
    const ElementRule* rule = level().rules;
    while (rule->name && std::strcmp(rule->name, name)) ++rule;
    if (!rule->name || rule->scalars != count) return nullptr;
    return valid(*t, true, rule->moments & 1, rule->moments & 2, threads) ? rule : nullptr;
}

}  // namespace

const Level& level() {
    const Level* found = chosen.load();
    if (!found) chosen.store(found = best_level());
    return *found;
}

}  // namespace mp

using namespace mp;

int32_t mp_step(const MpTensors* t, const char* name, const float* scalars, int32_t count, int32_t threads) {
    const ElementRule* rule = rule_for(t, name, scalars, count, threads);
    if (!rule) return MP_BAD_ARGUMENT;
    return guarded([&] { elementwise(*t, threads, [&](const Run& run, int64_t) { rule->step(run, scalars); }); });
}

int32_t mp_lamb_moments(const MpTensors* t, const MpLamb* s, double* sums, int32_t threads) {
    if (!t || !s || !sums || !valid(*t, true, true, true, threads)) return MP_BAD_ARGUMENT;
    return guarded([&] {
        reduce_pieces(*t, 2, sums, threads, [&](const Run& run, int64_t, double* piece) {
            level().lamb_moments(run, *s, piece);
        });
    });
}

int32_t mp_lamb_apply(const MpTensors* t, const MpLamb* s, const float* ratios, int32_t threads) {
    if (!t || !s || !ratios || !valid(*t, true, true, true, threads) || t->from_main) return MP_BAD_ARGUMENT;
    return guarded([&] {
        elementwise(*t, threads, [&](const Run& run, int64_t i) { level().lamb_apply(run, *s, ratios[i]); });
    });
}

int32_t mp_muon_momentum(const MpTensors* t, const MpMuon* s, int32_t threads) {
    if (!t || !s || !valid(*t, false, true, false, threads) || t->main || t->moment2) return MP_BAD_ARGUMENT;
    if (t->count > 0 && !t->output) return MP_BAD_ARGUMENT;
    return guarded([&] { elementwise(*t, threads, [&](const Run& run, int64_t) { level().muon_momentum(run, *s); }); });
}

int32_t mp_muon_apply(const MpTensors* t, float decay, int32_t cautious_wd, const float* factors, int32_t threads) {
    if (!t || !factors || !valid(*t, true, false, false, threads) || t->moment1 || t->moment2) return MP_BAD_ARGUMENT;
    return guarded([&] {
        elementwise(*t, threads,
                    [&](const Run& run, int64_t i) { level().muon_apply(run, decay, cautious_wd, factors[i]); });
    });
}

int32_t mp_average(const MpTensors* t, int32_t threads) {
    if (!t || !valid(*t, true, false, false, threads) || t->from_main || (t->count && !t->average)) return MP_BAD_ARGUMENT;
    return guarded([&] { elementwise(*t, threads, [](const Run&, int64_t) {}); });
}

int32_t mp_measure(const MpTensors* t, double* sums, int64_t* zeros, int32_t threads) {
    if (!t || !sums || (t->count && !t->grad) || !valid(*t, false, false, false, threads)) return MP_BAD_ARGUMENT;
    return guarded([&] {
        Units units(*t, kPiece);
        std::vector<int64_t> counts(zeros ? units.total() : 0);
        reduce_pieces(*t, 1, sums, threads, [&](const Run& run, int64_t unit, double* piece) {
            *piece = level().sum_of_squares(run, zeros ? &counts[unit] : nullptr);
        });
        for (int64_t i = 0; zeros && i < t->count; ++i) {
            zeros[i] = 0;
            for (int64_t unit = units.first_of(i); unit < units.first_of(i + 1); ++unit) zeros[i] += counts[unit];
        }
    });
}

const char* mp_level() { return level().name; }

const char* mp_levels() {
    static const std::string names = [] {
        std::string list;
        for (int i = 0; kLevels[i]; ++i)
            if (kLevels[i]->supported()) list += (list.empty() ? "" : ",") + std::string(kLevels[i]->name);
        return list;
    }();
    return names.c_str();
}

int32_t mp_set_level(const char* name) {
    for (int i = 0; name && kLevels[i]; ++i)
        if (!std::strcmp(kLevels[i]->name, name) && kLevels[i]->supported()) {
            chosen.store(kLevels[i]);
            return MP_OK;
        }
    return MP_BAD_ARGUMENT;
}

void mp_set_parallel(void* gomp_parallel) { set_parallel(reinterpret_cast<Parallel>(gomp_parallel)); }

int32_t mp_abi() { return 22; }
