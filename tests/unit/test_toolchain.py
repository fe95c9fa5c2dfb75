"""What this machine lacks is named before anything runs."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cufallback.errors import CommandError, ToolchainError
from cufallback.process import Completed, LocalRunner
from cufallback.recipe import Recipe, load_recipe
from cufallback.source import edit
from cufallback.source.gitrepo import MINIMUM_GIT, _no_git
from cufallback.toolchain import MINIMUM, Need, _version_in, probe_network, probe_toolchain, require


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "12.2.0"),
        ("g++ (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0", "13.3.0"),
        ("g++ (GCC) 14.2.1 20250110 (Red Hat 14.2.1-7)", "14.2.1"),
        ("GNU ld (GNU Binutils for Debian) 2.40", "2.40"),
        ("GNU ld version 2.41-37.el10", "2.41"),
        ("git version 2.39.5", "2.39.5"),
        ("git version 2.39.5 (Apple Git-154)", "2.39.5"),
        ("uv 0.13.9 (x86_64-unknown-linux-gnu)", "0.13.9"),
        ("Python 3.11.7", "3.11.7"),
        ("no number at all", None),
        (None, None),
    ],
)
def test_versions_are_read_as_the_tools_print_them(line: str | None, version: str | None) -> None:
    assert _version_in(line) == version


def recipe() -> Recipe:
    return load_recipe("rehearsal")


def test_this_machine_is_asked_for_both_compilers_headers_and_isolation() -> None:
    toolchain, needs = probe_toolchain(recipe(), LocalRunner())
    assert {"gcc", "g++", "Python headers", "isolation"} <= {need.what for need in needs}
    if toolchain is not None:
        assert toolchain.compiler.startswith("g++")
        assert toolchain.c_compiler.startswith("gcc")


class Without(LocalRunner):
    """This machine without one program."""

    def __init__(self, program: str) -> None:
        self.program = program

    def run(self, argv: Sequence[str | Path], **options: Any) -> Completed:
        if argv[0] == self.program:
            raise CommandError(f"{self.program} was not found", remedy="install it")
        return super().run(argv, **options)


@pytest.mark.parametrize("program", ["gcc", "g++"])
def test_a_missing_compiler_is_named_and_no_toolchain_is_claimed(program: str) -> None:
    toolchain, needs = probe_toolchain(recipe(), Without(program))
    assert toolchain is None
    (need,) = (need for need in needs if need.what == program)
    assert (need.state, need.remedy) == ("missing", f"install {program} with the system's packages")


def test_a_machine_without_namespaces_is_degraded_and_the_records_words_are_shown() -> None:
    (need,) = (need for need in probe_toolchain(recipe(), Without("unshare"))[1] if need.what == "isolation")
    assert need.state == "degraded"
    assert need.found == "the record will say: network: not isolated (unshare was not found)"
    assert need.remedy
    require([need])


def test_missing_python_headers_are_named_with_the_package(tmp_path: Path) -> None:
    class Bare(LocalRunner):
        def run(self, argv: Sequence[str | Path], **options: Any) -> Completed:
            done = super().run(argv, **options)
            return replace(done, output=f"{tmp_path}\n") if "get_path('include')" in str(argv[-1]) else done

    (need,) = (need for need in probe_toolchain(recipe(), Bare())[1] if need.what == "Python headers")
    assert (need.state, need.found) == ("missing", f"no {tmp_path}/Python.h")
    assert "python3.11-dev" in need.remedy


def test_one_figure_for_git() -> None:
    assert MINIMUM["git"] == MINIMUM_GIT
    assert f"git {MINIMUM_GIT} or newer" in _no_git().remedy


def test_the_newest_thing_that_is_asked_of_git_is_still_asked() -> None:
    assert '"apply", "--3way", "--cached"' in Path(edit.__file__).read_text()


def test_require_names_every_missing_thing_and_its_remedy() -> None:
    needs = [
        Need("git", "2.32 or newer", "2.39.5", "ok"),
        Need("g++", "11.3 or newer", "not found", "missing", "install g++"),
        Need("free disk", "200 GiB", "80 GiB", "missing", "use --work"),
        Need("network: x", "reachable", "a proxy is set", "not checked"),
    ]
    with pytest.raises(ToolchainError) as raised:
        require(needs)
    assert "g++: wanted 11.3 or newer, found not found" in raised.value.reason
    assert "free disk" in raised.value.reason
    assert raised.value.remedy == "install g++; use --work"
    assert "git" not in raised.value.reason


def test_a_closed_port_is_missing_and_an_open_one_is_ok(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        open_port, closed_port = server.getsockname()[1], closed.getsockname()[1]
        closed.close()
        by_port = {
            need.state
            for need in probe_network(
                {"open": f"https://127.0.0.1:{open_port}/simple", "closed": f"https://127.0.0.1:{closed_port}/x"}
            )
        }
    assert by_port == {"ok", "missing"}
    assert probe_network({"folder": tmp_path.as_uri()})[0].state == "ok"


def test_behind_a_proxy_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    (need,) = probe_network({"the default index": "https://index.invalid/simple"})
    assert (need.state, need.found) == ("not checked", "a proxy is set")


@pytest.mark.parametrize("place", ["127.0.0.1:9", "s3cr3t.invalid", "s3cr3t..x", f"{'s3cr3t' * 20}.example", "h:abc"])
def test_an_index_that_cannot_be_reached_is_called_by_its_name_alone(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    (need,) = probe_network({"the default index": f"https://me:s3cr3t@{place}/s3cr3t/simple"})
    assert (need.what, need.state) == ("network: the default index", "missing")
    assert "the default index" in need.remedy
    assert not re.search("s3cr3t|127", f"{need.found} {need.remedy}")
