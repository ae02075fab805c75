/* fake_cuda.c - a _cuda.so whose GPUs compute with the CPU backend's functions, linked from the
 * objects of the build. FAKE_GPUS: their number (1); FAKE_NAME: their name; FAKE_WARNING: what they
 * warn of; FAKE_CLOSED: the number of one that cannot be opened; FAKE_GELU: what gelu does: lose the
 * context, die, hang, wrong. FAKE_LOG: a file that gets a line for each call of graphs and modules,
 * which there are then: a graph does nothing, and the one kernel, `fill`, fills an array. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend.h"

extern const nd_backend cpu_backend;

static int number(const char *name, int usual) {
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? atoi(text) : usual;
}

static nd_status fake_gelu(int device, const gelu_args *args) {
    const char *fault = getenv("FAKE_GELU");
    switch (fault != NULL ? fault[0] : '\0') {
    case 'l':
        return nd_error(ND_EFATAL, "gelu: the CUDA context is lost");
    case 'd':
        abort();
    case 'h':
        fputs("it hangs\n", stderr);
        pause();
    }
    nd_status status = cpu_backend.gelu(0, args);
    if (fault != NULL && fault[0] == 'w' && args->out->dtype == ND_F32) {
        *(float *)args->out->data += 1;
    }
    return status;
}

static nd_status device_count(int *count) {
    *count = number("FAKE_GPUS", 1);
    return ND_OK;
}

static nd_status open_device(int device) {
    return number("FAKE_CLOSED", -1) == device
               ? nd_error(ND_ECUDA, "cuda(%d): out of memory", device)
               : cpu_backend.open(0);
}

static nd_status properties(int device, nd_properties *out) {
    memset(out, 0, sizeof *out);
    const char *name = getenv("FAKE_NAME");
    snprintf(out->name, sizeof out->name, "NVIDIA %.60s", name != NULL ? name : "Pretend");
    out->total_bytes = 141ll << 30;
    out->processors = 132;
    out->arch = 90;
    snprintf(out->uuid, sizeof out->uuid, "GPU-%d", device);
    const char *warning = getenv("FAKE_WARNING");
    snprintf(out->warning, sizeof out->warning, "%s", warning != NULL ? warning : "");
    return ND_OK;
}

/* ---- graphs and modules ---- */

struct nd_graph {
    int unused;
};
struct nd_module {
    int number;
};
struct nd_kernel {
    int unused;
};
static struct nd_graph graph;
static struct nd_kernel kernel;

static nd_status say(const char *format, ...) {
    FILE *file = getenv("FAKE_LOG") != NULL ? fopen(getenv("FAKE_LOG"), "a") : NULL;
    if (file != NULL) {
        va_list values;
        va_start(values, format);
        vfprintf(file, format, values);
        va_end(values);
        fclose(file);
    }
    return ND_OK;
}

static nd_status synchronize(int device) { return say("synchronize\n"); }

static nd_status graph_begin(int device, nd_graph **out) {
    *out = &graph;
    return ND_OK;
}
static nd_status graph_part(int device, nd_graph *part) { return ND_OK; }
static nd_status graph_free(int device, nd_graph *freed) { return say("graph freed\n"); }

static nd_status launch_limits(int device, nd_launch_limits *out) {
    *out = (nd_launch_limits){90, 132, 2048, 65536, 232448, 1 << 30};
    return say("limits\n");
}

static nd_status module_load(int device, const void *code, nd_module **out) {
    static int modules;
    if (memcmp(code, "bad", 3) == 0) {
        return nd_error(ND_ECUDA, "module: not machine code");
    }
    *out = malloc(sizeof **out);
    (*out)->number = modules++;
    return ND_OK;
}

static nd_status module_kernel(int device, nd_module *module, const char *symbol, nd_kernel **out) {
    *out = &kernel;
    return strcmp(symbol, "fill") == 0 ? ND_OK : nd_error(ND_ECUDA, "no such symbol");
}

static nd_status module_unload(int device, nd_module *module) {
    say("unload %d\n", module->number);
    free(module);
    return ND_OK;
}

static nd_status kernel_launch(int device, nd_kernel *launched, const nd_launch *l) {
    float *x = *(float **)l->arguments[0], value = *(float *)l->arguments[1];
    int n = *(int *)l->arguments[2];
    say("%s grid %u %u %u block %u %u %u shared %u cluster %d %u %u %u cooperative %d\n", l->name,
        l->grid[0], l->grid[1], l->grid[2], l->block[0], l->block[1], l->block[2], l->shared,
        l->has_cluster, l->cluster[0], l->cluster[1], l->cluster[2], l->cooperative);
    for (int i = 0; i < n; i++) {
        x[i] = value;
    }
    return n < 0 ? nd_error(ND_ECUDA, "fill: kernel launch: it refuses") : ND_OK;
}

static nd_status kernel_blocks(int device, nd_kernel *k, int threads, uint32_t shared, int *out) {
    *out = threads + (int)shared == 3250 ? 3 : 1;
    return ND_OK;
}

__attribute__((visibility("default"))) const nd_backend *needle_backend(void) {
    static nd_backend fake;
    fake = cpu_backend;
    fake.abi = nd_abi();
    fake.is_host = false;
    fake.device_count = device_count;
    fake.open = open_device;
    fake.properties = properties;
    fake.synchronize = synchronize;
    fake.gelu = fake_gelu;
    if (getenv("FAKE_LOG") != NULL) {
        fake.graph_begin = graph_begin;
        fake.graph_end = fake.graph_launch = graph_part;
        fake.graph_free = graph_free;
        fake.launch_limits = launch_limits;
        fake.module_load = module_load;
        fake.module_kernel = module_kernel;
        fake.module_unload = module_unload;
        fake.kernel_launch = kernel_launch;
        fake.kernel_blocks = kernel_blocks;
    }
    return &fake;
}
