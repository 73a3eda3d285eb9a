#include "pool.h"

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace mp {
namespace {

class Pool {
public:
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        start_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    void run(int parts, const std::function<void(int)>& body) {
        std::lock_guard<std::mutex> one_call(call_);
        grow(parts - 1);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            body_ = &body;
            parts_ = parts;
            left_ = parts - 1;
            error_ = nullptr;
            ++round_;
        }
        start_.notify_all();
        work(0);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return left_ == 0; });
        body_ = nullptr;
        if (error_) std::rethrow_exception(error_);
    }

    void pin(const std::vector<int>& cores) {
        std::lock_guard<std::mutex> one_call(call_);
        cores_ = cores;
        for (size_t i = 0; i < workers_.size(); ++i) place(i);
    }

private:
    void grow(int wanted) {
        while (int(workers_.size()) < wanted) {
            int part = int(workers_.size()) + 1;
            uint64_t seen = round_;
            workers_.emplace_back([this, part, seen] { loop(part, seen); });
            if (!cores_.empty()) place(workers_.size() - 1);
        }
    }

    void place(size_t worker) {
#if defined(__linux__)
        cpu_set_t set;
        CPU_ZERO(&set);
        if (cores_.empty())
            sched_getaffinity(0, sizeof(set), &set);
        else
            CPU_SET(cores_[worker % cores_.size()], &set);
        pthread_setaffinity_np(workers_[worker].native_handle(), sizeof(set), &set);
#else
        (void)worker;
#endif
    }

    void loop(int part, uint64_t seen) {
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                start_.wait(lock, [&] { return stopping_ || round_ != seen; });
                if (stopping_) return;
                seen = round_;
                if (part >= parts_) continue;
            }
            work(part);
            std::lock_guard<std::mutex> lock(mutex_);
            if (--left_ == 0) done_.notify_one();
        }
    }

    void work(int part) {
        try {
            (*body_)(part);
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!error_) error_ = std::current_exception();
        }
    }

    std::mutex call_, mutex_;
    std::condition_variable start_, done_;
    std::vector<std::thread> workers_;
    std::vector<int> cores_;
    const std::function<void(int)>* body_ = nullptr;
    std::exception_ptr error_;
    uint64_t round_ = 0;
    int parts_ = 0, left_ = 0;
    bool stopping_ = false;
};

// Never destroyed: threads of a finishing process must not be waited for.
Pool* the_pool = nullptr;
std::mutex pool_mutex;

#if defined(__linux__) || defined(__APPLE__)
// A forked child has none of its parent's threads, and maybe a locked mutex: it starts anew.
void forget_after_fork() {
    the_pool = nullptr;
    new (&pool_mutex) std::mutex;
}
#endif

Pool& pool() {
    std::lock_guard<std::mutex> lock(pool_mutex);
    if (!the_pool) {
#if defined(__linux__) || defined(__APPLE__)
        static const int registered = pthread_atfork(nullptr, nullptr, forget_after_fork);
        (void)registered;
#endif
        the_pool = new Pool;
    }
    return *the_pool;
}

}  // namespace

void run_parts(int parts, const std::function<void(int)>& body) {
    if (parts <= 1)
        body(0);
    else
        pool().run(parts, body);
}

void set_cores(const std::vector<int>& cores) { pool().pin(cores); }

}  // namespace mp
