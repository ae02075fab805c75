/* host.h - what the host's side of the Hopper kernels needs of the backend. */
#pragma once
#include <cstdarg>
#include <cstdio>

/* Three, so that a block has several work items, and another block some. */
const cuda_limits *cuda_device_limits(int) {
    static const cuda_limits limits = {3, 90, 1024, 227 << 10, 50 << 20};
    return &limits;
}
cudaStream_t cuda_stream(int) { return NULL; }
static char message[512];
nd_status nd_error(nd_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}
size_t nd_dtype_size(nd_dtype dtype) { return dtype == ND_F32 ? 4 : 2; }
nd_status cuda_error(const char *, const char *, cudaError_t) { return ND_ECUDA; }

/* Of 16 bits, row-major. */
static nd_array matrix(void *data, int64_t rows, int64_t columns, int is_half) {
    nd_array a = {};
    a.data = data;
    a.dtype = is_half ? ND_F16 : ND_BF16;
    a.ndim = 2;
    a.shape[0] = rows;
    a.shape[1] = columns;
    a.strides[0] = columns;
    a.strides[1] = 1;
    return a;
}

/* What the Python side takes: a message, or nothing. */
static const char *result(nd_status status) { return status == ND_OK ? "" : message; }
