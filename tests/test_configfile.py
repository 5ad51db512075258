"""Settings as TOML and JSON: an exact round trip, and words for what cannot be read."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerofx
from zerofx.config import Config, HookLimits
from zerofx.errors import ConfigError
from zerofx.hardware import Hardware, Link, hardware

counts = st.integers(0, 10**12)
rates = st.floats(1e-3, 1e15)
dtypes = st.sampled_from([None, torch.bfloat16, torch.float16, torch.float32])
links = st.builds(
    lambda latency_s, rate, share: Link(latency_s, ((1, rate), (2**20, rate)), ((4, rate),), share), st.floats(0, 1), rates, st.floats(0, 1)
)
machines = st.builds(
    Hardware,
    name=st.text(),
    flops_per_s=st.lists(st.tuples(st.text(), rates | st.integers(1, 2**60)), min_size=1).map(tuple),
    memory_bytes_per_s=rates,
    memory_bytes=st.integers(1, 2**50),
    launch_s=st.floats(0, 1),
    ranks_per_node=st.integers(1, 16),
    intra_node=links,
    inter_node=links,
    source=st.text(),
    kernel_flops_per_s=st.lists(st.tuples(st.text(), st.text(), rates)).map(tuple),
)
configs = st.builds(
    Config,
    stage=st.integers(0, 3),
    backend=st.sampled_from(["inductor", "aot_eager"]),
    param_dtype=dtypes,
    reduce_dtype=dtypes,
    output_dtype=dtypes,
    cast_forward_inputs=st.booleans(),
    keep_fp32=st.lists(st.text()).map(tuple),
    memory_limit_bytes=st.none() | counts,
    bucket_max_bytes=counts,
    prefetch_buckets=counts,
    whole_graph=st.booleans(),
    hardware=st.none() | st.sampled_from(["h100", "this_machine"]) | machines,
    hooks=st.builds(HookLimits, prefetch_elements=counts, max_live_elements=counts),
)


@settings(max_examples=40)
@given(configs)
def test_what_is_written_reads_back_exactly(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    folder = tmp_path_factory.getbasetemp()
    for suffix, text in (("toml", config.to_toml()), ("json", config.to_json())):
        path = folder / f"settings.{suffix}"
        path.write_text(text, encoding="utf-8")
        assert Config.from_file(path) == config


def test_a_file_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(
        """
        stage = 2
        param_dtype = "bf16"
        reduce_dtype = "float32"
        memory_limit_bytes = "2GiB"
        keep_fp32 = ["LayerNorm"]
        hardware = "h100"
        """
    )
    assert Config.from_file(path) == Config(
        stage=2,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        memory_limit_bytes=2**31,
        keep_fp32=("LayerNorm",),
        hardware="h100",
    )
    # a machine of one's own: a preset, written out, with one figure mended
    path.write_text(
        Config(hardware=dataclasses.replace(hardware("h100"), ranks_per_node=4)).to_toml().replace("launch_s = 2e-06", "launch_s = 0")
    )
    assert Config.from_file(path).hardware == dataclasses.replace(hardware("h100"), ranks_per_node=4, launch_s=0)


BAD: dict[str, tuple[str, str]] = {
    "stagee": ("stagee = 3", "'stage'"),
    "prefetch_element": ("[hooks]\nprefetch_element = 3", "'prefetch_elements'"),
    "'bfloat17' is no dtype": ('param_dtype = "bfloat17"', "'bfloat16'"),
    "hooks=3": ("hooks = 3", "HookLimits"),
    "not a number of bytes": ('memory_limit_bytes = "lots"', "GiB"),
    "passes=3 cannot be in a file": ("passes = 3", "zerofx.compile"),
    "stage='3'": ('stage = "3"', "0, 1, 2 or 3"),
    "'latency'": ("[hardware.intra_node]\nlatency = 1", "'latency_s'"),
    "Hardware cannot be made": ('[hardware]\nname = "mine"', "flops_per_s"),
    "cast_forward_inputs": ('cast_forward_inputs = "yes"', "bool"),
    "is no file of settings": ("stage = = 3", "to_toml"),
}


@pytest.mark.parametrize("words", BAD)
def test_a_file_that_cannot_be_read_says_what_and_how(tmp_path: Path, words: str) -> None:
    text, told = BAD[words]
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(zerofx.ConfigError) as caught:
        Config.from_file(path)
    assert words in caught.value.what
    assert told in str(caught.value)
    assert all(part.strip() for part in (caught.value.what, caught.value.where, caught.value.why, caught.value.remedy))


@pytest.mark.parametrize("name", ["none.toml", "settings.yaml"])
def test_no_file_and_no_format(tmp_path: Path, name: str) -> None:
    with pytest.raises(zerofx.ConfigError, match="no file of settings"):
        Config.from_file(tmp_path / name)


def test_passes_are_not_written() -> None:
    config: Any = Config(passes=(object(),))
    for write in (config.to_toml, config.to_json):
        with pytest.raises(zerofx.ConfigError, match="passes"):
            write()


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_only_floating_dtypes_are_taken(field: str) -> None:
    with pytest.raises(ConfigError, match="no floating dtype"):
        Config(**{field: torch.int8})


def test_methods_are_a_tuple_of_names() -> None:
    with pytest.raises(ConfigError, match="no tuple of names"):
        Config(methods="encode")  # type: ignore[arg-type]
