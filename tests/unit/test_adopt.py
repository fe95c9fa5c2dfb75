"""Builds that differ only in their image: stages whose inputs are the same are taken over from each other."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cufallback import pipeline
from cufallback.pipeline import STATE_FILE, Context, Outcome, Pipeline, Setting, Stage, StageState
from cufallback.process import RecordingRunner
from cufallback.progress import Silent
from cufallback.stages import STAGES
from cufallback.store import discard, sha256_file

ONE, TWO, THREE = "1" * 64, "2" * 64, "3" * 64
WHEELS = "a" * 64


class Said(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Workshop:
    """Builds with the flags of the real stages and work that only counts; ``run`` returns the stages that worked."""

    def __init__(self, root: Path) -> None:
        self.root, self.worked, self.said = root, [], Said()  # type: ignore[var-annotated]

    def stages(self) -> tuple[Stage, ...]:
        return tuple(
            Stage(stage.name, stage.summary, self._work(stage.name), stage.of_image, stage.judges, stage.reads)
            for stage in STAGES
        )

    def _work(self, name: str) -> Callable[[Context], Outcome]:
        def run(context: Context) -> Outcome:
            self.worked.append(name)
            (context.folder / "tree").mkdir()
            (context.folder / "tree" / "inner").write_text(f"{name} {context.plan.wheels_id}")
            (context.folder / "out").write_text(name)
            return Outcome({"said": name}, (context.folder / "out", context.folder / "tree"))

        return run

    def run(
        self, build_id: str, *, wheels: str = WHEELS, recipe: bytes = b"", dockerfile: bytes = b"", engine: str = "26"
    ) -> list[str]:
        inputs = {"r.toml": recipe, "dockerfiles/x.Dockerfile": dockerfile}
        plan: Any = SimpleNamespace(
            build_id=build_id,
            short_id=build_id[:16],
            wheels_id=wheels,
            inputs=inputs,
            image_inputs=frozenset({"dockerfiles/x.Dockerfile"}),
        )
        self.worked.clear()
        settings = {
            name: Setting(None, key) for name, key in (("image tools", engine), ("builder", "b"), ("dist", build_id))
        }
        Pipeline(
            plan=plan,
            stages=self.stages(),
            work=self.root / "work",
            dist=self.root / "dist" / build_id,
            mirrors=(),
            runner=RecordingRunner(),
            progress=self.said,
            clock=lambda: 0.0,
            settings=settings,
        ).run()
        return list(self.worked)

    def folder(self, build_id: str, stage: str) -> Path:
        return self.root / "work" / "work" / build_id[:16] / stage


ALL = [stage.name for stage in STAGES]
SHARED = ["prefetch", "wheels", "inspect"]
OWN = ["image", "attest", "record"]


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256_file(path)
        for path in folder.rglob("*")
        if path.name != STATE_FILE and path.is_file()
    }


def test_a_build_with_another_image_takes_over_what_it_shares(shop: Workshop) -> None:
    assert shop.run(ONE) == ALL
    assert shop.run(TWO, dockerfile=b"FROM other") == OWN
    for stage in SHARED:
        assert files(shop.folder(TWO, stage)) == files(shop.folder(ONE, stage))
        state = StageState.read(shop.folder(TWO, stage) / STATE_FILE)
        assert state is not None
        assert state.result == {"said": stage}
        assert f"{stage}: taken over from build {ONE[:16]}, whose inputs are the same" in shop.said.lines
    assert shop.run(TWO, dockerfile=b"FROM other") == []
    assert shop.run(ONE) == []


def test_what_was_taken_over_is_linked_and_outlives_the_other_build(shop: Workshop) -> None:
    shop.run(ONE)
    shop.run(TWO)
    one, two = (shop.folder(build, "wheels") / "tree" / "inner" for build in (ONE, TWO))
    assert one.samefile(two)
    shutil.rmtree(shop.folder(ONE, ".").resolve())
    assert shop.run(TWO) == []
    assert shop.run(THREE) == OWN, "and is taken over in turn"


def test_the_other_builds_own_state_is_not_touched(shop: Workshop) -> None:
    shop.run(ONE)
    before = {stage: (shop.folder(ONE, stage) / STATE_FILE).read_bytes() for stage in ALL}
    shop.run(TWO)
    assert before == {stage: (shop.folder(ONE, stage) / STATE_FILE).read_bytes() for stage in ALL}


@pytest.mark.parametrize(
    ("changed", "worked"),
    [
        ({"wheels": "b" * 64}, ALL),
        ({"recipe": b"size_limit_mib = 7"}, ["prefetch", "inspect", *OWN]),
        ({"dockerfile": b"FROM other"}, OWN),
        ({"engine": "28"}, OWN),
    ],
)
def test_only_equal_inputs_are_taken_over(shop: Workshop, changed: dict[str, Any], worked: list[str]) -> None:
    shop.run(ONE)
    assert shop.run(TWO, **changed) == worked


def test_stages_that_read_settings_are_never_taken_over(shop: Workshop) -> None:
    """Even a build id that is the same elsewhere: what a setting stands for may be of the folder it lies in."""
    assert {stage.name for stage in STAGES if stage.reads} == set(OWN)
    shop.run(ONE)
    for stage in OWN:  # a sibling whose every stage has the very inputs of this build
        shutil.copytree(shop.folder(ONE, stage), shop.root / "work" / "work" / "0" / stage)
        discard(shop.folder(ONE, stage))
    assert shop.run(ONE) == OWN


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_before_the_image_reads_nothing_of_it(stage: Stage) -> None:
    plan: Any = SimpleNamespace(
        build_id=ONE, wheels_id=WHEELS, inputs={"r": b"1", "d": b"2"}, image_inputs=frozenset({"d"})
    )
    other: Any = SimpleNamespace(
        build_id=TWO, wheels_id=WHEELS, inputs={"r": b"1", "d": b"3"}, image_inputs=frozenset({"d"})
    )
    settings = {name: Setting(None, "key") for name in stage.reads}
    one, two = pipeline._inputs(plan, stage, settings), pipeline._inputs(other, stage, settings)
    assert (one == two) == (stage.name in SHARED)
    assert set(stage.reads) <= set(one)
    assert one["code"] == pipeline.code_digest()


def _altered(folder: Path) -> None:
    path = folder / "tree" / "inner"
    times = path.stat()
    path.write_text(path.read_text().swapcase())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _edited(folder: Path) -> None:
    state = json.loads((folder / STATE_FILE).read_bytes())
    (folder / STATE_FILE).write_text(json.dumps({**state, "result": {"said": "a lie"}}))


def _pipe(folder: Path) -> None:
    discard(folder / STATE_FILE)
    os.mkfifo(folder / STATE_FILE)


def _linked(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "altered file": _altered,
    "missing file": lambda folder: (folder / "tree" / "inner").unlink(),
    "added file": lambda folder: (folder / "tree" / "more").write_text("x"),
    "missing tree": lambda folder: shutil.rmtree(folder / "tree"),
    "no state": lambda folder: (folder / STATE_FILE).unlink(),
    "empty state": lambda folder: (folder / STATE_FILE).write_bytes(b""),
    "edited state": _edited,
    "a link": _linked,
    "a pipe for a state": _pipe,
}


@pytest.mark.parametrize("stage", SHARED)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_sibling_is_not_taken_over(shop: Workshop, stage: str, damage: str) -> None:
    shop.run(ONE)
    DAMAGE[damage](shop.folder(ONE, stage))
    assert shop.run(TWO) == [stage, *OWN]
    assert (shop.folder(TWO, stage) / "tree" / "inner").read_text() == f"{stage} {WHEELS}"


def test_behind_a_damaged_sibling_the_next_is_taken_over(shop: Workshop) -> None:
    shop.run(ONE)
    shutil.copytree(shop.folder(ONE, "."), shop.root / "work" / "work" / "0")
    _altered(shop.root / "work" / "work" / "0" / "wheels")
    assert shop.run(TWO) == OWN


VANISH: dict[str, Callable[[Path], object]] = {
    "all of it": shutil.rmtree,
    "a file of it": lambda folder: (folder / "tree" / "inner").unlink(),
    "its tree": lambda folder: shutil.rmtree(folder / "tree"),
    "its bytes": lambda folder: (folder / "tree" / "inner").write_text("other"),
}


@pytest.mark.parametrize("vanish", VANISH)
@pytest.mark.parametrize("before", [True, False])
def test_a_sibling_that_vanishes_while_it_is_taken_over(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, vanish: str, before: bool
) -> None:
    """Between its check and the copy, and after the copy; linked files lose their bytes with the sibling's."""
    shop.run(ONE)
    real = pipeline.link_tree

    def faulty_link_tree(source: Path, target: Path) -> None:
        if before:
            VANISH[vanish](source)
        real(source, target)
        if not before:
            VANISH[vanish](target)

    monkeypatch.setattr(pipeline, "link_tree", faulty_link_tree)
    assert shop.run(TWO) == ALL
    for stage in SHARED:
        assert (shop.folder(TWO, stage) / "tree" / "inner").read_text() == f"{stage} {WHEELS}"
    monkeypatch.undo()
    assert shop.run(TWO) == []


def test_a_tree_that_cannot_be_linked_is_made_anew(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.run(ONE)

    def failing_link_tree(_source: Path, target: Path) -> None:
        (target / "half").mkdir(parents=True)
        raise shutil.Error([("a", "b", "vanished")])

    monkeypatch.setattr(pipeline, "link_tree", failing_link_tree)
    assert shop.run(TWO) == ALL
    assert not (shop.folder(TWO, "wheels") / "half").exists()
