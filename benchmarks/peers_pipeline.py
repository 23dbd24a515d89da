"""The same step under other pipelines: torch.distributed.pipelining, DeepSpeed's PipelineModule, Megatron-core.

It is: one function a peer, from the work to a step, as their documentation builds it. It is not: a comparison. The
blocks are the very ones of `work.py`, except in Megatron-core, whose model is its own and starts from its own weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from peers import Step
from torch import Tensor, nn
from work import Block, Decoder, Work, build, global_batch, loss_fn, optimizer


def torch_pipeline(work: Work, schedule: str) -> Step:
    """torch.distributed.pipelining; two stages a rank where the schedule wants several."""
    from torch.distributed.pipelining import PipelineStage, schedules

    kinds: dict[str, Any] = {
        "1f1b": schedules.Schedule1F1B,
        "gpipe": schedules.ScheduleGPipe,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zb_v": schedules.ScheduleZBVZeroBubble,
    }
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    several = issubclass(kinds[schedule], schedules.PipelineScheduleMulti)
    count = 2 * world if several else world
    mine = [rank] if not several else [rank, count - 1 - rank] if schedule == "zb_v" else [rank, world + rank]
    stages = [PipelineStage(_part(work, at, count), at, count, torch.device("cpu")) for at in mine]
    pipeline = kinds[schedule](
        stages if several else stages[0], n_microbatches=work.microbatches, loss_fn=loss_fn
    )
    adamw = optimizer(nn.ModuleList(stage.submod for stage in stages), work)
    tokens, targets = global_batch(work)
    first, last = 0 in mine, count - 1 in mine

    def step() -> float | None:
        losses: list[Tensor] = []
        inputs = (tokens,) if first else ()
        pipeline.step(*inputs, **({"target": targets, "losses": losses, "return_outputs": False} if last else {}))
        adamw.step()
        adamw.zero_grad()
        return torch.stack(losses).mean().item() if last else None

    return step


def _part(work: Work, stage: int, stages: int) -> Decoder:
    """Stage `stage` of the decoder, as many layers on each."""
    model = build(work)
    each = work.layers // stages
    model.blocks = nn.ModuleList(list(model.blocks)[stage * each : (stage + 1) * each])
    if stage > 0:
        model.emb = None
    if stage < stages - 1:
        del model.norm
        model.head = None
    return model


class _Layer(nn.Module):
    """A block that brings its own rotary tables, since a DeepSpeed layer is given one tensor only."""

    def __init__(self, block: Block, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x, self.cos, self.sin)
        return out


def deepspeed_pipeline(work: Work) -> Step:
    """DeepSpeed's PipelineModule: 1F1B, ZeRO-1."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    # Not needed for training, and built for minutes at the first use on a CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = build(work)
    layers = [_Layer(block, model.cos, model.sin) for block in model.blocks]  # type: ignore[arg-type]
    with contextlib.redirect_stdout(None):
        pipeline = PipelineModule(
            [model.emb, *layers, model.norm, model.head],
            num_stages=dist.get_world_size(),
            loss_fn=loss_fn,
            partition_method="type:_Layer",
            activation_checkpoint_interval=0,
        )
    config = {
        "train_micro_batch_size_per_gpu": work.batch // work.microbatches,
        "gradient_accumulation_steps": work.microbatches,
        "gradient_clipping": 0.0,  # absent would mean 1.0
        "zero_optimization": {"stage": 1},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=pipeline, config=config, optimizer=optimizer(pipeline, work))
    tokens, targets = (t.chunk(work.microbatches) for t in global_batch(work))

    def forever() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from zip(tokens, targets, strict=True)

    batches = forever()

    def step() -> float:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            return float(engine.train_batch(data_iter=batches))

    return step


class _Stream:
    """Stands for a CUDA stream or event where Megatron-core asks for one on a CPU."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class _NoDropout:
    """Stands for Megatron-core's tracker of CUDA generators, which is idle without dropout."""

    def is_initialized(self) -> bool:
        return True

    def fork(self, *args: Any) -> Any:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}

    def reset(self) -> None: ...

    def add(self, *args: Any) -> None: ...


def _answer_cpu() -> None:
    """Let `torch.cuda` answer "cpu": Megatron-core asks it for a device in many places, and has no other switch."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.current_stream = cuda.stream = lambda *args, **kwargs: _Stream()
    cuda.Stream = cuda.Event = _Stream
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda *args, **kwargs: None
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]

    def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return made

    for name in ("zeros", "empty", "ones", "tensor", "arange", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def megatron_pipeline(work: Work) -> Step:
    """Megatron-core's GPTModel with its local layers (no Transformer Engine): 1F1B, fp32."""
    _answer_cpu()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import random as generators
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, dist.get_world_size())
    tracker: Any = generators
    tracker._CUDA_RNG_STATE_TRACKER, tracker._CUDA_RNG_STATE_TRACKER_INITIALIZED = _NoDropout(), True
    torch.manual_seed(1234)
    config = TransformerConfig(
        num_layers=work.layers,
        hidden_size=work.dim,
        num_attention_heads=work.heads,
        ffn_hidden_size=work.ffn,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=dist.get_world_size(),
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        batch_p2p_comm=False,
        overlap_p2p_comm=False,
        attention_softmax_in_fp32=False,
        deallocate_pipeline_outputs=False,
    )
    part = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        work.vocab,
        work.seq,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    part.model_type = None
    buckets = DistributedDataParallelConfig(overlap_grad_reduce=False, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, buckets, part)
    config.finalize_model_grads_func = finalize_model_grads
    adamw = optimizer(model, work)
    run = get_forward_backward_func()
    tokens, targets = (t.chunk(work.microbatches) for t in global_batch(work))
    positions = torch.arange(work.seq)[None]
    mask = torch.triu(torch.ones(1, 1, work.seq, work.seq, dtype=torch.bool), 1)

    def forward(batches: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        inputs, labels = next(batches)
        return model(inputs, positions, mask, labels=labels), lambda loss: (loss.mean(), {"loss": loss.detach().mean()})

    def step() -> float | None:
        model.zero_grad_buffer()
        results = run(
            forward_step_func=forward,
            data_iterator=iter(list(zip(tokens, targets, strict=True))),
            model=model,
            num_microbatches=work.microbatches,
            seq_length=work.seq,
            micro_batch_size=work.batch // work.microbatches,
            forward_only=False,
        )
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        adamw.step()
        for parameter in model.parameters():
            parameter.grad = None  # else the next backward adds into main_grad twice
        return float(sum(result["loss"] for result in results) / len(results)) if results else None

    return step


PIPELINES: dict[str, Callable[[Work], Step]] = {
    **{
        f"torch-pp-{name}": lambda work, name=name: torch_pipeline(work, name)  # type: ignore[misc]
        for name in ("1f1b", "gpipe", "interleaved", "zb_v")
    },
    "deepspeed-pp": deepspeed_pipeline,
    "megatron-pp": megatron_pipeline,
}
