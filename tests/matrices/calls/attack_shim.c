/* Calls of libc by which a process changes or reads what lies below one folder: counted, and the n-th of a kind made to fail.

   In: LD_PRELOAD, and attack_arm. Out: the fault, once. Knows nothing of: what the process does.

   Calls that libstdc++ and libc make among themselves do not come by here. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, KILL, STOP, SLOW, SHORT, FIRST_ERRNO = 1000 };

static char below[PATH_MAX];
static size_t below_length;
static char wanted_kind[32];
static long wanted;
static int fault;
static atomic_int is_met;
static int log_fd = -1;
static atomic_int armed;
static atomic_long count;

/* From now on, calls below `folder` count, and the one of this kind and number meets the fault. The kind of each is written to
   `log`, if there is one. */
void attack_arm(const char *folder, const char *kind, long number, int what, int log) {
    strncpy(below, folder, sizeof below - 1);
    strncpy(wanted_kind, kind, sizeof wanted_kind - 1);
    below_length = strlen(below);
    wanted = number;
    fault = what;
    log_fd = log;
    atomic_store(&armed, 1);
}

int attack_is_met(void) { return atomic_load(&is_met); }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_below(const char *path) {
    return strncmp(path, below, below_length) == 0 && (path[below_length] == '/' || path[below_length] == 0);
}

