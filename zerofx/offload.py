"""What of a training state lies on disk, as a setting."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from zerofx.errors import ConfigError
from zerofx.units import parse_bytes

STATES = ("optimizer", "parameters", "gradients")
KINDS = (*STATES, "activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Keep parts of the training state, or activations, in files, and in memory only what is being worked on.

    ``optimizer``: the state of optimizers; a step updates parameters in windows with at most ``window_bytes`` of what lies in files (or
    one parameter's, if more), while the next window is read. ``parameters``: their shards; each is loaded for its gather, and leaves
    memory behind it. At stages 1 and 2, where the forward reads whole copies, ``optimizer`` stands for them too: they are its masters.
    ``gradients``: reduced shards, from their reduction to the step. ``activations``: those that a forward saves, for as long as nothing
    reads them: only of so many as a step that does not fit ``memory_limit`` needs, which then bounds all that the graphs of a step
    allocate, not only whole parameters and buffers.

    Each is a target: ``"disk:DIRECTORY"`` (one that is there; local to each machine), ``"disk"`` for the system's temporary directory, or
    None. Tensors of at least ``min_bytes`` on a rank are in files. Bytes are ints or text with a unit.
    Source: ZeRO-Infinity (Rajbhandari et al., 2021), sections 5.1 and 5.2.
    """

    optimizer: str | None = None
    parameters: str | None = None
    gradients: str | None = None
    activations: str | None = None
    # Measured: a tensor in a file costs 36 us a step, and 0.08 us for each KiB (AdamW; what is in the system's cache).
    min_bytes: int = 2**16
    window_bytes: int = 2**25

    def __post_init__(self) -> None:
        for field in ("min_bytes", "window_bytes"):
            object.__setattr__(self, field, parse_bytes(getattr(self, field) or 0, f"offload.{field}"))
        targets = {kind: getattr(self, kind) for kind in KINDS if getattr(self, kind) is not None}
        if not targets:
            raise ConfigError(
                "nothing is offloaded",
                where="offload",
                why=f"it says where each of {', '.join(KINDS)} goes",
                remedy='pass a target for one of them, such as {"optimizer": "disk:DIRECTORY"}, or offload=None',
            )
        for kind, target in targets.items():
            medium, colon, path = str(target).partition(":")
            if medium != "disk" or (colon and not path):
                raise ConfigError(
                    f"{target!r} is no target that there is",
                    where=f"offload.{kind}",
                    why="state is offloaded to files; to the memory of the host it would be from an accelerator, which there is not yet",
                    remedy='pass "disk:DIRECTORY", or "disk" for the temporary directory',
                )

    @property
    def keeps_states(self) -> bool:
        """Whether more than activations goes to disk."""
        return any(getattr(self, kind) is not None for kind in STATES)

    def directory(self, kind: str) -> Path:
        """Return the directory that the files of a kind lie in."""
        return Path(str(getattr(self, kind)).partition(":")[2] or tempfile.gettempdir())

    def check(self, device_type: str) -> None:
        """Check that a model on such a device can be offloaded here. Raises ConfigError."""
        if device_type not in ("cpu", "meta"):
            raise ConfigError(
                f"the state of a model on {device_type!r} is not offloaded",
                where="offload",
                why="files are mapped into the memory of the processor, and state on an accelerator has to be copied to and fro",
                remedy="leave offload out, or train on the processor",
            )
        for kind in KINDS:
            if getattr(self, kind) is None:
                continue
            try:
                with tempfile.TemporaryFile(dir=self.directory(kind)):
                    pass
            except OSError as error:
                raise ConfigError(
                    f"there can be no file in {str(self.directory(kind))!r}",
                    where=f"offload.{kind}",
                    why=f"the system says: {error.strerror}",
                    remedy="name a directory that is there on every machine, and may be written",
                ) from None
