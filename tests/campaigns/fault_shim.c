/* Counts the calls that change files below PLACED_KILLS_ROOT, and kills the process group at a chosen one.
 *
 * Or the disk is full from the chosen call on: whatever needs space there fails with ENOSPC; what is there can be read,
 * overwritten in name (rename) and deleted.
 *
 * Loaded with LD_PRELOAD; its control block (placed_kills.py) is a file that all processes map. Calls of processes
 * outside the chosen process group, and on standard streams, are neither counted nor disturbed. Writes that the C
 * library makes by itself (the buffers of stdio) cannot be seen from here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, WRITE, FSYNC, RENAME, UNLINK, MKDIR, LINK, TRUNCATE, KINDS };
enum { BEFORE, AFTER, HALF, FULL };

struct control {
    uint64_t group;  /* 0: nobody is watched */
    uint64_t kind;   /* 1 + kind of the fault; 0: calls are only counted */
    uint64_t number; /* from 1 */
    uint64_t moment;
    uint64_t fired;
    uint64_t counts[KINDS];
};

static struct control *control;
static char root[4096];
static size_t root_length;

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("PLACED_KILLS_CONTROL"), *folder = getenv("PLACED_KILLS_ROOT");
    if (!file || !folder) return;
    int descriptor = syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC, 0);
    if (descriptor < 0) return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (mapped == MAP_FAILED) return;
    snprintf(root, sizeof root, "%s/", folder);
    root_length = strlen(root);
    control = mapped;
}

static int below_root(const char *path) {
    /* Prefect's database is another program's. */
    return !strncmp(path, root, root_length) && !strstr(path + root_length, "prefect/");
}

static int is_watched(void) { return control && control->group && control->group == (uint64_t)getpgrp(); }

/* For every process that has the library, also in other groups. */
static int is_full(void) { return control && control->group && control->moment == FULL && control->fired; }

static int watches_path(int folder, const char *path) {
    char whole[8192], link[64];
    if (!(is_watched() || is_full()) || !path) return 0;
    if (path[0] == '/') return below_root(path);
    if (folder == AT_FDCWD) {
        if (!getcwd(whole, 4096)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, whole, 4095);
        if (length < 0) return 0;
        whole[length] = 0;
    }
    strcat(whole, "/");
    strncat(whole, path, 4000);
    return below_root(whole);
}

static int watches_file(int descriptor) {
    char whole[4096], link[64];
    if (!(is_watched() || is_full()) || (descriptor <= 2 && !is_full())) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    int kept = errno;
    ssize_t length = readlink(link, whole, sizeof whole - 1);
    errno = kept;
    if (length < 0) return 0;
    whole[length] = 0;
    return below_root(whole);
}

static void strike(void) {
    control->fired = 1;
    kill(0, SIGKILL);
    for (;;) pause();
}

/* Count a call; whether it is the chosen one, at which the group dies. */
static int enter(int kind) {
    if (!is_watched()) return 0;
    uint64_t number = __atomic_add_fetch(&control->counts[kind], 1, __ATOMIC_SEQ_CST);
    int is_chosen = control->kind == (uint64_t)kind + 1 && number == control->number;
    if (is_chosen && control->moment == FULL) control->fired = 1;
    if (is_chosen && control->moment == BEFORE) strike();
    return is_chosen && control->moment != FULL;
}

static long no_space(void) {
    errno = ENOSPC;
    return -1;
}

#define AROUND(watched, kind, takes_space, call)           \
    do {                                                   \
        int seen = (watched), chosen = seen ? enter(kind) : 0; \
        if (seen && (takes_space) && is_full()) return no_space(); \
        long result = (call);                              \
        if (chosen) strike();                              \
        return result;                                     \
    } while (0)

static int creates(int folder, const char *path, int flags) {
    int kept = errno, is_new = flags & O_CREAT && syscall(SYS_faccessat, folder, path, F_OK);
    errno = kept;
    return is_new;
}

