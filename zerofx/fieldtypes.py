"""Types of settings: one reader of values as JSON, TOML and people write them, by what a setting is declared to hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from zerofx.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """A bound of a number, and how it is said."""

    meaning: str
    holds: Callable[[float], bool]


Natural = Annotated[int, Bound("of at least 0", lambda value: value >= 0)]
Count = Annotated[int, Bound("of at least 1", lambda value: value >= 1)]
Amount = Annotated[float, Bound("of at least 0", lambda value: value >= 0)]
Positive = Annotated[float, Bound("above 0", lambda value: value > 0)]

_MEANINGS: Mapping[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def typed(value: Any, kind: Any, name: str) -> Any:
    """Return a value in the type that a setting is declared with; ``name`` is the setting's dotted path.

    A whole number may be written as a float (1e3), a flag as 0 or 1, a tuple as a list. Raises ConfigError for all else.
    """
    try:
        return _read(value, kind)
    except (TypeError, ValueError, OverflowError):
        meaning = _meaning(kind)
        raise ConfigError(
            f"{name}={value!r} is not {meaning}", where=name, why="what a setting holds is not guessed", remedy=f"write {meaning}"
        ) from None


def _read(value: Any, kind: Any) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        found = _read(value, parts[0])
        return _held(found, parts[1].holds(found))
    if origin in (Union, UnionType):
        return _first(value, parts)
    if origin is Literal:
        return parts[parts.index(_held(value, not isinstance(value, bool)))]
    if origin is tuple:
        _held(value, isinstance(value, (list, tuple)))
        kinds = parts[:1] * len(value) if parts[-1] is ... else parts
        return tuple(_read(item, part) for item, part in zip(value, kinds, strict=True))
    if kind is bool:
        return bool(_held(value, isinstance(value, int) and value in (0, 1)))
    if kind in (int, float):
        _held(value, isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value))
        return value if kind is float else _held(int(value), value == int(value))
    return _held(value, isinstance(value, kind))


def _held(value: Any, holds: bool) -> Any:
    if not holds:
        raise ValueError
    return value


def _first(value: Any, kinds: tuple[Any, ...]) -> Any:
    for kind in kinds[:-1]:
        try:
            return _read(value, kind)
        except (TypeError, ValueError, OverflowError):
            continue
    return _read(value, kinds[-1])


def _meaning(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{_meaning(parts[0])} {parts[1].meaning}"
    if origin in (Union, UnionType):
        return " or ".join(_meaning(part) for part in parts if part is not NoneType)
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin is tuple:
        return f"a list, each {_meaning(parts[0])}" if parts[-1] is ... else f"a list of {', '.join(_meaning(part) for part in parts)}"
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return f"a table of {kind.__name__} ({', '.join(field.name for field in dataclasses.fields(kind))})"
    return _MEANINGS.get(kind) or f"a {kind.__name__}"


@contextmanager
def read_from(source: str) -> Iterator[None]:
    """Name the file, or the call, that settings are from in each ConfigError raised within."""
    try:
        yield
    except ConfigError as error:
        where = ": ".join(part for part in (source, error.where) if part)
        raise ConfigError(error.what, where=where, why=error.why, remedy=error.remedy) from None
