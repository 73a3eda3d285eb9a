// Runs every kernel over exactly sized heap buffers, at every level, for the sanitizers to watch. Prints one hash of
// all results, which has to be the same at every level, with every compiler and on every architecture.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "api.h"

namespace {

int64_t bytes_of(int dtype) { return dtype == MP_F32 ? 4 : dtype == MP_I8 || dtype == MP_U8 ? 1 : dtype ? 2 : 0; }

// Bytes of 4-bit codes: whole runs of 64, two codes a byte.
int64_t packed_bytes(int64_t n) { return (n + 63) / 64 * 32; }

bool is_blocked(int dtype) { return dtype == MP_F16 || dtype == MP_I8 || dtype == MP_U8 || dtype == MP_I4; }

// Dtypes of a call.
struct Kind {
    int grad, output, moment1, moment2, remainder;
    bool noisy;
};

// A tensor of its own allocation, `offset` elements in: one element past its end is one too many.
struct Buffer {
    std::unique_ptr<char[]> memory;
    char* data;
    int64_t bytes;

    Buffer(int64_t numel, int64_t element, int64_t offset)
        : memory(new char[(numel + offset) * element]), bytes(numel * element) {
        data = memory.get() + offset * element;
        for (int64_t i = 0; i < numel * element; ++i) data[i] = char(i * 7 % 60);
    }
};

struct Call {
    std::vector<Buffer> buffers;
    std::vector<int64_t> numel;
    std::vector<uint32_t> streams;
    std::vector<void*> main, remainder, grad, moment1, moment2, scale1, scale2, output, changed;
    MpTensors tensors{};

