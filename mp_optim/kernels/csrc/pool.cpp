#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "float_mode.h"

#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace mp {
namespace {

// The parts of one call. Each thread takes the next part until none is left.
struct Work {
    const std::function<void(int)>& body;
    int parts;
    std::atomic<int> next{0};
    std::mutex mutex;
    std::exception_ptr error;

    Work(const std::function<void(int)>& body, int parts) : body(body), parts(parts) {}

    void take() {
        const FloatMode mode;  // The thread may be the caller's, one of this pool, or OpenMP's, so set the mode here.
        for (int part; (part = next.fetch_add(1)) < parts;) {
            try {
                body(part);
            } catch (...) {
                std::lock_guard<std::mutex> lock(mutex);
                if (!error) error = std::current_exception();
            }
        }
    }
};

class Pool {
public:
    void run(Work& work, int threads) {
        std::lock_guard<std::mutex> one_call(call_);
        while (int(workers_.size()) < threads - 1) start_worker();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work;
            helpers_ = threads - 1;
            busy_ = threads - 1;
            ++round_;
        }
        start_.notify_all();
        work.take();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return busy_ == 0; });
    }

private:
    void start_worker() {
        int index = int(workers_.size());
        uint64_t seen = round_;
        workers_.emplace_back([this, index, seen] { loop(index, seen); });
    }

    void loop(int index, uint64_t seen) {
        for (;;) {
            Work* work;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                start_.wait(lock, [&] { return round_ != seen; });
                seen = round_;
                if (index >= helpers_) continue;
                work = work_;
            }
            work->take();
            std::lock_guard<std::mutex> lock(mutex_);
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::mutex call_, mutex_;
    std::condition_variable start_, done_;
    std::vector<std::thread> workers_;
    Work* work_ = nullptr;
    uint64_t round_ = 0;
    int helpers_ = 0, busy_ = 0;
};

std::atomic<Parallel> parallel{nullptr};

// The pool is never destroyed, because a process that exits must not wait for its threads.
Pool* the_pool = nullptr;
std::mutex pool_mutex;

// A forked child has none of its parent's threads, neither this pool's nor OpenMP's. The mutex may be locked, so make a
// new pool.
void start_anew_after_fork() {
    the_pool = nullptr;
    new (&pool_mutex) std::mutex;
    parallel.store(nullptr);
}

Pool& pool() {
    std::lock_guard<std::mutex> lock(pool_mutex);
    if (!the_pool) the_pool = new Pool;
    return *the_pool;
}

void watch_for_forks() {
#if defined(__linux__) || defined(__APPLE__)
    static const int registered = pthread_atfork(nullptr, nullptr, start_anew_after_fork);
    (void)registered;
#endif
}

void take_in_region(void* work) { static_cast<Work*>(work)->take(); }

}  // namespace

void run_parts(int parts, int threads, const std::function<void(int)>& body) {
    Work work(body, parts);
    if (threads > parts) threads = parts;
    if (threads <= 1) {
        work.take();
    } else {
        watch_for_forks();
        Parallel region = parallel.load();
        if (region)
            region(take_in_region, &work, unsigned(threads), 0);
        else
            pool().run(work, threads);
    }
    if (work.error) std::rethrow_exception(work.error);
}

void set_parallel(Parallel function) { parallel.store(function); }

}  // namespace mp