static int fd_below(int fd) {
    char link[64], path[PATH_MAX];
    if (!atomic_load(&armed) || fd < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int at_below(int dir, const char *path) {
    if (!atomic_load(&armed) || !path) return 0;
    if (path[0] == '/') return is_below(path);
    return dir != AT_FDCWD && fd_below(dir);
}

/* Counts a call. Returns the fault that it meets: 0 for none. */
static int met(const char *kind) {
    int before = errno, what = NONE;
    if (log_fd >= 0) dprintf(log_fd, "%s\n", kind);
    if (strcmp(kind, wanted_kind) == 0 && atomic_fetch_add(&count, 1) + 1 == wanted) {
        atomic_store(&is_met, 1);
        what = fault;
    }
    if (what == STOP) kill(getpid(), SIGSTOP);
    if (what == SLOW) usleep(150000);
    errno = before;
    return what == STOP || what == SLOW ? NONE : what;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* For a call that is carried out or not, and nothing between. */
#define WHOLE(counts, name, failure)                                                        \
    if (counts) {                                                                           \
        int what = met(name);                                                               \
        if (what == KILL) die();                                                            \
        if (what >= FIRST_ERRNO) { errno = what - FIRST_ERRNO; return failure; }            \
    }

#define OPEN(name)                                                                          \
    int name(const char *path, int flags, ...) {                                            \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
        WHOLE(at_below(AT_FDCWD, path), (flags & O_CREAT) ? "create" : "open", -1)          \
        return REAL(name)(path, flags, mode);                                               \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                        \
    int name(int dir, const char *path, int flags, ...) {                                   \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
        WHOLE(at_below(dir, path), (flags & O_CREAT) ? "create" : "open", -1)               \
        return REAL(name)(dir, path, flags, mode);                                          \
    }
OPENAT(openat)
OPENAT(openat64)

/* A write that is killed or short has written half. O_DIRECT takes whole pages only: of one page it writes nothing, or all. */
static size_t half_of(int fd, size_t size) {
    int flags = REAL(fcntl)(fd, F_GETFL);
    return flags >= 0 && flags & O_DIRECT ? size / 2 / 4096 * 4096 : size / 2;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (fd_below(fd)) {
        int what = met("write");
        if (what >= FIRST_ERRNO) { errno = what - FIRST_ERRNO; return -1; }
        if (what == KILL || what == SHORT) {
            size_t half = half_of(fd, size);
            ssize_t done = half || what == KILL ? REAL(write)(fd, data, half) : REAL(write)(fd, data, size);
            if (what == KILL) die();
            return done;
        }
    }
    return REAL(write)(fd, data, size);
}

#define PWRITE(name, offset_type)                                                           \
    ssize_t name(int fd, const void *data, size_t size, offset_type at) {                   \
        if (fd_below(fd)) {                                                                 \
            int what = met("write");                                                        \
            if (what >= FIRST_ERRNO) { errno = what - FIRST_ERRNO; return -1; }             \
            if (what == KILL || what == SHORT) {                                            \
                size_t half = half_of(fd, size);                                                \
                ssize_t done = half || what == KILL ? REAL(name)(fd, data, half, at) : REAL(name)(fd, data, size, at); \
                if (what == KILL) die();                                                    \
                return done;                                                                \
            }                                                                               \
        }                                                                                   \
        return REAL(name)(fd, data, size, at);                                              \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define PWRITEV(name, offset_type)                                                          \
    ssize_t name(int fd, const struct iovec *parts, int number, offset_type at) {           \
        WHOLE(fd_below(fd), "write", -1)                                                    \
        return REAL(name)(fd, parts, number, at);                                           \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

#define READ(name, parameters, arguments)                                                   \
    ssize_t name parameters {                                                               \
        WHOLE(fd_below(fd), "read", -1)                                                     \
        return REAL(name) arguments;                                                        \
    }
READ(read, (int fd, void *data, size_t size), (fd, data, size))
READ(pread, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
READ(pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
READ(preadv, (int fd, const struct iovec *parts, int number, off_t at), (fd, parts, number, at))
READ(preadv64, (int fd, const struct iovec *parts, int number, off64_t at), (fd, parts, number, at))

#define OF_FD(kind, name, parameters, arguments)                                            \
    int name parameters {                                                                   \
        WHOLE(fd_below(fd), kind, -1)                                                       \
        return REAL(name) arguments;                                                        \
    }
OF_FD("fsync", fsync, (int fd), (fd))
OF_FD("fsync", fdatasync, (int fd), (fd))
OF_FD("truncate", ftruncate, (int fd, off_t size), (fd, size))
OF_FD("truncate", ftruncate64, (int fd, off64_t size), (fd, size))

/* Closed it is all the same: only an error that the system has kept for it comes out, as over NFS. */
int close(int fd) {
    int what = fd_below(fd) ? met("close") : NONE;
    if (what == KILL) die();
    int failed = REAL(close)(fd);
    if (what >= FIRST_ERRNO) { errno = what - FIRST_ERRNO; return -1; }
    return failed;
}

#define LOCK(name)                                                                          \
    int name(int fd, int what, ...) {                                                       \
        va_list rest; va_start(rest, what); void *more = va_arg(rest, void *); va_end(rest); \
        WHOLE((what == F_SETLK || what == F_SETLKW || what == F_OFD_SETLK) && fd_below(fd), "lock", -1) \
        return REAL(name)(fd, what, more);                                                  \
    }
LOCK(fcntl)
LOCK(fcntl64)

/* These return the error's number. */
#define ALLOCATE(name, offset_type)                                                         \
    int name(int fd, offset_type at, offset_type size) {                                    \
        if (fd_below(fd)) {                                                                 \
            int what = met("allocate");                                                     \
            if (what == KILL) die();                                                        \
            if (what >= FIRST_ERRNO) return what - FIRST_ERRNO;                             \
        }                                                                                   \
        return REAL(name)(fd, at, size);                                                    \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

#define OF_PATH(kind, name, parameters, arguments)                                          \
    int name parameters {                                                                   \
        WHOLE(at_below(AT_FDCWD, path), kind, -1)                                           \
        return REAL(name) arguments;                                                        \
    }
OF_PATH("rename", rename, (const char *path, const char *to), (path, to))
OF_PATH("link", link, (const char *path, const char *to), (path, to))
OF_PATH("unlink", unlink, (const char *path), (path))
OF_PATH("rmdir", rmdir, (const char *path), (path))
OF_PATH("mkdir", mkdir, (const char *path, mode_t mode), (path, mode))

#define OF_DIR(kind, name, parameters, arguments)                                           \
    int name parameters {                                                                   \
        WHOLE(at_below(dir, path), kind, -1)                                                \
        return REAL(name) arguments;                                                        \
    }
OF_DIR("rename", renameat, (int dir, const char *path, int to_dir, const char *to), (dir, path, to_dir, to))
OF_DIR("link", linkat, (int dir, const char *path, int to_dir, const char *to, int flags), (dir, path, to_dir, to, flags))
OF_DIR("unlink", unlinkat, (int dir, const char *path, int flags), (dir, path, flags))
OF_DIR("mkdir", mkdirat, (int dir, const char *path, mode_t mode), (dir, path, mode))
