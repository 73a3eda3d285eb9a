// Checksum of 16-bit elements in one pass. mp_optim/kernels/checksums.py defines the checksum.
#include <algorithm>

#include "arguments.h"
#include "level.h"
#include "pool.h"

namespace mp {
namespace {

constexpr int64_t kRow = 1024;       // Number of elements of a row; each element of a row has the weight of its column.
constexpr int64_t kPart = 64 * kRow;  // Smallest number of elements of a thread's part.

// Returns an odd weight below 2^31, because multiplying by an odd number is invertible.
int32_t weight(int64_t index) {
    constexpr int64_t kPrime = 0x01000193, kStart = 0x9E3779B9, kMost = 0x7FFFFFFF;
    return int32_t((index * kPrime + kStart) % kMost) | 1;
}

struct Columns {
    int32_t weights[kRow];

    Columns() {
        for (int64_t i = 0; i < kRow; ++i) weights[i] = weight(i);
    }
};

}  // namespace
}  // namespace mp

using namespace mp;

int32_t mp_weighted_sum(const int16_t* x, int64_t n, int64_t* sum, int32_t threads) {
    if (!x || !sum || n < 0 || threads < 1) return MP_BAD_ARGUMENT;
    static const Columns columns;
    const int64_t rows = (n + kRow - 1) / kRow;
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, n / kPart));
    uint64_t total = 0;  // The sum wraps modulo 2^64, as torch's int64 sum does.
    const int32_t status = guarded([&] {
        run_parts(int(parts), threads, [&](int part) {
            uint64_t found = 0;
            for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
                const int64_t count = std::min(kRow, n - row * kRow);
                found += uint64_t(level().weighted_sum(x + row * kRow, columns.weights, count)) * uint64_t(weight(row));
            }
            __atomic_fetch_add(&total, found, __ATOMIC_RELAXED);
        });
    });
    *sum = int64_t(total);
    return status;
}
