"""A small Debian image for tests, made where nothing can be pulled: mmdebstrap, then ``FROM scratch`` and ``ADD``.

Imported with ``docker import`` it would carry the time of the import, and every image made from it another digest.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.services.debian import call, sources_for

from cufallback.errors import ImageError
from cufallback.image.layout import check_blobs, read_image

RELEASE = "bookworm"  # the one whose Python is 3.11
# PyTorch's wheels for the CPU need libstdc++ beside the C library and carry their OpenMP; vLLM's server needs libnuma.
PACKAGES = ("python3", "ca-certificates", "libnuma1", "libstdc++6")
EPOCH = 1_700_000_000  # seconds since 1970; every time in the image
DPKG = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
)
DOCKERFILE = 'FROM scratch\nADD rootfs.tar /\nCMD ["python3"]\n'
COMPRESSION = "compression=zstd,force-compression=true,rewrite-timestamp=true"


@dataclass(frozen=True)
class BaseLayout:
    """An OCI image layout with one image; ``digest`` is that of the image's manifest."""

    folder: Path
    digest: str

    @property
    def reference(self) -> str:
        """What ``--build-context NAME=...`` takes."""
        return f"oci-layout://{self.folder}@{self.digest}"

    def archive(self, tar: Path) -> Path:
        """Write the layout as the archive that ``docker load`` and ``oras cp`` take, and return its path."""
        with tarfile.open(tar, "w") as archive:
            for path in ("oci-layout", "index.json", "blobs"):
                archive.add(self.folder / path, path)
        return tar


def cached_base(folder: Path) -> BaseLayout | None:
    """Return the base in a cache folder when it is whole; None when it is not there or damaged."""
    try:
        image = read_image(folder)
        check_blobs(image)
    except ImageError:
        return None
    return BaseLayout(folder, image.digest)


def base_folder(cache: Path) -> Path:
    """Return where in the cache the base lies that these packages, options and sources make."""
    inputs = (RELEASE, PACKAGES, EPOCH, DPKG, DOCKERFILE, COMPRESSION)
    return cache / f"base-{RELEASE}-{hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:12]}"


def make_base(folder: Path) -> BaseLayout:
    """Make the base with mmdebstrap and the engine of the environment (as root; about 40 s)."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cufallback-base-", dir=folder.parent) as name:
        work = Path(name)
        work.chmod(0o755)  # apt reads the sources as another user
        context, layout = work / "context", work / "layout"
        context.mkdir()
        (work / "debian.list").write_text(sources_for(RELEASE))
        (context / "Dockerfile").write_text(DOCKERFILE)
        options = ["--variant=minbase", f"--include={','.join(PACKAGES)}", *(f"--dpkgopt={line}" for line in DPKG)]
        call(
            ["mmdebstrap", *options, RELEASE, context / "rootfs.tar", work / "debian.list"],
            timeout=900,
            SOURCE_DATE_EPOCH=str(EPOCH),
        )
        metadata = work / "metadata.json"
        call(
            [
                *("docker", "buildx", "build", "--provenance=false", "--network=none"),
                *(f"--metadata-file={metadata}", f"--tag=cufallback-tests/{folder.name}:latest"),
                *(f"--output=type=oci,dest={layout},tar=false,{COMPRESSION}", context),
            ],
            timeout=600,
            SOURCE_DATE_EPOCH=str(EPOCH),
        )
        digest = json.loads(metadata.read_text())["containerimage.digest"]
        image = read_image(layout, digest)
        assert image.digest == digest, "the engine named the digest of something else than the image"
        check_blobs(image)
        shutil.rmtree(folder, ignore_errors=True)
        layout.rename(folder)
    return BaseLayout(folder, digest)
