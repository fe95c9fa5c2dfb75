"""The command line: argument parsing only. Each command calls one function and prints its result."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cufallback import __version__
from cufallback.errors import ExitCode


def run(arguments: Sequence[str], *, clock: Callable[[], float] = time.time) -> int:
    """Parse ``arguments``, run the command, return its exit code.

    Args:
        arguments: the words after the program's name.
        clock: seconds since 1970; the only clock there is.
    """
    options = _parser().parse_args(arguments)
    options.clock = clock
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cufallback",
        description="Build, prove and keep a CUDA fallback of a vLLM release.",
        epilog="Exit codes: 0 done; 2 usage; 10-30 an error with its remedy; 40-42 a finding; 130, 143 stopped.",
    )
    parser.add_argument("--version", action="version", version=f"cufallback {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str, group: Any = commands) -> Any:
        sub = group.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    def add_recipe(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--recipe", metavar="NAME", help="recipe name or path of a .toml file (default: the default recipe)"
        )

    def add_json(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--json", action="store_true", help="print JSON on stdout")

    def add_work(sub: argparse.ArgumentParser) -> None:
        work = Path(os.environ.get("CUFALLBACK_WORK", ".cufallback"))
        sub.add_argument("--work", metavar="DIR", type=Path, default=work, help=f"work folder (default: {work})")

    def add_bases(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--base",
            metavar="NAME=oci-layout:DIR@sha256:DIGEST",
            action="append",
            default=[],
            help="an image on disk in place of the locked base image of that name",
        )

    build = add("build", _build, "build a recipe: sources, wheels, inspection, image, attestations, record")
    add_recipe(build)
    add_work(build)
    build.add_argument("--dist", metavar="DIR", type=Path, default=Path("dist"), help="output folder (default: dist)")
    build.add_argument(
        "--until", metavar="STAGE", help="stop after this stage: prefetch, wheels, inspect, image, attest or record"
    )
    add_bases(build)
    build.add_argument("--require-image", action="store_true", help="fail where the image would be left out")
    build.add_argument(
        "--no-cache", action="store_true", help="take no step of the image from the engine's build cache"
    )
    build.add_argument("--no-wait", action="store_true", help="fail when another process builds the same id")
    add_json(build)

    plan = add("plan", _plan, "show stages, pins and what this machine lacks; runs nothing")
    add_recipe(plan)
    add_work(plan)
    add_bases(plan)
    add_json(plan)

    lock = add("lock", _lock, "resolve and write locks/<recipe>/, or check them for drift")
    add_recipe(lock)
    add_work(lock)
    lock.add_argument(
        "--check", action="store_true", help="write nothing; fail and show the difference when they drifted"
    )
    lock.add_argument(
        "--images", action="store_true", help="resolve the tags of the base images to digests, and nothing else"
    )
    lock.add_argument(
        "--engine", choices=("uv", "pip-tools"), default="uv", help="pip-tools: compare as second opinion"
    )

    def add_plain_http(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--plain-http",
            action="store_true",
            default=None,
            help="speak http with the registry (without it: only with one on this machine)",
        )

    verify = add(
        "verify", _verify, "verify build folders from disk alone, or images in a registry with what is attached"
    )
    verify.add_argument(
        "builds", metavar="DIR|IMAGE", nargs="+", help="dist/<recipe>/<build id>, or REGISTRY/NAME@DIGEST"
    )
    verify.add_argument("--key", metavar="FILE", type=Path, help="public key (PEM) that must have signed everything")
    verify.add_argument("--platform", default="linux/amd64", help="of an image in a registry (default: linux/amd64)")
    add_plain_http(verify)
    add_json(verify)

    sign = add("sign", _sign, "verify a build folder and sign its record, provenance and SBOMs")
    sign.add_argument("folder", metavar="DIR", type=Path, help="dist/<recipe>/<build id>")
    sign.add_argument(
        "--key", metavar="FILE", type=Path, help="private key (PEM, ECDSA P-256); else CUFALLBACK_SIGNING_KEY holds it"
    )

    push = add("push", _push, "push a build's image by digest, attach its documents, then set the tag")
    push.add_argument(
        "target", metavar="REGISTRY/NAME[:TAG]", help="where to; without a tag the image is there by digest"
    )
    push.add_argument("--build", metavar="DIR", type=Path, help="build folder (default: the only one with an image)")
    push.add_argument(
        "--dist", metavar="DIR", type=Path, default=Path("dist"), help="where to look for it (default: dist)"
    )
    push.add_argument("--move-tag", action="store_true", help="take the tag from the image that it names now")
    add_plain_http(push)
    add_json(push)

    show = add("show", _show, "show on one screen what a build folder holds")
    show.add_argument("folder", metavar="DIR", type=Path, help="dist/<recipe>/<build id>")
    add_json(show)

    inspect = add("inspect", _inspect, "show what any wheel carries: libraries, architectures, PTX, minimum driver")
    inspect.add_argument("wheels", metavar="WHEEL", type=Path, nargs="+", help="path of a .whl file")
    inspect.add_argument("--recipe", metavar="NAME", help="judge the wheels by this recipe's [cuda] and [wheel]")
    add_json(inspect)

    recipe = commands.add_parser("recipe", help="list, show or describe recipes").add_subparsers(
        required=True, metavar="COMMAND"
    )
    add("list", _recipe_list, "name every recipe with its status", recipe)
    add("schema", _recipe_schema, "print the JSON Schema of a recipe file", recipe)
    show_recipe = add("show", _recipe_show, "print a recipe with every default filled in", recipe)
    show_recipe.add_argument("recipe", metavar="NAME", nargs="?")

    source = commands.add_parser("source", help="look at a source tree").add_subparsers(
        required=True, metavar="COMMAND"
    )
    harvest = add("harvest", _harvest, "list every source that a tree's build would fetch", source)
    harvest.add_argument("tree", metavar="TREE", type=Path, help="folder of a source tree")
    add_json(harvest)
    return parser


def _program() -> str:
    """Return how a user calls this program: a nox session has it on its PATH, and the user's shell has not."""
    called = Path(sys.argv[0])
    in_session = "NOX_CURRENT_SESSION" in os.environ
    if called.name != "cufallback" or (shutil.which("cufallback") and not in_session):
        return "cufallback"
    return min(str(called), os.path.relpath(called), key=len)


