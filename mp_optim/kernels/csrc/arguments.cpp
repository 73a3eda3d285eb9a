#include "arguments.h"

#include <algorithm>
#include <initializer_list>

#include "level.h"

namespace mp {

namespace {

bool is_one_of(int32_t dtype, std::initializer_list<int32_t> dtypes) {
    return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}

// Returns true if a table is null exactly when its dtype is MP_NONE.
template <class Table>
bool fits(Table table, int32_t dtype) {
    return (table != nullptr) == (dtype != MP_NONE && dtype != MP_I0);
}

// Returns true if a table is null, or has a pointer for every tensor that is not empty.
template <class Table>
bool is_full(const MpTensors& t, Table table) {
    for (int64_t i = 0; table && i < t.count; ++i)
        if (t.numel[i] > 0 && !table[i]) return false;
    return true;
}

bool valid_dtypes(const MpTensors& t) {
    bool compact = t.remainder_dtype != MP_NONE;
    bool grads = is_one_of(t.grad_dtype, {MP_F32, MP_BF16, MP_F16}) || (!t.grad && t.grad_dtype == MP_NONE);
    return grads && is_one_of(t.average_dtype, {MP_NONE, MP_F32, MP_BF16}) &&
           is_one_of(t.main_dtype, {MP_NONE, compact ? MP_BF16 : MP_F32}) &&
           is_one_of(t.remainder_dtype, {MP_NONE, MP_I16, MP_I8, MP_I0}) &&
           is_one_of(t.moment1_dtype, {MP_NONE, MP_F32, MP_BF16, MP_F16, MP_I8, MP_I4}) &&
           is_one_of(t.moment2_dtype, {MP_NONE, MP_F32, MP_BF16, MP_F16, MP_U8}) &&
           is_one_of(t.output_dtype, {MP_NONE, MP_BF16, compact ? MP_BF16 : MP_F32, compact ? MP_BF16 : MP_F16});
}

// Returns true if the call has all of the `from_` tables that it needs, or none.
bool valid_sources(const MpTensors& t) {
    bool any = is_apart(t);
    auto goes_with = [&](auto from, auto to) { return (from != nullptr) == (any && to != nullptr) && is_full(t, from); };
    return goes_with(t.from_main, t.main) && goes_with(t.from_remainder, t.remainder) &&
           goes_with(t.from_moment1, t.moment1) && goes_with(t.from_moment2, t.moment2) &&
           goes_with(t.from_scale1, t.scale1) && goes_with(t.from_scale2, t.scale2) &&
           goes_with(t.from_average, t.average);
}

}  // namespace

bool valid(const MpTensors& t, bool needs_main, bool needs_first, bool needs_second, int32_t threads) {
    if (t.count < 0 || threads < 1 || !valid_dtypes(t)) return false;
    if (t.count == 0) return true;
    if (!t.numel || (!t.grad && !t.average) || (needs_main && !t.main) || (needs_first && !t.moment1)) return false;
    if (needs_second && !t.moment2) return false;
    if (!fits(t.main, t.main_dtype) || !fits(t.remainder, t.remainder_dtype) || !fits(t.output, t.output_dtype) ||
        !fits(t.moment1, t.moment1_dtype) || !fits(t.moment2, t.moment2_dtype))
        return false;
    if (!fits(t.average, t.average_dtype) || (t.average && !t.main)) return false;
    if ((t.scale1 != nullptr) != is_blocked(t.moment1_dtype) || (t.scale2 != nullptr) != is_blocked(t.moment2_dtype))
        return false;
    if (t.remainder && !t.main) return false;
    if (t.follows && (t.main_dtype != MP_F32 || is_apart(t) || !is_one_of(t.output_dtype, {MP_BF16, MP_F16}))) return false;
    for (int64_t i = 0; i < t.count; ++i)
        if (t.numel[i] < 0) return false;
    for (void* const* table : {t.main, t.remainder, t.grad, t.moment1, t.moment2, t.output, t.average})
        if (!is_full(t, table)) return false;
    return valid_sources(t) && is_full(t, t.scale1) && is_full(t, t.scale2) && is_full(t, t.changed);
}

}  // namespace mp
