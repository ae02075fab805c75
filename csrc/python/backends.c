/* backends.c - the table of backends: how each is obtained, and its devices.
 *
 * The GIL guards the table; equal devices are equal pointers. A backend is loaded by the first
 * question about one of its devices, so that importing needle touches no GPU. One in a file of its
 * own is refused, by the file's name, when it was compiled with another ops.def.
 */
#include "backends.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "errors.h"

typedef struct {
    const char *name, *title;
    int dlpack;
    const nd_backend *table; /* NULL until loaded */
    const char *file;        /* NULL when linked into _C */
    int count;               /* devices */
    bool tried;
    char path[4096];
    char reason[1024]; /* why there is none */
} backend_entry;

/* The tables of those that are linked into _C. */
#define X(name, title, dlpack, table, file) extern const nd_backend name##_backend;
ND_BACKENDS(X)
#undef X

static backend_entry backends[NUM_BACKENDS] = {
#define X(name, title, dlpack, table, file) {#name, title, dlpack, table, file, 0, false, "", ""},
    ND_BACKENDS(X)
#undef X
};
/* Those that can be named, ND_MAX_DEVICES a backend. */
static nd_device devices[NUM_BACKENDS * ND_MAX_DEVICES];
static bool opened[NUM_BACKENDS * ND_MAX_DEVICES];

int nd_device_slot(const nd_device *device) { return (int)(device - devices); }

static backend_entry *entry_of(const nd_device *device) {
    return &backends[nd_device_slot(device) / ND_MAX_DEVICES];
}

const char *nd_library_path(nd_backend_id id) { return backends[id].path; }

nd_device *nd_host(void) { return &devices[0]; }

nd_device *nd_device_at(nd_backend_id id, int64_t index) {
    return index >= 0 && index < ND_MAX_DEVICES ? &devices[id * ND_MAX_DEVICES + index] : NULL;
}

nd_device *nd_device_of_dlpack(int type, int64_t index) {
    for (int id = 0; id < NUM_BACKENDS; id++) {
        if (backends[id].dlpack == type) {
            return nd_device_at((nd_backend_id)id, index);
        }
    }
    return NULL;
}

int nd_dlpack_type(const nd_device *device) { return entry_of(device)->dlpack; }

const char *nd_device_name(const nd_device *device) { return entry_of(device)->name; }

const char *nd_device_title(const nd_device *device) { return entry_of(device)->title; }

const char *nd_device_text(const nd_device *device, char text[24]) {
    char index[12] = "";
    if (device->index != 0) {
        snprintf(index, sizeof index, "%d", device->index);
    }
    snprintf(text, 24, "%.10s(%s)", nd_device_name(device), index);
    return text;
}

/* ---- loading --------------------------------------------------------------------------------- */
#define BUILD "NEEDLE_%s=1 pip install -e .  (or: make lib NEEDLE_%s=1)"
#ifndef NEEDLE_LEFT_OUT /* why the build left out what lies in a file of its own */
#define NEEDLE_LEFT_OUT ""
#endif

static const nd_backend *open_file(backend_entry *b) {
    if (access(b->path, F_OK) != 0) {
        snprintf(b->reason, sizeof b->reason,
                 "needle was built without %s (there is no %.400s)%.300s; a %s toolkit without a "
                 "driver is enough for: " BUILD,
                 b->title, b->path, NEEDLE_LEFT_OUT, b->title, b->title, b->title);
        return NULL;
    }
    void *library = dlopen(b->path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *error = dlerror();
        error = error != NULL ? error : "unknown error";
        const char *mend = strstr(error, "libcublasLt.so.13") != NULL
                               ? "; it comes with: pip install 'needle-lm[cuda13]'"
                               : "";
        snprintf(b->reason, sizeof b->reason, "cannot load the %s backend: %.700s%s", b->title,
                 error, mend);
        return NULL;
    }
    const nd_backend *(*entry)(void) = NULL;
    *(void **)&entry = dlsym(library, "needle_backend");
    const nd_backend *table = entry != NULL ? entry() : NULL;
    if (table == NULL || table->abi != nd_abi()) {
        snprintf(b->reason, sizeof b->reason,
                 "%.600s was built from another csrc/ops.def than _C (its hash is %016llx, not "
                 "%016llx); build both again: " BUILD,
                 b->path, table != NULL ? (unsigned long long)table->abi : 0,
                 (unsigned long long)nd_abi(), b->title, b->title);
        return NULL;
    }
    return table;
}