def _print_json(value: Any) -> None:
    from cufallback.store import canonical_json

    sys.stdout.write(canonical_json(value).decode())


def _build(options: argparse.Namespace) -> int:
    from cufallback.build import build
    from cufallback.progress import choose_progress

    built = build(
        options.recipe,
        work=options.work,
        dist=options.dist,
        until=options.until,
        wait=not options.no_wait,
        replaced_bases=options.base,
        require_image=options.require_image,
        use_cache=not options.no_cache,
        progress=choose_progress(),
        clock=options.clock,
    )
    if options.json:
        _print_json(built.to_json())
    else:
        print(built.summary(_program()))
    return ExitCode.OK


def _plan(options: argparse.Namespace) -> int:
    from cufallback.build import prepare
    from cufallback.show import plan_text

    prepared = prepare(options.recipe, work=options.work, replaced_bases=options.base)
    if options.json:
        _print_json(prepared.to_json())
    else:
        print(plan_text(prepared))
    return ExitCode.OK


def _lock(options: argparse.Namespace) -> int:
    from cufallback.lock import lock, lock_images
    from cufallback.progress import choose_progress
    from cufallback.record import timestamp

    if options.images:
        now = timestamp(options.clock())
        report = lock_images(
            options.recipe, work=options.work, check=options.check, now=now, progress=choose_progress()
        )
        print(report.text())
        return report.exit_code
    report = lock(
        options.recipe,
        work=options.work,
        check=options.check,
        opinion=options.engine == "pip-tools",
        progress=choose_progress(),
    )
    print(report.text())
    return report.exit_code


