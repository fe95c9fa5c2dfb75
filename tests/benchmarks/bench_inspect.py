"""How fast device code is listed: our reader against cuobjdump, and a whole wheel. A script, not a test.

    python tests/benchmarks/bench_inspect.py CUOBJDUMP WHEEL...

CUOBJDUMP is the program (wheel nvidia-cuda-cuobjdump). Both list the same files in the same run, each several times,
the best time counts; the files are in the page cache. Wall-clock times of different machines do not compare, ratios do.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "build"))

from rich.console import Console
from rich.table import Table

from cufallback.wheel.fatbin import read_fatbins
from cufallback.wheel.inspect import inspect_wheel

REPEATS = 3


def best(work: Callable[[], object]) -> float:
    """Return the shortest of several runs, in seconds."""
    times: list[float] = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def list_entries(path: Path) -> int:
    """List one file with our reader, from opening it on."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        return len(read_fatbins(view))


def run_oracle(cuobjdump: Path, path: Path) -> None:
    """List one file with cuobjdump: SASS and PTX are two calls."""
    for option in ("--list-elf", "--list-ptx"):
        subprocess.run([cuobjdump, "-all", option, path], capture_output=True, check=False)


def main(cuobjdump: Path, wheels: list[Path]) -> None:
    """Measure and print two tables."""
    files = Table(title="listing device code")
    for head in ("file", "MB", "entries", "ours, ms", "cuobjdump, ms", "ratio"):
        files.add_column(head, justify="left" if head == "file" else "right")
    whole = Table(title="inspecting a whole wheel")
    for head in ("wheel", "MB", "inflated MB", "s"):
        whole.add_column(head, justify="left" if head == "wheel" else "right")
    with tempfile.TemporaryDirectory() as folder:
        for wheel in wheels:
            found = inspect_wheel(wheel)
            seconds = best(lambda wheel=wheel: inspect_wheel(wheel))  # type: ignore[misc]
            inflated = sum(part.size for part in found.extensions) / 1e6
            whole.add_row(wheel.name, f"{found.size / 1e6:.0f}", f"{inflated:.0f}", f"{seconds:.2f}")
            for part in found.extensions:
                if not part.entries:
                    continue
                with zipfile.ZipFile(wheel) as archive:
                    path = Path(archive.extract(part.path, folder))
                ours = best(lambda path=path: list_entries(path))  # type: ignore[misc]
                theirs = best(lambda path=path: run_oracle(cuobjdump, path))  # type: ignore[misc]
                files.add_row(
                    path.name,
                    f"{part.size / 1e6:.1f}",
                    str(len(part.entries)),
                    f"{ours * 1e3:.2f}",
                    f"{theirs * 1e3:.0f}",
                    f"{theirs / ours:.0f}",
                )
                path.unlink()
    console = Console(width=120)
    console.print(files)
    console.print(whole)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
