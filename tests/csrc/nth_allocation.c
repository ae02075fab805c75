/* nth_allocation.c - makes the n-th allocation fail, and counts them (tests/nth_allocation.py).
 *
 * Three kinds. NEEDLE: what needle's own shared objects ask of malloc, calloc, realloc,
 * posix_memalign and operator new; their tables of imported functions are rewritten, so that no
 * other caller is touched. DRIVER: memory, events and graphs of the CUDA driver. Its functions reach the
 * runtime, which is linked into _cuda.so, through dlsym and cuGetProcAddress, and are replaced on
 * that way: before anything of CUDA is used. PYTHON: the objects that needle's C code asks the
 * interpreter for. Those of Python code and of NumPy are left alone: in both a failure loses
 * references or raises SystemError.
 *
 * Only the thread that calls run() is counted, or with `everywhere` the whole process.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unwind.h>

enum { NEEDLE = 1, DRIVER = 2, PYTHON = 4 };

/* Of Python's headers, which need not be here. */
typedef struct {
    void *context;
    void *(*malloc)(void *context, size_t bytes);
    void *(*calloc)(void *context, size_t count, size_t bytes);
    void *(*realloc)(void *context, void *memory, size_t bytes);
    void (*free)(void *context, void *memory);
} python_allocator;
enum { DOMAIN_MEM = 1, DOMAIN_OBJ = 2 };
extern void PyMem_GetAllocator(int domain, python_allocator *allocator);
extern void PyMem_SetAllocator(int domain, python_allocator *allocator);
extern void *PyObject_CallNoArgs(void *callable);
extern void *_PyEval_EvalFrameDefault(void *thread, void *frame, int throwing);

/* ---- counting -------------------------------------------------------------------------------- */
static atomic_int armed; /* kinds */
static atomic_bool in_all_threads;
static atomic_long calls, failures, first, end;
static _Thread_local bool mine;

static bool fails(int kind) {
    if (!(atomic_load(&armed) & kind) || !(mine || atomic_load(&in_all_threads))) {
        return false;
    }
    long number = atomic_fetch_add(&calls, 1) + 1;
    bool now = number >= atomic_load(&first) && number < atomic_load(&end);
    atomic_fetch_add(&failures, now);
    return now;
}

long calls_seen(void) { return atomic_load(&calls); }
long calls_failed(void) { return atomic_load(&failures); }

/* ---- needle's own allocations ---------------------------------------------------------------- */
static void *failing_malloc(size_t bytes) { return fails(NEEDLE) ? NULL : malloc(bytes); }

static void *failing_calloc(size_t count, size_t bytes) {
    return fails(NEEDLE) ? NULL : calloc(count, bytes);
}

static void *failing_realloc(void *memory, size_t bytes) {
    return fails(NEEDLE) ? NULL : realloc(memory, bytes);
}

static int failing_posix_memalign(void **out, size_t alignment, size_t bytes) {
    return fails(NEEDLE) ? ENOMEM : posix_memalign(out, alignment, bytes);
}

/* operator new: both forms, and how the first tells that there is no memory. */
static void *(*real_new)(size_t);
static void *(*real_new_nothrow)(size_t, const void *);
static void (*throw_bad_alloc)(void);

static void *failing_new(size_t bytes) {
    if (fails(NEEDLE)) {
        throw_bad_alloc();
    }
    return real_new(bytes);
}

static void *failing_new_nothrow(size_t bytes, const void *tag) {
    return fails(NEEDLE) ? NULL : real_new_nothrow(bytes, tag);
}

static int find_new(void) {
    void *library = dlopen("libstdc++.so.6", RTLD_LAZY);
    if (library == NULL) {
        return -1;
    }
    *(void **)&real_new = dlsym(library, "_Znwm");
    *(void **)&real_new_nothrow = dlsym(library, "_ZnwmRKSt9nothrow_t");
    *(void **)&throw_bad_alloc = dlsym(library, "_ZSt17__throw_bad_allocv");
    return real_new && real_new_nothrow && throw_bad_alloc ? 0 : -1;
}

/* ---- the driver's ---------------------------------------------------------------------------- */
typedef int driver_call(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t);
enum { OUT_OF_MEMORY = 2, MOST_CALLS = 16 }; /* CUDA_ERROR_OUT_OF_MEMORY */

/* Integers and pointers, six at most: what is not there costs nothing to hand on. */
static driver_call *real_calls[MOST_CALLS];
#define EACH_CALL(X) \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define X(i)                                                                                     \
    static int failing_call_##i(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, \
                                uintptr_t f) {                                                   \
        return fails(DRIVER) ? OUT_OF_MEMORY : real_calls[i](a, b, c, d, e, f);                  \
    }
EACH_CALL(X)
#undef X
static driver_call *const failing_calls[MOST_CALLS] = {
#define X(i) failing_call_##i,
    EACH_CALL(X)
#undef X
};

