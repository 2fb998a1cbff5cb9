#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace fr {
namespace {

constexpr int64_t SPIN = 50'000;             // ns a worker looks for the next run before it sleeps
constexpr int64_t PATIENCE = 20'000;         // ns the caller spins for a straggler before it offers its core
constexpr int64_t OVERDRAFT = 500'000;       // ns that may be lost beyond what was saved
constexpr int64_t MOST_CREDIT = 5'000'000;   // ns: help of long ago excuses nothing
constexpr int64_t LEAST_PENALTY = 5'000'000, MOST_PENALTY = 500'000'000;
constexpr uint64_t LINE = 64;                // bytes of a cache line
constexpr int32_t FETCH = 8;                 // of them, that a waiting thread asks for between two looks
constexpr int COUNT_BITS = 12;               // of a hint
constexpr int64_t MOST_TASKS = (1 << 20) - 1;

int64_t read(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

int64_t now() { return read(CLOCK_MONOTONIC); }

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

uint32_t next_of(uint64_t ticket) { return uint32_t(ticket & 0xfffff); }
uint32_t count_of(uint64_t ticket) { return uint32_t(ticket >> 20 & 0xfffff); }

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

}  // namespace

Pool::Pool(int threads) : hints_(size_t(threads)) {
    for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

Pool::~Pool() {
    stop_.store(true);
    epoch_.fetch_add(1);
    futex_wake(epoch_, INT_MAX);
    for (auto& worker : workers_) worker.join();
}

int32_t Pool::drain(int32_t thread) {
    int32_t did = 0;
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (next_of(ticket) < count_of(ticket)) {
        if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        body_(context_, int32_t(next_of(ticket)), thread);
        done_.fetch_add(1, std::memory_order_release);
        ++did;
        ticket = ticket_.load(std::memory_order_acquire);
    }
    return did;
}

void Pool::work(int32_t thread) {
    uint32_t seen = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        int64_t until = now() + SPIN;
        while (epoch_.load(std::memory_order_acquire) == seen && now() < until)
            idle(thread);
        if (epoch_.load() == seen) {
            // Announce, then look again: the caller bumps the epoch before it looks for sleepers, so one of the two sees the other.
            sleepers_.fetch_add(1);
            if (epoch_.load() == seen) futex_wait(epoch_, seen);
            sleepers_.fetch_sub(1);
            continue;
        }
        seen = epoch_.load(std::memory_order_acquire);
        drain(thread);
    }
}

void Pool::run(int32_t count, Body body, void* context) {
    const bool crowd = count > 1 && count <= MOST_TASKS && !workers_.empty() && (penalty_ == 0 || now() >= alone_until_);
    if (!crowd) {
        for (int32_t task = 0; task < count; ++task) body(context, task, 0);
        return;
    }
    body_ = body;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 40) + 1;
    ticket_.store(epoch << 40 | uint64_t(count) << 20, std::memory_order_release);
    epoch_.fetch_add(1);
    if (sleepers_.load()) futex_wake(epoch_, std::min(count - 1, threads() - 1));
    const int64_t start = now();
    const int32_t mine = drain(0);
    if (mine == count) return;
    const int64_t drained = now();
    if (done_.load(std::memory_order_acquire) != count) wait(count);
    // What the others did would have taken the caller as long as its own tasks took; a last task of theirs may be waited for.
    const int64_t each = (drained - start) / std::max(mine, 1), end = now(), saved = each * (count - mine);
    saved_ += saved;
    settle(saved / 2 - std::max<int64_t>(0, end - drained - each), end);
}

void Pool::wait(int32_t count) {
    const int64_t start = now();
    while (done_.load(std::memory_order_acquire) != count) {
        idle(0);
        // The straggler may be waiting for the very core the caller spins on.
        if (now() - start > PATIENCE) sched_yield();
    }
}

void Pool::expect(int32_t thread, const void* from, size_t bytes) {
    const uint64_t count = std::min(bytes, MOST_EXPECTED - 1) / LINE;
    hints_[size_t(thread)].lines.store(uint64_t(reinterpret_cast<uintptr_t>(from)) / LINE << COUNT_BITS | count, std::memory_order_relaxed);
}

const char* Pool::take(int32_t thread, int32_t& lines) {
    Hint& hint = hints_[size_t(thread)];
    uint64_t seen = hint.lines.load(std::memory_order_relaxed);
    const uint64_t count = std::min(seen & ((1 << COUNT_BITS) - 1), uint64_t(lines));
    if (!count || !hint.lines.compare_exchange_strong(seen, seen + (count << COUNT_BITS) - count, std::memory_order_relaxed)) {
        lines = 0;  // nothing is left, or another thread was faster
        return nullptr;
    }
    lines = int32_t(count);
    return reinterpret_cast<const char*>((seen >> COUNT_BITS) * LINE);
}

// One turn of a wait. Two threads may ask for the same: asking changes nothing and cannot fault.
void Pool::idle(int32_t thread) {
    for (const int32_t whose : {thread, 0}) {
        int32_t lines = FETCH;
        const char* from = take(whose, lines);
        for (int32_t line = 0; line < lines; ++line) __builtin_prefetch(from + line * int64_t(LINE), 0, 2);
        if (lines) return;
    }
    for (int i = 0; i < 16; ++i) pause();
}

void Pool::settle(int64_t net, int64_t now) {
    credit_ = std::min(credit_ + net, MOST_CREDIT);
    if (credit_ >= -OVERDRAFT) return;
    ++stalls_;
    credit_ = 0;
    penalty_ = std::clamp(2 * penalty_, LEAST_PENALTY, MOST_PENALTY);
    alone_until_ = now + penalty_;
}

Pool::Watch::Watch(Pool& pool) : pool_(pool) {
    if (pool_.threads() == 1) return;
    wall_ = now();
    if (wall_ < pool_.alone_until_) return;
    own_ = read(CLOCK_THREAD_CPUTIME_ID);
    saved_ = pool_.saved_;
}

Pool::Watch::~Watch() {
    if (!own_) return;
    const int64_t end = now(), aside = end - wall_ - (read(CLOCK_THREAD_CPUTIME_ID) - own_);
    if (end < pool_.alone_until_) return;  // it stepped back already
    pool_.settle(std::min<int64_t>(0, (pool_.saved_ - saved_) / 2 - aside), end);
    if (pool_.penalty_ && end > pool_.alone_until_ + pool_.penalty_) pool_.penalty_ = 0;  // well together for as long as it went alone
}

}  // namespace fr
