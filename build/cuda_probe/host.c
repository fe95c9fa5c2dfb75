/* Host part of the cuda-probe: loads one of its two device images, runs the kernel, gives the numbers back.
 *
 * Memory and device go through the CUDA runtime that this library is linked with (libcudart.so.12), as vLLM's own
 * libraries do; so the runtime is proved too. The image is loaded with the driver's cuModuleLoadDataEx, reached
 * through the runtime: it is in every driver since CUDA 4, hence also under minor-version compatibility with any
 * 12.x driver, it takes exactly the image it is given (SASS without PTX, or PTX without SASS: nothing is left to
 * the driver's choice), and it returns the JIT compiler's own words. cudaLibraryLoadData would need newer
 * drivers and gives no such log.
 *
 * The prototypes stand here because the runtime's wheel lacks headers (crt/) that its own headers include. The ABI
 * is stable within a major version; CUDA's error numbers are shared by runtime and driver. */
#include <stddef.h>

typedef int (*module_load)(void **, const void *, unsigned int, int *, void **);
typedef int (*module_function)(void **, void *, const char *);
typedef int (*launch_kernel)(void *, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
                             unsigned int, unsigned int, void *, void **, void **);

extern int cudaRuntimeGetVersion(int *);
extern int cudaSetDevice(int);
extern int cudaFree(void *);
extern int cudaMalloc(void **, size_t);
extern int cudaMemcpy(void *, const void *, size_t, int);
extern int cudaDeviceSynchronize(void);
extern int cudaGetDriverEntryPointByVersion(const char *, void **, unsigned int, unsigned long long, int *);

/* Two fat binaries, from images.S. */
extern const unsigned char cuda_probe_sass[], cuda_probe_ptx[];

enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, ERROR_LOG = 5, ERROR_LOG_SIZE = 6, THREADS = 128 };
enum { SYMBOL_NOT_FOUND = 500, DRIVER_API = 12000 };

int cuda_probe_runtime_version(void) {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == 0 ? version : 0;
}

static int entry_point(const char *name, void **function) {
  int query = 0;
  const int code = cudaGetDriverEntryPointByVersion(name, function, DRIVER_API, 0, &query);
  if (code != 0) return code;
  return query == 0 && *function != NULL ? 0 : SYMBOL_NOT_FOUND;
}

#define TRY(name, call)              \
  do {                               \
    *stage = name;                   \
    if ((code = (call)) != 0) goto end; \
  } while (0)

/* Computes y = a * x + y over n floats on a device. Returns 0 or a CUDA error number; *stage then names the step.
 * `log` receives the JIT compiler's complaint, if any. */
int cuda_probe_run(int device, int use_ptx, float a, const float *x, float *y, unsigned int n, char *log,
                   unsigned int log_size, const char **stage) {
  int code;
  void *device_x = NULL, *device_y = NULL, *module = NULL, *kernel = NULL;
  module_load load = NULL;
  module_function get_function = NULL;
  launch_kernel launch = NULL;
  const size_t bytes = n * sizeof(float);
  int options[] = {ERROR_LOG, ERROR_LOG_SIZE};
  void *values[] = {log, (void *)(size_t)log_size};
  void *arguments[] = {&a, &device_x, &device_y, &n};

  TRY("cudaSetDevice", cudaSetDevice(device));
  TRY("cudaFree", cudaFree(NULL)); /* makes the context, whatever cudaSetDevice of this runtime left undone */
  TRY("cuModuleLoadDataEx", entry_point("cuModuleLoadDataEx", (void **)&load));
  TRY("cuModuleGetFunction", entry_point("cuModuleGetFunction", (void **)&get_function));
  TRY("cuLaunchKernel", entry_point("cuLaunchKernel", (void **)&launch));
  TRY("load the image", load(&module, use_ptx ? cuda_probe_ptx : cuda_probe_sass, 2, options, values));
  TRY("find the kernel", get_function(&kernel, module, "cuda_probe_axpy"));
  TRY("allocate memory", cudaMalloc(&device_x, bytes));
  TRY("allocate memory", cudaMalloc(&device_y, bytes));
  TRY("copy to the device", cudaMemcpy(device_x, x, bytes, HOST_TO_DEVICE));
  TRY("copy to the device", cudaMemcpy(device_y, y, bytes, HOST_TO_DEVICE));
  TRY("launch the kernel",
      launch(kernel, (n + THREADS - 1) / THREADS, 1, 1, THREADS, 1, 1, 0, NULL, arguments, NULL));
  TRY("wait for the kernel", cudaDeviceSynchronize());
  TRY("copy from the device", cudaMemcpy(y, device_y, bytes, DEVICE_TO_HOST));
  *stage = "done";
end:
  if (device_x != NULL) cudaFree(device_x);
  if (device_y != NULL) cudaFree(device_y);
  return code; /* module and context go with the process, which lives for one call */
}
