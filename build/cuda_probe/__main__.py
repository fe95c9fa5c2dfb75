"""``python -m cuda_probe [--json]``: run the proofs, print what was found, end with the status's exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from cuda_probe.diagnosis import STATUSES, Diagnosis, explain, fitting_sass, kernel_driver

_CHILD = Path(__file__).with_name("child.py")
_BUILD = Path(__file__).with_name("build.json")
_KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


def ask(words: Sequence[str], timeout: float) -> dict[str, Any]:
    """Run the child program and return all it told; ``died`` says how it ended if not by itself.

    Args:
        words: the child's arguments.
        timeout: seconds; then it is killed. One that hangs in the driver may not even die of that: it is left.
    """
    # In memory: a container whose file system is read-only has no folder for temporary files.
    with os.fdopen(os.memfd_create("out"), "w+b") as out, os.fdopen(os.memfd_create("complaints"), "w+b") as complaints:
        child = subprocess.Popen(
            [sys.executable, "-I", str(_CHILD), *words], stdin=subprocess.DEVNULL, stdout=out, stderr=complaints
        )
        died = ""
        try:
            status = child.wait(timeout)
        except subprocess.TimeoutExpired:
            status, died = 0, f"no answer within {timeout:g} s"
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
        told, said = _read(out), _read(complaints)
    if status < 0:
        died = f"killed by signal {-status} ({signal.strsignal(-status) or 'unknown'})"
    elif status > 0:
        died = (said.strip().splitlines() or [f"exit status {status}"])[-1]
    return {**_facts(told), "died": died} if died else _facts(told)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _facts(text: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            told = json.loads(line)
        except ValueError:  # a driver that prints, or a line cut off by a crash
            continue
        if isinstance(told, dict):
            facts.update(told)
    return facts


def probe(timeout: float) -> dict[str, Any]:
    """Run all proofs and return the report; never raises for anything that driver, GPU or library do.

    Args:
        timeout: seconds that each child program may take.
    """
    report: dict[str, Any] = {"schema": 1, "kernel_driver": _kernel_driver(), "gpus": []}
    try:
        build = json.loads(_BUILD.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        remedy = "install the wheel cufallback-cuda-probe; a source folder has no device code"
        return _conclude(report, Diagnosis("broken_install", f"{_BUILD.name} is missing or damaged", remedy))
    report["build"] = build
    toolkit: str = build["toolkit"]

    library = ask(["library"], timeout)
    if "runtime_version" not in library:
        return _conclude(report, _unusable(library, f"install {build['runtime']} beside the probe"))
    report["runtime_version"] = library["runtime_version"]

    devices = ask(["devices"], timeout)
    for key in ("driver_version", "driver_library"):
        report[key] = devices.get(key)
    if "unloadable" in devices:
        remedy = "install an NVIDIA driver, or start the container with --gpus all (NVIDIA container toolkit)"
        return _conclude(report, Diagnosis("no_driver", devices["unloadable"]["error"], remedy))
    if "driver_code" in devices:
        return _conclude(report, explain(devices["driver_code"], toolkit, devices.get("driver_error", "")))
    if "gpus" not in devices:
        remedy = "check nvidia-smi and the kernel log for Xid errors"
        return _conclude(report, Diagnosis("failed", f"the driver does not answer: {devices.get('died')}", remedy))
    if not devices["gpus"]:
        return _conclude(report, explain(100, toolkit))
    major = int(toolkit.partition(".")[0])
    if (devices.get("driver_version") or 0) // 1000 < major:
        return _conclude(report, explain(35, toolkit))
    return _conclude(report, _prove_all(report, devices["gpus"], build, timeout))


def _prove_all(report: dict[str, Any], gpus: list[dict[str, Any]], build: dict[str, Any], timeout: float) -> Diagnosis:
    """Prove SASS and PTX on each GPU; return the first fault, or the good news."""
    faults: list[Diagnosis] = []
    for gpu in gpus:
        sass = fitting_sass(build["architectures"], gpu["compute_capability"])
        if sass is None:
            why = f"no SASS for compute capability {gpu['compute_capability']} in this build"
            gpu["sass"] = {"status": "not_run", "why": why}
        else:
            gpu["sass"] = _prove(gpu["index"], "sass", f"SASS {sass}", build["toolkit"], timeout, faults)
        if _number(build["ptx"]["target"]) > _number(gpu["compute_capability"]):
            why = f"PTX for {build['ptx']['target']} does not run on an older GPU"
            gpu["ptx"] = {"status": "not_run", "why": why}
            if sass is None:
                faults.append(explain(209, build["toolkit"]))
        else:
            what = f"PTX {build['ptx']['target']}, ISA {build['ptx']['isa']}"
            gpu["ptx"] = _prove(gpu["index"], "ptx", what, build["toolkit"], timeout, faults)
        report["gpus"].append(gpu)
    if faults:
        return faults[0]
    return Diagnosis("passed", f"code of CUDA {build['toolkit']} runs on {len(gpus)} GPU(s)", "nothing to do")


def _prove(device: int, image: str, what: str, toolkit: str, timeout: float, faults: list[Diagnosis]) -> dict[str, Any]:
    started = time.monotonic()
    told = ask(["run", str(device), image], timeout)
    result: dict[str, Any] = {"image": what, "seconds": round(time.monotonic() - started, 3)}
    if told.get("wrong_numbers") == 0 and "died" not in told:
        return {**result, "status": "passed", "why": "ran, and every number equals the CPU's"}
    if told.get("code"):
        fault = explain(told["code"], toolkit)
        result |= {"code": told["code"], "stage": told["stage"], "jit_log": told["jit_log"]}
    elif told.get("wrong_numbers"):
        reason = f"{told['wrong_numbers']} wrong numbers: {told.get('first_wrong')}"
        fault = Diagnosis("failed", reason, "take the GPU out of service and check it with dcgmi diag")
    elif "unloadable" in told:
        fault = _unusable(told, "install the probe again")
    else:
        fault = Diagnosis(
            "failed", f"the process died: {told.get('died')}", "check nvidia-smi and the kernel log for Xid errors"
        )
    faults.append(fault)
    return {**result, "status": "failed", "why": fault.reason}


def _unusable(told: dict[str, Any], remedy: str) -> Diagnosis:
    unloadable = told.get("unloadable")
    if unloadable:
        return Diagnosis("broken_install", f"{unloadable['library']} cannot be loaded: {unloadable['error']}", remedy)
    return Diagnosis("broken_install", f"the probe's library does not answer: {told.get('died')}", remedy)


def _number(capability: str) -> int:
    major, _, minor = capability.rstrip("af").partition(".")
    return int(major) * 10 + int(minor)


def _kernel_driver() -> str | None:
    try:
        return kernel_driver(_KERNEL_DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def _conclude(report: dict[str, Any], diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        **report,
        "status": diagnosis.status,
        "exit_code": STATUSES[diagnosis.status][0],
        "reason": diagnosis.reason,
        "remedy": diagnosis.remedy,
    }


def describe(report: dict[str, Any]) -> str:
    """Return the report as text for people."""
    lines = []
    if "build" in report:
        build = report["build"]
        lines.append(
            f"cuda-probe {build['version']}: CUDA {build['toolkit']} (NVRTC {build['nvrtc']}), SASS "
            f"{' '.join(build['architectures'])}, PTX {build['ptx']['target']} ISA {build['ptx']['isa']}"
        )
    lines.append(f"kernel driver   {report['kernel_driver'] or 'none'}")
    if report.get("driver_version"):
        lines.append(f"driver library  CUDA {_dotted(report['driver_version'])} ({report['driver_library']})")
    if report.get("runtime_version"):
        lines.append(f"CUDA runtime    {_dotted(report['runtime_version'])}")
    for gpu in report["gpus"]:
        lines.append(f"GPU {gpu['index']}: {gpu['name']}, {gpu['compute_capability']}, {gpu['memory_mib']} MiB")
        for kind in ("sass", "ptx"):
            proof = gpu[kind]
            lines.append(f"  {kind.upper():4} {proof['status']}: {proof['why']}")
            if proof.get("jit_log"):
                lines += [f"       {line}" for line in proof["jit_log"].splitlines()]
    lines.append(f"{report['status']}: {report['reason']}")
    if report["exit_code"] != 0:
        lines.append(f"remedy: {report['remedy']}")
    return "\n".join(lines)


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    table = "\n".join(f"  {code}  {status:<16} {meaning}" for status, (code, meaning) in STATUSES.items())
    parser = argparse.ArgumentParser(
        prog="python -m cuda_probe",
        description="Prove that code of this build's CUDA toolkit runs on this host.",
        epilog=f"exit codes:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds per step (default 120)")
    options = parser.parse_args(argv)
    report = probe(options.timeout)
    print(json.dumps(report, indent=2, sort_keys=True) if options.json else describe(report))
    return int(report["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
