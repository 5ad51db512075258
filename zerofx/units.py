"""Numbers of bytes, as people write them."""

from __future__ import annotations

import math
import re

from zerofx.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(value: int | str | None, name: str, where: str = "") -> int | None:
    """Read a number of bytes: an int, or text such as ``"2GiB"``. Raises ConfigError on anything else."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)):
        size = float(match[1]) * _UNITS.get(match[2].upper(), math.nan)
        if 1 <= size < math.inf:
            return int(size)
    raise ConfigError(
        f"{name}={value!r} is not a number of bytes",
        where=where or name,
        why="a limit is a positive integer or text with a unit",
        remedy='pass bytes, or text such as "512MiB" or "2GiB"',
    )