def _verify(options: argparse.Namespace) -> int:
    from cufallback.attest.keys import load_public_key
    from cufallback.progress import choose_progress
    from cufallback.publish import verify_reference
    from cufallback.show import verification_text
    from cufallback.verify import verify

    key = load_public_key(options.key) if options.key else None
    verifications = []
    for build in options.builds:
        if _is_image(build):
            verifications.append(
                verify_reference(
                    build,
                    key=key,
                    plain_http=options.plain_http,
                    platform=options.platform,
                    progress=choose_progress(),
                )
            )
        else:
            verifications.append(verify(Path(build), key))
    if options.json:
        _print_json([verification.to_json() for verification in verifications])
    else:
        print("\n".join(map(verification_text, verifications)))
    return ExitCode.OK if all(verification.passed for verification in verifications) else ExitCode.VERIFY_FAILED


def _is_image(build: str) -> bool:
    """Say whether an argument names an image in a registry and no folder."""
    from cufallback.errors import UsageError
    from cufallback.image.reference import parse_reference

    if Path(build).exists():
        return False
    try:
        reference = parse_reference(build)
    except UsageError:
        return False
    if reference.digest is None and reference.tag is None:
        raise UsageError("is no folder, and as an image it has no digest", remedy="add @sha256:… or :TAG", where=build)
    return True


def _sign(options: argparse.Namespace) -> int:
    from getpass import getpass

    from cufallback.publish import sign_build

    ask = (lambda: getpass("password of the key: ")) if sys.stdin.isatty() else None
    for path in sign_build(options.folder, options.key, clock=options.clock, ask=ask):
        print(path)
    return ExitCode.OK


def _push(options: argparse.Namespace) -> int:
    from cufallback.progress import choose_progress
    from cufallback.publish import find_build, push_build
    from cufallback.show import pushed_text

    pushed = push_build(
        find_build(options.build, options.dist),
        options.target,
        move_tag=options.move_tag,
        plain_http=options.plain_http,
        progress=choose_progress(),
    )
    if options.json:
        _print_json(pushed.to_json())
    else:
        print(pushed_text(pushed))
    return ExitCode.OK


def _show(options: argparse.Namespace) -> int:
    from cufallback.show import summary_text
    from cufallback.summary import summary

    found = summary(options.folder)
    if options.json:
        _print_json(found)
    else:
        print(summary_text(found))
    return ExitCode.OK


def _inspect(options: argparse.Namespace) -> int:
    from cufallback.recipe import load_recipe
    from cufallback.show import terminal
    from cufallback.wheel.report import run_inspect

    recipe = load_recipe(options.recipe) if options.recipe else None
    width, colour = terminal()
    shown = run_inspect(options.wheels, recipe=recipe, json_output=options.json, width=width, colour=colour)
    sys.stdout.write(shown.text)
    return shown.exit_code


def _recipe_list(_options: argparse.Namespace) -> int:
    from cufallback.recipe import parse_recipe
    from cufallback.resources import recipe_files

    for recipe in map(parse_recipe, recipe_files().values()):
        mark = "*" if recipe.recipe.default else " "
        print(f"{mark} {recipe.name:<22} {recipe.recipe.status:<12} {recipe.recipe.summary}")
    return ExitCode.OK


def _recipe_schema(_options: argparse.Namespace) -> int:
    from cufallback.recipe import json_schema

    print(json.dumps(json_schema(), indent=2))
    return ExitCode.OK


def _recipe_show(options: argparse.Namespace) -> int:
    from cufallback.recipe import load_recipe

    _print_json(load_recipe(options.recipe).model_dump(mode="json", by_alias=True))
    return ExitCode.OK


def _harvest(options: argparse.Namespace) -> int:
    from cufallback.show import harvest_text
    from cufallback.source.harvest import harvest

    found = harvest(options.tree)
    if options.json:
        _print_json([{**asdict(source), "mutable": source.mutable, "commit": source.commit} for source in found])
    else:
        print(harvest_text(found))
    return ExitCode.OK
