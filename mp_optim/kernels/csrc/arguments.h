// What a call is given, and how it ends: whether its tensors are what kernels may read and write, and its status.
#pragma once

#include <new>

#include "api.h"
#include "float_mode.h"

namespace mp {

// Whether present values come from elsewhere.
inline bool is_apart(const MpTensors& t) { return t.from_main || t.from_moment1; }

// Whether a call's tables, dtypes and number of threads are good; a rule says which tables it cannot do without.
bool valid(const MpTensors& t, bool needs_main, bool needs_first, bool needs_second, int32_t threads);

// Runs the body in the mode of kernels and returns its status.
template <class Body>
int32_t guarded(Body body) noexcept {
    const FloatMode mode;
    try {
        body();
        return MP_OK;
    } catch (const std::bad_alloc&) {
        return MP_NO_MEMORY;
    } catch (...) {
        return MP_FAILED;
    }
}

}  // namespace mp
