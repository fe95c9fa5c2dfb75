"""What syft finds in a file system is in our SBOM of it, or explained here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packageurl import PackageURL
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from attest_samples import sample_plan, sample_prefetched

from cufallback.attest.bom import BomFacts, check_bom
from cufallback.attest.debian import DebianPackage, read_system
from cufallback.attest.licences import licence_in
from cufallback.attest.sbom import image_bom
from cufallback.attest.subjects import BaseImage, ImageSubject
from cufallback.store import sha256_bytes

DPKG = Path("/var/lib/dpkg/status")
OS_RELEASE = Path("/etc/os-release")
SITE = Path("usr/lib/python3/dist-packages")
IMAGE = ImageSubject("r.example/app", f"sha256:{'56' * 32}", (BaseImage("b", "r.example/b:1", f"sha256:{'78' * 32}"),))

pytestmark = pytest.mark.skipif(not DPKG.is_file(), reason="no Debian-like system to take real packages from")


def scan(target: str) -> dict[str, Any]:
    """Let syft look at ``dir:FOLDER`` or ``oci-dir:LAYOUT``."""
    syft = Path(sys.executable).with_name("syft")
    if not syft.is_file():
        pytest.skip("syft is not in this environment")
    done = subprocess.run(
        [syft, "scan", target, "--quiet", "--output", "syft-json"],
        capture_output=True,
        check=True,
        env={**os.environ, "SYFT_CHECK_FOR_APP_UPDATE": "false"},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def identity(purl: str) -> tuple[str, str, str | None]:
    """What a package is, whatever else its URL says."""
    parsed = PackageURL.from_string(purl)
    name = canonicalize_name(parsed.name) if parsed.type == "pypi" else parsed.name
    return (parsed.type, name, parsed.version)


def unexplained(syft: dict[str, Any], ours: BomFacts) -> list[str]:
    """Return what syft found and neither our SBOM lists nor one of these reasons explains.

    - A file of a listed Debian package: the package is what is installed (Debian's own Python packages, binaries).
    - A copy that a listed distribution carries in its ``_vendor``: it is inside that distribution.
    """
    listed = {identity(row.purl) for row in ours.components if row.purl}
    names = {name for kind, name, _version in listed if kind == "pypi"}
    by_id = {row["id"]: row for row in syft["artifacts"]}
    owners = {
        relation["child"]: by_id[relation["parent"]]
        for relation in syft["artifactRelationships"]
        if relation["type"] == "ownership-by-file-overlap"
    }

    def is_listed(row: dict[str, Any]) -> bool:
        return bool(row["purl"]) and identity(row["purl"]) in listed

    def is_vendored(row: dict[str, Any]) -> bool:
        owner, vendor, _rest = row["locations"][0]["path"].partition("/_vendor/")
        return bool(vendor) and canonicalize_name(owner.rpartition("/")[2]) in names

    return sorted(
        f"{row['type']} {row['name']} {row['version']} in {row['locations'][0]['path']}"
        for row in syft["artifacts"]
        if not is_listed(row) and not is_vendored(row) and not is_listed(owners.get(row["id"], {"purl": ""}))
    )


def installed() -> Iterator[tuple[str, str, str]]:
    """Name, version and METADATA of each distribution of this environment, once."""
    found = {canonicalize_name(item.name): item for item in metadata.distributions()}
    for name, item in sorted(found.items()):
        yield name, item.version, item.read_text("METADATA") or ""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file system with this machine's package database and this environment's distributions."""
    root = tmp_path_factory.mktemp("root")
    for source in (DPKG, OS_RELEASE):
        target = root / source.relative_to("/")
        target.parent.mkdir(parents=True)
        target.write_bytes(source.read_bytes())
    for name, version, text in installed():
        folder = root / SITE / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(text)
        (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n")
    return root


def system_of(root: Path) -> list[DebianPackage]:
    packages, _distro = read_system({"var/lib/dpkg/status": (root / "var/lib/dpkg/status").read_bytes()})
    return packages


def described(packages: Sequence[DebianPackage], without: frozenset[str] = frozenset()) -> BomFacts:
    """Our SBOM of such a file system. A distribution that was installed tells no hash of its wheel."""
    plan = sample_plan()
    rows, licences = [], {}
    for name, version, text in installed():
        filename = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        licences[filename] = licence_in(text.encode())
        row = {"name": name, "version": version, "filename": filename, "sha256": sha256_bytes(filename.encode())}
        if name not in without:
            rows.append({**row, "size": 1, "index": "default", "used_for": ["runtime"]})
    _none, distro = read_system({"etc/os-release": OS_RELEASE.read_bytes()})
    prefetched = {**sample_prefetched(plan), "distributions": rows}
    return check_bom(image_bom(IMAGE, plan, prefetched, [], packages, distro, licences), where="ours")


def test_all_that_syft_finds_is_listed_and_all_that_is_listed_is_found(root: Path) -> None:
    syft, ours = scan(f"dir:{root}"), described(system_of(root))
    assert unexplained(syft, ours) == []
    found = {identity(row["purl"]) for row in syft["artifacts"]}
    listed = {identity(row.purl) for row in ours.components if row.purl and row.type == "library"}
    assert listed - found == set()
    assert len(listed) > 50


def test_what_is_left_out_is_named(root: Path) -> None:
    syft = scan(f"dir:{root}")
    first, *others = system_of(root)
    missing = unexplained(syft, described(others, frozenset({"packaging"})))
    assert [line.split()[:2] for line in missing] == [["deb", first.name], ["python", "packaging"]]


def test_what_a_listed_package_owns_or_carries_is_explained(root: Path) -> None:
    (folder,) = (root / SITE).glob("packaging-*.dist-info")
    files = root / "var/lib/dpkg/info/python3-packaging.md5sums"
    vendored = root / SITE / "pytest/_vendor/carried-1.0.dist-info"
    stranger = root / SITE / "stranger/_vendor/alone-1.0.dist-info"
    status = root / "var/lib/dpkg/status"
    before = status.read_bytes()
    entry = "\nPackage: python3-packaging\nStatus: install ok installed\nArchitecture: all\nVersion: 1\n"
    try:
        status.write_bytes(before.rstrip(b"\n") + b"\n" + entry.encode())
        files.parent.mkdir()
        files.write_text(f"{'0' * 32}  {folder.relative_to(root)}/METADATA\n")
        for copy in (vendored, stranger):
            copy.mkdir(parents=True)
            name = copy.name.partition("-")[0]
            (copy / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        ours = described(system_of(root), frozenset({"packaging"}))
        assert [line.split()[1] for line in unexplained(scan(f"dir:{root}"), ours)] == ["alone"]
    finally:
        status.write_bytes(before)
