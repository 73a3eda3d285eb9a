// Newton-Schulz steps of stacks of matrices, by themselves or between the passes of Muon.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <vector>

#include "arguments.h"
#include "level.h"
#include "pool.h"
#include "products.h"
#include "tensors.h"

namespace mp {
namespace {

bool valid(const MpSteps& s) {
    for (const MpChunks& chunks : {s.chunks, s.turned_chunks})
        if (!valid_chunk(chunks.gram) || !valid_chunk(chunks.left)) return false;
    return s.stack.x && std::min({s.stack.count, s.stack.rows, s.stack.columns}) >= 0 && valid_chunk(s.square_chunk);
}

bool valid(const MpSteps* stacks, int64_t count, const float* polynomials, int64_t steps, const void* room, int32_t threads) {
    if (!stacks || !room || threads < 1 || std::min(count, steps) < 0 || (!polynomials && steps > 0)) return false;
    return mp_has_products() && std::all_of(stacks, stacks + count, [](const MpSteps& s) { return valid(s); });
}

bool valid(const MpMuonPasses* p, int32_t threads) {
    if (!p || !p->momenta || !p->params || !p->scalars || !p->factors || !p->places || !p->seconds) return false;
    const MpTensors &momenta = *p->momenta, &params = *p->params;
    if (!mp::valid(momenta, false, true, false, threads) || momenta.output_dtype != MP_BF16) return false;
    if (momenta.main || momenta.moment2) return false;
    if (!mp::valid(params, true, false, false, threads) || params.moment1 || params.moment2 || params.grad_dtype != MP_BF16)
        return false;
    return params.count == momenta.count && !params.average;
}

// What is done to a matrix before its steps, and after them: in_parts(body) calls body(part, parts) for all parts.
struct NoPasses {
    template <class InParts>
    void before(int64_t, InParts) const {}
    template <class InParts>
    void after(int64_t, InParts) const {}
};

// Muon's, of the matrices of a stack.
class MuonPasses {
public:
    MuonPasses(const MpMuonPasses& given, const MpStack& stack, const int64_t* places)
        : given_(given), stack_(stack), places_(places), elements_(stack.rows * stack.columns) {}

    template <class InParts>
    void before(int64_t index, InParts in_parts) const {
        const bool apart = is_apart(*given_.momenta);
        std::vector<double> sums((elements_ + kPiece - 1) / kPiece);
        uint16_t* x = stack_.x + index * elements_;
        in_parts([&](int part, int parts) {
            for_pieces(part, parts, [&](int64_t start, int64_t n) {
                const Run all = run_at(*given_.momenta, tensor(index), first(index) + start, n, false, apart);
                level().muon_momentum(all, *given_.scalars);
                Run made = {};
                made.grad = {(char*)(x + start), MP_BF16}, made.numel = n;
                sums[start / kPiece] = level().sum_of_squares(made, nullptr);
            });
        });
        const float norm = norm_of(add_pairs(sums));
        in_parts([&](int part, int parts) {
            for_pieces(part, parts, [&](int64_t start, int64_t n) { level().divide(x + start, n, norm); });
        });
    }

    template <class InParts>
    void after(int64_t index, InParts in_parts) const {
        const bool apart = is_apart(*given_.params), stream = elements_ * stack_.count >= kLargeLaunch;
        const float factor = given_.factors[tensor(index)];
        in_parts([&](int part, int parts) {
            for_pieces(part, parts, [&](int64_t start, int64_t n) {
                const Run all = run_at(*given_.params, tensor(index), first(index) + start, n, stream, apart);
                level().muon_apply(all, given_.decay, given_.cautious_wd, factor);
            });
        });
    }

    // Whether the matrices are where the tensors say.
    bool fit() const {
        for (int64_t i = 0; i < stack_.count; ++i) {
            const int64_t t = tensor(i), start = first(i);
            if (t < 0 || t >= given_.momenta->count || start < 0 || start % kBlock) return false;
            for (const MpTensors* tensors : {given_.momenta, given_.params})
                if (start + elements_ > tensors->numel[t]) return false;
            const uint16_t* x = stack_.x + i * elements_ - start;
            if (given_.momenta->output[t] != x || given_.params->grad[t] != x) return false;
        }
        return true;
    }

private:
    int64_t tensor(int64_t index) const { return places_[2 * index]; }
    int64_t first(int64_t index) const { return places_[2 * index + 1]; }

