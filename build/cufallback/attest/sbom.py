"""The SBOMs of a build: one for each wheel, inside it and beside it, and one for the image."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from cyclonedx.model.component import Component

from cufallback.attest import components as part
from cufallback.attest.bom import Aggregate, Assembly, formula, serial_number
from cufallback.attest.subjects import ImageSubject, WheelSubject

if TYPE_CHECKING:
    from cufallback.attest.debian import DebianPackage, Distro
    from cufallback.attest.licences import Licence
    from cufallback.plan import BuildPlan

EMBEDDED_NAME = "cufallback.cdx.json"
"""File name inside ``.dist-info/sboms/`` (PEP 770)."""


def wheel_bom(
    subject: WheelSubject,
    plan: BuildPlan,
    prefetched: Mapping[str, Any],
    *,
    identity: str,
) -> bytes:
    """Return the SBOM of a wheel: what is inside it, from what and with what it was made.

    Requirements are not inside a wheel and not listed. Nothing that the build id leaves out (reasons, contracts,
    references for readers) is in it, so that equal ids give equal wheels.

    Args:
        subject: the wheel; with its SHA-256 for the document beside it, without for the one inside it.
        plan: a complete plan.
        prefetched: the result of the prefetch stage.
        identity: what the serial number of the embedded document comes from: 64 hex digits of the wheels' inputs.

    Raises:
        AttestationError: the document is not valid.
        LockError: the plan is not complete.
    """
    root = part.wheel(subject.name, subject.version, subject.filename, subject.sha256)
    assembly = Assembly(root, _WHEEL)
    inputs = _add_contents(assembly, root, subject.kind, plan, prefetched)
    serial = (
        serial_number("embedded", identity, subject.filename)
        if subject.sha256 is None
        else serial_number("sha256", subject.sha256)
    )
    return assembly.render(
        serial=serial,
        epoch=plan.pinned().source.epoch,
        formulation=_formula(assembly, plan, prefetched, uid=identity, stages=("wheels",), inputs=inputs),
    )


# Extensions carry statically linked parts of compiler and headers (libstdc++, CUDA device libraries) that no build
# file lists one by one.
_WHEEL: Aggregate = "incomplete"


def image_bom(
    image: ImageSubject,
    plan: BuildPlan,
    prefetched: Mapping[str, Any],
    wheels: Sequence[WheelSubject],
    packages: Sequence[DebianPackage],
    distro: Distro,
    licences: Mapping[str, Licence],
) -> bytes:
    """Return the SBOM of an image: base and its packages, wheels with their sources, locked distributions.

    Args:
        image: the image.
        plan: a complete plan.
        prefetched: the result of the prefetch stage.
        wheels: the built wheels that it holds, with their SHA-256.
        packages: what its package database lists.
        distro: what its os-release says.
        licences: file name of a locked wheel → its licence.

    Raises:
        AttestationError: the document is not valid.
        LockError: the plan is not complete.
    """
    root = part.image(image.name.rstrip("/").rpartition("/")[2], image.name, image.digest, ref="image")
    # Files that no package and no wheel lists (caches, entry points, what a base brought along) are not in it.
    assembly = Assembly(root, "incomplete")
    system = root
    for number, base in enumerate(image.bases):
        component = part.image(base.name, base.reference, base.digest, ref=f"base:{base.name}")
        assembly.add(component, below=root)
        system = component if number == 0 else system
    operating_system = assembly.add(part.operating_system(distro), below=system)
    for package in packages:
        assembly.add(part.debian_package(package, distro), below=operating_system)
    for row in prefetched["distributions"]:
        if "runtime" in row["used_for"]:
            component = part.distribution(row, licence=licences.get(row["filename"]))
            assembly.add(component, below=root, aggregate=_completeness(row))
    inputs = []
    for subject in wheels:
        wheel = part.wheel(subject.name, subject.version, subject.filename, subject.sha256)
        assembly.add(wheel, below=root, aggregate=_WHEEL)
        inputs.append(f"wheel:{subject.filename}")
        _add_contents(assembly, wheel, subject.kind, plan, prefetched)
    return assembly.render(
        serial=serial_number("sha256", image.digest.removeprefix("sha256:")),
        epoch=plan.pinned().source.epoch,
        formulation=_formula(assembly, plan, prefetched, uid=plan.build_id, stages=("wheels", "image"), inputs=inputs),
    )


def _completeness(row: Mapping[str, Any]) -> Aggregate:
    """What is inside NVIDIA's binaries is not published; of other distributions nobody here knows."""
    return "incomplete" if row["name"].startswith("nvidia-") else "unknown"


