"""A CycloneDX 1.6 document: put together from components, written in one form, and checked as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal
from uuid import NAMESPACE_URL, UUID, uuid5

from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.model.lifecycle import LifecyclePhase, PredefinedLifecycle
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from cufallback import __version__
from cufallback.attest.statement import parse_json
from cufallback.errors import AttestationError
from cufallback.store import canonical_json

Aggregate = Literal["complete", "incomplete", "unknown"]

_REMEDY = "build again; a document is never edited by hand"
_LONGEST_URL = 2048  # characters; the schema's check takes about a millisecond for each


def serial_number(*identity: str) -> UUID:
    """Return the UUID (version 5) that always goes with these words."""
    return uuid5(NAMESPACE_URL, ":".join(("urn:cufallback:sbom", *identity)))


@dataclass
class Assembly:
    """What a document says of one root component, while it is put together.

    Every component is added below another one, so that the graph is connected from the start. ``aggregate`` says
    whether all parts *of that component* are in the document.
    """

    root: Component
    aggregate: Aggregate
    _components: dict[str, Component] = field(default_factory=dict)
    _edges: dict[str, set[str]] = field(default_factory=dict)
    _aggregates: dict[str, Aggregate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._aggregates[_ref(self.root)] = self.aggregate

    def add(self, component: Component, *, below: Component, aggregate: Aggregate = "unknown") -> Component:
        """Add a component, or another edge to the one that is there already; return the one that is there."""
        ref = _ref(component)
        known = self._components.setdefault(ref, component)
        self._aggregates.setdefault(ref, aggregate)
        self._edges.setdefault(_ref(below), set()).add(ref)
        return known

    def has(self, ref: str) -> bool:
        """Whether a component with this reference was added."""
        return ref in self._components

    def render(self, *, serial: UUID, epoch: int, formulation: Mapping[str, Any]) -> bytes:
        """Return the document as canonical JSON after holding it to the schema and to its own graph.

        Args:
            serial: see :func:`serial_number`.
            epoch: seconds since 1970 that count as its creation.
            formulation: one formula; see :func:`formula`.

        Raises:
            AttestationError: it is not valid.
        """
        refs = [_ref(self.root), *self._components]
        known = {ref: component.bom_ref for ref, component in self._components.items()} | {
            _ref(self.root): self.root.bom_ref
        }
        program = Component(
            name="cufallback", version=__version__, type=ComponentType.APPLICATION, bom_ref="tool:cufallback"
        )
        bom = Bom(
            serial_number=serial,
            metadata=BomMetaData(
                timestamp=datetime.fromtimestamp(epoch, UTC),
                lifecycles=[PredefinedLifecycle(LifecyclePhase.BUILD)],
                tools=ToolRepository(components=[program]),
                component=self.root,
            ),
            components=self._components.values(),
            dependencies=[
                Dependency(known[ref], [Dependency(known[child]) for child in sorted(self._edges.get(ref, ()))])
                for ref in refs
            ],
        )
        document = _modelled(bom)
        # The library's model has neither.
        document["formulation"] = [formulation]
        document["compositions"] = [
            {"aggregate": aggregate, "assemblies": sorted(ref for ref in refs if self._aggregates[ref] == aggregate)}
            for aggregate in sorted(set(self._aggregates.values()))
        ]
        content = canonical_json(document)
        check_bom(content, where="the new SBOM")
        return content


def _ref(component: Component) -> str:
    return str(component.bom_ref.value)


def _modelled(bom: Bom) -> dict[str, Any]:
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    assert isinstance(document, dict)  # noqa: S101 - a CycloneDX document is an object
    return document


def formula(
    components: Sequence[Component], *, uid: str, steps: Sequence[Mapping[str, Any]], inputs: Sequence[str], output: str
) -> dict[str, Any]:
    """Return how something was made: one workflow of type build.

    Args:
        components: tools and build-time distributions.
        uid: identifies the workflow.
        steps: CycloneDX steps.
        inputs: references of the components that were built from.
        output: reference of what was built.
    """
    workflow = {
        "bom-ref": "workflow:build",
        "uid": uid,
        "name": "build",
        "taskTypes": ["build"],
        "resourceReferences": [{"ref": ref} for ref in sorted(map(_ref, components))],
        "steps": list(steps),
        "inputs": [{"resource": {"ref": ref}} for ref in sorted(inputs)],
        "outputs": [{"type": "artifact", "resource": {"ref": output}}],
    }
    return {
        "bom-ref": "formula:build",
        "components": _modelled(Bom(components=components))["components"],
        "workflows": [workflow],
    }


@dataclass(frozen=True)
class Listed:
    """One component of a document."""

    ref: str
    type: str
    name: str
    version: str
    purl: str | None
    sha256: str | None


@dataclass(frozen=True)
class BomFacts:
    """What a checked document is about. ``root`` is its subject, ``components`` all others but the formulation's."""

    serial: str
    root: Listed
    components: tuple[Listed, ...]


