"""What a Debian-like image says of itself."""

from __future__ import annotations

import pytest

from cufallback.attest.debian import (
    SYSTEM_FILES,
    DebianPackage,
    Distro,
    parse_dpkg_status,
    parse_os_release,
    read_system,
)
from cufallback.errors import ImageError

STATUS = """\
Package: zlib1g
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Source: zlib
Version: 1:1.2.13.dfsg-1
Description: compression library
 Package: not-a-package
 .
 more

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: libgcc-s1
Status: hold ok installed
Architecture: amd64
Source: gcc-12 (12.2.0-14+really)
Version: 12.2.0-14


Package: half
Status: install reinstreq half-installed
Architecture: amd64
"""


def test_only_installed_packages_count_and_each_knows_its_source() -> None:
    assert parse_dpkg_status(STATUS) == [
        DebianPackage("libgcc-s1", "12.2.0-14", "amd64", "gcc-12", "12.2.0-14+really"),
        DebianPackage("zlib1g", "1:1.2.13.dfsg-1", "amd64", "zlib", "1:1.2.13.dfsg-1"),
    ]


def test_a_stanza_that_lacks_a_field_is_named_by_its_line() -> None:
    with pytest.raises(ImageError, match="without Version") as caught:
        parse_dpkg_status("\nPackage: x\nArchitecture: all\n")
    assert caught.value.where == "dpkg status:2"


def test_images_without_dpkg_have_one_file_for_each_package() -> None:
    files = {
        "var/lib/dpkg/status.d/base": b"Package: base-files\nVersion: 12.4\nArchitecture: amd64\n",
        "var/lib/dpkg/status.d/base.md5sums": b"d41d8cd98f00b204e9800998ecf8427e  etc/x\n",
        "usr/lib/os-release": b'PRETTY_NAME="Distroless"\nID=debian\nVERSION_ID="12"\n',
    }
    assert all(SYSTEM_FILES.fullmatch(path) for path in files)
    packages, distro = read_system(files)
    assert packages == [DebianPackage("base-files", "12.4", "amd64", "base-files", "12.4")]
    assert distro == Distro("debian", "12", "Distroless")
    assert distro.qualifier == "debian-12"


@pytest.mark.parametrize(
    ("text", "distro"),
    [
        ("", Distro("linux", "", "linux")),
        ("# a comment\n\nID=debian\n", Distro("debian", "", "debian")),
        ('ID=\'ubuntu\'\nVERSION_ID=22.04\nPRETTY_NAME="Ubuntu \\"J\\""', Distro("ubuntu", "22.04", 'Ubuntu "J"')),
    ],
)
def test_os_release_is_read_as_a_shell_would(text: str, distro: Distro) -> None:
    assert parse_os_release(text) == distro


@pytest.mark.parametrize(
    "files", [{"etc/os-release": b'ID="debian\n'}, {"var/lib/dpkg/status": b"Package: \xff\n"}], ids=["quote", "utf8"]
)
def test_a_damaged_file_is_an_error_with_its_place(files: dict[str, bytes]) -> None:
    with pytest.raises(ImageError) as caught:
        read_system(files)
    assert caught.value.where
