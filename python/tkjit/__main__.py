"""``python -m tkjit doctor | cache ls|verify|prune|export | env``."""

from __future__ import annotations

import argparse
import os
import sys
import time

from . import __version__, _env, cache
from ._errors import Error


def _ls(args: argparse.Namespace) -> int:
    found = cache.entries()
    for entry in found:
        meta = {"kernel": "(damaged)", "arch": "?", "nvrtc": "?", **(entry.meta or {})}
        by = "for the CPU" if "compiler" in meta else f"nvrtc {meta['nvrtc']}"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{entry.size:9} {when} {meta['arch']:8} {by:11} {meta['kernel']}")
    size = sum(entry.size for entry in found) / 2**20
    print(f"{len(found)} entries, {size:.1f} MB in {', '.join(cache.folders().all) or 'no folder'}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    whole, damaged = cache.verify()
    for path in damaged:
        print(f"damaged: {path}")
    print(f"{whole} entries are whole, {len(damaged)} were damaged")
    return 1 if damaged else 0


def _prune(args: argparse.Namespace) -> int:
    removed = cache.prune(None if args.mb is None else args.mb << 20)
    print(f"{len(removed)} entries removed")
    return 0


def _export(args: argparse.Namespace) -> int:
    print(f"{cache.export(args.folder)} entries copied to {args.folder}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from . import doctor

    return doctor.run()


def _print_env(args: argparse.Namespace) -> int:
    print(_env.markdown())
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tkjit", description=f"tkjit {__version__}")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("doctor", help="check driver, compiler, cache and one kernel").set_defaults(run=_doctor)
    commands.add_parser("env", help="print the table of environment variables").set_defaults(run=_print_env)
    actions = commands.add_parser("cache", help="look after the compiled kernels").add_subparsers(
        required=True, metavar="action"
    )
    actions.add_parser("ls", help="list the entries, least recently used first").set_defaults(run=_ls)
    actions.add_parser("verify", help="check every entry, remove damaged ones").set_defaults(run=_verify)
    prune = actions.add_parser(
        "prune", help="remove the least recently used entries, and leftovers of killed processes"
    )
    prune.add_argument("--mb", type=int, help="size to come down to (default: TKJIT_CACHE_MAX_MB)")
    prune.set_defaults(run=_prune)
    export = actions.add_parser("export", help="copy the entries into a folder, to be shipped")
    export.add_argument("folder", help="made if it is missing; name it in TKJIT_CACHE_DIR, behind a colon")
    export.set_defaults(run=_export)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Error, OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
