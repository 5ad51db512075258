"""The command line: ``python -m zerofx demo``, ``bench``, ``estimate`` and ``plan``."""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from zerofx.errors import ConfigError
from zerofx.units import parse_bytes

EXIT_FAILED = 1
EXIT_INTERRUPTED = 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    """An argument parser that complains in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the exit status."""
    try:
        options = _parser().parse_args(arguments)
        status: int = options.run(options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="zerofx", description="ZeRO stages 0 to 3 as a compiler pass.", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_bench(commands)
    _add_estimate(commands)
    _add_plan(commands)
    return parser


def _add_demo(commands: Any) -> None:
    from zerofx.config import BACKENDS

    demo = commands.add_parser(
        "demo",
        help="train a small GPT and compare it with one process and with ZeRO's formulas",
        description="Train a byte-level GPT on the text of Python's standard library. Starts its own ranks; under torchrun it joins those.",
        allow_abbrev=False,
    )
    demo.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO stage (3)")
    demo.add_argument("--nproc", type=_number(1), metavar="N", help="ranks to start (2; under torchrun as many as it started)")
    demo.add_argument("--steps", type=_number(2), metavar="N", help="optimizer steps, at least 2: the first compiles (60; with --params 3)")
    demo.add_argument("--backend", choices=BACKENDS, default="inductor", help="what compiles the graphs (inductor)")
    demo.add_argument("--json", type=_new_file, metavar="FILE", help="write all figures to FILE")
    demo.add_argument("--params", type=_positive, metavar="P", help="train a model of about so many parameters instead, such as 1e9")
    demo.add_argument("--memory-limit", type=_bytes, metavar="BYTES", help="with --params: what a rank may have in memory, such as 2GiB")
    demo.add_argument("--offload", metavar="TARGET", help="with --params: where its states go, disk or disk:DIRECTORY (nowhere)")
    demo.set_defaults(run=_demo)


def _number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text, "memory_limit") or 0
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.why}") from None


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file that can be written")
    return path


