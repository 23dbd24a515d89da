"""One rank of `expert.py`: the same mixture-of-experts layer by Parallax, DeepSpeed and Megatron-core, in turn.

Router (softmax of the two largest scores), SwiGLU experts, forward and backward, fp32. All sides get the same weights
and tokens, and what they return is compared. Run by torchrun; prints one line with the results of all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

MARK = "RESULT "
TOP_K = 2
Side = tuple[nn.Module, Callable[[Tensor], Tensor]]


class Counted:
    """Bytes of all-to-alls, whoever calls them."""

    def __init__(self) -> None:
        self.bytes = 0
        real = dist.all_to_all_single

        def counting(*args: Any, **kwargs: Any) -> Any:
            rows = kwargs["input"] if "input" in kwargs else args[1]
            self.bytes += rows.numel() * rows.element_size()
            rest = [s.tolist() if isinstance(s, Tensor) else s for s in args[2:]]  # gloo takes lists of sizes
            kwargs = {k: v.tolist() if k.endswith("sizes") and isinstance(v, Tensor) else v for k, v in kwargs.items()}
            return real(*args[:2], *rest, **kwargs)

        dist.all_to_all_single = counting


class Weights:
    """Router [E, h]; per expert gate and up [2 f, h] and down [h, f]."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        gen = torch.Generator().manual_seed(1)
        self.router = torch.randn(experts, hidden, generator=gen) * 0.1
        self.up = torch.randn(experts, 2 * width, hidden, generator=gen) * 0.05
        self.down = torch.randn(experts, hidden, width, generator=gen) * 0.05


