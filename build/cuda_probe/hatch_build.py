"""Build hook: kernel.cu → NVRTC → cubins and PTX → nvFatbin → a shared library linked with libcudart.

All CUDA parts come from the wheels of the build environment (``cuda-toolkit[cudart,nvfatbin,nvrtc]``), so there
is no nvcc, and the result is the same on every machine with the same C compiler. Needs gcc (or ``CC``) and
binutils. Variables: CUFALLBACK_PROBE_ARCHITECTURES, CUFALLBACK_PROBE_PTX, and CUFALLBACK_PROBE_PTX_ISA, which is
the ISA that the toolkit's NVRTC must emit; unset, whatever it emits is taken and stated.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_HERE = Path(__file__).parent
_BASE_VERSION = "1.0.0"
_LIBRARY = "libcuda_probe.so"
# Where pip puts the runtime's wheel beside this package.
_RPATH = "$ORIGIN/../nvidia/cuda_runtime/lib"
# manylinux2014: nothing older is worth a claim, whatever symbols the library happens to need.
_OLDEST_GLIBC = (2, 17)

# Both images in the section that every CUDA tool reads, each behind a wrapper as nvcc emits it: magic, version,
# address, nothing.
_IMAGES_S = """
.section .nv_fatbin,"a",@progbits
.balign 8
.globl cuda_probe_sass
.hidden cuda_probe_sass
cuda_probe_sass: .incbin "sass.fatbin"
.balign 8
.globl cuda_probe_ptx
.hidden cuda_probe_ptx
cuda_probe_ptx: .incbin "ptx.fatbin"
.section .nvFatBinSegment,"aw",@progbits
.balign 8
.long 0x466243b1, 1
.quad cuda_probe_sass, 0
.long 0x466243b1, 1
.quad cuda_probe_ptx, 0
.section .note.GNU-stack,"",@progbits
"""


def project_version() -> str:
    """Return the version with the toolkit as local part, ``1.0.0+cu129``; without a toolkit the plain one."""
    try:
        _path, version = _find("libnvrtc.so.*")
    except FileNotFoundError:
        return _BASE_VERSION
    return f"{_BASE_VERSION}+cu{''.join(version.split('.')[:2])}"


def _find(pattern: str) -> tuple[Path, str]:
    """Return the installed NVIDIA file of that name pattern and the version of its distribution."""
    for distribution in importlib.metadata.distributions():
        if not distribution.metadata["Name"].startswith("nvidia-"):
            continue
        for file in distribution.files or ():
            if Path(file.name).match(pattern):
                return Path(str(file.locate())), distribution.version
    msg = f"no installed nvidia distribution has {pattern}: install cuda-toolkit[cudart,nvfatbin,nvrtc]"
    raise FileNotFoundError(msg)


def _runtime() -> tuple[Path, str]:
    """Return libcudart and the exact requirement on the distribution that it comes from."""
    path, version = _find("libcudart.so.*")
    major = path.name.rpartition(".")[2]
    return path, f"nvidia-cuda-runtime-cu{major}=={version}"


def _check(code: int, what: str) -> None:
    if code != 0:
        msg = f"{what} returned {code}"
        raise RuntimeError(msg)


class _Nvrtc:
    """NVRTC of the build environment: CUDA C++ to cubin or PTX."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def compile(self, source: Path, architecture: str) -> bytes:
        """Compile for ``sm_90a`` (a cubin) or ``compute_80`` (PTX text with its final NUL)."""
        kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
        program = ctypes.c_void_p()
        text = source.read_bytes()
        _check(
            self._library.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None),
            "nvrtcCreateProgram",
        )
        # No --frandom-seed: NVRTC needs one only for symbols with internal linkage, and the kernel has none.
        words = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if self._library.nvrtcCompileProgram(program, len(words), words) != 0:
            msg = f"NVRTC refuses {source.name} for {architecture}: {self._fetch(program, 'ProgramLog').decode()}"
            raise RuntimeError(msg)
        return self._fetch(program, kind)

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        _check(self._library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)), f"nvrtcGet{what}Size")
        buffer = ctypes.create_string_buffer(size.value)
        _check(self._library[f"nvrtcGet{what}"](program, buffer), f"nvrtcGet{what}")
        return buffer.raw


