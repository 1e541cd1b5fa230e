// NCCL for ranks on one host: what torch's process group calls for FSDP2, over a piece of shared memory.
//
// Each collective is one operation of its stream. The ranks meet in shared memory, and hand on a few MiB at a time.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

extern "C" {
void* sim_touchable(void* address);
int sim_enqueue(void* stream, const char* what, const uintptr_t* begins, const size_t* bytes, const int* writes, int num,
                void (*run)(void*), void (*drop)(void*), void* data);
}

namespace {

constexpr size_t kSlotBytes = 1 << 20;
constexpr int kMaxRanks = 8;
enum Type { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kHalf, kFloat, kDouble, kBfloat16, kNumTypes };
enum Reduction { kSum, kProd, kMax, kMin, kAvg };

struct Shared {
  std::atomic<int> arrived, round;
  alignas(64) char slots[kMaxRanks][kSlotBytes];
};

struct Comm {
  int rank = 0, size = 0;
  Shared* shared = nullptr;
  std::atomic<bool> is_aborted{false};
  // Collectives of one communicator run in the order of their calls, whatever their streams.
  std::atomic<long> num_called{0}, num_done{0};

  // Returns when all ranks have come here.
  void meet() {
    const int round = shared->round;
    if (shared->arrived.fetch_add(1) + 1 == size) {
      shared->arrived = 0;
      shared->round = round + 1;
      return;
    }
    while (shared->round == round && !is_aborted) sched_yield();
  }
};

size_t bytes_of(int type) {
  static const size_t sizes[kNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type < kNumTypes ? sizes[type] : 1;
}

float from_bfloat16(uint16_t bits) {
  const uint32_t whole = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &whole, 4);
  return value;
}

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

double number(const char* at, int type, size_t i) {
  switch (type) {
    case kInt8: return reinterpret_cast<const int8_t*>(at)[i];
    case kUint8: return reinterpret_cast<const uint8_t*>(at)[i];
    case kInt32: return reinterpret_cast<const int32_t*>(at)[i];
    case kUint32: return reinterpret_cast<const uint32_t*>(at)[i];
    case kInt64: return static_cast<double>(reinterpret_cast<const int64_t*>(at)[i]);
    case kUint64: return static_cast<double>(reinterpret_cast<const uint64_t*>(at)[i]);
    case kHalf: return static_cast<double>(reinterpret_cast<const _Float16*>(at)[i]);
    case kFloat: return reinterpret_cast<const float*>(at)[i];
    case kDouble: return reinterpret_cast<const double*>(at)[i];
    default: return from_bfloat16(reinterpret_cast<const uint16_t*>(at)[i]);
  }
}

void put(char* at, int type, size_t i, double value) {
  switch (type) {
    case kInt8: reinterpret_cast<int8_t*>(at)[i] = static_cast<int8_t>(value); break;
    case kUint8: reinterpret_cast<uint8_t*>(at)[i] = static_cast<uint8_t>(value); break;
    case kInt32: reinterpret_cast<int32_t*>(at)[i] = static_cast<int32_t>(value); break;
    case kUint32: reinterpret_cast<uint32_t*>(at)[i] = static_cast<uint32_t>(value); break;
    case kInt64: reinterpret_cast<int64_t*>(at)[i] = static_cast<int64_t>(value); break;
    case kUint64: reinterpret_cast<uint64_t*>(at)[i] = static_cast<uint64_t>(value); break;
    case kHalf: reinterpret_cast<_Float16*>(at)[i] = static_cast<_Float16>(value); break;
    case kFloat: reinterpret_cast<float*>(at)[i] = static_cast<float>(value); break;
    case kDouble: reinterpret_cast<double*>(at)[i] = value; break;
    default: reinterpret_cast<uint16_t*>(at)[i] = to_bfloat16(static_cast<float>(value));
  }
}

// Reduce what the slots of all ranks have into `out`.
void reduce(Comm& comm, char* out, size_t bytes, int type, int how) {
  for (size_t i = 0; i < bytes / bytes_of(type); ++i) {
    double value = number(comm.shared->slots[0], type, i);
    for (int rank = 1; rank < comm.size; ++rank) {
      const double other = number(comm.shared->slots[rank], type, i);
      value = how == kProd ? value * other : how == kMax ? std::max(value, other) : how == kMin ? std::min(value, other) : value + other;
    }
    put(out, type, i, how == kAvg ? value / comm.size : value);
  }
}

using Body = std::function<void()>;

int enqueue(const char* what, Comm* comm, const void* from, size_t from_bytes, void* to, size_t to_bytes, void* stream,
            Body body) {
  const uintptr_t begins[] = {reinterpret_cast<uintptr_t>(from), reinterpret_cast<uintptr_t>(to)};
  const size_t bytes[] = {from_bytes, to_bytes};
  const int writes[] = {0, 1};
  return sim_enqueue(
             stream, what, begins, bytes, writes, 2, [](void* given) { (*static_cast<Body*>(given))(); },
             [](void* given) { delete static_cast<Body*>(given); }, new Body([comm, turn = comm->num_called++, body = std::move(body)] {
               while (comm->num_done != turn && !comm->is_aborted) sched_yield();
               body();
               ++comm->num_done;
             }))
             ? 1
             : 0;
}

template <class F>
void in_parts(size_t bytes, const F& part) {
  for (size_t at = 0; at < bytes; at += kSlotBytes) part(at, std::min(kSlotBytes, bytes - at));
}

const char* of(const void* address) { return static_cast<const char*>(sim_touchable(const_cast<void*>(address))); }
char* of(void* address) { return static_cast<char*>(sim_touchable(address)); }

}  // namespace

