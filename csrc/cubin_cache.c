/* cubin_cache.c - compiled kernels on disk: one file an entry.
 *
 * An entry is  header | meta | lowered name | log | image | SHA-256 of it all,
 * at <folder>/<first two digits of the key>/<the rest>.tkc.  A file that is not
 * exactly that, digest and key included, is a miss; so is one that belongs to
 * someone else.  Writing goes to a file aside, fsync and rename, so a kill at
 * any point leaves either the old state or the new one.
 *
 * Owns no state.  Runs without the GIL; must not call Python.  The policy
 * (which folders, how much of them) stands in python/tkjit/cache.py.
 */
#define _GNU_SOURCE /* F_OFD_SETLK */
#include "tkjit.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* --- SHA-256 (FIPS 180-4) ------------------------------------------------ */

typedef struct {
    uint32_t h[8];
    uint64_t size;
    unsigned char block[64];
} sha256;

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
    0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
    0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t
rotate(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static void
sha256_block(sha256 *s, const unsigned char *p)
{
    uint32_t w[64], v[8];

    for (int i = 0; i < 16; i++) {
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 |
               (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    }
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] +
               (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    memcpy(v, s->h, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t e = v[4], a = v[0];
        uint32_t t1 = v[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) +
                      ((e & v[5]) ^ (~e & v[6])) + round_constants[i] + w[i];
        uint32_t t2 = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) +
                      ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) {
        s->h[i] += v[i];
    }
}

static void
sha256_begin(sha256 *s)
{
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372,
                                      0xa54ff53a, 0x510e527f, 0x9b05688c,
                                      0x1f83d9ab, 0x5be0cd19};
    memcpy(s->h, start, sizeof start);
    s->size = 0;
}

static void
sha256_add(sha256 *s, const void *data, size_t size)
{
    const unsigned char *p = data;
    while (size > 0) {
        size_t at = (size_t)(s->size % 64);
        size_t n = size < 64 - at ? size : 64 - at;
        memcpy(s->block + at, p, n);
        s->size += n;
        p += n;
        size -= n;
        if (at + n == 64) {
            sha256_block(s, s->block);
        }
    }
}

static void
sha256_end(sha256 *s, unsigned char digest[32])
{
    uint64_t bits = s->size * 8;
    unsigned char tail[8];

    for (int i = 0; i < 8; i++) {
        tail[i] = (unsigned char)(bits >> (56 - 8 * i));
    }
    sha256_add(s, "\x80", 1);
    while (s->size % 64 != 56) {
        sha256_add(s, "", 1);
    }
    sha256_add(s, tail, 8);
    for (int i = 0; i < 32; i++) {
        digest[i] = (unsigned char)(s->h[i / 4] >> (24 - 8 * (i % 4)));
    }
}

void
tkcache_sha256(const void *data, size_t size, unsigned char digest[32])
{
    sha256 s;
    sha256_begin(&s);
    sha256_add(&s, data, size);
    sha256_end(&s, digest);
}

/* --- The format ---------------------------------------------------------- */

/* Little-endian on every machine CUDA runs on. */
typedef struct {
    char magic[8];
    uint32_t schema;
    uint32_t meta_size;
    uint32_t lowered_size; /* with its NUL */
    uint32_t log_size;     /* with its NUL */
    uint64_t image_size;
    char key[TK_KEY_SIZE];
    int32_t facts[5];
    uint32_t zero;
} entry_header;

static const char magic[8] = {'t', 'k', 'j', 'i', 't', 0, '\r', '\n'};
enum { SCHEMA = 1, DIGEST = 32, MAX_ENTRY = 1 << 30 };

/* <folder>/ab/cdef….tkc; returns -1 if it does not fit. */
static int
entry_path(char path[PATH_MAX], const char *folder, const char *key)
{
    int n = snprintf(path, PATH_MAX, "%s/%.2s/%s.tkc", folder, key, key + 2);
    return n > 0 && n < PATH_MAX ? 0 : -1;
}

/* --- Reading ------------------------------------------------------------- */

/* The whole file, if it is a plain one that we may trust.  Owned by the caller;
 * NULL otherwise.  *there says whether anything stood at the path. */
