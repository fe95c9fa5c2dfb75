"""Every kernel message of real vLLM source trees is understood, and the recipes use upstream's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cufallback.recipe import load_recipe
from cufallback.wheel.buildlog import parse_build_log

pytestmark = [pytest.mark.network, pytest.mark.slow]

_MESSAGE = re.compile(r'\bmessage\(\s*STATUS\s+((?:"(?:[^"\\]|\\.)*"\s*)+)\)')
_SPEAKS_OF_KERNELS = re.compile(
    r"^(Building|Not building) |will not compile|^\w+ CUDA architectures|Skipping build|skipping skinny"
)


def kernel_messages(tree: Path) -> Iterator[str]:
    """Yield the text of each STATUS message about a kernel, as CMake would print it, with stand-in values."""
    for file in (tree / "CMakeLists.txt", *sorted((tree / "cmake").rglob("*.cmake"))):
        for call in _MESSAGE.finditer(file.read_text(encoding="utf-8")):
            text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', call[1]))
            if _SPEAKS_OF_KERNELS.search(text.removeprefix("[QUTLASS] ")):
                yield re.sub(r"\$\{\w*ARCH\w*\}", "9.0a;10.0a", re.sub(r"\$\{\w*VERSION\}", "12.9.86", text))


@pytest.mark.parametrize(("version", "at_least"), [("0.27.1", 50), ("0.28.0", 50), ("0.30.0", 50), ("0.33.0", 50)])
def test_every_kernel_message_is_understood(extracted: Callable[[str], Path], version: str, at_least: int) -> None:
    messages = list(kernel_messages(extracted(version)))
    assert len(messages) >= at_least
    for message in messages:
        report = parse_build_log([f"-- {message}"])
        assert len(report.built) + len(report.not_built) == 1, message
        for _name, architectures in report.built:
            assert architectures in ((), ("9.0a", "10.0a")), message


@pytest.mark.parametrize(("recipe", "version"), [("kimi-k3-cu129", "0.28.0"), ("kimi-k3-0.27-cu129", "0.27.1")])
def test_each_kernel_row_names_what_its_tree_can_print(
    extracted: Callable[[str], Path], recipe: str, version: str
) -> None:
    report = parse_build_log(f"-- {message}" for message in kernel_messages(extracted(version)))
    names = {name for name, _ in (*report.built, *report.not_built)}
    rows = load_recipe(recipe).cuda.kernel
    assert rows
    assert {row.name for row in rows} <= names


def test_the_reader_fails_when_upstream_rewords(extracted: Callable[[str], Path]) -> None:
    message = next(text for text in kernel_messages(extracted("0.28.0")) if text.startswith("Building"))
    assert not parse_build_log([f"-- {message.replace(' for archs', ' on archs')}"]).built
