"""The demo's model, a byte-level GPT, and its data, the text of the standard library. Both are the same in every process."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerofx.errors import ZerofxError
from zerofx.shapes import Block

VOCABULARY = 256
CONTEXT_BYTES = 128
ROWS_PER_RANK = 4
SEED = 20
_HEAD = 128  # width of a head of a large model
_ASPECT = 100  # its width over its depth


@dataclass(frozen=True, slots=True)
class Size:
    """Width, heads and blocks of a GPT."""

    width: int
    heads: int
    blocks: int

    @staticmethod
    def of(params: float) -> Size:
        """Return the shape of a large model of about so many parameters: a block has 12 width^2."""
        heads = max(1, round((params * _ASPECT / 12) ** (1 / 3) / _HEAD))
        width = _HEAD * heads
        return Size(width, heads, max(1, round(params / (12 * width**2))))


SMALL = Size(width=144, heads=6, blocks=6)


class ByteGPT(nn.Module):
    """A GPT over bytes with its embedding tied to its head."""

    def __init__(self, size: Size = SMALL) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(CONTEXT_BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.apply(_initialise)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats a byte, of ``targets`` after ``inputs``: both (rows, positions)."""
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def new_model(device: torch.device) -> ByteGPT:
    """Build the model, with the same weights every time."""
    torch.manual_seed(SEED)
    return ByteGPT().to(device)


def standard_library_text() -> Tensor:
    """Read the top-level modules of the installed standard library, in order of their names, as one tensor of bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) <= CONTEXT_BYTES:
        raise ZerofxError(f"{folder} holds no Python source to train on", remedy="use a Python with its standard library on disk")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text: Tensor, step: int, ranks: Iterable[int], device: torch.device, rows_per_rank: int = ROWS_PER_RANK) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, both (rows, CONTEXT_BYTES), of one step: those of ``ranks`` one after the other."""
    windows = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(SEED + 2**20 * step + rank)
        starts = torch.randint(len(text) - CONTEXT_BYTES, (rows_per_rank, 1), generator=generator)
        windows.append(text[starts + torch.arange(CONTEXT_BYTES + 1)])
    rows = torch.cat(windows).long().to(device)
    return rows[:, :-1], rows[:, 1:]
