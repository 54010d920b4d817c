// Rotary position embedding: pairs (a, b) of a head's dims turn by the angle of the token's position, and its gradient.
//
//   turn    y_a = a cos - b sin        y_b = b cos + a sin
//           sin times `sign`: +1, or -1 for the turn back, which is the gradient
//
// Halves: dim i is paired with dim i + n_turned / 2. Interleaved: dim 2i with dim 2i + 1. Dims behind the turned ones are copied.
//
// Bytes: x is read and y written once, of two tensors in one launch. A thread reads its cosines and sines once for kHeads heads; the
// blocks are ordered so that those that read the same rows of the tables run together, and find them in L1 and L2.
//
// The host guarantees: strides reach no element outside the tensors; y is x, element for element, or they share no memory, and
// the two tensors share none; kVec divides n_turned (its half, for halves) and the dims that are copied; with kVec > 1 each vector is
// contiguous and begins at a multiple of its size. What it can't know is checked here: a position outside the tables gives NaN.
//
// Template: T element type of x and y; C of the tables; kVec elements a vector of x; kTables: the tables are read in vectors too;
// kHeads heads a thread. Launch: blocks of kThreads, grid.x of them for the threads of chunk_tiles tiles of tokens and chunk_batch
// entries of the batch, less than 2^31; grid.y and grid.z count the chunks.
#include "tk/tk.cuh"

namespace rotary {

inline constexpr int kThreads = 128;

// One tensor and its result.
template <class T>
struct Side {
    const T* x;         // (n_batch, n_heads, n_tokens, n_vecs)
    T* y;               // the same
    int64_t x_stride[4];  // elements; the last between vectors, kVec if that is more than 1
    int64_t y_stride[4];
    int64_t n_heads;
    int64_t n_groups;  // of kHeads heads
};

// One table.
template <class C>
struct Table {
    const C* p;         // (n_batch, n_rows, n_turned / 2)
    int64_t stride[3];  // elements
};

// n / d for n < 2^31 and a d that the host knows: n * by >> shift.
struct Divider {
    int64_t by, shift;

    TK_DEVICE uint32_t operator()(uint32_t n) const { return uint32_t(uint64_t(n) * uint32_t(by) >> int(shift)); }
};

// A list of positions or their like: int64_t, or int32_t.
struct Integers {
    const void* p;
    int64_t stride[2];
    int64_t wide;