static int replaced;
int driver_calls_replaced(void) { return replaced; }

static bool is_allocation(const char *name) {
    static const char names[] = " cuMemAlloc cuMemAlloc_v2 cuMemAllocAsync cuMemAllocFromPoolAsync "
                                "cuMemHostAlloc cuMemAllocHost cuMemAllocHost_v2 cuEventCreate "
                                "cuGraphInstantiate cuGraphInstantiateWithFlags "
                                "cuGraphInstantiateWithParams ";
    char word[64];
    snprintf(word, sizeof word, " %s ", name);
    return strstr(names, word) != NULL;
}

/* A function of the driver, or what stands in for it. */
static void *replacement(const char *name, void *function) {
    if (function == NULL || !is_allocation(name)) {
        return function;
    }
    for (int i = 0; i < replaced; i++) {
        if ((void *)real_calls[i] == function) {
            return (void *)failing_calls[i];
        }
    }
    if (replaced == MOST_CALLS) {
        abort();
    }
    real_calls[replaced] = (driver_call *)function;
    return (void *)failing_calls[replaced++];
}

typedef int get_address(const char *name, void **function, int version, uint64_t flags,
                        void *status);
static get_address *real_get_address[2];

static int address(int form, const char *name, void **function, int version, uint64_t flags,
                   void *status);
/* The first form has no `status`. */
static int get_address_1(const char *name, void **function, int version, uint64_t flags,
                         void *status) {
    return address(0, name, function, version, flags, status);
}
static int get_address_2(const char *name, void **function, int version, uint64_t flags,
                         void *status) {
    return address(1, name, function, version, flags, status);
}

static void *get_address_replacement(int form, void *function) {
    if (function == NULL || function == (void *)get_address_1 ||
        function == (void *)get_address_2) {
        return function;
    }
    real_get_address[form] = (get_address *)function;
    return form == 0 ? (void *)get_address_1 : (void *)get_address_2;
}

static int address(int form, const char *name, void **function, int version, uint64_t flags,
                   void *status) {
    int error = real_get_address[form](name, function, version, flags, status);
    if (error == 0 && strcmp(name, "cuGetProcAddress") == 0) {
        *function = get_address_replacement(version >= 12000, *function);
    } else if (error == 0) {
        *function = replacement(name, *function);
    }
    return error;
}

static void *replacing_dlsym(void *handle, const char *name) {
    void *function = dlsym(handle, name);
    if (strcmp(name, "cuGetProcAddress") == 0) {
        return get_address_replacement(0, function);
    }
    if (strcmp(name, "cuGetProcAddress_v2") == 0) {
        return get_address_replacement(1, function);
    }
    return replacement(name, function);
}

/* ---- tables of imported functions ------------------------------------------------------------ */
static const struct {
    const char *name;
    void *function;
    bool in_c; /* _C, else _cuda.so, whose malloc and calloc are the CUDA runtime's */
} imports[] = {
    {"malloc", (void *)failing_malloc, true},
    {"calloc", (void *)failing_calloc, true},
    {"realloc", (void *)failing_realloc, true},
    {"posix_memalign", (void *)failing_posix_memalign, true},
    {"_Znwm", (void *)failing_new, false},
    {"_ZnwmRKSt9nothrow_t", (void *)failing_new_nothrow, false},
    {"dlsym", (void *)replacing_dlsym, false},
};

#ifdef __aarch64__
enum { JUMP_SLOT = R_AARCH64_JUMP_SLOT, GLOB_DAT = R_AARCH64_GLOB_DAT };
#else
enum { JUMP_SLOT = R_X86_64_JUMP_SLOT, GLOB_DAT = R_X86_64_GLOB_DAT };
#endif

/* The addresses of a loaded file, of a function. */
typedef struct {
    uintptr_t begin, end;
} range;
static range code_of_c, code_of_python, loop, own_code; /* loop: of the interpreter over bytecode */

static range file_of(const void *address) {
    struct dl_find_object found;
    if (_dl_find_object((void *)(uintptr_t)address, &found) != 0) {
        abort();
    }
    return (range){(uintptr_t)found.dlfo_map_start, (uintptr_t)found.dlfo_map_end};
}

static bool is_in(range r, uintptr_t at) { return at >= r.begin && at < r.end; }

static int rewrite(const struct link_map *map, uintptr_t list_at, size_t bytes, bool is_c,
                   const Elf64_Sym *symbols, const char *names) {
    const Elf64_Rela *list = (const void *)list_at;
    int replaced_here = 0;
    for (size_t i = 0; i < bytes / sizeof *list; i++) {
        uint64_t type = ELF64_R_TYPE(list[i].r_info);
        const char *name = names + symbols[ELF64_R_SYM(list[i].r_info)].st_name;
        for (size_t k = 0; k < sizeof imports / sizeof *imports; k++) {
            if ((type == JUMP_SLOT || type == GLOB_DAT) && imports[k].in_c == is_c &&
                strcmp(name, imports[k].name) == 0) {
                void **slot = (void **)(map->l_addr + list[i].r_offset);
                if (mprotect((void *)((uintptr_t)slot & ~(uintptr_t)4095), 4096,
                             PROT_READ | PROT_WRITE) == 0) {
                    *slot = imports[k].function;
                    replaced_here++;
                }
            }
        }
    }
    return replaced_here;
}