/* Once; leaves a table or a reason. */
static void load(backend_entry *b) {
    if (b->tried) {
        return;
    }
    b->tried = true;
    const nd_backend *table = b->file != NULL ? open_file(b) : b->table;
    int count = 0;
    b->table = NULL;
    if (table == NULL) {
        return; /* open_file has said why */
    }
    if (table->device_count(&count) != ND_OK) {
        snprintf(b->reason, sizeof b->reason, "%s cannot be used here: %.900s", b->title,
                 table->last_error());
    } else if (count == 0) {
        snprintf(b->reason, sizeof b->reason, "%s found no device", b->title);
    } else {
        b->count = count < ND_MAX_DEVICES ? count : ND_MAX_DEVICES;
        b->table = table;
        for (int i = 0; i < ND_MAX_DEVICES; i++) {
            devices[(b - backends) * ND_MAX_DEVICES + i].backend = table;
        }
    }
}

int nd_device_count(nd_backend_id id) {
    load(&backends[id]);
    return backends[id].count;
}

const char *nd_device_missing(nd_device *device) {
    static char text[128];
    backend_entry *b = entry_of(device);
    load(b);
    if (b->table == NULL) {
        return b->reason;
    }
    if (device->index < b->count) {
        return NULL;
    }
    snprintf(text, sizeof text, "no such device: there %s %d (%s() to %s(%d))",
             b->count == 1 ? "is" : "are", b->count, b->name, b->name, b->count - 1);
    return text;
}

/* Print the warning of a device that has opened, each text once a process. */
static void warn(const nd_device *device) {
    static char last[sizeof((nd_properties *)NULL)->warning];
    nd_properties properties = {0};
    if (device->backend->properties(device->index, &properties) == ND_OK &&
        properties.warning[0] != '\0' && strcmp(last, properties.warning) != 0) {
        memcpy(last, properties.warning, sizeof last);
        fprintf(stderr, "needle: warning: %s\n", last);
    }
}

int nd_device_ready(nd_device *device) {
    int slot = nd_device_slot(device);
    if (opened[slot]) {
        return nd_check_alive(device);
    }
    char text[24];
    const char *missing = nd_device_missing(device);
    if (missing != NULL) {
        FAIL(PyExc_RuntimeError, "%s: %s", nd_device_text(device, text), missing);
    }
    if (nd_check_alive(device) < 0) {
        return -1;
    }
    nd_status status = device->backend->open(device->index);
    opened[slot] = status == ND_OK;
    if (opened[slot]) {
        warn(device);
    }
    return nd_check(nd_device_text(device, text), device, status);
}

int nd_backend_reset(nd_backend_id id) {
    for (int i = 0; i < ND_MAX_DEVICES; i++) {
        nd_device *device = &devices[id * ND_MAX_DEVICES + i];
        bool *open = &opened[nd_device_slot(device)];
        if (!*open) {
            continue;
        }
        char op[32];
        snprintf(op, sizeof op, "%.20s_reset", backends[id].name);
        if (nd_check(op, device, device->backend->reset(device->index)) < 0) {
            return -1;
        }
        device->generation++;
        *open = false;
        if (nd_device_ready(device) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- import ---------------------------------------------------------------------------------- */
#ifdef NEEDLE_LEVELS
/* A portable build has a CPU backend for each level of the processor, the best first. */
#define X(level, table) extern const nd_backend table;
NEEDLE_LEVELS(X)
#undef X

/* Take the best level of this processor, or the one that NEEDLE_CPU_LEVEL names. */
static int choose_level(void) {
    const char *named = getenv("NEEDLE_CPU_LEVEL");
    const nd_backend *chosen = NULL;
    __builtin_cpu_init();
#define X(level, table)                                    \
    if (chosen == NULL && __builtin_cpu_supports(level) && \
        (named == NULL || strcmp(named, level) == 0)) {    \
        chosen = &table;                                   \
    }
    NEEDLE_LEVELS(X)
#undef X
#define X(level, table) " " level
    if (chosen == NULL) {
        FAIL(PyExc_ImportError, "this processor lacks %s; needle is built for" NEEDLE_LEVELS(X),
             named != NULL ? named : "AVX2");
    }
#undef X
    backends[BACKEND_cpu].table = chosen;
    return 0;
}
#endif

int nd_backends_init(void) {
#ifdef NEEDLE_LEVELS
    if (choose_level() < 0) {
        return -1;
    }
#endif
    for (int i = 0; i < NUM_BACKENDS * ND_MAX_DEVICES; i++) {
        devices[i] = (nd_device){.index = i % ND_MAX_DEVICES, .generation = 1};
    }
    Dl_info self;
    bool known = dladdr(devices, &self) != 0 && self.dli_fname != NULL;
    const char *slash = known ? strrchr(self.dli_fname, '/') : NULL;
    for (int id = 0; slash != NULL && id < NUM_BACKENDS; id++) {
        if (backends[id].file != NULL) {
            snprintf(backends[id].path, sizeof backends[id].path, "%.*s/%s",
                     (int)(slash - self.dli_fname), self.dli_fname, backends[id].file);
        }
    }
    return nd_device_ready(nd_host());
}
