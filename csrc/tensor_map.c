/* tensor_map.c - tensor maps for kernels on the CPU.
 *
 * Refuses what cuTensorMapEncodeTiled refuses, so that a map that works in the
 * emulator works on a GPU, and says which rule is broken, which the driver does
 * not.  The rules are those of that function's description in cuda.h of CUDA
 * 13.0; each stands above its check, in cuda.h's words.  Knows nothing of
 * Python, and calls nothing but tk_fail.
 */
#include "tkjit.h"

#include "templates/tk/emu/tensor_map.cuh"

#include <string.h>

_Static_assert(sizeof(tkemu_tensor_map) <= sizeof(CUtensorMap),
               "the emulator's tensor map fits into the driver's");
_Static_assert((int)TKEMU_MAP_S64 == CU_TENSOR_MAP_DATA_TYPE_INT64 &&
                   (int)TKEMU_MAP_BF16 == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
               "types have the driver's numbers");

#define REFUSE(...)                                                            \
    tk_fail(err, TK_LAUNCH, "a tensor map is refused: " __VA_ARGS__)

/* Bytes of an element; 0 for types that the emulator has no arithmetic of. */
static unsigned
itemsize_of(CUtensorMapDataType type)
{
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
        return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
        return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
        return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
        return 8;
    default:
        return 0;
    }
}

static bool
is_float(CUtensorMapDataType type)
{
    return type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 ||
           type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ||
           type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ||
           type == CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
}

static unsigned
swizzle_bytes(CUtensorMapSwizzle swizzle)
{
    return swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16u << (unsigned)swizzle;
}

static int
check_tensor(const tk_tensor_map *map, const void *address, tk_error *err)
{
    /* "tensorRank must be non-zero and less than or equal to the maximum
     * supported dimensionality of 5" */
    if (map->rank < 1 || map->rank > TKEMU_MAP_RANKS) {
        return REFUSE("it has %u dimensions; 1 to 5 are possible", map->rank);
    }
    /* "globalAddress ... must be 16 byte aligned" */
    if ((uintptr_t)address % 16 != 0) {
        return REFUSE("its address is not aligned to 16 bytes: it ends in 0x%x",
                      (unsigned)((uintptr_t)address % 256));
    }
    /* "globalDim ... must be non-zero and less than or equal to 2^32" */
    for (unsigned i = 0; i < map->rank; i++) {
        if (map->dims[i] < 1 || map->dims[i] > 1ull << 32) {
            return REFUSE("its dimension %u is of %llu elements; 1 to 2^32 are "
                          "possible",
                          i, (unsigned long long)map->dims[i]);
        }
    }
    /* "globalStrides ... must be a multiple of 16 and less than 2^40".  What
     * follows there, a stride at least as large as the dimensions below, is how
     * a tensor usually lies and no rule: Triton's ragged_tma.py gives the
     * driver strides that overlap and wrap around. */
    for (unsigned i = 0; i + 1 < map->rank; i++) {
        if (map->strides[i] % 16 != 0 || map->strides[i] >= 1ull << 40) {
            return REFUSE("the stride of its dimension %u is %llu bytes; "
                          "multiples of 16 below 2^40 are possible",
                          i + 1, (unsigned long long)map->strides[i]);
        }
    }
    return 0;
}

static int
check_box(const tk_tensor_map *map, unsigned itemsize, tk_error *err)
{
    unsigned long long bytes = itemsize;

    for (unsigned i = 0; i < map->rank; i++) {
        /* "boxDim ... must be non-zero and less than or equal to 256" */
        if (map->box[i] < 1 || map->box[i] > 256) {
            return REFUSE("its box has %u elements in dimension %u; 1 to 256 "
                          "are possible",
                          map->box[i], i);
        }
        /* "elementStrides ... must be non-zero and less than or equal to 8";
         * the first of them is checked, and then ignored. */
        if (map->element_strides[i] < 1 || map->element_strides[i] > 8) {
            return REFUSE("its element stride in dimension %u is %u; 1 to 8 "
                          "are possible",
                          i, map->element_strides[i]);
        }
        unsigned step = i > 0 ? map->element_strides[i] : 1;
        bytes *= (map->box[i] + step - 1) / step;
    }
    /* In no description, but the driver's (580.159, NVIDIA H200): what is
     * loaded may be 228 KB, a multiprocessor's shared memory. */
    if (bytes > 228 * 1024) {
        return REFUSE("its box is of %llu bytes; 233472 are possible", bytes);
    }
    /* "{ boxDim[0] * elementSizeInBytes( tensorDataType ) } must be a multiple
     * of 16 bytes" (no interleave) */
    unsigned row = map->box[0] * itemsize;
    if (row % 16 != 0) {
        return REFUSE("a row of its box is of %u bytes, no multiple of 16",
                      row);
    }
    /* "the bounding box inner dimension ... must be less than or equal to the
     * swizzle size" (no interleave) */
    unsigned span = swizzle_bytes(map->swizzle);
    if (span > 0 && row > span) {
        return REFUSE("a row of its box is of %u bytes, more than the %u that "
                      "are swizzled",
                      row, span);
    }
    return 0;
}

static int
check_modes(const tk_tensor_map *map, tk_error *err)
{
    if ((unsigned)map->swizzle > CU_TENSOR_MAP_SWIZZLE_128B) {
        return REFUSE("swizzle %d is not one of none, 32, 64 and 128 bytes",
                      (int)map->swizzle);
    }
    if ((unsigned)map->l2_promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
        return REFUSE("L2 promotion %d is not one of none, 64, 128 and 256 "
                      "bytes",
                      (int)map->l2_promotion);
    }
    /* "CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA can only be used when
     * tensorDataType represents a floating-point data type" */
    if ((unsigned)map->fill >
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA ||
        (map->fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE &&
         !is_float(map->type))) {
        return REFUSE("fill %d with elements of type %d; NaN is for floats, 0 "
                      "for all",
                      (int)map->fill, (int)map->type);
    }
    return 0;
}

int
tkemu_encode(const tk_tensor_map *map, void *address, CUtensorMap *out,
             tk_error *err)
{
    tkemu_tensor_map record;
    unsigned itemsize = itemsize_of(map->type);

    if (itemsize == 0) {
        return REFUSE("the emulator has no elements of type %d",
                      (int)map->type);
    }
    if (check_tensor(map, address, err) < 0 || check_modes(map, err) < 0 ||
        check_box(map, itemsize, err) < 0) {
        return -1;
    }
    memset(&record, 0, sizeof record);
    record.magic = TKEMU_MAP_MAGIC;
    record.address = (uintptr_t)address;
    for (unsigned i = 0; i < map->rank; i++) {
        record.dims[i] = map->dims[i];
        record.box[i] = (unsigned short)map->box[i];
        record.element_strides[i] = (unsigned char)map->element_strides[i];
        if (i > 0) {
            record.strides[i - 1] = map->strides[i - 1];
        }
    }
    record.rank = (unsigned char)map->rank;
    record.type = (unsigned char)map->type;
    record.itemsize = (unsigned char)itemsize;
    record.swizzle = (unsigned char)swizzle_bytes(map->swizzle);
    record.nan = map->fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    memset(out, 0, sizeof *out);
    memcpy(out, &record, sizeof record);
    return 0;
}
