/* hopper.cpp - the host's side of hopper.cuh: when its kernels are taken, and tensor maps. */
#include "hopper.cuh"

#include <string.h>

namespace hopper {

bool hopper_usable(int device) {
#ifdef NEEDLE_HOPPER
    return cuda_arch(device) == 90;
#else
    (void)device;
    return false;
#endif
}

/* The maps that this thread made last, in a table by a hash of the key: blocks of memory come back
 * from step to step. A key is all that a map is made of, so an equal key gives the same map, also
 * after memory was given back or the device was reset. */
struct MapKey {
    void *data;
    int64_t shape[4], strides[3];
    cuuint32_t box[4];
    CUtensorMapDataType type;
    CUtensorMapSwizzle swizzle;
};
static_assert(std::has_unique_object_representations_v<MapKey>, "compared byte by byte");
struct KnownMap {
    MapKey key;
    CUtensorMap map;
};
static KnownMap &known_map(const MapKey &key) {
    static thread_local KnownMap maps[1024] = {};
    uint64_t hash = (uint64_t)(uintptr_t)key.data * 31 + (uint64_t)key.shape[0];
    hash = (hash * 31 + (uint64_t)key.shape[1]) * 31 + key.box[1];
    return maps[hash * 0x9e3779b97f4a7c15u >> 54];
}

/* Boxes of 4 axes, fastest first. */
static nd_status encode_map(const char *op, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                            void *data, const int64_t (&shape)[4], const int64_t (&strides)[3],
                            const cuuint32_t (&box)[4], CUtensorMap *out) {
    MapKey key = {data, {}, {}, {}, type, swizzle};
    memcpy(key.shape, shape, sizeof shape);
    memcpy(key.strides, strides, sizeof strides);
    memcpy(key.box, box, sizeof box);
    KnownMap &known = known_map(key);
    if (memcmp(&known.key, &key, sizeof key) == 0) {
        *out = known.map;
        return ND_OK;
    }
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
    known = {key, *out};
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
