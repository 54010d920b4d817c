/* emulator_counts.c - what a kernel's accesses would cost a GPU: for each place
 * in its text, wavefronts of shared memory and sectors of global memory, beside
 * the fewest that could bring the same bytes.
 *
 * Lanes of a warp run one after another here.  Their accesses are noted, and at
 * the end of a cluster the n-th access of each lane at a place is put together
 * as one request of the warp.
 *
 * Wavefronts: 32 banks of 4 bytes; accesses of 8 bytes go by half warps, of 16
 * by quarters; a bank gives one word a wavefront, to all who want it.  Sectors:
 * 32 bytes each, however many lanes touch it.
 */
#include "tkjit.h"

#include <stdlib.h>
#include <string.h>

enum { LANES = 32, BANKS = 32, WORD = 4, SECTOR = 32, MOST_WORDS = 128 };

/* Notes of a cluster, at most: a kernel of more is counted in part. */
#define MOST_NOTES ((size_t)1 << 24)

struct tk_counts {
    tk_touch *notes;
    size_t n_notes, room;
    tk_count *rows;
    size_t n_rows, rows_room;
};

tk_counts *
tkcount_new(void)
{
    return tk_calloc(sizeof(tk_counts));
}

void
tkcount_free(tk_counts *c)
{
    if (c != NULL) {
        free(c->notes);
        free(c->rows);
        tk_free(c);
    }
}

void
tkcount_note(tk_counts *c, const tk_touch *note)
{
    if (c->n_notes == c->room) {
        size_t room = c->room > 0 ? 2 * c->room : 4096;
        tk_touch *more =
            room <= MOST_NOTES ? realloc(c->notes, room * sizeof *more) : NULL;
        if (more == NULL) {
            return;
        }
        c->notes = more;
        c->room = room;
    }
    c->notes[c->n_notes] = *note;
    c->notes[c->n_notes].turn = (uint32_t)c->n_notes;
    c->n_notes++;
}

/* --- The cost of a request ----------------------------------------------- */

/* How many different values there are; sorts them. */
static int
different(uint64_t *values, int n)
{
    int found = 0;

    for (int i = 1; i < n; i++) {
        uint64_t v = values[i];
        int j = i;
        for (; j > 0 && values[j - 1] > v; j--) {
            values[j] = values[j - 1];
        }
        values[j] = v;
    }
    for (int i = 0; i < n; i++) {
        found += i == 0 || values[i] != values[i - 1];
    }
    return found;
}

/* The units of a size that lanes [first, last) touch. */
static int
units(const tk_touch *request, int first, int last, unsigned size,
      uint64_t *out)
{
    int n = 0;

    for (int i = first; i < last; i++) {
        const tk_touch *t = &request[i];
        for (uint64_t u = t->address / size;
             u <= (t->address + t->bytes - 1) / size && n < 4 * MOST_WORDS;
             u++) {
            out[n++] = u;
        }
    }
    return n;
}

/* Wavefronts of the lanes that go together. */
static int
conflicts(const tk_touch *request, int first, int last)
{
    uint64_t words[4 * MOST_WORDS];
    int of_bank[BANKS] = {0}, most = 0;

    int n = units(request, first, last, WORD, words);
    different(words, n);
    for (int i = 0; i < n; i++) {
        if (i == 0 || words[i] != words[i - 1]) {
            int here = ++of_bank[words[i] % BANKS];
            most = here > most ? here : most;
        }
    }
    return most;
}

/* Adds a request of n lanes, ordered by lane, to its row. */
static void
add_request(tk_count *row, const tk_touch *request, int n)
{
    uint64_t found[4 * MOST_WORDS];
    unsigned bytes = request[0].bytes;

    row->requests++;
    if (!row->shared) {
        int sectors = units(request, 0, n, SECTOR, found);
        row->actual += (uint64_t)different(found, sectors);
        int words = units(request, 0, n, bytes < WORD ? bytes : WORD, found);
        unsigned wanted =
            (unsigned)different(found, words) * (bytes < WORD ? bytes : WORD);
        row->ideal += (wanted + SECTOR - 1) / SECTOR;
        return;
    }
    int group = bytes <= 4 ? LANES : bytes <= 8 ? LANES / 2 : LANES / 4;
    for (int i = 0; i < n;) {
        int j = i;
        while (j < n && request[j].lane / group == request[i].lane / group) {
            j++;
        }
        row->actual += (uint64_t)conflicts(request, i, j);
        int words = different(found, units(request, i, j, WORD, found));
        row->ideal += (uint64_t)((words + BANKS - 1) / BANKS);
        i = j;
    }
}

/* --- From notes to rows -------------------------------------------------- */

static tk_count *
row_of(tk_counts *c, const tk_touch *t)
{
    for (size_t i = 0; i < c->n_rows; i++) {
        tk_count *r = &c->rows[i];
        if (r->where == t->where && r->shared == t->shared &&
            r->writes == t->writes) {
            return r;
        }
    }
    if (c->n_rows == c->rows_room) {
        size_t room = c->rows_room > 0 ? 2 * c->rows_room : 64;
        tk_count *more = realloc(c->rows, room * sizeof *more);
        if (more == NULL) {
            return NULL;
        }
        c->rows = more;
        c->rows_room = room;
    }
    tk_count *r = &c->rows[c->n_rows++];
    *r = (tk_count){t->where, t->shared, t->writes, 0, 0, 0};
    return r;
}

#define BY(member)                                                             \
    if (x->member != y->member) {                                              \
        return x->member < y->member ? -1 : 1;                                 \
    }

/* A lane's accesses at a place, one after another. */
static int
by_lane(const void *a, const void *b)
{
    const tk_touch *x = a, *y = b;
    BY(where)
    BY(warp)
    BY(lane)
    BY(turn)
    return 0;
}

/* A warp's requests at a place, one after another. */
static int
by_request(const void *a, const void *b)
{
    const tk_touch *x = a, *y = b;
    BY(where)
    BY(warp)
    BY(turn)
    BY(lane)
    return 0;
}

void
tkcount_settle(tk_counts *c)
{
    tk_touch *notes = c->notes;
    size_t n = c->n_notes;

    c->n_notes = 0;
    if (n == 0) {
        return;
    }
    qsort(notes, n, sizeof *notes, by_lane);
    uint32_t turn = 0;
    for (size_t i = 0; i < n; i++) {
        bool same = i > 0 && notes[i].where == notes[i - 1].where &&
                    notes[i].warp == notes[i - 1].warp &&
                    notes[i].lane == notes[i - 1].lane;
        turn = same ? turn + 1 : 0;
        notes[i].turn = turn;
    }
    qsort(notes, n, sizeof *notes, by_request);
    for (size_t i = 0; i < n;) {
        size_t j = i;
        while (j < n && notes[j].where == notes[i].where &&
               notes[j].warp == notes[i].warp &&
               notes[j].turn == notes[i].turn) {
            j++;
        }
        tk_count *row = row_of(c, &notes[i]);
        if (row != NULL) {
            add_request(row, &notes[i], (int)(j - i));
        }
        i = j;
    }
}

size_t
tkcount_rows(const tk_counts *c, const tk_count **rows)
{
    *rows = c->rows;
    return c->n_rows;
}
