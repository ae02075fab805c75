/* nth_allocation.c - makes the n-th allocation of needle fail, and counts them
 * (test_nth_allocation.py).
 *
 * Counted is what needle's core asks of malloc, calloc and posix_memalign: its table of
 * imported functions is rewritten, so that no other caller is touched. The few objects of the CUDA
 * backend are not counted. Only the thread that calls run() is counted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern void *PyObject_CallNoArgs(void *callable); /* of Python's headers, which need not be here */

/* ---- counting -------------------------------------------------------------------------------- */
static _Thread_local bool armed;
static long calls, failures, first, end; /* of the thread that is armed */

static bool fails(void) {
    if (!armed) {
        return false;
    }
    long number = ++calls;
    bool now = number >= first && number < end;
    failures += now;
    return now;
}

long calls_seen(void) { return calls; }
long calls_failed(void) { return failures; }

/* ---- needle's own allocations ---------------------------------------------------------------- */
static _Atomic long blocks; /* that needle has, less those of before replace_imports() */

long blocks_held(void) { return blocks; }

static void *counted(void *memory) {
    blocks += memory != NULL;
    return memory;
}

static void *failing_malloc(size_t bytes) { return fails() ? NULL : counted(malloc(bytes)); }

static void *failing_calloc(size_t count, size_t bytes) {
    return fails() ? NULL : counted(calloc(count, bytes));
}

static int failing_posix_memalign(void **out, size_t alignment, size_t bytes) {
    int error = fails() ? ENOMEM : posix_memalign(out, alignment, bytes);
    blocks += error == 0;
    return error;
}

static void counting_free(void *memory) {
    blocks -= memory != NULL;
    free(memory);
}

/* ---- tables of imported functions ------------------------------------------------------------ */
static const struct {
    const char *name;
    void *function;
} imports[] = {
    {"malloc", (void *)failing_malloc},
    {"calloc", (void *)failing_calloc},
    {"posix_memalign", (void *)failing_posix_memalign},
    {"free", (void *)counting_free},
};

#ifdef __aarch64__
enum { JUMP_SLOT = R_AARCH64_JUMP_SLOT, GLOB_DAT = R_AARCH64_GLOB_DAT };
#else
enum { JUMP_SLOT = R_X86_64_JUMP_SLOT, GLOB_DAT = R_X86_64_GLOB_DAT };
#endif

static int rewrite(const struct link_map *map, uintptr_t list_at, size_t bytes,
                   const Elf64_Sym *symbols, const char *names) {
    const Elf64_Rela *list = (const void *)list_at;
    int replaced_here = 0;
    for (size_t i = 0; i < bytes / sizeof *list; i++) {
        uint64_t type = ELF64_R_TYPE(list[i].r_info);
        const char *name = names + symbols[ELF64_R_SYM(list[i].r_info)].st_name;
        for (size_t k = 0; k < sizeof imports / sizeof *imports; k++) {
            if ((type == JUMP_SLOT || type == GLOB_DAT) && strcmp(name, imports[k].name) == 0) {
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
 * given. */
int replace_imports(void *handle) {
    struct link_map *map;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) {
        return -1;
    }
    uintptr_t table[DT_NUM] = {0};
    for (const Elf64_Dyn *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag < DT_NUM) {
            table[entry->d_tag] = entry->d_un.d_ptr;
        }
    }
    const Elf64_Sym *symbols = (const void *)table[DT_SYMTAB];
    const char *names = (const void *)table[DT_STRTAB];
    return rewrite(map, table[DT_JMPREL], table[DT_PLTRELSZ], symbols, names) +
           rewrite(map, table[DT_RELA], table[DT_RELASZ], symbols, names);
}

/* ---- running --------------------------------------------------------------------------------- */
/* callable(), in which call `number`, and `count` - 1 after it, fail. In C from end to end, so that
 * what tells the outcome is not hit. */
void *run(void *callable, long number, long count) {
    calls = failures = 0;
    first = number;
    end = number + count;
    armed = true;
    void *result = PyObject_CallNoArgs(callable);
    armed = false;
    return result;
}
