/* A call of decode from one function of Python to the kernel.
 *
 * `make(type, kernel, handle, slots, state_mask, io_mask, bytes)` makes a function of (q, k, v, s, s_offsets,
 * decay_scales, out, softmax_scale) for tensors of `type` whose facts are those that `kernel` was chosen for; `bytes`
 * has a number for each of them. All that is left to look at are their addresses: that the kernel can take them, and
 * that what is written lies apart from everything else. The function launches `kernel` and answers True, or does nothing
 * and answers False. `make` answers None if `type` has no function table of DLPack that can be used here.
 *
 * A library of kernels is an extension module of CPython too, of its stable interface, and reads tensors through that
 * table, without what tvm-ffi does beside for each argument. Python's functions are weak symbols, so that the library
 * links without Python and loads in other programs.
 */
#define Py_LIMITED_API 0x030a0000
#define PyAPI_FUNC(type) __attribute__((weak)) type
#define PyAPI_DATA(type) extern __attribute__((weak)) type
#include <Python.h>
#include <dlpack/dlpack.h>
#include <stdint.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

enum { Q, K, V, S, OFFSETS, DECAYS, OUT, TENSORS, SCALE = TENSORS, ARGUMENTS };

static const char CALL[] = "la_cute.decode_call";

typedef struct {
  PyTypeObject* type;
  const DLPackExchangeAPI* exchange;
  PyObject* kernel; /* keeps the handle alive */
  TVMFFIObjectHandle handle;
  Py_ssize_t slots, state_mask, io_mask; /* bits that no address of states, and of q, k and v, may have */
  Py_ssize_t bytes[TENSORS];             /* from a tensor's first element to its last */
} Call;

static TVMFFIAny number(int32_t type, int64_t value) {
  TVMFFIAny any = {0};
  any.type_index = type;
  any.v_int64 = value;
  return any;
}

static int take(const Call* call, PyObject* const* given, DLTensor* tensors) {
  for (int n = 0; n < TENSORS; ++n) {
    if (Py_TYPE(given[n]) != call->type && !PyType_IsSubtype(Py_TYPE(given[n]), call->type)) return 0;
    if (call->exchange->dltensor_from_py_object_no_sync(given[n], &tensors[n])) return 0;
  }
  return 1;
}

static int fit(const Call* call, const DLTensor* tensors) {
  uintptr_t at[TENSORS];
  for (int n = 0; n < TENSORS; ++n) at[n] = (uintptr_t)tensors[n].data + tensors[n].byte_offset;
  if ((at[S] & call->state_mask) || ((at[Q] | at[K] | at[V]) & call->io_mask)) return 0;
  for (int written = S; written <= OUT; written += OUT - S) {
    const uintptr_t end = at[written] + call->bytes[written];
    for (int n = 0; n < TENSORS; ++n) {
      if (n != written && at[n] < end && at[written] < at[n] + call->bytes[n]) return 0;
    }
  }
  return 1;
}

static int find_stream(const Call* call, DLDevice device, void** stream) {
  *stream = NULL;
  return device.device_type == kDLCPU ||
         !call->exchange->current_work_stream(device.device_type, device.device_id, stream);
}

static int launch(const Call* call, DLTensor* tensors, double scale, void* stream) {
  static const int ORDER[TENSORS] = {OFFSETS, S, DECAYS, Q, K, V, OUT};
  TVMFFIAny arguments[TENSORS + 2], nothing = number(kTVMFFINone, 0);
  for (int n = 0; n < TENSORS; ++n) {
    arguments[n] = number(kTVMFFIDLTensorPtr, 0);
    arguments[n].v_ptr = &tensors[ORDER[n]];
  }
  arguments[TENSORS] = number(kTVMFFIFloat, 0);
  arguments[TENSORS].v_float64 = scale;
  arguments[TENSORS + 1] = number(kTVMFFIInt, call->slots);
  const DLDevice device = tensors[S].device;
  void* before = NULL;
  TVMFFIEnvSetStream(device.device_type, device.device_id, stream, &before);
  /* A launch can wait for room in the stream, and the stream for a function of Python. */
  PyThreadState* state = PyEval_SaveThread();
  const int failed = TVMFFIFunctionCall(call->handle, arguments, TENSORS + 2, &nothing);
  PyEval_RestoreThread(state);
  TVMFFIEnvSetStream(device.device_type, device.device_id, before, NULL);
  return failed;
}

