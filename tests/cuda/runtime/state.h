// The state of the simulated CUDA runtime, and what its files offer each other.
//
// One mutex guards everything, and one condition tells of every change. Ordering is computed when an operation is
// enqueued, by vector clocks, and never from the time at which it runs: a missing wait is reported whatever the timing.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace sim {

constexpr int kMaxDevices = 2;

// --- clocks ---------------------------------------------------------------------------------------------------------

// What an actor (a stream, or a thread of the host) knows of every actor: the number of its operations that come before.
using Clock = std::vector<uint64_t>;

int new_actor(std::string name);
void join(Clock& into, const Clock& other);
uint64_t tick(Clock& clock, int actor);

// A part of memory that an operation reads or writes.
struct Range {
  uintptr_t begin = 0;
  size_t bytes = 0;
  bool writes = false;
};

// Check these accesses of `actor` against all earlier ones to the same memory, report those that it is not ordered
// behind, and note them. Under the mutex.
void access(int actor, const Clock& clock, const std::vector<Range>& ranges, const std::string& what);
// The memory is lent anew, or given back: its history is over. Under the mutex.
void forget(uintptr_t begin, size_t bytes);
void report(const std::string& text);

// --- streams --------------------------------------------------------------------------------------------------------

struct Device;
struct Stream;
struct Capture;

struct Op {
  std::function<void()> run;
  std::vector<std::shared_ptr<Op>> behind;
  std::vector<Range> ranges;
  std::string what;
  Clock clock;
  bool is_done = false;
  double seconds = 0;  // when it was done
};
using OpPtr = std::shared_ptr<Op>;

struct Stream {
  Device* device = nullptr;
  int actor = 0;
  unsigned flags = 0;
  int priority = 0;
  bool is_legacy = false;
  bool has_worker = false;
  bool is_gone = false;
  int holds = 0;  // of tests
  Clock clock;
  std::deque<OpPtr> queue;
  OpPtr last;
  Capture* capture = nullptr;
  bool is_blocking() const { return !(flags & cudaStreamNonBlocking); }
};

struct Event {
  unsigned flags = 0;
  Device* device = nullptr;
  OpPtr op;                    // of the last record; null before the first
  Capture* capture = nullptr;  // in which it was last recorded
};

struct Capture {
  unsigned long long id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  int thread = 0;  // the actor of the thread that has begun it
  Stream* origin = nullptr;
  bool is_broken = false;
  std::vector<OpPtr> ops;
};

struct Graph {
  std::vector<OpPtr> ops;
};

struct Device {
  int index = 0;
  bool has_context = false;
  cudaError_t sticky = cudaSuccess;
  Stream* legacy = nullptr;
  std::vector<Stream*> streams;
  // Memory: the same pages at two addresses, of which the one that torch sees cannot be touched by the host.
  uintptr_t begin = 0, alias = 0;
  size_t bytes = 0, lent_bytes = 0, limit_bytes = 0;
  std::map<uintptr_t, size_t> lent, free;
};

extern std::mutex& mutex;
extern std::condition_variable& changed;
extern Device* devices;
int num_devices();

// What belongs to a thread of the host.
struct Thread {
  int actor = 0;
  Clock clock;
  int device = 0;
  cudaError_t last = cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::vector<CUcontext> contexts;  // pushed by the driver's calls
  std::map<int, Stream*> default_streams;
  bool is_worker = false;
};
Thread& here();
extern bool is_forked;
extern thread_local bool is_starting_worker;  // which holds the mutex

using Lock = std::unique_lock<std::mutex>;

Stream* stream_of(cudaStream_t handle, cudaError_t& error);
Stream* new_stream(Device& device, unsigned flags, int priority);
// Enqueue an operation, or note it in the capture of the stream. Under the mutex.
cudaError_t enqueue(Stream& stream, std::string what, std::vector<Range> ranges, std::function<void()> run,
                    OpPtr* made = nullptr, std::vector<OpPtr> behind = {});
// Wait until the operation is done, and know what it knew. Under the mutex, which is released meanwhile.
cudaError_t wait_for(Lock& lock, Device& device, const OpPtr& op);
cudaError_t wait_for_all(Lock& lock, Device& device);
// An error if the thread may not make this call because of a capture, which then is broken.
cudaError_t prohibited();
void break_device(Device& device, cudaError_t code);
double now();

// --- memory ---------------------------------------------------------------------------------------------------------

enum class Place { kDevice, kLocked, kPageable };
struct Where {
  Place place = Place::kPageable;
  Device* device = nullptr;
  bool is_valid = true;  // all of it is in one allocation, or in one registration
};
Where where(uintptr_t begin, size_t bytes);
// The address at which the runtime's own threads may touch memory.
void* touchable(uintptr_t address);
cudaError_t copy(Lock& lock, void* to, const void* from, size_t bytes, Stream& stream, bool blocks, const char* what);
cudaError_t fill(Lock& lock, void* at, int value, size_t bytes, Stream& stream, bool blocks);
cudaError_t lend(Device& device, size_t bytes, void** at);
cudaError_t take_back(Lock& lock, void* at);
cudaError_t lock_pages(uintptr_t begin, size_t bytes);
cudaError_t unlock_pages(uintptr_t begin);
bool is_locked(uintptr_t begin, size_t bytes);
void set_up_memory(Device& device);
// A thread of the host reads or writes page-locked memory by itself.
void touch_by_host(uintptr_t begin, size_t bytes, bool writes, const char* what);
bool may_be_locked(uintptr_t begin, size_t bytes);  // without the mutex

// --- calls ----------------------------------------------------------------------------------------------------------

void begin();  // make the devices, at the first call
// Whether a call is to be refused, or fails because of a broken device, or in a forked child.
cudaError_t admit(const char* call, bool needs_device = true, bool is_of_driver = false);
cudaError_t failed(cudaError_t code);
Device& current();
Device& use();  // the current one, which has a context from now on

}  // namespace sim
