// Matrix products on the CPU.
//
// Each lane computes its own part of the result. A sum starts with the accumulator and takes the products in the order of k,
// each exact, rounding to float (or double) after each; sums of f16 are kept in float and rounded once, at the end. The
// machine's order and the width of its sums are its own: results agree exactly where no sum rounds.
//
// wgmma reads its operands when it is issued, and its accumulators are NaN until a wgmma_wait names them and their group is
// done. Found are: operands in shared memory that are written to before that, accumulators that are, and accumulators that
// were written to since the last wgmma_fence that named them, a warp of the four that is missing, or that names other
// operands; and fragments A that are written to before the wgmma_wait that names them. Not found: the same of a fragment that
// no wait names. It may be gone by then, its place another variable's, which is no fault.
#pragma once

namespace tkemu {

// Functions whose accesses are the emulator's own, not the kernel's. They call nothing that stops the kernel: the place of
// that would be in here.
#define TKEMU_UNSEEN __attribute__((noinline, unused, no_sanitize("thread")))

// What a lane gave at an exchange.
TKEMU_UNSEEN static void take(void* to, const void* const* all, int lane, int bytes)
{
    __builtin_memcpy(to, all[lane], (unsigned long)bytes);
}

enum Number { kF16, kBf16, kTf32, kE4m3, kE5m2 };

// The types of a product, by product_types().
TKEMU_INLINE Number left(int types) { return types < 3 ? Number(types) : types < 5 ? kE4m3 : kE5m2; }
TKEMU_INLINE Number right(int types) { return types < 3 ? Number(types) : types % 2 == 1 ? kE4m3 : kE5m2; }
TKEMU_INLINE int bytes_of(Number t) { return t == kTf32 ? 4 : t < kTf32 ? 2 : 1; }

TKEMU_INLINE float e4m3_to_float(uint32_t bits)
{
    const uint32_t sign = (bits & 0x80u) << 24, e = bits >> 3 & 15, m = bits & 7;
    if ((bits & 0x7fu) == 0x7fu) {
        return __uint_as_float(0x7fffffffu);
    }
    if (e == 0) {
        return __uint_as_float(sign | __float_as_uint(float(m) * 0.001953125f));  // 2^-9
    }
    return __uint_as_float(sign | (e + 120) << 23 | m << 20);
}

// Element i of a word.
TKEMU_INLINE float element(Number t, uint32_t word, int i)
{
    switch (t) {
    case kF16: return tk::half_to_float(word >> 16 * i & 0xffffu);
    case kBf16: return __uint_as_float(word >> 16 * i << 16);
    case kTf32: return __uint_as_float(word & 0xffffe000u);
    case kE4m3: return e4m3_to_float(word >> 8 * i & 0xffu);
    case kE5m2: return tk::half_to_float((word >> 8 * i & 0xffu) << 8);
    }
    return 0.0f;
}

// n words as numbers; returns how many those are.
TKEMU_INLINE int elements(float* to, Number t, const uint32_t* words, int n)
{
    const int per = 4 / bytes_of(t);
    for (int i = 0; i < n * per; ++i) {
        to[i] = element(t, words[i / per], i % per);
    }
    return n * per;
}

TKEMU_INLINE float dot(float sum, const float* a, const float* b, int n)
{
    for (int k = 0; k < n; ++k) {
        sum = __builtin_fmaf(a[k], b[k], sum);
    }
    return sum;
}

// ---- products of a warp ---------------------------------------------------------------------------------------------

struct Fragments { uint32_t a[4], b[2]; };

// Row g or, r == 1, g + 8 of A, of the fragments that all lanes gave, each behind `skip` bytes.
TKEMU_INLINE void row_of_fragments(uint32_t* to, const void* const* all, int lane, int r, int words, int skip)
{
    for (int i = 0; i < words; ++i) {
        const char* given = static_cast<const char*>(all[lane / 4 * 4 + i % 4]) + skip;
        __builtin_memcpy(&to[i], given + (i / 4 * 2 + r) * 4, 4);
    }
}

// A lane's fragment C, of what all lanes gave; `words` of k.
TKEMU_UNSEEN static void multiply(float* d, const void* const* all, int lane, int types, int words)
{
    float a[2][32], b[2][32];
    uint32_t w[8];
    Fragments f;
    int n = 0;
    for (int r = 0; r < 2; ++r) {
        row_of_fragments(w, all, lane, r, words, 0);
        elements(a[r], left(types), w, words);
    }
    for (int c = 0; c < 2; ++c) {
        for (int i = 0; i < words; ++i) {
            take(&f, all, (lane % 4 * 2 + c) * 4 + i % 4, sizeof f);
            w[i] = f.b[i / 4];
        }
        n = elements(b[c], right(types), w, words);
    }
    for (int i = 0; i < 4; ++i) {
        d[i] = dot(d[i], a[i / 2], b[i % 2], n);
    }
}

TKEMU_UNSEEN static void multiply_double(double* d, const void* const* all, int lane)
{
    double f[2];
    for (int k = 0; k < 4; ++k) {
        take(f, all, lane / 4 * 4 + k, sizeof f);
        const double a = f[0];
        for (int c = 0; c < 2; ++c) {
            take(f, all, (lane % 4 * 2 + c) * 4 + k, sizeof f);
            d[c] = __builtin_fma(a, f[1], d[c]);
        }
    }
}

// ---- accumulators of a warpgroup ------------------------------------------------------------------------------------

// What is known of accumulators of a thread: known by their address, which is never followed, since the thread may be gone.
// A fragment A is kRead while a product that reads it is under way.
struct Accumulators {
    tkemu_thread* thread;
    const void* place;
    enum { kFenced, kInFlight, kLanded, kRead } state;
    int n, age;  // of kInFlight and kRead: groups committed since
    Accumulators* next;
    float values[128];  // as they were when they were fenced, landed or read; kInFlight: the result
};
static Accumulators* accumulators[256];
enum { kKept = 512 };  // of a list: those of threads that are gone are dropped some day

constexpr uint32_t kUnfinished = 0x7fd5a5a5u;  // a NaN that no arithmetic makes

TKEMU_INLINE Accumulators** accumulators_of(tkemu_thread* thread)
{
    return &accumulators[uint64_t(thread) * 0x9e3779b97f4a7c15u >> 56];
}

// The record of these accumulators, now the first of its list; made if `make`, unless there is no memory.
TKEMU_INLINE Accumulators* find(const void* place, bool make)
{
    Accumulators **list = accumulators_of(self), **at = list, *r;
    int n = 0;
    while (*at != nullptr && !((*at)->thread == self && (*at)->place == place)) {
        if (make && ++n == kKept) {
            (*at)->n = 0;
            (*at)->thread = self;
            (*at)->place = place;
            break;
        }
        at = &(*at)->next;
    }
    r = *at;
    if (r != nullptr) {
        *at = r->next;
    } else if (make && (r = static_cast<Accumulators*>(__builtin_malloc(sizeof *r))) != nullptr) {
        r->thread = self;
        r->place = place;
        r->n = 0;
    }
    if (r != nullptr) {
        r->next = *list;
        *list = r;
    }
    return r;
}

TKEMU_INLINE bool is_unfinished(const float* place, int n)
{
    for (int i = 0; i < n; ++i) {
        if (__float_as_uint(place[i]) != kUnfinished) {
            return false;
        }
    }
    return true;
}

TKEMU_UNSEEN static const char* fence_accumulators(const float* place, int n)
{
    Accumulators* r = find(place, true);
    if (r == nullptr) {
        return "no memory for accumulators";
    }
    if (r->state != Accumulators::kInFlight || r->n != n || !is_unfinished(place, n)) {
        r->state = Accumulators::kFenced;
        r->n = n;
        __builtin_memcpy(r->values, place, (unsigned long)n * sizeof(float));
    }
    return nullptr;
}

// Returns what is wrong; else `*sums` is where the next result is to be summed up, beginning with their value or 0.
TKEMU_UNSEEN static const char* take_off(float* place, int n, bool accumulate, float** sums)
{
    Accumulators* r = find(place, false);
    const unsigned long bytes = (unsigned long)n * sizeof(float);
    if (r == nullptr || r->n != n) {
        return "accumulators are used that no wgmma_fence has named";
    }
    if (r->state == Accumulators::kInFlight ? !is_unfinished(place, n) : __builtin_memcmp(r->values, place, bytes) != 0) {
        return "accumulators were written to while a wgmma was under way, or since the last wgmma_fence";
    }
    r->state = Accumulators::kInFlight;
    r->age = 0;
    for (int i = 0; i < n; ++i) {
        r->values[i] = accumulate ? r->values[i] : 0.0f;
        place[i] = __uint_as_float(kUnfinished);
    }
    *sums = r->values;
    return nullptr;
}

TKEMU_UNSEEN static const char* take_fragment(const void* place, unsigned long bytes)
{
    Accumulators* r = find(place, true);
    if (r == nullptr) {
        return "no memory for a fragment";
    }
    r->state = Accumulators::kRead;
    r->n = r->age = 0;
    __builtin_memcpy(r->values, place, bytes);
    return nullptr;
}

// Of all but the latest groups the fragments are free.
TKEMU_UNSEEN static const char* free_fragment(const void* place, unsigned long bytes, int pending)
{
    Accumulators* r = find(place, false);
    if (r == nullptr || r->state != Accumulators::kRead || r->age <= pending) {
        return nullptr;
    }
    r->state = Accumulators::kLanded;
    return __builtin_memcmp(r->values, place, bytes) == 0 ? nullptr : "a fragment A was written to while a wgmma was under way";
}

TKEMU_UNSEEN static void commit_accumulators()
{
    for (Accumulators* r = *accumulators_of(self); r != nullptr; r = r->next) {
        r->age += r->thread == self;
    }
}

// Of all but the latest groups the result arrives.
TKEMU_UNSEEN static const char* land(float* place, int n, int pending)
{
    Accumulators* r = find(place, false);
    if (r == nullptr || r->n != n || r->state != Accumulators::kInFlight || r->age <= pending) {
        return nullptr;
    }
    r->state = Accumulators::kLanded;
    if (!is_unfinished(place, n)) {
        return "accumulators were written to while a wgmma was under way";
    }
    __builtin_memcpy(place, r->values, (unsigned long)n * sizeof(float));
    return nullptr;
}

TKEMU_INLINE void stop_if(const char* wrong)
{
    if (wrong != nullptr) {
        machine->fault(wrong);
    }
}

// ---- operands of a warpgroup ----------------------------------------------------------------------------------------

// An operand in shared memory, as its descriptor's bits tell.
struct Operand {
    uint32_t start, leading, stride, base;
    tk::Swizzle swizzle;
    bool mn;
    int rows;  // of m or n

