// Checks of a call's tensors before kernels access them, and the status of a call.
#pragma once

#include <new>

#include "api.h"
#include "float_mode.h"

namespace mp {

// Returns true if current values are read from the `from_` tables.
inline bool is_apart(const MpTensors& t) { return t.from_main || t.from_moment1; }

// Returns true if a call's tables, dtypes and number of threads are valid. `needs_main`, `needs_first` and
// `needs_second` are true if the tables of main params, first and second moments are required.
bool valid(const MpTensors& t, bool needs_main, bool needs_first, bool needs_second, int32_t threads);

// Runs the body in the kernels' floating-point mode, and returns the status of the call.
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
