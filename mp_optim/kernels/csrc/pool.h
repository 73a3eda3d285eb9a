// Distributes work over threads: torch's OpenMP threads if they can be reached, else a pool of this library.
#pragma once

#include <cstdint>
#include <functional>

namespace mp {

// Calls body(part) for every part in [0, parts), on at most `threads` threads including the caller's. Rethrows the
// first exception of a part, after all parts have ended.
void run_parts(int parts, int threads, const std::function<void(int)>& body);

// GOMP_parallel of GNU's OpenMP, or null. OpenMP's threads spin after each region. A second pool would compete
// with OpenMP's threads for cores, most of all directly after backward.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
void set_parallel(Parallel parallel);

}  // namespace mp
