// Packs factors as tiles and multiplies them, by AMX or by AVX-512's products of pairs of bfloat16, in the same order. A
// tile has 16 rows of 64 bytes: of a left factor 16 rows of 32 elements; of a right one 16 pairs of rows, of 16 columns.
// Two tiles of each make a block of 32 x 32 results.
#include "products.h"

#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <algorithm>
#include <cstring>

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace mp {
namespace {

bool allowed_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // Linux gives a process tiles if it asks
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool found_pairs() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & (1u << 5)) == 0) return false;  // bfloat16 in AVX-512
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

bool found_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    return (d & kBf16) != 0 && (d & kTile) != 0 && allowed_tiles();
}

bool has_amx() {
    static const bool found = found_amx();
    return found;
}

}  // namespace

bool has_pairs() {
    static const bool found = found_pairs();
    return found;
}

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")
#endif

namespace {

constexpr int64_t kTile = 512;          // elements of a tile
constexpr int64_t kPair = 2 * kTile;    // of the two tiles that a step takes of a factor
constexpr int64_t kBlock = kSide * kSide;

struct TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

int64_t left_of(int64_t all, int64_t from) { return all - from < kSide ? all - from : kSide; }

__mmask32 first(int64_t n) { return n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1; }

// A row of a block, zeros where it ends.
__m512i row_at(const uint16_t* block, int64_t ld, int64_t row, int64_t rows, __mmask32 columns) {
    return row < rows ? _mm512_maskz_loadu_epi16(columns, block + row * ld) : _mm512_setzero_si512();
}

// Transposes 16 x 16 elements of four bytes.
void turn_16(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// Two rows, element by element: their first 16 columns, or the others.
__m512i interleaved(__m512i even, __m512i odd, bool others) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                         4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i which = others ? _mm512_add_epi16(low, _mm512_set1_epi16(16)) : low;
    return _mm512_permutex2var_epi16(even, which, odd);
}

// Transposes 32 x 32 elements.
void turn_rows(__m512i* rows) {
    __m512i low[16], high[16];
    for (int i = 0; i < 16; ++i) {
        low[i] = interleaved(rows[2 * i], rows[2 * i + 1], false);
        high[i] = interleaved(rows[2 * i], rows[2 * i + 1], true);
    }
    turn_16(low);
    turn_16(high);
    for (int i = 0; i < 16; ++i) rows[i] = low[i], rows[16 + i] = high[i];
}

// The transpose of a block, filled up with zeros: 32 rows of 32.
void turn_block(const uint16_t* block, int64_t ld, int64_t rows, int64_t columns, uint16_t* to) {
    const __mmask32 mask = first(columns);
    __m512i values[kSide];
    for (int i = 0; i < kSide; ++i) values[i] = row_at(block, ld, i, rows, mask);
    turn_rows(values);
    for (int i = 0; i < kSide; ++i) _mm512_storeu_si512(to + i * kSide, values[i]);
}

// A block as it lies: as the two tiles of a left factor, or filled up with zeros.
void copy_block(const uint16_t* block, int64_t ld, int64_t rows, int64_t columns, uint16_t* to) {
    const __mmask32 mask = first(columns);
    for (int i = 0; i < kSide; ++i) _mm512_storeu_si512(to + i * kSide, row_at(block, ld, i, rows, mask));
}

// A block as the two tiles of a right factor.
void pair_rows(const uint16_t* block, int64_t ld, int64_t rows, int64_t columns, uint16_t* to) {
    const __mmask32 mask = first(columns);
    for (int i = 0; i < 16; ++i) {
        __m512i even = row_at(block, ld, 2 * i, rows, mask), odd = row_at(block, ld, 2 * i + 1, rows, mask);
        _mm512_storeu_si512(to + i * kSide, interleaved(even, odd, false));
        _mm512_storeu_si512(to + kTile + i * kSide, interleaved(even, odd, true));
    }
}

// The transpose of a block as the two tiles of a right factor: each row of the block is a column.
void pair_columns(const uint16_t* block, int64_t ld, int64_t rows, int64_t columns, uint16_t* to) {
    const __mmask32 mask = first(columns);
    for (int half = 0; half < 2; ++half) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i) r[i] = row_at(block, ld, 16 * half + i, rows, mask);
        turn_16(r);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + half * kTile + i * kSide, r[i]);
    }
}

