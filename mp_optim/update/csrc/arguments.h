// Whether the tensors of a call are what kernels may read and write.
#pragma once

#include "api.h"

namespace mp {

// Whether present values come from elsewhere.
inline bool is_apart(const MpTensors& t) { return t.from_main || t.from_moment1; }

// Whether a call's tables, dtypes and number of threads are good; a rule says which tables it cannot do without.
bool valid(const MpTensors& t, bool needs_main, bool needs_first, bool needs_second, int32_t threads);

}  // namespace mp