static long open_at(int folder, const char *path, int flags, mode_t mode) {
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT);
    AROUND(writes && watches_path(folder, path), OPEN, creates(folder, path, flags), syscall(SYS_openat, folder, path, flags, mode));
}

#define MODE_OF(flags, mode)                                     \
    mode_t mode = 0;                                             \
    if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) { \
        va_list rest;                                            \
        va_start(rest, flags);                                   \
        mode = va_arg(rest, mode_t);                             \
        va_end(rest);                                            \
    }

int open(const char *path, int flags, ...) { MODE_OF(flags, mode) return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE_OF(flags, mode) return open_at(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE_OF(flags, mode) return open_at(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE_OF(flags, mode) return open_at(folder, path, flags, mode); }

static FILE *open_stream(const char *name, const char *path, const char *how) {
    FILE *(*real)(const char *, const char *) = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, name);
    int seen = strpbrk(how, "wa+") && watches_path(AT_FDCWD, path), chosen = seen ? enter(OPEN) : 0;
    if (seen && is_full() && creates(AT_FDCWD, path, *how == 'r' ? 0 : O_CREAT)) return no_space(), NULL;
    FILE *stream = real(path, how);
    if (chosen) strike();
    return stream;
}
FILE *fopen(const char *path, const char *how) { return open_stream("fopen", path, how); }
FILE *fopen64(const char *path, const char *how) { return open_stream("fopen64", path, how); }

ssize_t write(int file, const void *bytes, size_t size) {
    if (!watches_file(file)) return syscall(SYS_write, file, bytes, size);
    int chosen = enter(WRITE);
    if (is_full()) return no_space();
    ssize_t written = syscall(SYS_write, file, bytes, chosen && control->moment == HALF ? size / 2 : size);
    if (chosen) strike();
    return written;
}
ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t at) {
    AROUND(watches_file(file), WRITE, 1, syscall(SYS_pwrite64, file, bytes, size, at));
}
ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) { return pwrite64(file, bytes, size, at); }
ssize_t writev(int file, const struct iovec *parts, int number) {
    AROUND(watches_file(file), WRITE, 1, syscall(SYS_writev, file, parts, number));
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
    AROUND(watches_file(to), WRITE, 1, syscall(SYS_sendfile, to, from, at, size));
}
ssize_t sendfile(int to, int from, off_t *at, size_t size) { return sendfile64(to, from, at, size); }
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *there, size_t size, unsigned flags) {
    AROUND(watches_file(to), WRITE, 1, syscall(SYS_copy_file_range, from, at, to, there, size, flags));
}

int fsync(int file) { AROUND(watches_file(file), FSYNC, 0, syscall(SYS_fsync, file)); }
int fdatasync(int file) { AROUND(watches_file(file), FSYNC, 0, syscall(SYS_fdatasync, file)); }
int ftruncate64(int file, off64_t size) { AROUND(watches_file(file), TRUNCATE, size > 0, syscall(SYS_ftruncate, file, size)); }
int ftruncate(int file, off_t size) { return ftruncate64(file, size); }

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    AROUND(watches_path(to, new), RENAME, 0, syscall(SYS_renameat2, from, old, to, new, flags));
}
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int folder, const char *path, int flags) {
    AROUND(watches_path(folder, path), UNLINK, 0, syscall(SYS_unlinkat, folder, path, flags));
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
    AROUND(watches_path(folder, path), MKDIR, 1, syscall(SYS_mkdirat, folder, path, mode));
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
    AROUND(watches_path(to, new), LINK, 1, syscall(SYS_linkat, from, old, to, new, flags));
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }
int symlinkat(const char *old, int to, const char *new) {
    AROUND(watches_path(to, new), LINK, 1, syscall(SYS_symlinkat, old, to, new));
}
int symlink(const char *old, const char *new) { return symlinkat(old, AT_FDCWD, new); }
