// A pool of threads that split a range of work. One call at a time; the caller does its share.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace mp {

// Runs body(part) for part in [0, parts), each on a thread of its own (part 0 on the caller's).
// Rethrows the first exception of any part, after all parts have ended.
void run_parts(int parts, const std::function<void(int)>& body);

// Cores for the workers, in turn; empty: wherever the system puts them.
void set_cores(const std::vector<int>& cores);

}  // namespace mp
