/* backend.c - the CPU as a device: memory, time, properties, and the table of its operations.
 *
 * Memory: blocks below 64 KiB come from malloc. Larger ones are rounded up to one of four sizes an
 * octave and kept in a free list when released, because a training step asks for the same sizes
 * again and again and fresh pages cost more than the work that fills them; from 4 MiB on they are
 * aligned to huge pages. empty_cache gives the lists back, and so does an allocation that failed.
 * Each block carries its size in a 64-byte header. The CPU has no stream: ops are done on return.
 * Under the address sanitizer (make asan) a block is as large as asked, is not kept, and its header
 * must not be touched, so that a kernel is caught at the first byte beside its array.
 */
#include <errno.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
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

enum {
    ALIGNMENT = 64,
    SMALLEST_CACHED = 1 << 16,
    HUGE_PAGE = 1 << 21,
    SIZE_CLASSES = 256
};

typedef struct block {
    size_t asked;       /* what live_bytes counts */
    size_t capacity;    /* header included */
    int size_class;     /* -1: not cached */
    struct block *next; /* in its free list */
} block;
_Static_assert(sizeof(block) <= ALIGNMENT, "the header must fit in front of an aligned block");

static struct {
    pthread_mutex_t mutex;
    block *free_lists[SIZE_CLASSES];
    nd_memory_stats stats;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER};

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

static void trim_locked(void) {
    for (int i = 0; i < SIZE_CLASSES; i++) {
        while (pool.free_lists[i] != NULL) {
            block *b = pool.free_lists[i];
            pool.free_lists[i] = b->next;
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

static nd_status backend_allocate(int device, size_t bytes, void **out) {
    (void)device;
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
    pthread_mutex_lock(&pool.mutex);
    block *b = NULL;
    if (size_class >= 0 && pool.free_lists[size_class] != NULL) {
        b = pool.free_lists[size_class];
        pool.free_lists[size_class] = b->next;
    } else {
        b = system_block(capacity);
        if (b == NULL) {
            trim_locked();
            b = system_block(capacity);
        }
        if (b != NULL) {
            pool.stats.reserved_bytes += (int64_t)capacity;
        }
    }
    if (b != NULL) {
        *b = (block){.asked = bytes, .capacity = capacity, .size_class = size_class};
        pool.stats.live_bytes += (int64_t)bytes;
        pool.stats.peak_bytes = max_of(pool.stats.peak_bytes, pool.stats.live_bytes);
    }
    int64_t live = pool.stats.live_bytes;
    pthread_mutex_unlock(&pool.mutex);
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

static nd_status backend_release(int device, void *memory) {
    (void)device;
    if (memory == NULL) {
        return ND_OK;
    }
    block *b = (block *)((char *)memory - ALIGNMENT);
    ASAN_UNPOISON_MEMORY_REGION(b, ALIGNMENT);
    pthread_mutex_lock(&pool.mutex);
    pool.stats.live_bytes -= (int64_t)b->asked;
    if (b->size_class >= 0) {
        b->next = pool.free_lists[b->size_class];
        pool.free_lists[b->size_class] = b;
        b = NULL;
    } else {
        pool.stats.reserved_bytes -= (int64_t)b->capacity;
    }
    pthread_mutex_unlock(&pool.mutex);
    free(b);
    return ND_OK;
}

static nd_status backend_empty_cache(int device) {
    (void)device;
    pthread_mutex_lock(&pool.mutex);
    trim_locked();
    pthread_mutex_unlock(&pool.mutex);
    return ND_OK;
}

static nd_status backend_memory_stats(int device, nd_memory_stats *out) {
    (void)device;
    pthread_mutex_lock(&pool.mutex);
    *out = pool.stats;
    pthread_mutex_unlock(&pool.mutex);
    return ND_OK;
}

static nd_status backend_reset_peak(int device) {
    (void)device;
    pthread_mutex_lock(&pool.mutex);
    pool.stats.peak_bytes = pool.stats.live_bytes;
    pthread_mutex_unlock(&pool.mutex);
    return ND_OK;
}

/* ---- scratch: one growing buffer a calling thread, freed with the thread ----------------------*/
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
    (void)device;
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

/* ---- the device -------------------------------------------------------------------------------*/
static nd_status backend_device_count(int *count) {
    *count = 1;
    return ND_OK;
}

static nd_status backend_open(int device) {
    if (device != 0) {
        return nd_error(ND_EVALUE, "cpu: there is one CPU device, index 0, not %d", device);
    }
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, cpu_sgemm_setup);
    return ND_OK;
}

/* The processor's name as Linux tells it; left as it is where there is no such file. */
static void processor_name(char *name, size_t size) {
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (file == NULL) {
        return;
    }
    char line[256];
    while (fgets(line, sizeof line, file) != NULL) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon != NULL) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(name, size, "%s", colon + 1 + strspn(colon + 1, " "));
            break;
        }
    }
    fclose(file);
}

