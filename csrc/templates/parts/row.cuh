// The row reduction: read a row once, keep it in registers, reduce it over its threads, write a row.
//
// Who holds what. A *team* of kTeam threads holds a row, or, in a cluster of kCluster blocks, its block's *part* of the
// row: kVecs vectors of kVec elements a thread, the columns of a warp side by side. A block has kTeams teams (one if a row
// takes a cluster). Which thread holds which column depends on these numbers alone, never on an address or on the count of
// rows: so the order of a sum, and with it a row's bits, are the same in any batch.
//
// How it comes in. Directly, each thread with its own loads; or (kRing) each warp through its own ring in shared memory,
// that bulk copies keep full: chunks of kChunkVecs vectors a lane, or of whole rows where a warp holds several. A chunk's
// place in the ring is refilled as soon as the warp has it in registers, so the next rows' bytes are under way while this
// row is reduced and written, and no warp waits for another but in the reduction.
//
// Which block takes which row. Tiles of kTeams rows are dealt out in turn; or, given a counter, the third tile of a block
// and all later ones are drawn from it (kDraws), so that no block has a row to do when the others are done.
//
// Any alignment. With vectors of 16 bytes (kAligned) the host guarantees that rows start on 16 bytes in every tensor and
// n_cols is a multiple of kVec. Otherwise an element alignment is enough: a vector is one element, or a *pair* of two-byte
// ones, which is a word in memory where its row starts on 4 bytes, and two halves where not. So neighbour lanes always touch
// neighbour words, in shared memory without a bank conflict and in global memory in whole lines. The ring is filled with
// the 16-byte granules that hold the elements, never reaching outside the tensor.
//
// In place: an output that is exactly its row's input may be written, since a row is in registers before it is written.
#pragma once
#include "tk/tk.cuh"

namespace row {

// Where row r of each tensor starts, in elements: the dims other than the reduced one, outermost first. By value.
template <int kDims, int kTensors>
struct Rows {
    int64_t size[kDims];
    int64_t stride[kTensors][kDims];

    // 64 bits: the reach of the strides may pass 2^31 whatever the count of elements.
    template <int kTensor>
    TK_DEVICE int64_t offset(int64_t r) const
    {
        int64_t o = 0;
#pragma unroll
        for (int d = kDims - 1; d > 0; --d) {
            const int64_t q = r / size[d];
            o += (r - q * size[d]) * stride[kTensor][d];
            r = q;
        }
        return o + r * stride[kTensor][0];
    }
};

template <class T_, class Out_, int kStreams_, int kTeam_, int kTeams_, int kCluster_, int kVecs_, int kChunkVecs_,
          bool kRing_, int kVec_>
struct Geometry {
    using T = T_;
    using Out = Out_;
    static constexpr int kStreams = kStreams_, kTeam = kTeam_, kTeams = kTeams_, kCluster = kCluster_;
    static constexpr int kVecs = kVecs_, kChunkVecs = kChunkVecs_, kVec = kVec_;
    static constexpr bool kRing = kRing_;
    static constexpr bool kAligned = kVec * (sizeof(T) < sizeof(Out) ? sizeof(T) : sizeof(Out)) == 16;
    static constexpr bool kPairs = !kAligned && kVec == 2;

    static constexpr int kLanes = kTeam < 32 ? kTeam : 32;      // of a team in one warp
    static constexpr int kWarps = kTeam / kLanes;               // of a team
    static constexpr int kThreads = kTeam * kTeams;             // of the block
    static constexpr int kChunks = kVecs / kChunkVecs;
    static constexpr int kChunkCols = kLanes * kChunkVecs * kVec;  // of a warp
    static constexpr int kWarpRows = 32 / kLanes;                  // rows of which a warp holds columns
    static constexpr int kMaxStages = 16;

    static_assert((kTeam & (kTeam - 1)) == 0 && kThreads % 32 == 0 && kVecs % kChunkVecs == 0);
    static_assert(kAligned || kVec == 1 || (kPairs && sizeof(T) == 2 && sizeof(Out) == 2));
    static_assert(kTeams == 1 || kCluster == 1);
    static_assert(kTeam >= 32 || kChunks == 1, "a chunk is a piece of one row, or whole rows");
    static_assert(kTeams == 1 || kTeam <= 32 || kTeams <= 15, "a team of several warps has its own named barrier");

