/* tensor_map.cuh - a tensor map as the emulator writes it: what stands in the
 * 128 bytes that the driver fills in its own way.
 *
 * Plain C, included by both: csrc/tensor_map.c, which checks and writes it, and
 * tk/emu/tensor.cuh, which copies by it. */
#ifndef TKEMU_TENSOR_MAP_H
#define TKEMU_TENSOR_MAP_H

enum { TKEMU_MAP_RANKS = 5 };

#define TKEMU_MAP_MAGIC 0x70616d2075656b74ull /* "tkeu map" */

/* What the numbers of a map are; the values are CUtensorMapDataType's. */
enum {
    TKEMU_MAP_U8 = 0,
    TKEMU_MAP_U16 = 1,
    TKEMU_MAP_U32 = 2,
    TKEMU_MAP_S32 = 3,
    TKEMU_MAP_U64 = 4,
    TKEMU_MAP_S64 = 5,
    TKEMU_MAP_F16 = 6,
    TKEMU_MAP_F32 = 7,
    TKEMU_MAP_F64 = 8,
    TKEMU_MAP_BF16 = 9,
};

/* Dimension 0 is the innermost, whose elements lie side by side. */
typedef struct {
    unsigned long long magic;
    unsigned long long address;
    unsigned long long dims[TKEMU_MAP_RANKS];
    unsigned long long strides[TKEMU_MAP_RANKS - 1]; /* bytes; of dims 1.. */
    unsigned short box[TKEMU_MAP_RANKS];
    unsigned char element_strides[TKEMU_MAP_RANKS];
    unsigned char rank, type, itemsize;
    unsigned char swizzle; /* bytes: 0, 32, 64, 128 */
    unsigned char nan;     /* what lies outside reads as NaN, not 0 */
} tkemu_tensor_map;

#endif
