"""Keys: every form that openssl writes, and every way in which a key must not be used."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.sign_rooms import openssl, write_key

from cufallback.attest.keys import KEY_VARIABLE, PASSWORD_VARIABLE, load_private_key, load_public_key
from cufallback.attest.sign import open_envelope, sign_bytes, verify_envelope
from cufallback.errors import KeyFileError

PASSWORD = "correct horse"
COSIGN = "-----BEGIN ENCRYPTED {} PRIVATE KEY-----\neyJrZGYi\n-----END ENCRYPTED {} PRIVATE KEY-----\n"


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_key(tmp_path_factory.mktemp("pair"))


def converted(form: str, private: Path, folder: Path) -> Path:
    """Return the key in another form, readable by its owner only."""
    target = folder / f"{form}.pem"
    password = f"pass:{PASSWORD}"
    if form == "pkcs8":
        target.write_bytes(private.read_bytes())
    elif form == "sec1":
        openssl("pkey", "-in", private, "-traditional", "-out", target)
    elif form == "pkcs8-encrypted":
        openssl("pkcs8", "-topk8", "-in", private, "-out", target, "-passout", password)
    elif form == "sec1-encrypted":
        openssl("ec", "-in", private, "-aes256", "-out", target, "-passout", password)
    elif form == "with-parameters":
        openssl("pkey", "-in", private, "-traditional", "-out", target)
        parameters = subprocess.run(
            ["openssl", "ecparam", "-name", "prime256v1"], check=True, capture_output=True
        ).stdout
        target.write_bytes(parameters + target.read_bytes())
    target.chmod(0o600)
    return target


@pytest.mark.parametrize("source", ["file", "environment"])
@pytest.mark.parametrize("form", ["pkcs8", "sec1", "with-parameters", "pkcs8-encrypted", "sec1-encrypted"])
def test_every_form_of_a_key_signs_for_the_same_public_key(
    pair: tuple[Path, Path], tmp_path: Path, form: str, source: str
) -> None:
    path = converted(form, pair[0], tmp_path)
    environ = {PASSWORD_VARIABLE: PASSWORD} if "encrypted" in form else {}
    if source == "environment":
        environ[KEY_VARIABLE] = path.read_text()
    signer = load_private_key(path if source == "file" else None, environ=environ)
    key = load_public_key(pair[1])
    assert signer.public_key == key
    verify_envelope(open_envelope(sign_bytes(b"{}", signer), where="here"), key, where="here")


def test_the_key_id_is_the_digest_of_the_public_key_as_openssl_writes_it(pair: tuple[Path, Path]) -> None:
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", pair[1], "-outform", "DER"], check=True, capture_output=True
    ).stdout
    digest = subprocess.run(["sha256sum"], input=der, check=True, capture_output=True).stdout.decode().split()[0]
    assert load_public_key(pair[1]).keyid == digest


def test_a_password_is_asked_for_only_where_one_is_needed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    asked: list[str] = []

    def ask() -> str:
        asked.append("asked")
        return PASSWORD

    load_private_key(converted("pkcs8", pair[0], tmp_path), environ={}, ask=ask)
    assert asked == []
    load_private_key(converted("pkcs8-encrypted", pair[0], tmp_path), environ={}, ask=ask)
    assert asked == ["asked"]
    load_private_key(tmp_path / "pkcs8-encrypted.pem", environ={PASSWORD_VARIABLE: PASSWORD}, ask=ask)
    assert asked == ["asked"]


def other_kind(folder: Path, *arguments: str) -> Path:
    openssl("genpkey", *arguments, "-out", folder / "key")
    return folder / "key"


def written(folder: Path, text: str) -> Path:
    path = folder / "key"
    path.touch(0o600)
    path.write_text(text)
    return path


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "key", 0o600)
    return folder / "key"


def damaged(key: str) -> str:
    lines = key.splitlines(keepends=True)
    return "".join([lines[0], "MIGH" + lines[1][9:], *lines[2:]])


def mode(path: Path, bits: int) -> Path:
    path.chmod(bits)
    return path


# kind → (makes a key file from folder and good private key, what the error must say)
BAD_PRIVATE: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "absent": (lambda folder, key: folder / "key", "No such file"),
    "folder": (lambda folder, key: folder, "no regular file"),
    "pipe": (lambda folder, key: pipe(folder), "no regular file"),
    "device": (lambda folder, key: Path("/dev/zero"), "no regular file"),
    "empty": (lambda folder, key: written(folder, ""), "no PEM block"),
    "large": (lambda folder, key: written(folder, "x" * 100_000), "is no key"),
    "no PEM": (lambda folder, key: written(folder, "secret words"), "no PEM block"),
    "damaged": (lambda folder, key: written(folder, damaged(key.read_text())), "cannot be decoded"),
    "public": (lambda folder, key: written(folder, key.with_suffix(".pub").read_text()), "holds PUBLIC KEY instead"),
    "group reads": (lambda folder, key: mode(written(folder, key.read_text()), 0o640), "mode 0640"),
    "others read": (lambda folder, key: mode(written(folder, key.read_text()), 0o604), "mode 0604"),
    "others write": (lambda folder, key: mode(written(folder, key.read_text()), 0o602), "mode 0602"),
    "RSA": (lambda folder, key: other_kind(folder, "-algorithm", "RSA"), "another kind (RSA)"),
    "Ed25519": (lambda folder, key: other_kind(folder, "-algorithm", "ED25519"), "another kind (Ed25519)"),
    "P-384": (
        lambda folder, key: other_kind(folder, "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384"),
        "another kind (secp384r1)",
    ),
    "cosign": (lambda folder, key: written(folder, COSIGN.format("SIGSTORE", "SIGSTORE")), "cosign's own"),
    "old cosign": (lambda folder, key: written(folder, COSIGN.format("COSIGN", "COSIGN")), "cosign's own"),
    "two keys": (lambda folder, key: written(folder, key.read_text() * 2), "PRIVATE KEY, PRIVATE KEY instead"),
    "encrypted": (lambda folder, key: converted("pkcs8-encrypted", key, folder), "there is no password"),
}


@pytest.mark.parametrize("kind", BAD_PRIVATE)
def test_a_private_key_that_must_not_be_used_is_refused(pair: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    make, words = BAD_PRIVATE[kind]
    path = make(tmp_path, pair[0])
    with pytest.raises(KeyFileError) as caught:
        load_private_key(path, environ={})
    assert words in caught.value.reason
    assert caught.value.where == str(path)
    assert caught.value.remedy
    no_part_of_a_key(str(caught.value), pair[0])


@pytest.mark.parametrize("form", ["pkcs8-encrypted", "sec1-encrypted"])
def test_a_wrong_password_is_named_without_it_or_the_key(pair: tuple[Path, Path], tmp_path: Path, form: str) -> None:
    path = converted(form, pair[0], tmp_path)
    with pytest.raises(KeyFileError, match="password is wrong") as caught:
        load_private_key(path, environ={PASSWORD_VARIABLE: "battery staple"})
    assert "battery" not in str(caught.value)
    assert caught.value.__suppress_context__
    no_part_of_a_key(str(caught.value), path)


def test_an_error_about_a_key_in_the_environment_names_the_variable_only(pair: tuple[Path, Path]) -> None:
    text = damaged(pair[0].read_text())
    with pytest.raises(KeyFileError) as caught:
        load_private_key(None, environ={KEY_VARIABLE: text})
    assert caught.value.where == KEY_VARIABLE
    no_part_of_a_key(str(caught.value), pair[0])


def no_part_of_a_key(text: str, private: Path) -> None:
    lines = [line for line in private.read_text().splitlines()[1:-1] if len(line) > 40]
    assert lines
    assert not [line for line in lines if line[10:40] in text]


def test_without_any_key_the_error_says_how_to_make_one() -> None:
    with pytest.raises(KeyFileError, match="no signing key") as caught:
        load_private_key(None, environ={})
    assert "openssl genpkey" in caught.value.remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_file_of_another_user_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = converted("pkcs8", pair[0], tmp_path)
    os.chown(path, 1234, -1)
    with pytest.raises(KeyFileError, match="belongs to user 1234"):
        load_private_key(path, environ={})


BAD_PUBLIC: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "absent": (lambda folder, key: folder / "key", "No such file"),
    "folder": (lambda folder, key: folder, "no regular file"),
    "pipe": (lambda folder, key: pipe(folder), "no regular file"),
    "empty": (lambda folder, key: written(folder, ""), "no PEM block"),
    "large": (lambda folder, key: written(folder, "x" * 100_000), "is no key"),
    "private": (lambda folder, key: key, "a private key"),
    "both": (
        lambda folder, key: written(folder, key.with_suffix(".pub").read_text() + key.read_text()),
        "a private key",
    ),
    "two keys": (lambda folder, key: written(folder, key.with_suffix(".pub").read_text() * 2), "instead of one"),
    "damaged": (
        lambda folder, key: written(folder, damaged(key.with_suffix(".pub").read_text())),
        "cannot be decoded",
    ),
    "RSA": (lambda folder, key: public_half(folder, "-algorithm", "RSA"), "another kind (RSA)"),
}


def public_half(folder: Path, *arguments: str) -> Path:
    openssl("pkey", "-in", other_kind(folder, *arguments), "-pubout", "-out", folder / "key.pub")
    return folder / "key.pub"


@pytest.mark.parametrize("kind", BAD_PUBLIC)
def test_a_public_key_that_cannot_be_used_is_refused(pair: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    make, words = BAD_PUBLIC[kind]
    path = make(tmp_path, pair[0])
    with pytest.raises(KeyFileError) as caught:
        load_public_key(path)
    assert words in caught.value.reason
    assert caught.value.remedy
    no_part_of_a_key(str(caught.value), pair[0])
