"""SBOMs: what is in them, that they never vary by chance, and that no fault in one goes unnoticed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from attest_samples import COMMIT, PICK, production_like, sample_plan, sample_prefetched

from cufallback.attest.bom import check_bom
from cufallback.attest.debian import DebianPackage, Distro
from cufallback.attest.licences import Licence, licence_in
from cufallback.attest.purls import oci_purl
from cufallback.attest.sbom import image_bom, wheel_bom
from cufallback.attest.subjects import BaseImage, ImageSubject, WheelSubject
from cufallback.errors import AttestationError
from cufallback.source.cargo import registry_crates
from cufallback.store import canonical_json

PLAN = sample_plan()
PREFETCHED = sample_prefetched(PLAN)
PRODUCTION = production_like(PREFETCHED)
IDENTITY = "ef" * 32
MAIN = WheelSubject("vllm", "0.27.1+tpu", "vllm-0.27.1+tpu-cp311-cp311-linux_x86_64.whl", "main")
PROBE = WheelSubject(
    "cufallback-cuda-probe", "1.0.0+cu129", "cufallback_cuda_probe-1.0.0+cu129-py3-none-any.whl", "cuda-probe"
)
PACKAGES = [
    DebianPackage("libc6", "2.36-9+deb12u10", "amd64", "glibc", "2.36-9+deb12u10"),
    DebianPackage("libgcc-s1", "12.2.0-14", "amd64", "gcc-12", "12.2.0-14"),
]
DEBIAN = Distro("debian", "12", "Debian GNU/Linux 12 (bookworm)")
IMAGE = ImageSubject(
    "registry.example/team/vllm-cu129",
    f"sha256:{'56' * 32}",
    (BaseImage("runtime", "docker.io/library/debian:12", f"sha256:{'78' * 32}"),),
)


def wheel(subject: WheelSubject = MAIN, prefetched: dict[str, Any] = PREFETCHED, **options: Any) -> bytes:
    return wheel_bom(subject, PLAN, prefetched, identity=IDENTITY, **options)


def whole_image(licences: dict[str, Licence] | None = None, prefetched: dict[str, Any] = PRODUCTION) -> bytes:
    wheels = [replace(MAIN, sha256="9a" * 32), replace(PROBE, sha256="9b" * 32)]
    return image_bom(IMAGE, PLAN, prefetched, wheels, PACKAGES, DEBIAN, licences or {})


def components(content: bytes) -> dict[str, dict[str, Any]]:
    return {row["bom-ref"]: row for row in json.loads(content)["components"]}


def children(content: bytes, ref: str) -> list[str]:
    return next(row.get("dependsOn", []) for row in json.loads(content)["dependencies"] if row["ref"] == ref)


@pytest.mark.parametrize("make", [wheel, lambda: wheel(PROBE), lambda: wheel(prefetched=PRODUCTION), whole_image])
def test_two_calls_give_the_same_canonical_bytes(make: Callable[[], bytes]) -> None:
    content = make()
    assert content == make() == canonical_json(json.loads(content))
    assert json.loads(content)["metadata"]["timestamp"] == "2026-08-11T10:44:27+00:00"  # the lock's epoch


def test_inside_a_wheel_the_serial_comes_from_the_inputs_beside_it_from_the_bytes() -> None:
    inside, other = check_bom(wheel(), where="w"), check_bom(wheel(PROBE), where="p")
    beside = check_bom(wheel(replace(MAIN, sha256="9a" * 32)), where="w")
    assert len({inside.serial, other.serial, beside.serial}) == 3
    assert (inside.root.sha256, beside.root.sha256) == (None, "9a" * 32)
    assert inside.root.purl == "pkg:pypi/vllm@0.27.1%2Btpu"


def test_what_no_build_id_holds_is_not_in_a_wheel() -> None:
    """Reasons, contracts and what only the runtime lock has may change while the build id stays."""
    changed = json.loads(json.dumps(PREFETCHED))
    changed["source"]["changes"][0]["why"] = "another reason"
    changed["source"]["commit"]["source"] = "another place"
    for row in changed["source"]["fetches"]:
        row["unused"] = "another reason"
    for row in changed["distributions"]:
        row["used_for"] = [use for use in row["used_for"] if use == "build"]
    fewer = replace(PLAN, steps=tuple(step for step in PLAN.steps if step.command))
    for subject in (MAIN, PROBE):
        assert wheel_bom(subject, fewer, changed, identity=IDENTITY) == wheel(subject)


def test_the_source_of_an_archive_has_its_hash_and_the_rewrite() -> None:
    row = components(wheel())["source:vllm@0.27.1"]
    assert row["purl"] == "pkg:pypi/vllm@0.27.1"
    assert row["hashes"] == [{"alg": "SHA-256", "content": PREFETCHED["source"]["archive_sha256"]}]
    (patch,) = row["pedigree"]["patches"]
    assert patch["type"] == "unofficial"
    assert patch["diff"]["text"]["content"] == PREFETCHED["source"]["changes"][0]["diff"]
    assert children(wheel(), f"wheel:{MAIN.filename}") == ["source:vllm@0.27.1"]


def test_the_source_of_a_commit_has_its_vendored_sources_below_it() -> None:
    content = wheel(prefetched=PRODUCTION)
    rows = components(content)
    main = rows[f"source:vllm@{COMMIT}"]
    assert main["purl"] == f"pkg:github/vllm-project/vllm@{COMMIT}"
    assert main["pedigree"]["commits"][0]["uid"] == PICK
    assert {patch["type"] for patch in main["pedigree"]["patches"]} == {"unofficial", "cherry-pick"}
    used = {row["name"] for row in PRODUCTION["source"]["fetches"] if row["unused"] is None}
    assert used < {row["name"] for row in rows.values()}
    assert children(content, "fetched:deepgemm") == [
        "submodule:deepgemm:third-party/cutlass",
        "submodule:deepgemm:third-party/fmt",
    ]
    assert "submodule:vllm:third_party/thing" in children(content, main["bom-ref"])
    assert rows["fetched:tools/x.sh:x.tar.gz"]["hashes"][0]["content"] == "34" * 32
    incomplete = next(
        row["assemblies"] for row in json.loads(content)["compositions"] if row["aggregate"] == "incomplete"
    )
    assert {"fetched:flashmla", "crates:rust/Cargo.lock", f"wheel:{MAIN.filename}"} <= set(incomplete)


def test_a_local_repository_may_have_a_space_in_its_path() -> None:
    source = {**PRODUCTION["source"], "origin": "file:///my sources/vllm"}
    row = components(wheel(prefetched={**PRODUCTION, "source": source}))[f"source:vllm@{COMMIT}"]
    assert row["externalReferences"][0]["url"] == "file:///my%20sources/vllm"


def test_sources_that_are_not_used_are_not_listed() -> None:
    assert set(components(wheel())) == {"source:vllm@0.27.1"}


def test_crates_are_listed_below_their_cargo_lock() -> None:
    lock = b"""
