"""A matrix product by ggml, the library under llama.cpp, called as llama.cpp calls it for a model's weights."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

# Types whose weights llama.cpp lays out again for x86 when it loads a model; the others are multiplied as they are.
LAID_OUT_AGAIN = ("Q4_0", "Q4_K", "Q2_K", "IQ4_NL")
_REPACKED = "_Z35ggml_backend_cpu_repack_buffer_typev"  # C++, so its name is mangled
_WEIGHTS = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _InitParams(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("memory", _POINTER), ("no_alloc", ctypes.c_bool))


@cache
def _functions(directory: Path) -> Callable[..., int]:
    """A function that calls one of ggml by name, all of whose results are pointers or nothing."""
    libraries = [ctypes.CDLL(str(directory / f"libggml{part}.so"), ctypes.RTLD_GLOBAL) for part in ("-base", "-cpu")]

    def function(name: str, *arguments: object) -> int:
        found = next(getattr(library, name) for library in libraries if hasattr(library, name))
        found.restype = _POINTER
        return found(*arguments)

    function("ggml_log_set", _SILENT, None)
    return function


def ggml_product(
    directory: Path, kind: str, raw: np.ndarray, x: np.ndarray, copies: int, threads: int
) -> Callable[[], list[np.ndarray]]:
    """Work that does `copies` products of x float32 [rows, columns] with copies of the weights uint8 [outputs, bytes].

    directory: where libggml-base.so and libggml-cpu.so lie, such as llama_cpp/lib of llama-cpp-python.
    """
    call = _functions(directory)
    (height, _), (rows, columns) = raw.shape, x.shape

    def pointer(name: str, *arguments: object) -> ctypes.c_void_p:
        return ctypes.c_void_p(call(name, *arguments))

    backend = pointer("ggml_backend_cpu_init")
    call("ggml_backend_cpu_set_n_threads", backend, threads)
    plain = pointer("ggml_backend_get_default_buffer_type", backend)

    def tensor(context: ctypes.c_void_p, type_name: str, outputs: int) -> ctypes.c_void_p:
        number = int(GGMLQuantizationType[type_name])
        return pointer("ggml_new_tensor_2d", context, number, _LONG(columns), _LONG(outputs))

    def context(tensors: int) -> ctypes.c_void_p:
        overhead = ctypes.c_size_t(call("ggml_tensor_overhead") or 0).value
        graph = call("ggml_graph_overhead_custom", ctypes.c_size_t(4 * tensors), False)
        return pointer("ggml_init", _InitParams(overhead * 2 * tensors + graph, None, True))

    def put(where: ctypes.c_void_p, values: np.ndarray) -> None:
        call("ggml_backend_tensor_set", where, values.ctypes.data_as(_POINTER), _LONG(0), _LONG(values.nbytes))

    held, passing = context(copies), context(copies + 1)
    weights = [tensor(held, kind, height) for _ in range(copies)]
    layout = pointer(_REPACKED) if kind in LAID_OUT_AGAIN else plain
    buffer = pointer("ggml_backend_alloc_ctx_tensors_from_buft", held, layout)
    call("ggml_backend_buffer_set_usage", buffer, _WEIGHTS)
    for each in weights:
        put(each, raw)
    activations = tensor(passing, "F32", rows)
    outputs = [pointer("ggml_mul_mat", passing, each, activations) for each in weights]
    graph = pointer("ggml_new_graph_custom", passing, ctypes.c_size_t(4 * copies), False)
    for each in outputs:
        call("ggml_build_forward_expand", graph, each)
    call("ggml_backend_alloc_ctx_tensors_from_buft", passing, plain)
    put(activations, np.ascontiguousarray(x))
    out = np.empty((rows, height), np.float32)

    def work() -> list[np.ndarray]:
        call("ggml_backend_graph_compute", backend, graph)
        last = outputs[-1]
        call("ggml_backend_tensor_get", last, out.ctypes.data_as(_POINTER), _LONG(0), _LONG(out.nbytes))
        return [out]

    return work