    Call(const std::vector<int64_t>& sizes, const Kind& kind) : numel(sizes) {
        int main_dtype = kind.remainder ? MP_BF16 : MP_F32;
        int64_t offset = 0;
        auto add = [&](std::vector<void*>& table, int64_t n, int64_t element) {
            if (element == 0) return;
            buffers.emplace_back(n, element, offset++ % 5);
            table.push_back(buffers.back().data);
        };
        auto add_scales = [&](std::vector<void*>& table, int64_t n, int dtype) {
            if (!is_blocked(dtype)) return;
            add(table, (n + 255) / 256, 4);
            for (int64_t i = 0; i < (n + 255) / 256; ++i) ((float*)table.back())[i] = 0.25f + float(i % 7);
        };
        for (int64_t n : sizes) {
            streams.push_back(uint32_t(streams.size() * 0x10001 + 5));
            add(main, n, bytes_of(main_dtype));
            if (kind.remainder != MP_I0) add(remainder, n, bytes_of(kind.remainder));
            add(grad, n, bytes_of(kind.grad));
            if (kind.moment1 == MP_I4)
                add(moment1, packed_bytes(n), 1);
            else
                add(moment1, n, bytes_of(kind.moment1));
            add(moment2, n, bytes_of(kind.moment2));
            add_scales(scale1, n, kind.moment1);
            add_scales(scale2, n, kind.moment2);
            add(output, n, bytes_of(kind.output));
            if (kind.remainder) add(changed, (n + 63) / 64, 8);
        }
        auto table = [](std::vector<void*>& pointers) { return pointers.empty() ? nullptr : pointers.data(); };
        MpTensors& t = tensors;
        t.count = int64_t(sizes.size());
        t.numel = numel.data();
        t.main = table(main), t.remainder = table(remainder), t.grad = table(grad), t.output = table(output);
        t.moment1 = table(moment1), t.moment2 = table(moment2);
        t.scale1 = (float* const*)table(scale1), t.scale2 = (float* const*)table(scale2);
        t.stream = kind.noisy ? streams.data() : nullptr;
        t.main_dtype = main_dtype, t.remainder_dtype = kind.remainder, t.grad_dtype = kind.grad;
        t.changed = (uint64_t* const*)table(changed);
        t.moment1_dtype = kind.moment1, t.moment2_dtype = kind.moment2, t.output_dtype = kind.output;
        t.seed = 12345;
    }
};

int failures = 0;

uint64_t hash_of(const void* data, int64_t bytes, uint64_t hash) {
    for (int64_t i = 0; i < bytes; ++i) hash = (hash ^ ((const unsigned char*)data)[i]) * 1099511628211u;
    return hash;
}

void check(int32_t status, int32_t expected, const char* what) {
    if (status == expected) return;
    std::printf("%s: status %d instead of %d\n", what, status, expected);
    ++failures;
}

// A rule that steps each element by itself, and its scalars.
struct Rule {
    const char* name;
    std::vector<float> scalars;
};

const Rule kAdam{"adam", {0.5f, 0.9f, 0.1f, 0.99f, 0.01f, 1e-8f, 1e-3f, 1.0f, 1e-4f, 0.0f, 0.0f}};
const Rule kSgd{"sgd", {0.5f, 1e-3f, 0.9f, 1.0f, 0.1f, 1.0f, 0.0f}};
const Rule kLion{"lion", {0.5f, 0.9f, 0.1f, 0.99f, 0.01f, 1e-3f, 1e-4f, 1.0f}};

int32_t step(const MpTensors* t, const Rule* rule, int32_t threads) {
    return mp_step(t, rule->name, rule->scalars.data(), int32_t(rule->scalars.size()), threads);
}

uint64_t run_all(const std::vector<int64_t>& sizes, const Kind& kind, int threads) {
    Call call(sizes, kind);
    const MpTensors* t = &call.tensors;
    MpLamb lamb{0.5f, 0.9f, 0.1f, 0.99f, 0.01f, 1e-8f, 1.0f, 1.0f, 0.1f, 0.0f};
    std::vector<double> sums(2 * sizes.size());
    std::vector<float> ratios(sizes.size(), 0.01f);
    std::vector<int64_t> zeros(sizes.size());
    check(step(t, &kAdam, threads), MP_OK, "adam");
    check(step(t, &kSgd, threads), MP_OK, "sgd");
    check(step(t, &kLion, threads), MP_OK, "lion");
    check(mp_lamb_moments(t, &lamb, sums.data(), threads), MP_OK, "lamb moments");
    check(mp_lamb_apply(t, &lamb, ratios.data(), threads), MP_OK, "lamb apply");
    check(mp_measure(t, sums.data(), zeros.data(), threads), MP_OK, "measure");
    std::vector<double> squares(sizes.size());
    check(mp_measure(t, squares.data(), nullptr, threads), MP_OK, "measure");
    uint64_t hash = hash_of(sums.data(), sums.size() * sizeof(double), 14695981039346656037u);
    hash = hash_of(squares.data(), squares.size() * sizeof(double), hash);
    hash = hash_of(zeros.data(), zeros.size() * sizeof(int64_t), hash);
    for (const Buffer& buffer : call.buffers) hash = hash_of(buffer.data, buffer.bytes, hash);
    return hash;
}

// The same call once in place, and once into other memory, of which it knows nothing before.
template <class Scalars>
void run_apart(const std::vector<int64_t>& sizes, const Kind& kind, const Scalars& scalars, int threads,
               int32_t (*rule)(const MpTensors*, const Scalars*, int32_t)) {
    Call in_place(sizes, kind), present(sizes, kind), apart(sizes, kind), untouched(sizes, kind);
    auto from = [](std::vector<void*>& table) { return table.empty() ? nullptr : (const void* const*)table.data(); };
    MpTensors& t = apart.tensors;
    t.from_main = from(present.main), t.from_remainder = from(present.remainder);
    t.from_moment1 = from(present.moment1), t.from_moment2 = from(present.moment2);
    t.from_scale1 = (const float* const*)from(present.scale1), t.from_scale2 = (const float* const*)from(present.scale2);
    auto is_in = [](const std::vector<void*>& table, void* data) { return std::find(table.begin(), table.end(), data) != table.end(); };
    for (Buffer& buffer : apart.buffers)
        if (!is_in(apart.grad, buffer.data) && !is_in(apart.changed, buffer.data))  // whose bits are added to those there
            std::memset(buffer.data, 0x5a, size_t(buffer.bytes));
    check(rule(&in_place.tensors, &scalars, threads), MP_OK, "in place");
    check(rule(&apart.tensors, &scalars, threads), MP_OK, "apart");
    for (size_t i = 0; i < apart.buffers.size(); ++i) {
        const size_t bytes = size_t(apart.buffers[i].bytes);
        bool same = !std::memcmp(apart.buffers[i].data, in_place.buffers[i].data, bytes);
        check(same ? MP_OK : MP_FAILED, MP_OK, "apart is not as in place");
        same = !std::memcmp(present.buffers[i].data, untouched.buffers[i].data, bytes);
        check(same ? MP_OK : MP_FAILED, MP_OK, "present values were written");
    }
}

// Both passes of Muon over one call's tensors: momenta into memory of their own, then a step along the gradients.
int32_t muon(const MpTensors* given, const MpMuon* scalars, int32_t threads) {
    std::vector<std::vector<float>> made;
    std::vector<void*> outputs;
    for (int64_t i = 0; i < given->count; ++i) made.emplace_back(size_t(given->numel[i]) + 1);
    for (std::vector<float>& values : made) outputs.push_back(values.data());
    MpTensors momenta = *given, params = *given;
    momenta.main = momenta.remainder = nullptr, momenta.from_main = momenta.from_remainder = nullptr;
    momenta.main_dtype = momenta.remainder_dtype = MP_NONE;
    momenta.output = outputs.data(), momenta.output_dtype = MP_F32;
    params.moment1 = nullptr, params.from_moment1 = nullptr, params.moment1_dtype = MP_NONE;
    params.scale1 = nullptr, params.from_scale1 = nullptr;
    const std::vector<float> factors(size_t(given->count), 0.01f);
    int32_t status = mp_muon_momentum(&momenta, scalars, threads);
    return status ? status : mp_muon_apply(&params, 1e-4f, 1, factors.data(), threads);
}

void run_apart(const std::vector<int64_t>& sizes, const Kind& kind, int threads) {
    run_apart(sizes, kind, kAdam, threads, step);
    Kind one = kind;  // what a rule has no use for would be left as it is
    one.moment2 = MP_NONE;
    run_apart(sizes, one, kSgd, threads, step);
    run_apart(sizes, one, kLion, threads, step);
    run_apart(sizes, one, MpMuon{0.5f, 0.05f, -0.05f, 0, 1, 1}, threads, muon);
}

std::vector<Kind> plain_kinds() {
    std::vector<Kind> kinds;
    for (int grad : {MP_F32, MP_BF16, MP_F16})
        for (int output : {MP_NONE, MP_F32, MP_BF16, MP_F16})
            for (int moment : {MP_F32, MP_BF16}) kinds.push_back({grad, output, moment, moment, MP_NONE, false});
    return kinds;
}

std::vector<Kind> compact_kinds() {
    std::vector<Kind> kinds;
    for (int first : {MP_F32, MP_BF16, MP_F16, MP_I8})
        for (int second : {MP_F32, MP_BF16, MP_F16, MP_U8})
            for (int remainder : {MP_NONE, MP_I16, MP_I8, MP_I0})
                for (bool noisy : {false, true})
                    kinds.push_back({MP_BF16, noisy ? MP_BF16 : MP_NONE, first, second, remainder, noisy});
    for (bool noisy : {false, true}) {  // what goes with 4-bit codes is tried above
        kinds.push_back({MP_BF16, MP_BF16, MP_I4, MP_U8, MP_I8, noisy});
        kinds.push_back({MP_F16, MP_NONE, MP_I4, MP_F32, MP_NONE, noisy});
    }
    return kinds;
}

// A change to the arguments of a good call, after which they are bad.
template <class Change>
void bad_change(const Call& call, const char* what, Change change) {
    Rule adam{"adam", std::vector<float>(11)};
    MpTensors bad = call.tensors;
    change(bad);
    check(step(&bad, &adam, 1), MP_BAD_ARGUMENT, what);
}

void bad_compact_arguments() {
    Call call({5, 0, 3}, {MP_F32, MP_BF16, MP_I8, MP_U8, MP_I16, true});
    Rule adam{"adam", std::vector<float>(11)};
    check(step(&call.tensors, &adam, 1), MP_OK, "compact");
    bad_change(call, "no remainder", [](MpTensors& t) { t.remainder = nullptr; });
    bad_change(call, "a remainder of no dtype", [](MpTensors& t) { t.remainder_dtype = MP_NONE; });
    bad_change(call, "a remainder of float16", [](MpTensors& t) { t.remainder_dtype = MP_F16; });
    bad_change(call, "an FP32 param with a remainder", [](MpTensors& t) { t.main_dtype = MP_F32; });
    bad_change(call, "an FP32 output beside a remainder", [](MpTensors& t) { t.output_dtype = MP_F32; });
    bad_change(call, "no scales", [](MpTensors& t) { t.scale1 = nullptr; });
    bad_change(call, "scales of FP32", [](MpTensors& t) { t.moment2_dtype = MP_F32; });
    bad_change(call, "signed roots", [](MpTensors& t) { t.moment2_dtype = MP_I8; });
    bad_change(call, "roots of 4 bits", [](MpTensors& t) { t.moment2_dtype = MP_I4; });
    bad_change(call, "unsigned moments", [](MpTensors& t) { t.moment1_dtype = MP_U8; });
    call.scale2[2] = nullptr;
    check(step(&call.tensors, &adam, 1), MP_BAD_ARGUMENT, "null scales");
}

void bad_arguments() {
    Rule adam{"adam", std::vector<float>(11)};
    Call call({5, 0, 3}, {MP_F32, MP_BF16, MP_F32, MP_F32, MP_NONE, false});
    bad_change(call, "a bfloat16 param without a remainder", [](MpTensors& t) { t.main_dtype = MP_BF16; });
    check(step(nullptr, &adam, 1), MP_BAD_ARGUMENT, "no tensors");
    check(mp_step(&call.tensors, "adam", nullptr, 11, 1), MP_BAD_ARGUMENT, "no scalars");
    check(mp_step(&call.tensors, "adam", adam.scalars.data(), 10, 1), MP_BAD_ARGUMENT, "too few scalars");
    check(mp_step(&call.tensors, "adan", adam.scalars.data(), 11, 1), MP_BAD_ARGUMENT, "no such rule");
    check(mp_step(&call.tensors, nullptr, adam.scalars.data(), 11, 1), MP_BAD_ARGUMENT, "no rule");
    check(step(&call.tensors, &adam, 0), MP_BAD_ARGUMENT, "no threads");
    MpTensors bad = call.tensors;
    bad.grad_dtype = 9;
    check(step(&bad, &adam, 1), MP_BAD_ARGUMENT, "unknown dtype");
    bad = call.tensors;
    bad.moment2 = nullptr;
    check(step(&bad, &adam, 1), MP_BAD_ARGUMENT, "missing table");
    bad = call.tensors;
    bad.moment1 = nullptr, bad.moment1_dtype = MP_NONE;
    check(step(&bad, &adam, 1), MP_BAD_ARGUMENT, "no first moment");
    call.main[2] = nullptr;
    check(step(&call.tensors, &adam, 1), MP_BAD_ARGUMENT, "null tensor");
    call.main[2] = call.main[0];
    call.numel[0] = -1;
    check(step(&call.tensors, &adam, 1), MP_BAD_ARGUMENT, "negative size");
    check(mp_set_level("none"), MP_BAD_ARGUMENT, "unknown level");
}

}  // namespace

