"""What of a training state lies on disk, as a setting."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from zerofx.errors import ConfigError
from zerofx.units import parse_bytes

_WHERE = "offload.optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Keep the state of optimizers in files, and in memory only what a step is working on.

    At stages 1 and 2 a parameter's fp32 shard (its master) belongs to that state: the forward reads the whole copy beside it.
    ``optimizer`` is the target: ``"disk:DIRECTORY"`` (one that is there; local to each machine), or ``"disk"`` for the system's
    temporary directory. Tensors of at least ``min_bytes`` on a rank are in its file. A step updates parameters in windows with at
    most ``window_bytes`` of such tensors (or one parameter's, if more), while the next window is read. Both are ints or text with a unit.
    """

    optimizer: str
    # Measured: a tensor in a file costs 36 us a step, and 0.08 us for each KiB (AdamW; what is in the system's cache).
    min_bytes: int = 2**16
    window_bytes: int = 2**25

    def __post_init__(self) -> None:
        for field in ("min_bytes", "window_bytes"):
            object.__setattr__(self, field, parse_bytes(getattr(self, field) or 0, f"offload.{field}"))
        kind, colon, path = str(self.optimizer).partition(":")
        if kind != "disk" or (colon and not path):
            raise ConfigError(
                f"{self.optimizer!r} is no target that there is",
                where=_WHERE,
                why="state is offloaded to files; to the memory of the host it would be from an accelerator, which there is not yet",
                remedy='pass "disk:DIRECTORY", or "disk" for the temporary directory',
            )

    @property
    def directory(self) -> Path:
        """The directory that the files lie in."""
        return Path(self.optimizer.partition(":")[2] or tempfile.gettempdir())

    def check(self, device_type: str) -> None:
        """Check that a model on such a device can be offloaded here. Raises ConfigError."""
        if device_type not in ("cpu", "meta"):
            raise ConfigError(
                f"the state of a model on {device_type!r} is not offloaded",
                where=_WHERE,
                why="files are mapped into the memory of the processor, and state on an accelerator has to be copied to and fro",
                remedy="leave offload out, or train on the processor",
            )
        try:
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            raise ConfigError(
                f"there can be no file in {str(self.directory)!r}",
                where=_WHERE,
                why=f"the system says: {error.strerror}",
                remedy="name a directory that is there on every machine, and may be written",
            ) from None
