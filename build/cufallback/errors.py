"""Every way this program can fail: one class per kind, one exit code per class, always a remedy."""

from __future__ import annotations

from enum import IntEnum, unique
from typing import ClassVar


@unique
class ExitCode(IntEnum):
    """Process exit codes. The doc text of each member is the table in docs/exit-codes.md."""

    doc: str

    def __new__(cls, value: int, doc: str) -> ExitCode:
        member = int.__new__(cls, value)
        member._value_ = value
        member.doc = doc
        return member

    OK = 0, "done, and everything that was checked holds"
    UNEXPECTED = 1, "a bug in cufallback; a report file is named on stderr"
    USAGE = 2, "the command line could not be understood"

    RECIPE = 10, "a recipe is missing or invalid"
    TOOLCHAIN = 11, "a tool, its version, disk space or another need of the plan is missing on this machine"
    SOURCE = 12, "source code could not be fetched, verified or extracted safely"
    REWRITE = 13, "a rewrite or cherry-pick of the recipe does not fit the source tree"
    CONTRACT = 14, "the source tree breaks a contract of the recipe"
    HARVEST = 15, "the tree fetches a source that the source lock does not pin exactly"
    LOCK = 16, "a lock is missing, edited, incomplete or made for something else"
    POLICY = 17, "a banned distribution is in the resolved closure"
    DOWNLOAD = 18, "a locked file could not be downloaded"
    INTEGRITY = 19, "bytes do not have the digest they must have"
    BUILD = 20, "a wheel could not be built"
    PAYLOAD = 21, "a file that should be inspected is no wheel or cannot be read"
    RECORD = 22, "a record is missing, damaged or contradicts itself"
    WORKSPACE = 23, "the work or output folder cannot be written (read-only, full, not ours)"
    BUSY = 24, "another cufallback process is building the same thing"
    COMMAND = 25, "an external command failed"
    IMAGE = 26, "an image could not be built or is not what the plan says"
    REGISTRY = 27, "a registry could not be reached, refused, or answered wrongly"
    TAG = 28, "a tag points to something else already and was left alone"
    KEY = 29, "a signing or verification key cannot be used"
    ATTESTATION = 30, "an SBOM, a provenance or a signature is malformed or speaks of something else"

    LOCK_DRIFT = 40, "finding: the committed locks differ from a fresh resolution"
    INSPECTION_FAILED = 41, "finding: an inspected wheel is not what the recipe or the toolkit ceiling demands"
    VERIFY_FAILED = 42, "finding: a record folder does not verify"

    INTERRUPTED = 130, "stopped by Ctrl-C; the next run resumes"
    TERMINATED = 143, "stopped by SIGTERM; the next run resumes"


class CufallbackError(Exception):
    """A failure that the user can understand and act on.

    Args:
        reason: what is wrong, one sentence.
        remedy: what to do about it, one sentence.
        where: file, key path or line the reason is about.
    """

    exit_code: ClassVar[ExitCode]
    _owners: ClassVar[dict[ExitCode, type[CufallbackError]]] = {}

    def __init_subclass__(cls, *, exit_code: ExitCode) -> None:
        owner = CufallbackError._owners.setdefault(exit_code, cls)
        if owner is not cls:
            msg = f"{cls.__name__} and {owner.__name__} share exit code {exit_code.value}"
            raise TypeError(msg)
        cls.exit_code = exit_code

    def __init__(self, reason: str, *, remedy: str, where: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.where = where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.reason}\n  remedy: {self.remedy}"


class UsageError(CufallbackError, exit_code=ExitCode.USAGE):
    """A value given by the user is not of its form: a driver version, an architecture."""


class RecipeError(CufallbackError, exit_code=ExitCode.RECIPE):
    """A recipe is missing or invalid."""


class ToolchainError(CufallbackError, exit_code=ExitCode.TOOLCHAIN):
    """Something that the plan needs is missing on this machine."""


class SourceError(CufallbackError, exit_code=ExitCode.SOURCE):
    """Source code could not be fetched, verified or extracted safely."""


class RewriteError(CufallbackError, exit_code=ExitCode.REWRITE):
    """A rewrite or cherry-pick does not fit the tree."""


class ContractError(CufallbackError, exit_code=ExitCode.CONTRACT):
    """The tree breaks a contract of the recipe."""


class HarvestError(CufallbackError, exit_code=ExitCode.HARVEST):
    """The tree fetches a source that is not pinned exactly."""


class LockError(CufallbackError, exit_code=ExitCode.LOCK):
    """A lock is missing, edited, incomplete or made for something else."""


class PolicyError(CufallbackError, exit_code=ExitCode.POLICY):
    """A banned distribution is in the resolved closure."""


class DownloadError(CufallbackError, exit_code=ExitCode.DOWNLOAD):
    """A locked file could not be downloaded."""


class IntegrityError(CufallbackError, exit_code=ExitCode.INTEGRITY):
    """Bytes do not have the digest they must have."""


class BuildError(CufallbackError, exit_code=ExitCode.BUILD):
    """A wheel could not be built."""


class PayloadError(CufallbackError, exit_code=ExitCode.PAYLOAD):
    """A file cannot be inspected at all (a corrupt part of a readable wheel is a finding instead)."""


class RecordError(CufallbackError, exit_code=ExitCode.RECORD):
    """A record is missing, damaged or contradicts itself."""


class WorkspaceError(CufallbackError, exit_code=ExitCode.WORKSPACE):
    """The work or output folder cannot be used."""


class BusyError(CufallbackError, exit_code=ExitCode.BUSY):
    """Another process holds the lock of the same build."""


class ImageError(CufallbackError, exit_code=ExitCode.IMAGE):
    """An image could not be built, or it is not what the plan says."""


class RegistryError(CufallbackError, exit_code=ExitCode.REGISTRY):
    """A registry could not be reached, refused, or answered wrongly."""


class TagError(CufallbackError, exit_code=ExitCode.TAG):
    """A tag points to something else, and nobody asked to move it."""


class KeyFileError(CufallbackError, exit_code=ExitCode.KEY):
    """A key file is missing, readable by others, of another kind, or its password is wrong."""


class AttestationError(CufallbackError, exit_code=ExitCode.ATTESTATION):
    """An SBOM, a provenance or a signed envelope is malformed or speaks of something else."""


class InspectionError(CufallbackError, exit_code=ExitCode.INSPECTION_FAILED):
    """A built wheel is not what the recipe demands."""


class CommandError(CufallbackError, exit_code=ExitCode.COMMAND):
    """An external command failed and no stage gave the failure a better name."""
