"""Stacks of layers in a model: which module list holds them, and the names and copies of more or fewer of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from zerofx.periods import GROUPS, Irregular

_LONGEST_PERIOD = 4


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers of one ModuleList or Sequential, in groups of ``period``; the last group holds what is left over too."""

    path: str
    period: int
    depth: int

    @property
    def groups(self) -> int:
        return self.depth // self.period

    @property
    def extra(self) -> int:
        """How many groups a stack of the least depth lacks."""
        return self.groups - GROUPS

    @property
    def least(self) -> Stack:
        """The stack without the groups that it has too many."""
        return replace(self, depth=self.depth - self.extra * self.period)

    def cut(self, model: nn.Module) -> None:
        """Take the layers too many out of a model, from the middle."""
        layers = model.get_submodule(self.path)
        assert isinstance(layers, nn.ModuleList | nn.Sequential)
        first = (GROUPS - 1) * self.period
        del layers[first : first + self.extra * self.period]

    def split(self, name: str) -> tuple[str, int | None]:
        """Return a qualified name with its layer counted within its group, and the group; None for what is in no layer."""
        match = _pattern(self.path).match(name)
        if match is None:
            return name, None
        layer = int(match[2])
        group = min(layer // self.period, self.groups - 1)
        return f"{match[1]}{layer - group * self.period}{name[match.end() :]}", group

    def shifted(self, name: str, groups: int) -> str:
        """Return the name of the same in a layer so many groups later."""
        match = _pattern(self.path).match(name)
        return name if match is None else f"{match[1]}{int(match[2]) + groups * self.period}{name[match.end() :]}"


@functools.cache
def _pattern(path: str) -> re.Pattern[str]:
    """Match layers by their qualified names, and as Dynamo writes them: ``L['self'].h.3``, ``L['self']._modules['h']._modules['3']``."""
    between = r"(?:\W+_modules)?\W+"
    parts = "".join(re.escape(part) + between for part in path.split(".") if part)
    return re.compile(rf"((?:L(?:\[[^]]*\])+{between})?{parts})(\d+)(?!\w)")


def split_names(stack: Stack, names: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return a parameter's names, counted within the group, and its group, if any. Raises Irregular where layers share it."""
    split = [stack.split(name) for name in names]
    groups = {group for _, group in split}
    if len(groups) > 1:
        raise Irregular(f"{names[0]} belongs to more than one layer")
    return tuple(name for name, _ in split), tuple(group for group in groups if group is not None)


def stacks_of(model: nn.Module) -> Iterator[Stack]:
    """Yield the stacks with more groups than are needed to tell the others, those with the most parameters first, by period."""
    found: list[tuple[int, str, nn.Module]] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and GROUPS < len(module) == len(list(module.children())):
            found.append((sum(param.numel() for param in module.parameters()), path, module))
    for _, path, module in sorted(found, key=lambda item: item[0], reverse=True):
        layers = list(module.children())
        for period in range(1, _LONGEST_PERIOD + 1):
            stack = Stack(path, period, len(layers))
            if stack.extra > 0 and _alike(layers, stack):
                yield stack


def _alike(layers: Sequence[nn.Module], stack: Stack) -> bool:
    """Whether the middle groups hold modules of the same classes, with the same members and trained parameters."""
    members = [
        [
            *((name, type(module), tuple(vars(module))) for name, module in layer.named_modules()),
            *((name, param.shape, param.dtype, param.requires_grad) for name, param in layer.named_parameters()),
        ]
        for layer in layers
    ]
    return all(members[number] == members[number - stack.period] for number in range(2 * stack.period, (stack.groups - 1) * stack.period))
