"""Unmodified models of the transformers library train at every stage as they do in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.models import Batch, Case
from tests.ranks import Pool
from tests.reference import FP32_TOLERANCE, FP64_TOLERANCE, Trace, differences, drift, momentum, train
from tests.stages import TIGHT, at_stage, compiled
from zerofx.config import Config

VOCABULARY = 37
STEPS = 2
# Dropout is off, or one process and two would draw different masks. Weights are larger than the library's default, or attention
# would be uniform and its gradients as small as rounding.
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2}
WIDE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
GROUPED: dict[str, Any] = {"num_key_value_heads": 1, "max_position_embeddings": 16, "attention_dropout": 0.0}


def gpt2() -> nn.Module:
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**COMMON, **sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**COMMON, **WIDE, **GROUPED))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**COMMON, **WIDE, **GROUPED, num_local_experts=4, num_experts_per_tok=2))


def bert() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**COMMON, **WIDE, **dropout, max_position_embeddings=16))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2}
    common = {name: value for name, value in COMMON.items() if name != "initializer_range"}
    return T5ForConditionalGeneration(T5Config(**common, **sizes, dropout_rate=0.0, decoder_start_token_id=0))


def feed_tokens(step: int, rows: int) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (rows, 8))
    return Batch((), tokens, {"input_ids": tokens, "labels": tokens})


def own_loss(output: Any, target: Tensor, world: int) -> Tensor:
    loss: Tensor = output.loss
    return loss


def case_of(build: Callable[[], nn.Module]) -> Case:
    # In fp64, rounding cannot hide a small fault; the grouped product of Mixtral's experts has no fp64.
    dtype = torch.float32 if build is mixtral else torch.float64
    return Case(build.__name__, build, feed_tokens, own_loss, exact=False, learning_rate=0.05, dtype=dtype)


CASES = {build.__name__: case_of(build) for build in (gpt2, llama, mixtral, bert, t5)}
# Tracing them takes longer than everything else: each trains with its parameters gathered, and at a stage with whole copies.
TRAINED_AT = {"gpt2": (1, 3), "llama": (2, 3), "mixtral": (0, 3), "bert": (1, 3), "t5": (2, 3)}


def train_at_stages(rank: int, world: int, name: str, stages: tuple[int, ...]) -> list[tuple[Trace, Trace]]:
    """At each stage, the traces of the compiled and of the eager mode."""
    case = CASES[name]
    pairs = []
    for stage in stages:
        with at_stage(stage):
            models = compiled(case, stage), compiled(case, stage, config=Config(stage=stage, backend="hooks", hooks=TIGHT))
            first, second = (train(model, case, rank, world, steps=STEPS, make_optimizer=momentum) for model in models)
            pairs.append((first, second))
    return pairs


@pytest.mark.parametrize("name", TRAINED_AT)
def test_trains_as_in_one_process(ranks: Pool, name: str) -> None:
    case = CASES[name]
    stages = TRAINED_AT[name]
    expected = train(case.model(), case, steps=STEPS, make_optimizer=momentum)
    tolerance = FP32_TOLERANCE if case.dtype is torch.float32 else FP64_TOLERANCE
    by_rank = ranks.run(train_at_stages, 2, name, stages)
    for stage, pairs in zip(stages, zip(*by_rank, strict=True), strict=True):
        traces = [trace for trace, _ in pairs]
        # The library computes the loss itself in fp32.
        assert differences(traces, expected, tolerance, loss_tolerance=FP32_TOLERANCE) == [], f"stage {stage}"
        for pair in pairs:
            assert drift(list(pair)) == [], f"stage {stage}, hooks"