version = 4
[[package]]
name = "serde"
version = "1.0.1"
source = "registry+https://github.com/rust-lang/crates.io-index"
checksum = "%s"
[[package]]
name = "ours"
version = "0.1.0"
""" % (b"11" * 32)
    changed = json.loads(json.dumps(PRODUCTION))
    row = next(row for row in changed["source"]["fetches"] if row["kind"] == "crates")
    changed["source"]["crates"] = [{"lock": row["name"], **vars(crate)} for crate in registry_crates(lock)]
    content = wheel(prefetched=changed)
    assert children(content, "crates:rust/Cargo.lock") == ["rust/Cargo.lock:pkg:cargo/serde@1.0.1"]
    assert components(content)["rust/Cargo.lock:pkg:cargo/serde@1.0.1"]["hashes"][0]["content"] == "11" * 32


def test_tools_and_build_distributions_are_the_formulation_not_contents() -> None:
    document = json.loads(wheel())
    (made,) = document["formulation"]
    names = {row["name"] for row in made["components"]}
    assert {"g++", "gcc", "glibc", "CPython", "torch", "setuptools"} <= names
    (workflow,) = made["workflows"]
    assert workflow["taskTypes"] == ["build"]
    assert [step["commands"][0]["executed"].split()[1:4] for step in workflow["steps"]] == [["-P", "-m", "build"]] * 2
    assert {row["ref"] for row in workflow["resourceReferences"]} == {row["bom-ref"] for row in made["components"]}


def test_the_probe_tells_what_made_its_device_code_without_claiming_to_contain_it() -> None:
    rows = components(wheel(PROBE))
    nvrtc = next(row for row in rows.values() if row["name"] == "nvidia-cuda-nvrtc-cu12")
    assert nvrtc["scope"] == "excluded"
    assert "source:cuda-probe" in rows


def test_an_image_holds_base_packages_wheels_and_distributions_in_one_graph() -> None:
    content = whole_image({"cuda_toolkit-12.9.1-py2.py3-none-any.whl": Licence("MIT", (), ("LICENSE",))})
    facts, rows = check_bom(content, where="image"), components(content)
    assert facts.root.purl == (f"pkg:oci/vllm-cu129@sha256:{'56' * 32}?repository_url=registry.example/team/vllm-cu129")
    assert facts.root.sha256 == "56" * 32
    libgcc = rows["deb:libgcc-s1:amd64@12.2.0-14"]
    assert libgcc["purl"] == "pkg:deb/debian/libgcc-s1@12.2.0-14?arch=amd64&distro=debian-12&upstream=gcc-12"
    assert children(content, "base:runtime") == ["os:debian-12"]
    assert children(content, "os:debian-12") == sorted(ref for ref in rows if ref.startswith("deb:"))
    toolkit = rows["distribution:cuda_toolkit-12.9.1-py2.py3-none-any.whl"]
    assert toolkit["licenses"] == [{"license": {"acknowledgement": "declared", "id": "MIT"}}]
    assert "scope" not in toolkit  # installed, though the probe was made with it too
    runtime = {row["filename"] for row in PRODUCTION["distributions"] if "runtime" in row["used_for"]}
    assert not any(ref.startswith("distribution:cmake") for ref in rows)  # the build's, not the image's
    below = set(children(content, "image"))
    assert {f"distribution:{name}" for name in runtime} | {"base:runtime", f"wheel:{MAIN.filename}"} <= below
    assert rows["base:runtime"]["hashes"][0]["content"] == "78" * 32


@pytest.mark.parametrize(
    ("reference", "purl"),
    [
        ("docker.io/library/debian:12", "pkg:oci/debian@sha256:00?repository_url=docker.io/library/debian&tag=12"),
        ("127.0.0.1:5000/a/B", "pkg:oci/b@sha256:00?repository_url=127.0.0.1:5000/a/b"),
        ("r.example/x:1@sha256:00", "pkg:oci/x@sha256:00?repository_url=r.example/x&tag=1"),
        ("oci-layout:/srv/me/secret/base", "pkg:oci/base@sha256:00"),
        ("oci-layout:here/base@sha256:00", "pkg:oci/base@sha256:00"),
        ("./layout/base", "pkg:oci/base@sha256:00"),
        ("vllm", "pkg:oci/vllm@sha256:00"),
    ],
)
def test_the_purl_of_an_image_names_its_repository_and_no_folder(reference: str, purl: str) -> None:
    assert oci_purl(reference, "sha256:00").to_string() == purl


@pytest.mark.parametrize(
    ("metadata_text", "licence"),
    [
        ("License-Expression: mit or apache-2.0", Licence("MIT OR Apache-2.0")),
        ("License-Expression: LicenseRef-NVIDIA-Proprietary", Licence("LicenseRef-NVIDIA-Proprietary")),
        ("License-Expression: no such thing!", Licence(None, ("no such thing!",))),
        ("License: BSD-3-Clause", Licence("BSD-3-Clause")),
        ("License: Apache 2.0", Licence(None, ("Apache 2.0",))),
        ("License: UNKNOWN", Licence()),
        ("License: " + "long text " * 40, Licence()),
        ("Classifier: License :: OSI Approved :: MIT License", Licence(None, ("MIT License",))),
        ("Classifier: License :: OSI Approved", Licence()),
        ("License: ISC\nLicense-File: LICENSE\nLicense-File: NOTICE", Licence("ISC", (), ("LICENSE", "NOTICE"))),
        ("License: \u00a9 \u5f20", Licence(None, ("\u00a9 \u5f20",))),
        ("", Licence()),
    ],
)
def test_a_licence_is_what_the_metadata_declares(metadata_text: str, licence: Licence) -> None:
    assert licence_in(f"Metadata-Version: 2.4\nName: x\n{metadata_text}\n\nText\n".encode()) == licence


def test_the_schema_takes_every_licence_that_is_installed_here() -> None:
    texts = [item.read_text("METADATA") for item in metadata.distributions()]
    found = {licence_in(text.encode()) for text in texts if text}
    assert len(found) > 20
    odd = [*found, Licence(None, ("MIT", "mit license", "x" * 90)), Licence("LicenseRef-X AND MIT")]
    changed = json.loads(json.dumps(PREFETCHED))
    row = changed["distributions"][0]
    changed["distributions"] = [
        {**row, "filename": f"n{number}.whl", "used_for": ["runtime"]} for number in range(len(odd))
    ]
    content = whole_image({f"n{number}.whl": licence for number, licence in enumerate(odd)}, changed)
    licensed = [row for row in components(content).values() if row.get("licenses")]
    assert len(licensed) == sum(bool(licence.expression or licence.names) for licence in odd)


Change = Callable[[dict[str, Any]], object]


def drop_edges(document: dict[str, Any]) -> None:
    for row in document["dependencies"]:
        row["dependsOn"] = [ref for ref in row.get("dependsOn", []) if not ref.startswith("deb:")]


FAULTS: dict[str, tuple[Change, str]] = {
    "unknown key": (lambda d: d.update(extra=1), "no CycloneDX 1.6"),
    "another version": (lambda d: d.update(specVersion="1.4"), "no CycloneDX 1.6"),
    "bad hash": (lambda d: d["components"][0].update(hashes=[{"alg": "SHA-256", "content": "xyz"}]), "no CycloneDX"),
    "licence id of nobody": (
        lambda d: d["components"][0].update(licenses=[{"license": {"id": "Nobody-1.0"}}]),
        "no CycloneDX",
    ),
    "endless URL": (
        lambda d: d["components"][0].update(externalReferences=[{"type": "vcs", "url": "https://x/" + "a" * 9999}]),
        "the URL has 10009 characters",
    ),
    "no root": (lambda d: d["metadata"].pop("component"), "no metadata.component"),
    "no serial": (lambda d: d.pop("serialNumber"), "no serialNumber"),
    "no bom-ref": (lambda d: d["components"][0].pop("bom-ref"), "no bom-ref"),
    "bom-ref twice": (lambda d: d["components"][0].update({"bom-ref": "image"}), "there twice"),
    "ref of a tool twice": (
        lambda d: d["formulation"][0]["components"][0].update({"bom-ref": "image"}),
        "there twice",
    ),
    "dangling dependency": (lambda d: d["dependencies"][0].setdefault("dependsOn", []).append("gone"), "'gone'"),
    "dangling subject": (lambda d: d["dependencies"].append({"ref": "gone"}), "'gone'"),
    "dangling composition": (lambda d: d["compositions"][0]["assemblies"].append("gone"), "'gone'"),
    "dangling tool": (
        lambda d: d["formulation"][0]["workflows"][0]["resourceReferences"].append({"ref": "gone"}),
        "'gone'",
    ),
    "described twice": (lambda d: d["dependencies"].append({"ref": "image"}), "described twice"),
    "cut off": (drop_edges, "cannot be reached"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_place(name: str) -> None:
    change, reason = FAULTS[name]
    # Without vendored sources: the schema takes long over every URL.
    document = json.loads(whole_image(prefetched=PREFETCHED))
    change(document)
    with pytest.raises(AttestationError, match=reason) as caught:
        check_bom(json.dumps(document).encode(), where="sbom/image.cdx.json")
    assert str(caught.value.where).startswith("sbom/image.cdx.json")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'"x"',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"a": 1, "a": 1}',
        b'{"a":' * 400 + b"1" + b"}" * 400,
    ],
)
def test_what_is_no_document_is_refused(content: bytes) -> None:
    with pytest.raises(AttestationError):
        check_bom(content, where="x")