    TK_DEVICE static int team() { return int(threadIdx.x) / kTeam; }
    TK_DEVICE static int rank() { return int(threadIdx.x) % kTeam; }
    TK_DEVICE static int part() { return kCluster > 1 ? tk::cluster_rank() : 0; }

    // The warp's first column, and this thread's. Its vector k lies k * kStep behind: a constant, so that one address
    // serves all vectors of a row.
    TK_DEVICE static int warp_col() { return (part() * kWarps + rank() / kLanes) * kLanes * kVecs * kVec; }
    TK_DEVICE static int lane_col() { return rank() % kLanes * kVec; }
    TK_DEVICE static int first_col() { return warp_col() + lane_col(); }
    static constexpr int kStep = kLanes * kVec;

    // Whether the warp's part of a row of n_cols is there but for its last vectors: those before them need no look at the
    // row's end.
    TK_DEVICE static bool full(int n_cols) { return n_cols - warp_col() >= (kVecs - 1) * kStep; }
    // Whether the pairs of a row that starts at p are words.
    TK_DEVICE static bool whole(const void* p) { return (uintptr_t(p) & 3) == 0; }

    // Tiles of kTeams rows, for the blocks (clusters) of a grid of any size.
    static constexpr bool kDraws = kRing && kTeams == 1 && kWarps > 1;
    TK_DEVICE static int64_t first_tile() { return blockIdx.x / kCluster; }
    TK_DEVICE static int64_t tile_step() { return gridDim.x / kCluster; }
    TK_DEVICE static int64_t tiles(int64_t n_rows) { return (n_rows + kTeams - 1) / kTeams; }

    TK_DEVICE static void sync_team() { tk::sync_named(1 + (kTeams > 1 ? team() : 0), kTeam); }
};

// How many of a row's last `left` columns are among the thread's, which begin with the first of them.
template <class G>
TK_DEVICE int own_columns(int left)
{
    int n = 0;
#pragma unroll
    for (int v = 0; v < G::kVecs; ++v) {
        n += tk::max(0, tk::min(G::kVec, left - v * G::kStep));
    }
    return n;
}

// What a kernel keeps in shared memory; the rings of chunks lie behind it.
template <class G, class Value>
struct alignas(128) Shared {
    tk::Barrier full[G::kRing ? G::kThreads / 32 : 1][G::kMaxStages];  // each warp's: a chunk's bytes are there
    tk::Barrier gathered[2];  // the partial values of all blocks of the cluster are there
    int64_t drawn[4];         // the tiles of rows 2, 3, 4, ... of this block
    Value partial[2][G::kThreads / 32 * G::kCluster];

    TK_DEVICE char* rings() { return reinterpret_cast<char*>(this + 1); }
};

// The tensors that are read, and the ring they are read through.
template <class G, int kDims>
struct Input {
    using T = typename G::T;
    static constexpr int kSize = sizeof(T);
    const T* base[G::kStreams];
    int64_t extent[G::kStreams];  // elements from the first to the last, inclusive: nothing else is read
    int64_t n_rows;
    int n_cols;
    int stages, slot_bytes;       // of a warp's ring; slot_bytes is a stream's room in a stage
    uint64_t* counter;            // 0 at the start; or null. With a counter, stages <= kChunks: a warp fetches a row ahead

    // The distance of two rows in a slot, if they don't lie back to back.
    TK_DEVICE int pitch() const { return (n_cols * kSize + (G::kAligned ? 0 : 16) + 15) & ~15; }

