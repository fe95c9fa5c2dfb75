"""Write the pages that come from code, and the recipe schema; with --check only compare.

These are docs/exit-codes.md, docs/recipe.md and recipes/recipe.schema.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cufallback.errors import ExitCode
from cufallback.recipe import json_schema

ROOT = Path(__file__).resolve().parent.parent
Node = dict[str, Any]

# What to do, where the error's own remedy is not at hand. A new exit code without a line here fails the generation.
REMEDIES = {
    ExitCode.OK: "nothing",
    ExitCode.UNEXPECTED: "send the report file with an issue; it is redacted, read it first all the same",
    ExitCode.USAGE: "read the usage lines it prints, or `cufallback COMMAND --help`",
    ExitCode.RECIPE: "correct the line it names; docs/recipe.md explains every key",
    ExitCode.TOOLCHAIN: "install what the table lists, or build the recipe `rehearsal`, which needs less",
    ExitCode.SOURCE: "check the pin in `[source]`: a tag may have moved, a hash may belong to another file",
    ExitCode.REWRITE: "compare the rewrite with the file of the pinned source; upstream may have fixed it itself",
    ExitCode.CONTRACT: "read why the contract is there; pin a source that keeps it or add the rewrite that does",
    ExitCode.HARVEST: "pin the source it names in locks/RECIPE/source.lock.toml, or name it under `[[source.unused]]`",
    ExitCode.LOCK: "run `nox -s lock -- --recipe NAME` and review the difference before you commit it",
    ExitCode.POLICY: "read the chain it prints; an edit or override of the recipe must keep that distribution out",
    ExitCode.DOWNLOAD: "check network, proxy and index settings, then run again: what has arrived stays",
    ExitCode.INTEGRITY: "look at the file that was kept aside: a mirror or proxy altered it, or the lock is wrong",
    ExitCode.BUILD: "read the log it names",
    ExitCode.PAYLOAD: "give the path of a wheel; fetch the file again if it should be one",
    ExitCode.RECORD: "give the folder that `cufallback build` printed, unaltered",
    ExitCode.WORKSPACE: "free space or choose other folders with --work and --dist, then run again: it resumes",
    ExitCode.BUSY: "wait for the other process; it prints its progress",
    ExitCode.COMMAND: "run the command that it prints by hand",
    ExitCode.IMAGE: "read the log it names; `--base` replaces a base image that cannot be had",
    ExitCode.REGISTRY: "check name, network and `docker login`, then run again: what has arrived stays",
    ExitCode.TAG: "choose another tag, or give --move-tag when the old image may lose it",
    ExitCode.KEY: "give a PEM key (ECDSA P-256) that only you may read; docs/verify.md shows how to make one",
    ExitCode.ATTESTATION: "do not use the document; build again, or ask who sent it",
    ExitCode.LOCK_DRIFT: "read the difference; run `nox -s lock -- --recipe NAME` to take it",
    ExitCode.INSPECTION_FAILED: "read the findings; `cufallback inspect WHEEL` shows them again",
    ExitCode.VERIFY_FAILED: "do not use the folder; it names every file and statement that does not hold",
    ExitCode.INTERRUPTED: "run the same command again",
    ExitCode.TERMINATED: "run the same command again",
}


def exit_codes() -> str:
    """Return the page of exit codes."""
    rows = "".join(f"| {code.value} | `{code.name}` | {code.doc} | {REMEDIES[code]} |\n" for code in ExitCode)
    return f"""# Exit codes

`cufallback` prints an error as one reason, the place it is about and a remedy, on stderr; each kind has a code of
its own, so that scripts need not read text. Codes from 40 on are findings: the command did its work, and what it
found is not good. `nox` itself always ends with 1 when a session fails and shows the command's code in its last lines.

| code | name | meaning | what to do |
|---:|---|---|---|
{rows}"""


def _resolve(node: Node, definitions: Node) -> Node:
    """Follow a reference, and the one real branch of an optional value."""
    branches = [branch for branch in node.get("anyOf", []) if branch.get("type") != "null"]
    if branches:
        node = {**branches[0], **{key: value for key, value in node.items() if key != "anyOf"}}
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def _type(node: Node, definitions: Node) -> str:
    if "const" in node:
        return f"`{json.dumps(node['const'])}`"
    if "enum" in node:
        return " or ".join(f"`{json.dumps(value)}`" for value in node["enum"])
    if node["type"] == "array":
        return f"array of {_type(_resolve(node['items'], definitions), definitions)}"
    if node["type"] == "object":
        return "table of strings"
    return str(node["type"])


def _default(name: str, node: Node, required: list[str]) -> str:
    if name in required:
        return "required"
    return f"`{json.dumps(node['default'])}`" if node.get("default") not in (None, [], {}) else "absent"


def _tables(node: Node, path: str, definitions: Node, shown: set[str]) -> Iterator[str]:
    """Yield the rows of the table ``node`` and a section for each table below it that is not ``shown`` yet."""
    rows: list[str] = []
    inner: list[tuple[str, Node, bool]] = []
    for name, raw in node["properties"].items():
        field = _resolve(raw, definitions)
        items = _resolve(field["items"], definitions) if "items" in field else field
        where = f"{path}.{name}".lstrip(".")
        if "oneOf" in field:
            inner += [(where, _resolve(branch, definitions), False) for branch in field["oneOf"]]
        elif "properties" in items:
            inner.append((where, items, "items" in field))
        else:
            rows.append(
                f"| `{name}` | {_type(field, definitions)} | {_default(name, field, node.get('required', []))} "
                f"| {field['description']} |\n"
            )
            continue
        meaning = field.get("description") or items["description"]
        need = "required" if name in node.get("required", []) else "absent"
        rows.append(f"| `{name}` | {'tables' if 'items' in field else 'table'} | {need} | {meaning} |\n")
    yield "| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)
    for where, table, repeated in inner:
        kind = table["properties"].get("kind", {}).get("const")
        title = f"[[{where}]]" if repeated else f"[{where}]"
        heading = f"## `{title}`" + (f", kind `{kind}`" if kind else "")
        if heading not in shown:
            shown.add(heading)
            yield f"{heading}\n"
            yield from _tables(table, where, definitions, shown)


def recipe() -> str:
    """Return the page of the recipe format, each key with its meaning from the model."""
    schema = json_schema()
    head = """# Recipes

A recipe is one TOML file that holds every decision about a build and nothing that a machine can derive. It lies in
`recipes/`, its locks in `locks/RECIPE/`. `cufallback recipe list` names them, `cufallback recipe show rehearsal`
prints one with every default filled in, `cufallback plan --recipe rehearsal` says what it would do here.

The first line, `#:schema ./recipe.schema.json`, lets editors that know TOML schemas complete and check the file;
`cufallback recipe schema` prints that schema. A key that does not exist is an error that names the nearest one that
does, and every error carries the file, the line and the path of the key. Each decision has a `why`, which goes into
the record of the build.

This page is written from the model by `nox -s docs`.
"""
    return "\n".join([head, *_tables(schema, "", schema["$defs"], set())])


def generated() -> dict[Path, str]:
    """Return path → text of everything that is generated."""
    return {
        ROOT / "docs/exit-codes.md": exit_codes(),
        ROOT / "docs/recipe.md": recipe(),
        ROOT / "recipes/recipe.schema.json": json.dumps(json_schema(), indent=2) + "\n",
    }


def main(arguments: list[str]) -> int:
    """Write the files, or with --check name those that are not current and return 1."""
    stale = [path for path, text in generated().items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        print(f"{'not current' if '--check' in arguments else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in arguments:
            path.write_text(generated()[path])
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
