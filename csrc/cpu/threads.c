/* threads.c - how many threads a parallel region has: OpenMP's number, but one in a forked child.
 *
 * After a fork the threads of OpenMP's pool are gone, and a region that wants them waits for ever.
 * A number beyond what any machine has (OMP_NUM_THREADS=100000) would end the process, because
 * libgomp exits where a thread cannot be had.
 */
#include <omp.h>
#include <pthread.h>

#include "cpu.h"

enum { MOST = 256 }; /* or the processors, where those are more */

static int most = MOST;
static bool forked;

static void in_child(void) { forked = true; }

void cpu_threads_setup(void) {
    most = omp_get_num_procs() > MOST ? omp_get_num_procs() : MOST;
    pthread_atfork(NULL, NULL, in_child);
}

int cpu_threads(void) {
    int wanted = omp_get_max_threads();
    return forked ? 1 : wanted < most ? wanted : most;
}
