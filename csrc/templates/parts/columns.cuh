// The column reduction: reduce a dim that has a contiguous dim inside it, (outer, dim, inner), without turning it round.
//
// A block, or a cluster of kCluster blocks, takes a tile: kAcross vectors of kVec columns (elements of the inner dim) times
// the whole reduced dim, kDown threads to a column, kRows vectors a thread, in registers. With kPrefetch the next tile is on its way to shared memory
// while this one is reduced and written: each thread copies what it will itself read, so there is no barrier for it.
#pragma once
#include "parts/row.cuh"

namespace columns {

template <class T_, int kStreams_, int kVec_, int kAcross_, int kDown_, int kRows_, int kCluster_, bool kPrefetch_>
struct Geometry {
    using T = T_;
    using Acc = tk::accumulator_t<T>;
    static constexpr int kStreams = kStreams_, kVec = kVec_, kAcross = kAcross_, kDown = kDown_, kRows = kRows_;
    static constexpr int kCluster = kCluster_;
    static constexpr bool kPrefetch = kPrefetch_;
    static constexpr int kThreads = kAcross * kDown / kCluster;  // of a block
    static constexpr int kCols = kAcross * kVec;
    static constexpr int kBytes = kVec * sizeof(T);
    static constexpr int kGroup = kAcross < 32 ? 32 : kAcross;  // threads whose values meet by shuffles, or don't
    static constexpr int kGroups = kThreads / kGroup;
    static_assert((kAcross & (kAcross - 1)) == 0 && kThreads % kGroup == 0);
    static_assert(!kPrefetch || kBytes >= 4, "the asynchronous copy has no 2-byte form");

    TK_DEVICE static int across() { return int(threadIdx.x) % kAcross; }
    TK_DEVICE static int rank() { return kCluster > 1 ? tk::cluster_rank() : 0; }
    TK_DEVICE static int down() { return (rank() * kThreads + int(threadIdx.x)) / kAcross; }
    TK_DEVICE static int64_t first_tile() { return blockIdx.x / kCluster; }
    TK_DEVICE static int64_t tile_step() { return gridDim.x / kCluster; }
    TK_DEVICE static int64_t row(int64_t step, int k) { return (step * kRows + k) * kDown + down(); }
};

template <class G>
struct Shared {
    tk::Barrier gathered[2];  // the values of all blocks of the cluster are there
    typename G::Acc partial[G::kGroups][G::kCols];
    typename G::Acc total[2][G::kCluster][G::kCols];
    alignas(128) tk::Words<G::kPrefetch ? G::kBytes : 4> ahead[G::kPrefetch ? G::kStreams * G::kRows : 1][G::kThreads];
};

// Where a tile lies. Tile t: inner tile t % n_across of outer index t / n_across.
template <class G, int kDims, int kTensors>
struct Place {
    row::Rows<kDims, kTensors> outer;
    int64_t dim_stride[kTensors];
    int64_t n_dim, n_inner, n_across, n_tiles;

    // Rows of the dim that a thread's rows of a step, 0, kDown, 2 * kDown, ..., lie among; 0 if its columns are outside.
    TK_DEVICE int left(int64_t tile, int64_t step) const
    {
        return inner(tile) < n_inner ? int(tk::min<int64_t>(n_dim - G::row(step, 0), G::kRows * G::kDown)) : 0;
    }
    TK_DEVICE int64_t inner(int64_t tile) const { return tile % n_across * G::kCols + G::across() * G::kVec; }
    // Of the element at row 0 of the tile's dim.
    template <int kTensor>
    TK_DEVICE int64_t offset(int64_t tile) const { return outer.template offset<kTensor>(tile / n_across) + inner(tile); }
};

// Brings tiles into registers, one after another.
//
// With kPrefetch the tile after it is fetched meanwhile, in kChunks groups of rows: as soon as a thread has a group in
// registers it starts the copies of the next tile's, so that bytes are under way at any time.
template <class G, int kDims, int kTensors>
struct Reader {
    using T = typename G::T;
    static constexpr int kChunks = G::kRows < 4 ? G::kRows : 4;
    static constexpr int kChunkRows = G::kRows / kChunks;
    static_assert(G::kRows % kChunks == 0);

    Shared<G>& shared;
    const Place<G, kDims, kTensors>& at;
    const T* x[G::kStreams];

    // Starts the copies of the first tile.
    TK_DEVICE void begin()
    {
        if constexpr (G::kPrefetch) {
            const Rows next = rows(G::first_tile(), 0);
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                fetch(next, c);
            }
        }
    }

