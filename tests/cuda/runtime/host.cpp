// Calls of the C library that tell what the host does: it hands over from thread to thread, unmaps memory, writes files.
//
// The library is preloaded, so that these take the place of the C library's. A lock of Python is a semaphore (until
// Python 3.13): whoever takes it knows all that was known to the thread that has released it.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstring>

#include <unordered_map>

#include "state.h"

namespace {

template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

auto& semaphores = *new std::unordered_map<const void*, sim::Clock>;

bool is_in_use() { return sim::devices && !sim::is_forked; }

void taken(const sem_t* semaphore) {
  if (!is_in_use()) return;
  sim::Lock lock(sim::mutex);
  auto it = semaphores.find(semaphore);
  if (it != semaphores.end()) sim::join(sim::here().clock, it->second);
}

void read_by_host(const void* from, size_t bytes, const char* what) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from);
  if (!is_in_use() || !bytes || !sim::may_be_locked(begin, bytes)) return;
  sim::Lock lock(sim::mutex);
  if (sim::is_locked(begin, bytes)) sim::touch_by_host(begin, bytes, false, what);
}

// Whether code is that of libc10_cuda, which has the allocator.
bool is_of_allocator(const void* code) {
  static uintptr_t begin = 0, end = 0;
  if (!end) {
    dl_iterate_phdr(
        [](dl_phdr_info* about, size_t, void*) {
          if (!strstr(about->dlpi_name, "libc10_cuda.so")) return 0;
          for (int i = 0; i < about->dlpi_phnum; ++i)
            if (about->dlpi_phdr[i].p_type == PT_LOAD && about->dlpi_phdr[i].p_flags & PF_X) {
              begin = about->dlpi_addr + about->dlpi_phdr[i].p_vaddr;
              end = begin + about->dlpi_phdr[i].p_memsz;
            }
          return 1;
        },
        nullptr);
    if (!end) end = 1;
  }
  const uintptr_t at = reinterpret_cast<uintptr_t>(code);
  return begin <= at && at < end;
}

struct Start {
  void* (*run)(void*);
  void* data;
  sim::Clock clock;
};

void* started(void* given) {
  Start* start = static_cast<Start*>(given);
  const Start what = *start;
  delete start;
  if (is_in_use()) {
    sim::Lock lock(sim::mutex);
    sim::join(sim::here().clock, what.clock);
  }
  return what.run(what.data);
}

}  // namespace

extern "C" {

// What Python hands over without a lock: from who publishes under this key to who observes it afterwards.
void sim_publish(uintptr_t key) {
  if (!is_in_use()) return;
  sim::Lock lock(sim::mutex);
  sim::join(semaphores[reinterpret_cast<void*>(key)], sim::here().clock);
}

void sim_observe(uintptr_t key) { taken(reinterpret_cast<sem_t*>(key)); }

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* data) noexcept {
  static auto create = next<int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  if (!is_in_use() || sim::is_starting_worker) return create(thread, attributes, run, data);
  Start* start = new Start{run, data, {}};
  {
    sim::Lock lock(sim::mutex);
    start->clock = sim::here().clock;
  }
  return create(thread, attributes, started, start);
}

int sem_post(sem_t* semaphore) noexcept {
  static auto post = next<int (*)(sem_t*)>("sem_post");
  if (is_in_use()) {
    sim::Lock lock(sim::mutex);
    sim::join(semaphores[semaphore], sim::here().clock);
  }
  return post(semaphore);
}

int sem_destroy(sem_t* semaphore) noexcept {
  static auto destroy = next<int (*)(sem_t*)>("sem_destroy");
  if (is_in_use()) {
    sim::Lock lock(sim::mutex);
    semaphores.erase(semaphore);
  }
  return destroy(semaphore);
}

int sem_wait(sem_t* semaphore) {
  static auto wait = next<int (*)(sem_t*)>("sem_wait");
  const int result = wait(semaphore);
  if (!result) taken(semaphore);
  return result;
}

int sem_trywait(sem_t* semaphore) noexcept {
  static auto wait = next<int (*)(sem_t*)>("sem_trywait");
  const int result = wait(semaphore);
  if (!result) taken(semaphore);
  return result;
}

int sem_timedwait(sem_t* semaphore, const timespec* until) {
  static auto wait = next<int (*)(sem_t*, const timespec*)>("sem_timedwait");
  const int result = wait(semaphore, until);
  if (!result) taken(semaphore);
  return result;
}

int sem_clockwait(sem_t* semaphore, clockid_t clock, const timespec* until) {
  static auto wait = next<int (*)(sem_t*, clockid_t, const timespec*)>("sem_clockwait");
  const int result = wait(semaphore, clock, until);
  if (!result) taken(semaphore);
  return result;
}

// The allocator of torch hands memory from thread to thread under its lock.
int pthread_mutex_lock(pthread_mutex_t* lock) noexcept {
  static auto call = next<int (*)(pthread_mutex_t*)>("pthread_mutex_lock");
  const int result = call(lock);
  if (!result && is_in_use() && is_of_allocator(__builtin_return_address(0))) taken(reinterpret_cast<sem_t*>(lock));
  return result;
}

int pthread_mutex_unlock(pthread_mutex_t* lock) noexcept {
  static auto call = next<int (*)(pthread_mutex_t*)>("pthread_mutex_unlock");
  if (is_in_use() && is_of_allocator(__builtin_return_address(0))) sim_publish(reinterpret_cast<uintptr_t>(lock));
  return call(lock);
}

int munmap(void* at, size_t bytes) noexcept {
  static auto unmap = next<int (*)(void*, size_t)>("munmap");
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at);
  if (is_in_use() && sim::may_be_locked(begin, bytes)) {
    sim::Lock lock(sim::mutex);
    if (sim::is_locked(begin, bytes)) sim::report("registered memory is unmapped");
  }
  return unmap(at, bytes);
}

ssize_t write(int file, const void* from, size_t bytes) {
  static auto call = next<ssize_t (*)(int, const void*, size_t)>("write");
  read_by_host(from, bytes, "write");
  return call(file, from, bytes);
}

ssize_t pwrite64(int file, const void* from, size_t bytes, off64_t offset) {
  static auto call = next<ssize_t (*)(int, const void*, size_t, off64_t)>("pwrite64");
  read_by_host(from, bytes, "pwrite");
  return call(file, from, bytes, offset);
}

ssize_t writev(int file, const iovec* parts, int num) {
  static auto call = next<ssize_t (*)(int, const iovec*, int)>("writev");
  for (int i = 0; i < num; ++i) read_by_host(parts[i].iov_base, parts[i].iov_len, "writev");
  return call(file, parts, num);
}

ssize_t pwritev64(int file, const iovec* parts, int num, off64_t offset) {
  static auto call = next<ssize_t (*)(int, const iovec*, int, off64_t)>("pwritev64");
  for (int i = 0; i < num; ++i) read_by_host(parts[i].iov_base, parts[i].iov_len, "pwritev");
  return call(file, parts, num, offset);
}

ssize_t pwritev64v2(int file, const iovec* parts, int num, off64_t offset, int flags) {
  static auto call = next<ssize_t (*)(int, const iovec*, int, off64_t, int)>("pwritev64v2");
  for (int i = 0; i < num; ++i) read_by_host(parts[i].iov_base, parts[i].iov_len, "pwritev2");
  return call(file, parts, num, offset, flags);
}

}  // extern "C"