    // Whether rows lie back to back in every stream: then a single copy fetches those of a warp.
    template <int kTensors>
    TK_DEVICE bool together(const Rows<kDims, kTensors>& rows) const
    {
        bool all = kDims == 1;
#pragma unroll
        for (int s = 0; s < G::kStreams; ++s) {
            all = all && rows.stride[s + 1][0] == n_cols;
        }
        return all;
    }
};

// Copies the elements of the granule `from` that lie in [lo, hi), one by one; the rest of it becomes 0.
template <class T>
TK_DEVICE void copy_edge(char* to, uintptr_t from, uintptr_t lo, uintptr_t hi)
{
#pragma unroll 1  // rarely run: short rather than fast
    for (int i = 0; i < 16 / int(sizeof(T)); ++i) {
        const uintptr_t p = from + i * sizeof(T);
        reinterpret_cast<T*>(to)[i] = p >= lo && p < hi ? *reinterpret_cast<const T*>(p) : T{};
    }
    tk::fence_async();  // a later bulk copy may write this place
}

// Fetches the granules that hold the bytes [begin, end) to `to` and returns how many bytes will be counted at `full`.
// Granules that reach over the ends of the tensor [lo, hi) are copied by element, before this thread's next arrival.
template <class G>
TK_DEVICE int copy_span(char* to, uintptr_t begin, uintptr_t end, uintptr_t lo, uintptr_t hi, tk::Barrier& full)
{
    uintptr_t b = begin, e = end;
    if constexpr (!G::kAligned) {
        b &= ~uintptr_t(15);
        e = (e + 15) & ~uintptr_t(15);
        if (b < lo) {
            copy_edge<typename G::T>(to, b, lo, hi);
            b += 16;
            to += 16;
        }
        if (e > hi && e > b) {
            e -= 16;
            copy_edge<typename G::T>(to + (e - b), e, lo, hi);
        }
    }
    if (G::kAligned || e > b) {  // whole vectors: never none
        tk::bulk_load(to, reinterpret_cast<const void*>(b), int(e - b), full);
    }
    return int(e - b);
}

// kBytes from the ring's copy (kShared), or from the tensor.
template <bool kShared, int kBytes>
TK_DEVICE tk::Words<kBytes> load_bytes(const char* p)
{
    if constexpr (kShared) {
        return tk::load_shared<kBytes>(p);
    } else {
        return tk::load_global<kBytes, tk::kReadOnce>(p);
    }
}

// The vector at p, of which `left` columns lie within the row; the others are those of `fill`. kFull: all do. kWhole: a
// single access brings it.
template <class G, bool kShared, bool kFull, bool kWhole>
TK_DEVICE tk::Vec<typename G::T, G::kVec> load_vec(const char* p, int left, const tk::Vec<typename G::T, G::kVec>& fill)
{
    tk::Vec<typename G::T, G::kVec> v = fill;
    if constexpr (kWhole) {
        if (kFull || left > 0) {
            v.raw = load_bytes<kShared, tk::Vec<typename G::T, G::kVec>::kBytes>(p);
        }
    } else {
        uint32_t lo = fill.raw.w[0] & 0xffff, hi = lo;
        if (kFull || left > 0) {
            lo = load_bytes<kShared, 2>(p).w[0];
        }
        if (kFull || left > 1) {
            hi = load_bytes<kShared, 2>(p + 2).w[0];
        }
        v.raw.w[0] = lo | hi << 16;
    }
    return v;
}

// One row's part in the registers of its team.
template <class G>
struct Tile {
    using T = typename G::T;
    using Acc = tk::accumulator_t<T>;
    tk::Vec<T, G::kVec> v[G::kVecs];
};

// Before the blocks of a cluster send each other values that are counted at `gathered`, by all of them.
template <int kCluster>
TK_DEVICE void begin_exchange(tk::Barrier (&gathered)[2])
{
    if constexpr (kCluster > 1) {
        if (threadIdx.x == 0) {
            tk::init(gathered[0], 1);
            tk::init(gathered[1], 1);
            tk::fence_barrier_init();
        }
        tk::sync_cluster();  // the barriers are initialized before a neighbour uses them
    }
}
// After the last: no block's shared memory goes away while a neighbour's values are on their way to it.
template <int kCluster>
TK_DEVICE void end_exchange()
{
    if constexpr (kCluster > 1) {
        tk::sync_cluster();
    }
}

// Reads rows, one after another.
template <class G, int kDims, int kTensors, class Value>
struct Reader {
    using T = typename G::T;
    using In = Input<G, kDims>;