def parallax(w: Weights, implementation: str) -> Side:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    from parallax.plugins.expert.layers import become_experts
    from parallax.strategies.accumulation import Accumulation
    from parallax.strategies.comm import AxisComm, Ledger

    experts, hidden = w.router.shape
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=w.down.shape[2], num_local_experts=experts, num_experts_per_tok=TOP_K,
        experts_implementation=implementation,
    )  # fmt: skip
    block: Any = MixtralSparseMoeBlock(config)
    block.gate.weight.data = w.router.clone()
    rank, world = dist.get_rank(), dist.get_world_size()
    here = slice(rank * experts // world, (rank + 1) * experts // world)
    block.experts.gate_up_proj = nn.Parameter(w.up[here].clone())
    block.experts.down_proj = nn.Parameter(w.down[here].clone())
    become_experts(block.experts, AxisComm("ep", range(world), rank, dist.group.WORLD, Ledger()), None, experts)

    def call(x: Tensor) -> Tensor:
        out = block(x)
        return out[0] if isinstance(out, tuple) else out

    block.accumulation = Accumulation(block.parameters())
    return block, call


def without_onednn(side: Side) -> Side:
    """The same with `torch.mm` for every product, as the others have it."""
    from parallax.strategies import products

    layer, call = side
    usual = products._has_onednn

    def switched(x: Tensor) -> Tensor:
        products._has_onednn = lambda: False
        out = call(x)
        x.register_hook(lambda grad: setattr(products, "_has_onednn", usual))  # its gradient is the last there is
        return out

    return layer, switched


class Expert(nn.Module):
    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


def deepspeed_with_gloo() -> None:
    import deepspeed as ds

    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # built for minutes at the first use on a CPU
    ds.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def deepspeed(w: Weights) -> Side:
    from deepspeed.moe.layer import MoE

    deepspeed_with_gloo()
    rank, world, experts = dist.get_rank(), dist.get_world_size(), len(w.router)
    layer: Any = MoE(
        w.router.shape[1], expert=Expert(w.up[0], w.down[0]), num_experts=experts, ep_size=world, k=TOP_K,
        drop_tokens=False, min_capacity=0, use_rts=False, top2_2nd_expert_sampling=False,
    )  # fmt: skip
    layer.set_deepspeed_parallelism()
    layer.deepspeed_moe.gate.wg.weight.data = w.router.clone()
    for i, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
        at = rank * experts // world + i
        expert.up.data, expert.down.data = w.up[at].clone(), w.down[at].clone()
    return layer, lambda x: layer(x)[0]


def autoep(w: Weights) -> Side:
    """What DeepSpeed replaces the block of a Mixtral by, as its defaults are.

    Put together here, since replacing the whole model's blocks fails (0.19.8 with transformers 5.24, a TypeError where
    output recorders are moved); the layer is the one it puts in.
    """
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from transformers import MixtralConfig, MixtralForCausalLM

    deepspeed_with_gloo()
    rank, world, (experts, hidden) = dist.get_rank(), dist.get_world_size(), w.router.shape
    config = MixtralConfig(
        vocab_size=8, num_hidden_layers=1, hidden_size=hidden, intermediate_size=w.down.shape[2],
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=experts, num_experts_per_tok=TOP_K,
    )  # fmt: skip
    model: Any = MixtralForCausalLM(config)
    block = model.model.layers[0].mlp
    block.gate.weight.data = w.router.clone()
    block.experts.gate_up_proj.data, block.experts.down_proj.data = w.up.clone(), w.down.clone()
    asked = {"enabled": True, "autoep_size": world, "preset_model": "mixtral"}
    finder = AutoEP(model, parse_autoep_config(asked))
    (found,) = finder.ep_parser()
    layer = AutoEPMoELayer(found, block, world, rank, finder.config)
    layer.set_deepspeed_parallelism()
    return layer, layer


def megatron(w: Weights) -> Side:
    torch.cuda.current_device = lambda: "cpu"  # Megatron-core asks CUDA for a device; nothing of its own is changed
    torch.cuda.current_stream = torch.cuda.Stream = torch.cuda.Event = lambda *a, **k: _Nothing()
    torch.cuda.synchronize = lambda *a, **k: None
    torch.Tensor.cuda = lambda self, *a, **k: self
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import random as rng
    from megatron.core.transformer.transformer_config import TransformerConfig

    rank, world, experts = dist.get_rank(), dist.get_world_size(), len(w.router)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
    rng._CUDA_RNG_STATE_TRACKER, rng._CUDA_RNG_STATE_TRACKER_INITIALIZED = _Nothing(), True
    config = TransformerConfig(
        num_layers=1, hidden_size=w.router.shape[1], num_attention_heads=4, num_moe_experts=experts,
        moe_ffn_hidden_size=w.down.shape[2], ffn_hidden_size=w.down.shape[2], moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none", expert_model_parallel_size=world, moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, use_cpu_initialization=True, params_dtype=torch.float32,
    )  # fmt: skip
    make: Any = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
    layer: Any = make(config)
    layer.set_layer_number(1)
    layer.router.weight.data = w.router.clone()
    for i, expert in enumerate(layer.experts.local_experts):
        at = rank * experts // world + i
        expert.linear_fc1.weight.data, expert.linear_fc2.weight.data = w.up[at].clone(), w.down[at].clone()
    return layer, lambda x: layer(x)[0]


class _Nothing:
    device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return lambda *a, **k: self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None: ...


def step(side: Side, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weights add up; Parallax makes them where they are added, as under its data engine."""
    layer, call = side
    x = x.detach().requires_grad_()
    out = call(x)
    loss = (out * out.detach().cos()).sum()
    accumulation: Any = getattr(layer, "accumulation", None)
    with accumulation.during(loss) if accumulation is not None else nullcontext():
        loss.backward()
    assert x.grad is not None
    return out.detach(), x.grad


def kept(call: Callable[[Tensor], Tensor], x: Tensor, layer: nn.Module) -> int:
    """Bytes autograd keeps between forward and backward, weights and input left out."""
    known = {p.untyped_storage().data_ptr() for p in layer.parameters()} | {x.untyped_storage().data_ptr()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call(x)
    out.sum().backward()
    return sum(sizes.values())


def main() -> None:
    experts, hidden, width, tokens, rounds, steps = (int(a) for a in sys.argv[1:7])
    dist.init_process_group("gloo")
    counted, weights = Counted(), Weights(experts, hidden, width)
    make: dict[str, Callable[[], Side]] = {
        "parallax": lambda: parallax(weights, "grouped_mm"),
        "parallax, torch.mm": lambda: without_onednn(parallax(weights, "grouped_mm")),
        "parallax, eager": lambda: parallax(weights, "eager"),
        "deepspeed": lambda: deepspeed(weights),
        "deepspeed, AutoEP": lambda: autoep(weights),
        "megatron": lambda: megatron(weights),
    }
    gen = torch.Generator().manual_seed(7 + dist.get_rank())
    inputs = [torch.randn(1, tokens, hidden, generator=gen) for _ in range(rounds * steps)]
    x = inputs[0]
    sides, result = {}, {}
    for name, build in make.items():
        sides[name] = layer, call = build()
        out, grad = step(sides[name], x)
        counted.bytes = 0
        step(sides[name], x)
        result[name] = {"bytes": counted.bytes, "check": [float(out.double().square().sum()),
                        float(grad.double().square().sum())], "seconds": [], "cpu": [],
                        "kept": kept(call, x, layer)}  # fmt: skip
    for at in range(rounds):
        for name, side in sides.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for x in inputs[at * steps : (at + 1) * steps]:
                step(side, x)
            dist.barrier()
            result[name]["seconds"].append((time.perf_counter() - wall) / steps)
            result[name]["cpu"].append((time.process_time() - cpu) / steps)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    if dist.get_rank() == 0:
        print(MARK + json.dumps(everyone), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
