// Memory of the devices and of the host: what is lent, what is page-locked, and copies between them.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace sim {
namespace {

constexpr size_t kAlignment = 512;
constexpr int kPoison = 0xDB;

struct Locked {
  size_t bytes;
  bool is_ours;  // by cudaHostAlloc
};
auto& locked = *new std::map<uintptr_t, Locked>;
std::atomic<uintptr_t> first_locked{UINTPTR_MAX}, last_locked{0};

size_t device_bytes() {
  const char* text = getenv("SIM_CUDA_BYTES");
  return text ? strtoull(text, nullptr, 10) : size_t{2} << 30;
}

size_t rounded(size_t bytes) { return (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

void set_up_memory(Device& device) {
  device.bytes = device.limit_bytes = device_bytes();
  const int fd = memfd_create("simulated-device", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(device.bytes))) abort();
  void* begin = mmap(nullptr, device.bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  void* alias = mmap(nullptr, device.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (begin == MAP_FAILED || alias == MAP_FAILED) abort();
  close(fd);
  device.begin = reinterpret_cast<uintptr_t>(begin);
  device.alias = reinterpret_cast<uintptr_t>(alias);
  device.free[device.begin] = device.bytes;
}

Where where(uintptr_t begin, size_t bytes) {
  Where found;
  for (int i = 0; i < kMaxDevices; ++i) {
    Device& device = devices[i];
    if (begin < device.begin || begin >= device.begin + device.bytes) continue;
    found.place = Place::kDevice;
    found.device = &device;
    auto it = device.lent.upper_bound(begin);
    found.is_valid = it != device.lent.begin() && (--it, begin + bytes <= it->first + it->second);
    return found;
  }
  auto after = locked.upper_bound(begin);
  if (after != locked.begin()) {
    auto it = std::prev(after);
    if (begin < it->first + it->second.bytes) {
      found.place = Place::kLocked;
      found.is_valid = begin + bytes <= it->first + it->second.bytes;
      return found;
    }
  }
  // It begins in ordinary memory: an error if it goes on into a registration.
  found.is_valid = after == locked.end() || begin + bytes <= after->first;
  return found;
}

void* touchable(uintptr_t address) {
  for (int i = 0; i < kMaxDevices; ++i) {
    const Device& device = devices[i];
    if (address >= device.begin && address < device.begin + device.bytes)
      return reinterpret_cast<void*>(device.alias + (address - device.begin));
  }
  return reinterpret_cast<void*>(address);
}

cudaError_t lend(Device& device, size_t bytes, void** at) {
  const size_t size = rounded(bytes);
  *at = nullptr;
  if (device.lent_bytes + size > device.limit_bytes) return cudaErrorMemoryAllocation;
  for (auto it = device.free.begin(); it != device.free.end(); ++it) {
    if (it->second < size) continue;
    const uintptr_t begin = it->first, left = it->second - size;
    device.free.erase(it);
    if (left) device.free[begin + size] = left;
    device.lent[begin] = size;
    device.lent_bytes += size;
    memset(touchable(begin), kPoison, size);
    forget(begin, size);
    *at = reinterpret_cast<void*>(begin);
    return cudaSuccess;
  }
  return cudaErrorMemoryAllocation;
}

cudaError_t take_back(Lock& lock, void* at) {
  if (!at) return cudaSuccess;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at);
  const Where found = where(begin, 1);
  if (found.place != Place::kDevice || !found.device->lent.count(begin)) return cudaErrorInvalidValue;
  Device& device = *found.device;
  if (cudaError_t error = wait_for_all(lock, device)) return error;
  size_t size = device.lent[begin];
  device.lent.erase(begin);
  device.lent_bytes -= size;
  madvise(touchable(begin), size, MADV_REMOVE);
  forget(begin, size);
  uintptr_t first = begin;
  auto next = device.free.lower_bound(begin);
  if (next != device.free.end() && next->first == begin + size) {
    size += next->second;
    next = device.free.erase(next);
  }
  if (next != device.free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == first) {
      first = before->first;
      size += before->second;
      device.free.erase(before);
    }
  }
  device.free[first] = size;
  return cudaSuccess;
}

// --- the host -------------------------------------------------------------------------------------------------------

cudaError_t lock_pages(uintptr_t begin, size_t bytes) {
  if (!begin || !bytes) return cudaErrorInvalidValue;
  auto after = locked.lower_bound(begin);
  if (after != locked.end() && after->first < begin + bytes) return cudaErrorHostMemoryAlreadyRegistered;
  if (after != locked.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second.bytes > begin) return cudaErrorHostMemoryAlreadyRegistered;
  }
  locked[begin] = {bytes, false};
  first_locked = std::min<uintptr_t>(first_locked, begin);
  last_locked = std::max<uintptr_t>(last_locked, begin + bytes);
  return cudaSuccess;
}

// The memory is the host's alone from now on: every copy to or from it must have ended, and this thread must know it.
cudaError_t unlock_pages(uintptr_t begin) {
  auto it = locked.find(begin);
  if (it == locked.end()) return cudaErrorHostMemoryNotRegistered;
  touch_by_host(begin, it->second.bytes, true, "cudaHostUnregister");
  forget(begin, it->second.bytes);
  locked.erase(it);
  return cudaSuccess;
}

bool is_locked(uintptr_t begin, size_t bytes) {
  for (const auto& [at, one] : locked)
    if (at < begin + bytes && begin < at + one.bytes) return true;
  return false;
}

bool may_be_locked(uintptr_t begin, size_t bytes) { return begin < last_locked && begin + bytes > first_locked; }

void touch_by_host(uintptr_t begin, size_t bytes, bool writes, const char* what) {
  Thread& thread = here();
  tick(thread.clock, thread.actor);
  access(thread.actor, thread.clock, {{begin, bytes, writes}}, what);
}

// --- copies ---------------------------------------------------------------------------------------------------------

cudaError_t copy(Lock& lock, void* to, const void* from, size_t bytes, Stream& stream, bool blocks, const char* what) {
  if (!bytes) return cudaSuccess;
  const uintptr_t target = reinterpret_cast<uintptr_t>(to), source = reinterpret_cast<uintptr_t>(from);
  const Where there = where(target, bytes), here_ = where(source, bytes);
  if (!there.is_valid || !here_.is_valid) return cudaErrorInvalidValue;
  const bool is_pageable = there.place == Place::kPageable || here_.place == Place::kPageable;
  if (stream.capture && (is_pageable || blocks)) {
    stream.capture->is_broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  std::vector<Range> ranges;
  if (here_.place != Place::kPageable) ranges.push_back({source, bytes, false});
  if (there.place != Place::kPageable) ranges.push_back({target, bytes, true});
  void* into = touchable(target);
  const void* out_of = touchable(source);
  OpPtr op;
  if (cudaError_t error = enqueue(stream, what, std::move(ranges), [=] { memmove(into, out_of, bytes); }, &op)) return error;
  return is_pageable || blocks ? wait_for(lock, *stream.device, op) : cudaSuccess;
}

cudaError_t fill(Lock& lock, void* at, int value, size_t bytes, Stream& stream, bool blocks) {
  if (!bytes) return cudaSuccess;
  const uintptr_t target = reinterpret_cast<uintptr_t>(at);
  const Where there = where(target, bytes);
  if (!there.is_valid || there.place == Place::kPageable) return cudaErrorInvalidValue;
  void* into = touchable(target);
  OpPtr op;
  if (cudaError_t error =
          enqueue(stream, "cudaMemset", {{target, bytes, true}}, [=] { memset(into, value, bytes); }, &op))
    return error;
  return blocks ? wait_for(lock, *stream.device, op) : cudaSuccess;
}

}  // namespace sim

using namespace sim;

#define ENTER(call)                                     \
  if (cudaError_t refused = admit(call)) return refused; \
  Lock lock(sim::mutex)

extern "C" {

void* sim_touchable(void* address) { return touchable(reinterpret_cast<uintptr_t>(address)); }

// Have a device lend this many more bytes; -1: as many as it has.
void sim_leave_free(int device, long bytes) {
  begin();
  Lock lock(sim::mutex);
  Device& one = devices[device];
  one.limit_bytes = bytes < 0 ? one.bytes : one.lent_bytes + static_cast<size_t>(bytes);
}

int sim_num_locked() {
  Lock lock(sim::mutex);
  int num = 0;
  for (const auto& [at, one] : locked) num += !one.is_ours;
  return num;
}

cudaError_t cudaMalloc(void** at, size_t bytes) {
  ENTER("cudaMalloc");
  if (cudaError_t error = prohibited()) return failed(error);
  return failed(lend(use(), bytes, at));
}

cudaError_t cudaFree(void* at) {
  ENTER("cudaFree");
  if (cudaError_t error = prohibited()) return failed(error);
  use();
  return failed(take_back(lock, at));
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ENTER("cudaMemGetInfo");
  const Device& device = use();
  *free = device.limit_bytes > device.lent_bytes ? device.limit_bytes - device.lent_bytes : 0;
  *total = device.bytes;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  ENTER("cudaHostAlloc");
  if (cudaError_t error = prohibited()) return failed(error);
  use();
  *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*at == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  lock_pages(reinterpret_cast<uintptr_t>(*at), bytes);
  locked[reinterpret_cast<uintptr_t>(*at)].is_ours = true;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* at) {
  ENTER("cudaFreeHost");
  if (cudaError_t error = prohibited()) return failed(error);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(at);
  if (!at) return cudaSuccess;
  for (int i = 0; i < num_devices(); ++i)
    if (cudaError_t error = wait_for_all(lock, devices[i])) return failed(error);
  auto it = locked.find(begin);
  if (it == locked.end()) return failed(cudaErrorInvalidValue);
  const size_t bytes = it->second.bytes;
  unlock_pages(begin);
  lock.unlock();
  munmap(at, bytes);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  ENTER("cudaHostRegister");
  if (cudaError_t error = prohibited()) return failed(error);
  use();
  return failed(lock_pages(reinterpret_cast<uintptr_t>(at), bytes));
}

cudaError_t cudaHostUnregister(void* at) {
  ENTER("cudaHostUnregister");
  if (cudaError_t error = prohibited()) return failed(error);
  return failed(unlock_pages(reinterpret_cast<uintptr_t>(at)));
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
  ENTER("cudaMemcpyAsync");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  return failed(copy(lock, to, from, bytes, *stream, false, "cudaMemcpyAsync"));
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t handle) {
  ENTER("cudaMemcpyPeerAsync");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  return failed(copy(lock, to, from, bytes, *stream, false, "cudaMemcpyPeerAsync"));
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  ENTER("cudaMemcpy");
  if (cudaError_t error = prohibited()) return failed(error);
  return failed(copy(lock, to, from, bytes, *use().legacy, true, "cudaMemcpy"));
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t handle) {
  ENTER("cudaMemcpy2DAsync");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  for (size_t row = 0; row < height; ++row)
    if ((error = copy(lock, static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
                      width, *stream, false, "cudaMemcpy2DAsync")))
      return failed(error);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t handle) {
  ENTER("cudaMemsetAsync");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  return failed(fill(lock, at, value, bytes, *stream, false));
}

cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  ENTER("cudaMemset");
  return failed(fill(lock, at, value, bytes, *use().legacy, true));
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* about, const void* at) {
  ENTER("cudaPointerGetAttributes");
  const Where found = where(reinterpret_cast<uintptr_t>(at), 1);
  *about = {};
  about->device = -2;  // as CUDA has it for ordinary memory
  if (found.place == Place::kDevice) {
    about->type = cudaMemoryTypeDevice;
    about->device = found.device->index;
    about->devicePointer = const_cast<void*>(at);
  } else if (found.place == Place::kLocked) {
    about->type = cudaMemoryTypeHost;
    about->device = here().device;
    about->devicePointer = about->hostPointer = const_cast<void*>(at);
  }
  return cudaSuccess;
}

}  // extern "C"
