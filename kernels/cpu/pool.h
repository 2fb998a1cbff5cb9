// Threads that share tasks.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace fr {

// A persistent pool. `run` executes tasks 0 … count − 1, each once, on the caller and on any worker that is awake, and returns when all
// are done. Tasks are taken one by one from a counter, so a thread that the kernel has put aside holds up at most the task it is in, and
// a worker that never wakes up holds up nothing. Workers spin briefly for the next run, then sleep in the kernel.
//
// The pool keeps an account: the time that workers saved against the time that was lost because another process wants a core (the caller
// waited for a straggler, or was itself put aside). When more is lost than saved, the caller goes on alone for a while, longer each time,
// and then tries again: then only it is runnable, and the kernel can give it a core of its own. Results do not depend on who computes
// them, only the time does.
class Pool {
public:
    // body(context, task, thread); thread 0 is the caller.
    using Body = void (*)(void* context, int32_t task, int32_t thread);

    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return int(workers_.size()) + 1; }
    uint64_t stalls() const { return stalls_; }

    // Around a program: notices that the caller was kept from its core meanwhile.
    class Watch {
    public:
        explicit Watch(Pool& pool);
        ~Watch();
        Watch(const Watch&) = delete;
        Watch& operator=(const Watch&) = delete;

    private:
        Pool& pool_;
        int64_t wall_ = 0, own_ = 0, saved_ = 0;
    };

    template <class F>
    void run(int32_t count, F&& f) {
        run(count, [](void* c, int32_t task, int32_t thread) { (*static_cast<std::remove_reference_t<F>*>(c))(task, thread); }, &f);
    }
    void run(int32_t count, Body body, void* context);

    // Memory that a thread will most likely read first in the next run, less than MOST_EXPECTED. Threads that would only wait for each
    // other, or for the caller between two runs, ask for their own meanwhile and then for the caller's. A hint: it may be out of date or
    // nobody's memory any more.
    static constexpr size_t MOST_EXPECTED = 64 << 12;
    void expect(int32_t thread, const void* from, size_t bytes);
    // The first of up to `lines` cache lines of that, which the caller now asks for itself; `lines` becomes how many there are.
    const char* take(int32_t thread, int32_t& lines);

private:
    // Number of the next line (address / 64) << 12 | how many lines are left: one word, so that nobody sees half of a new one.
    struct alignas(64) Hint {
        std::atomic<uint64_t> lines{0};
    };

    void work(int32_t thread);
    int32_t drain(int32_t thread);  // the number of tasks it did
    void wait(int32_t count);
    void idle(int32_t thread);
    void settle(int64_t net, int64_t now);

    // epoch (24 bits) | count (20) | next (20). A worker learns from one load whether a task is left; taking it is one compare-and-swap,
    // which fails if anything has changed. While a task is out, the run is not over, so body_ and context_ hold still.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int32_t> done_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};  // what sleepers wait on
    std::atomic<int32_t> sleepers_{0};
    std::atomic<bool> stop_{false};
    Body body_ = nullptr;
    void* context_ = nullptr;

    uint64_t stalls_ = 0;
    int64_t saved_ = 0;        // nanoseconds that workers saved, ever
    int64_t credit_ = 0;       // saved less lost, lately
    int64_t penalty_ = 0;      // nanoseconds to go alone, 0 = all is well
    int64_t alone_until_ = 0;  // on the monotonic clock
    std::vector<Hint> hints_;  // one a thread
    std::vector<std::thread> workers_;
};

}  // namespace fr