/* Raise what a kernel's function has said, if it has not raised in Python itself. */
static PyObject* raise_error(void) {
  TVMFFIObjectHandle error = NULL;
  TVMFFIErrorMoveFromRaised(&error);
  if (error && !PyErr_Occurred()) {
    const TVMFFIErrorCell* cell = (const TVMFFIErrorCell*)((const char*)error + sizeof(TVMFFIObject));
    PyObject* text = PyUnicode_DecodeUTF8(cell->message.data, cell->message.size, "replace");
    if (text) PyErr_SetObject(PyExc_RuntimeError, text);
    Py_XDECREF(text);
  }
  if (error) TVMFFIObjectDecRef(error);
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "decode: the launch failed");
  return NULL;
}

static PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  const Call* call = PyCapsule_GetPointer(self, CALL);
  if (!call) return NULL;
  DLTensor tensors[TENSORS];
  void* stream;
  if (count != ARGUMENTS || Py_TYPE(given[SCALE]) != &PyFloat_Type || !take(call, given, tensors) ||
      !fit(call, tensors) || !find_stream(call, tensors[S].device, &stream)) {
    PyErr_Clear();
    return PyBool_FromLong(0);
  }
  return launch(call, tensors, PyFloat_AsDouble(given[SCALE]), stream) ? raise_error() : PyBool_FromLong(1);
}

static void forget(PyObject* capsule) {
  Call* call = PyCapsule_GetPointer(capsule, CALL);
  Py_DECREF(call->kernel);
  Py_DECREF(call->type);
  PyMem_Free(call);
}

static const DLPackExchangeAPI* exchange_of(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString((PyObject*)type, "__dlpack_c_exchange_api__");
  const DLPackExchangeAPI* found = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
  Py_XDECREF(capsule);
  PyErr_Clear();
  const int usable =
      found && found->header.version.major == DLPACK_MAJOR_VERSION && found->dltensor_from_py_object_no_sync;
  return usable ? found : NULL;
}

static PyMethodDef CALL_FUNCTION = {"decode_call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, NULL};

static PyObject* make(PyObject* module, PyObject* arguments) {
  Call made;
  Py_ssize_t handle, *bytes = made.bytes;
  if (!PyArg_ParseTuple(arguments, "O!Onnnn(nnnnnnn)", &PyType_Type, &made.type, &made.kernel, &handle, &made.slots,
                        &made.state_mask, &made.io_mask, &bytes[Q], &bytes[K], &bytes[V], &bytes[S], &bytes[OFFSETS],
                        &bytes[DECAYS], &bytes[OUT])) {
    return NULL;
  }
  made.handle = (TVMFFIObjectHandle)handle;
  made.exchange = exchange_of(made.type);
  if (!made.exchange) {
    Py_INCREF(Py_None);
    return Py_None;
  }
  Call* kept = PyMem_Malloc(sizeof made);
  if (!kept) return PyErr_NoMemory();
  *kept = made;
  PyObject* capsule = PyCapsule_New(kept, CALL, forget);
  if (!capsule) {
    PyMem_Free(kept);
    return NULL;
  }
  Py_INCREF(kept->kernel);
  Py_INCREF(kept->type);
  PyObject* function = PyCFunction_New(&CALL_FUNCTION, capsule);
  Py_DECREF(capsule);
  return function;
}

static PyMethodDef FUNCTIONS[] = {{"make", make, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot SLOTS[] = {{0, NULL}};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "decode_call", NULL, 0, FUNCTIONS, SLOTS, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_decode_call(void) { return PyModuleDef_Init ? PyModuleDef_Init(&MODULE) : NULL; }
