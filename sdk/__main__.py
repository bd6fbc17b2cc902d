"""For authors of plugins and operators: `python -m sdk new | check | doctor | gpu`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from core.errors import ManymeshError

if TYPE_CHECKING:
    from sdk.doctor.checks import Finding


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 1 where what was looked at is not well, 2 where a request is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m sdk", description="Make, check and look after plugins of manymesh."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    from sdk.scaffold.names import Kind

    new = commands.add_parser("new", help="make a distribution with a backend that works, to be made your own")
    new.add_argument("name", help="of the distribution, e.g. my-engine; users ask for it without a leading 'manymesh-'")
    new.add_argument("--kind", choices=get_args(Kind), default="engine", help="default: engine")
    new.add_argument("--dir", type=Path, metavar="D", help="directory to make; default: the name, here")
    new.set_defaults(run=_new)

    check = commands.add_parser("check", help="see that what a plugin says of itself is true, in seconds")
    check.add_argument("name", help="of a backend, also distribution:backend, or of a distribution")
    check.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    check.set_defaults(run=_check)

    doctor = commands.add_parser("doctor", help="look over this machine: what would spoil a run, and what to do")
    doctor.add_argument("names", nargs="*", metavar="PLUGIN", help="those that will be used; default: all installed")
    doctor.add_argument(
        "--run", dest="config", metavar="FILE", help="look at this GRPO config alone: what its ranks would hold"
    )
    doctor.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the config, repeatable")
    doctor.add_argument("--gpu-memory", type=float, metavar="GIB", help="of each GPU; default: of this machine's")
    doctor.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    doctor.set_defaults(run=_doctor)

    gpu = commands.add_parser("gpu", help="run on a GPU what can be known only there; ten minutes")
    gpu.add_argument("--only", default="", metavar="04,05", help="numbers of steps; default: all")
    gpu.add_argument("--list", action="store_true", help="say what each step measures, and run none")
    gpu.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    gpu.add_argument("--limit", type=float, default=600.0, metavar="S", help="seconds for all steps; default: 600")
    gpu.add_argument("--json", type=Path, metavar="FILE", help="write what was found (schema 1)")
    gpu.set_defaults(run=_gpu)

    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except ManymeshError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return status


def _new(args: Any) -> int:
    from sdk.scaffold.generate import generate
    from sdk.scaffold.names import Names

    names = Names.of(args.name, args.kind)
    names.check_free()
    directory = args.dir or Path(names.distribution)
    files = generate(names, directory)
    print(f"{names.kind} {names.backend!r} in {directory}: {len(files)} files. What to do with it:\n")
    commands = {
        f"cd {directory}": "",
        "pip install -e '.[dev]'": "",
        f"python -m core.list_engines {names.backend}": "it is there, and these are its options",
        f"python -m sdk check {names.backend}": "what its manifest says is true",
        "pytest": "all of the conformance kit",
    }
    width = max(map(len, commands))
    for command, what in commands.items():
        print(f"  {command.ljust(width)}  # {what}" if what else f"  {command}")
    print(f"\nThen make {names.package}/{names.kind}.py yours. The licence is yours to choose: see README.md.")
    return 0


def _check(args: Any) -> int:
    from sdk.check import check

    return _report(check(args.name), args.json)


def _doctor(args: Any) -> int:
    from sdk.doctor.look import device_here, look

    if args.config is not None:
        from sdk.doctor.run import look_at_run

        device = ("cuda", int(args.gpu_memory * 2**30)) if args.gpu_memory is not None else device_here()
        return _report(look_at_run(args.config, args.set, *device), args.json)
    return _report(look(args.names), args.json)


def _gpu(args: Any) -> int:
    from sdk.gpu import report
    from sdk.gpu.outline import select
    from sdk.gpu.runner import run_steps

    steps = select(args.only)
    if args.list:
        for step in steps:
            print(f"{step.number} {step.title} ({step.limit_s:g} s)\n   {step.measures}")
        return 0
    if (device := args.device) is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("no GPU is used: steps that need CUDA are absent, the others run on CPU to test the program itself")
    results = report.show(run_steps(steps, device, args.limit), lambda line: print(line, flush=True))
    if args.json:
        report.write(results, device, args.json)
    return 0 if report.passed(results) else 1


def _report(findings: Iterable[Finding], as_json: bool) -> int:
    from rich.console import Console

    from sdk.doctor import report

    if as_json:
        with contextlib.redirect_stdout(sys.stderr):  # what plugins and libraries print must not spoil the JSON
            findings_made = list(findings)
        print(report.as_json(findings_made))
    else:
        findings_made = report.show(findings, Console(soft_wrap=True, highlight=False))
    return 0 if report.healthy(findings_made) else 1


if __name__ == "__main__":
    sys.exit(main())
