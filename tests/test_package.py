"""What a user meets before the first step: the import, the entry point, the names."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerofx
from tests.programs import TiedStack, fake_ranks


def test_importing_costs_little_more_than_torch() -> None:
    code = "import sys, torch; before = set(sys.modules); import zerofx; print(*sorted(set(sys.modules) - before))"
    added = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout.split()
    assert added == ["zerofx", "zerofx.errors"]


def test_every_public_name_resolves() -> None:
    assert all(getattr(zerofx, name) is not None for name in zerofx.__all__)
    with pytest.raises(AttributeError, match="no attribute 'stage_4'"):
        _ = zerofx.stage_4


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(zerofx.__file__).parent / "py.typed").exists()


def test_torch_compile_finds_the_backend_and_runs_the_sharded_model() -> None:
    assert "zerofx" in torch._dynamo.list_backends()
    tokens = torch.arange(16).view(2, 8)
    torch.manual_seed(0)
    expected = TiedStack(1)(tokens)
    torch.manual_seed(0)
    with fake_ranks(1):
        model = zerofx.compile(TiedStack(1), stage=3, backend="aot_eager")
        outer = torch.compile(model, backend="zerofx")
        loss = outer(tokens)
        loss.backward()
    assert torch.equal(loss, expected)
    assert len(model._zerofx.runtime.compilations) == 1
    assert all(parameter.grad is not None for parameter in model.parameters())
