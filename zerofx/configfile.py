"""Settings as text: TOML and JSON of plain values, to and from frozen dataclasses."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from zerofx.errors import ConfigError
from zerofx.names import check_names
from zerofx.precision import dtype_of, name_of
from zerofx.units import parse_bytes

Settings = TypeVar("Settings")


def read(path: str | Path) -> dict[str, Any]:
    """Return the table of a TOML or JSON file, which its suffix tells apart. Raises ConfigError for a file that is neither."""
    readers: dict[str, Any] = {".toml": tomllib.loads, ".json": json.loads}
    reader = readers.get(Path(path).suffix.lower())
    try:
        if reader is None:
            raise ValueError(f"the suffix {Path(path).suffix!r} is neither .toml nor .json")
        table = reader(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from None
    if not isinstance(table, dict):
        raise _unreadable(path, f"it holds a {type(table).__name__}, not settings by name")
    return table


def _unreadable(path: str | Path, why: str) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is no file of settings", where=str(path), why=why, remedy="write one with Config(...).to_toml() or .to_json()"
    )


def decoded(kind: type[Settings], table: Any, where: str, tables: Mapping[str, type]) -> Settings:
    """Build settings from a table: dtypes by name, bytes as ints or text, lists as tuples, and tables by the kinds that ``tables`` names.

    Raises ConfigError for a name that is not known, with the nearest, and for values that the settings refuse.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{table!r} is no table of settings",
            where=where,
            why=f"{kind.__name__} holds settings by name",
            remedy=f"write it as a table of {', '.join(field.name for field in dataclasses.fields(kind))}",  # type: ignore[arg-type]
        )
    check_names(table, [field.name for field in dataclasses.fields(kind)], where=where)  # type: ignore[arg-type]
    values = {name: _value(name, value, where, tables) for name, value in table.items()}
    try:
        return kind(**values)
    except TypeError as error:  # a value of another type, or one that is missing
        raise ConfigError(
            f"{kind.__name__} cannot be made of these settings",
            where=where,
            why=str(error).replace("__init__() ", ""),
            remedy="mend the value, or give the one that is missing",
        ) from error


def _value(name: str, value: Any, where: str, tables: Mapping[str, type]) -> Any:
    if name in tables and isinstance(value, Mapping):
        return decoded(tables[name], value, f"{where}, table {name}", tables)
    if name.endswith("_dtype"):
        return dtype_of(value, name)
    if name.endswith("_bytes") and isinstance(value, str):
        return parse_bytes(value, name)
    return _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


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
