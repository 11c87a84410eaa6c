/* A call of decode from one function of Python to the kernel.
 *
 * `decode_call(kernel, P, state_mask, io_mask, bytes of q, k, v, s, s_offsets, decay_scales and out)` makes a function
 * of (q, k, v, s, s_offsets, decay_scales, out, softmax_scale) for tensors whose facts are those that `kernel` was
 * chosen for. All that is left to look at are their addresses: that the kernel can take them, and that what is written
 * lies apart from everything else. The function launches `kernel` and answers true, or does nothing and answers false.
 */
#include <stdint.h>
#include <stdlib.h>
#include <tvm/ffi/c_api.h>

enum { Q, K, V, S, OFFSETS, DECAYS, OUT, TENSORS, SCALE = TENSORS, ARGUMENTS };
enum { KERNEL, SLOTS, STATE_MASK, IO_MASK, BYTES, FACTS = BYTES + TENSORS };

typedef struct {
  TVMFFIObjectHandle kernel;
  int64_t slots;
  uintptr_t state_mask, io_mask; /* bits that no address of states, and of q, k and v, may have */
  uintptr_t bytes[TENSORS];      /* from a tensor's first element to its last */
} Call;

static const DLTensor* tensor_of(const TVMFFIAny* value) {
  if (value->type_index == kTVMFFIDLTensorPtr) return value->v_ptr;
  if (value->type_index != kTVMFFITensor) return NULL;
  return (const DLTensor*)((const char*)value->v_obj + sizeof(TVMFFIObject));
}

static TVMFFIAny number(int32_t type, int64_t value) {
  TVMFFIAny any = {0};
  any.type_index = type;
  any.v_int64 = value;
  return any;
}

static int call(void* self, const TVMFFIAny* given, int32_t count, TVMFFIAny* result) {
  const Call* call = self;
  uintptr_t at[TENSORS];
  *result = number(kTVMFFIBool, 0);
  if (count != ARGUMENTS || given[SCALE].type_index != kTVMFFIFloat) return 0;
  for (int n = 0; n < TENSORS; ++n) {
    const DLTensor* tensor = tensor_of(&given[n]);
    if (!tensor) return 0;
    at[n] = (uintptr_t)tensor->data + tensor->byte_offset;
  }
  if ((at[S] & call->state_mask) || ((at[Q] | at[K] | at[V]) & call->io_mask)) return 0;
  for (int written = S; written <= OUT; written += OUT - S) {
    const uintptr_t end = at[written] + call->bytes[written];
    for (int n = 0; n < TENSORS; ++n) {
      if (n != written && at[n] < end && at[written] < at[n] + call->bytes[n]) return 0;
    }
  }
  TVMFFIAny arguments[] = {
      given[OFFSETS], given[S], given[DECAYS], given[Q],    given[K],
      given[V],       given[OUT], given[SCALE], number(kTVMFFIInt, call->slots),
  };
  TVMFFIAny nothing = number(kTVMFFINone, 0);
  const int failed = TVMFFIFunctionCall(call->kernel, arguments, sizeof arguments / sizeof *arguments, &nothing);
  if (!failed) *result = number(kTVMFFIBool, 1);
  return failed;
}

static void forget(void* self) {
  TVMFFIObjectDecRef(((Call*)self)->kernel);
  free(self);
}

int __tvm_ffi_decode_call(void* self, const TVMFFIAny* facts, int32_t count, TVMFFIAny* result) {
  int fit = count == FACTS && facts[KERNEL].type_index == kTVMFFIFunction;
  for (int n = SLOTS; fit && n < FACTS; ++n) fit = facts[n].type_index == kTVMFFIInt;
  if (!fit) {
    TVMFFIErrorSetRaisedFromCStr("TypeError", "decode_call takes a kernel and ten whole numbers");
    return -1;
  }
  Call* made = malloc(sizeof *made);
  if (!made) {
    TVMFFIErrorSetRaisedFromCStr("MemoryError", "decode_call has no memory");
    return -1;
  }
  made->kernel = facts[KERNEL].v_obj;
  made->slots = facts[SLOTS].v_int64;
  made->state_mask = facts[STATE_MASK].v_int64;
  made->io_mask = facts[IO_MASK].v_int64;
  for (int n = 0; n < TENSORS; ++n) made->bytes[n] = facts[BYTES + n].v_int64;
  TVMFFIObjectIncRef(made->kernel);
  TVMFFIObjectHandle function = NULL;
  const int failed = TVMFFIFunctionCreate(made, call, forget, &function);
  if (failed) {
    forget(made);
  } else {
    *result = number(kTVMFFIFunction, 0);
    result->v_obj = function;
  }
  return failed;
}
