"""Assert inside an image that it is what the plan says. Runs in the image, with its Python and nothing else.

Usage: check_image.py EXPECTATION REPORT. The expectation is JSON: ``distributions`` (normalised name → version),
``torch_cuda`` (such as 12.9; null for a torch without CUDA), ``modules`` (to be imported). The report is a list of
checks. One that fails ends the program with 1 after all have been made, and the report is not written.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Check = dict[str, str]


def passed(what: str, why: str) -> Check:
    return {"what": what, "status": "passed", "why": why}


def failed(what: str, why: str) -> Check:
    return {"what": what, "status": "failed", "why": why}


def not_run(what: str, why: str) -> Check:
    return {"what": what, "status": "not_run", "why": why}


def installed() -> dict[str, str]:
    """Return normalised name → version of every installed distribution; of one that is there twice, all versions."""
    found: dict[str, set[str]] = {}
    for item in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", item.metadata["Name"] or "nameless").lower()
        found.setdefault(name, set()).add(item.version or "without version")
    return {name: " and ".join(sorted(versions)) for name, versions in found.items()}


def check_user() -> Iterator[Check]:
    """The image does not run as root."""
    state = passed if os.getuid() != 0 else failed
    yield state("user", f"runs as uid {os.getuid()}")


def check_distributions(expected: dict[str, str]) -> Iterator[Check]:
    """Exactly the locked and built distributions are installed, so none of another CUDA."""
    found = installed()
    names = sorted(found.keys() | expected.keys())
    odd = [
        f"{name} is {found.get(name, 'absent')} instead of {expected.get(name, 'absent')}"
        for name in names
        if found.get(name) != expected.get(name)
    ]
    yield failed("distributions", "; ".join(odd)) if odd else passed("distributions", f"the {len(found)} of the locks")


def check_torch(cuda: str | None) -> Iterator[Check]:
    """torch is built for the recipe's CUDA."""
    if "torch" not in installed():
        yield not_run("torch.version.cuda", "this image holds no torch")
        return
    try:
        import torch

        found = torch.version.cuda
    except (Exception, SystemExit) as error:  # whatever a package does when it is imported
        yield failed("torch.version.cuda", f"{type(error).__name__}: {error}")
        return
    state = passed if found == cuda else failed
    yield state("torch.version.cuda", f"is {found}, the recipe says {cuda}")


def check_import(name: str, load: Callable[[str], Any] = importlib.import_module) -> Iterator[Check]:
    """One module can be imported, or a driver's library is all that it lacks."""
    try:
        load(name)
    except ImportError as error:
        missing_driver = re.match(r"libcuda\.so|libnvidia-ml\.so", str(error))
        state = not_run if missing_driver else failed
        yield state(f"import {name}", f"{error}; the driver brings it" if missing_driver else f"{error}")
    except (Exception, SystemExit) as error:  # whatever a package does when it is imported
        yield failed(f"import {name}", f"{type(error).__name__}: {error}")
    else:
        yield passed(f"import {name}", "imported")


def main(expectation: str, report: str) -> int:
    """Make every check; write the report when none failed."""
    expected = json.loads(Path(expectation).read_text("utf-8"))
    checks = [*check_user(), *check_distributions(expected["distributions"]), *check_torch(expected["torch_cuda"])]
    for name in expected["modules"]:
        checks += check_import(name)
    faults = [check for check in checks if check["status"] == "failed"]
    for check in checks:
        print(f"{check['status']}: {check['what']}: {check['why']}")
    if not faults:
        Path(report).write_text(json.dumps(checks, indent=2, sort_keys=True) + "\n", "utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
