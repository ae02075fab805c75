/* memory.c - the CPU's memory: blocks for arrays, and scratch for ops.
 *
 * Blocks below 64 KiB come from malloc. Larger ones are rounded up to one of four sizes an
 * octave and kept in a free list when released, because a training step asks for the same sizes
 * again and again and fresh pages cost more than the work that fills them; from 4 MiB on they are
 * aligned to huge pages. Before a fresh block would take the pool above its bound, 1.25 times the
 * most that was in use and 64 MiB, kept blocks are given back, the largest first; a training step
 * needs less, so it gives none back. empty_cache gives back all, as does an allocation that failed.
 * Each block carries its size in a 64-byte header. Under the address sanitizer (make asan) a block
 * is as large as asked, is not kept, and its header must not be touched, so that a kernel is caught
 * at the first byte beside its array.
 */
#include <pthread.h>
#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "cpu.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define EXACT true
#else
#define ASAN_POISON_MEMORY_REGION(memory, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(memory, bytes)
#define EXACT false
#endif

enum { ALIGNMENT = 64, SMALLEST_CACHED = 1 << 16, HUGE_PAGE = 1 << 21, SIZE_CLASSES = 256 };
enum { SPARE = 64 << 20 }; /* bytes that are kept in any case */

typedef struct block {
    size_t asked;       /* counted in live_bytes */
    size_t capacity;    /* header included */
    int size_class;     /* -1: not cached */
    struct block *next; /* in its free list */
} block;
_Static_assert(sizeof(block) <= ALIGNMENT, "the header must fit in front of an aligned block");