    template <class Body>
    void for_pieces(int part, int parts, Body body) const {
        for (int64_t start = part * kPiece; start < elements_; start += parts * kPiece)
            body(start, std::min(kPiece, elements_ - start));
    }

    const MpMuonPasses& given_;
    const MpStack& stack_;
    const int64_t* places_;
    const int64_t elements_;
};

// Adds up time that threads spend.
class Clock {
public:
    class Running {
    public:
        Running(Clock& clock, int threads) : clock_(clock), threads_(threads), started_(now()) {}
        ~Running() { clock_.spent_ += threads_ * (now() - started_); }

    private:
        static int64_t now() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

        Clock& clock_;
        int threads_;
        int64_t started_;
    };

    double seconds() const { return double(spent_.load()) * 1e-9; }

private:
    std::atomic<int64_t> spent_{0};
};

// The steps of a stack of matrices. A thread that has a matrix for itself takes all of its steps one after the other, and
// what it makes on the way stays in its caches.
class Steps {
public:
    Steps(const MpSteps& given, const float* polynomials, int64_t count, int32_t threads)
        : x_(given.stack.x),
          matrices_(given.stack.count),
          rows_(std::min(given.stack.rows, given.stack.columns)),
          columns_(std::max(given.stack.rows, given.stack.columns)),
          turned_(given.stack.rows > given.stack.columns),
          given_(given),
          polynomials_(polynomials),
          count_(count),
          threads_(threads) {
        constexpr int64_t kTogether = 1 << 24;  // elements that all threads work on, so that memory is bounded
        alone_ = threads * rows_ * columns_ <= kTogether ? matrices_ / threads * threads : 0;
        for (int64_t step = 0; step < std::min<int64_t>(2, count_); ++step)
            for (const MpProduct& p : products(step, places(0, nullptr))) packed_ = std::max(packed_, room_of(p).bytes());
    }

    int64_t bytes() const { return kAlign + threads_ * packed_ + (alone_ ? threads_ : 1) * places(0, nullptr).bytes; }

    template <class Passes>
    void run(void* room, const Passes& passes, Clock& clock) const {
        if (rows_ == 0) return;
        char *packed = aligned(room), *values = packed + threads_ * packed_;
        const int64_t each = places(0, nullptr).bytes;
        run_parts(threads_, threads_, [&](int part) {
            for (int64_t index = part; index < alone_; index += threads_)
                take(index, values + part * each, packed + part * packed_, passes, clock, 1, [](auto body) { body(0, 1); });
        });
        for (int64_t index = alone_; index < matrices_; ++index)
            take(index, values, packed, passes, clock, threads_, [&](auto body) {
                run_parts(threads_, threads_, [&](int part) { body(part, threads_); });
            });
    }

private:
    // A matrix, memory for two more of its size, and for two symmetric ones.
    struct Places {
        uint16_t *x, *other, *third, *gram, *factor;
        int64_t bytes;  // of all but x
    };

    Places places(int64_t index, char* room) const {
        const int64_t matrix = aligned(rows_ * columns_ * 2), square = aligned(rows_ * rows_ * 2);
        auto at = [&](int64_t bytes) { return (uint16_t*)(uintptr_t(room) + bytes); };  // also of no room at all
        const int64_t bytes = 2 * matrix + 2 * square;
        return {x_ + index * rows_ * columns_, at(0), at(matrix), at(2 * matrix), at(2 * matrix + square), bytes};
    }

    template <class Passes, class InParts>
    void take(int64_t index, char* values, char* packed, const Passes& passes, Clock& clock, int threads,
              InParts in_parts) const {
        passes.before(index, in_parts);
        {
            const Clock::Running running(clock, threads);
            multiply_all(places(index, values), packed, in_parts);
        }
        passes.after(index, in_parts);
    }

