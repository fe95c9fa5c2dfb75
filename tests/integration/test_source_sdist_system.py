"""A real source distribution, extracted by the system's own Python, which may be older than this one."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from cufallback.store import sha256_file

pytestmark = pytest.mark.network

SYSTEM = Path("/usr/bin/python3")
EXTRACT = """
import sys
from pathlib import Path
from cufallback.recipe import SdistSource
from cufallback.source.sdist import extract_sdist
archive, sha256, target = sys.argv[1:]
source = SdistSource(kind="sdist", package="vllm", version="0.27.1", sha256=sha256, why="it is only a test")
print(extract_sdist(Path(archive), source, target=Path(target)).epoch)
"""


def test_debians_own_python_extracts(sdist: Callable[[str], Path], tmp_path: Path) -> None:
    asked = "import sys; print('%d.%d' % sys.version_info[:2], sys.version_info >= (3, 11, 4))"
    if not SYSTEM.exists():
        pytest.skip(f"there is no {SYSTEM}")
    line, recent = subprocess.check_output([SYSTEM, "-I", "-c", asked], text=True).split()
    if recent == "True" or line != f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip(f"{SYSTEM} has tarfile's filters, or cannot use the packages of this Python")
    archive = sdist("0.27.1")
    packages = f"{Path(__file__).parents[2] / 'build'}:{sysconfig.get_path('purelib')}"
    done = subprocess.run(
        [SYSTEM, "-c", EXTRACT, archive, sha256_file(archive), tmp_path / "tree"],
        env={"PYTHONPATH": packages, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1_700_000_000
    assert (tmp_path / "tree/pyproject.toml").is_file()
