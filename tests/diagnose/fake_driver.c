/* fake_driver.c - libcuda.so.1 as far as the diagnosis asks it; memory of a GPU is the host's. */
#include <stdint.h>

#include "fake.h"

typedef void *context;

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}
int cuDeviceGet(int *device, int index) {
    *device = index;
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 0, 16);
    uuid[15] = (unsigned char)device;
    return 0;
}
int cuDevicePrimaryCtxRetain(context *out, int device) {
    *out = (context)(intptr_t)(device + 1);
    return 0;
}
int cuCtxSetCurrent(context current) { return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuCtxEnablePeerAccess(context peer, unsigned flags) { return (int)injected("peer_access", 0); }
int cuMemAlloc_v2(void **out, size_t bytes) {
    *out = malloc(bytes);
    return *out == NULL ? 2 : 0;
}
int cuMemFree_v2(void *memory) {
    free(memory);
    return 0;
}
int cuMemcpyHtoD_v2(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    return 0;
}
int cuMemcpyDtoH_v2(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
    return 0;
}
int cuMemcpyPeer(unsigned char *to, context target, const void *from, context origin,
                 size_t bytes) {
    memcpy(to, from, bytes);
    for (long long i = 0; i < injected("peer_wrong", 0); i++) {
        to[7 * i] ^= 1;
    }
    return (int)injected("peer_error", 0);
}
