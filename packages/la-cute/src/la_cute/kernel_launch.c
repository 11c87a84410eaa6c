/* How a compiled function launches its kernel: as the driver's function for the current context, looked up once.
 *
 * Compiled functions call `cudaLaunchKernelExC`, and the linker gives that name to `__wrap_cudaLaunchKernelExC`. The
 * runtime's own, `__real_cudaLaunchKernelExC`, finds out anew in each launch what the handle of a kernel stands for. It
 * still runs where a function cannot be found or kept, before a thread has a context, and after an error, which it
 * reports.
 */
#include <cuda.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* From the runtime's headers, which need more of the toolkit than is installed. */
typedef struct {
  struct {
    unsigned x, y, z;
  } grid, block;
  size_t shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
} RuntimeLaunch;

int cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version, unsigned long long flags,
                                     int* found);
int __real_cudaLaunchKernelExC(const RuntimeLaunch* launch, const void* kernel, void** parameters);

typedef CUresult (*GetContextId)(CUcontext, unsigned long long*);
typedef CUresult (*GetFunction)(CUfunction*, CUkernel);
typedef CUresult (*Launch)(const CUlaunchConfig*, CUfunction, void**, void**);

typedef struct {
  GetContextId get_context_id;
  GetFunction get_function;
  Launch launch;
} Driver;

typedef struct {
  const void* kernel;
  unsigned long long context; /* its number: another context may come to lie at the same address */
  CUfunction function;
} Known;

enum { ROOM = 1024, STEPS = 16 };

static const unsigned CUDA_12_0 = 12000; /* cuKernelGetFunction and cuCtxGetId came with it */

static _Atomic(const Driver*) driver;
static _Atomic(const Known*) known[ROOM]; /* entries come and never go */

static void* entry_point(const char* symbol) {
  void* function = NULL;
  int found = 0;
  return cudaGetDriverEntryPointByVersion(symbol, &function, CUDA_12_0, 0, &found) == 0 ? function : NULL;
}

static const Driver* find_driver(void) {
  const Driver* there = atomic_load_explicit(&driver, memory_order_acquire);
  if (there) return there;
  Driver* made = malloc(sizeof *made);
  if (!made) return NULL;
  made->get_context_id = (GetContextId)entry_point("cuCtxGetId");
  made->get_function = (GetFunction)entry_point("cuKernelGetFunction");
  made->launch = (Launch)entry_point("cuLaunchKernelEx");
  if (made->get_context_id && made->get_function && made->launch &&
      atomic_compare_exchange_strong(&driver, &there, made)) {
    return made;
  }
  free(made);
  return there;
}

static CUfunction find_function(const Driver* driver, const void* kernel) {
  unsigned long long context = 0;
  if (driver->get_context_id(NULL, &context) != CUDA_SUCCESS) return NULL;
  const uint64_t first = ((uintptr_t)kernel / sizeof(void*) + context) * 0x9e3779b97f4a7c15u >> 32;
  Known* made = NULL;
  for (unsigned n = 0; n < STEPS; ++n) {
    _Atomic(const Known*)* place = &known[(first + n) % ROOM];
    const Known* there = atomic_load_explicit(place, memory_order_acquire);
    if (!there) {
      if (!made) {
        made = malloc(sizeof *made);
        if (!made) return NULL;
        *made = (Known){kernel, context, NULL};
        if (driver->get_function(&made->function, (CUkernel)kernel) != CUDA_SUCCESS) break;
      }
      if (atomic_compare_exchange_strong(place, &there, made)) return made->function;
    }
    if (there->kernel == kernel && there->context == context) {
      free(made);
      return there->function;
    }
  }
  free(made);
  return NULL;
}

int __wrap_cudaLaunchKernelExC(const RuntimeLaunch* launch, const void* kernel, void** parameters) {
  const Driver* driver = find_driver();
  const CUfunction function = driver ? find_function(driver, kernel) : NULL;
  if (function) {
    const CUlaunchConfig config = {
        .gridDimX = launch->grid.x,
        .gridDimY = launch->grid.y,
        .gridDimZ = launch->grid.z,
        .blockDimX = launch->block.x,
        .blockDimY = launch->block.y,
        .blockDimZ = launch->block.z,
        .sharedMemBytes = launch->shared_bytes,
        .hStream = launch->stream,
        .attrs = launch->attributes,
        .numAttrs = launch->attribute_count,
    };
    if (driver->launch(&config, function, parameters, NULL) == CUDA_SUCCESS) return 0;
  }
  return __real_cudaLaunchKernelExC(launch, kernel, parameters);
}
