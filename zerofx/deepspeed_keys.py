"""What becomes of each setting of DeepSpeed (up to 0.19.8) here: where it goes, why it has no meaning, or why it cannot be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from zerofx.fieldtypes import Amount, Bound, Count, Natural, Positive


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a setting cannot be had, and the values with which it does nothing; of a table, the values of its ``switch``."""

    why: str
    remedy: str
    off: tuple[Any, ...] = (None, False, "none")
    switch: str = "enabled"

    def concerns(self, value: Any) -> bool:
        """Whether a value asks for it."""
        if isinstance(value, Mapping):
            return value.get(self.switch) not in self.off if self.switch else bool(value)
        return value not in self.off


_TRAINING_LOOP = "your training loop decides it"
_LAYOUT = "an arrangement inside DeepSpeed's own buffers"
_MEASURING = "DeepSpeed's own measuring and printing; torch's profiler shows what runs here"
_OTHER_PARALLELISM = "only data parallelism is sharded here"
_LEAVE_OUT = "leave it out"

# A loss scale is an fp32 number; 0 stands for one that follows overflows.
_SCALE = Annotated[float, Bound("from 0 to below 2**128", lambda scale: 0 <= scale < 2.0**128)]


@dataclass(frozen=True, slots=True)
class Mapped:
    """Where a setting goes, a field of Config or of what from_deepspeed returns, and the type of its values."""

    place: str
    type: Any


MAPPED = {
    "zero_optimization.stage": Mapped("config.stage", Literal[0, 1, 2, 3]),
    "zero_optimization.overlap_comm": Mapped("config.reduces_in_flight", bool),
    "zero_optimization.reduce_bucket_size": Mapped("config.bucket_max_bytes", Natural),
    "zero_optimization.allgather_bucket_size": Mapped("config.bucket_max_bytes", Natural),
    "zero_optimization.prefetch_bucket_size": Mapped("config.hooks.prefetch_elements", Natural),
    "zero_optimization.max_live_parameters": Mapped("config.hooks.max_live_elements", Natural),
    "zero_optimization.max_reuse_distance": Mapped("config.hooks.max_reuse_distance_elements", Natural),
    "zero_optimization.param_persistence_threshold": Mapped("config.hooks.persistence_threshold_elements", Natural),
    "bf16.enabled": Mapped("config.param_dtype", bool),
    "bf16.check_grad_overflow": Mapped("loss_scale", bool),
    "fp16.enabled": Mapped("config.param_dtype", bool),
    "fp16.auto_cast": Mapped("config.cast_forward_inputs", bool),
    "fp16.loss_scale": Mapped("loss_scale", _SCALE),
    "fp16.initial_scale_power": Mapped("loss_scale", Annotated[float, Bound("from 0 to below 128", lambda power: 0 <= power < 128)]),
    "fp16.loss_scale_window": Mapped("loss_scale", Count),
    "fp16.hysteresis": Mapped("loss_scale", Count),
    "fp16.consecutive_hysteresis": Mapped("loss_scale", bool),
    "fp16.min_loss_scale": Mapped("loss_scale", Positive),
    "communication_data_type": Mapped("config.reduce_dtype", str),
    "train_batch_size": Mapped("batch", Count),
    "train_micro_batch_size_per_gpu": Mapped("batch", Count),
    "gradient_accumulation_steps": Mapped("batch", Count),
    "gradient_clipping": Mapped("gradient_clipping", Amount),
    "optimizer.type": Mapped("optimizer", str),
    "optimizer.params": Mapped("optimizer", Any),
    "scheduler.type": Mapped("scheduler", str),
    "scheduler.params": Mapped("scheduler", Any),
}

# What is passed on to an optimizer has any type, but for these.
TYPES: Mapping[str, Any] = {
    **{name: setting.type for name, setting in MAPPED.items()},
    "optimizer.params.lr": Amount,
    "optimizer.params.eps": Amount,
    "optimizer.params.weight_decay": Amount,
    "optimizer.params.torch_adam": bool,
    "optimizer.params.adam_w_mode": bool,
    "optimizer.params.bias_correction": bool,
}

