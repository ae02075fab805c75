"""Bounds checks in a kernel that is compiled with debug=True.

Change the source before it is compiled: a pointer `T *x` among the parameters of a kernel becomes
`needle::checked<T> x`, a class that behaves like the pointer, knows the array that it was given,
and checks each element when it is read or written. The first element outside goes into a record in
the host's memory (cuda/checks.cuh), and the kernel traps; the CudaFatalError's message has it.
Pointers that the source makes of others, `const float *row = x + i * n`, `(float4 *)x` and
`reinterpret_cast<float4 *>(x)`, are changed alike and keep the bounds. Lines stay where they are.
"""

from __future__ import annotations

import re

from needle.kernels.signature import split_commas

CLASS = r"""
struct needle_fault {
    int found;     /* the rest is written */
    int parameter; /* of a user's kernel; -1: operand has a name */
    int line;      /* of file; 0: unknown */
    int from_data; /* element is where the index was read, else the index itself */
    unsigned block[3], thread[3];
    long long element, index, bound;
    char operand[24], file[64];
};
__device__ needle_fault *needle_fault_record; /* set when the module is loaded */
__device__ unsigned needle_fault_taken;

namespace needle {

/* The first thread writes and traps; the others wait for that end, but not for ever. */
__device__ __noinline__ inline void fail(long long parameter, long long element, long long bound) {
    needle_fault *fault = needle_fault_record;
    if (atomicInc(&needle_fault_taken, 0xffffffffu) != 0) {
        for (int i = 0; i < 100000; i++) __nanosleep(1000);
        __trap();
    }
    fault->parameter = (int)parameter;
    fault->block[0] = blockIdx.x, fault->block[1] = blockIdx.y, fault->block[2] = blockIdx.z;
    fault->thread[0] = threadIdx.x, fault->thread[1] = threadIdx.y, fault->thread[2] = threadIdx.z;
    fault->element = element;
    fault->bound = bound;
    __threadfence_system();
    fault->found = 1;
    __threadfence_system();
    __trap();
}

template <class T> struct checked {
    T *at, *low, *high;
    long long parameter; /* -1: of a plain pointer, whose bounds are not known */

    template <class U> __device__ checked(U *p) : at((T *)p), low(), high(), parameter(-1) {}
    __device__ checked(decltype(nullptr)) : at(), low(), high(), parameter(-1) {}
    template <class U> __device__ checked(const checked<U> &p)
        : at((T *)p.at), low((T *)p.low), high((T *)p.high), parameter(p.parameter) {}

    __device__ operator T *() const { return at; }
    __device__ T &operator*() const {
        if (parameter >= 0 && (at < low || at + 1 > high)) fail(parameter, at - low, high - low);
        return *at;
    }
    __device__ T *operator->() const { return &**this; }
    template <class I> __device__ T &operator[](I i) const { return *(*this + i); }
    template <class I> __device__ checked operator+(I i) const { return checked(*this) += i; }
    template <class I> __device__ checked operator-(I i) const { return checked(*this) -= i; }
    template <class U> __device__ long long operator-(const checked<U> &p) const {
        return at - p.at;
    }
    template <class I> __device__ friend checked operator+(I i, checked p) { return p += i; }
    template <class I> __device__ checked &operator+=(I i) { at += i; return *this; }
    template <class I> __device__ checked &operator-=(I i) { at -= i; return *this; }
    __device__ checked &operator++() { return *this += 1; }
    __device__ checked &operator--() { return *this -= 1; }
    __device__ checked operator++(int) { checked old = *this; at++; return old; }
    __device__ checked operator--(int) { checked old = *this; at--; return old; }
};

} // namespace needle
"""
HINT = (
    "compiles, but not with debug=True, which makes a class of its pointers (needle::checked<T>): "
    "where a template or asm needs a plain pointer, write &x[0] instead of x"
)
NAME = re.compile(r"needle::checked<(.*?)>(?=[,)])")  # of a parameter, in a demangled symbol
TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)"
    r"|\b\d(?:'?[\w.])*"  # a number: the ' of 1'000 begins no character
    r'|(?P<text>\b(?:u8|[uUL])?R"(?P<end>[^()\s\\]{0,16})\(.*?\)(?P=end)"'
    r'|"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])+'|[\"'])",
    re.DOTALL,
)
TEXT = re.compile(r'(\bextern\s*)?"(\d+)"')  # as `with_checks` numbers them
WORD = r"(?!(?:static|extern|return|typedef|using|constexpr|void|__shared__|__device__)\b)"
WORD += r"[A-Za-z_][\w:]*"
TYPE = rf"{WORD}(?:\s+{WORD})*(?:\s*<[^;(){{}}=]*>[\w:]*)?(?:\s+const)?"
QUALIFIERS = r"(?:(?:const|volatile|__restrict__|__restrict)\b\s*)*"
PARAMETER = re.compile(rf"(\s*)({TYPE})\s*\*\s*{QUALIFIERS}(\w*\s*(?:=.*)?)", re.DOTALL)
LOCAL = re.compile(rf"(?<=[;{{}}(])(\s*)({TYPE})\s*\*\s*{QUALIFIERS}(\w+\s*=)(?!=|[^;]*,\s*\*)")
CAST = re.compile(rf"\(\s*({TYPE})\s*\*\s*\)(?=\s*(?!const\b)[\w(&])")
REINTERPRET = re.compile(rf"\breinterpret_cast\s*<\s*({TYPE})\s*\*\s*>")


def with_checks(source: str, name: str) -> str:
    """The source with checked pointers, which messages of the compiler still call by its lines."""
    texts: list[str] = []

    def hide(match: re.Match[str]) -> str:
        """A comment as spaces; a text, which may look like code, as its number."""
        if match["text"] is None:
            return re.sub(r"[^\n]", " ", match[0]) if match["comment"] else match[0]
        texts.append(match[0])
        return f'"{len(texts) - 1}"'

    def restore(match: re.Match[str]) -> str:
        external, found = match[1] or "", texts[int(match[2])]
        # The symbols then tell the types.
        return external + ('"C++"' if external and found == '"C"' else found)

    text = TOKEN.sub(hide, source)
    done, at = [], 0
    for match in re.finditer(r"\b__global__\b", text):
        start, end = _parameters(text, match.end())
        made = (_parameter(part) for part in split_commas(text[start:end]))
        done += [text[at:start], ",".join(made)]
        at = end
    text = "".join([*done, text[at:]])
    text = CAST.sub(r"(needle::checked<\1>)", LOCAL.sub(_checked, text))
    text = REINTERPRET.sub(r"needle::checked<\1>", text)
    return f'{CLASS}#line 1 "{name}"\n{TEXT.sub(restore, text)}'


def _checked(match: re.Match[str]) -> str:
    space, element, name = match.groups()
    return (
        f"{space}auto {name}" if element == "auto" else f"{space}needle::checked<{element}> {name}"
    )


def _parameter(text: str) -> str:
    match = PARAMETER.fullmatch(text)
    return _checked(match) if match else text


def _parameters(text: str, at: int) -> tuple[int, int]:
    """Find begin and end of the parameters of the `__global__` at `at`: the first parentheses that
    are no attribute's, such as those of `__launch_bounds__(128)`."""
    while True:
        start = text.find("(", at) + 1
        if start == 0:
            return len(text), len(text)
        end, depth = start, 1
        while end < len(text) and depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        if not re.search(r"\b__\w+\s*$", text[at : start - 1]):
            return start, end - 1
        at = end
