/* fake_backend.c - a _cuda.so whose GPUs compute with the CPU backend's functions, linked from the
 * objects of the build. FAKE_GPUS: their number (1); FAKE_NAME: their name; FAKE_CLOSED: the number
 * of one that cannot be opened; FAKE_GELU: what gelu does: lose the context, die, hang, wrong. */
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
    return ND_OK;
}

static nd_status synchronize(int device) { return ND_OK; }

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
    return &fake;
}
