"""The options that all benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.contestants import CONTESTANTS
from benchmarks.link import LOOPBACK, parse_rate
from benchmarks.workloads import WORKLOADS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RATES = (LOOPBACK, "2gbit", "1gbit", "500mbit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure. ``steps`` counts those that are timed for each contestant and rate."""

    workload: str = "gpt"
    dtypes: tuple[str, ...] = ("fp32",)
    rates: tuple[str, ...] = RATES
    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    steps: int = 5
    ranks: int = 2
    json: Path | None = None

    def on_loopback(self) -> Options:
        """Return the same for a link whose rate cannot be set."""
        return replace(self, rates=(LOOPBACK,))


def parser(subject: str) -> argparse.ArgumentParser:
    """Return a parser of the shared options."""
    made = argparse.ArgumentParser(description=subject, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write results to FILE")
    made.add_argument("--workload", choices=WORKLOADS, default=Options().workload, help="the model")
    made.add_argument("--rates", nargs="+", type=_rate, metavar="RATE", default=RATES, help="link rates, such as 500mbit")
    made.add_argument("--contestants", nargs="+", choices=CONTESTANTS, metavar="NAME", default=tuple(CONTESTANTS), help="what to compare")
    made.add_argument("--steps", type=int, default=Options().steps, help="timed steps for each contestant and rate")
    made.add_argument("--dtype", nargs="+", choices=DTYPES, default=Options().dtypes, dest="dtypes", help="what to compute and send in")
    made.add_argument("--ranks", type=int, default=Options().ranks, help="ranks to start")
    return made


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> tuple[Options, argparse.Namespace]:
    """Parse a command line: the shared options, and all of them for what a subject added."""
    found = made.parse_args(arguments)
    options = Options(
        workload=found.workload,
        dtypes=tuple(found.dtypes),
        rates=tuple(found.rates),
        contestants=tuple(found.contestants),
        steps=found.steps,
        ranks=found.ranks,
        json=None if found.json is None else found.json.absolute(),
    )
    return options, found


def _rate(text: str) -> str:
    try:
        parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
