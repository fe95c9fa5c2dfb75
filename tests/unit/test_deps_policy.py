"""Bans on a closure: what is caught, what passes by exception, who requires it."""

from __future__ import annotations

import pytest

from cufallback.deps.policy import Resolved, require_allowed, violations
from cufallback.errors import PolicyError
from cufallback.recipe import Ban, load_recipe

PRODUCTION = ("kimi-k3-cu129", "kimi-k3-0.27-cu129")

# name, version, banned by the production recipes
TABLE = [
    ("nvidia-cublas-cu13", "13.1.0", True),
    ("nvidia-nccl-cu13", "2.30.7", True),
    ("nvidia-cutlass-dsl-libs-cu13", "4.6.2", True),
    ("nvidia-cublas-cu12", "12.9.1.4", False),
    ("nvidia-nccl-cu12", "2.30.7", False),
    ("nvidia-cuda-runtime", "13.0.96", True),
    ("nvidia-cublas", "13.1.0.3", True),
    ("nvidia-cublas", "13.0.0rc1", False),  # PEP 440: before 13; no resolution here admits pre-releases
    ("nvidia-cufft", "12.0.0.61", False),  # CUDA 13's own cuFFT is 12: caught by what requires it, not by number
    ("nvidia-cudnn-cu12", "9.20.0", False),
    ("nvidia-cuda-nvdisasm", "13.1.80", None),
    ("nvidia-ml-py", "13.580.82", None),
    ("nvidia-cudnn-frontend", "1.19.1", False),
    ("nvidia-nvfuture-cu12", "13.0", False),
    ("cuda-toolkit", "12.9.1", False),
    ("cuda-toolkit", "13.0.2", True),
    ("cuda-python", "12.9.4", False),
    ("cuda-python", "13.0.3", True),
    ("cuda-bindings", "13.1.0", True),
    ("cuda-bindings", "12.9.4", False),
    ("cuda-pathfinder", "13.0", False),
    ("cupy-cuda13x", "14.0.0", True),
    ("cupy-cuda12x", "14.0.0", False),
    ("torch", "2.13.0+cu129", False),
    ("torch", "2.13.0", True),
    ("torch", "2.13.0+cu130", True),
    ("torch", "2.13.0+cpu", True),
    ("torch", "2.13.0+cu129.post1", True),
    ("torch", "2.14.0+cu129", True),
    ("Torch", "2.14.0", True),
    ("torchvision", "0.28.0", False),
]


@pytest.mark.parametrize("recipe", PRODUCTION)
@pytest.mark.parametrize(("name", "version", "banned"), TABLE)
def test_production_bans(recipe: str, name: str, version: str, banned: bool | None) -> None:
    found, allowed = violations([Resolved(name, version, direct=True)], load_recipe(recipe).deps.ban)
    assert bool(found) is bool(banned)
    assert [item.name for item in allowed] == ([name] if banned is None else [])


@pytest.mark.parametrize(
    ("name", "version", "ban", "caught"),
    [
        ("a-b", "1", {"name": "A_B"}, True),
        ("nvidia-x", "1", {"name": "Nvidia.*"}, True),
        ("a-cu13", "1", {"name": "*-cu13", "unsuffixed": True}, False),
        ("a-cuda13x", "1", {"name": "*", "unsuffixed": True}, False),
        ("a-cu", "1", {"name": "*", "unsuffixed": True}, True),
        ("a", "13.1+local", {"name": "a", "versions": ">=13"}, True),
        ("a", "13.1+local", {"name": "a", "versions": "==13.1"}, True),
        ("a", "13.1+local", {"name": "a", "versions": "==13.1+other"}, False),
    ],
)
def test_ban_on_names_and_versions(name: str, version: str, ban: dict[str, object], caught: bool) -> None:
    found, _allowed = violations([Resolved(name, version)], [Ban(why="ten letters", **ban)])
    assert bool(found) is caught


def chain_of(name: str, closure: list[Resolved]) -> tuple[str, ...]:
    (found,), _allowed = violations(closure, [Ban(name=name, why="ten letters")])
    return found.chain


@pytest.mark.parametrize(
    ("closure", "chain"),
    [
        ([Resolved("bad", "1", direct=True)], "the requirements → bad"),
        ([Resolved("bad", "1", ("a",), direct=True), Resolved("a", "1", direct=True)], "the requirements → bad"),
        ([Resolved("a", "1", direct=True), Resolved("bad", "1", ("a",))], "the requirements → a → bad"),
        (
            # two ways; the shorter is told
            [
                Resolved("a", "1", direct=True),
                Resolved("b", "1", ("a",)),
                Resolved("c", "1", direct=True),
                Resolved("bad", "1", ("b", "C")),
            ],
            "the requirements → c → bad",
        ),
        (
            [Resolved("bad", "1", ("a",)), Resolved("a", "1", ("bad", "b")), Resolved("b", "1", ("a",), direct=True)],
            "the requirements → b → a → bad",
        ),
        ([Resolved("bad", "1", ("a",)), Resolved("a", "1", ("bad",))], "bad"),
        ([Resolved("bad", "1", ("gone",))], "bad"),
    ],
)
def test_chain_is_the_shortest_and_survives_cycles(closure: list[Resolved], chain: str) -> None:
    assert " → ".join(chain_of("bad", closure)) == chain


def test_error_names_every_banned_distribution_with_reason_and_chain() -> None:
    closure = [Resolved("a", "1", direct=True), Resolved("x-cu13", "2", ("a",)), Resolved("y-cu13", "3", ("x-cu13",))]
    with pytest.raises(PolicyError) as caught:
        require_allowed(closure, [Ban(name="*-cu13", why="overwrites its twin")], where="here")
    assert caught.value.reason.splitlines()[1:] == [
        "  x-cu13 2: overwrites its twin (required by the requirements → a → x-cu13)",
        "  y-cu13 3: overwrites its twin (required by the requirements → a → x-cu13 → y-cu13)",
    ]
    assert caught.value.where == "here"


def test_exception_of_one_ban_is_none_of_another() -> None:
    bans = [
        Ban(name="a*", allow=("A-A",), why="first reason"),
        Ban(name="*", versions=">=2", why="second reason"),
    ]
    found, allowed = violations([Resolved("a-a", "1"), Resolved("a_a", "1")], bans)
    assert (found, [item.why for item in allowed]) == ((), ["first reason"])
    assert [item.why for item in violations([Resolved("a-a", "2")], bans)[0]] == ["second reason"]