static unsigned char *
read_file(const char *path, bool trust, size_t *size, bool *there)
{
    struct stat st;
    unsigned char *data = NULL;
    size_t got = 0;

    *there = lstat(path, &st) == 0;
    /* O_NONBLOCK: a fifo must not hang us. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) {
        return NULL;
    }
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > MAX_ENTRY ||
        st.st_size < (off_t)(sizeof(entry_header) + DIGEST) ||
        (!trust && st.st_uid != geteuid() && st.st_uid != 0) ||
        (!trust && (st.st_mode & (S_IWGRP | S_IWOTH)) != 0)) {
        goto done;
    }
    data = tk_alloc((size_t)st.st_size);
    while (data != NULL && got < (size_t)st.st_size) {
        ssize_t n = read(fd, data + got, (size_t)st.st_size - got);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0 || tk_hostile(TK_AT_READ)) {
            tk_free(data);
            data = NULL;
            break;
        }
        got += (size_t)n;
    }
    *size = got;
done:
    close(fd);
    return data;
}

static char *
copy_text(const unsigned char *from, size_t size)
{
    char *text = tk_alloc(size + 1);
    if (text != NULL) {
        memcpy(text, from, size);
        text[size] = '\0';
    }
    return text;
}

/* Takes a whole file apart.  key may be NULL: any. */
static int
parse_entry(const unsigned char *data, size_t size, const char *key,
            tk_binary *out, char **meta)
{
    entry_header h;
    unsigned char digest[DIGEST];
    tk_binary b = {0};

    memcpy(&h, data, sizeof h);
    if (memcmp(h.magic, magic, sizeof magic) != 0 || h.schema != SCHEMA ||
        h.image_size > MAX_ENTRY || h.lowered_size < 2 || h.log_size < 1 ||
        sizeof h + (uint64_t)h.meta_size + h.lowered_size + h.log_size +
                h.image_size + DIGEST !=
            size ||
        (key != NULL && memcmp(h.key, key, TK_KEY_SIZE) != 0)) {
        return -1;
    }
    tkcache_sha256(data, size - DIGEST, digest);
    if (memcmp(digest, data + size - DIGEST, DIGEST) != 0) {
        return -1;
    }
    const unsigned char *p = data + sizeof h;
    char *text = meta != NULL ? copy_text(p, h.meta_size) : NULL;
    p += h.meta_size;
    b.lowered = copy_text(p, h.lowered_size - 1);
    p += h.lowered_size;
    b.log = copy_text(p, h.log_size - 1);
    p += h.log_size;
    b.image = tk_alloc((size_t)h.image_size);
    if (b.lowered == NULL || b.log == NULL || b.image == NULL ||
        (meta != NULL && text == NULL)) {
        tk_binary_clear(&b);
        tk_free(text);
        return -1;
    }
    memcpy(b.image, p, (size_t)h.image_size);
    b.image_size = (size_t)h.image_size;
    b.facts =
        (tk_facts){h.facts[0], h.facts[1], h.facts[2], h.facts[3], h.facts[4]};
    *out = b;
    if (meta != NULL) {
        *meta = text;
    }
    return 0;
}

static tk_lookup
read_entry(const char *path, const char *key, bool trust, tk_binary *out,
           char **meta)
{
    size_t size = 0;
    bool there = false;

    unsigned char *data = read_file(path, trust, &size, &there);
    if (data == NULL) {
        return there ? TK_DAMAGED : TK_MISS;
    }
    int status = parse_entry(data, size, key, out, meta);
    tk_free(data);
    return status == 0 ? TK_HIT : TK_DAMAGED;
}

tk_lookup
tkcache_read(const char *folder, const char *key, bool trust, tk_binary *out)
{
    char path[PATH_MAX];

    if (entry_path(path, folder, key) < 0) {
        return TK_MISS;
    }
    tk_lookup found = read_entry(path, key, trust, out, NULL);
    if (found == TK_HIT) {
        /* The time of last use, for the size cap; read-only roots refuse. */
        utimensat(AT_FDCWD, path, NULL, 0);
    }
    return found;
}

tk_lookup
tkcache_read_file(const char *path, tk_binary *out, char **meta)
{
    return read_entry(path, NULL, true, out, meta);
}

/* --- Writing ------------------------------------------------------------- */

static int
write_all(int fd, const void *data, size_t size)
{
    const char *p = data;
    while (size > 0) {
        if (tk_hostile(TK_AT_WRITE)) {
            errno = EIO;
            return -1;
        }
        ssize_t n = write(fd, p, size);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return -1;
        }
        p += n;
        size -= (size_t)n;
    }
    return 0;
}

/* One part of an entry, into the file and into the digest. */
static int
write_part(int fd, sha256 *s, const void *data, size_t size)
{
    sha256_add(s, data, size);
    return write_all(fd, data, size);
}

