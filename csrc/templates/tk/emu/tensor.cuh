// The copy engine. A copy is made when it is issued, and counts as made when it is waited for: who touches its bytes in between
// is reported.
#pragma once
#include "tk/emu/tensor_map.cuh"

namespace tk {

static_assert(sizeof(tkemu_tensor_map) <= sizeof(TensorMap), "the host writes the one into the other");

namespace engine {

TK_DEVICE tkemu_tensor_map read_map(const TensorMap& map, int dims)
{
    tkemu_tensor_map m;
    require_arch(900);
    tkemu::machine->aligned(&map, 64);
    tkemu::machine->copy(&m, &map, sizeof m);
    if (m.magic != TKEMU_MAP_MAGIC) {
        tkemu::machine->fault("a tensor map is used that the host did not make");
    }
    if (m.rank != dims) {
        tkemu::machine->fault("a tensor map's number of dimensions is not the copy's");
    }
    return m;
}

// A place of this block's shared memory that the engine can work on; the block's own peer is the place itself.
TK_DEVICE unsigned char* place_of(const void* p, unsigned alignment)
{
    tkemu::machine->aligned(p, alignment);
    return static_cast<unsigned char*>(tkemu::machine->peer(p, tkemu::self->cluster_rank));
}

// Where the engine puts the bytes of an unswizzled place.
TK_DEVICE unsigned char* swizzled(unsigned char* p, unsigned span)
{
    const uintptr_t at = reinterpret_cast<unsigned long>(p), rows = span / 16 - 1;
    return p + long((at ^ ((at >> 7 & rows) << 4)) - at);
}

// One row of a box: elements [low, high) of it lie in the tensor, at `global`, which is element `low`.
struct BoxRow {
    uint64_t global;
    unsigned low, high;
};

enum { kRowBytes = 256 * 8, kMostShared = 256 << 10 };  // of a row of a box, and of any block's memory, at most

// A box of a tensor, row by row.
struct Box {
    tkemu_tensor_map m;
    int64_t at[TKEMU_MAP_RANKS];
    unsigned counts[TKEMU_MAP_RANKS];  // elements that are moved
    unsigned rows, row_bytes;

    TK_DEVICE unsigned bytes() const { return rows * row_bytes; }

