"""Keys that sign and verify: PEM, ECDSA on P-256, from a file or the environment, never shown.

A key id is the SHA-256 of the public key's SubjectPublicKeyInfo in DER, as 64 hex digits: the same for both halves of a
pair and for anyone who computes it (``openssl pkey -pubin -in cosign.pub -outform DER | sha256sum``). DSSE treats key
ids as hints, and so does :mod:`cufallback.attest.sign`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cufallback.errors import KeyFileError, WorkspaceError
from cufallback.store import open_regular, sha256_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
    from securesystemslib.signer import Key, Signer, SSlibKey

KEY_VARIABLE = "CUFALLBACK_SIGNING_KEY"
PASSWORD_VARIABLE = "CUFALLBACK_SIGNING_PASSWORD"  # noqa: S105 - the name of a variable

_LARGEST = 64 << 10  # bytes; a P-256 key in PEM has a few hundred
_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
_PRIVATE = ("PRIVATE KEY", "ENCRYPTED PRIVATE KEY", "EC PRIVATE KEY")  # PKCS#8, the same encrypted, SEC1
_MAKE = (
    "make a pair: openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out cosign.pem, "
    "chmod 600 cosign.pem, openssl pkey -in cosign.pem -pubout -out cosign.pub"
)


def load_private_key(path: Path | None, *, environ: Mapping[str, str], ask: Callable[[], str] | None = None) -> Signer:
    """Return what signs with the private key in ``path`` or, without a path, in ``CUFALLBACK_SIGNING_KEY``.

    Args:
        path: a PEM file (PKCS#8 or SEC1) that only its owner, this user or root, may read; a link is followed.
        environ: may hold the PEM text and, for an encrypted key, ``CUFALLBACK_SIGNING_PASSWORD``.
        ask: asks for the password of an encrypted key; None where nobody can answer.

    Raises:
        KeyFileError: there is no key, others may read it, it is of another kind, or the password is wrong.
    """
    if path is not None:
        where, text = str(path), _read(path, private=True)
    elif environ.get(KEY_VARIABLE):
        where, text = KEY_VARIABLE, environ[KEY_VARIABLE]
    else:
        raise KeyFileError("there is no signing key", remedy=f"name a key file or set {KEY_VARIABLE}; or {_MAKE}")
    block = _private_block(text, where)
    encrypted = block.startswith("-----BEGIN ENCRYPTED ") or "Proc-Type: 4,ENCRYPTED" in block
    return _signer(block, _password(environ, ask, where) if encrypted else None, where)


def load_public_key(path: Path) -> Key:
    """Return what verifies with the public key in ``path``.

    Args:
        path: a PEM file with one SubjectPublicKeyInfo (``-----BEGIN PUBLIC KEY-----``); a link is followed.

    Raises:
        KeyFileError: there is no such file, it holds a private key or none at all, or a key of another kind.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    where, text = str(path), _read(path, private=False)
    labels, blocks = _blocks(text)
    if any("PRIVATE" in label for label in labels):
        raise KeyFileError(
            "holds a private key where a public one is wanted",
            remedy="give the public half: openssl pkey -in cosign.pem -pubout -out cosign.pub",
            where=where,
        )
    if labels != ["PUBLIC KEY"]:
        raise KeyFileError(
            f"holds {', '.join(labels) or 'no PEM block'} instead of one PUBLIC KEY",
            remedy="give the file that openssl pkey -pubout or cosign generate-key-pair wrote (cosign.pub)",
            where=where,
        )
    try:
        key = load_pem_public_key(blocks[0].encode())
    except (ValueError, UnsupportedAlgorithm):
        raise KeyFileError("the public key cannot be decoded", remedy="fetch the file again", where=where) from None
    return _verifier(key, where)


def _read(path: Path, *, private: bool) -> str:
    remedy = f"name the {'private' if private else 'public'} key's PEM file"
    try:
        with open_regular(path) as file:
            content = file.read(_LARGEST + 1)
            # Of a key that was taken for a private one, the kind is the fault, not its rights.
            if private and not content.startswith(b"-----BEGIN PUBLIC KEY-----"):
                _require_own(os.fstat(file.fileno()), str(path))
    except WorkspaceError as error:
        raise KeyFileError(error.reason, remedy=remedy, where=str(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise KeyFileError(f"cannot be read: {reason}", remedy=remedy, where=str(path)) from None
    if len(content) > _LARGEST:
        raise KeyFileError(f"has more than {_LARGEST} bytes and is no key", remedy=remedy, where=str(path))
    return content.decode("ascii", errors="replace")


def _require_own(facts: os.stat_result, where: str) -> None:
    if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(
            f"others than its owner may use it (mode {stat.S_IMODE(facts.st_mode):04o})",
            remedy=f"take their rights away: chmod 600 {where}",
            where=where,
        )
    if facts.st_uid not in (os.geteuid(), 0):
        raise KeyFileError(
            f"belongs to user {facts.st_uid}, who could exchange it",
            remedy="use a key file of your own or of root",
            where=where,
        )


def _private_block(text: str, where: str) -> str:
    """Return the one private key block; parameters that ``openssl ecparam`` writes before it are left out."""
    labels, blocks = _blocks(text, leave_out="EC PARAMETERS")
    if any(label.startswith(("ENCRYPTED SIGSTORE", "ENCRYPTED COSIGN")) for label in labels):
        raise KeyFileError(
            "is in cosign's own encrypted format, which only cosign reads",
            remedy=f"{_MAKE}; cosign verifies with that public key",
            where=where,
        )
    if len(labels) != 1 or labels[0] not in _PRIVATE:
        # Labels only: whatever else stands in the text may be a key.
        raise KeyFileError(
            f"holds {', '.join(labels) or 'no PEM block'} instead of one private key (PKCS#8 or SEC1)",
            remedy=_MAKE,
            where=where,
        )
    return blocks[0]


def _blocks(text: str, *, leave_out: str = "") -> tuple[list[str], list[str]]:
    """Return the labels of the PEM blocks in a text, and the blocks."""
    found = [match for match in _BLOCK.finditer(text) if match[1] != leave_out]
    return [match[1] for match in found], [match[0] for match in found]


def _password(environ: Mapping[str, str], ask: Callable[[], str] | None, where: str) -> bytes:
    password = environ.get(PASSWORD_VARIABLE)
    if password is None and ask is not None:
        password = ask()
    if not password:
        raise KeyFileError("is encrypted, and there is no password", remedy=f"set {PASSWORD_VARIABLE}", where=where)
    return password.encode()


def _signer(block: str, password: bytes | None, where: str) -> Signer:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    try:
        key: Any = load_pem_private_key(block.encode(), password)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # Their words are left out, lest one ever quotes the key.
        reason = "the password is wrong, or the key is damaged" if password else "the key cannot be decoded"
        raise KeyFileError(reason, remedy=f"check the password; or {_MAKE}", where=where) from None
    return CryptoSigner(key, _verifier(key.public_key(), where))


def _verifier(key: PublicKeyTypes, where: str) -> SSlibKey:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from securesystemslib.signer import SSlibKey

    curve = key.curve if isinstance(key, EllipticCurvePublicKey) else None
    if not isinstance(curve, SECP256R1):
        kind = curve.name if curve is not None else type(key).__name__.removesuffix("PublicKey")
        raise KeyFileError(f"is a key of another kind ({kind}) than ECDSA P-256", remedy=_MAKE, where=where)
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return SSlibKey.from_crypto(key, keyid=sha256_bytes(der))
