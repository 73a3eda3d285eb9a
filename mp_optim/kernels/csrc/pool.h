// Splits work over threads: torch's own OpenMP threads where they can be reached, else a pool of ours.
#pragma once

#include <cstdint>
#include <functional>

namespace mp {

// Runs body(part) for every part in [0, parts) on up to `threads` threads, the caller's among them.
// Rethrows the first exception of any part, after all parts have ended.
void run_parts(int parts, int threads, const std::function<void(int)>& body);

// GNU OpenMP's GOMP_parallel, or null. Its threads spin for a while after each region: a second set of threads
// would compete with them for the cores, most of all right after a backward pass.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
void set_parallel(Parallel parallel);

}  // namespace mp
