"""Tables and one picture from the JSON that benchmarks write: ``python -m benchmarks.report FILE ... [--svg FILE]``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.contestants import CONTESTANTS, FLOOR
from benchmarks.picture import svg
from benchmarks.results import Timings, timings

OURS, HOOKS = "zerofx 3", ("zerofx 3, hooks", "zerofx 3, hooks, re-sharding")
Result = Mapping[str, Any]


def table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """Return a GitHub table; None shows as an empty cell."""
    texts = [[f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row] for row in rows]
    return tabulate(texts, headers, "github", disable_numparse=True)


def step_time(result: Result) -> str:
    """Return tables of median seconds by contestant and rate, with bytes sent and dropped steps; then the ratios that matter."""
    return "\n\n".join("\n\n".join(filter(None, (_seconds(found), _targets(found)))) for found in timings(result))


def _seconds(found: Timings) -> str:
    rows: list[list[Any]] = []
    for name in found.contestants:
        times = [found.median_s(name, rate) for rate in found.rates]
        rows.append([name, *times, f"{found.sent_bytes(name) / 1e6:.0f}", f"{found.dropped(name)} of {found.count(name)}"])
    rows += [[name, *["error"] * bool(found.rates)] for name in found.errors]
    seconds = table(rows, [f"{found.dtype}, s per step", *found.rates, "MB sent", "steps dropped"])
    return "\n".join([seconds, *(f"\n{name}: {error}" for name, error in found.errors.items())])


def _targets(found: Timings) -> str:
    """Return the ratios of zerofx stage 3 to the best ZeRO-3 peer, to its own hook modes and to its bounds."""
    if OURS not in found.steps:
        return ""
    rows: list[list[Any]] = []
    peers = [name for name in found.contestants if CONTESTANTS[name].is_peer]
    if peers:
        best = {rate: min(peers, key=lambda name: found.median_s(name, rate)) for rate in found.rates}
        rows.append(["best ZeRO-3 peer", *(f"{found.ratio(OURS, best[rate], rate):.2f} ({best[rate]})" for rate in found.rates)])
    rows += [[name, *(found.ratio(OURS, name, rate) for rate in found.rates)] for name in (*HOOKS, FLOOR) if name in found.steps]
    bounds = [found.bound_s(OURS, rate) for rate in found.rates]
    ratios = [bound and found.median_s(OURS, rate) / bound for rate, bound in zip(found.rates, bounds, strict=True)]
    rows.append(["max(floor, wire time)", *ratios])
    return table(rows, [f"{found.dtype}, {OURS} to", *found.rates])


def overlap(result: Result) -> str:
    """Return tables of exposed communication, in seconds and as a share of the wire time."""
    parts = []
    for found in timings(result):
        rows = []
        for name in found.contestants:
            cells: list[Any] = []
            for rate in found.rates:
                exposed, wire = found.exposed_s(name, rate), found.wire_s(name, rate)
                share = f" ({exposed / wire:.0%} of {wire:.2f})" if exposed is not None and wire else ""
                cells.append("" if exposed is None else f"{exposed:.2f}{share}")
            if name != FLOOR:
                rows.append([name, *cells])
        parts.append(table(rows, [f"{found.dtype}, s exposed (of wire time)", *found.rates]))
    return "\n\n".join(parts)


def memory(result: Result) -> str:
    """Return a table of peak memory, and of model states beside ZeRO's formula."""
    keys = {
        "contestant": "contestant",
        "dtype": "dtype",
        "peak_bytes": "peak resident",
        "above_rest_bytes": "above rest",
        "allocated_bytes": "profiler peak",
        "states_bytes": "model states",
        "formula_bytes": "ZeRO's formula",
    }
    rows = [[_cell(row, key) for key in keys] for row in result["rows"]]
    return table(rows, [f"{text}, MB" if key.endswith("bytes") else text for key, text in keys.items()])


def traffic(result: Result) -> str:
    """Return a table of bytes sent and collectives per step, beside the formula of the stage."""
    keys = ("contestant", "dtype", "ranks", "all_gather", "reduce_scatter", "all_reduce", "formula_bytes", "interface_bytes")
    rows = [[_cell(row, key) for key in keys] for row in result["rows"]]
    return table(rows, [key.removesuffix("_bytes") + (", MB" if key.endswith("_bytes") else "") for key in keys])


def _cell(row: Mapping[str, Any], key: str) -> Any:
    if key == "peak_bytes" and "error" in row:
        return row["error"]
    value = row.get(key)
    return f"{value / 1e6:.1f}" if key.endswith("_bytes") and value is not None else value


TABLES = {"step_time": step_time, "memory": memory, "traffic": traffic}


def source(result: Result) -> str:
    """Say where figures come from, in one line."""
    facts = {key: result[key] for key in ("workload", "ranks", "torch", "python", "processor", "cores", "date") if key in result}
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of result files; draw step time by rate."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("files", nargs="+", type=Path, metavar="FILE")
    made.add_argument("--svg", type=Path, metavar="FILE", help="draw the first step times among the files")
    options = made.parse_args(arguments)
    for path in options.files:
        result = json.loads(path.read_text())
        print("\n\n".join([TABLES[result["subject"]](result), source(result), *result.get("notes", ())]) + "\n")
        if options.svg is not None and result["subject"] == "step_time":
            options.svg.write_text(svg(timings(result)[0], source(result)))
            options.svg = None


if __name__ == "__main__":
    main()
