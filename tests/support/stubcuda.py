"""A `libcuda.so.1` of a machine without GPUs, so that kvikio moves host memory there.

    python -m tests.support.stubcuda DIRECTORY

compiles it into a directory for LD_LIBRARY_PATH. kvikio needs the library even for host memory in
its compatibility mode: it starts the driver, and asks of each pointer what memory it is. The answer
is always "host memory"; every other call answers that there is no device. A call that a later
kvikio makes besides these is missing when kvikio loads, and belongs in the list.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "NO_DEVICE"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no device"; return 0; }
/* CU_MEMORYTYPE_HOST */
int cuPointerGetAttribute(unsigned *type, int attribute, void *pointer) { *type = 1; return 0; }
/* Zero: the driver knows nothing of the pointer. */
int cuPointerGetAttributes(unsigned count, int *attributes, unsigned **data, void *pointer) {
    for (unsigned i = 0; i < count; i++) *data[i] = 0;
    return 0;
}
/* CUDA_ERROR_NO_DEVICE */
#define NO(name) int name() { return 100; }
NO(cuMemHostAlloc) NO(cuMemFreeHost) NO(cuMemHostRegister_v2) NO(cuMemHostUnregister)
NO(cuMemcpyHtoDAsync) NO(cuMemcpyHtoDAsync_v2) NO(cuMemcpyDtoHAsync) NO(cuMemcpyDtoHAsync_v2)
NO(cuMemcpyAsync) NO(cuMemcpyBatchAsync) NO(cuMemcpyBatchAsync_v2) NO(cuCtxPushCurrent)
NO(cuCtxPushCurrent_v2) NO(cuCtxPopCurrent) NO(cuCtxPopCurrent_v2) NO(cuCtxGetCurrent)
NO(cuCtxGetDevice) NO(cuCtxCreate) NO(cuCtxCreate_v2) NO(cuCtxCreate_v3) NO(cuCtxCreate_v4)
NO(cuCtxDestroy) NO(cuCtxDestroy_v2) NO(cuMemGetAddressRange) NO(cuMemGetAddressRange_v2)
NO(cuDeviceGet) NO(cuDeviceGetAttribute) NO(cuDevicePrimaryCtxRetain)
NO(cuDevicePrimaryCtxRelease) NO(cuDevicePrimaryCtxRelease_v2) NO(cuStreamCreate)
NO(cuStreamDestroy) NO(cuStreamDestroy_v2) NO(cuStreamSynchronize) NO(cuEventCreate)
NO(cuEventDestroy) NO(cuEventDestroy_v2) NO(cuEventRecord) NO(cuEventQuery)
NO(cuEventSynchronize) NO(cuGetProcAddress) NO(cuGetProcAddress_v2) NO(cuFuncGetModule)
NO(cuLaunchHostFunc)
"""


def build(directory: Path) -> None:
    """Compile the library by the C compiler of the package `ziglang`, so that none is installed."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "stub.c").write_text(SOURCE)
    options = ["-shared", "-fPIC", "-nostdlib", "-O1", "-w", "-o", str(directory / "libcuda.so.1")]
    compiler = [sys.executable, "-m", "ziglang", "cc", *options]
    subprocess.run([*compiler, str(directory / "stub.c")], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
