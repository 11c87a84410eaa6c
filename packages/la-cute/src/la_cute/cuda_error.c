/* What compiled functions call when the CUDA runtime reports an error.
 *
 * The compiler's own runtime library of 40 MB has this function too; prebuilt kernels must do without that library.
 * `raise` is TVMFFIErrorSetRaisedFromCStrParts, which a compiled function hands over with the error's number.
 */
#include <stdint.h>
#include <stdio.h>

const char* cudaGetErrorName(int error);
const char* cudaGetErrorString(int error);

void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char*, const char**, int32_t), int32_t error) {
  char number[32];
  snprintf(number, sizeof number, " (CUDA error %d)", (int)error);
  const char* parts[] = {"decode: ", cudaGetErrorName(error), ": ", cudaGetErrorString(error), number};
  if (raise) raise("RuntimeError", parts, 5);
}
