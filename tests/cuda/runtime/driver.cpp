// The driver's calls (libcuda) and those of NVML that torch and async_ckpt make.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#define cuLogsRegisterCallback cuLogsRegisterCallback_of_cuda_h
#define cuLogsUnregisterCallback cuLogsUnregisterCallback_of_cuda_h
#include "state.h"
#undef cuLogsRegisterCallback
#undef cuLogsUnregisterCallback

using namespace sim;

#define ENTER(call)                                                                  \
  if (cudaError_t refused = admit(call, false, true)) return static_cast<CUresult>(refused); \
  Lock lock(sim::mutex)

namespace {

CUcontext handle_of(Device& device) { return reinterpret_cast<CUcontext>(&device); }

Device* device_of(CUcontext context) {
  for (int i = 0; i < kMaxDevices; ++i)
    if (context == handle_of(devices[i])) return &devices[i];
  return nullptr;
}

int not_simulated() {
  fprintf(stderr, "simulated CUDA: a call of the driver that is not simulated\n");
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace

// cuda.h names some of these by macros, and declares two that are never called with arguments that matter here.
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuDevicePrimaryCtxRelease
#undef cuStreamDestroy

extern "C" {

CUresult cuInit(unsigned) {
  ENTER("cuInit");
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = num_devices();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int index) {
  ENTER("cuDeviceGet");
  if (index < 0 || index >= num_devices()) return CUDA_ERROR_INVALID_DEVICE;
  *device = index;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(which), device));
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  ENTER("cuDevicePrimaryCtxGetState");
  *flags = 0;
  *active = devices[device].has_context;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain");
  devices[device].has_context = true;
  *context = handle_of(devices[device]);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) {
  ENTER("cuDevicePrimaryCtxRelease");
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  ENTER("cuCtxPushCurrent");
  Device* device = device_of(context);
  if (!device) return CUDA_ERROR_INVALID_CONTEXT;
  Thread& thread = here();
  thread.contexts.push_back(handle_of(devices[thread.device]));
  thread.device = device->index;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  ENTER("cuCtxPopCurrent");
  Thread& thread = here();
  if (thread.contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = handle_of(devices[thread.device]);
  thread.device = device_of(thread.contexts.back())->index;
  thread.contexts.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  ENTER("cuCtxGetCurrent");
  Device& device = current();
  *context = device.has_context ? handle_of(device) : nullptr;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  ENTER("cuCtxSetCurrent");
  if (Device* device = device_of(context)) here().device = device->index;
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  ENTER("cuStreamCreate");
  *stream = reinterpret_cast<CUstream>(new_stream(use(), flags, 0));
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream) { return static_cast<CUresult>(cudaStreamDestroy(stream)); }

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  ENTER("cuThreadExchangeStreamCaptureMode");
  const cudaStreamCaptureMode before = here().mode;
  here().mode = static_cast<cudaStreamCaptureMode>(*mode);
  *mode = static_cast<CUstreamCaptureMode>(before);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(code));
  return CUDA_SUCCESS;
}

int cuLogsRegisterCallback() { return CUDA_SUCCESS; }
int cuLogsUnregisterCallback() { return CUDA_SUCCESS; }

CUresult cuGetErrorName(CUresult code, const char** text) { return cuGetErrorString(code, text); }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  *found = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*found) *found = dlsym(RTLD_DEFAULT, name);
  if (!*found) *found = reinterpret_cast<void*>(not_simulated);
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- NVML -----------------------------------------------------------------------------------------------------------

int nvmlInit_v2() { return 0; }
int nvmlInit() { return 0; }
int nvmlShutdown() { return 0; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = kMaxDevices;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<uintptr_t>(index + 1));
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = reinterpret_cast<void*>(uintptr_t{1});
  return 0;
}

int nvmlDeviceGetUUID(void* device, char* text, unsigned bytes) {
  snprintf(text, bytes, "GPU-%08lx-0000-0000-0000-000000000000", static_cast<unsigned long>(reinterpret_cast<uintptr_t>(device)));
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDA_VERSION;
  return 0;
}

}  // extern "C"
