"""What the modules of a compiled model hold: it must stay what it was at ``zerofx.compile``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zerofx.errors import ShardingError
from zerofx.params import Param

Modules = tuple[tuple[str, nn.Module], ...]


class Membership:
    """Notices parameters and submodules that were re-assigned, and parameters of another dtype."""

    def __init__(self, modules: Modules, params: Sequence[Param], tensors: Sequence[nn.Parameter]) -> None:
        self._modules, self._params, self._tensors = modules, params, tensors
        self._members: list[dict[str, int]] = []

    def watch(self) -> None:
        """From now on, members of the model's modules must stay what they are."""
        self._members = [_members(module) for _, module in self._modules]

    def check(self) -> None:
        """Check that every module holds what it was compiled with. Raises ShardingError."""
        if not self._members:
            self.watch()  # a copy, whose modules were not complete when it was made
        for (path, module), members in zip(self._modules, self._members, strict=True):
            now = _members(module)
            if now == members:
                continue
            changed = [name for name in {**members, **now} if members.get(name) != now.get(name)]
            raise ShardingError(
                f"{'.'.join(filter(None, (path, changed[0])))} was re-assigned after zerofx.compile",
                where=f"{path or type(module).__name__}, at the start of a forward",
                why="the model computes with the shards that it was compiled with; what is new is not sharded, and would be ignored",
                remedy="copy into the parameter (load_state_dict, or p.copy_() under no_grad), or assign before zerofx.compile",
            )
        for param, tensor in zip(self._params, self._tensors, strict=True):
            if tensor.dtype is not param.dtype:
                raise ShardingError(
                    f"{param.name} was {param.dtype} and is {tensor.dtype} now",
                    where=f"{param.name}, at the start of a forward",
                    why="collectives and graphs were made for the dtype at zerofx.compile",
                    remedy="convert the model before zerofx.compile, or compute in another dtype by precision=MixedPrecisionPolicy(...)",
                )


def _members(module: nn.Module) -> dict[str, int]:
    """Return the identity of each parameter and submodule of a module."""
    return {name: id(member) for members in (module._parameters, module._modules) for name, member in members.items()}