extern "C" {

struct ncclUniqueId {
  char internal[128];
};

int ncclGetVersion(int* version) {
  *version = 22800;
  return 0;
}

int ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  FILE* random = fopen("/dev/urandom", "rb");
  unsigned long long bits = 0;
  if (!random || fread(&bits, sizeof bits, 1, random) != 1) return 2;
  fclose(random);
  snprintf(id->internal, sizeof id->internal, "/simulated-nccl-%016llx", bits);
  return 0;
}

int ncclCommInitRankConfig(Comm** made, int size, ncclUniqueId id, int rank, void*) {
  if (size > kMaxRanks) return 4;
  const int file = shm_open(id.internal, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared))) return 2;
  void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return 2;
  Comm* comm = new Comm;
  comm->rank = rank;
  comm->size = size;
  comm->shared = static_cast<Shared*>(at);
  comm->meet();
  if (rank == 0) shm_unlink(id.internal);
  *made = comm;
  return 0;
}

int ncclCommInitRank(Comm** made, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}

int ncclCommAbort(Comm* comm) {
  comm->is_aborted = true;
  return 0;
}

int ncclCommFinalize(Comm*) { return 0; }
int ncclCommDestroy(Comm*) { return 0; }
int ncclGroupStart() { return 0; }
int ncclGroupEnd() { return 0; }

// Only makes it faster.
int ncclCommRegister(Comm* comm, void*, size_t, void** handle) {
  *handle = comm;
  return 0;
}
int ncclCommDeregister(Comm*, void*) { return 0; }

const char* ncclGetErrorString(int) { return "an error of the simulated NCCL"; }
const char* ncclGetLastError(Comm*) { return ""; }

int ncclCommGetAsyncError(Comm*, int* error) {
  *error = 0;
  return 0;
}

int ncclCommCount(Comm* comm, int* count) {
  *count = comm->size;
  return 0;
}

int ncclCommUserRank(Comm* comm, int* rank) {
  *rank = comm->rank;
  return 0;
}

int ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm, void* stream) {
  const size_t bytes = count * bytes_of(type);
  return enqueue("ncclAllGather", comm, from, bytes, to, bytes * comm->size, stream, [=] {
    in_parts(bytes, [&](size_t at, size_t length) {
      memcpy(comm->shared->slots[comm->rank], of(from) + at, length);
      comm->meet();
      for (int rank = 0; rank < comm->size; ++rank) memcpy(of(to) + rank * bytes + at, comm->shared->slots[rank], length);
      comm->meet();
    });
  });
}

int ncclReduceScatter(const void* from, void* to, size_t count, int type, int how, Comm* comm, void* stream) {
  const size_t bytes = count * bytes_of(type);
  return enqueue("ncclReduceScatter", comm, from, bytes * comm->size, to, bytes, stream, [=] {
    for (int target = 0; target < comm->size; ++target)
      in_parts(bytes, [&](size_t at, size_t length) {
        memcpy(comm->shared->slots[comm->rank], of(from) + target * bytes + at, length);
        comm->meet();
        if (target == comm->rank) reduce(*comm, of(to) + at, length, type, how);
        comm->meet();
      });
  });
}

int ncclAllReduce(const void* from, void* to, size_t count, int type, int how, Comm* comm, void* stream) {
  const size_t bytes = count * bytes_of(type);
  return enqueue("ncclAllReduce", comm, from, bytes, to, bytes, stream, [=] {
    in_parts(bytes, [&](size_t at, size_t length) {
      memcpy(comm->shared->slots[comm->rank], of(from) + at, length);
      comm->meet();
      reduce(*comm, of(to) + at, length, type, how);
      comm->meet();
    });
  });
}

int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Comm* comm, void* stream) {
  const size_t bytes = count * bytes_of(type);
  return enqueue("ncclBroadcast", comm, from, comm->rank == root ? bytes : 0, to, bytes, stream, [=] {
    in_parts(bytes, [&](size_t at, size_t length) {
      if (comm->rank == root) memcpy(comm->shared->slots[root], of(from) + at, length);
      comm->meet();
      memcpy(of(to) + at, comm->shared->slots[root], length);
      comm->meet();
    });
  });
}

int ncclBcast(void* at, size_t count, int type, int root, Comm* comm, void* stream) {
  return ncclBroadcast(at, at, count, type, root, comm, stream);
}

}  // extern "C"
