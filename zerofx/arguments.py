"""Read the arguments of ``zerofx.estimate``: names, and numbers as exact fractions, or as sympy expressions where a symbol is free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real
from typing import Any, TypeVar

from zerofx import formulas
from zerofx.errors import ConfigError

# A Fraction, or a sympy expression; sympy has no types.
Number = Any
Name = TypeVar("Name", str, int)

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# What may go to host memory: each kind of model state, from the stage on that shards it.
OFFLOADED_FROM = {
    "optimizer": formulas.OPTIMIZER_SHARDED_FROM,
    "gradients": formulas.GRADIENTS_SHARDED_FROM,
    "parameters": formulas.PARAMETERS_SHARDED_FROM,
}


@dataclass(frozen=True, slots=True)
class _Domain:
    """The numbers that one argument may be, and what they say of the world."""

    argument: str
    meaning: str
    least: int
    most: int
    is_whole: bool = True

    def read(self, value: Any) -> Number:
        if isinstance(value, Real) and not isinstance(value, bool):
            return self._number(value)
        from sympy import Expr  # takes a while, and whoever passes an expression has paid for it

        if not isinstance(value, Expr):
            raise self._refusal(value)
        if not value.free_symbols:
            return self._number(value)
        if value.is_negative or (self.least and value.is_zero) or value.is_real is False or (self.is_whole and value.is_integer is False):
            raise self._refusal(value)
        return value

    def _number(self, value: Any) -> Fraction:
        try:
            number = Fraction(int(value.numerator), int(value.denominator)) if isinstance(value, Rational) else Fraction(float(value))
        except (TypeError, ValueError, OverflowError):  # complex, nan, infinite
            raise self._refusal(value) from None
        if not self.least <= number <= self.most or (self.is_whole and number.denominator != 1):
            raise self._refusal(value)
        return number

    def _refusal(self, value: Any) -> ConfigError:
        # Python refuses to print an int of some thousand digits.
        shown = f"an int of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 128 else repr(value)
        return ConfigError(
            f"{self.argument}={shown} is not a {'whole ' if self.is_whole else ''}number from {self.least} to {self.most:g}",
            where=f"zerofx.estimate({self.argument}=...)",
            why=f"it is {self.meaning}",
            remedy="pass such a number, or a sympy symbol to leave it open",
        )


_PARAMS = _Domain("params", "a count of parameters", 1, 10**18)
_WORLD_SIZE = _Domain("world_size", "a count of ranks", 1, 10**9)
_MICRO_BATCHES = _Domain("micro_batches", "a count of backwards for each optimizer step", 1, 10**9)
_MULTIPLIER = _Domain("optimizer", "the bytes of optimizer state and fp32 master for each parameter", 0, 1000, is_whole=False)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is trained, and how: all that the closed forms take.

    ``multiplier`` is the paper's K, in bytes for each parameter; ``optimizer`` is empty where K was given as a number.
    """

    params: Number
    world_size: Number
    precision: str
    optimizer: str
    multiplier: Number
    offload: tuple[str, ...]
    micro_batches: Number

    @staticmethod
    def of(params: Any, world_size: Any, choices: Mapping[str, Any]) -> Setup:
        """Read what the user passed, with ``choices`` by their argument's name. Raises ConfigError."""
        precision = _precision(choices["precision"])
        return Setup(
            _PARAMS.read(params),
            _WORLD_SIZE.read(world_size),
            precision,
            *_optimizer(choices["optimizer"], formulas.PRECISIONS[precision]),
            _offload(choices["offload"]),
            _MICRO_BATCHES.read(choices["micro_batches"]),
        )

    def __str__(self) -> str:
        facts = [f"{shown(self.params)} parameters", f"{shown(self.world_size)} {'rank' if self.world_size == 1 else 'ranks'}"]
        multiplier = f"K = {shown(self.multiplier)}"
        facts += [self.precision, f"{self.optimizer} ({multiplier})" if self.optimizer else multiplier]
        facts += [f"{shown(self.micro_batches)} micro-batches"] if self.micro_batches != 1 else []
        return ", ".join(facts)


def stages_of(stage: Any) -> tuple[int, ...]:
    """Return the stages asked for: one, or all for None. Raises ConfigError on what is no stage."""
    return (0, 1, 2, 3) if stage is None else (_known("stage", stage, (0, 1, 2, 3)),)


def plain(number: Number) -> int | float | str:
    """Return an exact number as an int, or as the nearest float, and an expression as text."""
    if not isinstance(number, Fraction):
        return str(number)
    return number.numerator if number.denominator == 1 else float(number)


def shown(number: Number) -> str:
    """Print a count."""
    found = plain(number)
    return found if isinstance(found, str) else f"{found:,}"


def _known(argument: str, value: Any, names: Collection[Name], remedy: str = "pass one of them") -> Name:
    """Return the one of the names that the value is."""
    for name in names:
        if type(value) is type(name) and value == name:
            return name
    raise ConfigError(
        f"{argument}={value!r} is not known",
        where=f"zerofx.estimate({argument}=...)",
        why=f"known are {', '.join(map(str, names))}",
        remedy=remedy,
    )


def _precision(precision: Any) -> str:
    name = str(precision).removeprefix("torch.")
    return _known("precision", _DTYPES.get(name, name), formulas.PRECISIONS)


def _optimizer(optimizer: Any, precision: formulas.Precision) -> tuple[str, Number]:
    """Return the optimizer's name, and K."""
    if not isinstance(optimizer, str):
        return "", _MULTIPLIER.read(optimizer)
    remedy = "pass one of them, or a number: its bytes of state and fp32 master for each parameter"
    name = _known("optimizer", optimizer.lower(), formulas.OPTIMIZER_STATES, remedy)
    return name, Fraction(formulas.optimizer_multiplier(precision, formulas.OPTIMIZER_STATES[name]))


def _offload(kinds: Any) -> tuple[str, ...]:
    chosen = {_known("offload", kind, OFFLOADED_FROM) for kind in (kinds if isinstance(kinds, (list, set, tuple)) else (kinds,))}
    return tuple(kind for kind in OFFLOADED_FROM if kind in chosen)
