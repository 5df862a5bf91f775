/* Threads that go through the phases of a step together.
 *
 * A step of a small model has hundreds of phases of a few microseconds each. Threads wait for each other by spinning:
 * OpenMP's own barrier goes to sleep as soon as the process has more threads than cores.
 */
#ifndef KVFERRY_TEAM_H
#define KVFERRY_TEAM_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#define SPINS_BEFORE_YIELD 2000

typedef struct {
    int num_threads;
    atomic_int num_arrived __attribute__((aligned(64)));
    atomic_int phase __attribute__((aligned(64)));
    atomic_int next_task __attribute__((aligned(64)));
} Team;

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Returns once all threads have come here. */
static inline void meet(Team *team) {
    if (team->num_threads == 1) {
        atomic_store_explicit(&team->next_task, 0, memory_order_relaxed);
        return;
    }
    const int phase = atomic_load_explicit(&team->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->num_arrived, 1, memory_order_acq_rel) == team->num_threads - 1) {
        atomic_store_explicit(&team->num_arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next_task, 0, memory_order_relaxed);
        atomic_store_explicit(&team->phase, phase + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->phase, memory_order_acquire) == phase; spins++) {
        pause_briefly();
        if (spins >= SPINS_BEFORE_YIELD) sched_yield();
    }
}

/* The next task of this phase; threads take tasks in order, each as soon as it is free. */
static inline int take_task(Team *team) {
    return atomic_fetch_add_explicit(&team->next_task, 1, memory_order_relaxed);
}

/* This thread's share [*first, *last) of `count` things, in whole units. */
static inline void share(int count, int unit, int thread, int num_threads, int *first, int *last) {
    const int64_t units = (count + unit - 1) / unit;
    const int64_t begin = units * thread / num_threads * unit, end = units * (thread + 1) / num_threads * unit;
    *first = (int)begin;
    *last = (int)(end < count ? end : count);
}

#endif
