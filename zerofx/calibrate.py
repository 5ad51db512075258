"""This machine as a Hardware: measured once, agreed on by all ranks, kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zerofx import measure
from zerofx.errors import ConfigError
from zerofx.groups import Group, exchange
from zerofx.machine import Hardware, Link

# What the figures mean; older files are measured again.
_FORMAT = 2
_ALONE = Group("", 1, 0, "")
# Without ranks to measure with: gloo between two processes of one machine, over loopback. A judgement, in round numbers.
_LOOPBACK = Link(latency_s=2e-4, rates=((2**16, 3e8), (2**22, 9e8), (2**25, 1e9)), cpu_s_per_byte=1e-9)


def this_machine(mesh: DeviceMesh | None = None, group: Group | None = None) -> Hardware:
    """Return what this machine and the links of a group do; all ranks of the group must call, and all get the same.

    Takes up to 30 s the first time. Without a group the links are assumed. Raises ConfigError for ranks that gloo does not join:
    what they compute and send by is not what is measured.
    """
    group = _ALONE if group is None or mesh is None else group
    if group.size > 1 and group.backend != "gloo":
        raise ConfigError(
            f'hardware="this_machine" measures no {group.backend} ranks',
            where="zerofx.hardware",
            why="processors and gloo are measured, accelerators and their links are not",
            remedy='name the accelerator, such as hardware("h100"), or pass a zerofx.hardware.Hardware with your numbers',
        )
    path = _folder() / f"calibration-{_digest(_facts(group))}.json"
    kept = load(path)
    # the first rank's word counts: nobody plans by figures of its own
    if mesh is not None and group.size > 1:
        kept = exchange(kept, mesh, group)[0]
    if kept is None:
        kept = measured(mesh, group)
        save(kept, path)
    return kept


def measured(mesh: DeviceMesh | None, group: Group) -> Hardware:
    """Measure processor and links now, whatever was kept; all ranks of the group must call, and all get the same."""
    links = _LOOPBACK
    figures = measure.processor()
    if mesh is not None and group.size > 1:
        links = measure.link(group, mesh.get_group())
        figures = _middle(exchange(figures, mesh, group))
    # all ranks share one machine as far as can be told, its memory too: the link that was measured is the only one
    figures["memory_bytes"] //= group.size
    figures["disk_bytes_per_s"] /= group.size
    source = f"measured on {_processor_name()} with {torch.get_num_threads()} threads, {group.size} ranks"
    return Hardware(name="this_machine", source=source, ranks_per_node=group.size, intra_node=links, inter_node=links, **figures)


def _middle(figures: list[Any]) -> Any:
    """Return the median of numbers in equal structures; of anything else, and where they differ in form, the first."""
    first = figures[0]
    if isinstance(first, float):
        return statistics.median(figures)
    if isinstance(first, dict) and all(other.keys() == first.keys() for other in figures):
        return {key: _middle([other[key] for other in figures]) for key in first}
    if isinstance(first, tuple) and all(len(other) == len(first) for other in figures):
        return tuple(_middle(list(parts)) for parts in zip(*figures, strict=True))
    return first


# ---------------------------------------------------------------- the file


def load(path: Path) -> Hardware | None:
    """Read a calibration; None where there is none, or none that makes sense."""
    try:
        fields = _frozen(json.loads(path.read_text()))
        return Hardware(**fields | {name: Link(**fields[name]) for name in ("intra_node", "inter_node")})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def save(hardware: Hardware, path: Path) -> None:
    """Keep a calibration, in one step for whoever reads it meanwhile; a folder that cannot be written to keeps none."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(hardware), file, indent=1)
        os.replace(name, path)


def _frozen(value: Any) -> Any:
    """Turn the lists of JSON into tuples again."""
    if isinstance(value, dict):
        return {key: _frozen(part) for key, part in value.items()}
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerofx"


def _facts(group: Group) -> dict[str, Any]:
    """Return what makes other figures necessary where it changes."""
    return {
        "format": _FORMAT,
        "processor": _processor_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "world_size": group.size,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