int main() {
    std::string levels = mp_levels();
    uint64_t first = 0;
    for (size_t start = 0; start < levels.size();) {
        size_t end = std::min(levels.find(',', start), levels.size());
        check(mp_set_level(levels.substr(start, end - start).c_str()), MP_OK, "level");
        uint64_t hash = 0;
        for (const Kind& kind : plain_kinds()) {
            hash = hash * 31 + run_all({1, 15, 16, 17, 0, 1023, 1024, 1025, 3000}, kind, 2);
            if (kind.moment1 == MP_F32) hash = hash * 31 + run_all({131072 * 2 + 5, 70000}, kind, 4);
        }
        for (const Kind& kind : compact_kinds())
            hash = hash * 31 + run_all({1, 15, 63, 64, 65, 0, 255, 256, 257, 1025, 3000}, kind, 2);
        for (bool noisy : {false, true})
            hash = hash * 31 + run_all({131072 * 2 + 5, 70000}, {MP_BF16, MP_NONE, noisy ? MP_I4 : MP_I8, MP_U8, MP_I8, noisy}, 4);
        for (const Kind& kind : plain_kinds()) run_apart({1, 17, 0, 1025, 3000}, kind, 2);
        for (const Kind& kind : compact_kinds()) run_apart({15, 64, 65, 0, 257, 3000}, kind, 2);
        if (start == 0) first = hash;
        check(hash == first ? MP_OK : MP_FAILED, MP_OK, "a level's bits differ");
        start = end + 1;
    }
    check(mp_set_level(levels.substr(0, levels.find(',')).c_str()), MP_OK, "the best level");
    std::vector<std::thread> callers;
    const Kind plain{MP_BF16, MP_BF16, MP_F32, MP_F32, MP_NONE, false};
    for (int i = 0; i < 3; ++i) callers.emplace_back([&plain] { run_all({200000, 7}, plain, 3); });
    for (std::thread& caller : callers) caller.join();
    bad_arguments();
    bad_compact_arguments();
    std::printf("%s, %d failures, results %016llx\n", levels.c_str(), failures, (unsigned long long)first);
    return failures != 0;
}