static int
write_entry(int fd, const char *key, const char *meta, const tk_binary *b)
{
    sha256 s;
    unsigned char digest[DIGEST];
    entry_header h;

    memset(&h, 0, sizeof h);
    memcpy(h.magic, magic, sizeof magic);
    memcpy(h.key, key, TK_KEY_SIZE);
    h.schema = SCHEMA;
    h.meta_size = (uint32_t)strlen(meta);
    h.lowered_size = (uint32_t)strlen(b->lowered) + 1;
    h.log_size = (uint32_t)strlen(b->log) + 1;
    h.image_size = b->image_size;
    const tk_facts *f = &b->facts;
    const int32_t facts[5] = {f->registers, f->shared_bytes, f->stack_bytes,
                              f->spill_stores, f->spill_loads};
    memcpy(h.facts, facts, sizeof facts);

    sha256_begin(&s);
    if (write_part(fd, &s, &h, sizeof h) < 0 ||
        write_part(fd, &s, meta, h.meta_size) < 0 ||
        write_part(fd, &s, b->lowered, h.lowered_size) < 0 ||
        write_part(fd, &s, b->log, h.log_size) < 0 ||
        write_part(fd, &s, b->image, b->image_size) < 0) {
        return -1;
    }
    sha256_end(&s, digest);
    return write_all(fd, digest, sizeof digest) < 0 ? -1 : fsync(fd);
}

int
tkcache_write(const char *folder, const char *key, const char *meta,
              const tk_binary *binary, int *why)
{
    static atomic_uint serial; /* keeps the threads' files apart */
    char path[PATH_MAX], shard[PATH_MAX], aside[PATH_MAX];
    int status = -1, fd = -1;

    if (entry_path(path, folder, key) < 0) {
        *why = ENAMETOOLONG;
        return -1;
    }
    snprintf(shard, sizeof shard, "%.*s", (int)(strrchr(path, '/') - path),
             path);
    /* A killed process of our number (the first of a container always is) may
     * have left a file of that name. */
    errno = EEXIST;
    for (int tries = 0; fd < 0 && errno == EEXIST && tries < 64; tries++) {
        int n = snprintf(aside, sizeof aside, "%s/tmp/%ld-%u-%.16s", folder,
                         (long)getpid(), atomic_fetch_add(&serial, 1), key);
        if (n < 0 || n >= PATH_MAX) {
            errno = ENAMETOOLONG;
            break;
        }
        fd = open(aside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
                  0644);
    }
    if (fd < 0) {
        *why = errno;
        return -1;
    }
    if (write_entry(fd, key, meta, binary) == 0 &&
        (mkdir(shard, 0777) == 0 || errno == EEXIST)) {
        status = rename(aside, path);
        if (status < 0 && (errno == EISDIR || errno == ENOTEMPTY)) {
            /* A folder stands in the entry's place; only an empty one goes. */
            status = rmdir(path) == 0 ? rename(aside, path) : -1;
        }
    }
    if (status < 0) {
        *why = errno;
        unlink(aside);
    }
    close(fd);
    return status;
}

/* --- One process at a time per key --------------------------------------- */

/* One lock file for all keys, and one byte of it for each: a lock on a range of
 * bytes belongs to the open file, so it ends with the process. */
int
tkcache_lock(const char *folder, const char *key, int timeout_ms, bool *waited)
{
    char path[PATH_MAX], digits[16];

    *waited = false;
    if (snprintf(path, sizeof path, "%s/lock", folder) >= PATH_MAX) {
        return -1;
    }
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK,
                  0666);
    if (fd < 0) {
        return -1;
    }
    struct stat found;
    if (fstat(fd, &found) == 0 && found.st_size == 0) {
        /* For who looks; the locks care for no content. */
        static const char what[] =
            "Processes that compile a kernel hold a lock "
            "on a byte of this file.\n";
        ssize_t written = pwrite(fd, what, sizeof what - 1, 0);
        (void)written;
    }
    snprintf(digits, sizeof digits, "%.15s", key);
    struct flock range = {.l_type = F_WRLCK,
                          .l_whence = SEEK_SET,
                          .l_start = (off_t)strtoull(digits, NULL, 16),
                          .l_len = 1};
    for (int spent = 0;;) {
        if (fcntl(fd, F_OFD_SETLK, &range) == 0) {
            return fd;
        }
        if ((errno != EAGAIN && errno != EACCES) || spent >= timeout_ms) {
            close(fd);
            return -1;
        }
        *waited = true;
        const struct timespec nap = {.tv_nsec = 4 * 1000 * 1000};
        nanosleep(&nap, NULL);
        spent += 4;
    }
}

void
tkcache_unlock(int token)
{
    if (token >= 0) {
        close(token);
    }
}
