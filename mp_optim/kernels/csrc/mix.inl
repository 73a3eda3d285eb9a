// Included by code that mixes integers or vectors of integers, so that it is compiled for the instruction set of that
// code.

// Returns the 32-bit finalizer of MurmurHash3.
template <class Words>
static inline __attribute__((always_inline)) Words mix(Words x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}
