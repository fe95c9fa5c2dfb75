"""What the numbers mean: exit codes, CUDA errors in one sentence with a remedy, and which SASS fits which GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# status: (exit code, meaning). The help text of the command prints this table.
STATUSES = {
    "passed": (0, "on every GPU the kernel ran and its numbers are right"),
    "no_driver": (3, "no NVIDIA driver: libcuda.so.1 is not there"),
    "no_gpu": (4, "a driver, but no GPU that it shows us"),
    "driver_too_old": (5, "the driver is too old for this CUDA toolkit"),
    "driver_mismatch": (6, "the driver's parts do not fit together or do not fit this GPU"),
    "failed": (7, "a kernel did not load, crashed, hung or computed wrong numbers"),
    "broken_install": (8, "the probe's own library or the CUDA runtime cannot be loaded"),
}

# First Linux driver whose PTX compiler knows the toolkit's PTX: CUDA 12.9 release notes, table 3.
_FIRST_DRIVER = {"12.8": "570.26", "12.9": "575.51.03"}


@dataclass(frozen=True)
class Diagnosis:
    """A status with one sentence and one remedy."""

    status: str
    reason: str
    remedy: str


def explain(code: int, toolkit: str, name: str = "") -> Diagnosis:
    """Return what a CUDA error number means here.

    Args:
        code: error of runtime or driver; they share their numbers.
        toolkit: such as ``12.9``.
        name: the driver's own name of the error, for numbers without a sentence of their own.
    """
    driver = f"a driver for CUDA {toolkit}"
    if toolkit in _FIRST_DRIVER:
        driver += f" ({_FIRST_DRIVER[toolkit]} or newer)"
    known = {
        2: ("failed", "the GPU has no memory left for a few hundred kilobytes", "end other processes on the GPU"),
        35: (
            "driver_too_old",
            f"the driver is too old for the CUDA {toolkit} runtime",
            f"install {driver}, or on a data-centre GPU the cuda-compat package",
        ),
        46: (
            "failed",
            "the GPU is busy or in exclusive mode and taken by another process",
            "end that process or run `nvidia-smi -c DEFAULT`",
        ),
        100: (
            "no_gpu",
            "the driver shows no GPU to this process",
            "check CUDA_VISIBLE_DEVICES, the container's --gpus option and nvidia-smi",
        ),
        101: ("no_gpu", "the GPU went away between two calls", "check nvidia-smi and the kernel log for Xid errors"),
        209: (
            "failed",
            "no kernel image in this build fits the GPU",
            "build with the GPU's architecture, or use a GPU that this build was made for",
        ),
        218: ("failed", "the driver's compiler rejects the PTX", "read jit_log and report it as a bug of this build"),
        222: (
            "driver_too_old",
            f"the driver cannot compile PTX of CUDA {toolkit}: kernels shipped as PTX will not run",
            f"install {driver}, or on a data-centre GPU the cuda-compat package",
        ),
        719: ("failed", "the kernel failed while it ran", "check nvidia-smi and the kernel log for Xid errors"),
        802: (
            "driver_mismatch",
            "the system is not ready: the NVLink fabric is not set up",
            "start nvidia-fabricmanager in the version of the driver, and wait for it",
        ),
        803: (
            "driver_mismatch",
            "the kernel module and libcuda.so.1 are of different driver versions",
            "reboot after a driver update; in a container remove any cuda-compat that is older than the host's driver",
        ),
        804: (
            "driver_mismatch",
            "forward compatibility (cuda-compat) was tried on a GPU that does not have it",
            f"remove cuda-compat from the library path and install {driver} on the host",
        ),
        999: (
            "failed",
            "the driver failed for a reason that it does not name",
            "check that /dev/nvidia* and /dev/nvidia-uvm exist and may be opened, and read the kernel log",
        ),
    }
    if code in known:
        return Diagnosis(*known[code])
    called = f" ({name})" if name else ""
    return Diagnosis("failed", f"CUDA error {code}{called}", "look the number up in the CUDA driver API's CUresult")


def fitting_sass(architectures: Sequence[str], capability: str) -> str | None:
    """Return the SASS of ``architectures`` (``9.0a``, ``10.0f``, ``8.0``) that runs on a GPU, or None.

    ``a`` runs on exactly its capability, ``f`` on the same major from its minor on, plain likewise (CUDA
    programming guide, compute capabilities: architecture- and family-specific features).
    """
    major, minor = (int(part) for part in capability.split("."))
    fitting = []
    for architecture in architectures:
        found = re.fullmatch(r"(\d+)\.(\d)([af]?)", architecture)
        if found is None or int(found[1]) != major:
            continue
        exact = int(found[2]) == minor
        if exact or (found[3] != "a" and int(found[2]) <= minor):
            fitting.append((int(found[2]), found[3], architecture))
    return max(fitting)[2] if fitting else None


def kernel_driver(text: str) -> str | None:
    """Return the driver version in the text of /proc/driver/nvidia/version, such as ``575.57.08``."""
    found = re.search(r"^NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    return found[1] if found else None