def _add_contents(
    assembly: Assembly,
    wheel: Component,
    kind: Literal["main", "cuda-probe"],
    plan: BuildPlan,
    prefetched: Mapping[str, Any],
) -> list[str]:
    """Add what a wheel was made from; return the references of it."""
    if kind == "cuda-probe":
        return _add_probe(assembly, wheel, plan, prefetched)
    source = prefetched["source"]
    if source["kind"] == "wheel":  # published by others, who say what is in it or do not
        return []
    main = assembly.add(part.main_source(source, plan.recipe.source_name), below=wheel)
    added = [main]
    for path, commit in source["submodules"].items():
        assembly.add(part.submodule(main.name, path, commit), below=main)
    submodules = {locked.label: locked.submodules for locked in plan.pinned().source.sources}
    for row in source["fetches"]:
        if row["unused"] is not None:
            continue
        if row["kind"] == "crates":
            crates = [crate for crate in source["crates"] if crate["lock"] == row["name"]]
            lock = assembly.add(part.fetched(row), below=main, aggregate="complete" if crates else "incomplete")
            for crate in crates:
                assembly.add(part.crate(crate), below=lock)
            added.append(lock)
            continue
        named = submodules.get(row["name"], ())
        # "*" is every submodule, and which these are only the parent's commit knows.
        fetched = assembly.add(part.fetched(row), below=main, aggregate="incomplete" if "*" in named else "unknown")
        for path in named:
            assembly.add(part.submodule(row["name"], path, None), below=fetched)
        added.append(fetched)
    return [str(component.bom_ref.value) for component in added]


def _add_probe(assembly: Assembly, wheel: Component, plan: BuildPlan, prefetched: Mapping[str, Any]) -> list[str]:
    """NVRTC made the probe's device code and nvFatbin packed it: they are told, though not contained."""
    source = assembly.add(part.probe_source(plan.probe_sha256), below=wheel, aggregate="complete")
    added = [source]
    for row in prefetched["distributions"]:
        if "build" in row["used_for"] and row["name"].startswith(("nvidia-", "cuda-")):
            component = part.distribution(row, contained=False)
            added.append(assembly.add(component, below=wheel, aggregate=_completeness(row)))
    return [str(component.bom_ref.value) for component in added]


def _formula(
    assembly: Assembly,
    plan: BuildPlan,
    prefetched: Mapping[str, Any],
    *,
    uid: str,
    stages: Sequence[str],
    inputs: Sequence[str],
) -> dict[str, Any]:
    made_with = part.tools(plan.toolchain.to_json()) if plan.toolchain else []
    for row in prefetched["distributions"]:
        if "build" in row["used_for"] and not assembly.has(f"distribution:{row['filename']}"):
            made_with.append(part.distribution(row))
    steps = [
        {
            "name": step.title,
            "commands": [
                {
                    "executed": shlex.join(step.command),
                    "properties": [
                        {"name": f"cufallback:environment:{name}", "value": value}
                        for name, value in sorted((step.environment or {}).items())
                    ],
                }
            ],
        }
        for step in plan.steps
        if step.command and step.stage in stages
    ]
    return formula(made_with, uid=uid, steps=steps, inputs=inputs, output=str(assembly.root.bom_ref.value))
