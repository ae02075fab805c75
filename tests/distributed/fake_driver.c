/* fake_driver.c - functions of CUDA's driver as cuda.h declares them, between processes of one
 * machine, on memory of the host: what is allocated is a file below TMPDIR, whose name is its handle.
 *
 * Work is done at once: a wait for a number lasts until another process has written it. The
 * environment: FAKE_DRIVER_FAILS names a function that fails.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 801, MOST = 16 };

typedef struct {
    char name[64];
} handle;

static struct {
    uint64_t address;
    handle file;
} blocks[MOST];
static int count;

static int end_of(const char *function) {
    const char *injected = getenv("FAKE_DRIVER_FAILS");
    return injected != NULL && strcmp(injected, function) == 0 ? NOT_SUPPORTED : SUCCESS;
}

static int map(const char *name, size_t bytes, uint64_t *address) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", getenv("TMPDIR"), name);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    struct stat known;
    if (file < 0 || (bytes > 0 && ftruncate(file, bytes) != 0) || fstat(file, &known) != 0) {
        return NOT_SUPPORTED;
    }
    *address = (uint64_t)mmap(NULL, known.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    *name = "CUDA_ERROR_NOT_SUPPORTED";
    return SUCCESS;
}

int cuCtxSynchronize(void) { return SUCCESS; }

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    char *name = blocks[count].file.name;
    snprintf(name, sizeof(handle), "gpu-%d-%d", getpid(), count);
    if (end_of(__func__) != SUCCESS || map(name, bytes, address) != SUCCESS) {
        return NOT_SUPPORTED;
    }
    blocks[count++].address = *address;
    return SUCCESS;
}
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t bytes) {
    memset((void *)address, value, bytes);
    return SUCCESS;
}

int cuIpcGetMemHandle(handle *out, uint64_t address) {
    for (int i = 0; i < count; i++) {
        if (blocks[i].address == address) {
            *out = blocks[i].file;
            return end_of(__func__);
        }
    }
    return NOT_SUPPORTED;
}
int cuIpcOpenMemHandle_v2(uint64_t *address, handle known, unsigned flags) {
    return flags != 1 || end_of(__func__) != SUCCESS ? NOT_SUPPORTED : map(known.name, 0, address);
}

int cuStreamCreate(void **stream, unsigned flags) { return SUCCESS; }
int cuEventCreate(void **event, unsigned flags) { return SUCCESS; }
int cuEventRecord(void *event, void *stream) { return end_of(__func__); }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return SUCCESS; }

int cuStreamWaitValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    while ((int32_t)(__atomic_load_n((uint32_t *)address, __ATOMIC_ACQUIRE) - value) < 0) {
        usleep(20);
    }
    return flags == 0 ? end_of(__func__) : NOT_SUPPORTED;
}
int cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    __atomic_store_n((uint32_t *)address, value, __ATOMIC_RELEASE);
    return SUCCESS;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    memcpy((void *)to, (const void *)from, bytes);
    return end_of(__func__);
}
