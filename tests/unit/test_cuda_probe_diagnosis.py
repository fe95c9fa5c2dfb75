"""What the probe makes of numbers: errors, GPUs and driver versions."""

from __future__ import annotations

import pytest

from cuda_probe.diagnosis import _FIRST_DRIVER, STATUSES, explain, fitting_sass, kernel_driver
from cufallback.cuda.questions import isa_of, minimum_driver_for_ptx


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    [
        (["9.0a", "10.0a", "10.3a"], "9.0", "9.0a"),
        (["9.0a", "10.0a", "10.3a"], "10.0", "10.0a"),
        (["9.0a", "10.0a", "10.3a"], "10.3", "10.3a"),
        (["9.0a", "10.0a"], "10.3", None),  # `a` runs nowhere else
        (["9.0a", "10.0a"], "12.0", None),
        (["10.0f"], "10.3", "10.0f"),  # `f` runs in its family
        (["10.3f"], "10.0", None),  # but not on an older member
        (["8.0"], "8.9", "8.0"),  # plain SASS runs on later minors
        (["8.0", "8.6"], "8.9", "8.6"),
        (["8.9"], "8.0", None),
        (["8.0"], "9.0", None),  # never on another major
        (["nonsense"], "9.0", None),
        ([], "9.0", None),
    ],
)
def test_sass_fits_by_cudas_rules(architectures: list[str], capability: str, expected: str | None) -> None:
    assert fitting_sass(architectures, capability) == expected


@pytest.mark.parametrize(
    ("code", "status", "reason", "remedy"),
    [
        (35, "driver_too_old", "too old for the CUDA 12.9 runtime", "575.51.03"),
        (100, "no_gpu", "no GPU", "CUDA_VISIBLE_DEVICES"),
        (209, "failed", "no kernel image", "architecture"),
        (222, "driver_too_old", "cannot compile PTX of CUDA 12.9", "575.51.03"),
        (802, "driver_mismatch", "fabric", "nvidia-fabricmanager"),
        (803, "driver_mismatch", "different driver versions", "reboot"),
        (804, "driver_mismatch", "forward compatibility", "cuda-compat"),
    ],
)
def test_errors_have_a_sentence_and_a_remedy(code: int, status: str, reason: str, remedy: str) -> None:
    found = explain(code, "12.9")
    assert found.status == status
    assert reason in found.reason
    assert remedy in found.remedy


def test_the_first_drivers_are_those_of_the_facts() -> None:
    for toolkit, driver in _FIRST_DRIVER.items():
        floor = minimum_driver_for_ptx(isa_of(toolkit))
        assert floor is not None
        assert str(floor.driver) == driver


def test_other_errors_keep_their_number_and_name() -> None:
    found = explain(4711, "12.9", "CUDA_ERROR_OF_THE_FUTURE")
    assert found.status == "failed"
    assert found.reason == "CUDA error 4711 (CUDA_ERROR_OF_THE_FUTURE)"


def test_every_status_has_its_own_exit_code() -> None:
    codes = [code for code, _meaning in STATUSES.values()]
    assert len(set(codes)) == len(codes)
    assert STATUSES["passed"][0] == 0
    assert not {1, 2} & set(codes)  # Python's own for a fault and for a wrong command line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.57.08  Sat May 24 2025\nGCC version: 12.2.0\n",
            "575.57.08",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  450.80  Wed\n", "450.80"),
        ("GCC version: gcc 12.2.0\n", None),
        ("", None),
    ],
)
def test_the_kernel_modules_version_is_read(text: str, expected: str | None) -> None:
    assert kernel_driver(text) == expected
