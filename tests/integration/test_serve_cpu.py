"""The serve-cpu image end to end: built, pushed, pulled by digest, and asked something. A real vLLM server answers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from build_rooms import Command, Rehearsal
from tests.services.base import BaseLayout

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(900)]

ASK = """
import json, sys, urllib.request
request = urllib.request.Request("http://127.0.0.1:8000" + sys.argv[1], headers={"content-type": "application/json"})
if len(sys.argv) > 2:
    request.data = sys.argv[2].encode()
with urllib.request.urlopen(request, timeout=60) as answer:
    sys.stdout.write(answer.read().decode())
"""
OPTIONS = "--max-model-len 2048 --max-num-seqs 8 --enforce-eager --block-size 32 --kv-cache-memory-bytes 67108864"
# No network, no root, nothing to write but what is mounted; vLLM's processes share memory by /dev/shm.
CONFINED = "--network none --read-only --tmpfs /tmp --tmpfs /var/lib/vllm:uid=10001 --cap-drop ALL --shm-size 1g"


def docker(*words: str | Path, check: bool = True) -> str:
    done = subprocess.run(["docker", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def image(
    rehearsal: Rehearsal,
    engine: str,
    registry: str,
    oras: Path,
    base_layout: BaseLayout,
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """Reference by digest of the pushed image."""
    root = tmp_path_factory.mktemp("serve-cpu")
    words = ["--recipe", "serve-cpu", "--work", rehearsal.work, "--dist", root, "--require-image"]
    with contextlib.closing(Command(root)) as command:
        code, out, err = command.run("build", *words, "--base", f"base={base_layout.reference}", "--json")
        assert code == 0, err
        built = json.loads(out)
        code, out, err = command.run("push", f"{registry}/serve-cpu", "--build", built["folder"], "--json")
        assert code == 0, err
    reference = str(json.loads(out)["reference"])
    assert reference == f"{registry}/serve-cpu@{built['image']}"
    return reference


@pytest.fixture(scope="module")
def server(image: str) -> Iterator[str]:
    """Name of the running container, healthy."""
    docker("pull", image)
    variables = ("VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1")
    environment = [word for variable in variables for word in ("--env", variable)]
    options = ["--model", "/opt/model", "--served-model-name", "tiny", *OPTIONS.split()]
    name = docker("run", "--detach", *CONFINED.split(), *environment, image, *options).strip()
    try:
        for _ in range(120):
            running = docker("inspect", "--format", "{{.State.Running}}", name).strip()
            assert running == "true", docker("logs", name)
            if docker("exec", name, "python", "-c", ASK, "/health", check=False) == "":
                break
            time.sleep(2)
        else:
            pytest.fail(docker("logs", name))
        yield name
    finally:
        docker("rm", "--force", "--volumes", name)
        docker("image", "rm", "--force", image)


def ask(server: str, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    words = [path, json.dumps(body)] if body else [path]
    answer: dict[str, object] = json.loads(docker("exec", server, "python", "-c", ASK, *words))
    return answer


def test_the_server_is_the_one_of_the_recipe(server: str) -> None:
    assert ask(server, "/version") == {"version": "0.27.1"}


def test_it_answers_a_request(server: str) -> None:
    message = {"role": "user", "content": "hi"}
    answer = ask(server, "/v1/chat/completions", {"model": "tiny", "messages": [message], "max_tokens": 8})
    (choice,) = answer["choices"]  # type: ignore[misc]
    assert choice["message"]["content"]
    assert answer["usage"]["completion_tokens"] <= 8  # type: ignore[index]


def test_it_keeps_to_a_schema(server: str) -> None:
    """Guided decoding ends, which is what the bias of the model's weights is for."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"],
        "additionalProperties": False,
    }
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "weather as JSON"}],
        "max_tokens": 64,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}},
    }
    (choice,) = ask(server, "/v1/chat/completions", body)["choices"]  # type: ignore[misc]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"]).keys() == {"city", "warm"}


def test_it_is_not_root_and_can_write_nowhere_else(server: str) -> None:
    assert docker("exec", server, "id", "-u").strip() == "10001"
    assert "Read-only file system" in docker("exec", server, "touch", "/opt/vllm/x", check=False)
