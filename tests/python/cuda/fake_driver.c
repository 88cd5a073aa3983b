/* A CUDA driver with one device that takes everything and does nothing: it stands in for
 * libcuda.so.1 where a test is about the host alone. The first look at the device's name takes
 * FAKE_DRIVER_SECONDS.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int context;

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorName(int result, const char** text) { return *text = "ERROR", 0; }
int cuGetErrorString(int result, const char** text) { return *text = "of the fake driver", 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char* name, int length, int device) {
  const char* seconds = getenv("FAKE_DRIVER_SECONDS");
  if (seconds != NULL) usleep((useconds_t)(1e6 * atof(seconds)));
  strncpy(name, "a fake", (size_t)length);
  return 0;
}
/* Compute capability 9.0, 227 KiB of shared memory, and so on: numbers of cuda.h. */
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75   ? 9
           : attribute == 76 ? 0
           : attribute == 97 ? 227 * 1024
           : attribute == 81 ? 228 * 1024
                             : 132;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** of, int device) { return *of = &context, 0; }
int cuCtxGetCurrent(void** current) { return *current = &context, 0; }
int cuCtxPushCurrent_v2(void* pushed) { return 0; }
int cuCtxPopCurrent_v2(void** popped) { return *popped = &context, 0; }
int cuModuleLoadData(void** module, const void* image) { return *module = &context, 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  return *function = &context, 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) { return 0; }
int cuLaunchKernelEx(const void* config, void* function, void** arguments, void** extra) {
  return 0;
}
int cuStreamIsCapturing(void* stream, int* status) { return *status = 0, 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return 0; }
int cuStreamSynchronize(void* stream) { return 0; }
int cuMemAllocAsync(void** memory, size_t bytes, void* stream) {
  return (*memory = malloc(bytes)) == NULL, 0;
}
int cuMemFreeAsync(void* memory, void* stream) { return free(memory), 0; }
int cuMemsetD8Async(void* to, unsigned char value, size_t bytes, void* stream) { return 0; }
int cuMemcpyAsync(void* to, const void* from, size_t bytes, void* stream) { return 0; }
