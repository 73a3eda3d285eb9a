// The floating-point mode in which kernels run: round to nearest, keep denormals, raise no exceptions.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace mp {

// Sets the calling thread's mode, and restores the former mode at the end of the scope. Each thread has a separate
// mode. torch.set_flush_denormal() and libraries built with -ffast-math change the mode of one thread, and a new thread
// inherits its creator's mode. So every thread that computes needs a FloatMode.
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
    static constexpr Word kSticky = 0x3f;        // Flags of exceptions that have occurred.
    static constexpr Word kSpecified = 0x1f80;   // The state of a new process, without exception flags.
    static Word get() { return _mm_getcsr() & ~kSticky; }
    static void set(Word word) {
        // The clobber prevents the compiler from moving memory operations across the change of the mode.
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