    TK_DEVICE int64_t at(int64_t i, int64_t j) const
    {
        const int64_t o = i * stride[0] + j * stride[1];
        return wide ? static_cast<const int64_t*>(p)[o] : int64_t(static_cast<const int32_t*>(p)[o]);
    }
};

template <class T, class C>
struct Arguments {
    Side<T> side[2];
    Table<C> cos, sin;
    Integers ids;      // (n_batch, n_tokens); or null: positions count from 0, or from
    Integers offsets;  // (n_batch or n_sequences, 1); or null
    Integers starts;   // (n_sequences + 1, 1): where packed sequences begin, and their end; or null
    int64_t n_rows, n_sequences, n_batch, n_tokens;
    int64_t tile;           // 2^tile tokens lie side by side in a block
    int64_t n_tiles;        // of tokens
    int64_t chunk_tiles, chunk_batch;
    int64_t n_turned_vecs;  // vectors of a head that turn
    int64_t n_vecs;         // vectors of a head
    int64_t n_turning, n_copying;  // threads of a head's vectors, two vectors each
    Divider columns, groups, tiles;  // by the threads of a token, the groups of heads, chunk_tiles
    double sign;
};

// The turn, rounded in one way whatever the kernel: which product is fused is not the compiler's choice.
template <class Acc>
TK_DEVICE void turn_pair(Acc a, Acc b, Acc cos, Acc sin, Acc& y_a, Acc& y_b)
{
    y_a = tk::fma(a, cos, -(b * sin));
    y_b = tk::fma(b, cos, a * sin);
}

// Which row of the tables a token has. turns: false where it is in no sequence; then it has none.
template <class A>
TK_DEVICE int64_t position(const A& a, int64_t batch, int64_t token, bool& turns)
{
    if (a.ids.p) {
        return a.ids.at(batch, token);
    }
    int64_t sequence = batch, first = 0;
    if (a.starts.p) {
        int64_t low = 0, high = a.n_sequences + 1;  // how many starts are not behind the token
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (a.starts.at(middle, 0) <= token) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        if (low < 1 || low > a.n_sequences) {
            turns = false;
            return 0;
        }
        sequence = low - 1;
        first = a.starts.at(sequence, 0);
    }
    // Unsigned, as an offset may be anything.
    const uint64_t offset = a.offsets.p ? uint64_t(a.offsets.at(sequence, 0)) : 0;
    return int64_t(uint64_t(token - first) + offset);
}

// kN entries of a table's row into v, from place `at` on.
template <int kN, bool kTables, int kAll, class C, class Acc>
TK_DEVICE void read(const Table<C>& table, int64_t batch, int64_t row, int64_t column, Acc (&v)[kAll], int at)
{
    const C* p = table.p + batch * table.stride[0] + row * table.stride[1];
    if constexpr (kTables) {
        typename tk::Vec<C, kN>::Acc entries[kN];
        tk::Vec<C, kN>{tk::load_global<kN * int(sizeof(C))>(p + column)}.unpack(entries);
#pragma unroll
        for (int i = 0; i < kN; ++i) {
            v[at + i] = Acc(entries[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kN; ++i) {
            v[at + i] = Acc(tk::to_acc(p[(column + i) * table.stride[2]]));
        }
    }
}

// A thread's two vectors are column and column + n_turning of those that turn, so that neighbours read what lies side by side.
template <class T, class C, bool kInterleaved, int kVec, bool kTables, int kHeads>
__global__ void __launch_bounds__(kThreads, kHeads > 4 ? 3 : 6) turn(const __grid_constant__ Arguments<T, C> a)
{
    using Acc = tk::accumulator_t<T>;
    using Vec = tk::Vec<T, kVec>;
    static_assert(kVec > 1 || !kTables);

    // Fastest first: vectors of a token, tokens of a tile, groups of heads, tiles, batch.
    const uint32_t i = blockIdx.x * kThreads + threadIdx.x, in_tile = a.columns(i), of_group = in_tile >> int(a.tile);
    const uint32_t of_tile = a.groups(of_group), entry = a.tiles(of_tile);
    const int column = int(i - in_tile * uint32_t(a.n_turning + a.n_copying));
    const int group = int(of_group - of_tile * uint32_t(a.side[0].n_groups + a.side[1].n_groups));
    const int64_t tile = blockIdx.y * a.chunk_tiles + (of_tile - entry * uint32_t(a.chunk_tiles));
    const int64_t token = (tile << a.tile) + (in_tile & ((1u << a.tile) - 1));
    const int64_t batch = blockIdx.z * a.chunk_batch + entry;
    if (token >= a.n_tokens || batch >= a.n_batch || entry >= a.chunk_batch) {
        return;
    }

    bool turns = column < int(a.n_turning);
    int first = turns ? column : int(a.n_turned_vecs) + column - int(a.n_turning);
    int second = first + int(turns ? a.n_turning : a.n_copying);
    const bool both = second < int(turns ? a.n_turned_vecs : a.n_vecs);
    if (kInterleaved && kVec == 1 && turns) {
        first = 2 * column;
        second = first + 1;
    }

    const int which = group >= int(a.side[0].n_groups);
    const Side<T>& side = a.side[which];
    const int64_t head = int64_t(group - (which ? int(a.side[0].n_groups) : 0)) * kHeads;
    const int heads = int(tk::min<int64_t>(side.n_heads - head, kHeads));  // of this thread
    const int64_t x_step = kVec > 1 ? kVec : side.x_stride[3], y_step = kVec > 1 ? kVec : side.y_stride[3];
    const T* x = side.x + batch * side.x_stride[0] + head * side.x_stride[1] + token * side.x_stride[2] + first * x_step;
    T* y = side.y + batch * side.y_stride[0] + head * side.y_stride[1] + token * side.y_stride[2] + first * y_step;

    // The loads of x first: what follows takes as long as they do.
    Vec v[kHeads][2];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        if (h < heads) {
            const T* p = x + h * side.x_stride[1];
            v[h][0].raw = tk::load_global<Vec::kBytes>(p);
            if (both) {
                v[h][1].raw = tk::load_global<Vec::kBytes>(p + (second - first) * x_step);
            }
        }
    }

    Acc c[kVec], s[kVec];
    if (turns) {
        const int64_t row = position(a, batch, token, turns);
        if (row < 0 || row >= a.n_rows) {
#pragma unroll
            for (int k = 0; k < kVec; ++k) {
                c[k] = s[k] = tk::limits<Acc>::inf() - tk::limits<Acc>::inf();
            }
        } else if constexpr (kInterleaved && kVec > 1) {
            constexpr int kHalf = kVec / 2;
            read<kHalf, kTables>(a.cos, batch, row, first * kHalf, c, 0);
            read<kHalf, kTables>(a.sin, batch, row, first * kHalf, s, 0);
            if (both) {
                read<kHalf, kTables>(a.cos, batch, row, second * kHalf, c, kHalf);
                read<kHalf, kTables>(a.sin, batch, row, second * kHalf, s, kHalf);
            }
        } else {
            read<kVec, kTables>(a.cos, batch, row, column * kVec, c, 0);
            read<kVec, kTables>(a.sin, batch, row, column * kVec, s, 0);
        }
#pragma unroll
        for (int k = 0; k < kVec; ++k) {
            s[k] *= Acc(a.sign);
        }
    }

#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        if (h < heads) {
            if (turns) {
                Acc p[2][kVec], q[2][kVec];
                v[h][0].unpack(p[0]);
                v[h][1].unpack(p[1]);
#pragma unroll
                for (int k = 0; k < kVec; ++k) {
                    if constexpr (kInterleaved && kVec > 1) {
                        constexpr int kHalf = kVec / 2;
                        const int from = k / kHalf, at = k % kHalf * 2;
                        turn_pair(p[from][at], p[from][at + 1], c[k], s[k], q[from][at], q[from][at + 1]);
                    } else {
                        turn_pair(p[0][k], p[1][k], c[k], s[k], q[0][k], q[1][k]);
                    }
                }
                v[h][0] = Vec::pack(q[0]);
                v[h][1] = Vec::pack(q[1]);
            }
            T* to = y + h * side.y_stride[1];
            tk::store_global<Vec::kBytes>(to, v[h][0].raw);
            if (both) {
                tk::store_global<Vec::kBytes>(to + (second - first) * y_step, v[h][1].raw);
            }
        }
    }
}

}  // namespace rotary