    Shared<G, Value>& shared;
    const In& in;
    const Rows<kDims, kTensors>& rows;
    int stage = 0, phase = 0;                // where in the ring the next chunk is read, and fetched
    int row = 0;                             // rows read so far
    int next_row = 0, next_chunk = 0;        // the chunk that is fetched next
    int64_t dealt = G::first_tile();         // the tiles of `row` and of `next_row`, if none is drawn
    int64_t next_dealt = G::first_tile();
    int64_t draw = 0;                        // thread 0's: the tile of row `row + 2`

    TK_DEVICE static int warp() { return int(threadIdx.x) / 32; }
    TK_DEVICE char* slot(int stream)
    {
        return shared.rings() + ((warp() * in.stages + stage) * G::kStreams + stream) * in.slot_bytes;
    }
    // What the block's shared memory has behind the rings.
    TK_DEVICE char* room() const { return shared.rings() + G::kThreads / 32 * in.stages * G::kStreams * in.slot_bytes; }
    TK_DEVICE void advance()
    {
        if (++stage == in.stages) {
            stage = 0;
            phase ^= 1;
        }
    }

    // The tile of the block's row number i, known two rows ahead; in_turn: the one that is dealt to it if none is drawn. Without a
    // ring few rows come: their tiles take no registers.
    TK_DEVICE int64_t tile(int i, int64_t in_turn) const
    {
        if constexpr (!G::kRing) {
            return G::first_tile() + i * G::tile_step();
        }
        return G::kDraws && in.counter && i >= 2 ? shared.drawn[i % 4] : in_turn;
    }
    TK_DEVICE bool more() const { return tile(row, dealt) < G::tiles(in.n_rows); }
    TK_DEVICE void next()
    {
        ++row;
        dealt += G::tile_step();
    }

    // Before the first row, by the whole block (cluster).
    TK_DEVICE void begin()
    {
        if constexpr (G::kRing) {
            // A warp's barriers and ring are its own: it alone has to wait until they are ready.
            if (tk::lane() < in.stages) {
                tk::init(shared.full[warp()][tk::lane()], 1);
                tk::fence_barrier_init();
            }
            tk::sync_warp();
            for (int i = 0; i < in.stages; ++i) {
                fetch();
                advance();
            }
            phase = 0;
        }
        begin_exchange<G::kCluster>(shared.gathered);
    }

    // After the last row.
    TK_DEVICE void end() { end_exchange<G::kCluster>(); }

    // Starts the copies of the warp's next chunk to the place `stage`, which all its lanes are done with.
    TK_DEVICE void fetch()
    {
        const int64_t next_tile = tile(next_row, next_dealt);
        if (next_tile >= G::tiles(in.n_rows)) {
            return;
        }
        // The warp's first row of the tile, and how many of its rows there are.
        const int64_t r0 = next_tile * G::kTeams + (G::kTeams > 1 ? warp() * 32 / G::kTeam : 0);
        const int c0 = G::warp_col() + next_chunk * G::kChunkCols;
        if constexpr (G::kWarpRows == 1) {
            // A copy a stream, by lane 0.
            if (tk::lane() == 0) {
                int bytes = 0;
                if (r0 < in.n_rows && c0 < in.n_cols) {
                    const int c1 = tk::min(c0 + G::kChunkCols, in.n_cols);
                    bytes = copy<0>(slot(0), r0, 1, c0, c1);
                    if constexpr (G::kStreams > 1) {
                        bytes += copy<1>(slot(1), r0, 1, c0, c1);
                    }
                }
                tk::arrive_expect(shared.full[warp()][stage], bytes);
            }
        } else {
            const int n = int(tk::max<int64_t>(0, tk::min<int64_t>(G::kWarpRows, in.n_rows - r0)));
            int bytes = 0;
            if (n > 0) {
                bytes = fetch_rows<0>(r0, n);
                if constexpr (G::kStreams > 1) {
                    bytes += fetch_rows<1>(r0, n);
                }
            }
            bytes = tk::sum_lanes(bytes);
            if constexpr (!G::kAligned) {
                tk::sync_warp();  // the elements that other lanes copied by hand come before lane 0's arrival
            }
            if (tk::lane() == 0) {
                tk::arrive_expect(shared.full[warp()][stage], bytes);
            }
        }
        if (++next_chunk == G::kChunks) {
            next_chunk = 0;
            ++next_row;
            next_dealt += G::tile_step();
        }
    }