def _fatbin(path: Path, images: list[tuple[str, bytes]]) -> bytes:
    """Pack images, named ``sm_90a`` or ``compute_80``, into one fat binary."""
    library = ctypes.CDLL(str(path))
    handle = ctypes.c_void_p()
    options = (ctypes.c_char_p * 1)(b"-64")
    _check(library.nvFatbinCreate(ctypes.byref(handle), options, ctypes.c_size_t(1)), "nvFatbinCreate")
    for target, code in images:
        kind, _, architecture = target.partition("_")
        size, name = ctypes.c_size_t(len(code)), architecture.encode()
        if kind == "sm":
            _check(library.nvFatbinAddCubin(handle, code, size, name, b"cuda_probe"), f"nvFatbinAddCubin {target}")
        else:
            _check(library.nvFatbinAddPTX(handle, code, size, name, b"cuda_probe", None), f"nvFatbinAddPTX {target}")
    size = ctypes.c_size_t()
    _check(library.nvFatbinSize(handle, ctypes.byref(size)), "nvFatbinSize")
    buffer = ctypes.create_string_buffer(size.value)
    _check(library.nvFatbinGet(handle, buffer), "nvFatbinGet")
    return buffer.raw


def _ptx_isa(ptx: bytes) -> str:
    found = re.search(rb"^\.version (\d+\.\d+)$", ptx, re.MULTILINE)
    if found is None:
        msg = "NVRTC's PTX has no .version line"
        raise RuntimeError(msg)
    return found[1].decode()


def _glibc_floor(library: Path) -> tuple[int, int]:
    """Return the newest glibc symbol version that the library needs."""
    symbols = subprocess.run(
        ["readelf", "--wide", "--dyn-syms", str(library)],  # noqa: S607
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    ).stdout
    found = re.findall(r"@GLIBC_(\d+)\.(\d+)", symbols)
    return max([_OLDEST_GLIBC, *((int(major), int(minor)) for major, minor in found)])


class CudaProbeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the library and tells hatchling what the wheel is: its tag, its files, the runtime it requires."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, unless this is an editable installation, which has no device code."""
        if version != "standard":
            return
        folder = Path(tempfile.mkdtemp(prefix="cuda-probe-"))
        facts, glibc = self._build(folder)
        (folder / "build.json").write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        build_data["force_include"] = {
            # below cuda_probe/ in the wheel, by the mapping "sources"
            str(folder / _LIBRARY): _LIBRARY,
            str(folder / "build.json"): "build.json",
        }
        build_data["dependencies"] = [facts["runtime"]]
        build_data["pure_python"] = False
        # libcudart comes from the required wheel; all else that the library needs is glibc of this age.
        build_data["tag"] = f"py3-none-manylinux_{glibc[0]}_{glibc[1]}_x86_64"

    def _option(self, name: str) -> str:
        return os.environ.get(f"CUFALLBACK_PROBE_{name.upper()}") or str(self.config[name])

    def _build(self, folder: Path) -> tuple[dict[str, Any], tuple[int, int]]:
        architectures = self._option("architectures").split()
        ptx_target = self._option("ptx")
        nvrtc, toolkit = _find("libnvrtc.so.*")
        nvfatbin, _ = _find("libnvfatbin.so.*")
        cudart, runtime = _runtime()
        compiler = _Nvrtc(nvrtc)
        source = _HERE / "kernel.cu"
        cubins = [(name, compiler.compile(source, name)) for name in (_target("sm", a) for a in architectures)]
        ptx_name = _target("compute", ptx_target)
        ptx = compiler.compile(source, ptx_name)
        isa = _ptx_isa(ptx)
        expected = os.environ.get("CUFALLBACK_PROBE_PTX_ISA") or isa
        if isa != expected:
            msg = f"NVRTC {toolkit} emits PTX ISA {isa}, expected {expected}"
            raise RuntimeError(msg)
        (folder / "sass.fatbin").write_bytes(_fatbin(nvfatbin, cubins))
        (folder / "ptx.fatbin").write_bytes(_fatbin(nvfatbin, [(ptx_name, ptx)]))
        (folder / "images.S").write_text(_IMAGES_S, encoding="ascii")
        (folder / "host.c").write_bytes((_HERE / "host.c").read_bytes())
        command = [
            *shlex.split(os.environ.get("CC", "gcc")),
            *("-O2", "-Wall", "-Werror", "-fPIC", "-shared", "-s", "-o", _LIBRARY, "host.c", "images.S", str(cudart)),
            *("-Wl,-z,defs", "-Wl,--enable-new-dtags", f"-Wl,-rpath,{_RPATH}"),
            *shlex.split(os.environ.get("LDFLAGS", "")),
        ]
        subprocess.run(command, cwd=folder, check=True)
        facts = {
            "version": project_version(),
            "toolkit": ".".join(toolkit.split(".")[:2]),
            "nvrtc": toolkit,
            "architectures": architectures,
            "ptx": {"target": ptx_target, "isa": isa},
            "runtime": runtime,
        }
        return facts, _glibc_floor(folder / _LIBRARY)


def _target(kind: str, capability: str) -> str:
    """Return ``sm_103a`` for kind ``sm`` and capability ``10.3a``."""
    return f"{kind}_{capability.replace('.', '')}"