static nd_status backend_properties(int device, nd_properties *out) {
    (void)device;
    *out = (nd_properties){.name = "CPU", .processors = omp_get_num_procs()};
    processor_name(out->name, sizeof out->name);
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    out->total_bytes = pages > 0 && page > 0 ? (int64_t)pages * page : 0;
    snprintf(out->detail, sizeof out->detail, "%s, %d threads", cpu_sgemm_library(),
             omp_get_max_threads());
    return ND_OK;
}

static nd_status backend_upload(int device, void *to, const void *from_host, size_t bytes) {
    (void)device;
    if (bytes > 0) {
        memcpy(to, from_host, bytes);
    }
    return ND_OK;
}

static nd_status backend_download(int device, void *to_host, const void *from, size_t bytes) {
    return backend_upload(device, to_host, from, bytes);
}

struct nd_download {
    size_t bytes;
    unsigned char memory[];
};

static nd_status backend_download_begin(int device, const void *from, size_t bytes,
                                        nd_download **out) {
    (void)device;
    *out = malloc(sizeof **out + bytes);
    if (*out == NULL) {
        return nd_error(ND_EMEMORY, "download: the system has no %zu bytes left", bytes);
    }
    (*out)->bytes = bytes;
    if (bytes > 0) {
        memcpy((*out)->memory, from, bytes);
    }
    return ND_OK;
}

static nd_status backend_download_end(int device, nd_download *download, void *to_host) {
    (void)device;
    if (to_host != NULL && download->bytes > 0) {
        memcpy(to_host, download->memory, download->bytes);
    }
    free(download);
    return ND_OK;
}

/* A staging is its memory; nd_staging stays incomplete. */
static nd_status backend_staging_new(int device, size_t bytes, nd_staging **out, void **memory) {
    (void)device;
    void *made = NULL;
    if (posix_memalign(&made, ALIGNMENT, bytes) != 0) {
        return nd_error(ND_EMEMORY, "staging: the system has no %zu bytes left", bytes);
    }
    *out = *memory = made;
    return ND_OK;
}

static nd_status backend_staging_send(int device, nd_staging *staging, void *to, size_t bytes) {
    return backend_upload(device, to, staging, bytes);
}

static nd_status backend_staging_wait(int device, nd_staging *staging) {
    (void)device;
    (void)staging;
    return ND_OK;
}

static nd_status backend_staging_free(int device, nd_staging *staging) {
    (void)device;
    free(staging);
    return ND_OK;
}

static nd_status backend_synchronize(int device) {
    (void)device;
    return ND_OK;
}

/* ---- events -----------------------------------------------------------------------------------*/
struct nd_event {
    struct timespec time;
};

static nd_status backend_event_new(int device, nd_event **out) {
    (void)device;
    *out = calloc(1, sizeof **out);
    return *out != NULL ? ND_OK : nd_error(ND_EMEMORY, "event: the system is out of memory");
}

static nd_status backend_event_record(int device, nd_event *event) {
    (void)device;
    if (clock_gettime(CLOCK_MONOTONIC, &event->time) != 0) {
        return nd_error(ND_ESYSTEM, "event: clock_gettime: %s", strerror(errno));
    }
    return ND_OK;
}

static nd_status backend_event_elapsed(int device, nd_event *from, nd_event *to,
                                       double *milliseconds) {
    (void)device;
    *milliseconds = (double)(to->time.tv_sec - from->time.tv_sec) * 1e3 +
                    (double)(to->time.tv_nsec - from->time.tv_nsec) * 1e-6;
    return ND_OK;
}

static nd_status backend_event_free(int device, nd_event *event) {
    (void)device;
    free(event);
    return ND_OK;
}

static nd_status backend_graph_begin(int device, nd_graph **out) {
    (void)device;
    *out = NULL;
    return nd_error(ND_EVALUE, "graph: the CPU records no graphs; call the step itself");
}

const nd_backend cpu_backend = {
    .abi = ND_ABI,
    .name = "cpu",
    .alignment = 1,
    .last_error = nd_last_error,
    .device_count = backend_device_count,
    .open = backend_open,
    .properties = backend_properties,
    .reset = backend_empty_cache,
    .allocate = backend_allocate,
    .release = backend_release,
    .upload = backend_upload,
    .download = backend_download,
    .download_begin = backend_download_begin,
    .download_end = backend_download_end,
    .staging_new = backend_staging_new,
    .staging_send = backend_staging_send,
    .staging_wait = backend_staging_wait,
    .staging_free = backend_staging_free,
    .synchronize = backend_synchronize,
    .memory_stats = backend_memory_stats,
    .reset_peak = backend_reset_peak,
    .empty_cache = backend_empty_cache,
    .event_new = backend_event_new,
    .event_record = backend_event_record,
    .event_elapsed = backend_event_elapsed,
    .event_free = backend_event_free,
    .graph_begin = backend_graph_begin,
#define EW1(name, types, formula) .name = cpu_##name,
#define EW2(name, types, formula) EW1(name, types, formula)
#define CMP(name, formula) EW1(name, , )
#define RED(name, types, start, combine, map) EW1(name, , )
#define ARG(name, better) EW1(name, , )
#define OP(name, operands) EW1(name, , )
#include "../ops.def"
};
