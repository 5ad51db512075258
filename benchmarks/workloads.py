"""Models to measure: equal blocks, any depth. ``forward`` takes one batch and returns the loss."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A pre-norm attention block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        mlp: Tensor = self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return x + mlp


class GPT(nn.Module):
    """A GPT, by default with a tied head; ``forward`` returns the loss of predicting the next token."""

    def __init__(
        self, layers: int, width: int = 128, heads: int = 4, vocabulary: int = 512, length: int = 64, *, tied: bool = True
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(length, width)
        self.h = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Narrow(nn.Module):
    """A deep, narrow MLP with residuals: many small parameters, little to compute."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(layers)])
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.out.weight.dtype)
        for block in self.h:
            x = x + block(x)
        loss: Tensor = self.out(x).square().mean()
        return loss


class Llama(nn.Module):
    """A small Llama of ``transformers``; ``forward`` returns the loss of predicting the next token."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        transformers: Any = importlib.import_module("transformers")
        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            use_cache=False,
        )
        self.llama: nn.Module = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.llama(input_ids=tokens, labels=tokens).loss
        return loss


def tokens(rows: int = 2, length: int = 64, vocabulary: int = 512, seed: int = 0) -> Tensor:
    """Make one batch, always the same for a seed."""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True)
class Workload:
    """What to train: ``build`` a model, ``batch`` by seed, and the model's repeated ``blocks`` in the order of their use."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    blocks: Callable[[nn.Module], nn.ModuleList]


def _h(model: nn.Module) -> nn.ModuleList:
    assert isinstance(model, GPT | Narrow)
    return model.h


def _llama_layers(model: nn.Module) -> nn.ModuleList:
    layers: nn.ModuleList = model.get_submodule("llama.model.layers")  # type: ignore[assignment]
    return layers


def _features(rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


# gpt is the headline: 33.8 M parameters. gpt-light computes a quarter on the same parameters: in fp32, with links twice as fast, what
# bf16 is to gpt on processors that have it. small is for many steps, tiny for tests of the benchmarks themselves.
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("gpt", functools.partial(GPT, 8, 512, 8, 8192, 256, tied=False), functools.partial(tokens, 4, 256, 8192), _h),
        Workload("gpt-light", functools.partial(GPT, 8, 512, 8, 8192, 256, tied=False), functools.partial(tokens, 1, 256, 8192), _h),
        Workload("narrow", functools.partial(Narrow, 64, 256), functools.partial(_features, 64, 256), _h),
        Workload("llama", functools.partial(Llama, 6, 512, 8, 8192), functools.partial(tokens, 4, 256, 8192), _llama_layers),
        Workload("small", functools.partial(GPT, 6, 256, 4, 2048, 128, tied=False), functools.partial(tokens, 4, 128, 2048), _h),
        Workload("tiny", functools.partial(GPT, 2, 32, 2, 64, 16, tied=False), functools.partial(tokens, 2, 16, 64), _h),
    )
}
