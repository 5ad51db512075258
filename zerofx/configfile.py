"""Settings as text: TOML and JSON of plain values, to and from frozen dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from zerofx.errors import ConfigError
from zerofx.fieldtypes import read_from, typed
from zerofx.names import check_names, unique
from zerofx.precision import dtype_of, name_of
from zerofx.units import parse_bytes

Settings = TypeVar("Settings")


def read(path: str | Path) -> dict[str, Any]:
    """Return the table of a TOML or JSON file, which its suffix tells apart. Raises ConfigError for a file that is neither."""
    readers: dict[str, Any] = {".toml": tomllib.loads, ".json": functools.partial(json.loads, object_pairs_hook=unique)}
    try:
        reader = readers.get(Path(path).suffix.lower())
        if reader is None:
            raise ValueError(f"the suffix {Path(path).suffix!r} is neither .toml nor .json")
        table = reader(Path(path).read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte order mark
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None
    if not isinstance(table, dict):
        raise _unreadable(path, f"it holds a {type(table).__name__}, not settings by name")
    return table


def _unreadable(path: str | Path, why: str) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is no file of settings", where=str(path), why=why, remedy="write one with Config(...).to_toml() or .to_json()"
    )


def decoded(kind: type[Settings], table: Mapping[str, Any], types: Mapping[str, Any], path: str = "") -> Settings:
    """Build settings from a table: dtypes by name, bytes as ints or text, lists as tuples, and settings within as tables.

    ``types`` are those that the module of ``kind`` imports for annotations only; ``path`` leads to the table, with a dot at its end.
    Raises ConfigError for a name that is not known, with the nearest, for one that is missing, and for values that the settings refuse.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    check_names(table, [field.name for field in fields], where=path.rstrip("."))
    kinds = get_type_hints(kind, localns=dict(types))
    values = {name: _value(name, value, kinds[name], types, path) for name, value in table.items()}
    missing = [field.name for field in fields if field.name not in table and field.default is dataclasses.MISSING]
    if missing:
        raise ConfigError(
            f"{kind.__name__} cannot be made of these settings",
            where=path.rstrip("."),
            why=f"{', '.join(missing)} are missing, and have no default",
            remedy="give them",
        )
    with read_from(path.rstrip(".")):
        return kind(**values)


def _value(name: str, value: Any, kind: Any, types: Mapping[str, Any], path: str) -> Any:
    within = next((part for part in (kind, *get_args(kind)) if dataclasses.is_dataclass(part)), None)
    if within is not None and isinstance(value, Mapping):
        return decoded(within, value, types, f"{path}{name}.")  # type: ignore[arg-type]
    if name.endswith("_dtype"):
        return dtype_of(value, f"{path}{name}")
    if name.endswith("_bytes") and isinstance(value, str):
        return parse_bytes(value, f"{path}{name}")
    return typed(value, kind, f"{path}{name}")


def encoded(settings: Any) -> dict[str, Any]:
    """Return settings as a table of plain values. What is None is left out, as TOML has no word for it."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return encoded(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else name_of(value)


def to_toml(table: Mapping[str, Any]) -> str:
    """Write a table of plain values as TOML: its own values first, then its tables."""
    return "\n".join(_toml_lines(table, "")) + "\n"


def _toml_lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    tables = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    yield from (f"{name} = {_toml_value(value)}" for name, value in table.items() if name not in tables)
    for name, value in tables.items():
        yield f"\n[{path}{name}]"
        yield from _toml_lines(value, f"{path}{name}.")


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, str):
        # TOML's basic strings have the escapes of JSON's, and DEL needs one too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value).lower() if isinstance(value, bool) else repr(value)


def to_json(table: Mapping[str, Any]) -> str:
    """Write a table of plain values as JSON."""
    return json.dumps(table, indent=1)
