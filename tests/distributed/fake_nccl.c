/* fake_nccl.c - NCCL's functions as nccl.h declares them, between processes of one machine, on memory
 * of the host: a FIFO for each pair, in a folder below TMPDIR whose path is the unique id.
 *
 * A group's messages all move at its end, which waits for them, also for ranks that are gone. The
 * environment: FAKE_NCCL_VERSION is its version, FAKE_NCCL_FAILS names a function that fails.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
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
    int size, rank, to[MOST], from[MOST];
} communicator;

typedef struct {
    char *data;
    size_t left;
    int pipe;
    short way;
} message;

static message messages[2 * MOST];
static int count, in_group;

static int fails(const char *function) {
    const char *injected = getenv("FAKE_NCCL_FAILS");
    return injected != NULL && strcmp(injected, function) == 0;
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
    static int made;
    memset(id, 0, sizeof *id);
    const char *parent = getenv("TMPDIR");
    do {
        snprintf(id->internal, sizeof id->internal, "%s/nccl-%d-%d",
                 parent != NULL ? parent : "/tmp", (int)getpid(), made++);
        if (mkdir(id->internal, 0700) == 0) {
            return fails(__func__) ? SYSTEM_ERROR : SUCCESS;
        }
    } while (errno == EEXIST);
    return SYSTEM_ERROR;
}

static int pipe_of(const char *folder, int from, int to) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%d-%d", folder, from, to);
    if (mkfifo(path, 0600) != 0 && errno != EEXIST) {
        return -1;
    }
    return open(path, O_RDWR | O_NONBLOCK); /* does not wait for the other end */
}

int ncclCommInitRank(communicator **out, int size, unique_id id, int rank) {
    communicator *made = calloc(1, sizeof *made);
    made->size = size;
    made->rank = rank;
    for (int peer = 0; peer < size; peer++) {
        made->to[peer] = pipe_of(id.internal, rank, peer);
        made->from[peer] = pipe_of(id.internal, peer, rank);
        if (made->to[peer] < 0 || made->from[peer] < 0) {
            return SYSTEM_ERROR;
        }
    }
    *out = made;
    return fails(__func__) ? SYSTEM_ERROR : SUCCESS;
}

int ncclCommDestroy(communicator *comm) {
    for (int peer = 0; peer < comm->size; peer++) {
        close(comm->to[peer]);
        close(comm->from[peer]);
    }
    free(comm);
    return SUCCESS;
}

int ncclCommGetAsyncError(communicator *comm, int *error) {
    *error = fails(__func__) ? SYSTEM_ERROR : SUCCESS;
    return comm->size > 0 ? SUCCESS : INVALID_ARGUMENT;
}

int ncclGroupStart(void) {
    in_group = 1;
    count = 0;
    return SUCCESS;
}

static int add(const char *function, void *data, size_t items, int type, int peer,
               communicator *comm, void *stream, short way) {
    if (!in_group || type != 0 || peer < 0 || peer >= comm->size || peer == comm->rank ||
        stream != NULL) {
        return INVALID_ARGUMENT;
    }
    int pipe = way == POLLOUT ? comm->to[peer] : comm->from[peer];
    messages[count++] = (message){data, items, pipe, way};
    return fails(function) ? SYSTEM_ERROR : SUCCESS;
}

int ncclSend(void *data, size_t items, int type, int peer, communicator *comm, void *stream) {
    return add(__func__, data, items, type, peer, comm, stream, POLLOUT);
}

int ncclRecv(void *data, size_t items, int type, int peer, communicator *comm, void *stream) {
    return add(__func__, data, items, type, peer, comm, stream, POLLIN);
}

int ncclGroupEnd(void) {
    in_group = 0;
    for (int open = count; open > 0;) {
        struct pollfd waited[2 * MOST];
        for (int i = 0; i < count; i++) {
            waited[i] =
                (struct pollfd){messages[i].left > 0 ? messages[i].pipe : -1, messages[i].way, 0};
        }
        poll(waited, (nfds_t)count, -1);
        open = 0;
        for (int i = 0; i < count; i++) {
            message *m = &messages[i];
            if (m->left > 0 && (waited[i].revents & m->way)) {
                ssize_t moved = m->way == POLLOUT ? write(m->pipe, m->data, m->left)
                                                  : read(m->pipe, m->data, m->left);
                if (moved > 0) {
                    m->data += moved;
                    m->left -= (size_t)moved;
                }
            }
            open += m->left > 0;
        }
    }
    return SUCCESS;
}
