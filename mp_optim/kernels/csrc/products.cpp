// Splits products of matrices over threads: whole matrices while there is one for each, then rows of blocks of one.
#include "products.h"

#include <algorithm>
#include <string_view>

#include "arguments.h"
#include "level.h"
#include "pool.h"

namespace mp {

int64_t panels_together(const MpProduct& p) {
    // They stay in the second-level cache, of which every processor with such tiles has 2 MB for each core, beside what is
    // read and written meanwhile. A longer inner side is better off with a few of them than with one or two, and a long
    // factor with many, as it is read again for all of them.
    constexpr int64_t kCached = 1 << 19, kFewest = 4;
    const int64_t inner = p.factor ? p.rows : p.columns;
    const int64_t cached = p.factor && inner > kStepsTogether * kSide ? 2 * kCached : kCached;
    return std::max(kFewest, cached / (panels_of(inner) * kSide * kSide * 2));
}

Room room_of(const MpProduct& p) {
    const int64_t inner = p.factor ? p.rows : p.columns, columns = panels_of(p.factor ? p.columns : p.rows);
    const int64_t together = std::min(columns, panels_together(p)), block = kSide * kSide;
    const int64_t right = together * panels_of(inner) * block * 2, sums = std::max<int64_t>(2, 2 * together) * block * 4;
    return {kStepsTogether * block * 2, right, sums};
}

ProductJob job_of(const MpProduct& p, int64_t index, char* packed) {
    const int64_t wide = p.factor ? p.columns : p.rows;
    const Room room = room_of(p);
    return {p.factor ? p.factor + index * p.rows * p.rows : nullptr,
            p.x + index * p.rows * p.columns,
            p.out + index * p.rows * wide,
            (uint16_t*)packed,
            (uint16_t*)(packed + room.left),
            (float*)(packed + room.left + room.right)};
}

namespace {

bool valid(const MpProduct* p, int32_t threads) {
    if (!p || threads < 1 || std::min({p->count, p->rows, p->columns}) < 0) return false;
    if (!valid_chunk(p->chunk) || (!p->factor && p->out_is_turned)) return false;
    if (!p->factor && p->beta != 0.0f && (p->rows != p->columns || p->x_is_turned)) return false;
    return p->x && p->out && p->room;
}

// A matrix by all threads, each with memory of its own.
void share(const MpProduct& p, int64_t index, char* packed, int64_t each, int32_t threads) {
    run_parts(threads, threads, [&](int part) { multiply(p, job_of(p, index, packed + part * each), part, threads); });
}

void run(const MpProduct& p, int32_t threads) {
    const int64_t alone = p.count / threads * threads, each = room_of(p).bytes();
    char* packed = aligned(p.room);
    run_parts(threads, threads, [&](int part) {
        for (int64_t index = part; index < alone; index += threads)
            multiply(p, job_of(p, index, packed + part * each), 0, 1);
    });
    for (int64_t index = alone; index < p.count; ++index) share(p, index, packed, each, threads);
}

}  // namespace
}  // namespace mp

using namespace mp;

int32_t mp_has_products() { return level().name == std::string_view("avx512") && has_pairs(); }

int64_t mp_product_room(const MpProduct* p, int32_t threads) {
    if (!p || threads < 1) return -1;
    return kAlign + threads * room_of(*p).bytes();
}

int32_t mp_product(const MpProduct* p, int32_t threads) {
    if (!valid(p, threads) || !mp_has_products()) return MP_BAD_ARGUMENT;
    if (p->rows == 0 || p->columns == 0) return MP_OK;
    return guarded([&] { run(*p, threads); });
}
