/* fake_nvml.c - libnvidia-ml.so.1 of a healthy machine of H200s, but for injected faults. A
 * handle is the GPU's number plus one; faults are those of GPU 0, or of the number in `at`. */
#include <stdint.h>
#include <unistd.h>

#include "fake.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef void *gpu;

enum { OK, INVALID = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };

static long long of(gpu device, const char *name, long long usual) {
    return (intptr_t)device - 1 == injected("at", 0) ? injected(name, usual) : usual;
}

int nvmlInitWithFlags(u32 flags) {
    if (injected("nvml_hangs", 0)) {
        pause();
    }
    return (int)injected("nvml_error", OK);
}
const char *nvmlErrorString(int code) {
    return code == 18 ? "Driver/library version mismatch" : "an injected error";
}
int nvmlSystemGetDriverVersion(char *text, u32 size) {
    snprintf(text, size, "580.65.06");
    return OK;
}
int nvmlDeviceGetCount_v2(u32 *count) {
    *count = (u32)injected("nvml_count", injected("count", 1));
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(u32 index, gpu *device) {
    *device = (gpu)(intptr_t)(index + 1);
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu *device) {
    *device = (gpu)(intptr_t)(strtol(uuid + strlen(uuid) - 2, NULL, 16) + 1);
    return OK;
}
int nvmlDeviceGetName(gpu device, char *text, u32 size) {
    snprintf(text, size, "NVIDIA Pretend");
    return (int)of(device, "lost", OK);
}
int nvmlDeviceGetUUID(gpu device, char *text, u32 size) {
    snprintf(text, size, "GPU-00000000-0000-0000-0000-0000000000%02x", (int)(intptr_t)device - 1);
    return OK;
}

typedef struct {
    char legacy[16];
    u32 domain, bus, device, id, subsystem;
    char bus_id[32];
} pci;
int nvmlDeviceGetPciInfo_v3(gpu device, pci *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", (int)(intptr_t)device);
    return OK;
}

typedef struct {
    u64 total, free, used;
} memory;
int nvmlDeviceGetMemoryInfo(gpu device, memory *out) {
    out->total = 141ull << 30;
    out->used = (u64)of(device, "used", 1ll << 30);
    out->free = out->total - out->used;
    return OK;
}

typedef struct {
    u32 gpu, memory;
} utilization;
int nvmlDeviceGetUtilizationRates(gpu device, utilization *out) {
    out->gpu = (u32)of(device, "busy", 0);
    out->memory = 0;
    return OK;
}

#define NUMBER(function, name, usual)        \
    int function(gpu device, u32 *out) {     \
        *out = (u32)of(device, name, usual); \
        return OK;                           \
    }
NUMBER(nvmlDeviceGetPowerUsage, "power", 120000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit", 700000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "power_default", 700000)
NUMBER(nvmlDeviceGetPersistenceMode, "persistence", 1)
NUMBER(nvmlDeviceGetComputeMode, "compute", 0)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "generation", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "generation_max", 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "width_max", 16)

int nvmlDeviceGetTemperature(gpu device, u32 sensor, u32 *out) {
    *out = (u32)of(device, "temperature", 35);
    return sensor == 0 ? OK : INVALID;
}
int nvmlDeviceGetClockInfo(gpu device, u32 kind, u32 *out) {
    *out = kind == 1 ? (u32)of(device, "sm", 1980) : 3201;
    return OK;
}
int nvmlDeviceGetMaxClockInfo(gpu device, u32 kind, u32 *out) {
    *out = kind == 1 ? 1980 : 3201;
    return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(gpu device, u64 *out) {
    *out = (u64)of(device, "reasons", 1);
    return OK;
}
int nvmlDeviceGetEccMode(gpu device, u32 *now, u32 *later) {
    *now = *later = (u32)of(device, "ecc_on", 1);
    return OK;
}
int nvmlDeviceGetTotalEccErrors(gpu device, u32 kind, u32 counter, u64 *out) {
    *out = kind != 1 ? 0 : (u64)of(device, counter == 0 ? "ecc" : "ecc_ever", 0);
    return OK;
}
int nvmlDeviceGetRemappedRows(gpu device, u32 *fixed, u32 *rows, u32 *pending, u32 *failed) {
    *fixed = 0;
    *rows = (u32)of(device, "rows", 0);
    *pending = (u32)of(device, "pending", 0);
    *failed = (u32)of(device, "remap_failed", 0);
    return of(device, "old", 0) ? NOT_SUPPORTED : OK;
}
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "retired", 0)
int nvmlDeviceGetMigMode(gpu device, u32 *now, u32 *later) {
    *now = *later = (u32)of(device, "mig", 0);
    return OK;
}
int nvmlDeviceGetNvLinkState(gpu device, u32 link, u32 *out) {
    *out = (long long)link < of(device, "links_up", injected("links", 0));
    return (long long)link < injected("links", 0) ? OK : INVALID;
}

typedef struct {
    u32 pid;
    u64 bytes;
    u32 gpu_instance, compute_instance;
} process;
int nvmlDeviceGetComputeRunningProcesses_v3(gpu device, u32 *count, process *out) {
    long long holder = of(device, "holder", 0);
    if (holder != 0 && *count == 0) { // asked for the size
        *count = 1;
        return INSUFFICIENT_SIZE;
    }
    *count = holder != 0;
    if (holder != 0) {
        *out = (process){.pid = (u32)holder, .bytes = (u64)of(device, "used", 1ll << 30)};
    }
    return OK;
}
