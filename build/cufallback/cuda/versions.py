"""The three kinds of number that CUDA questions are about: driver versions, architectures, PTX ISA versions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering
from typing import Literal

from cufallback.errors import UsageError

_DRIVER = re.compile(r"(\d{3})(?:\.(\d{1,3})(?:\.(\d{1,3}))?)?")
_ARCHITECTURE = re.compile(r"(?:sm_|compute_)?(?:(\d{1,2})\.(\d)|(\d{1,2})(\d))([af]?)")
_ISA = re.compile(r"(\d{1,2})\.(\d{1,2})")

Suffix = Literal["", "a", "f"]


@total_ordering
@dataclass(frozen=True)
class Driver:
    """A version of NVIDIA's Linux driver: a full one such as 575.57.08, or a whole branch such as 575.

    A branch stands for its newest release: the question "can R575 do this" asks whether some release of it can.
    """

    branch: int
    release: tuple[int, ...] | None
    text: str

    @staticmethod
    def parse(text: str) -> Driver:
        """Read ``575.57.08``, ``570.26`` or ``575``.

        Raises:
            UsageError: not a driver version (a CUDA version such as 12.9, a product name, junk).
        """
        match = _DRIVER.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{text!r} is not a driver version",
                remedy="give what nvidia-smi prints as Driver Version, such as 575.57.08, or a branch, such as 575",
            )
        parts = tuple(int(part) for part in match.groups()[1:] if part is not None)
        return Driver(int(match[1]), parts or None, match[0])

    @staticmethod
    def first_of(branch: int) -> Driver:
        """Return a floor that every release of a branch passes, shown as the branch."""
        return Driver(branch, (), str(branch))

    def _key(self) -> tuple[int, int, tuple[int, ...]]:
        return (self.branch, 0, self.release) if self.release is not None else (self.branch, 1, ())

    def __lt__(self, other: Driver) -> bool:
        return self._key() < other._key()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Driver) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return self.text


@total_ordering
@dataclass(frozen=True)
class Architecture:
    """A code target: 9.0a, 10.0f, 8.0. Without suffix it is also a GPU's compute capability."""

    major: int
    minor: int
    suffix: Suffix = ""

    @staticmethod
    def parse(text: str) -> Architecture:
        """Read ``9.0a``, ``90a``, ``sm_90a`` or ``compute_90a``.

        Raises:
            UsageError: not an architecture.
        """
        match = _ARCHITECTURE.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{text!r} is not a CUDA architecture", remedy="write it as in TORCH_CUDA_ARCH_LIST: 9.0a, 10.3, 10.0f"
            )
        suffix: Suffix = "a" if match[5] == "a" else "f" if match[5] == "f" else ""
        return Architecture(int(match[1] or match[3]), int(match[2] or match[4]), suffix)

    @staticmethod
    def of_number(number: int, suffix: Suffix = "") -> Architecture:
        """Return the architecture that a fatbin entry writes as a number: 90, 103."""
        return Architecture(number // 10, number % 10, suffix)

    @property
    def capability(self) -> Architecture:
        """The compute capability: the same without suffix."""
        return Architecture(self.major, self.minor)

    @property
    def sm(self) -> str:
        """The name in NVIDIA's tools: sm_90a."""
        return f"sm_{self.major}{self.minor}{self.suffix}"

    def __lt__(self, other: Architecture) -> bool:
        return (self.major, self.minor, self.suffix) < (other.major, other.minor, other.suffix)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}"


@dataclass(frozen=True, order=True)
class Isa:
    """A PTX ISA version: the ``.version`` of a PTX file."""

    major: int
    minor: int

    @staticmethod
    def parse(text: str) -> Isa:
        """Read ``8.8``.

        Raises:
            UsageError: not a PTX ISA version.
        """
        match = _ISA.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{text!r} is not a PTX ISA version", remedy="write two numbers with a dot, such as 8.8")
        return Isa(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"
