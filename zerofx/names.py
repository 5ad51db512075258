"""Names that people type: what is not known is refused with the nearest that is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from zerofx.errors import ConfigError


def check_names(names: Iterable[str], known: Iterable[str], *, where: str, what: str = "setting") -> None:
    """Raise ConfigError for a name that is not known, with the nearest that is."""
    listed = list(known)
    for name in names:
        if name not in listed:
            raise ConfigError(
                f"{name!r} is no {what}",
                where=where,
                why=f"the {what}s are {', '.join(listed)}",
                remedy=nearest(name, listed) or "pass one of them",
            )


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of a JSON file (an ``object_pairs_hook``). Raises ValueError for a name that is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """Ask for the known name that is nearest; empty where none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""
