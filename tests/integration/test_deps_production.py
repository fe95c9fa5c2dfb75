"""The production recipes' surgery on the real source distributions, and their bans on what PyPI resolves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.unit.index_server import FakeIndex, make_wheel, serving

from cufallback.deps.compile import resolve
from cufallback.deps.policy import violations
from cufallback.deps.surgery import Operated, operate
from cufallback.deps.target import target_of
from cufallback.errors import LockError
from cufallback.process import LocalRunner
from cufallback.recipe import load_recipe

pytestmark = [pytest.mark.network]

RECIPES = {"kimi-k3-cu129": "0.28.0", "kimi-k3-0.27-cu129": "0.27.1"}


@pytest.fixture(params=sorted(RECIPES))
def operated(request: pytest.FixtureRequest, extracted: Callable[[str], Path]) -> tuple[str, dict[str, Operated]]:
    recipe = load_recipe(request.param)
    return request.param, operate(extracted(RECIPES[request.param]), recipe.deps, target_of(recipe))


def test_no_line_asks_for_cuda_13(operated: tuple[str, dict[str, Operated]]) -> None:
    _name, made = operated
    for which in made.values():
        requirements = {canonicalize_name(line.name): line for line in map(Requirement, which.lines)}
        assert not [line for line in which.lines if "cu13" in line or "://" in line or line.startswith("-")]
        assert str(requirements["torch"]) == "torch==2.13.0+cu129"
    runtime = {canonicalize_name(line.name): line for line in map(Requirement, made["runtime"].lines)}
    assert str(runtime["torchvision"]) == "torchvision==0.28.0+cu129"
    assert str(runtime["torchaudio"]) == "torchaudio==2.11.0+cu129"
    assert not runtime["nvidia-cutlass-dsl"].extras
    assert runtime["humming-kernels"].extras == {"cu12"}
    assert "flashinfer-cubin" not in runtime
    assert len(runtime) > 70


def test_every_change_has_its_reason_and_its_line(
    operated: tuple[str, dict[str, Operated]], extracted: Callable[[str], Path]
) -> None:
    name, made = operated
    reasons = {edit.why for edit in load_recipe(name).deps.edit}
    given = {edit.why for which in made.values() for edit in which.edits}
    assert reasons <= given
    for which in made.values():
        for edit in which.edits:
            assert len(edit.why) > 10
            if edit.file:
                text = (extracted(RECIPES[name]) / edit.file).read_text().splitlines()[edit.line - 1]
                assert text.startswith(edit.before)
    dropped = [edit.before for edit in made["runtime"].edits if edit.file and not edit.after]
    assert "--extra-index-url https://flashinfer.ai/whl/" in dropped


def test_edits_of_one_release_do_not_pass_for_another(extracted: Callable[[str], Path]) -> None:
    recipe = load_recipe("kimi-k3-cu129")
    with pytest.raises(LockError, match=r"'torch==2\.14\.0', the recipe's edit expects 'torch==2\.13\.0'") as caught:
        operate(extracted("0.33.0"), recipe.deps, target_of(recipe))
    assert caught.value.where is not None
    assert caught.value.where.startswith("requirements/build/cuda.txt:")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_closure_holds_to_the_bans(name: str, extracted: Callable[[str], Path], tmp_path: Path) -> None:
    """Everything but the packages of PyTorch's and FlashInfer's own indexes is real; those are empty stand-ins."""
    recipe = load_recipe(name)
    stand_ins = {
        "torch": ("2.13.0+cu129", ["nvidia-nccl-cu12==2.29.7"]),  # as the real one asks
        "torchaudio": ("2.11.0+cu129", []),
        "torchcodec": ("0.14.0+cu129", []),
        "torchvision": ("0.28.0+cu129", ["torch==2.13.0"]),
        "flashinfer_jit_cache": ("0.6.16.post3+cu129", []),
    }
    own = FakeIndex()
    for package, (version, requires) in stand_ins.items():
        own.add(f"{package}-{version}-py3-none-any.whl", make_wheel(package, version, requires=requires))
    with serving(own):
        index = tuple(index.model_copy(update={"url": own.url}) for index in recipe.deps.index)
        recipe = recipe.model_copy(update={"deps": recipe.deps.model_copy(update={"index": index})})
        for which, made in operate(extracted(RECIPES[name]), recipe.deps, target_of(recipe)).items():
            resolution = resolve(made, recipe, mirrors=(), workdir=tmp_path, runner=LocalRunner())
            found, allowed = violations(resolution.closure, recipe.deps.ban)
            assert found == ()
            assert {item.name for item in allowed} <= {"nvidia-cuda-nvdisasm", "nvidia-ml-py"}
            versions = {item.name: item.version for item in resolution.closure}
            assert (versions["torch"], versions["nvidia-nccl-cu12"]) == ("2.13.0+cu129", "2.30.7")
            assert all(resolution.hashes.values())
            if which == "runtime":
                assert versions["flashinfer-jit-cache"] == "0.6.16.post3+cu129"
                assert versions["cuda-python"].startswith("12.")
