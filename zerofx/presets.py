"""Machines whose figures are known by name: data sheets and published measurements."""

from __future__ import annotations

from zerofx.errors import ConfigError
from zerofx.machine import Hardware, Link
from zerofx.names import nearest

# Seconds of one ring step by NCCL's protocols LL, LL128, Simple (NVIDIA/nccl, src/graph/tuning.cc, hwLat, ring).
_NVLINK_STEP_S = (0.6e-6, 1.9e-6, 3.4e-6)
_NETWORK_STEP_S = (2.7e-6, 4.0e-6, 14.0e-6)
# LL128 carries 120 bytes of data in 128.
_LL128_SHARE = 120 / 128
_SIZES = (2**14, 2**17, 2**20, 2**23, 2**26, 2**29)


def _nccl(step_s: tuple[float, float, float], ll_bytes_per_s: float, bytes_per_s: float) -> Link:
    """Return the link whose messages go by whichever protocol is the fastest for their size."""
    ll_s, ll128_s, simple_s = step_s

    def time_s(size: int) -> float:
        ll128 = ll128_s - ll_s + size / (bytes_per_s * _LL128_SHARE)
        return min(size / ll_bytes_per_s, ll128, simple_s - ll_s + size / bytes_per_s)

    return Link(ll_s, tuple((size, size / time_s(size)) for size in _SIZES))


# One kernel after another on a busy stream, 1 to 2 us; launches by the host run ahead of it. A judgement.
_GPU_LAUNCH_S = 2e-6
# Copies reach about 0.9 of a data sheet's memory bandwidth (3.08 of 3.35 TB/s on an H100; 4.3 of 4.8 on an H200).
_MEMORY_SHARE = 0.9

_A100 = Hardware(
    name="a100",
    source="NVIDIA A100 80GB SXM data sheet; nccl-tests and matmul figures as published",
    # data sheet: tensor cores without sparsity; fp32 outside them, as torch multiplies by default
    flops_per_s=(("bfloat16", 312e12), ("float16", 312e12), ("float32", 19.5e12)),
    achievable=0.859,  # 267.9 of 312 TFLOPS, the best matmul found (stas00/ml-engineering, compute/accelerator, MAMF)
    # FlashAttention-2 (Dao, 2023), section 4.1: up to 73 % of the peak forward, 63 % backward
    kernel_flops_per_s=tuple(
        (kind, dtype, share * 312e12)
        for dtype in ("bfloat16", "float16")
        for kind, share in (("attention", 0.73), ("attention_backward", 0.63))
    ),
    memory_bytes_per_s=2.039e12 * _MEMORY_SHARE,  # data sheet
    memory_bytes=81920 * 2**20,  # what nvidia-smi shows
    launch_s=_GPU_LAUNCH_S,
    ranks_per_node=8,  # DGX A100
    # 600 GB/s NVLink both ways; 235 of 300 GB/s each way in 8-rank collectives (NVIDIA/nccl, issue 1712: close to 240); LL: tuning.cc
    intra_node=_nccl(_NVLINK_STEP_S, 87.7e9, 235e9),
    # 8 HDR adapters of 200 Gbit/s; about 24 GB/s each (NVIDIA/nccl-tests, issue 252); LL by tuning.cc, from 4 nodes on
    inter_node=_nccl(_NETWORK_STEP_S, 19.0e9, 8 * 24e9),
)

# FlashAttention-2 on an H100, without Hopper's own instructions: up to 335 TFLOPS (Dao, 2023, section 4.1), which is what torch ships.
_HOPPER_ATTENTION = tuple((kind, dtype, 335e12) for dtype in ("bfloat16", "float16") for kind in ("attention", "attention_backward"))
_HOPPER_FLOPS = (("bfloat16", 989e12), ("float16", 989e12), ("float32", 67e12))  # data sheets of both, dense
# 900 GB/s NVLink both ways; 370 of 450 GB/s each way in collectives without SHARP (NVIDIA/nccl-tests, issue 212); LL: tuning.cc
_HOPPER_NVLINK = _nccl(_NVLINK_STEP_S, 141e9, 370e9)
# 8 NDR adapters of 400 Gbit/s; 46 to 48 GB/s each (NVIDIA/nccl-tests, issue 290); LL by tuning.cc, from 4 nodes on
_HOPPER_NETWORK = _nccl(_NETWORK_STEP_S, 35e9, 8 * 47e9)

_H100 = Hardware(
    name="h100",
    source="NVIDIA H100 SXM data sheet; nccl-tests and matmul figures as published",
    flops_per_s=_HOPPER_FLOPS,
    achievable=0.801,  # 792.1 of 989 TFLOPS, the best matmul found (stas00/ml-engineering, compute/accelerator, MAMF)
    kernel_flops_per_s=_HOPPER_ATTENTION,
    memory_bytes_per_s=3.35e12 * _MEMORY_SHARE,  # data sheet
    memory_bytes=81559 * 2**20,  # what nvidia-smi shows
    launch_s=_GPU_LAUNCH_S,
    ranks_per_node=8,  # DGX H100
    intra_node=_HOPPER_NVLINK,
    inter_node=_HOPPER_NETWORK,
)

_H200 = Hardware(
    name="h200",
    source="NVIDIA H200 SXM data sheet: an H100 with more and faster memory",
    flops_per_s=_HOPPER_FLOPS,
    achievable=0.803,  # 794.5 of 989 TFLOPS (stas00/ml-engineering, MAMF, H100 and H200 alike)
    kernel_flops_per_s=_HOPPER_ATTENTION,
    memory_bytes_per_s=4.8e12 * _MEMORY_SHARE,  # data sheet
    memory_bytes=143771 * 2**20,  # what nvidia-smi shows
    launch_s=_GPU_LAUNCH_S,
    ranks_per_node=8,
    intra_node=_HOPPER_NVLINK,
    inter_node=_HOPPER_NETWORK,
)

PRESETS = {preset.name: preset for preset in (_A100, _H100, _H200)}
THIS_MACHINE = "this_machine"


def check_hardware(named: object, where: str) -> None:
    """Check that a machine is a Hardware, or a name that is known."""
    names = [*PRESETS, THIS_MACHINE]
    if not isinstance(named, Hardware) and named not in names:
        raise ConfigError(
            f"hardware={named!r} is not known",
            where=where,
            why=f"the names are {', '.join(names)}",
            remedy=nearest(str(named), names) or "pass one of them, or a zerofx.hardware.Hardware with your numbers",
        )
