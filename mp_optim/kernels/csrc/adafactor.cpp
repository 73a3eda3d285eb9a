// Adafactor's passes over a box of a parameter, split over threads: each has a range of rows, or of elements.
#include <algorithm>
#include <atomic>

#include "arguments.h"
#include "level.h"
#include "pool.h"

namespace mp {
namespace {

constexpr int64_t kStrip = 1024;  // columns whose sums stay in the first-level cache
constexpr int64_t kLine = 4096;   // elements of a tensor that stay together

// Runs body(from, to) over ranges of `units` units of `each` elements.
template <class Body>
int32_t split(int64_t units, int64_t each, int32_t threads, Body body) noexcept {
    constexpr int64_t kPartsPerThread = 4, kWorthAPart = 1 << 15;
    return guarded([&] {
        int64_t worth = units * std::max<int64_t>(each, 1) / kWorthAPart;
        int64_t parts = std::max<int64_t>(1, std::min({threads * kPartsPerThread, units, worth}));
        run_parts(int(parts), threads, [&](int part) { body(units * part / parts, units * (part + 1) / parts); });
    });
}

// The same over the elements of a tensor: body(from, count).
template <class Body>
int32_t split_elements(int64_t n, int32_t threads, Body body) noexcept {
    return split((n + kLine - 1) / kLine, kLine, threads, [&](int64_t from, int64_t to) {
        body(from * kLine, std::min(to * kLine, n) - from * kLine);
    });
}

void add(int64_t* to, int64_t value) { __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }

bool valid(const MpMatrices* m, int32_t threads) {
    if (!m || threads < 1 || std::min({m->matrices, m->rows, m->columns, m->matrix, m->row, m->column}) < 0) return false;
    return m->values && m->matrix + m->matrices <= m->all_matrices && m->row + m->rows <= m->all_rows &&
           m->column + m->columns <= m->all_columns;
}

// Calls body(matrix, first row, number of rows) for the rows [from, to) of the box, counted over its matrices.
template <class Body>
void for_matrices(const MpMatrices& m, int64_t from, int64_t to, Body body) {
    while (from < to) {
        int64_t row = from % m.rows, count = std::min(m.rows - row, to - from);
        body(from / m.rows, row, count);
        from += count;
    }
}

// Digits of some rows of a matrix, between columns that are at most kStrip apart.
void strip_digits(const MpMatrices& m, int64_t matrix, int64_t row, int64_t rows, int64_t column, double scale,
                  int64_t* by_row, int64_t* by_column) {
    const int64_t wide = std::min(kStrip, m.columns - column);
    const int64_t next_rows = m.all_matrices * m.all_rows, next_columns = m.all_matrices * m.all_columns;
    int64_t high[kStrip], low[kStrip];
    std::fill_n(high, wide, 0), std::fill_n(low, wide, 0);
    for (int64_t r = row; r < row + rows; ++r) {
        int64_t sums[2] = {};
        const float* x = m.values + (matrix * m.rows + r) * m.columns + column;
        for (int64_t line = 0; line < wide; line += 16) __builtin_prefetch(x + m.columns + line, 0, 2);
        level().row_digits(x, wide, scale, high, low, sums);
        int64_t* to = by_row + (m.matrix + matrix) * m.all_rows + m.row + r;  // no other thread has this row
        to[0] += sums[0], to[next_rows] += sums[1];
    }
    int64_t* to = by_column + (m.matrix + matrix) * m.all_columns + m.column + column;
    for (int64_t c = 0; c < wide; ++c) add(to + c, high[c]), add(to + next_columns + c, low[c]);
}

}  // namespace
}  // namespace mp

using namespace mp;

int32_t mp_largest(const float* x, int64_t n, float* top, int32_t threads) {
    if (!x || !top || n < 0 || threads < 1) return MP_BAD_ARGUMENT;
    std::atomic<int32_t> bits{0};
    int32_t status = split_elements(n, threads, [&](int64_t from, int64_t count) {
        int32_t found = level().largest_bits(x + from, count), seen = bits.load();
        while (seen < found && !bits.compare_exchange_weak(seen, found)) {
        }
    });
    const int32_t found = std::min(bits.load(), 0x7f800000);  // inf stands for NaN, too
    std::copy_n((const char*)&found, sizeof(float), (char*)top);
    return status;
}

int32_t mp_total_digits(const float* x, int64_t n, double scale, int64_t* sums, int32_t threads) {
    if (!x || !sums || n < 0 || threads < 1) return MP_BAD_ARGUMENT;
    return split_elements(n, threads, [&](int64_t from, int64_t count) {
        int64_t found[2] = {};
        level().total_digits(x + from, count, scale, found);
        add(sums, found[0]), add(sums + 1, found[1]);
    });
}

int32_t mp_matrix_digits(const MpMatrices* m, double scale, int64_t* by_row, int64_t* by_column, int32_t threads) {
    if (!valid(m, threads) || !by_row || !by_column) return MP_BAD_ARGUMENT;
    return split(m->matrices * m->rows, m->columns, threads, [&](int64_t from, int64_t to) {
        for_matrices(*m, from, to, [&](int64_t matrix, int64_t row, int64_t rows) {
            for (int64_t column = 0; column < m->columns; column += kStrip)
                strip_digits(*m, matrix, row, rows, column, scale, by_row, by_column);
        });
    });
}

int32_t mp_turn_matrices(const MpMatrices* m, const float* weights, const float* columns, float floor, int32_t threads) {
    if (!valid(m, threads) || !weights || !columns) return MP_BAD_ARGUMENT;
    return split(m->matrices * m->rows, m->columns, threads, [&](int64_t from, int64_t to) {
        for_matrices(*m, from, to, [&](int64_t matrix, int64_t row, int64_t rows) {
            const float* of_rows = weights + (m->matrix + matrix) * m->all_rows + m->row;
            const float* of_columns = columns + (m->matrix + matrix) * m->all_columns + m->column;
            for (int64_t r = row; r < row + rows; ++r)
                level().turn_row(m->values + (matrix * m->rows + r) * m->columns, of_columns, m->columns, of_rows[r], floor);
        });
    });
}

int32_t mp_turn_by_variance(float* x, float* variance, int64_t n, const MpAdafactor* s, int32_t threads) {
    if (!x || !variance || !s || n < 0 || threads < 1) return MP_BAD_ARGUMENT;
    return split_elements(n, threads, [&](int64_t from, int64_t count) {
        level().turn_by_variance(x + from, variance + from, count, *s);
    });
}

int32_t mp_descend(float* main, const float* direction, int64_t n, float decay, float size, int32_t threads) {
    if (!main || !direction || n < 0 || threads < 1) return MP_BAD_ARGUMENT;
    return split_elements(n, threads, [&](int64_t from, int64_t count) {
        level().descend(main + from, direction + from, count, decay, size);
    });
}