// x, of which rows and columns may have changed places in memory.
struct Lying {
    const uint16_t* data;
    int64_t rows, columns;  // of x
    bool turned;

    int64_t ld() const { return turned ? rows : columns; }
    const uint16_t* at(int64_t i, int64_t j) const { return data + (turned ? j * rows + i : i * columns + j); }
    int64_t rows_at(int64_t i) const { return left_of(rows, i); }
    int64_t columns_at(int64_t j) const { return left_of(columns, j); }

    void block(int64_t i, int64_t j, uint16_t* to) const {
        if (turned)
            turn_block(at(i, j), ld(), columns_at(j), rows_at(i), to);
        else
            copy_block(at(i, j), ld(), rows_at(i), columns_at(j), to);
    }

    void right_tiles(int64_t i, int64_t j, uint16_t* to) const {
        if (turned)
            pair_columns(at(i, j), ld(), columns_at(j), rows_at(i), to);
        else
            pair_rows(at(i, j), ld(), rows_at(i), columns_at(j), to);
    }
};

// Steps of a panel of a left factor: its 32 rows, of which a tile takes 16 a step.
struct LeftPanel {
    const uint16_t* data;
    int64_t row, step;  // from a row to the next, and from a step to the next
};

// Steps [from, to) where they lie, if that is whole and they are not read often; else a copy that is filled up with zeros,
// whose 16 steps fit the first-level cache.
LeftPanel left_panel(const Lying& left, int64_t i, int64_t from, int64_t to, bool often, uint16_t* room) {
    if (!often && !left.turned && left.rows_at(i) == kSide && left.columns % kSide == 0)
        return {left.at(i, from * kSide), left.columns, kSide};
    for (int64_t step = from; step < to; ++step) left.block(i, step * kSide, room + (step - from) * kPair);
    return {room, kSide, kPair};
}

// Adds the products of some steps along the inner side to 32 x 32 sums, or to zeros. What is read of the right factor is not
// read again soon, and is not to take the left one's place in the first-level cache.
void sum_by_tiles(const LeftPanel& panel, const uint16_t* right, int64_t steps, bool from_zero, float* to) {
    const uint16_t *upper = panel.data, *lower = upper + 16 * panel.row;
    const int64_t row = panel.row * 2;
    if (from_zero) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, to, 4 * kSide);
        _tile_loadd(1, to + 16, 4 * kSide);
        _tile_loadd(2, to + 16 * kSide, 4 * kSide);
        _tile_loadd(3, to + 16 * kSide + 16, 4 * kSide);
    }
    for (int64_t step = 0; step < steps; ++step, upper += panel.step, lower += panel.step, right += kPair) {
        _tile_loadd(4, upper, row);
        _tile_stream_loadd(6, right, 64);
        _tile_stream_loadd(7, right + kTile, 64);
        _tile_loadd(5, lower, row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to, 4 * kSide);
    _tile_stored(1, to + 16, 4 * kSide);
    _tile_stored(2, to + 16 * kSide, 4 * kSide);
    _tile_stored(3, to + 16 * kSide + 16, 4 * kSide);
}

// The same for 8 rows of the 32, whose sums stay in registers.
void sum_rows_by_pairs(const uint16_t* left, const LeftPanel& panel, const uint16_t* right, int64_t steps, bool from_zero,
                       float* to) {
    constexpr int kRows = kSide / 4;
    __m512 low[kRows], high[kRows];
    for (int i = 0; i < kRows; ++i) {
        low[i] = from_zero ? _mm512_setzero_ps() : _mm512_loadu_ps(to + i * kSide);
        high[i] = from_zero ? _mm512_setzero_ps() : _mm512_loadu_ps(to + i * kSide + 16);
    }
    for (int64_t step = 0; step < steps; ++step, left += panel.step, right += kPair)
        for (int pair = 0; pair < 16; ++pair) {
            const __m512bh low_pairs = (__m512bh)_mm512_loadu_si512(right + pair * kSide);
            const __m512bh high_pairs = (__m512bh)_mm512_loadu_si512(right + kTile + pair * kSide);
            for (int i = 0; i < kRows; ++i) {
                int32_t both;
                std::memcpy(&both, left + i * panel.row + 2 * pair, sizeof both);
                const __m512bh factor = (__m512bh)_mm512_set1_epi32(both);
                low[i] = _mm512_dpbf16_ps(low[i], factor, low_pairs);
                high[i] = _mm512_dpbf16_ps(high[i], factor, high_pairs);
            }
        }
    for (int i = 0; i < kRows; ++i) {
        _mm512_storeu_ps(to + i * kSide, low[i]);
        _mm512_storeu_ps(to + i * kSide + 16, high[i]);
    }
}

