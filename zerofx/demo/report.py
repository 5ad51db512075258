"""Put what a training held, sent and learned beside ZeRO's formulas, zerofx's own schedule and the training in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from zerofx import formulas
from zerofx.demo.measure import Measured
from zerofx.demo.train import History
from zerofx.render import Schedule

# Ranks, fused kernels and threads add the same fp32 numbers in another order. AdamW divides each element of a gradient by its own
# size, so what is noise in an element of nearly zero reaches the weight in full, and the two trainings drift apart: by 1e-6 to 1e-5
# in the first hundred steps, ten times that in the next two hundred.
LOSS_TOLERANCE = 1e-4
COMPARED_STEPS = 100
# AdamW hides a wrong constant factor in the gradients; their norm before the first update shows it.
NORM_TOLERANCE = 1e-5
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of one rank, in bytes: by ZeRO's formula, by the schedule (None: it does not tell), as found."""

    name: str
    formula: str
    formula_bytes: float
    scheduled_bytes: int | None
    found_bytes: int

    @property
    def predicted_bytes(self) -> float:
        """What to expect: the schedule knows padding and buckets, the formula does not."""
        return self.formula_bytes if self.scheduled_bytes is None else self.scheduled_bytes

    def cells(self) -> list[str]:
        """Return a row of the printed table, in MiB."""
        sizes = (self.formula_bytes, self.scheduled_bytes, self.found_bytes)
        return [self.name, self.formula, *("" if size is None else f"{size / MIB:.3f}" for size in sizes)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far two trainings on the same batches are apart."""

    loss_difference: float
    worst_step: int
    compared_steps: int
    norm_difference: float

    @staticmethod
    def of(sharded: History, single: History) -> Comparison:
        """Compare the mean losses of the first steps, and the first gradient norms relative to each other."""
        pairs = list(zip(sharded.losses, single.losses, strict=True))[:COMPARED_STEPS]
        differences = [abs(ours - theirs) for ours, theirs in pairs]
        # A loss that is not a number compares as the largest difference.
        worst = max(range(len(pairs)), key=lambda step: (differences[step] != differences[step], differences[step]))
        return Comparison(differences[worst], worst + 1, len(pairs), abs(sharded.norms[0] / single.norms[0] - 1))

    @property
    def passed(self) -> bool:
        """Whether rounding alone explains the differences."""
        return self.loss_difference <= LOSS_TOLERANCE and self.norm_difference <= NORM_TOLERANCE

    def __str__(self) -> str:
        verdict = "pass: the losses fall as in one process" if self.passed else "FAIL: this is not the training of one process"
        return (
            f"{verdict}\n"
            f"  largest loss difference {self.loss_difference:.1e} (step {self.worst_step} of the first {self.compared_steps}), "
            f"tolerance {LOSS_TOLERANCE:.0e}:\n"
            "    ranks and fused kernels add in another order; AdamW magnifies that where gradients are nearly zero\n"
            f"  first gradient norm differs by {self.norm_difference:.1e} of itself, tolerance {NORM_TOLERANCE:.0e}:\n"
            "    the weights are still equal there, so a wrong factor in the gradients would show"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """All that one run of the demo found, on one rank."""

    schedule: Schedule
    measured: Measured
    sharded: History
    single: History
    compile_seconds: float

    @property
    def comparison(self) -> Comparison:
        """The losses beside those of one process."""
        return Comparison.of(self.sharded, self.single)

    def state_rows(self) -> dict[str, Row]:
        """Put the bytes of each kind of model state beside ZeRO's formula; P is the bytes of all parameters, N the ranks."""
        stage, ranks, total = self.schedule.stage, self.schedule.world_size, self.schedule.parameter_bytes
        found = self.measured
        # Whole copies for computing make the shards the optimizer's master weights: a third tensor beside AdamW's two.
        states, optimizer = (3, "optimizer state, master weights") if found.has_masters else (2, "optimizer state")
        peak = ("largest parameter or more", found.largest_parameter) if stage == 3 and ranks > 1 else ("P", total)
        return {
            "parameters": Row("parameters", _share(stage >= 3), formulas.parameters_bytes(stage, total, ranks), None, found.parameters),
            "gradients": Row("gradients", _share(stage >= 2), formulas.gradients_bytes(stage, total, ranks), None, found.gradients),
            "optimizer_state": Row(
                optimizer,
                f"{states}{_share(stage >= 1)}",
                formulas.optimizer_bytes(stage, states * total, ranks),
                None,
                found.optimizer,
            ),
            "whole_parameters_peak": Row("peak of whole parameters", *peak, self.schedule.peak_whole_bytes, found.whole_peak),
        }

    def traffic_rows(self) -> dict[str, Row]:
        """Put the bytes that one rank sends per optimizer step beside ZeRO's formula."""
        stage, ranks, total = self.schedule.stage, self.schedule.world_size, self.schedule.parameter_bytes
        expected = formulas.sent_bytes(stage, total, ranks)
        return {
            kind: Row(kind, _traffic_formula(stage, kind), expected.get(kind, 0), self.schedule.traffic_bytes.get(kind, 0), counted)
            for kind, counted in self.measured.sent.items()
        }

    def __str__(self) -> str:
        states = tabulate(
            [row.cells() for row in self.state_rows().values()],
            ["MiB on rank 0", "ZeRO", "formula", "schedule", "measured"],
            disable_numparse=True,
            colalign=("left", "left", "right", "right", "right"),
        )
        traffic = tabulate(
            [row.cells() for row in self.traffic_rows().values()],
            ["MiB sent by rank 0 per step", "ZeRO", "formula", "schedule", "counted"],
            disable_numparse=True,
            colalign=("left", "left", "right", "right", "right"),
        )
        notes = "\n".join(self._notes())
        times = (
            f"median step {1000 * self.sharded.median_seconds:.0f} ms (one process, eager, on all batches: "
            f"{1000 * self.single.median_seconds:.0f} ms); compile {self.compile_seconds:.1f} s"
        )
        return "\n\n".join(part for part in (str(self.schedule), states, notes, traffic, times, str(self.comparison)) if part)

    def _notes(self) -> Iterator[str]:
        """Explain where zerofx means to differ from the formulas."""
        stage = self.schedule.stage
        if self.schedule.world_size == 1:
            return
        if stage == 1:
            yield "gradients: averaged as the backward makes them; whole ones stay only under no_sync, and then the formula holds"
        if stage in (1, 2):
            yield "peak: small parameters arrive packed together, and are there twice until they are unpacked"
        if stage == 3:
            yield "peak: what is gathered ahead of its use is whole too; memory_limit bounds it"

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        comparison = self.comparison
        return {
            "stage": self.schedule.stage,
            "world_size": self.schedule.world_size,
            "backend": self.schedule.backend,
            "parameter_count": self.schedule.parameter_count,
            "losses": self.sharded.losses,
            "single_process_losses": self.single.losses,
            "comparison": {**asdict(comparison), "loss_tolerance": LOSS_TOLERANCE, "norm_tolerance": NORM_TOLERANCE},
            "passed": comparison.passed,
            "bytes": {kind: _sizes(row, "measured") for kind, row in self.state_rows().items()},
            "traffic_bytes_per_step": {kind: _sizes(row, "counted") for kind, row in self.traffic_rows().items()},
            "median_step_seconds": self.sharded.median_seconds,
            "compile_seconds": self.compile_seconds,
            "schedule": str(self.schedule),
        }


def _share(is_sharded: bool) -> str:
    return "P/N" if is_sharded else "P"


def _traffic_formula(stage: int, kind: str) -> str:
    times = formulas.sent_times(stage).get(kind, 0)
    bound = "up to " if (stage, kind) == (3, "all_gather") else ""
    return f"{bound}{times if times > 1 else ''}P (N-1)/N" if times else "0"


def _sizes(row: Row, found: str) -> dict[str, float]:
    return {"formula": row.formula_bytes, "predicted": row.predicted_bytes, found: row.found_bytes}
