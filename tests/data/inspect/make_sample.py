"""Make sample_cu129.so: a small library of our own with real CUDA 12.9 device code, for the reader's tests.

    python -m venv /tmp/t && /tmp/t/bin/pip install 'cuda-toolkit[cudart,nvrtc,nvfatbin]==12.9.1'
    python tests/data/inspect/make_sample.py OUTPUT.so /tmp/t/lib/python3.*/site-packages/nvidia

needs gcc; no GPU, no nvcc. Two runs give the same bytes with the same gcc. What it holds:

section          container  entries
.nv_fatbin       0          SASS 9.0a, 10.0f, 10.3a and PTX 8.0, all of the kernel `twice`
.nv_fatbin       1          PTX 8.0 alone (compressed): a unit that every GPU has to compile
__nv_relfatbin   2          PTX 12.0 alone: relocatable code, which runs nowhere by itself
"""

from __future__ import annotations

import ctypes as c
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = b'extern "C" __global__ void twice(float *x) { x[threadIdx.x] *= 2.0f; }'
UNITS = {
    "runnable": (("sm_90a", "sm_100f", "sm_103a", "compute_80"), [b"-64", b"-compress=false"]),
    "ptx": (("compute_80",), [b"-64", b"-compress-all"]),
    "relocatable": (("compute_120",), [b"-64", b"-compress=false"]),
}
ASSEMBLY = """\
.section .nv_fatbin,"a",@progbits
.align 8
first: .incbin "runnable.fatbin"
.align 8
second: .incbin "ptx.fatbin"
.section __nv_relfatbin,"a",@progbits
.align 8
.incbin "relocatable.fatbin"
.section .nvFatBinSegment,"aw",@progbits
.align 8
.long 0x466243b1, 1
.quad first, 0
.long 0x466243b1, 1
.quad second, 0
.section .note.GNU-stack,"",@progbits
"""
HOST = """\
extern int cudaGetDeviceCount(int *);
extern int clock_gettime(int, long *); /* of glibc 2.17: gives the library a known floor */
int sample(void) { int n = 0; long t[2]; return cudaGetDeviceCount(&n) + clock_gettime(0, t) + n; }
"""


def check(code: int, what: str) -> None:
    if code:
        sys.exit(f"{what} failed with {code}")


def compile_one(nvrtc: c.CDLL, target: str) -> bytes:
    program = c.c_void_p()
    check(nvrtc.nvrtcCreateProgram(c.byref(program), SOURCE, b"sample.cu", 0, None, None), "nvrtcCreateProgram")
    option = (c.c_char_p * 1)(f"--gpu-architecture={target}".encode())
    check(nvrtc.nvrtcCompileProgram(program, 1, option), f"compiling for {target}")
    kind = "CUBIN" if target.startswith("sm_") else "PTX"
    size = c.c_size_t()
    check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program, c.byref(size)), "size")
    code = c.create_string_buffer(size.value)
    check(getattr(nvrtc, f"nvrtcGet{kind}")(program, code), "code")
    return code.raw


def pack(nvfatbin: c.CDLL, codes: dict[str, bytes], options: list[bytes]) -> bytes:
    handle = c.c_void_p()
    switches = (c.c_char_p * len(options))(*options)
    check(nvfatbin.nvFatbinCreate(c.byref(handle), switches, c.c_size_t(len(options))), "create")
    for target, code in codes.items():
        number, size = target.split("_")[1].encode(), c.c_size_t(len(code))
        if target.startswith("sm_"):
            check(nvfatbin.nvFatbinAddCubin(handle, code, size, number, b"sample"), f"adding {target}")
        else:
            check(nvfatbin.nvFatbinAddPTX(handle, code, size, number, b"sample", None), f"adding {target}")
    size = c.c_size_t()
    check(nvfatbin.nvFatbinSize(handle, c.byref(size)), "size")
    data = c.create_string_buffer(size.value)
    check(nvfatbin.nvFatbinGet(handle, data), "get")
    return data.raw


def main(target: Path, nvidia: Path) -> None:
    nvrtc = c.CDLL(str(nvidia / "cuda_nvrtc/lib/libnvrtc.so.12"))
    nvfatbin = c.CDLL(str(nvidia / "nvfatbin/lib/libnvfatbin.so.12"))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name, (targets, options) in UNITS.items():
            codes = {architecture: compile_one(nvrtc, architecture) for architecture in targets}
            (work / f"{name}.fatbin").write_bytes(pack(nvfatbin, codes, options))
        (work / "code.S").write_text(ASSEMBLY)
        (work / "host.c").write_text(HOST)
        libraries = ["-L", str(nvidia / "cuda_runtime/lib"), "-l:libcudart.so.12", "-l:libc.so.6"]
        lean = ["-s", "-O2", "-nostdlib", "-fno-asynchronous-unwind-tables"]
        linker = "-Wl,--build-id=none,-z,noseparate-code,-z,norelro,-rpath,$ORIGIN/lib"
        sources = ["host.c", "code.S"]
        subprocess.run(
            ["gcc", "-shared", "-fPIC", *lean, linker, *sources, *libraries, "-o", "out.so"], cwd=work, check=True
        )
        target.write_bytes((work / "out.so").read_bytes())
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
