"""What a machine can do, as numbers with units: arithmetic, memory, and the links between ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from zerofx.errors import ConfigError

# A rate stands for a time: equal times come back as rates, and from them, with an error in the last digits.
_ROUNDING = 1 + 1e-9
Rates = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Link:
    """How ranks reach each other. ``latency_s`` is what one step of a collective costs beside its bytes.

    ``rates`` are (bytes of a message, bytes per second), by rising size: a table, because peak and half-performance size together
    are one line of time over size, and links bend (NCCL changes protocols; gloo has a wire to itself in several pieces only).
    ``exchange_rates`` are those of an all-to-all, where they differ. ``cpu_s_per_byte`` is processor time that each byte sent
    takes from computing on the same core. Raises ConfigError for rates by which a larger message would take less time.
    """

    latency_s: float
    rates: Rates
    exchange_rates: Rates = ()
    cpu_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        _check(
            0 <= self.latency_s < math.inf and 0 <= self.cpu_s_per_byte < math.inf,
            f"Link(latency_s={self.latency_s}, cpu_s_per_byte={self.cpu_s_per_byte})",
        )
        _check(bool(self.rates), "Link(rates=())")
        for name, rates in (("rates", self.rates), ("exchange_rates", self.exchange_rates)):
            times = [(size, size / rate) for size, rate in rates if size > 0 and rate > 0]
            rising = all(one[0] < other[0] and one[1] <= other[1] * _ROUNDING for one, other in itertools.pairwise(times))
            _check(len(times) == len(rates) and rising, f"Link({name}={rates})")

    def transfer_s(self, message_bytes: float, *, exchange: bool = False) -> float:
        """Return the seconds of one message without its latency: between two sizes of the table on the line between their times."""
        rates = (self.exchange_rates or self.rates) if exchange else self.rates
        below = (0.0, 0.0)
        for size, rate in rates:
            if message_bytes <= size:
                share = (message_bytes - below[0]) / (size - below[0])
                return below[1] + share * (size / rate - below[1])
            below = size, size / rate
        return below[1] + (message_bytes - below[0]) / rates[-1][1]


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of rank, and its links. ``source`` says where the numbers are from.

    ``flops_per_s`` are by dtype; matrix products reach ``achievable`` of them. ``kernel_flops_per_s`` are those that some kernels reach
    (kind, dtype, rate), where they differ; ``work.kind_of`` names the kinds.
    ``elements_per_s`` bound functions such as ``exp`` where arithmetic does so before memory; empty where it does not.
    ``page_in_bytes_per_s`` is how fast the system hands out memory for tensors so large that they get it anew each time; 0: at once.
    ``disk_bytes_per_s`` is what a rank reads from disk, or writes, while the others of its node do so too; 0: nobody knows.
    ``inter_node`` is what all adapters of a node do together. Raises ConfigError for a number that cannot be.
    """

    name: str
    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float
    memory_bytes: int
    launch_s: float
    ranks_per_node: int
    intra_node: Link
    inter_node: Link
    source: str
    achievable: float = 1.0
    kernel_flops_per_s: tuple[tuple[str, str, float], ...] = ()
    elements_per_s: tuple[tuple[str, float], ...] = ()
    page_in_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("memory_bytes_per_s", "memory_bytes", "ranks_per_node"):
            _check(0 < getattr(self, field) < math.inf, f"Hardware({field}={getattr(self, field)!r})")
        for field in ("launch_s", "page_in_bytes_per_s", "disk_bytes_per_s"):
            _check(0 <= getattr(self, field) < math.inf, f"Hardware({field}={getattr(self, field)!r})")
        _check(0 < self.achievable <= 1, f"Hardware(achievable={self.achievable!r})")
        rates = [rate for _, rate in (*self.flops_per_s, *self.elements_per_s)] + [rate for _, _, rate in self.kernel_flops_per_s]
        _check(bool(self.flops_per_s) and all(rate > 0 for rate in rates), f"a rate of Hardware({rates!r})")

    def peak_flops_per_s(self, dtype: torch.dtype) -> float:
        """Return the peak of a dtype; one that is not listed computes in fp32's rate, or in the first that is listed."""
        peaks = dict(self.flops_per_s)
        return peaks.get(_name(dtype), peaks.get("float32", self.flops_per_s[0][1]))

    def rate_flops_per_s(self, kind: str, dtype: torch.dtype) -> float:
        """Return the flops per second that a kind of kernel reaches in a dtype."""
        for other, name, rate in self.kernel_flops_per_s:
            if (other, name) == (kind, _name(dtype)):
                return rate
        return self.peak_flops_per_s(dtype) * self.achievable


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ConfigError(
            f"{what} describes no machine",
            where="zerofx.hardware",
            why="sizes and rates are above 0, times at least 0, and a larger message takes no less time than a smaller one",
            remedy='mend the number, or take a preset such as hardware("h100") and dataclasses.replace what differs',
        )
