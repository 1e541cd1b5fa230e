// Streams: queues with a thread each; the legacy default stream; captures.
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "state.h"

namespace sim {

std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
Device* devices = nullptr;
bool is_forked = false;
thread_local bool is_starting_worker = false;

namespace {

auto& captures = *new std::vector<Capture*>;
thread_local Thread* this_thread = nullptr;
auto& threads = *new std::vector<Thread*>;

void work(Stream* stream) {
  Lock lock(mutex);
  here().is_worker = true;
  for (;;) {
    changed.wait(lock, [&] {
      if (stream->queue.empty() || stream->holds > 0) return false;
      const Op& next = *stream->queue.front();
      return stream->device->sticky ||
             std::all_of(next.behind.begin(), next.behind.end(), [](const OpPtr& op) { return op->is_done; });
    });
    OpPtr op = stream->queue.front();
    if (!stream->device->sticky && op->run) {
      lock.unlock();
      op->run();
      lock.lock();
    }
    op->run = nullptr;
    op->behind.clear();
    op->seconds = now();
    op->is_done = true;
    stream->queue.pop_front();
    changed.notify_all();
  }
}

void in_child() {
  if (devices) is_forked = true;
}

void set_up() {
  pthread_atfork(nullptr, nullptr, in_child);
  devices = new Device[kMaxDevices];
  for (int i = 0; i < kMaxDevices; ++i) {
    devices[i].index = i;
    set_up_memory(devices[i]);
    devices[i].legacy = new_stream(devices[i], cudaStreamDefault, 0);
    devices[i].legacy->is_legacy = true;
  }
}

}  // namespace

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int num_devices() {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return kMaxDevices;
  int count = 0;
  for (const char* at = visible; *at; ++at)
    if (*at >= '0' && *at <= '9' && (at == visible || at[-1] == ',')) ++count;
  return std::min(count, kMaxDevices);
}

// Under the mutex, as all below, unless said otherwise.
Thread& here() {
  if (!this_thread) {
    this_thread = new Thread;
    this_thread->actor = new_actor("thread " + std::to_string(threads.size()));
    threads.push_back(this_thread);
  }
  return *this_thread;
}

Stream* new_stream(Device& device, unsigned flags, int priority) {
  Stream* stream = new Stream;
  stream->device = &device;
  stream->flags = flags;
  stream->priority = priority;
  stream->actor = new_actor("cuda:" + std::to_string(device.index) + " stream " + std::to_string(device.streams.size()));
  device.streams.push_back(stream);
  return stream;
}

Stream* stream_of(cudaStream_t handle, cudaError_t& error) {
  error = cudaSuccess;
  if (!handle || handle == cudaStreamLegacy) return use().legacy;
  if (handle == cudaStreamPerThread) {
    Stream*& mine = here().default_streams[here().device];
    if (!mine) mine = new_stream(use(), cudaStreamDefault, 0);
    return mine;
  }
  Stream* stream = reinterpret_cast<Stream*>(handle);
  for (int i = 0; i < kMaxDevices; ++i) {
    auto& known = devices[i].streams;
    if (std::find(known.begin(), known.end(), stream) != known.end() && !stream->is_gone) return stream;
  }
  error = cudaErrorInvalidResourceHandle;
  return nullptr;
}

cudaError_t enqueue(Stream& stream, std::string what, std::vector<Range> ranges, std::function<void()> run,
                    OpPtr* made, std::vector<OpPtr> behind) {
  Device& device = *stream.device;
  if (device.sticky) return device.sticky;
  OpPtr op = std::make_shared<Op>();
  op->what = std::move(what);
  op->ranges = std::move(ranges);
  op->run = std::move(run);
  op->behind = std::move(behind);
  if (made) *made = op;
  if (stream.capture) {
    if (stream.capture->is_broken) return cudaErrorStreamCaptureInvalidated;
    stream.capture->ops.push_back(op);
    return cudaSuccess;
  }
  if (stream.is_legacy) {
    for (Stream* other : device.streams) {
      if (other == &stream || !other->is_blocking()) continue;
      if (other->capture) {
        other->capture->is_broken = true;
        return cudaErrorStreamCaptureImplicit;
      }
      if (other->last) op->behind.push_back(other->last);
      join(stream.clock, other->clock);
    }
  } else if (stream.is_blocking()) {
    if (device.legacy->last) op->behind.push_back(device.legacy->last);
    join(stream.clock, device.legacy->clock);
  }
  Thread& thread = here();
  tick(thread.clock, thread.actor);
  join(stream.clock, thread.clock);
  for (const OpPtr& other : op->behind) join(stream.clock, other->clock);
  tick(stream.clock, stream.actor);
  op->clock = stream.clock;
  access(stream.actor, stream.clock, op->ranges, op->what);
  stream.last = op;
  stream.queue.push_back(op);
  if (!stream.has_worker) {
    stream.has_worker = is_starting_worker = true;
    std::thread(work, &stream).detach();
    is_starting_worker = false;
  }
  changed.notify_all();
  return cudaSuccess;
}

cudaError_t wait_for(Lock& lock, Device& device, const OpPtr& op) {
  if (op) {
    changed.wait(lock, [&] { return op->is_done || device.sticky; });
    join(here().clock, op->clock);
  }
  return device.sticky;
}

cudaError_t wait_for_all(Lock& lock, Device& device) {
  std::vector<Stream*> all = device.streams;
  for (Stream* stream : all)
    if (cudaError_t error = wait_for(lock, device, stream->last)) return error;
  return device.sticky;
}

cudaError_t prohibited() {
  Thread& thread = here();
  if (thread.mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (Capture* capture : captures) {
    const bool is_mine = capture->thread == thread.actor && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool is_global = capture->mode == cudaStreamCaptureModeGlobal && thread.mode == cudaStreamCaptureModeGlobal;
    if (is_mine || is_global) {
      capture->is_broken = true;
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  return cudaSuccess;
}

void break_device(Device& device, cudaError_t code) {
  device.sticky = code;
  changed.notify_all();
}

Device& current() { return devices[here().device]; }

Device& use() {
  Device& device = current();
  device.has_context = true;
  return device;
}

// --- refusals -------------------------------------------------------------------------------------------------------

namespace {

struct Refusal {
  std::string call;
  long after;
  long times;
  cudaError_t code;
};
auto& refusals = *new std::vector<Refusal>;
auto& counts = *new std::map<std::string, long>;

}  // namespace

void begin() {
  Lock lock(mutex);
  if (!devices) set_up();
}

// Takes and releases the mutex: every call begins with it.
cudaError_t admit(const char* call, bool needs_device, bool is_of_driver) {
  if (is_forked) return failed(cudaErrorInitializationError);
  begin();
  Lock lock(mutex);
  ++counts[call];
  ++counts["*"];
  for (Refusal& refusal : refusals) {
    if (refusal.call != call && refusal.call != "*") continue;
    if (refusal.after-- > 0) continue;
    if (refusal.times <= 0) continue;
    --refusal.times;
    return is_of_driver ? refusal.code : here().last = refusal.code;  // only the runtime keeps the last error
  }
  if (needs_device) {
    if (num_devices() == 0) return here().last = cudaErrorNoDevice;
    if (current().sticky) return here().last = current().sticky;
  }
  return cudaSuccess;
}

cudaError_t failed(cudaError_t code) {
  if (code == cudaSuccess) return code;
  if (is_forked) {
    static cudaError_t* last = new cudaError_t;  // no lock may be taken here
    return *last = code;
  }
  here().last = code;
  return code;
}

}  // namespace sim

using namespace sim;

#define ENTER(call)                                     \
  if (cudaError_t refused = admit(call)) return refused; \
  Lock lock(sim::mutex)

extern "C" {

// --- what tests ask -------------------------------------------------------------------------------------------------

// From the call that follows `after` others on, refuse `times` calls of this name ("*": of any) with this code.
void sim_refuse(const char* call, long after, long times, int code) {
  Lock lock(sim::mutex);
  refusals.push_back({call, after, times, static_cast<cudaError_t>(code)});
}

void sim_refuse_nothing() {
  Lock lock(sim::mutex);
  refusals.clear();
}

long sim_num_calls(const char* call) {
  Lock lock(sim::mutex);
  return counts[call];
}

// Stop a stream, or let it go on; 1 is the legacy default stream, and null stands for all of the device.
void sim_hold(int device, void* stream, int by) {
  begin();
  Lock lock(sim::mutex);
  if (stream == cudaStreamLegacy) stream = devices[device].legacy;
  for (Stream* one : devices[device].streams)
    if (!stream || one == stream) one->holds = std::max(0, one->holds + by);
  changed.notify_all();
}

int sim_has_context(int device) {
  Lock lock(sim::mutex);
  return devices && devices[device].has_context;
}

void sim_break(int device, int code) {
  begin();
  Lock lock(sim::mutex);
  break_device(devices[device], static_cast<cudaError_t>(code));
}

int sim_num_pending(int device) {
  begin();
  Lock lock(sim::mutex);
  int pending = 0;
  for (Stream* stream : devices[device].streams) pending += static_cast<int>(stream->queue.size());
  return pending;
}

// An operation of others, such as a kernel of torch's for the host, on the current stream.
int sim_enqueue(void* stream, const char* what, const uintptr_t* begins, const size_t* bytes, const int* writes,
                int num, void (*run)(void*), void (*drop)(void*), void* data) {
  std::shared_ptr<void> kept(data, drop);
  ENTER("kernel");
  cudaError_t error;
  Stream* on = stream_of(static_cast<cudaStream_t>(stream), error);
  if (!on) return failed(error);
  std::vector<Range> ranges;
  for (int i = 0; i < num; ++i) {
    const Where found = where(begins[i], bytes[i]);
    if (bytes[i] && (found.place == Place::kPageable || !found.is_valid)) {
      report(std::string(what) + " touches memory that is not lent");
      break_device(*on->device, cudaErrorIllegalAddress);
      return failed(cudaErrorIllegalAddress);
    }
    ranges.push_back({begins[i], bytes[i], writes[i] != 0});
  }
  return failed(enqueue(*on, what, std::move(ranges), [kept, run] { run(kept.get()); }));
}

void sim_operator_failed(int device, const char* text) {
  Lock lock(sim::mutex);
  report(text);
  break_device(devices[device], cudaErrorAssert);
}

// --- streams --------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
  ENTER("cudaStreamCreate");
  *made = reinterpret_cast<cudaStream_t>(new_stream(use(), flags, priority));
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithPriority(made, cudaStreamDefault, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  ENTER("cudaStreamDestroy");
  cudaError_t error;
  if (Stream* stream = stream_of(handle, error)) stream->is_gone = true;
  return failed(error);
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  ENTER("cudaStreamGetPriority");
  cudaError_t error;
  if (Stream* stream = stream_of(handle, error)) *priority = stream->priority;
  return failed(error);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ENTER("cudaStreamQuery");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  if ((error = prohibited())) return failed(error);
  if (stream->last && !stream->last->is_done) return failed(cudaErrorNotReady);
  if (stream->last) join(here().clock, stream->last->clock);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  ENTER("cudaStreamSynchronize");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  if (stream->capture) {
    stream->capture->is_broken = true;
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  if ((error = prohibited())) return failed(error);
  if (stream->is_legacy)
    for (Stream* other : std::vector<Stream*>(stream->device->streams))
      if (other->is_blocking() && (error = wait_for(lock, *stream->device, other->last))) return failed(error);
  return failed(wait_for(lock, *stream->device, stream->last));
}

cudaError_t cudaDeviceSynchronize() {
  ENTER("cudaDeviceSynchronize");
  if (cudaError_t error = prohibited()) return failed(error);
  return failed(wait_for_all(lock, use()));
}

static cudaError_t follow(Stream& stream, Event& event) {
  if (event.capture && std::find(captures.begin(), captures.end(), event.capture) == captures.end())
    return cudaErrorCapturedEvent;
  if (event.capture && !stream.capture) {  // the stream joins the capture
    stream.capture = event.capture;
    return cudaSuccess;
  }
  if (stream.capture) {
    if (event.op && !event.capture) {  // what is outside of a graph cannot be waited for within
      stream.capture->is_broken = true;
      return cudaErrorStreamCaptureIsolation;
    }
    return cudaSuccess;
  }
  if (!event.op) return cudaSuccess;
  return enqueue(stream, "cudaStreamWaitEvent", {}, nullptr, nullptr, {event.op});
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t which, unsigned) {
  ENTER("cudaStreamWaitEvent");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  return failed(follow(*stream, *reinterpret_cast<Event*>(which)));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t run, void* data) {
  ENTER("cudaLaunchHostFunc");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  return failed(enqueue(*stream, "cudaLaunchHostFunc", {}, [=] { run(data); }));
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t run, void* data, unsigned) {
  ENTER("cudaStreamAddCallback");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  return failed(enqueue(*stream, "cudaStreamAddCallback", {}, [=] { run(handle, cudaSuccess, data); }));
}

// --- events ---------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
  ENTER("cudaEventCreate");
  Event* event = new Event;
  event->flags = flags;
  event->device = &use();
  *made = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t which) {
  ENTER("cudaEventDestroy");
  delete reinterpret_cast<Event*>(which);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t which, cudaStream_t handle, unsigned) {
  ENTER("cudaEventRecord");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  Event& event = *reinterpret_cast<Event*>(which);
  if (event.device != stream->device) return failed(cudaErrorInvalidResourceHandle);
  event.capture = stream->capture;
  return failed(enqueue(*stream, "cudaEventRecord", {}, nullptr, &event.op));
}

cudaError_t cudaEventRecord(cudaEvent_t which, cudaStream_t stream) { return cudaEventRecordWithFlags(which, stream, 0); }

cudaError_t cudaEventQuery(cudaEvent_t which) {
  ENTER("cudaEventQuery");
  Event& event = *reinterpret_cast<Event*>(which);
  if (event.capture) {
    event.capture->is_broken = true;
    return failed(cudaErrorCapturedEvent);
  }
  if (cudaError_t error = prohibited()) return failed(error);
  if (event.device->sticky) return failed(event.device->sticky);
  if (!event.op) return cudaSuccess;
  if (!event.op->is_done) return failed(cudaErrorNotReady);
  join(here().clock, event.op->clock);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t which) {
  ENTER("cudaEventSynchronize");
  Event& event = *reinterpret_cast<Event*>(which);
  if (event.capture) return failed(cudaErrorCapturedEvent);
  if (cudaError_t error = prohibited()) return failed(error);
  OpPtr op = event.op;
  return failed(wait_for(lock, *event.device, op));
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  ENTER("cudaEventElapsedTime");
  Event &begin = *reinterpret_cast<Event*>(first), &end = *reinterpret_cast<Event*>(second);
  if (!begin.op || !end.op || (begin.flags | end.flags) & cudaEventDisableTiming)
    return failed(cudaErrorInvalidResourceHandle);
  if (begin.device->sticky) return failed(begin.device->sticky);
  if (!begin.op->is_done || !end.op->is_done) return failed(cudaErrorNotReady);
  *ms = static_cast<float>(1e3 * (end.op->seconds - begin.op->seconds));
  return cudaSuccess;
}

// --- captures -------------------------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  ENTER("cudaThreadExchangeStreamCaptureMode");
  std::swap(*mode, here().mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  ENTER("cudaStreamBeginCapture");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  if (stream->is_legacy) return failed(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return failed(cudaErrorIllegalState);
  static unsigned long long last_id = 0;
  Capture* capture = new Capture;
  capture->id = ++last_id;
  capture->mode = mode;
  capture->thread = here().actor;
  capture->origin = stream;
  stream->capture = capture;
  captures.push_back(capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  ENTER("cudaStreamEndCapture");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  Capture* capture = stream->capture;
  if (!capture) return failed(cudaErrorIllegalState);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != here().actor)
    return failed(cudaErrorStreamCaptureWrongThread);
  captures.erase(std::find(captures.begin(), captures.end(), capture));
  for (int i = 0; i < kMaxDevices; ++i)
    for (Stream* one : devices[i].streams)
      if (one->capture == capture) one->capture = nullptr;
  *graph = nullptr;
  if (capture->is_broken) return failed(cudaErrorStreamCaptureInvalidated);
  Graph* made = new Graph;
  made->ops = capture->ops;
  *graph = reinterpret_cast<cudaGraph_t>(made);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  ENTER("cudaStreamIsCapturing");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  *status = !stream->capture             ? cudaStreamCaptureStatusNone
            : stream->capture->is_broken ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* num) {
  if (cudaError_t error = cudaStreamIsCapturing(handle, status)) return error;
  Lock lock(sim::mutex);
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (id) *id = stream->capture ? stream->capture->id : 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (num) *num = 0;
  return cudaSuccess;
}

// --- graphs: one sequence, in the order of the capture --------------------------------------------------------------

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  ENTER("cudaGraphInstantiate");
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t which, cudaStream_t handle) {
  ENTER("cudaGraphLaunch");
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  std::vector<OpPtr> ops = reinterpret_cast<Graph*>(which)->ops;
  std::vector<Range> ranges;
  for (const OpPtr& op : ops) ranges.insert(ranges.end(), op->ranges.begin(), op->ranges.end());
  return failed(enqueue(*stream, "cudaGraphLaunch", std::move(ranges), [ops] {
    for (const OpPtr& op : ops)
      if (op->run) op->run();
  }));
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* num) {
  ENTER("cudaGraphGetNodes");
  const auto& ops = reinterpret_cast<Graph*>(graph)->ops;
  if (nodes)
    for (size_t i = 0; i < *num && i < ops.size(); ++i) nodes[i] = reinterpret_cast<cudaGraphNode_t>(ops[i].get());
  *num = ops.size();
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  ENTER("cudaGraphDestroy");
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  ENTER("cudaGraphExecDestroy");
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

}  // extern "C"