void sum_products(const LeftPanel& panel, const uint16_t* right, int64_t steps, bool from_zero, float* to) {
    if (has_amx()) return sum_by_tiles(panel, right, steps, from_zero, to);
    for (int row = 0; row < kSide; row += kSide / 4)
        sum_rows_by_pairs(panel.data + row * panel.row, panel, right, steps, from_zero, to + row * kSide);
}

void add(const float* from, float* to) {
    for (int64_t i = 0; i < kBlock; i += 16)
        _mm512_storeu_ps(to + i, _mm512_add_ps(_mm512_loadu_ps(to + i), _mm512_loadu_ps(from + i)));
}

// 32 results in a row, rounded to bfloat16.
__m512i rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// A row of sums.
struct Row {
    __m512 low, high;

    Row(const float* sums, __m512 alpha)
        : low(_mm512_mul_ps(_mm512_loadu_ps(sums), alpha)), high(_mm512_mul_ps(_mm512_loadu_ps(sums + 16), alpha)) {}

    // The product and the sum are one operation.
    void add(__m512 to_low, __m512 to_high, __m512 beta) {
        low = _mm512_fmadd_ps(to_low, beta, low);
        high = _mm512_fmadd_ps(to_high, beta, high);
    }
};

// sums * alpha, rounded once.
void scale_block(const float* sums, float alpha, __m512i* rows) {
    const __m512 a = _mm512_set1_ps(alpha);
    for (int i = 0; i < kSide; ++i) {
        Row row(sums + i * kSide, a);
        rows[i] = rounded(row.low, row.high);
    }
}

// sums * alpha + addend * beta, rounded once; the addend as the two tiles of a right factor.
void add_block(const float* sums, float alpha, const uint16_t* addend, float beta, __m512i* rows) {
    const __m512 a = _mm512_set1_ps(alpha), b = _mm512_set1_ps(beta);
    const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000));
    for (int i = 0; i < 16; ++i) {
        const __m512i low = _mm512_loadu_si512(addend + i * kSide), high = _mm512_loadu_si512(addend + kTile + i * kSide);
        Row even(sums + 2 * i * kSide, a), odd(sums + (2 * i + 1) * kSide, a);
        even.add(_mm512_castsi512_ps(_mm512_slli_epi32(low, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)), b);
        odd.add(_mm512_castsi512_ps(_mm512_and_si512(low, upper)), _mm512_castsi512_ps(_mm512_and_si512(high, upper)), b);
        rows[2 * i] = rounded(even.low, even.high);
        rows[2 * i + 1] = rounded(odd.low, odd.high);
    }
}

// Where a block of results goes.
struct Place {
    uint16_t* data;
    int64_t ld, rows, columns;

    void put(const __m512i* values) const {
        const __mmask32 mask = first(columns);
        for (int64_t i = 0; i < rows; ++i) _mm512_mask_storeu_epi16(data + i * ld, mask, values[i]);
    }
};

// One of them, or both if the result is symmetric.
struct Places {
    Place plain, turned;

    Places(const MpProduct& p, const ProductJob& job, int64_t i, int64_t j) {
        const int64_t wide = job.factor ? p.columns : p.rows;
        const int64_t rows = left_of(p.rows, i), columns = left_of(wide, j);
        const bool mirrored = !job.factor && i != j;
        plain = {p.out_is_turned ? nullptr : job.out + i * wide + j, wide, rows, columns};
        turned = {p.out_is_turned || mirrored ? job.out + j * p.rows + i : nullptr, p.rows, columns, rows};
    }

    void put(__m512i* values) const {
        if (plain.data) plain.put(values);
        if (!turned.data) return;
        turn_rows(values);
        turned.put(values);
    }
};

// A right factor's panels [from, to) as tiles.
void pack_right(const Lying& right, int64_t from, int64_t to, uint16_t* room) {
    const int64_t steps = panels_of(right.rows);
    auto pack = [&](int64_t step, int64_t j) {
        right.right_tiles(step * kSide, j * kSide, room + ((j - from) * steps + step) * kPair);
    };
    if (right.turned) {
        for (int64_t j = from; j < to; ++j)
            for (int64_t step = 0; step < steps; ++step) pack(step, j);
    } else {
        for (int64_t step = 0; step < steps; ++step)
            for (int64_t j = from; j < to; ++j) pack(step, j);
    }
}

