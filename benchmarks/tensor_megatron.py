"""Megatron-core's side of `tensor.py`: its GPTModel by the local spec, on CPU with gloo, with the decoder's weights.

Megatron-core asks torch.cuda for its device in many places. What is replaced here answers "cpu" there; of Megatron's
own only the random-number tracker is, which needs CUDA generators and has nothing to do without dropout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_model import EPS, decoder
from tensor_worker import Meter, loop
from torch import Tensor, nn
from work import Work, global_batch, optimizer


class _Stream:
    """Stands for CUDA streams and events."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Numbers:
    """Stands for the tracker of CUDA random states."""

    def is_initialized(self) -> bool:
        return True

    def fork(self, *_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _pretend_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_, **__: None
    cuda.current_stream = lambda *_, **__: _Stream()
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda *_, **__: _Stream()
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda *_, **__: None
    for name in ("zeros", "empty", "ones", "tensor", "arange", "full"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


class ShardedNorm(nn.Module):
    """A norm whose weight Megatron sums over the tensor axis; its own plain one refuses sequence parallelism."""

    def __init__(self, config: Any = None, hidden_size: int = 0, eps: float = EPS, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPS)


def _model(work: Work, config: Any, *, sp: bool) -> nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
    if sp:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = ShardedNorm
        spec = TransformerBlockSubmodules(layer_specs=[spec] * work.layers, layer_norm=ShardedNorm)
    model: nn.Module = GPTModel(
        config,
        spec,
        work.vocab,
        work.seq,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=10000,
    )
    return model


def _copy_weights(model: Any, work: Work) -> None:
    """The decoder's weights, cut and packed as Megatron has them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = {n: p.detach() for n, p in decoder(work, fused=False).named_parameters()}

    def mine(tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor.chunk(world, dim)[rank]

    with torch.no_grad():
        model.embedding.word_embeddings.weight.copy_(mine(own["emb.weight"]))
        model.output_layer.weight.copy_(mine(own["head.weight"]))
        for i, layer in enumerate(model.decoder.layers):
            attn, mlp = f"blocks.{i}.attn", f"blocks.{i}.mlp"
            each = (-1, work.dim // work.heads)
            heads = [mine(own[f"{attn}.{n}.weight"]).unflatten(0, each) for n in ("q", "k", "v")]
            layer.self_attention.linear_qkv.weight.copy_(torch.cat(heads, 1).flatten(0, 1))
            layer.self_attention.linear_proj.weight.copy_(mine(own[f"{attn}.o.weight"], 1))
            layer.mlp.linear_fc1.weight.copy_(torch.cat([mine(own[f"{mlp}.{n}.weight"]) for n in ("gate", "up")]))
            layer.mlp.linear_fc2.weight.copy_(mine(own[f"{mlp}.down.weight"], 1))


def train(work: Work, meter: Meter, *, sp: bool) -> None:
    """Fill `meter`."""
    dist.init_process_group("gloo")
    _pretend_cuda()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(world, 1)
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = _Numbers(), True
    config = TransformerConfig(
        num_layers=work.layers,
        hidden_size=work.dim,
        num_attention_heads=work.heads,
        ffn_hidden_size=work.ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=EPS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        attention_softmax_in_fp32=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=world,
        sequence_parallel=sp,
        params_dtype=torch.float32,
    )
    model: Any = _model(work, config, sp=sp)
    _copy_weights(model, work)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    parameters = list(model.parameters())
    adamw = optimizer(model, work)
    tokens, targets = global_batch(work)
    positions = torch.arange(work.seq)[None]
    mask = torch.triu(torch.ones(1, 1, work.seq, work.seq, dtype=torch.bool), 1)

    def forward() -> Tensor:
        model.zero_grad_buffer()
        loss: Tensor = model(tokens, positions, mask, labels=targets).mean()
        return loss

    def update() -> None:
        finalize_model_grads([model])
        for p in parameters:
            p.grad = p.main_grad
        adamw.step()
        for p in parameters:  # else the next backward adds into main_grad twice
            p.grad = None

    loop(meter, forward, update, parameters)
