"""Text for people: tables of plans, needs, verifications and harvests. No decisions here."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from cufallback.build import Prepared
    from cufallback.push import Pushed
    from cufallback.source.harvest import Harvested
    from cufallback.verify import Verification

_STYLES = {
    "ok": "green",
    "passed": "green",
    "missing": "bold red",
    "failed": "bold red",
    "degraded": "yellow",
    "warned": "yellow",
    "not_run": "yellow",
    "not checked": "yellow",
}
# In a pipe or a log nothing is folded: lines are there to be searched.
_WIDTH_WITHOUT_TERMINAL = 1000


def terminal() -> tuple[int, bool]:
    """Return the columns of stdout and whether it takes colours; NO_COLOR is honoured."""
    if not sys.stdout.isatty():
        return _WIDTH_WITHOUT_TERMINAL, False
    return shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 50)).columns, not os.environ.get("NO_COLOR")


def render(*items: RenderableType) -> str:
    """Return ``items`` as text for stdout."""
    width, colour = terminal()
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, no_color=not colour, emoji=False)
    with console.capture() as capture:
        for item in items:
            console.print(item, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a plain table; cells that are a status word take its colour."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return made


def needs_text(prepared: Prepared) -> str:
    """Return what the plan needs of this machine, one row each, and the way on when something is missing."""
    return render(_needs(prepared), *_way_on(prepared))


def _needs(prepared: Prepared) -> Table:
    rows = [(need.what, need.state, need.wanted, need.found, need.remedy) for need in prepared.needs]
    title = f"what recipe {prepared.plan.recipe.name} needs of this machine"
    return table(title, ("need", "state", "wanted", "found", "remedy"), rows)


def _way_on(prepared: Prepared) -> list[str]:
    if all(need.state != "missing" for need in prepared.needs) or prepared.plan.recipe.recipe.status == "rehearsal":
        return []
    return [
        "",
        "The whole pipeline runs on smaller machines with the rehearsal recipe: cufallback build --recipe rehearsal",
    ]


def plan_text(prepared: Prepared) -> str:
    """Return the plan: what is built from what, each stage with its commands, the needs."""
    plan = prepared.plan
    recipe = plan.recipe
    source = recipe.source
    origin = (
        f"{source.url} {source.ref} {source.commit}"
        if source.kind == "git"
        else (f"{source.package} {source.version} sdist sha256 {source.sha256}")
    )
    facts = [
        ("recipe", f"{recipe.name} ({recipe.recipe.status}): {recipe.recipe.summary}"),
        ("source", origin),
        ("because", source.why),
        (
            "cuda",
            f"toolkit {recipe.cuda.toolkit}, architectures {' '.join(recipe.cuda.architectures)}, "
            f"drivers up to r{recipe.cuda.maximum_driver_branch}",
        ),
        ("python", f"{recipe.python.version} for {recipe.python.platform}"),
    ]
    if recipe.recipe.end_of_line:
        facts.append(("ends with", f"{recipe.recipe.end_of_line.when}: {recipe.recipe.end_of_line.why}"))
    facts.append(("build id", plan.short_id if plan.complete else "none yet: something below is missing"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, value in facts:
        grid.add_row(Text(name, style="bold"), Text(value))
    steps = []
    for step in plan.steps:
        steps.append((step.stage, "network" if step.network else "offline", step.title))
        steps.extend(("", "", f"$ {' '.join(step.command)}") for _ in [0] if step.command)
        steps.extend(("", "", f"  {name}={value}") for name, value in (step.environment or {}).items())
    pins = []
    for name, lock in (("build", plan.locks.build), ("runtime", plan.locks.runtime)):
        if lock is not None:
            pins += [(name, f"{item.name}=={item.version}", item.sha256) for item in lock.distributions]
    return render(
        grid,
        "",
        table("stages", ("stage", "network", "what"), steps),
        "",
        table("pins", ("lock", "distribution", "sha256"), pins),
        "",
        _needs(prepared),
        *_way_on(prepared),
    )


def verification_text(verification: Verification) -> str:
    """Return failed checks and checks not run in full, passed ones as a count."""
    counted = dict.fromkeys(("passed", "failed", "not_run"), 0)
    for check in verification.checks:
        counted[check.status] += 1
    rows = [(check.status, check.what, check.why) for check in verification.checks if check.status != "passed"]
    verdict = "verified" if verification.passed else "NOT verified"
    head = (
        f"{verification.folder}: {verdict}: {counted['passed']} checks passed, {counted['failed']} failed, "
        f"{counted['not_run']} not run"
    )
    return render(head, *([table("", ("status", "what", "why"), rows)] if rows else []))


def harvest_text(found: Sequence[Harvested]) -> str:
    """Return one row for each source that a tree's build would fetch."""
    rows = [
        (
            item.name,
            item.kind,
            item.commit or item.ref,
            "mutable" if item.mutable else "",
            item.override or "",
            f"{item.file}:{item.line}",
            item.url,
        )
        for item in found
    ]
    return render(table("", ("name", "kind", "pin", "", "override", "asked by", "url"), rows))


def pushed_text(pushed: Pushed) -> str:
    """Return where an image is now, and what is attached to it."""
    rows = [(item.name, item.artifact_type, "was there" if item.already_there else "new") for item in pushed.documents]
    lines = [f"image     {pushed.reference}"]
    if pushed.tag:
        lines.append(f"tag       {pushed.tag}")
    lines.append(f"check it  cufallback verify {pushed.reference}")
    return render(*lines, "", table("attached", ("file", "type", ""), rows))


def summary_text(found: Mapping[str, Any]) -> str:
    """Return a build folder on one screen."""
    source, image = found["source"], found["image"]
    commit = f" {source['commit']['id']} ({source['commit']['status']})" if source["commit"] else ""
    facts = [
        ("recipe", f"{found['recipe']} ({found['status']})"),
        ("build id", found["build_id"]),
        ("source", f"{source['origin']} {source['ref']}{commit}, changes: {source['changes']}"),
        ("locked", f"{found['distributions']} distributions"),
    ]
    if image:
        engine = image["engine"].get("engine", "unknown")
        facts += [
            ("image", image["digest"]),
            ("", f"{_mib(image['size'])} in {image['layers']} layers, needs {image['driver'] or 'no driver'}"),
            ("", f"built by Docker Engine {engine}, checks inside: {_counts(image['checks'])}"),
        ]
        facts += [("base", _base(base)) for base in image["bases"]]
    else:
        facts += [("image", f"none: {stage['why']}") for stage in found["stages"] if stage["name"] == "image"]
    signatures = found["signatures"]
    signed = f"{len(signatures)} signatures: cufallback verify DIR --key FILE checks them"
    facts.append(("signed", signed if signatures else "no: cufallback sign DIR --key FILE signs it"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, value in facts:
        grid.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    wheels = [
        (wheel["file"], _mib(wheel["size"]), wheel["minimum_driver"] or "any", _counts(wheel["findings"]))
        for wheel in found["wheels"]
    ]
    stages = [
        (stage["name"], stage["status"], f"{stage['seconds']} s" if stage["seconds"] is not None else stage["why"])
        for stage in found["stages"]
    ]
    return render(
        grid,
        "",
        table("wheels", ("file", "size", "driver", "findings"), wheels),
        "",
        table("stages", ("stage", "status", ""), stages),
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {word}" for word, number in sorted(counted.items())) or "none"


def _base(base: Mapping[str, Any]) -> str:
    if base["origin"] == "replaced":
        return f"{base['digest']}, given in place of {base['reference']}"
    return f"{base['reference']} {base['digest']}"
