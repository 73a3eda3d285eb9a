// Splits products of matrices over threads: whole matrices while there is one for each, then rows of blocks of one.
#include "products.h"

#include <algorithm>
#include <string_view>

#include "level.h"
#include "pool.h"

namespace mp {

int64_t panels_together(int64_t inner) {
    // They stay in the second-level cache, of which every processor with such tiles has 2 MB for each core. A longer inner
    // side is better off with a few of them than with one or two.
    constexpr int64_t kCached = 1 << 20, kFewest = 4;
    return std::max(kFewest, kCached / (panels_of(inner) * kSide * kSide * 2));
}

namespace {

constexpr int64_t kAlign = 64;

// Bytes that a thread needs for packed panels of the left and of the right factor.
struct Room {
    int64_t left, right;
};

Room room_of(const MpProduct& p) {
    const int64_t inner = p.factor ? p.rows : p.columns, columns = panels_of(p.factor ? p.columns : p.rows);
    const int64_t panel = panels_of(inner) * kSide * kSide * 2;
    return {panel, std::min(columns, panels_together(inner)) * panel};
}

bool valid(const MpProduct* p, int32_t threads) {
    if (!p || threads < 1 || std::min({p->count, p->rows, p->columns}) < 0) return false;
    if (p->chunk < kSide || p->chunk % kSide || (!p->factor && p->out_is_turned)) return false;
    if (!p->factor && p->beta != 0.0f && (p->rows != p->columns || p->x_is_turned)) return false;
    return p->x && p->out && p->room;
}

ProductJob job_of(const MpProduct& p, int64_t index, int part) {
    const Room room = room_of(p);
    char* start = (char*)((uintptr_t(p.room) + kAlign - 1) / kAlign * kAlign) + part * (room.left + room.right);
    const int64_t wide = p.factor ? p.columns : p.rows;
    return {p.factor ? p.factor + index * p.rows * p.rows : nullptr,
            p.x + index * p.rows * p.columns,
            p.out + index * p.rows * wide,
            (uint16_t*)start,
            (uint16_t*)(start + room.left)};
}

void run(const MpProduct& p, int32_t threads) {
    const int64_t alone = p.count / threads * threads;
    run_parts(threads, threads, [&](int part) {
        for (int64_t index = part; index < alone; index += threads) multiply(p, job_of(p, index, part), 0, 1);
        for (int64_t index = alone; index < p.count; ++index) multiply(p, job_of(p, index, part), part, threads);
    });
}

}  // namespace
}  // namespace mp

using namespace mp;

int32_t mp_has_products() { return level().name == std::string_view("avx512") && has_amx(); }

int64_t mp_product_room(const MpProduct* p, int32_t threads) {
    if (!p || threads < 1) return -1;
    return kAlign + threads * (room_of(*p).left + room_of(*p).right);
}

int32_t mp_product(const MpProduct* p, int32_t threads) {
    if (!valid(p, threads) || !mp_has_products()) return MP_BAD_ARGUMENT;
    if (p->rows == 0 || p->columns == 0) return MP_OK;
    try {
        run(*p, threads);
        return MP_OK;
    } catch (...) {
        return MP_FAILED;
    }
}