    // One lane's share of stream kStream's copies of the rows [r0, r0 + n). Returns the counted bytes.
    template <int kStream>
    TK_DEVICE int fetch_rows(int64_t r0, int n)
    {
        const bool together = in.together(rows);
        const int copies = together ? 1 : n;
        const int i = copies == 1 ? tk::lane() - kStream : tk::lane();  // a single copy: each stream has its own lane
        if (i < 0 || i >= copies) {
            return 0;
        }
        return copy<kStream>(slot(kStream) + i * in.pitch(), r0 + i, together ? n : 1, 0, in.n_cols);
    }

    // Starts the copy of columns [c0, c1) of row r, or, if n > 1, of n whole rows that lie back to back.
    template <int kStream>
    TK_DEVICE int copy(char* to, int64_t r, int n, int c0, int c1)
    {
        const uintptr_t lo = uintptr_t(in.base[kStream]), hi = lo + in.extent[kStream] * sizeof(T);
        const uintptr_t begin = lo + (rows.template offset<kStream + 1>(r) + c0) * sizeof(T);
        const uintptr_t end = begin + (n > 1 ? n * in.n_cols : c1 - c0) * sizeof(T);
        return copy_span<G>(to, begin, end, lo, hi, shared.full[warp()][stage]);
    }

    // The team's row, the next one, and, from the row's reduction on, the one after.
    template <int kLater = 0>
    TK_DEVICE int64_t current() const
    {
        return tile(row + kLater, dealt + kLater * G::tile_step()) * G::kTeams + G::team();
    }

    // Brings the team's row into t, one Tile a stream; columns past the row's end become `fill`.
    TK_DEVICE void load(Tile<G> (&t)[G::kStreams], typename Tile<G>::Acc fill)
    {
        if constexpr (G::kDraws) {
            if (in.counter && G::part() == 0 && threadIdx.x == 0) {
                draw = 2 * G::tile_step() + int64_t(tk::fetch_add(in.counter, 1));
            }
        }
        const auto filler = tk::Vec<T, G::kVec>::filled(fill);
        const int64_t r = current();
        const int cols = r < in.n_rows ? in.n_cols : 0;
        const T* from[G::kStreams];
        from[0] = in.base[0] + (cols > 0 ? rows.template offset<1>(r) : 0);
        if constexpr (G::kStreams > 1) {
            from[1] = in.base[1] + (cols > 0 ? rows.template offset<2>(r) : 0);
        }

#pragma unroll
        for (int c = 0; c < G::kChunks; ++c) {
            if constexpr (G::kRing) {
                tk::wait(shared.full[warp()][stage], phase);  // the chunk is there
            }
#pragma unroll
            for (int s = 0; s < G::kStreams; ++s) {
                take(t[s], s, c, from[s], cols, filler);
            }
            if constexpr (G::kRing) {
                tk::sync_warp();  // every lane has its columns
                fetch();
                advance();
            }
        }
    }