static struct {
    pthread_mutex_t mutex;
    block *free_lists[SIZE_CLASSES];
    int64_t kept, most_used; /* bytes in the lists; the most of reserved_bytes that was not */
    nd_memory_stats stats;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* A child that is forked while another thread allocates gets the pool whole, and unlocked. */
static void lock(void) { pthread_mutex_lock(&pool.mutex); }
static void unlock(void) { pthread_mutex_unlock(&pool.mutex); }

void cpu_memory_setup(void) { pthread_atfork(lock, unlock, unlock); }

/* The smallest (4 + k) * 2^e, k in 0..3, that is not below bytes. */
static int size_class_of(size_t bytes, size_t *capacity) {
    int exponent = 14; /* 4 << 14 is SMALLEST_CACHED */
    while (((size_t)8 << exponent) < bytes) {
        exponent++;
    }
    size_t unit = (size_t)1 << exponent;
    size_t steps = (bytes + unit - 1) / unit; /* 5..8, or 4 at the very bottom */
    *capacity = steps * unit;
    return (exponent - 14) * 4 + (int)steps - 4;
}

static block *take_locked(int size_class) {
    block *b = pool.free_lists[size_class];
    if (b != NULL) {
        pool.free_lists[size_class] = b->next;
        pool.kept -= (int64_t)b->capacity;
    }
    return b;
}

/* Give kept blocks back, the largest first, until the pool holds `bound` bytes at most. */
static void trim_locked(int64_t bound) {
    for (int i = SIZE_CLASSES; i-- > 0 && pool.stats.reserved_bytes > bound;) {
        block *b;
        while (pool.stats.reserved_bytes > bound && (b = take_locked(i)) != NULL) {
            pool.stats.reserved_bytes -= (int64_t)b->capacity;
            free(b);
        }
    }
}

static block *system_block(size_t capacity) {
    void *memory = NULL;
    bool huge = capacity >= 2 * HUGE_PAGE;
    if (posix_memalign(&memory, huge ? HUGE_PAGE : ALIGNMENT, capacity) != 0) {
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    if (huge) {
        (void)madvise(memory, capacity, MADV_HUGEPAGE); /* a wish: refusal costs only time */
    }
#endif
    return memory;
}

nd_status cpu_allocate(int device, size_t bytes, void **out) {
    *out = NULL;
    if (bytes == 0) {
        return ND_OK;
    }
    if (bytes >> 48 != 0) {
        return nd_error(ND_EMEMORY, "allocate: %zu bytes are more than any machine has", bytes);
    }
    size_t capacity = bytes + ALIGNMENT;
    int size_class = -1;
    if (capacity >= SMALLEST_CACHED && !EXACT) {
        size_class = size_class_of(capacity, &capacity);
    }
    lock();
    block *b = size_class >= 0 ? take_locked(size_class) : NULL;
    int64_t fresh = b == NULL ? (int64_t)capacity : 0;
    int64_t most = max_of(pool.most_used, pool.stats.reserved_bytes - pool.kept + fresh);
    if (b == NULL) {
        trim_locked(most / 4 * 5 + SPARE - fresh);
        b = system_block(capacity);
        if (b == NULL) {
            trim_locked(0);
            b = system_block(capacity);
        }
    }
    if (b != NULL) {
        *b = (block){.asked = bytes, .capacity = capacity, .size_class = size_class};
        pool.most_used = most;
        pool.stats.reserved_bytes += fresh;
        pool.stats.live_bytes += (int64_t)bytes;
        pool.stats.peak_bytes = max_of(pool.stats.peak_bytes, pool.stats.live_bytes);
    }
    int64_t live = pool.stats.live_bytes;
    unlock();
    if (b == NULL) {
        return nd_error(
            ND_EMEMORY,
            "allocate: the system refused %zu bytes (%lld bytes are in arrays now); use "
            "a smaller batch or a shorter sequence",
            bytes, (long long)live);
    }
    ASAN_POISON_MEMORY_REGION(b, ALIGNMENT);
    *out = (char *)b + ALIGNMENT;
    return ND_OK;
}

nd_status cpu_release(int device, void *memory) {
    if (memory == NULL) {
        return ND_OK;
    }
    block *b = (block *)((char *)memory - ALIGNMENT);
    ASAN_UNPOISON_MEMORY_REGION(b, ALIGNMENT);
    lock();
    pool.stats.live_bytes -= (int64_t)b->asked;
    if (b->size_class >= 0) {
        b->next = pool.free_lists[b->size_class];
        pool.free_lists[b->size_class] = b;
        pool.kept += (int64_t)b->capacity;
        b = NULL;
    } else {
        pool.stats.reserved_bytes -= (int64_t)b->capacity;
    }
    unlock();
    free(b);
    return ND_OK;
}

nd_status cpu_empty_cache(int device) {
    lock();
    trim_locked(0);
    pool.most_used = pool.stats.reserved_bytes;
    unlock();
    return ND_OK;
}

nd_status cpu_memory_stats(int device, nd_memory_stats *out) {
    lock();
    *out = pool.stats;
    unlock();
    return ND_OK;
}

nd_status cpu_reset_peak(int device) {
    lock();
    pool.stats.peak_bytes = pool.stats.live_bytes;
    unlock();
    return ND_OK;
}

/* ---- scratch: one growing buffer a calling thread, freed with the thread --------------------- */
typedef struct {
    void *memory;
    size_t bytes;
} scratch_buffer;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static _Thread_local scratch_buffer scratch;

static void scratch_free(void *memory) { free(memory); }

static void scratch_start(void) { pthread_key_create(&scratch_key, scratch_free); }

nd_status cpu_scratch(int device, size_t bytes, void **out) {
    if (bytes > scratch.bytes || EXACT) {
        pthread_once(&scratch_once, scratch_start);
        free(scratch.memory);
        scratch = (scratch_buffer){0};
        size_t rounded = EXACT ? bytes : (bytes + 4095) / 4096 * 4096;
        if (posix_memalign(&scratch.memory, ALIGNMENT, rounded) != 0) {
            scratch.memory = NULL;
            pthread_setspecific(scratch_key, NULL);
            return nd_error(ND_EMEMORY, "scratch: the system refused %zu bytes", rounded);
        }
        scratch.bytes = rounded;
        pthread_setspecific(scratch_key, scratch.memory);
    }
    *out = scratch.memory;
    return ND_OK;
}
