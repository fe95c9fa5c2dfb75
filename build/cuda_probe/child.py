"""What touches driver and GPU, as a program of its own: a crash or a hang in here is a result, not an end.

Standard library only, started by path. ``child.py library`` · ``child.py devices`` · ``child.py run DEVICE
sass|ptx``. It prints JSON objects, one a line, whose keys add up; so what was learnt before a crash is kept.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from pathlib import Path

LIBRARY = Path(__file__).with_name("libcuda_probe.so")
DRIVER = "libcuda.so.1"

_COUNT = 100_000
_FACTOR = 3.0
_LOG_SIZE = 8192
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def tell(**facts: object) -> None:
    """Print facts for the parent."""
    print(json.dumps(facts), flush=True)


def load(name: str) -> ctypes.CDLL | None:
    """Load a library, or tell which file is missing or unusable: it may be one that ``name`` needs."""
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        words = str(error)
        tell(unloadable={"library": words.partition(":")[0], "error": words})
        return None


def show_library() -> None:
    """Tell the version of the CUDA runtime that our library is linked with."""
    library = load(str(LIBRARY))
    if library is not None:
        tell(runtime_version=library.cuda_probe_runtime_version())


def show_devices() -> None:
    """Tell the driver's version and each GPU, from the driver alone."""
    driver = load(DRIVER)
    if driver is None:
        return
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) == 0:
        tell(driver_version=number.value)
    loaded = re.findall(r"\S*/libcuda\.so\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    if loaded:
        tell(driver_library=str(Path(loaded[0]).resolve()))
    code = driver.cuInit(0)
    if code == 0:
        code = driver.cuDeviceGetCount(ctypes.byref(number))
    if code != 0:
        tell(driver_code=code, driver_error=error_name(driver, code))
        return
    gpus = []
    for index in range(number.value):
        device, major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
        name = ctypes.create_string_buffer(256)
        code = (
            driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceGetName(name, len(name), device)
            or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
            or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
            or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        )
        if code != 0:
            tell(driver_code=code, driver_error=error_name(driver, code))
            return
        gpus.append(
            {
                "index": index,
                "name": name.value.decode("utf-8", "replace"),
                "compute_capability": f"{major.value}.{minor.value}",
                "memory_mib": memory.value >> 20,
            }
        )
    tell(gpus=gpus)


def error_name(driver: ctypes.CDLL, code: int) -> str:
    """Return the driver's own name of an error, such as CUDA_ERROR_NO_DEVICE, or an empty string."""
    text = ctypes.c_char_p()
    if driver.cuGetErrorName(code, ctypes.byref(text)) != 0 or text.value is None:
        return ""
    return text.value.decode("ascii", "replace")


def run(device: int, image: str) -> None:
    """Run the kernel from one image on one GPU and compare with the CPU."""
    # The driver reads these when it starts: no compiled PTX of an earlier run, and no preference of the user's
    # for one kind of image.
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    for name in ("CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT"):
        os.environ.pop(name, None)
    library = load(str(LIBRARY))
    if library is None:
        return
    floats = ctypes.c_float * _COUNT
    x = floats(*(float(i % 1021) for i in range(_COUNT)))
    start = [float(i % 509) for i in range(_COUNT)]
    y = floats(*start)
    log = ctypes.create_string_buffer(_LOG_SIZE)
    stage = ctypes.c_char_p()
    code = library.cuda_probe_run(
        *(device, int(image == "ptx"), ctypes.c_float(_FACTOR), x, y, _COUNT, log, _LOG_SIZE, ctypes.byref(stage))
    )
    tell(
        code=code,
        stage=(stage.value or b"").decode("ascii", "replace"),
        jit_log=log.value.decode("utf-8", "replace").strip(),
    )
    if code != 0:
        return
    wrong = [i for i in range(_COUNT) if y[i] != _FACTOR * x[i] + start[i]]
    tell(wrong_numbers=len(wrong))
    if wrong:
        tell(first_wrong=f"element {wrong[0]} is {y[wrong[0]]}, not {_FACTOR * x[wrong[0]] + start[wrong[0]]}")


def main(words: list[str]) -> None:
    """Do the one thing that the parent asks for."""
    if words == ["library"]:
        show_library()
    elif words == ["devices"]:
        show_devices()
    else:
        run(int(words[1]), words[2])


if __name__ == "__main__":
    main(sys.argv[1:])