    template <class InParts>
    void multiply_all(const Places& at, char* packed, InParts in_parts) const {
        if (turned_ && count_ > 0)  // once, as its products would go through memory by columns again and again
            in_parts([&](int part, int parts) { turn(at.x, columns_, rows_, at.third, part, parts); });
        for (int64_t step = 0; step < count_; ++step)
            for (const MpProduct& p : products(step, at))
                in_parts([&](int part, int parts) { multiply(p, job_of(p, 0, packed + part * packed_), part, parts); });
        if (count_ == 1) std::copy_n(at.other, rows_ * columns_, at.x);
    }

    // Where a step writes to: where the one before did not, and the last one to x, but for a single one.
    uint16_t* target(int64_t step, const Places& at) const {
        const bool odd = count_ % 2;
        if (step == count_ - 1) return count_ == 1 ? at.other : at.x;
        if (odd && step == count_ - 2) return at.third;
        return step % 2 ? at.x : at.other;
    }

    // G = x x^T, F = b G + c G^2 and a x + F x.
    std::array<MpProduct, 3> products(int64_t step, const Places& at) const {
        const float* polynomial = polynomials_ + 3 * step;
        const MpChunks& chunks = turned_ && step == 0 ? given_.turned_chunks : given_.chunks;
        const uint16_t* x = step ? target(step - 1, at) : turned_ ? at.third : at.x;
        const int32_t to_turned = turned_ && step == count_ - 1;
        const float a = polynomial[0], b = polynomial[1], c = polynomial[2];
        return {{{nullptr, x, at.gram, nullptr, 1, rows_, columns_, chunks.gram, 1.0f, 0.0f, 0, 0},
                 {nullptr, at.gram, at.factor, nullptr, 1, rows_, rows_, given_.square_chunk, c, b, 0, 0},
                 {at.factor, x, target(step, at), nullptr, 1, rows_, columns_, chunks.left, 1.0f, a, 0, to_turned}}};
    }

    uint16_t* x_;
    int64_t matrices_, rows_, columns_;
    bool turned_;  // tall
    const MpSteps& given_;
    const float* polynomials_;
    int64_t count_;
    int32_t threads_;
    int64_t alone_, packed_ = 0;
};

}  // namespace
}  // namespace mp

using namespace mp;

int64_t mp_newton_schulz_room(const MpSteps* stacks, int64_t count, int64_t steps, int32_t threads) {
    if (!stacks || count < 0 || steps < 0 || threads < 1) return -1;
    const std::vector<float> polynomials(3 * steps);
    int64_t most = 0;
    for (const MpSteps* s = stacks; s < stacks + count; ++s)
        most = std::max(most, Steps(*s, polynomials.data(), steps, threads).bytes());
    return most;
}

int32_t mp_newton_schulz(const MpSteps* stacks, int64_t count, const float* polynomials, int64_t steps, void* room,
                         int32_t threads) {
    if (!valid(stacks, count, polynomials, steps, room, threads)) return MP_BAD_ARGUMENT;
    return guarded([&] {
        Clock clock;
        for (const MpSteps* s = stacks; s < stacks + count; ++s)
            Steps(*s, polynomials, steps, threads).run(room, NoPasses(), clock);
    });
}

int32_t mp_muon_step(const MpMuonPasses* passes, const MpSteps* stacks, int64_t count, const float* polynomials,
                     int64_t steps, void* room, int32_t threads) {
    if (!valid(passes, threads) || !valid(stacks, count, polynomials, steps, room, threads)) return MP_BAD_ARGUMENT;
    const int64_t* places = passes->places;
    for (const MpSteps* s = stacks; s < stacks + count; places += 2 * s++->stack.count)
        if (!MuonPasses(*passes, s->stack, places).fit()) return MP_BAD_ARGUMENT;
    return guarded([&] {
        Clock clock;
        const int64_t* first = passes->places;
        for (const MpSteps* s = stacks; s < stacks + count; first += 2 * s++->stack.count)
            Steps(*s, polynomials, steps, threads).run(room, MuonPasses(*passes, s->stack, first), clock);
        *passes->seconds += clock.seconds() / threads;
    });
}
