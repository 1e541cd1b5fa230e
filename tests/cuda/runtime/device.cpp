// Devices, errors, kernels, and what torch asks for beside streams and memory.
#include <cstdio>
#include <cstring>

#include "state.h"

using namespace sim;

#define ENTER(call, needs)                                     \
  if (cudaError_t refused = admit(call, needs)) return refused; \
  Lock lock(sim::mutex)

namespace {

auto& kernels = *new std::map<const void*, std::string>;
thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configuration;

cudaError_t refuse(const char* what) {
  report(std::string(what) + " is not simulated");
  fprintf(stderr, "simulated CUDA: %s is not simulated\n", what);
  return failed(cudaErrorNotSupported);
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  ENTER("cudaGetDeviceCount", false);
  *count = num_devices();
  return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  ENTER("cudaGetDevice", false);
  *device = here().device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  ENTER("cudaSetDevice", false);
  if (device < 0 || device >= num_devices()) return failed(cudaErrorInvalidDevice);
  here().device = device;
  use();  // from CUDA 12 on, this makes the context
  return failed(devices[device].sticky);
}

cudaError_t cudaGetLastError() {
  if (is_forked || !devices) return cudaSuccess;
  Lock lock(sim::mutex);
  const cudaError_t last = here().last, sticky = current().sticky;
  here().last = cudaSuccess;
  return sticky ? sticky : last;
}

cudaError_t cudaPeekAtLastError() {
  if (is_forked || !devices) return cudaSuccess;
  Lock lock(sim::mutex);
  return current().sticky ? current().sticky : here().last;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  snprintf(text, static_cast<size_t>(bytes), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = 16; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* about, int device) {
  ENTER("cudaGetDeviceProperties", false);
  if (device < 0 || device >= num_devices()) return failed(cudaErrorInvalidDevice);
  memset(about, 0, sizeof *about);
  strcpy(about->name, "Simulated CUDA device");
  memset(about->uuid.bytes, device + 1, sizeof about->uuid.bytes);
  about->totalGlobalMem = devices[device].bytes;
  about->sharedMemPerBlock = 48 << 10;
  about->regsPerBlock = 65536;
  about->warpSize = 32;
  about->maxThreadsPerBlock = 1024;
  for (int i = 0; i < 3; ++i) {
    about->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    about->maxGridSize[i] = i ? 65535 : 2147483647;
  }
  about->major = 9;
  about->multiProcessorCount = 16;
  about->maxThreadsPerMultiProcessor = 2048;
  about->unifiedAddressing = 1;
  about->pciBusID = device + 1;
  about->canUseHostPointerForRegisteredMem = 1;
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInitializationError: return "cudaErrorInitializationError";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    default: return "cudaErrorOfTheSimulation";
  }
}

const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorInitializationError ? "initialization error" : cudaGetErrorName(code);
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// --- kernels: torch's operators are registered anew, so that none of its own is launched but that which sleeps ------

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* of_host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  kernels[of_host] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** args, size_t, cudaStream_t handle) {
  ENTER("cudaLaunchKernel", true);
  auto it = kernels.find(kernel);
  const std::string name = it == kernels.end() ? "an unknown kernel" : it->second;
  if (name.find("spin_kernel") == std::string::npos) return refuse(("the kernel " + name).c_str());
  cudaError_t error;
  Stream* stream = stream_of(handle, error);
  if (!stream) return failed(error);
  const double seconds = static_cast<double>(*static_cast<int64_t*>(args[0])) / 2e9;
  return failed(enqueue(*stream, "spin_kernel", {}, [seconds] {
    timespec pause{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<time_t>(seconds)) * 1e9)};
    nanosleep(&pause, nullptr);
  }));
}

cudaError_t __cudaGetKernel(void** kernel, const void* of_host) {
  *kernel = const_cast<void*>(of_host);
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(void* kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

}  // extern "C"
