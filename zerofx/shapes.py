"""Models without weights to plan: a GPT of a given size, or what a Hugging Face config describes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerofx.errors import ConfigError

VOCABULARY = 50_304  # GPT-2's, padded to a multiple of 64
_HEAD = 128  # width of one head
_LEAST_PARAMS = VOCABULARY * _HEAD + 12 * _HEAD**2  # one block of one head
_MOST_PARAMS = 1e14
_ASPECT = 128  # width over depth, as in GPT-3 (Brown et al., 2020, table 2.1)


class Block(nn.Module):
    """A pre-norm transformer block of 12 width^2 parameters, and biases and norms."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.network_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, positions, width) to the same shape."""
        rows, positions, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(rows, positions, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, positions, width))
        wide: Tensor = self.narrow(functional.gelu(self.widen(self.network_norm(x))))
        return x + wide


class GPT(nn.Module):
    """A GPT whose head is its embedding; ``forward`` takes tokens (rows, positions) and returns the loss of the next one."""

    def __init__(self, layers: int, width: int, positions: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, width // _HEAD) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gpt(params: float, positions: int) -> GPT:
    """Build a GPT of about so many parameters on the meta device, in the proportions of GPT-3.

    Raises ConfigError for fewer than the smallest has, or more than any has.
    """
    if not _LEAST_PARAMS <= params <= _MOST_PARAMS:
        raise ConfigError(
            f"a GPT of {params:g} parameters cannot be planned",
            where="python -m zerofx plan gpt --params P",
            why=f"the smallest of these shapes has {_LEAST_PARAMS:.2g}, the largest {_MOST_PARAMS:.0e}",
            remedy="pass a number between, such as 7.5e9",
        )
    widths = range(_HEAD, 2**17, _HEAD)
    width = min(widths, key=lambda size: abs(12 * size**3 / _ASPECT + VOCABULARY * size - params))
    layers = max(1, round((params - VOCABULARY * width) / (12 * width**2)))
    with torch.device("meta"):
        return GPT(layers, width, positions)


def hugging_face(path: Path) -> nn.Module:
    """Build the causal language model of a Hugging Face ``config.json`` on the meta device.

    Raises ConfigError where transformers is not installed, or does not take the file.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path} is no file",
            where="python -m zerofx plan hf --config FILE",
            why="nothing is looked up elsewhere",
            remedy="pass a config.json",
        )
    try:
        transformers: Any = importlib.import_module("transformers")
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    except Exception as error:  # what transformers raises for a file it does not like is its own and its dependencies' affair
        raise ConfigError(
            f"{path} gives no model",
            where="python -m zerofx plan hf --config FILE",
            why=(str(error).strip() or type(error).__name__).splitlines()[0],
            remedy="install transformers, and pass the config.json of a causal language model",
        ) from error
    return model