    // Brings chunk c of the row at `from` into t.
    TK_DEVICE void take(Tile<G>& t, int stream, int c, const T* from, int cols, const tk::Vec<T, G::kVec>& filler)
    {
        const char* mine = G::kRing ? in_ring(stream, from, c)
                                    : reinterpret_cast<const char*>(from + G::first_col() + c * G::kChunkVecs * G::kStep);
        const int left = cols - G::first_col();
        // Without a ring few rows come, and short ones: not worth three versions of the code.
        if constexpr (!G::kAligned && (G::kRing || G::kVecs > 8)) {
            if (G::full(cols)) {
                if constexpr (G::kPairs) {
                    if (G::whole(from)) {
                        take_as<true, true>(t, c, mine, left, filler);
                        return;
                    }
                }
                take_as<true, !G::kPairs>(t, c, mine, left, filler);
                return;
            }
        }
        take_as<false, !G::kPairs>(t, c, mine, left, filler);
    }
    template <bool kFull, bool kWhole>
    TK_DEVICE static void take_as(Tile<G>& t, int c, const char* mine, int left, const tk::Vec<T, G::kVec>& filler)
    {
#pragma unroll
        for (int j = 0; j < G::kChunkVecs; ++j) {
            const int k = c * G::kChunkVecs + j;
            const char* p = mine + j * G::kStep * In::kSize;
            if (kFull && k < G::kVecs - 1) {
                t.v[k] = load_vec<G, G::kRing, true, kWhole>(p, left - k * G::kStep, filler);
            } else {
                t.v[k] = load_vec<G, G::kRing, false, !G::kPairs>(p, left - k * G::kStep, filler);
            }
        }
    }

    // Where the ring has this thread's first column of the warp's chunk c.
    TK_DEVICE const char* in_ring(int stream, const T* from, int c)
    {
        const int lane_row = tk::lane() / G::kLanes;
        const T* first = from + (G::warp_col() + c * G::kChunkCols);
        int skip = lane_row * in.pitch();
        if (G::kWarpRows > 1 && in.together(rows)) {
            // The first of the rows fixes where the bytes start within a granule.
            skip = lane_row * in.n_cols * In::kSize;
            first = from - lane_row * int64_t(in.n_cols);
        }
        return slot(stream) + skip + (G::kAligned ? 0 : int(uintptr_t(first) & 15)) + G::lane_col() * In::kSize;
    }
};

// For a Reducer without a Reader.
struct NoReader {
    struct { uint64_t* counter = nullptr; } in;
    int row = 0;
    int64_t draw = 0;
};

// Reduces a value over the threads of a row; all of them get the same bits. Op: Value, identity(), combine(a, b),
// lanes<kWidth>(v) = over groups of kWidth lanes. The slots alternate between two sets, so one barrier a reduction is
// enough: a set is written again only after a reduction in which every warp took part after reading it. The same barrier
// tells the block (cluster) which tile thread 0 has drawn.
template <class G, class Op>
struct Reducer {
    using Value = typename Op::Value;
    Shared<G, Value>& shared;
    int turn = 0;

    template <class Reader>
    TK_DEVICE Value operator()(Value v, const Reader& reader)
    {
        return across(Op::template lanes<G::kLanes>(v), reader);
    }

    // v: of the row's part that is the warp's, in each of its lanes.
    template <class Reader>
    TK_DEVICE Value across(Value v, const Reader& reader)
    {
        const bool draws = G::kDraws && reader.in.counter;
        int64_t* drawn = &shared.drawn[(reader.row + 2) % 4];
        constexpr int n = G::kWarps * G::kCluster;
        if constexpr (n > 1) {
            Value* slots = shared.partial[turn & 1] + G::team() * G::kWarps;
            const int warp = G::rank() / 32;
            if constexpr (G::kCluster == 1) {
                if (tk::lane() == 0) {
                    slots[warp] = v;
                }
                if (draws && threadIdx.x == 0) {
                    *drawn = reader.draw;
                }
                G::sync_team();  // the partial values are written
            } else {
                tk::Barrier& gathered = shared.gathered[turn & 1];
                if (threadIdx.x == 0) {
                    tk::arrive_expect(gathered, n * int(sizeof(Value)) + (draws ? 8 : 0));
                }
                if (tk::lane() < G::kCluster) {
                    constexpr int kPiece = sizeof(Value) < 16 ? int(sizeof(Value)) : 16;
                    tk::Words<kPiece> words[sizeof(Value) / kPiece], *to;
                    memcpy(words, &v, sizeof(Value));
                    to = reinterpret_cast<decltype(to)>(&slots[G::part() * G::kWarps + warp]);
#pragma unroll
                    for (int i = 0; i < int(sizeof(Value)) / kPiece; ++i) {
                        tk::store_peer(to + i, words[i], gathered, tk::lane());
                    }
                }
                if (draws && G::part() == 0 && warp == 0) {
                    tk::Words<8> words;
                    words.w[0] = tk::shuffle<32>(uint32_t(reader.draw), 0);
                    words.w[1] = tk::shuffle<32>(uint32_t(uint64_t(reader.draw) >> 32), 0);
                    if (tk::lane() < G::kCluster) {
                        tk::store_peer(drawn, words, gathered, tk::lane());
                    }
                }
                tk::wait_cluster(gathered, (turn >> 1) & 1);  // all blocks' partial values are here
            }
            v = slots[tk::lane() % (n < 32 ? n : 32)];
#pragma unroll
            for (int i = 32; i < n; i += 32) {
                v = Op::combine(v, slots[i + tk::lane()]);
            }
            v = Op::template lanes<(n < 32 ? n : 32)>(v);
            ++turn;
        }
        return v;
    }
};

// Sum of one value.
template <class Acc>
struct Sum {
    struct Value { Acc s; };

