// Threads that go through a step together. They wait for one another by spinning, since a step has hundreds of
// barriers; a thread that waits long gives its core away, so that two programs on one core do not stop each other.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Barrier {
  public:
    void wait(int num_threads) {
        if (num_threads == 1) return;
        int64_t generation = generation_.load(std::memory_order_acquire);
        if (num_waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
            num_waiting_.store(0, std::memory_order_relaxed);
            generation_.store(generation + 1, std::memory_order_release);
            return;
        }
        for (int64_t spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins)
            spins < kSpins ? pause() : std::this_thread::yield();
    }

  private:
    static constexpr int64_t kSpins = 4000;  // about 50 us: longer than any fair share of a phase takes to even out

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    std::atomic<int> num_waiting_{0};
    std::atomic<int64_t> generation_{0};
};

// One thread's view of the team.
struct Team {
    int thread, num_threads;
    Barrier* barrier;

    void wait() const { barrier->wait(num_threads); }

    // f(i) for this thread's contiguous share of [0, count)
    template <typename F>
    void each(int64_t count, F f) const {
        int64_t last = count * (thread + 1) / num_threads;
        for (int64_t i = count * thread / num_threads; i < last; ++i) f(i);
    }
};