def check_bom(content: bytes, *, where: str) -> BomFacts:
    """Hold a document to the strict schema of CycloneDX 1.6 and to its own references.

    References must be unique and lead somewhere, and every component must be reachable from the root.

    Args:
        content: the document.
        where: what to call it in errors.

    Raises:
        AttestationError: naming the first fault and its place.
    """
    try:
        return _checked(content, where)
    except RecursionError as error:
        raise AttestationError("is nested too deep", remedy=_REMEDY, where=where) from error


def _checked(content: bytes, where: str) -> BomFacts:
    document = parse_json(content, where=where, remedy=_REMEDY)
    for place, key, value in _strings(document, ""):
        if key == "url" and len(value) > _LONGEST_URL:
            raise AttestationError(
                f"the URL has {len(value)} characters, more than {_LONGEST_URL}",
                remedy=_REMEDY,
                where=f"{where}: {place.lstrip('.')}",
            )
    _check_schema(content.decode("utf-8"), where)
    # The schema leaves the version open and these out, but nothing can be said of a document without them.
    if document["specVersion"] != "1.6":
        raise AttestationError(
            f"is no CycloneDX 1.6 but {document['specVersion']!r}", remedy=_REMEDY, where=f"{where}: specVersion"
        )
    for place, holder, key in (
        ("metadata.component", document.get("metadata", {}), "component"),
        ("serialNumber", document, "serialNumber"),
    ):
        if key not in holder:
            raise AttestationError(f"there is no {place}", remedy=_REMEDY, where=where)
    root = _listed(document["metadata"]["component"], f"{where}: metadata.component")
    rows = [_listed(row, f"{where}: {place}") for place, row in _nested(document.get("components", []), "components")]
    _check_references(document, where)
    reached = _reachable(document, root.ref)
    for row in rows:
        if row.ref not in reached:
            raise AttestationError(
                f"component {row.ref!r} cannot be reached from {root.ref!r}", remedy=_REMEDY, where=where
            )
    return BomFacts(document["serialNumber"], root, tuple(rows))


@cache
def _validator() -> JsonStrictValidator:
    """Reading the schema takes longer than holding a document to it."""
    return JsonStrictValidator(SchemaVersion.V1_6)


def _check_schema(text: str, where: str) -> None:
    fault = _validator().validate_str(text)
    if fault is not None:
        place = ".".join(str(part) for part in fault.data.absolute_path) or "top"
        message = str(fault.data.message)
        short = message if len(message) <= 200 else f"{message[:190]} …"
        raise AttestationError(f"is no CycloneDX 1.6: {short}", remedy=_REMEDY, where=f"{where}: {place}")


def _nested(rows: Sequence[Mapping[str, Any]], place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, row in enumerate(rows):
        yield f"{place}.{number}", row
        yield from _nested(row.get("components", []), f"{place}.{number}.components")


def _listed(row: Mapping[str, Any], place: str) -> Listed:
    if "bom-ref" not in row:
        raise AttestationError("the component has no bom-ref", remedy=_REMEDY, where=place)
    sha256 = next((item["content"] for item in row.get("hashes", []) if item["alg"] == "SHA-256"), None)
    return Listed(row["bom-ref"], row["type"], row["name"], row.get("version", ""), row.get("purl"), sha256)


def _reachable(document: Mapping[str, Any], root: str) -> set[str]:
    edges = {entry["ref"]: entry.get("dependsOn", []) for entry in document.get("dependencies", [])}
    for _place, row in _nested([document["metadata"]["component"], *document.get("components", [])], ""):
        parts = [part["bom-ref"] for part in row.get("components", [])]
        edges[row["bom-ref"]] = [*edges.get(row["bom-ref"], []), *parts]
    reached: set[str] = set()
    waiting = [root]
    while waiting:
        ref = waiting.pop()
        if ref not in reached:
            reached.add(ref)
            waiting += edges.get(ref, [])
    return reached


def _check_references(document: Mapping[str, Any], where: str) -> None:
    """Demand that each ``bom-ref`` is there once and that whatever refers to one finds it."""
    defined: set[str] = set()
    for place, key, value in _strings(document, ""):
        if key == "bom-ref":
            if value in defined:
                raise AttestationError(
                    f"bom-ref {value!r} is there twice", remedy=_REMEDY, where=f"{where}: {place.lstrip('.')}"
                )
            defined.add(value)
    for place, key, value in _strings(document, ""):
        if key in _REFERRING and value not in defined:
            raise AttestationError(
                f"refers to {value!r}, which is not there", remedy=_REMEDY, where=f"{where}: {place.lstrip('.')}"
            )
    described: set[str] = set()
    for entry in document.get("dependencies", []):
        if entry["ref"] in described:
            raise AttestationError(
                f"{entry['ref']!r} is described twice", remedy=_REMEDY, where=f"{where}: dependencies"
            )
        described.add(entry["ref"])


# Keys whose texts are references: of dependencies, of compositions, of workflows.
_REFERRING = frozenset({"ref", "dependsOn", "provides", "assemblies", "dependencies"})


def _strings(value: Any, place: str, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield place, key and text of every text; of a text in a list, the key is the list's."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _strings(part, f"{place}.{name}", name)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _strings(part, f"{place}.{number}", key)
    elif isinstance(value, str):
        yield place, key, value