# Names that DeepSpeed also takes, by the one that is read.
ALIASES = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_prefetch_bucket_size": "zero_optimization.prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold": "zero_optimization.param_persistence_threshold",
    "zero_optimization.stage3_model_persistence_threshold": "zero_optimization.model_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters": "zero_optimization.max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance": "zero_optimization.max_reuse_distance",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_module_granularity_threshold": "zero_optimization.module_granularity_threshold",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "zero_optimization.use_all_reduce_for_fetch_params",
    "zero_optimization.stage3_allgather_sequential": "zero_optimization.allgather_sequential",
}

UNUSED = {
    "activation_checkpointing": "it configures deepspeed.checkpointing, which the model would have to call",
    "aio": "nothing is kept on NVMe",
    "autotuning": "a launcher's search; zerofx.plan(...).fastest searches without running",
    "bf16.immediate_grad_update": "gradients are reduced as a backward makes them",
    "checkpoint": "checkpoints load at any stage and world size",
    "comet": _MEASURING,
    "comms_logger": _MEASURING,
    "compile": "forward and backward are compiled in any case",
    "csv_monitor": _MEASURING,
    "data_types.buffer_dtype": "buffers keep the dtype that the model gives them",
    "data_types.grad_accum_dtype": "gradients add up in the dtype of their parameter",
    "data_types.keep_in_fp32_modules": "buffers keep the dtype that the model gives them",
    "data_types.param_dtype": "parameters keep the dtype that the model gives them, and compute in config.param_dtype",
    "dataloader_drop_last": "your DataLoader decides it",
    "datastates_ckpt": "checkpoints are torch.distributed.checkpoint's",
    "disable_allgather": _LAYOUT,
    "disable_python_gc": _TRAINING_LOOP,
    "dump_state": _MEASURING,
    "flops_profiler": _MEASURING,
    "gradient_predivide_factor": "gradients are averaged, wherever the division is made",
    "log_level": _MEASURING,
    "managed_gradient_accumulation": _TRAINING_LOOP,
    "memory_breakdown": _MEASURING,
    "optimizer.legacy_fusion": "optimizers are torch's",
    "pipeline": "it configures DeepSpeed's PipelineModule",
    "prescale_gradients": "gradients are averaged, wherever the division is made",
    "seq_parallel_communication_data_type": _OTHER_PARALLELISM,
    "steps_per_print": _MEASURING,
    "tensorboard": _MEASURING,
    "timers": _MEASURING,
    "use_data_before_expert_parallelism": _OTHER_PARALLELISM,
    "vocabulary_size": "it only warns of sizes that tensor cores dislike",
    "wall_clock_breakdown": _MEASURING,
    "wandb": _MEASURING,
    "zero_allow_untested_optimizer": "any torch optimizer works on the shards",
    "zero_force_ds_cpu_optimizer": "optimizers are torch's",
    "zero_optimization.allgather_partitions": _LAYOUT,
    "zero_optimization.allgather_sequential": _LAYOUT,
    "zero_optimization.compute_grad_norm": "torch.nn.utils.clip_grad_norm_ returns the norm where it is asked for",
    "zero_optimization.contiguous_gradients": _LAYOUT,
    "zero_optimization.cpu_offload_use_pin_memory": "nothing is offloaded",
    "zero_optimization.elastic_checkpoint": "checkpoints load at any stage and world size",
    "zero_optimization.enable_sanity_checks": "each compiled program is verified in any case",
    "zero_optimization.gather_16bit_weights_on_model_save": "a full state dict can be had at any time",
    "zero_optimization.ignore_unused_parameters": "the gradient of an unused parameter is None",
    "zero_optimization.leaf_module": "the forward is traced, so no module needs to be treated as a leaf",
    "zero_optimization.legacy_stage1": "there is one implementation of stage 1",
    "zero_optimization.load_from_fp32_weights": "masters are the parameters themselves",
    "zero_optimization.log_trace_cache_warnings": _MEASURING,
    "zero_optimization.memory_efficient_linear": "whole weights are gathered again for the backward in any case",
    "zero_optimization.model_persistence_threshold": "what stays whole is bounded by its own size, and by config.memory_limit_bytes",
    "zero_optimization.module_granularity_threshold": "buckets are formed by block and size",
    "zero_optimization.override_module_apply": "parameters are sharded once the model is built",
    "zero_optimization.parameter_alignment": _LAYOUT,
    "zero_optimization.pipeline_loading_checkpoint": _OTHER_PARALLELISM,
    "zero_optimization.reduce_scatter": "gradients are reduce-scattered in any case",
    "zero_optimization.round_robin_gradients": "nothing is offloaded",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "state that is offloaded is in memory while a step is working on it",
    "zero_optimization.sub_group_size": "with offload, config.offload.window_bytes bounds what a step works on at once",
    "zero_optimization.use_all_reduce_for_fetch_params": _LAYOUT,
    "zero_optimization.use_multi_rank_bucket_allreduce": _LAYOUT,
}

