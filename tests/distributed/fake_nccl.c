/* fake_nccl.c - NCCL's functions as nccl.h declares them, between processes of one machine, on memory
 * of the host: a message is a file of a folder below TMPDIR, whose path is the unique id.
 *
 * A receive waits for its message, also of ranks that are gone. The environment: FAKE_NCCL_VERSION is
 * its version, FAKE_NCCL_FAILS names a function that fails.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, MOST = 16 };

typedef struct {
    char internal[128];
} unique_id;

typedef struct {
    unique_id folder;
    int size, rank, sent[MOST], received[MOST];
} communicator;

static int in_group;

static int end_of(const char *function) {
    const char *injected = getenv("FAKE_NCCL_FAILS");
    return injected != NULL && strcmp(injected, function) == 0 ? SYSTEM_ERROR : SUCCESS;
}

const char *ncclGetErrorString(int result) {
    return result == SYSTEM_ERROR ? "unhandled system error" : "invalid argument";
}
const char *ncclGetLastError(communicator *unused) { return "the cable is out\n"; }

int ncclGetVersion(int *version) {
    const char *injected = getenv("FAKE_NCCL_VERSION");
    *version = injected != NULL ? atoi(injected) : 22809;
    return SUCCESS;
}

int ncclGetUniqueId(unique_id *id) {
    memset(id, 0, sizeof *id);
    const char *parent = getenv("TMPDIR");
    if (parent == NULL) {
        return SYSTEM_ERROR;
    }
    snprintf(id->internal, sizeof id->internal, "%s/nccl-XXXXXX", parent);
    return mkdtemp(id->internal) != NULL ? end_of(__func__) : SYSTEM_ERROR;
}

int ncclCommInitRank(communicator **out, int size, unique_id id, int rank) {
    *out = calloc(1, sizeof **out);
    **out = (communicator){.folder = id, .size = size, .rank = rank};
    return end_of(__func__);
}

int ncclCommDestroy(communicator *comm) {
    free(comm);
    return SUCCESS;
}

int ncclCommGetAsyncError(communicator *comm, int *error) {
    *error = end_of(__func__);
    return comm->size > 0 ? SUCCESS : INVALID_ARGUMENT;
}

int ncclGroupStart(void) {
    in_group = 1;
    return SUCCESS;
}

int ncclGroupEnd(void) {
    in_group = 0;
    return SUCCESS;
}

static int refuses(const communicator *comm, int type, int peer, const void *stream) {
    return !in_group || type != 0 || peer < 0 || peer >= comm->size || peer == comm->rank ||
           stream != NULL;
}

int ncclSend(void *data, size_t items, int type, int peer, communicator *comm, void *stream) {
    char part[PATH_MAX], whole[PATH_MAX];
    if (refuses(comm, type, peer, stream)) {
        return INVALID_ARGUMENT;
    }
    snprintf(part, sizeof part, "%s/part-%d", comm->folder.internal, comm->rank);
    snprintf(whole, sizeof whole, "%s/%d-%d-%d", comm->folder.internal, comm->rank, peer,
             comm->sent[peer]++);
    FILE *file = fopen(part, "wb");
    if (file == NULL || fwrite(data, 1, items, file) != items || fclose(file) != 0) {
        return SYSTEM_ERROR;
    }
    return rename(part, whole) == 0 ? end_of(__func__) : SYSTEM_ERROR;
}

int ncclRecv(void *data, size_t items, int type, int peer, communicator *comm, void *stream) {
    char path[PATH_MAX];
    FILE *file = NULL;
    if (refuses(comm, type, peer, stream) || end_of(__func__) != SUCCESS) {
        return end_of(__func__) != SUCCESS ? SYSTEM_ERROR : INVALID_ARGUMENT;
    }
    snprintf(path, sizeof path, "%s/%d-%d-%d", comm->folder.internal, peer, comm->rank,
             comm->received[peer]++);
    while ((file = fopen(path, "rb")) == NULL) {
        usleep(100);
    }
    const int is_whole = fread(data, 1, items, file) == items && fgetc(file) == EOF;
    fclose(file);
    return is_whole && remove(path) == 0 ? SUCCESS : SYSTEM_ERROR;
}
