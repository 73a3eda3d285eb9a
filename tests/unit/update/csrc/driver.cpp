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

int64_t bytes_of(int dtype) { return dtype == MP_F32 ? 4 : 2; }

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
    std::vector<void*> main, grad, moment1, moment2, output;
    MpTensors tensors{};

    Call(const std::vector<int64_t>& sizes, int grad_dtype, int output_dtype, int moment_dtype) : numel(sizes) {
        int64_t offset = 0;
        auto add = [&](std::vector<void*>& table, int64_t n, int64_t element) {
            buffers.emplace_back(n, element, offset++ % 5);
            table.push_back(buffers.back().data);
        };
        for (int64_t n : sizes) {
            add(main, n, 4);
            add(grad, n, bytes_of(grad_dtype));
            add(moment1, n, bytes_of(moment_dtype));
            add(moment2, n, bytes_of(moment_dtype));
            if (output_dtype) add(output, n, bytes_of(output_dtype));
        }
        tensors = MpTensors{int64_t(sizes.size()), numel.data(), (float**)main.data(), grad.data(), moment1.data(),
                            moment2.data(), output_dtype ? output.data() : nullptr, grad_dtype, output_dtype,
                            moment_dtype, moment_dtype};
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

uint64_t run_all(const std::vector<int64_t>& sizes, int grad, int output, int moment, int threads) {
    Call call(sizes, grad, output, moment);
    const MpTensors* t = &call.tensors;
    MpAdam adam{0.5f, 0.9f, 0.1f, 0.99f, 0.01f, 1e-8f, 1e-3f, 1.0f, 1e-4f, 0.0f};
    MpLamb lamb{0.5f, 0.9f, 0.1f, 0.99f, 0.01f, 1e-8f, 1.0f, 1.0f, 0.1f, 0.0f};
    MpSgd sgd{0.5f, 1e-3f, 0.9f, 1.0f, 0.1f, 1, 0};
    MpLion lion{0.5f, 0.9f, 0.1f, 0.99f, 0.01f, 1e-3f, 1e-4f};
    std::vector<double> sums(2 * sizes.size());
    std::vector<float> ratios(sizes.size(), 0.01f);
    std::vector<int64_t> zeros(sizes.size());
    check(mp_adam(t, &adam, threads), MP_OK, "adam");
    check(mp_sgd(t, &sgd, threads), MP_OK, "sgd");
    check(mp_lion(t, &lion, threads), MP_OK, "lion");
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

void bad_arguments() {
    MpAdam adam{};
    Call call({5, 0, 3}, MP_F32, MP_BF16, MP_F32);
    check(mp_adam(nullptr, &adam, 1), MP_BAD_ARGUMENT, "no tensors");
    check(mp_adam(&call.tensors, nullptr, 1), MP_BAD_ARGUMENT, "no scalars");
    check(mp_adam(&call.tensors, &adam, 0), MP_BAD_ARGUMENT, "no threads");
    MpTensors bad = call.tensors;
    bad.grad_dtype = 9;
    check(mp_adam(&bad, &adam, 1), MP_BAD_ARGUMENT, "unknown dtype");
    bad = call.tensors;
    bad.moment2 = nullptr;
    check(mp_adam(&bad, &adam, 1), MP_BAD_ARGUMENT, "missing table");
    call.main[2] = nullptr;
    check(mp_adam(&call.tensors, &adam, 1), MP_BAD_ARGUMENT, "null tensor");
    call.main[2] = call.main[0];
    call.numel[0] = -1;
    check(mp_adam(&call.tensors, &adam, 1), MP_BAD_ARGUMENT, "negative size");
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
        for (int grad = MP_F32; grad <= MP_F16; ++grad)
            for (int output = MP_NONE; output <= MP_F16; ++output) {
                for (int moment : {MP_F32, MP_BF16})
                    hash = hash * 31 + run_all({1, 15, 16, 17, 0, 1023, 1024, 1025, 3000}, grad, output, moment, 2);
                hash = hash * 31 + run_all({131072 * 2 + 5, 70000}, grad, output, MP_F32, 4);
            }
        if (start == 0) first = hash;
        check(hash == first ? MP_OK : MP_FAILED, MP_OK, "a level's bits differ");
        start = end + 1;
    }
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) callers.emplace_back([] { run_all({200000, 7}, MP_BF16, MP_BF16, MP_F32, 3); });
    for (std::thread& caller : callers) caller.join();
    bad_arguments();
    std::printf("%s, %d failures, results %016llx\n", levels.c_str(), failures, (unsigned long long)first);
    return failures != 0;
}