    TK_DEVICE static Value identity() { return {Acc(0)}; }
    TK_DEVICE static Value combine(Value a, Value b) { return {a.s + b.s}; }
    template <int kWidth>
    TK_DEVICE static Value lanes(Value v)
    {
#pragma unroll
        for (int o = kWidth / 2; o > 0; o /= 2) {
            v.s += tk::shuffle_xor(v.s, o);
        }
        return v;
    }
};

// Sums of two values.
template <class Acc>
struct Sums {
    struct alignas(2 * sizeof(Acc)) Value { Acc a, b; };

    TK_DEVICE static Value identity() { return {Acc(0), Acc(0)}; }
    TK_DEVICE static Value combine(Value v, Value w) { return {v.a + w.a, v.b + w.b}; }
    template <int kWidth>
    TK_DEVICE static Value lanes(Value v)
    {
#pragma unroll
        for (int o = kWidth / 2; o > 0; o /= 2) {
            v.a += tk::shuffle_xor(v.a, o);
            v.b += tk::shuffle_xor(v.b, o);
        }
        return v;
    }
};

// Writes a row.
template <class G>
struct Writer {
    using Out = typename G::Out;
    using Vec = tk::Vec<Out, G::kVec>;
    Out* row;
    int n_cols;  // 0: there is no such row

    // vec(k): the thread's vector k.
    template <class F>
    TK_DEVICE void write(F vec) const
    {
        if constexpr (!G::kAligned && (G::kRing || G::kVecs > 8)) {
            if (G::full(n_cols)) {
                if constexpr (G::kPairs) {
                    if (G::whole(row)) {
                        write_as<true, true>(vec);
                        return;
                    }
                }
                write_as<true, !G::kPairs>(vec);
                return;
            }
        }
        write_as<false, !G::kPairs>(vec);
    }
    template <bool kFull, bool kWhole, class F>
    TK_DEVICE void write_as(F vec) const
    {
        Out* mine = row + G::first_col();
        const int left = n_cols - G::first_col();
#pragma unroll
        for (int k = 0; k < G::kVecs; ++k) {
            const Vec v = vec(k);
            if (kFull && k < G::kVecs - 1) {
                store<true, kWhole>(mine + k * G::kStep, left - k * G::kStep, v);
            } else {
                store<false, !G::kPairs>(mine + k * G::kStep, left - k * G::kStep, v);
            }
        }
    }
    template <bool kFull, bool kWhole>
    TK_DEVICE static void store(Out* p, int left, const Vec& v)
    {
        if constexpr (kWhole) {
            if (kFull || left > 0) {
                tk::store_global<Vec::kBytes>(p, v.raw);
            }
        } else {
            if (kFull || left > 0) {
                tk::store_global<2>(p, tk::Words<2>{{v.raw.w[0]}});
            }
            if (kFull || left > 1) {
                tk::store_global<2>(p + 1, tk::Words<2>{{v.raw.w[0] >> 16}});
            }
        }
    }
};

}  // namespace row
