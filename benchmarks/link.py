"""A slow link on one machine: ranks in network namespaces, joined by rate-limited veths through a bridge in one of its own.

Overlap does not show on loopback, where gloo is bound by the CPU; here the wire has a known rate that one call changes
while the ranks live. Needs root and iproute2; without them the ranks share loopback, and ``Link.note`` says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_INTERFACE = "link0"
_PREFIX = "zerofx-"
_UNITS = {"": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
# With a smaller burst tbf cuts gloo's 64 KiB packets into frames, and the CPU that this costs drowns what is measured.
_LEAST_BURST_BYTES = 128 * 2**10
_BURST_S = 1e-3
LOOPBACK = "loopback"


def parse_rate(text: str) -> int | None:
    """Read a rate in bits per second, such as ``"500mbit"``; None for ``"loopback"``, which is not limited."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(|[kmg]bit)", text)
    if text != LOOPBACK and (match is None or float(match[1]) <= 0):
        raise ValueError(f"{text!r} is neither a rate such as 500mbit or 2gbit nor {LOOPBACK}")
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def burst_bytes(rate_bits: int) -> int:
    """Return the bucket of a token bucket filter in bytes: a millisecond of the rate, and never less than two large packets."""
    return max(_LEAST_BURST_BYTES, round(rate_bits / 8 * _BURST_S))


@dataclass(frozen=True, slots=True)
class Link:
    """The interface that ranks reach each other by. Without ``namespaces`` it is loopback, and ``note`` says why."""

    interface: str
    namespaces: tuple[str, ...] = ()
    bridge: str = ""
    note: str = ""

    @property
    def is_limited(self) -> bool:
        """Whether its rate can be set."""
        return bool(self.namespaces)

    def command(self, rank: int) -> list[str]:
        """Return what starts a program in the namespace of a rank."""
        return ["ip", "netns", "exec", self.namespaces[rank]] if self.is_limited else []

    def set_rate(self, rate_bits: int | None) -> None:
        """Limit every direction of every rank to a rate in bits per second; None lifts the limit. Any one process may call it."""
        if not self.is_limited:
            assert rate_bits is None, self.note
            return
        for rank, namespace in enumerate(self.namespaces):
            for where, device in ((namespace, self.interface), (self.bridge, f"port{rank}")):
                if rate_bits is None:
                    subprocess.run(["tc", "-n", where, "qdisc", "del", "dev", device, "root"], check=False, capture_output=True)
                else:
                    limit = ("rate", f"{rate_bits}bit", "burst", f"{burst_bytes(rate_bits)}b", "latency", "20ms")
                    _run("tc", "-n", where, "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    def sent_bytes(self) -> int:
        """Return the bytes that this rank's interface has sent; on loopback, those of all ranks."""
        with open(f"/sys/class/net/{self.interface}/statistics/tx_bytes") as file:
            return int(file.read())


@contextmanager
def slow_link(world_size: int) -> Iterator[Link]:
    """Join the ranks-to-be by rate-limited links; remove everything at the end, whatever happens."""
    why = _why_not()
    link = _planned(world_size)
    try:
        if why is None:
            try:
                _join(link)
            except subprocess.CalledProcessError as error:
                why = f"{' '.join(error.cmd)} says: {error.stderr.strip()}"
        yield link if why is None else Link("lo", note=f"No slow link, loopback instead: {why}.")
    finally:
        if shutil.which("ip"):
            _remove([*link.namespaces, link.bridge])


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"iproute2 is not installed ({' and '.join(missing)} not found)" if missing else None


def _planned(world_size: int) -> Link:
    """Name what this process will create; the names tell whose it is."""
    own = f"{_PREFIX}{os.getpid()}-"
    return Link(_INTERFACE, tuple(f"{own}{rank}" for rank in range(world_size)), f"{own}bridge")


def _join(link: Link) -> None:
    _remove(_left_behind())
    _run("ip", "netns", "add", link.bridge)
    _run("ip", "-n", link.bridge, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", link.bridge, "link", "set", "bridge", "up")
    for rank, namespace in enumerate(link.namespaces):
        port = f"port{rank}"
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", link.bridge, "link", "add", port, "type", "veth", "peer", "name", link.interface, "netns", namespace)
        _run("ip", "-n", link.bridge, "link", "set", port, "master", "bridge", "up")
        # a private network in namespaces of its own: no address of the machine can clash with these
        _run("ip", "-n", namespace, "address", "add", f"10.0.0.{rank + 1}/24", "dev", link.interface)
        _run("ip", "-n", namespace, "link", "set", link.interface, "up")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")


def _left_behind() -> list[str]:
    """Return namespaces of runs that were killed before they could tidy up."""
    return [name for name in namespaces() if not os.path.exists(f"/proc/{name.removeprefix(_PREFIX).partition('-')[0]}")]


def namespaces() -> list[str]:
    """Return the network namespaces that exist and that this module made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(_PREFIX)]


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