_OFFLOAD = Refusal(
    "model states stay on the device, or go to disk",
    'leave it out, or set its device to "none" or "nvme"',
    (None, False, "none", "nvme"),
    "device",
)
# What each of DeepSpeed's tables keeps on NVMe, in terms of zerofx: the update runs where the state is, so the gradients follow it.
OFFLOADED = {
    "zero_optimization.offload_optimizer": ("optimizer", "gradients"),
    "zero_optimization.offload_param": ("parameters",),
}
_QUANTIZED = Refusal("what travels is not quantized", _LEAVE_OUT)
_MASTERS = Refusal(
    "parameters are the masters, in the dtype that the model gives them", "convert the model before zerofx.compile, and leave this out"
)
_REMOVED = Refusal("DeepSpeed has removed it too", _LEAVE_OUT)
_EXPERTS = Refusal(_OTHER_PARALLELISM, _LEAVE_OUT)

REFUSED = {
    "amp": Refusal("apex is not used", 'use "bf16" or "fp16"'),
    "bf16.bf16_master_weights_and_grads": _MASTERS,
    "bf16.bf16_optimizer_states": _MASTERS,
    "compression_training": Refusal(_REMOVED.why, _LEAVE_OUT, switch=""),
    "curriculum_learning": _REMOVED,
    "data_efficiency": Refusal("it samples data and drops tokens inside DeepSpeed's engine", "leave it out, and sample in your DataLoader"),
    "eigenvalue": _REMOVED,
    "elasticity": _REMOVED,
    "expert_parallel": _EXPERTS,
    "fp16.fp16_master_weights_and_grads": _MASTERS,
    "gradient_allreduce_op": Refusal("gradients are averaged over ranks", "scale the loss, or leave it out", off=("mean",)),
    "graph_harvesting": _REMOVED,
    "hybrid_engine": Refusal("it switches between training and generation inside DeepSpeed's engine", _LEAVE_OUT),
    "nebula": _REMOVED,
    "progressive_layer_drop": _REMOVED,
    "quantize_training": _REMOVED,
    "sequence_parallel_size": Refusal(_OTHER_PARALLELISM, _LEAVE_OUT, off=(1,)),
    "sparse_attention": Refusal(_REMOVED.why, _LEAVE_OUT, switch=""),
    "sparse_gradients": _REMOVED,
    "tensor_parallel": Refusal(_OTHER_PARALLELISM, _LEAVE_OUT, switch=""),
    "torch_autocast": Refusal("autocast is torch's", "call the model within torch.autocast(...), and leave this out"),
    "weight_quantization": Refusal("weights are not quantized", _LEAVE_OUT, switch=""),
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.mics_hierarchical_params_gather": _REMOVED,
    "zero_optimization.mics_shard_size": Refusal(_REMOVED.why, _LEAVE_OUT, off=(-1,)),
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.zenflow": Refusal("nothing is offloaded, so there is nothing to hide", _LEAVE_OUT, switch=""),
    "zero_optimization.zero_hpz_partition_size": Refusal("shards are cut over all ranks", _LEAVE_OUT, off=(0, 1)),
    "zero_optimization.zero_quantized_gradients": _QUANTIZED,
    "zero_optimization.zero_quantized_nontrainable_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_weights": _QUANTIZED,
    "zero_optimization.zeropp_loco_param": Refusal(_REMOVED.why, _LEAVE_OUT, switch=""),
}
