"""`python -m benchmarks COMMAND`: see NOTES.md."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX and torch share the card

import argparse
import sys
from collections.abc import Sequence

from . import check, fuzz, machine, timed, tune


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Correctness and speed of the kernels on a Hopper GPU."
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    for module in (check, fuzz, *timed.COMMANDS, tune):
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(module.NAME, help=text.splitlines()[0], description=text)
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    arguments = parser.parse_args(argv)
    why = None if getattr(arguments, "list", False) else machine.refusal()
    if why is not None:
        print(f"benchmarks {arguments.command}: {why}", file=sys.stderr)
        return 2
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
