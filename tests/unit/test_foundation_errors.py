from __future__ import annotations

import pytest

from cufallback.errors import CufallbackError, ExitCode, RecipeError


def kinds() -> list[type[CufallbackError]]:
    found, open_ = [], [CufallbackError]
    while open_:
        for kind in open_.pop().__subclasses__():
            # Other tests may define classes of their own; what they share a code with was refused.
            if kind.__module__.startswith("cufallback"):
                found.append(kind)
                open_.append(kind)
    return found


def test_each_kind_of_error_has_an_exit_code_of_its_own() -> None:
    codes = [kind.exit_code for kind in kinds()]
    assert len(codes) == len(set(codes)) > 10


def test_codes_of_errors_leave_alone_those_of_shells_and_python() -> None:
    for kind in kinds():
        assert kind.exit_code == ExitCode.USAGE or 10 <= kind.exit_code < 64, kind


def test_every_exit_code_says_what_it_means() -> None:
    docs = [code.doc for code in ExitCode]
    assert all(docs)
    assert len(set(docs)) == len(docs)
    assert ExitCode.INTERRUPTED == 130
    assert ExitCode.TERMINATED == 143


def test_a_second_class_with_the_same_exit_code_is_refused() -> None:
    with pytest.raises(TypeError, match="share exit code 10"):

        class _Copy(CufallbackError, exit_code=ExitCode.RECIPE):
            pass


def test_a_class_without_an_exit_code_is_refused() -> None:
    with pytest.raises(TypeError, match="exit_code"):

        class _Codeless(CufallbackError):  # type: ignore[call-arg]
            pass


def test_an_error_without_a_remedy_is_refused() -> None:
    with pytest.raises(TypeError, match="remedy"):
        RecipeError("wrong")  # type: ignore[call-arg]


def test_text_of_an_error_has_place_reason_and_remedy() -> None:
    assert str(RecipeError("wrong", remedy="do right", where="a.toml:3")) == "a.toml:3: wrong\n  remedy: do right"
    assert str(RecipeError("wrong", remedy="do right")) == "wrong\n  remedy: do right"
