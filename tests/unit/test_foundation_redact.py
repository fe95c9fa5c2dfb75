from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufallback.redact import MASK, is_secret, redact

SECRET = "s3same-OPEN"


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{SECRET}@host/path",
        f"https://{SECRET}@host/path",
        f"https://user:p@{SECRET}@host/path",
        f"HTTPS://user:{SECRET}@host",
        f"git+ssh://git:{SECRET}@host/repo.git",
        f"--index-url=https://user:{SECRET}@host/simple",
        f"Authorization: Bearer {SECRET}",
        f"Authorization: Basic {SECRET}",
        f"authorization: Negotiate {SECRET}",
        f"Authorization: {SECRET} and more",
        f"curl -H 'Authorization: Token {SECRET}' https://host",
        f'{{"Authorization": "Basic {SECRET}"}}',
        f"bearer {SECRET}",
        f"TOKEN={SECRET}",
        f"HF_TOKEN={SECRET} python",
        f"UV_INDEX_PYTORCH_PASSWORD={SECRET}",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"api_key: {SECRET}",
        f"apikey={SECRET}",
        f'{{"api_key": "{SECRET}", "n": 1}}',
        f'{{"password": "two words {SECRET}"}}',
        f'{{"password": "a quote \\" {SECRET}"}}',
        f"password='two words {SECRET}'",
        f"--password {SECRET} --verbose",
        f"--hf-token '{SECRET}'",
        f"--token={SECRET}",
        f"private-key = {SECRET}",
        f"https://host/x?token={SECRET}&page=2",
        f"passphrase={SECRET}",
    ],
)
def test_secret_is_masked(text: str) -> None:
    masked = redact(text)
    assert SECRET not in masked
    assert MASK in masked


@pytest.mark.parametrize(
    "secret",
    [
        "ghp_" + "a" * 36,
        "github_pat_" + "a" * 30,
        "glpat-" + "a" * 20,
        "hf_" + "a" * 34,
        "pypi-" + "a" * 40,
        "AKIA" + "A" * 16,
        "xoxb-" + "1" * 12,
        "sk-" + "a" * 32,
    ],
)
def test_token_is_known_by_its_shape(secret: str) -> None:
    assert redact(f"using {secret}, done") == f"using {MASK}, done"


@pytest.mark.parametrize(
    "text",
    [
        "git+https://github.com/vllm-project/vllm@v0.28.0",
        "https://download.pytorch.org/whl/cu129",
        "--max-tokens=200 --max-num-batched-tokens 8192",
        "TOKENIZERS_PARALLELISM=false",
        "tokenizer: KimiTokenizer",
        "docker build --secret id=ca,src=ca.pem --mount=type=secret,id=ca",
        "someone@example.test wrote this",
        "-ffile-prefix-map=/a=/b -DPASSIVE=1",
        "torch==2.13.0+cu129 --hash=sha256:" + "0" * 64,
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_what_stands_around_a_secret_stays() -> None:
    assert redact(f'{{"a": 1, "token": "{SECRET}", "b": 2}}') == f'{{"a": 1, "token": "{MASK}", "b": 2}}'
    assert redact(f"x TOKEN={SECRET} y\nnext line") == f"x TOKEN={MASK} y\nnext line"
    assert redact(f"get https://u:{SECRET}@host/x now") == f"get https://{MASK}@host/x now"


@given(st.text(alphabet="abtokenAUTH:=/@-_. '\"\\\n[]0", max_size=60))
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@pytest.mark.timeout(30)
@pytest.mark.parametrize("piece", ["a-", "token-", "token", "--", "x://", "authorization", '"', "token= ", "a+", " "])
def test_long_lines_take_no_time_by_their_square(piece: str) -> None:
    redact("token" + piece * 20_000)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "x", True),
        ("DOCKER_AUTHORIZATION", "x", True),
        ("MY_API_KEY", "x", True),
        ("UV_INDEX_URL", f"https://u:{SECRET}@host/simple", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("PATH", "/bin", False),
    ],
)
def test_a_secret_is_known_by_its_name_or_by_its_value(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) is secret