    // This thread's vectors of a tile, rows from step * kRows * kDown on; outside of the tensor, `fill`. Tiles come in the
    // order of the grid's steps.
    TK_DEVICE void load(tk::Vec<T, G::kVec> (&v)[G::kStreams][G::kRows], int64_t tile, int64_t step, typename G::Acc fill)
    {
        const auto filler = tk::Vec<T, G::kVec>::filled(fill);
        const int left = at.left(tile, step);
        const Rows from = rows(G::kPrefetch ? tile + G::tile_step() : tile, step);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            if constexpr (G::kPrefetch) {
                tk::copy_wait<kChunks - 1>();  // this thread's copies of the group
            }
#pragma unroll
            for (int k = c * kChunkRows; k < (c + 1) * kChunkRows; ++k) {
#pragma unroll
                for (int s = 0; s < G::kStreams; ++s) {
                    v[s][k] = filler;
                    if (k * G::kDown < left) {
                        if constexpr (G::kPrefetch) {
                            v[s][k].raw = tk::load_shared<G::kBytes>(&shared.ahead[s * G::kRows + k][threadIdx.x]);
                        } else {
                            v[s][k].raw = tk::load_global<G::kBytes>(from.first[s] + k * from.stride[s]);
                        }
                    }
                }
            }
            if constexpr (G::kPrefetch) {
                fetch(from, c);
            }
        }
    }

    // Where this thread's rows of a tile lie; `left` as Place has it, 0 past the last tile.
    struct Rows {
        const T* first[G::kStreams];
        int64_t stride[G::kStreams];  // of two rows of this thread
        int left;
    };
    TK_DEVICE Rows rows(int64_t tile, int64_t step) const
    {
        Rows r;
        r.left = tile < at.n_tiles ? at.left(tile, step) : 0;
        set<0>(r, tile, step);
        if constexpr (G::kStreams > 1) {
            set<1>(r, tile, step);
        }
        return r;
    }
    template <int kStream>
    TK_DEVICE void set(Rows& r, int64_t tile, int64_t step) const
    {
        const int64_t stride = at.dim_stride[kStream + 1];
        r.first[kStream] =
            x[kStream] + (r.left > 0 ? at.template offset<kStream + 1>(tile) + G::row(step, 0) * stride : 0);
        r.stride[kStream] = G::kDown * stride;
    }

    // Starts the copies of group c.
    TK_DEVICE void fetch(const Rows& next, int c)
    {
#pragma unroll
        for (int k = c * kChunkRows; k < (c + 1) * kChunkRows; ++k) {
#pragma unroll
            for (int s = 0; s < G::kStreams; ++s) {
                if (k * G::kDown < next.left) {
                    tk::copy_async<G::kBytes>(&shared.ahead[s * G::kRows + k][threadIdx.x],
                                              next.first[s] + k * next.stride[s]);
                }
            }
        }
        tk::copy_commit();
    }
};

// Reduces kVec values a thread over the threads of their columns, in a fixed order; all get the result.
template <class G>
struct Reducer {
    using Acc = typename G::Acc;
    Shared<G>& shared;
    int turn = 0;  // two sets of results in turn, so that one reduction's are read before they are written again

    // Before the first reduction, by the whole cluster.
    TK_DEVICE void begin() { row::begin_exchange<G::kCluster>(shared.gathered); }
    // After the last.
    TK_DEVICE void end() { row::end_exchange<G::kCluster>(); }

    template <class Op>
    TK_DEVICE void operator()(Acc (&v)[G::kVec], Op op)
    {
        const int first = G::across() * G::kVec;
#pragma unroll
        for (int i = 0; i < G::kVec; ++i) {
#pragma unroll
            for (int o = 16; o >= G::kAcross; o /= 2) {
                v[i] = op(v[i], tk::shuffle_xor(v[i], o));
            }
        }
        if constexpr (G::kGroups * G::kCluster > 1) {
            if (threadIdx.x % G::kGroup < G::kAcross) {
#pragma unroll
                for (int i = 0; i < G::kVec; ++i) {
                    shared.partial[threadIdx.x / G::kGroup][first + i] = v[i];
                }
            }
            tk::sync_block();  // the partial values are written
            auto& total = shared.total[turn & 1];
            tk::Barrier& gathered = shared.gathered[turn & 1];
            if (G::kCluster > 1 && threadIdx.x == 0) {
                tk::arrive_expect(gathered, int(sizeof(total)));
            }
            for (int c = threadIdx.x; c < G::kCols; c += G::kThreads) {
                Acc all = shared.partial[0][c];
#pragma unroll
                for (int g = 1; g < G::kGroups; ++g) {
                    all = op(all, shared.partial[g][c]);
                }
                if constexpr (G::kCluster == 1) {
                    total[0][c] = all;
                } else {
                    tk::Words<sizeof(Acc)> words;
                    memcpy(&words, &all, sizeof(Acc));
#pragma unroll
                    for (int r = 0; r < G::kCluster; ++r) {
                        tk::store_peer(&total[G::rank()][c], words, gathered, r);
                    }
                }
            }
            if constexpr (G::kCluster == 1) {
                tk::sync_block();  // the totals are written, the partial values are read
            } else {
                tk::wait_cluster(gathered, (turn >> 1) & 1);  // all blocks' totals are here, so this block's are read
            }
#pragma unroll
            for (int i = 0; i < G::kVec; ++i) {
                v[i] = total[0][first + i];
#pragma unroll
                for (int r = 1; r < G::kCluster; ++r) {
                    v[i] = op(v[i], total[r][first + i]);
                }
            }
            ++turn;
        }
    }
};

// Writes this thread's vectors of the output (tensor 0), from row step * kRows * kDown on, one after another.
template <class G, class Out, int kDims, int kTensors>
struct Writer {
    Out* p;
    int64_t stride;
    int left;

    TK_DEVICE Writer(Out* y, const Place<G, kDims, kTensors>& at, int64_t tile, int64_t step)
        : p(y + at.template offset<0>(tile) + G::row(step, 0) * at.dim_stride[0]), stride(G::kDown * at.dim_stride[0]),
          left(at.left(tile, step))
    {
    }
    TK_DEVICE void put(const tk::Vec<Out, G::kVec>& v)
    {
        if (left > 0) {
            tk::store_global<tk::Vec<Out, G::kVec>::kBytes>(p, v.raw);
        }
        p += stride;
        left -= G::kDown;
    }
};

}  // namespace columns
