/* fake_backend.c - a _cuda.so whose GPUs compute with the CPU backend's functions, linked from the
 * objects of the build, but for faults that a test injects:
 *     wrong=OP      the first number that it makes is another (of an OP: of its first OUT)
 *     flaky=OP      the same, each time another
 *     hang=OP, die=OP, fatal=OP    it never returns, it kills the process, it loses the context
 * An op of memory at 0x10 loses the context too, but with numb=1. */
#include <signal.h>
#include <unistd.h>

#include "backend.h"
#include "fake.h"

extern const nd_backend cpu_backend;

static bool lost;

static nd_status lose(const char *op) {
    lost = true;
    return nd_error(ND_EFATAL, "%s: an injected fault: the CUDA context is lost", op);
}

static nd_status inject(const char *op) {
    if (lost) {
        return lose(op);
    }
    if (injected_is("hang", op)) {
        pause();
    }
    if (injected_is("die", op)) {
        kill(getpid(), SIGSEGV);
    }
    return injected_is("fatal", op) ? lose(op) : ND_OK;
}

/* Another first number of a float32 array. */
static void spoil(const char *op, nd_array *made) {
    static float more = 1;
    bool flaky = injected_is("flaky", op);
    if ((flaky || injected_is("wrong", op)) && made != NULL && made->dtype == ND_F32 &&
        nd_size(made) > 0) {
        *(float *)made->data += 1000 * more;
        more += flaky;
    }
}

/* The first array that an op makes. */
#define OPERAND(kind, field, axes, dtype) MADE_##kind(field)
#define F64(field)
#define I64(field)
#define MADE_IN(field)
#define MADE_IN_ANY(field)
#define MADE_IN_ROWS(field)
#define MADE_IN_MATRIX(field)
#define MADE_OPT(field)
#define MADE_IO(field)
#define MADE_IO_ANY(field)
#define MADE_IO_ROWS(field)
#define MADE_IO_OPT(field)
#define MADE_OUT(field) made = made != NULL ? made : args->field;
#define FUNCTION(name, find, before)                                    \
    static nd_status fake_##name(int device, const name##_args *args) { \
        nd_array *made = NULL;                                          \
        find;                                                           \
        before;                                                         \
        nd_status status = inject(#name);                                \
        if (status == ND_OK) {                                          \
            status = cpu_backend.name(0, args);                         \
        }                                                               \
        spoil(#name, made);                                             \
        return status;                                                  \
    }
#define EW1(name, types, formula) \
    FUNCTION(                     \
        name, made = args->out,   \
        if (args->x->data == (void *)0x10 && !injected("numb", 0)) { return lose(#name); })
#define EW2(name, types, formula) FUNCTION(name, made = args->out, )
#define CMP(name, formula) FUNCTION(name, made = args->out, )
#define RED(name, types, start, combine, map) FUNCTION(name, made = args->out, )
#define ARG(name, better) FUNCTION(name, made = args->out, )
#define OP(name, operands) FUNCTION(name, operands, )
#include "ops.def"

static nd_status device_count(int *count) {
    *count = (int)injected("count", 1);
    return ND_OK;
}

static nd_status open_device(int device) {
    return injected("open_fails", -1) == device
               ? nd_error(ND_ECUDA, "cuda(%d): out of memory", device)
               : cpu_backend.open(0);
}

static nd_status properties(int device, nd_properties *out) {
    memset(out, 0, sizeof *out);
    const char *name = injected_text("name");
    snprintf(out->name, sizeof out->name, "NVIDIA %.60s", name != NULL ? name : "Pretend");
    out->total_bytes = 141ll << 30;
    out->processors = 132;
    out->arch = 90;
    snprintf(out->uuid, sizeof out->uuid, "GPU-00000000-0000-0000-0000-0000000000%02x", device);
    return ND_OK;
}

static nd_status synchronize(int device) { return lost ? lose("synchronize") : ND_OK; }

__attribute__((visibility("default"))) const nd_backend *needle_backend(void) {
    static nd_backend fake;
    fake = cpu_backend;
    fake.abi = nd_abi();
    fake.is_host = false;
    fake.device_count = device_count;
    fake.open = open_device;
    fake.properties = properties;
    fake.synchronize = synchronize;
#define EACH_OP(name) fake.name = fake_##name;
#include "ops.def"
    return &fake;
}
