/* hopper.cpp - the host's side of hopper.cuh: when its kernels are taken, and tensor maps. */
#include "hopper.cuh"

namespace hopper {

bool hopper_usable(int device) {
#ifdef NEEDLE_HOPPER
    return cuda_arch(device) == 90;
#else
    (void)device;
    return false;
#endif
}

/* Boxes of 4 axes, fastest first. */
static nd_status encode_map(const char *op, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                            void *data, const int64_t (&shape)[4], const int64_t (&strides)[3],
                            const cuuint32_t (&box)[4], CUtensorMap *out) {
    /* A function of the driver, found by the runtime: needle is not linked with libcuda. */
    static const auto encode = []() -> decltype(&cuTensorMapEncodeTiled) {
        void *found = NULL;
        cudaDriverEntryPointQueryResult how;
        cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                             12000, cudaEnableDefault, &how);
        return error == cudaSuccess && how == cudaDriverEntryPointSuccess
                   ? (decltype(&cuTensorMapEncodeTiled))found
                   : NULL;
    }();
    if (encode == NULL) {
        return nd_error(ND_ECUDA,
                        "%s: this driver has no cuTensorMapEncodeTiled; install one of CUDA 12.0 "
                        "or newer, or set NEEDLE_ARCH=80",
                        op);
    }
    cuuint64_t dims[4], steps[3];
    for (int axis = 0; axis < 4; axis++) {
        dims[axis] = (cuuint64_t)shape[axis];
    }
    for (int axis = 0; axis < 3;
         axis++) { /* that of an axis of 1 is never used, but must be valid */
        steps[axis] = shape[axis + 1] == 1 ? 16 : (cuuint64_t)strides[axis];
    }
    const cuuint32_t ones[4] = {1, 1, 1, 1};
    CUresult result =
        encode(out, type, 4, data, dims, steps, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        return nd_error(ND_ECUDA,
                        "%s: cuTensorMapEncodeTiled refuses (%lld, %lld, %lld, %lld): error %d", op,
                        (long long)shape[0], (long long)shape[1], (long long)shape[2],
                        (long long)shape[3], (int)result);
    }
    return ND_OK;
}

nd_status tensor_map(const char *op, void *data, nd_dtype dtype, const int64_t (&shape)[4],
                     const int64_t (&strides)[3], int box0, int box1, CUtensorMap *out) {
    const cuuint32_t box[4] = {(cuuint32_t)box0, (cuuint32_t)box1, 1, 1};
    const CUtensorMapDataType type =
        dtype == ND_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return encode_map(op, type, CU_TENSOR_MAP_SWIZZLE_128B, data, shape, strides, box, out);
}

nd_status byte_map(const char *op, void *data, const int64_t (&shape)[4],
                   const int64_t (&strides)[3], const int (&box)[4], int swizzle,
                   CUtensorMap *out) {
    const cuuint32_t sizes[4] = {(cuuint32_t)box[0], (cuuint32_t)box[1], (cuuint32_t)box[2],
                                 (cuuint32_t)box[3]};
    const CUtensorMapSwizzle known = swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                     : CU_TENSOR_MAP_SWIZZLE_32B;
    return encode_map(op, CU_TENSOR_MAP_DATA_TYPE_UINT8, known, data, shape, strides, sizes, out);
}

} // namespace hopper
