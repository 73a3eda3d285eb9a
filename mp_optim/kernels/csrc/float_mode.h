// The floating-point mode that kernels are specified in: round to nearest, keep denormals, raise no exception.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace mp {

// Sets the calling thread's mode, and restores the previous one when it goes out of scope.
//
// Each thread has a mode of its own: torch.set_flush_denormal() and libraries built with -ffast-math change that of one
// thread, and a new thread inherits its creator's. Whatever computes on a thread has one of these around it.
class FloatMode {
public:
    FloatMode() : before_(get()) {
        if (before_ != kSpecified) set(kSpecified);
    }
    ~FloatMode() {
        if (before_ != kSpecified) set(before_);
    }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

private:
#if defined(__SSE2__)
    using Word = uint32_t;
    static constexpr Word kSticky = 0x3f;        // flags of exceptions that have occurred
    static constexpr Word kSpecified = 0x1f80;   // the state of a new process, without those flags
    static Word get() { return _mm_getcsr() & ~kSticky; }
    static void set(Word word) {
        // The clobber keeps the compiler from moving arithmetic on memory to the other side.
        __asm__ volatile("ldmxcsr %0" : : "m"(word) : "memory");
    }
#elif defined(__aarch64__)
    using Word = uint64_t;
    static constexpr Word kSpecified = 0;
    static Word get() {
        Word word;
        __asm__ volatile("mrs %0, fpcr" : "=r"(word));
        return word;
    }
    static void set(Word word) { __asm__ volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
    using Word = int;
    static constexpr Word kSpecified = 0;
    static Word get() { return kSpecified; }
    static void set(Word) {}
#endif

    const Word before_;
};

}  // namespace mp