    // Where byte `at` of a row's 32 lies in the block's shared memory. mn: rows lie side by side, elements have two bytes.
    __forceinline__ uint32_t place(int row, int at) const
    {
        const uint32_t width = uint32_t(tk::row_bytes(swizzle)), r = uint32_t(row), i = uint32_t(at), k = i / 2;
        const bool plain = swizzle == tk::kSwizzleNone;
        uint32_t p = start;
        if (!mn) {
            p += r % 8 * width + r / 8 * stride + i / 16 * (plain ? leading : 16) + i % 16;
        } else {
            const uint32_t side = width / 2;
            p += r % side * 2 + r / side * (plain ? stride : leading) + i % 2 + k % 8 * width +
                 k / 8 * (plain ? leading : stride);
        }
        p &= 0x3ffff;
        // 16-byte pieces change places by the number of their 128 bytes, counted from where the pattern starts.
        return p ^ ((((p >> 7) - base) & 7) << 4 & (width - 16));
    }

    // 16-byte piece i of 2 * rows.
    __forceinline__ uint32_t piece(int i) const
    {
        return mn ? place(i % (rows / 8) * 8, i / (rows / 8) * 2) : place(i / 2, i % 2 * 16);
    }
};

TKEMU_INLINE Operand operand(uint64_t d, bool mn, int rows)
{
    Operand o;
    o.start = uint32_t(d & 0x3fff) << 4;
    o.leading = uint32_t(d >> 16 & 0x3fff) << 4;
    o.stride = uint32_t(d >> 32 & 0x3fff) << 4;
    o.base = uint32_t(d >> 49 & 7);
    o.swizzle = tk::Swizzle(d >> 62 & 3);
    o.mn = mn;
    o.rows = rows;
    return o;
}

// What is wrong with an operand.
TKEMU_UNSEEN static const char* judge(uint64_t d, const Operand& o)
{
    if ((d & 0x3ff1c000c000c000u) != 0) {
        return "a matrix descriptor has bits set that mean nothing";
    }
    for (int i = 0; i < 2 * o.rows; ++i) {
        if (o.piece(i) + 16 > self->shared_span) {
            return "a matrix descriptor leads outside the block's shared memory";
        }
    }
    return nullptr;
}

TKEMU_INLINE void read_row(uint32_t* to, const Operand& o, int row)
{
    const int bytes = o.mn ? 2 : 16;
    for (int at = 0; at < 32; at += bytes) {
        __builtin_memcpy(reinterpret_cast<char*>(to) + at, self->shared + o.place(row, at), (unsigned long)bytes);
    }
}

// What a thread gives: the first part alike in its warp.
struct Wgmma {
    uint64_t a, b;
    uint32_t columns, types, majors, accumulate;
    uint32_t fragment[4];
};
enum { kAlike = 32 };  // bytes

// A thread's fragments C, for each j of columns 8j to 8j + 7, added to d. a: NULL where A is in registers. first: the warp's
// first row.
TKEMU_UNSEEN static const char* multiply(float* d, const Wgmma& w, const void* const* all, const Operand* a,
                                         const Operand& b, int first)
{
    const int lane = self->lane, q = lane % 4;
    float row[2][32], column[32];
    uint32_t words[8];
    for (int i = 0; i < 32; ++i) {
        if (__builtin_memcmp(all[i], &w, kAlike) != 0) {
            return "lanes of a warp name different operands to wgmma";
        }
    }
    for (int r = 0; r < 2; ++r) {
        if (a != nullptr) {
            read_row(words, *a, first + lane / 4 + 8 * r);
        } else {
            row_of_fragments(words, all, lane, r, 8, kAlike);
        }
        elements(row[r], left(int(w.types)), words, 8);
    }
    for (int i = 0; i < b.rows / 4; ++i) {
        read_row(words, b, i / 2 * 8 + 2 * q + i % 2);
        const int n = elements(column, right(int(w.types)), words, 8);
        for (int r = 0; r < 2; ++r) {
            float* to = &d[i / 2 * 4 + 2 * r + i % 2];
            *to = dot(*to, row[r], column, n);
        }
    }
    return nullptr;
}

TKEMU_INLINE void touch(int op, const Operand& o)
{
    for (int i = 0; i < 2 * o.rows; ++i) {
        machine->async_access(op, self->shared + o.piece(i), 16, TKEMU_READ);
    }
}

// One wgmma. has_a: A is in shared memory.
TKEMU_INLINE void wgmma(float* d, const Wgmma& w, bool has_a)
{
    if (__CUDA_ARCH__ / 10 != 90) {
        machine->fault("the architecture has no wgmma");
    }
    const tkemu_index t = self->thread, n = self->block_dim;
    const unsigned number = t.x + n.x * (t.y + n.y * t.z);
    machine->warpgroup(w.a * 0x9e3779b97f4a7c15u ^ w.b * 0xc2b2ae3d27d4eb4fu ^ w.columns ^ uint64_t(w.types) << 16 ^
                       uint64_t(w.majors) << 24 ^ uint64_t(w.accumulate) << 32);
    const Operand a = operand(w.a, w.majors & 1, 64);
    const Operand b = operand(w.b, w.majors & 2, int(w.columns));
    const int first = int(number) / 32 % 4 * 16;  // row of the warp: it reads no others
    stop_if(judge(w.b, b));
    if (has_a) {
        stop_if(judge(w.a, a));
    }
    // One lane reads for all, in the name of the warp, before the others join in its groups.
    if (self->lane == 0) {
        const int op = machine->async_begin(TKEMU_MMAS);
        touch(op, b);
        for (int i = 0; has_a && i < 32; ++i) {
            const uint32_t p = a.mn ? a.place(first + i % 2 * 8, i / 2 * 2) : a.place(first + i / 2, i % 2 * 16);
            machine->async_access(op, self->shared + p, 16, TKEMU_READ);
        }
    }
    const void* const* all = machine->exchange(TKEMU_WGMMA, 0xffffffffu, &w, sizeof w);
    if (self->lane != 0) {
        machine->async_begin(TKEMU_MMAS);
    }
    float* sums = nullptr;
    stop_if(take_off(d, int(w.columns) / 2, w.accumulate != 0, &sums));
    stop_if(multiply(sums, w, all, has_a ? &a : nullptr, b, first));
}

}  // namespace tkemu