    TK_DEVICE BoxRow row(unsigned number) const
    {
        BoxRow r = {m.address, 0, 0};
        bool inside = true;
        for (int i = 1; i < m.rank; ++i) {
            const int64_t x = at[i] + int64_t(number % counts[i]) * m.element_strides[i];
            number /= counts[i];
            inside = inside && x >= 0 && uint64_t(x) < m.dims[i];
            r.global += uint64_t(x) * m.strides[i - 1];
        }
        const int64_t end = int64_t(m.dims[0]) - at[0];
        if (inside && end > 0 && at[0] + int64_t(counts[0]) > 0) {
            r.low = at[0] < 0 ? unsigned(-at[0]) : 0;
            r.high = end < int64_t(counts[0]) ? unsigned(end) : counts[0];
        }
        r.global += uint64_t(at[0] + r.low) * m.itemsize;
        return r;
    }
};

template <int kDims>
TK_DEVICE Box box_of(const TensorMap& map, const int (&at)[kDims])
{
    Box b;
    b.m = read_map(map, kDims);
    uint64_t rows = 1;
    for (int i = 0; i < kDims; ++i) {
        const unsigned e = i == 0 ? 1 : b.m.element_strides[i];
        b.at[i] = at[i];
        b.counts[i] = (b.m.box[i] + e - 1) / e;
        rows *= i == 0 ? 1 : b.counts[i];
    }
    b.row_bytes = b.counts[0] * b.m.itemsize;
    b.rows = unsigned(rows);
    if (rows > kMostShared / b.row_bytes) {
        tkemu::machine->fault("the box of a tensor map is larger than shared memory");
    }
    if (b.at[0] * b.m.itemsize % 16 != 0) {
        tkemu::machine->fault("the innermost coordinate of a box is not a multiple of 16 bytes");
    }
    if (b.m.swizzle != 0 && b.row_bytes != b.m.swizzle) {
        tkemu::machine->fault("the emulator swizzles boxes whose rows are as wide as the swizzle's span, no narrower ones");
    }
    return b;
}

// Bytes [low, high) of a row between shared memory, where the row begins at `shared`, and `row`, which is the whole row.
template <bool kToShared>
TK_DEVICE void move_row(int op, unsigned char* shared, unsigned char* row, unsigned low, unsigned high, unsigned span)
{
    for (unsigned begin = low; begin < high;) {
        const unsigned chunk = span == 0 ? high : (begin / 16 + 1) * 16, end = chunk < high ? chunk : high;
        unsigned char* place = span == 0 ? shared + begin : swizzled(shared + begin, span);
        tkemu::machine->async_access(op, place, end - begin, kToShared ? TKEMU_WRITE : TKEMU_READ);
        if constexpr (kToShared) {
            tkemu::machine->copy(place, row + begin, end - begin);
        } else {
            tkemu::machine->copy(row + begin, place, end - begin);
        }
        begin = end;
    }
}

// Zeros, or NaNs with all bits of the mantissa set: of which only NaN itself is promised.
TK_DEVICE void fill_row(unsigned char* row, const Box& b)
{
    for (unsigned i = 0; i < b.row_bytes; ++i) {
        row[i] = !b.m.nan ? 0 : i % b.m.itemsize == b.m.itemsize - 1u ? 0x7f : 0xff;
    }
}

TK_DEVICE void load_box(int op, unsigned char* to, const Box& b)
{
    unsigned char row[kRowBytes];
    for (unsigned i = 0; i < b.rows; ++i) {
        const BoxRow r = b.row(i);
        const unsigned low = r.low * b.m.itemsize, bytes = (r.high - r.low) * b.m.itemsize;
        if (bytes < b.row_bytes) {
            fill_row(row, b);
        }
        if (bytes > 0) {
            const void* global = reinterpret_cast<const void*>(r.global);
            tkemu::machine->async_access(op, global, bytes, TKEMU_READ);
            tkemu::machine->copy(row + low, global, bytes);
        }
        move_row<true>(op, to + i * b.row_bytes, row, 0, b.row_bytes, b.m.swizzle);
    }
}

// put(op, to, from, bytes) for what each row has inside the tensor. Of shared memory only that is read.
template <class Put>
TK_DEVICE void drain_box(const unsigned char* from, const Box& b, Put put)
{
    unsigned char row[kRowBytes];
    for (int i = 0; i < b.m.rank; ++i) {
        if (b.at[i] < 0) {
            tkemu::machine->fault("a coordinate of a stored box is negative");
        }
    }
    const int op = tkemu::machine->async_begin(TKEMU_BULK);
    for (unsigned i = 0; i < b.rows; ++i) {
        const BoxRow r = b.row(i);
        const unsigned low = r.low * b.m.itemsize, bytes = (r.high - r.low) * b.m.itemsize;
        if (bytes % 16 != 0) {
            tkemu::machine->fault("the part of a stored row that lies in the tensor is not whole pieces of 16 bytes");
        }
        if (bytes > 0) {
            unsigned char* place = const_cast<unsigned char*>(from) + i * b.row_bytes;
            move_row<false>(op, place, row, low, low + bytes, b.m.swizzle);
            put(op, reinterpret_cast<void*>(r.global), row + low, bytes);
        }
    }
}

// The sum of two elements as the engine forms it: unlike atomics on global memory it keeps float32 under 2^-126.
TK_DEVICE float add(float a, float b) { return a + b; }
TK_DEVICE f16 add(f16 a, f16 b) { return from_acc<f16>(to_acc(a) + to_acc(b)); }
TK_DEVICE bf16 add(bf16 a, bf16 b) { return from_acc<bf16>(to_acc(a) + to_acc(b)); }
TK_DEVICE int32_t add(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }
TK_DEVICE uint32_t add(uint32_t a, uint32_t b) { return a + b; }
TK_DEVICE uint64_t add(uint64_t a, uint64_t b) { return a + b; }

template <class T>
TK_DEVICE void add_row(int op, void* to, const unsigned char* from, unsigned bytes)
{
    T* p = static_cast<T*>(to);
    tkemu::machine->async_access(op, to, bytes, TKEMU_WRITE | TKEMU_ATOMIC);
    for (unsigned i = 0; i < bytes / sizeof(T); ++i) {
        T old, more;
        tkemu::machine->copy(&old, p + i, sizeof old);
        tkemu::machine->copy(&more, from + i * sizeof(T), sizeof more);
        const T sum = add(old, more);
        tkemu::machine->copy(p + i, &sum, sizeof sum);
    }
}

TK_DEVICE void add_row(int type, int op, void* to, const unsigned char* from, unsigned bytes)
{
    switch (type) {
    case TKEMU_MAP_F32: return add_row<float>(op, to, from, bytes);
    case TKEMU_MAP_F16: return add_row<f16>(op, to, from, bytes);
    case TKEMU_MAP_BF16: return add_row<bf16>(op, to, from, bytes);
    case TKEMU_MAP_S32: return add_row<int32_t>(op, to, from, bytes);
    case TKEMU_MAP_U32: return add_row<uint32_t>(op, to, from, bytes);
    case TKEMU_MAP_U64: return add_row<uint64_t>(op, to, from, bytes);
    default: tkemu::machine->fault("the engine adds float32, float16, bfloat16, int32, uint32 and uint64");
    }
}

TK_DEVICE const unsigned char* bulk_source(const void* to, const void* from, int bytes)
{
    require_arch(900);
    if (bytes <= 0 || bytes % 16 != 0) {
        tkemu::machine->fault("a bulk copy moves a positive multiple of 16 bytes");
    }
    tkemu::machine->aligned(to, 16);
    return place_of(from, 16);
}

}  // namespace engine

TK_DEVICE void prefetch(const TensorMap& map)
{
    if (__CUDA_ARCH__ >= 900) {
        tkemu_tensor_map m;
        tkemu::machine->copy(&m, &map, sizeof m);
        engine::read_map(map, m.rank);
    }
}

template <int kDims, L2Hint kHint>
TK_DEVICE void tensor_load(void* to, const TensorMap& map, const int (&at)[kDims], Barrier& full)
{
    const engine::Box b = engine::box_of(map, at);
    unsigned char* place = engine::place_of(to, 128);
    const int op = tkemu::machine->async_begin(-1);
    engine::load_box(op, place, b);
    tkemu::machine->async_complete(op, &full, long(b.bytes()));
}

template <int kDims, L2Hint kHint>
TK_DEVICE void tensor_load_multicast(void* to, const TensorMap& map, const int (&at)[kDims], Barrier& full,
                                     uint32_t blocks)
{
    const engine::Box b = engine::box_of(map, at);
    unsigned char* place = engine::place_of(to, 128);
    if (blocks == 0 || blocks >> 16 != 0) {
        tkemu::machine->fault("a multicast is to some of the cluster's blocks 0 to 15");
    }
    const int op = tkemu::machine->async_begin(-1);
    for (int rank = 0; rank < 16; ++rank) {
        if (blocks >> rank & 1) {
            engine::load_box(op, static_cast<unsigned char*>(tkemu::machine->peer(place, rank)), b);
            tkemu::machine->async_complete(op, tkemu::machine->peer(&full, rank), long(b.bytes()));
        }
    }
}

template <int kDims>
TK_DEVICE void tensor_store(const TensorMap& map, const int (&at)[kDims], const void* from)
{
    const engine::Box b = engine::box_of(map, at);
    engine::drain_box(engine::place_of(from, 128), b, [](int op, void* to, const unsigned char* row, unsigned bytes) {
        tkemu::machine->async_access(op, to, bytes, TKEMU_WRITE);
        tkemu::machine->copy(to, row, bytes);
    });
}

template <int kDims>
TK_DEVICE void tensor_reduce_add(const TensorMap& map, const int (&at)[kDims], const void* from)
{
    const engine::Box b = engine::box_of(map, at);
    engine::drain_box(engine::place_of(from, 128), b, [&](int op, void* to, const unsigned char* row, unsigned bytes) {
        engine::add_row(b.m.type, op, to, row, bytes);
    });
}

TK_DEVICE void bulk_store(void* to, const void* from, int bytes)
{
    const unsigned char* place = engine::bulk_source(to, from, bytes);
    const int op = tkemu::machine->async_begin(TKEMU_BULK);
    tkemu::machine->async_access(op, place, unsigned(bytes), TKEMU_READ);
    tkemu::machine->async_access(op, to, unsigned(bytes), TKEMU_WRITE);
    tkemu::machine->copy(to, place, unsigned(bytes));
}

template <class T>
TK_DEVICE void bulk_reduce_add(T* to, const void* from, int bytes)
{
    const unsigned char* place = engine::bulk_source(to, from, bytes);
    const int op = tkemu::machine->async_begin(TKEMU_BULK);
    tkemu::machine->async_access(op, place, unsigned(bytes), TKEMU_READ);
    engine::add_row<T>(op, to, place, unsigned(bytes));
}

TK_DEVICE void bulk_commit()
{
    require_arch(900);
    tkemu::machine->async_commit(TKEMU_BULK);
}
template <int kPending>
TK_DEVICE void bulk_wait()
{
    require_arch(900);
    tkemu::machine->async_wait(TKEMU_BULK, kPending);
}
// Who then reads what was stored, without bulk_wait, is too early and isn't found out: nobody keeps the writers of global memory.
template <int kPending>
TK_DEVICE void bulk_wait_read() { bulk_wait<kPending>(); }

// The sum of two elements as an atomic on global memory forms it.
template <class T>
TK_DEVICE T atomic_sum(T a, T b)
{
    if constexpr (is_same<T, float>::value) {
        return flushed(flushed(a) + flushed(b));
    } else {
        return engine::add(a, b);
    }
}

template <class T, int kBytes>
TK_DEVICE void reduce_add(T* p, const Words<kBytes>& v)
{
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
    if constexpr (is_same<T, bf16>::value) {
        require_arch(900);
    }
    tkemu::machine->aligned(p, kBytes);
    for (int i = 0; i < kBytes / int(sizeof(T)); ++i) {
        T more;
        tkemu::machine->copy(&more, reinterpret_cast<const T*>(v.w) + i, sizeof more);
        tkemu_atomic(p + i, [&](T old) { return atomic_sum(old, more); });
    }
}

TK_DEVICE float fetch_add(float* p, float v)
{
    return tkemu_atomic(p, [&](float old) { return atomic_sum(old, v); });
}

TK_DEVICE bool elect_one()
{
    const unsigned char mine = 0;
    tkemu::machine->exchange(TKEMU_ELECT, 0xffffffffu, &mine, sizeof mine);
    return lane() == 0;
}

TK_DEVICE void wait_previous_grids() {}
TK_DEVICE void launch_next_grid() {}

}  // namespace tk
