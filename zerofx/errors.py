"""The errors a user of zerofx can meet: each says what, where, why, and the remedy."""

from __future__ import annotations

from typing import Any


class ZerofxError(Exception):
    """Say what happened, where (qualified name, event), why, and what to do about it."""

    def __init__(self, what: str, *, where: str = "", why: str = "", remedy: str = "") -> None:
        self.what, self.where, self.why, self.remedy = what, where, why, remedy
        parts = [what, where and f"where: {where}", why and f"why: {why}", remedy and f"remedy: {remedy}"]
        super().__init__("\n  ".join(part for part in parts if part))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.where, self.why, self.remedy)


def _rebuild(kind: type[ZerofxError], what: str, where: str, why: str, remedy: str) -> ZerofxError:
    return kind(what, where=where, why=why, remedy=remedy)


class ConfigError(ZerofxError, ValueError):
    """A setting has a value that zerofx cannot use."""


class ShardingError(ZerofxError):
    """A model, or one of its parameters, cannot be sharded or no longer is what was sharded."""


class MemoryLimitError(ZerofxError):
    """A step cannot stay within a number of bytes (``memory_limit``, ``recompute``); ``smallest_bytes`` is the least that works."""

    smallest_bytes: int = 0


class RankMismatchError(ZerofxError):
    """The ranks disagree on the model, on the settings, or on what they run."""


class RankLostError(ZerofxError):
    """A rank is gone: its process ended, or its connections did."""


class CheckpointError(ZerofxError):
    """What is saved or loaded does not fit the model, is damaged, or cannot be written."""


class OffloadError(ZerofxError):
    """What is offloaded finds no space, or could not be written."""


class CompilerError(ZerofxError):
    """The backend that should compile the graphs is not usable here."""


class LossScaleError(ZerofxError):
    """The loss overflows at the smallest loss scale."""


class VerifyError(ZerofxError):
    """A pass produced a program that breaks an invariant of its level: a fault in the pass."""