namespace tk {

TK_DEVICE uint32_t tf32_rest(uint32_t v)
{
    return (v & 0x7f800000u) == 0x7f800000u ? 0 : bits_of(float_of(v) - float_of(v & 0xffffe000u)) + 0x1000u;
}

// ---- fragments and shared memory ------------------------------------------------------------------------------------

TK_DEVICE bool is_shared(const char* p)
{
    const tkemu_thread* t = tkemu::self;
    const char* shared = reinterpret_cast<const char*>(t->shared);
    return p >= shared && p + 16 <= shared + t->shared_span;
}

// The addresses of kCount matrices' rows, of what the lanes gave.
template <int kCount>
TK_DEVICE void exchange_rows(int what, const void* row, char* (&rows)[8 * kCount])
{
    static_assert(kCount == 1 || kCount == 2 || kCount == 4);
    const void* const* all = tkemu::machine->exchange(what, 0xffffffffu, &row, sizeof row);
    for (int i = 0; i < 8 * kCount; ++i) {
        tkemu::take(&rows[i], all, i, sizeof rows[i]);
        tkemu::machine->aligned(rows[i], 16);
        if (!is_shared(rows[i])) {
            tkemu::machine->fault("a row of ldmatrix or stmatrix is not in the block's shared memory");
        }
    }
}

template <int kCount, bool kTranspose = false>
TK_DEVICE Words<4 * kCount> ldmatrix(const void* row)
{
    require_arch(750);
    char* rows[8 * kCount];
    exchange_rows<kCount>(TKEMU_LDMATRIX, row, rows);
    const int g = lane() / 4, q = lane() % 4;
    Words<4 * kCount> r;
    for (int i = 0; i < kCount; ++i) {
        if constexpr (!kTranspose) {
            memcpy(&r.w[i], rows[8 * i + g] + 4 * q, 4);
        } else {
            uint16_t low, high;
            memcpy(&low, rows[8 * i + 2 * q] + 2 * g, 2);
            memcpy(&high, rows[8 * i + 2 * q + 1] + 2 * g, 2);
            r.w[i] = uint32_t(high) << 16 | low;
        }
    }
    return r;
}

template <int kCount, bool kTranspose = false>
TK_DEVICE void stmatrix(void* row, const Words<4 * kCount>& v)
{
    require_arch(900);
    char* rows[8 * kCount];
    exchange_rows<kCount>(TKEMU_STMATRIX, row, rows);
    const int g = lane() / 4, q = lane() % 4;
    for (int i = 0; i < kCount; ++i) {
        if constexpr (!kTranspose) {
            memcpy(rows[8 * i + g] + 4 * q, &v.w[i], 4);
        } else {
            const uint16_t low = uint16_t(v.w[i]), high = uint16_t(v.w[i] >> 16);
            memcpy(rows[8 * i + 2 * q] + 2 * g, &low, 2);
            memcpy(rows[8 * i + 2 * q + 1] + 2 * g, &high, 2);
        }
    }
}

// ---- products of a warp ---------------------------------------------------------------------------------------------

template <int kWords>
TK_DEVICE void mma_fragments(float (&d)[4], const uint32_t* a, const uint32_t* b, int types)
{
    tkemu::Fragments f{};
    memcpy(f.a, a, 2 * kWords);
    memcpy(f.b, b, kWords);
    const void* const* all = tkemu::machine->exchange(TKEMU_MMA, 0xffffffffu, &f, sizeof f);
    tkemu::multiply(d, all, tkemu::self->lane, types, kWords);
}

template <class TA, class TB = TA>
TK_DEVICE void mma(float (&d)[4], const Words<16>& a, const Words<8>& b)
{
    constexpr int kTypes = product_types<TA, TB>();
    static_assert(kTypes >= 0, "the tensor cores have no such product");
    require_arch(kTypes < 3 ? 800 : 890);
    mma_fragments<8>(d, a.w, b.w, kTypes);
}

template <class T>
TK_DEVICE void mma(float (&d)[4], const Words<8>& a, const Words<4>& b)
{
    static_assert(is_two_bytes<T>, "the tensor cores have no such product");
    require_arch(is_same<T, f16>::value ? 750 : 800);
    mma_fragments<4>(d, a.w, b.w, product_types<T, T>());
}

TK_DEVICE void mma_f16(Words<8>& d, const Words<16>& a, const Words<8>& b)
{
    float sums[4];
    unpack2(d.w[0], sums[0], sums[1], f16{});
    unpack2(d.w[1], sums[2], sums[3], f16{});
    mma<f16>(sums, a, b);
    d.w[0] = pack2(sums[0], sums[1], f16{});
    d.w[1] = pack2(sums[2], sums[3], f16{});
}

TK_DEVICE void mma(double (&d)[2], double a, double b)
{
    require_arch(800);
    const double mine[2] = {a, b};
    const void* const* all = tkemu::machine->exchange(TKEMU_MMA, 0xffffffffu, mine, sizeof mine);
    tkemu::multiply_double(d, all, tkemu::self->lane);
}

// ---- products of a warpgroup ----------------------------------------------------------------------------------------

TK_DEVICE uint32_t matrix_address(const void* p)
{
    const unsigned char* at = static_cast<const unsigned char*>(p);
    const tkemu_thread* t = tkemu::self;
    tkemu::machine->aligned(p, 16);
    if (at < t->shared || at >= t->shared + t->shared_span) {
        tkemu::machine->fault("a matrix descriptor is of a place outside the block's shared memory");
    }
    return uint32_t(at - t->shared);
}

template <int kN>
TK_DEVICE void note_fence(float (&r)[kN]) { tkemu::stop_if(tkemu::fence_accumulators(r, kN)); }
template <int kBytes>
TK_DEVICE void note_fence(Words<kBytes>&) {}
template <class T, int kN>
TK_DEVICE void note_fence(T (&r)[kN])
{
    for (T& one : r) {
        note_fence(one);
    }
}

template <class... R>
TK_DEVICE void wgmma_fence(R&... registers)
{
    tkemu::machine->fence(TKEMU_FENCE_MMA);
    (note_fence(registers), ...);
}
TK_DEVICE void wgmma_commit()
{
    tkemu::machine->async_commit(TKEMU_MMAS);
    tkemu::commit_accumulators();
}

template <int kPending, int kN>
TK_DEVICE void note_wait(float (&r)[kN]) { tkemu::stop_if(tkemu::land(r, kN, kPending)); }
template <int kPending, int kBytes>
TK_DEVICE void note_wait(Words<kBytes>& r) { tkemu::stop_if(tkemu::free_fragment(&r, kBytes, kPending)); }
template <int kPending, class T, int kN>
TK_DEVICE void note_wait(T (&r)[kN])
{
    for (T& one : r) {
        note_wait<kPending>(one);
    }
}

template <int kPending, class... R>
TK_DEVICE void wgmma_wait(R&... registers)
{
    // A warp waits as one: before any lane goes on, each has read its operands.
    const uint32_t pending = kPending;
    tkemu::machine->exchange(TKEMU_WGMMA, 0xffffffffu, &pending, sizeof pending);
    tkemu::machine->async_wait(TKEMU_MMAS, kPending);
    (note_wait<kPending>(registers), ...);
}

template <int kN, class TA, class TB = TA, Major kA = kMajorK, Major kB = kMajorK>
TK_DEVICE void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate)
{
    static_assert(is_wgmma<kN, TA, TB, kA, kB>());
    tkemu::wgmma(d, {a, b, kN, uint32_t(product_types<TA, TB>()), kA | kB << 1, accumulate, {}}, true);
}
template <int kN, class TA, class TB = TA, Major kB = kMajorK>
TK_DEVICE void wgmma(float (&d)[kN / 2], const Words<16>& a, uint64_t b, bool accumulate)
{
    static_assert(is_wgmma<kN, TA, TB, kMajorK, kB>());
    tkemu::wgmma(d, {0, b, kN, uint32_t(product_types<TA, TB>()), kB << 1, accumulate, {a.w[0], a.w[1], a.w[2], a.w[3]}},
                 false);
    tkemu::stop_if(tkemu::take_fragment(&a, sizeof a));
}

// ---- registers of a warpgroup ---------------------------------------------------------------------------------------

template <int kCount>
TK_DEVICE void give_registers()
{
    static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
    require_arch(900);
    tkemu::machine->warpgroup(kCount);
}
template <int kCount>
TK_DEVICE void take_registers() { give_registers<kCount>(); }

}  // namespace tk