/* The number of functions replaced that a loaded file imports, of which the handle of dlopen is
 * given; -1: there is no libstdc++. is_c: it is _C, else _cuda.so. */
int replace_imports(void *handle, int is_c) {
    struct link_map *map;
    Dl_info info;
    const Elf64_Sym *symbol = NULL;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || (!is_c && find_new() < 0)) {
        return -1;
    }
    if (is_c) {
        code_of_c = file_of(map->l_ld);
        code_of_python = file_of((void *)PyObject_CallNoArgs);
        own_code = file_of((void *)replace_imports);
    }
    if (dladdr1((void *)_PyEval_EvalFrameDefault, &info, (void **)&symbol, RTLD_DL_SYMENT) != 0) {
        loop.begin = (uintptr_t)_PyEval_EvalFrameDefault;
        loop.end = loop.begin + symbol->st_size;
    }
    uintptr_t table[DT_NUM] = {0};
    for (const Elf64_Dyn *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag < DT_NUM) {
            table[entry->d_tag] = entry->d_un.d_ptr;
        }
    }
    const Elf64_Sym *symbols = (const void *)table[DT_SYMTAB];
    const char *names = (const void *)table[DT_STRTAB];
    return rewrite(map, table[DT_JMPREL], table[DT_PLTRELSZ], is_c, symbols, names) +
           rewrite(map, table[DT_RELA], table[DT_RELASZ], is_c, symbols, names);
}

/* ---- Python's objects ------------------------------------------------------------------------ */
static python_allocator real_python[3];

/* Steps out of this file and of the interpreter's functions, but not of its loop over bytecode. */
static _Unwind_Reason_Code step_out(struct _Unwind_Context *context, void *by_needle) {
    uintptr_t at = _Unwind_GetIP(context) - 1; /* in the call, not after it */
    if (is_in(own_code, at) || (is_in(code_of_python, at) && !is_in(loop, at))) {
        return _URC_NO_REASON;
    }
    *(bool *)by_needle = is_in(code_of_c, at);
    return _URC_END_OF_STACK;
}

static bool fails_in_python(void) {
    bool by_needle = false;
    if ((atomic_load(&armed) & PYTHON) && (mine || atomic_load(&in_all_threads))) {
        _Unwind_Backtrace(step_out, &by_needle);
    }
    return by_needle && fails(PYTHON);
}

static void *python_malloc(void *context, size_t bytes) {
    const python_allocator *real = context;
    return fails_in_python() ? NULL : real->malloc(real->context, bytes);
}

static void *python_calloc(void *context, size_t count, size_t bytes) {
    const python_allocator *real = context;
    return fails_in_python() ? NULL : real->calloc(real->context, count, bytes);
}

static void *python_realloc(void *context, void *memory, size_t bytes) {
    const python_allocator *real = context;
    return fails_in_python() ? NULL : real->realloc(real->context, memory, bytes);
}

static void python_free(void *context, void *memory) {
    const python_allocator *real = context;
    real->free(real->context, memory);
}

static void watch_python(void) {
    for (int domain = DOMAIN_MEM; domain <= DOMAIN_OBJ; domain++) {
        PyMem_GetAllocator(domain, &real_python[domain]);
        python_allocator failing = {&real_python[domain], python_malloc, python_calloc,
                                    python_realloc, python_free};
        PyMem_SetAllocator(domain, &failing);
    }
}

static void leave_python(void) {
    for (int domain = DOMAIN_MEM; domain <= DOMAIN_OBJ; domain++) {
        PyMem_SetAllocator(domain, &real_python[domain]);
    }
}

/* ---- running --------------------------------------------------------------------------------- */
/* From now on call `number` of these kinds, and `count` - 1 after it, fail. */
void arm(int kinds, long number, long count, int everywhere) {
    atomic_store(&calls, 0);
    atomic_store(&failures, 0);
    atomic_store(&first, number);
    atomic_store(&end, number + count);
    atomic_store(&in_all_threads, everywhere != 0);
    if (kinds & PYTHON) {
        watch_python();
    }
    atomic_store(&armed, kinds);
}

/* callable(), armed. In C from end to end, so that what tells the outcome is not hit. */
void *run(void *callable, int kinds, long number, long count) {
    arm(kinds, number, count, 0);
    mine = true;
    void *result = PyObject_CallNoArgs(callable);
    mine = false;
    atomic_store(&armed, 0);
    if (kinds & PYTHON) {
        leave_python();
    }
    return result;
}
