"""The command line: `python -m shardc plan | explain | draw | simulate | calibrate | doctor | opt`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from passes.errors import Error
from shardc import look, opt
from shardc.calibrate import add_to as add_calibrate
from shardc.doctor import add_to as add_doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is 1 for input that shardc refuses, with the reason on stderr."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Every command adds itself, with `run` as what it does."""
    found = argparse.ArgumentParser("python -m shardc", description="A compiler for sharded data-parallel training.")
    commands = found.add_subparsers(required=True, metavar="command")
    look.add_to(commands)
    opt.add_to(commands)
    add_calibrate(commands)
    add_doctor(commands)
    return found


if __name__ == "__main__":
    sys.exit(main())