// A panel of the left factor times panels [from, to) of the right one, whose tiles are in job.right.
class PanelProduct {
public:
    PanelProduct(const MpProduct& p, const ProductJob& job, const Lying& left, int64_t row, int64_t from, int64_t to)
        : p_(p), job_(job), left_(left), row_(row), from_(from), to_(to), steps_(panels_of(left.columns)) {}

    void run() const {
        const int64_t each = p_.chunk / kSide;
        for (int64_t start = 0; start < steps_; start += each) sum_chunk(start, std::min(steps_, start + each));
    }

private:
    // Products of steps that are added one after the other, some of them at a time.
    void sum_chunk(int64_t start, int64_t stop) const {
        constexpr int64_t kOften = 12;  // panels for which a copy is worth while
        const bool often = steps_ > kStepsTogether && to_ - from_ >= kOften;
        const int64_t parts = (stop - start + kStepsTogether - 1) / kStepsTogether, each = (stop - start + parts - 1) / parts;
        for (int64_t step = start; step < stop; step += each) {
            const int64_t end = std::min(stop, step + each);
            const LeftPanel left = left_panel(left_, row_ * kSide, step, end, often, job_.left);
            for (int64_t j = from_; j < to_; ++j) {
                const uint16_t* tiles = job_.right + (j - from_) * steps_ * kPair;
                const bool alone = step == 0 && end == steps_;
                float *total = job_.sums + (alone ? j % 2 : 2 * (j - from_)) * kBlock, *sums = start ? total + kBlock : total;
                sum_products(left, tiles + step * kPair, end - step, step == start, sums);
                if (end == stop && start) add(sums, total);
                if (end == steps_) put(j, total, tiles);
            }
        }
    }

    void put(int64_t j, const float* total, const uint16_t* tiles) const {
        __m512i values[kSide];
        if (p_.beta == 0.0f)
            scale_block(total, p_.alpha, values);
        else
            add_block(total, p_.alpha, tiles + row_ * kPair, p_.beta, values);  // they are those of x at (row, j)
        Places(p_, job_, row_ * kSide, j * kSide).put(values);
    }

    const MpProduct& p_;
    const ProductJob& job_;
    const Lying& left_;
    const int64_t row_, from_, to_, steps_;
};

}  // namespace

void turn(const uint16_t* x, int64_t rows, int64_t columns, uint16_t* to, int64_t part, int64_t parts) {
    uint16_t block[kBlock];
    for (int64_t i = part * kSide; i < rows; i += parts * kSide)
        for (int64_t j = 0; j < columns; j += kSide) {
            turn_block(x + i * columns + j, columns, left_of(rows, i), left_of(columns, j), block);
            const __mmask32 mask = first(left_of(rows, i));
            for (int64_t k = 0; k < left_of(columns, j); ++k)
                _mm512_mask_storeu_epi16(to + (j + k) * rows + i, mask, _mm512_loadu_si512(block + k * kSide));
        }
}

void multiply(const MpProduct& p, const ProductJob& job, int64_t part, int64_t parts) {
    const Lying x = {job.x, p.rows, p.columns, p.x_is_turned != 0};
    const Lying left = job.factor ? Lying{job.factor, p.rows, p.rows, false} : x;
    const Lying right = job.factor ? x : Lying{job.x, p.columns, p.rows, !x.turned};  // x^T
    const int64_t rows = panels_of(p.rows), columns = panels_of(right.columns), together = panels_together(p);
    const TileShapes shapes;
    if (has_amx()) _tile_loadconfig(&shapes);
    for (int64_t from = 0; from < columns; from += together) {
        const int64_t to = std::min(columns, from + together);
        pack_right(right, from, to, job.right);
        for (int64_t i = part; i < rows; i += parts)  // half of what is symmetric
            if (job.factor || i >= from)
                PanelProduct(p, job, left, i, from, job.factor ? to : std::min(to, i + 1)).run();
    }
    if (has_amx()) _tile_release();
}

}  // namespace mp

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace mp {
bool has_pairs() { return false; }
void multiply(const MpProduct&, const ProductJob&, int64_t, int64_t) {}
void turn(const uint16_t*, int64_t, int64_t, uint16_t*, int64_t, int64_t) {}
}  // namespace mp
#endif