def _demo(options: argparse.Namespace) -> int:
    # Imported here: a wrong argument should not wait for Dynamo and DTensor.
    from zerofx.demo import Options
    from zerofx.demo.ranks import run

    if options.params is None and (options.memory_limit or options.offload):
        print(
            "zerofx demo: --memory-limit and --offload are for a large model: name its --params, such as 1e9", file=sys.stderr, flush=True
        )
        return EXIT_FAILED
    return run(
        Options(
            stage=options.stage,
            nproc=options.nproc,
            steps=options.steps,
            backend=options.backend,
            json_path=options.json,
            params=options.params,
            memory_limit_bytes=options.memory_limit,
            offload=options.offload,
        )
    )


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time training steps on a slow link, against the hook mode, FSDP2 and the compute floor",
        description="A short set of the benchmarks (some minutes): two ranks on loopback and on a link of 1 gbit. Needs the source tree.",
        allow_abbrev=False,
    )
    bench.add_argument("--json", type=_new_file, metavar="FILE", help="write all figures to FILE")
    bench.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    try:
        tree = _source_tree()
    except ConfigError as error:
        print(f"zerofx bench: {error.what}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    short = ["--rates", "loopback", "1gbit", "--contestants", "zerofx 3", "zerofx 3, hooks", "fsdp2", "no communication"]
    where = [] if options.json is None else ["--json", str(options.json.absolute())]
    # In a process of its own: benchmarks/ stands beside this package, not below it, and may not be importable from here.
    return subprocess.run([sys.executable, "-m", "benchmarks.step_time", *short, *where], cwd=tree, check=False).returncode


def _add_estimate(commands: Any) -> None:
    estimate = commands.add_parser(
        "estimate",
        help="print ZeRO's closed forms: bytes of one rank, and traffic, by stage",
        description="What one rank holds and sends at each stage, by the closed forms of the ZeRO paper. Needs no model.",
        allow_abbrev=False,
    )
    estimate.add_argument("--params", type=_figure, metavar="P", required=True, help="parameters of the model, such as 7.5e9")
    estimate.add_argument("--world-size", type=_figure, metavar="N", required=True, help="ranks")
    estimate.add_argument("--stage", type=int, choices=range(4), help="one ZeRO stage (all)")
    estimate.add_argument("--precision", help="bf16, fp16 or fp32 (bf16, with fp32 masters)")
    estimate.add_argument("--optimizer", type=_name_or_figure, help="its name, or its bytes of state for each parameter (adam)")
    estimate.add_argument("--offload", nargs="+", metavar="STATE", help="model states on the host: optimizer, gradients, parameters")
    estimate.add_argument("--micro-batches", type=_figure, metavar="G", help="backwards for each optimizer step (1)")
    estimate.add_argument("--deepspeed", type=Path, metavar="FILE", help="settings of DeepSpeed, for what is not given here")
    estimate.add_argument("--json", type=_new_file, metavar="FILE", help="write all figures to FILE")
    estimate.set_defaults(run=_estimate)


def _figure(text: str) -> int | float:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _positive(text: str) -> int | float:
    if not 0 < (figure := _figure(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return figure


def _name_or_figure(text: str) -> str | int | float:
    return text if text.isidentifier() else _figure(text)


def _estimate(options: argparse.Namespace) -> int:
    from zerofx.estimates import estimate

    names = ("stage", "precision", "optimizer", "offload", "micro_batches", "deepspeed")
    try:
        found = estimate(options.params, options.world_size, **{name: getattr(options, name) for name in names})
    except ConfigError as error:
        print(f"zerofx estimate: {error.what}: {error.why}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    if options.json is not None:
        options.json.write_text(found.to_json() + "\n")
    print(found)
    return 0


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="trace a model for any number of ranks on named hardware, and print what a step costs",
        description="What a training step takes, holds and sends, from shapes alone: no ranks, no weights, no accelerator.",
        allow_abbrev=False,
    )
    plan.add_argument("kind", choices=("gpt", "hf"), help="a GPT of --params parameters, or the model of a Hugging Face --config")
    plan.add_argument("--params", type=_figure, metavar="P", help="parameters of the GPT, such as 7.5e9")
    plan.add_argument("--config", type=Path, metavar="FILE", help="a Hugging Face config.json")
    plan.add_argument("--world-size", type=_number(1), nargs="+", metavar="N", required=True, help="ranks; of several, a table")
    plan.add_argument("--hardware", default="h100", help="a100, h100, h200 or this_machine (h100)")
    plan.add_argument("--stage", type=int, choices=range(4), nargs="+", help="ZeRO stage; of several, a table (3)")
    plan.add_argument("--rows", type=_number(1), default=1, metavar="N", help="sequences of a rank's micro-batch (1)")
    plan.add_argument("--positions", type=_number(2), default=2048, metavar="N", help="tokens of a sequence (2048)")
    plan.add_argument("--micro-batches", type=_number(1), default=1, metavar="G", help="backwards for each optimizer step (1)")
    plan.add_argument("--optimizer", default="adamw", help="what keeps states (adamw)")
    plan.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="what computes and travels (bf16)")
    plan.add_argument("--memory-limit", nargs="+", metavar="BYTES", help='bound of whole parameters and buffers in flight, such as "2GiB"')
    plan.add_argument(
        "--recompute",
        type=_recomputes,
        metavar="VALUE[,VALUE...]",
        help="none, blocks, selective, or how much is kept: a fraction, or bytes; of several, a table (none)",
    )
    plan.add_argument("--fit", metavar="BYTES", help='search for the fastest setting whose peak fits, such as "40GB"')
    plan.add_argument("--schedule", action="store_true", help="print the schedule too")
    plan.add_argument("--json", type=_new_file, metavar="FILE", help="write all figures to FILE")
    plan.add_argument("--svg", type=_new_file, metavar="FILE", help="draw the timeline")
    plan.add_argument("--perfetto", type=_new_file, metavar="FILE", help="write the timeline for Perfetto")
    plan.set_defaults(run=_plan)


def _recomputes(text: str) -> list[str | float | None]:
    return [_recompute(part.strip()) for part in text.split(",")]


def _recompute(text: str) -> str | float | None:
    if text == "none":
        return None
    try:
        return float(text) if "." in text else text
    except ValueError:  # bytes with a unit
        return text


def _plan(options: argparse.Namespace) -> int:
    given = options.params if options.kind == "gpt" else options.config
    if given is None:
        print(f"zerofx plan {options.kind}: needs {'--params' if options.kind == 'gpt' else '--config'}", file=sys.stderr)
        return 2
    from zerofx.errors import ZerofxError
    from zerofx.plans import language_model

    lists = {
        "stage": options.stage or [3],
        "world_size": options.world_size,
        "memory_limit": options.memory_limit or [None],
        "recompute": (not options.fit and options.recompute) or [None],  # a search has its own
    }
    names = ("hardware", "optimizer", "micro_batches", "precision")
    first = {name: values[0] for name, values in lists.items()}
    several = any(len(values) > 1 for values in lists.values())
    wanted = [name for name in ("svg", "perfetto", "schedule") if getattr(options, name)]
    if options.fit and (options.stage or options.memory_limit or several):
        print("zerofx plan: --fit searches stages and limits itself, for one --world-size", file=sys.stderr, flush=True)
        return 2
    if wanted and (several or options.fit):
        print(f"zerofx plan: --{wanted[0]} shows one plan, not a table", file=sys.stderr, flush=True)
        return 2
    try:
        request = language_model(given, (options.rows, options.positions), **{name: getattr(options, name) for name in names}, **first)
        found: Any = (
            request.fastest(options.fit, options.recompute or ()) if options.fit else request.sweep(**lists) if several else request.plan()
        )
    except ZerofxError as error:
        print(f"zerofx plan: {error.what}: {error.why}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    for path, write in ((options.svg, "to_svg"), (options.perfetto, "to_perfetto")):
        if path is not None:
            getattr(found, write)(path)
    if options.json is not None:
        options.json.write_text(found.to_json() + "\n")
    print(found if not options.schedule else f"{found}\n\n{found.schedule}")
    return 0


def _source_tree() -> Path:
    """Return the directory that holds benchmarks/. Raises ConfigError where only the package is installed."""
    tree = Path(__file__).absolute().parent.parent
    if not (tree / "benchmarks" / "step_time.py").exists():
        raise ConfigError(
            "benchmarks/ is no part of the installed package: run python -m zerofx bench from a clone of the repository",
            where="python -m zerofx bench",
            why=f"{tree} holds no benchmarks/",
            remedy="clone the repository, and install it with pip install -e .",
        )
    return tree


if __name__ == "__main__":
    sys.exit(main())
