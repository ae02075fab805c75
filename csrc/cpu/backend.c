/* backend.c - the CPU as a device: properties, copies, time, and the table of its operations.
 *
 * The CPU has no stream: ops are done on return.
 */
#include <errno.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "cpu.h"

/* ---- the device ------------------------------------------------------------------------------ */
static nd_status backend_device_count(int *count) {
    *count = 1;
    return ND_OK;
}

static void setup(void) {
    cpu_sgemm_setup();
    cpu_panels_setup();
    cpu_threads_setup();
    cpu_memory_setup();
}

static nd_status backend_open(int device) {
    if (device != 0) {
        return nd_error(ND_EVALUE, "cpu: there is one CPU device, index 0, not %d", device);
    }
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, setup);
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

#ifndef NEEDLE_LEVEL /* what this file was compiled for in a portable build, and decides bits */
#define NEEDLE_LEVEL ""
#endif

static nd_status backend_properties(int device, nd_properties *out) {
    *out = (nd_properties){.name = "CPU", .processors = omp_get_num_procs()};
    processor_name(out->name, sizeof out->name);
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    out->total_bytes = pages > 0 && page > 0 ? (int64_t)pages * page : 0;
    const char *own = cpu_panels_instructions();
    snprintf(out->products, sizeof out->products, NEEDLE_LEVEL "%.100s%s%.120s",
             own != NULL ? own : "", own != NULL ? " and " : "", cpu_sgemm_library());
    snprintf(out->detail, sizeof out->detail, "%.200s, %d threads", out->products, cpu_threads());
    return ND_OK;
}

static nd_status backend_upload(int device, void *to, const void *from_host, size_t bytes) {
    if (bytes > 0) {
        memcpy(to, from_host, bytes);
    }
    return ND_OK;
}

static nd_status backend_download(int device, void *to_host, const void *from, size_t bytes) {
    return backend_upload(device, to_host, from, bytes);
}

struct nd_async_copy {
    size_t bytes;
    unsigned char memory[];
};

static nd_status backend_async_copy_begin(int device, const void *from, size_t bytes,
                                          nd_async_copy **out) {
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

static nd_status backend_async_copy_end(int device, nd_async_copy *copy, void *to_host) {
    if (to_host != NULL && copy->bytes > 0) {
        memcpy(to_host, copy->memory, copy->bytes);
    }
    free(copy);
    return ND_OK;
}

/* A pinned buffer is its memory; nd_pinned_buffer stays incomplete. */
static nd_status backend_pinned_buffer_new(int device, size_t bytes, nd_pinned_buffer **out,
                                           void **memory) {
    void *made = NULL;
    if (posix_memalign(&made, 64, bytes) != 0) {
        return nd_error(ND_EMEMORY, "pinned_buffer: the system has no %zu bytes left", bytes);
    }
    *out = *memory = made;
    return ND_OK;
}

static nd_status backend_pinned_buffer_send(int device, nd_pinned_buffer *buffer, void *to,
                                            size_t bytes) {
    return backend_upload(device, to, buffer, bytes);
}

static nd_status backend_pinned_buffer_wait(int device, nd_pinned_buffer *buffer) { return ND_OK; }

static nd_status backend_pinned_buffer_free(int device, nd_pinned_buffer *buffer) {
    free(buffer);
    return ND_OK;
}

static nd_status backend_synchronize(int device) { return ND_OK; }

static nd_status backend_stream(int device, bool side, void **out) {
    *out = NULL;
    return ND_OK;
}

/* ---- events ---------------------------------------------------------------------------------- */
struct nd_event {
    struct timespec time;
};

static nd_status backend_event_new(int device, nd_event **out) {
    *out = calloc(1, sizeof **out);
    return *out != NULL ? ND_OK : nd_error(ND_EMEMORY, "event: the system is out of memory");
}

static nd_status backend_event_record(int device, nd_event *event, bool side) {
    if (clock_gettime(CLOCK_MONOTONIC, &event->time) != 0) {
        return nd_error(ND_ESYSTEM, "event: clock_gettime: %s", strerror(errno));
    }
    return ND_OK;
}

static nd_status backend_event_wait(int device, nd_event *event, bool side) { return ND_OK; }

static nd_status backend_event_query(int device, nd_event *event, bool *done) {
    *done = true;
    return ND_OK;
}

static nd_status backend_event_elapsed(int device, nd_event *from, nd_event *to,
                                       double *milliseconds) {
    *milliseconds = (double)(to->time.tv_sec - from->time.tv_sec) * 1e3 +
                    (double)(to->time.tv_nsec - from->time.tv_nsec) * 1e-6;
    return ND_OK;
}

static nd_status backend_event_free(int device, nd_event *event) {
    free(event);
    return ND_OK;
}

const nd_backend cpu_backend = {
    .is_host = true,
    .alignment = 1,
    .last_error = nd_last_error,
    .device_count = backend_device_count,
    .open = backend_open,
    .properties = backend_properties,
    .reset = cpu_empty_cache,
    .allocate = cpu_allocate,
    .release = cpu_release,
    .upload = backend_upload,
    .download = backend_download,
    .async_copy_begin = backend_async_copy_begin,
    .async_copy_end = backend_async_copy_end,
    .pinned_buffer_new = backend_pinned_buffer_new,
    .pinned_buffer_send = backend_pinned_buffer_send,
    .pinned_buffer_wait = backend_pinned_buffer_wait,
    .pinned_buffer_free = backend_pinned_buffer_free,
    .synchronize = backend_synchronize,
    .stream = backend_stream,
    .memory_stats = cpu_memory_stats,
    .reset_peak = cpu_reset_peak,
    .empty_cache = cpu_empty_cache,
    .event_new = backend_event_new,
    .event_record = backend_event_record,
    .event_wait = backend_event_wait,
    .event_query = backend_event_query,
    .event_elapsed = backend_event_elapsed,
    .event_free = backend_event_free,
#define EACH_OP(name) .name = cpu_##name,
#include "../ops.def"
};
