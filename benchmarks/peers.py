"""The peers: the same step by plain torch, DistributedDataParallel, FSDP2, DeepSpeed, DTensor and torch's pipelining.

It is: one function a peer, each giving a `step()` that returns the loss (None on pipeline stages that have none). It
is not: Lightning (`ours.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from work import Work, build, global_batch, loss_fn, optimizer

Step = Callable[[], float | None]


def rank_batch(work: Work) -> tuple[Tensor, Tensor]:
    """This rank's share of the batch when all ranks are data-parallel."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tokens, targets = global_batch(work)
    return tokens.chunk(world)[rank], targets.chunk(world)[rank]


def plain_step(model: nn.Module, work: Work) -> Step:
    """Forward, backward, AdamW."""
    tokens, targets = rank_batch(work)
    adamw = optimizer(model, work)

    def step() -> float:
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.item()

    return step


def torch_single(work: Work) -> Step:
    """One process."""
    return plain_step(build(work), work)


def torch_ddp(work: Work) -> Step:
    """DistributedDataParallel over all ranks."""
    dist.init_process_group("gloo")
    return plain_step(nn.parallel.DistributedDataParallel(build(work)), work)


def torch_fsdp(work: Work, reshard: bool) -> Step:
    """fully_shard on every block and on the whole; `reshard`: weights are let go of after each block's forward."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(work)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard and part is not model)
    return plain_step(model, work)


def deepspeed_zero(work: Work, stage: int) -> Step:
    """Bare DeepSpeed at one ZeRO stage."""
    import deepspeed

    # Not needed for training, and built for minutes at the first use on a CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    tokens, targets = rank_batch(work)
    model = build(work)
    config = {
        "train_micro_batch_size_per_gpu": tokens.shape[0],
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # absent would mean 1.0
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer(model, work))

    def step() -> float:
        loss = loss_fn(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def torch_tp(work: Work) -> Step:
    """DTensor tensor parallelism over all ranks, the loss on sharded logits."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(work)
    plan = {
        "emb": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("attn.q", "attn.k", "attn.v", "gate", "up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("attn.o", "down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    tokens, targets = global_batch(work)
    adamw = optimizer(model, work)

    def step() -> float:
        with loss_parallel():
            loss = loss_fn(model(tokens), targets)
            loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.full_tensor().item()

    return step


def torch_pp(work: Work) -> Step:
    """torch.distributed.pipelining, 1F1B, one stage a rank, as many layers on each."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(work)
    each = work.layers // world
    model.blocks = nn.ModuleList(list(model.blocks)[rank * each : (rank + 1) * each])
    first, last = rank == 0, rank == world - 1
    if not first:
        model.emb = None
    if not last:
        del model.norm
        model.head = None
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=work.microbatches, loss_fn=loss_fn)
    adamw = optimizer(model, work)
    tokens, targets = global_batch(work)

    def step() -> float | None:
        losses: list[Tensor] = []
        inputs = (tokens,) if first else ()
        schedule.step(*inputs, **({"target": targets, "losses": losses} if last else {}))
        adamw.step()
        adamw.zero_grad()
        return torch.stack(losses).mean().item() if last else None

    return step


PEERS: dict[str, Callable[[Work], Step]] = {
    "torch": torch_single,
    "torch-ddp": torch_ddp,
    "torch-fsdp": lambda work: torch_fsdp(work, reshard=True),
    "torch-fsdp-kept": lambda work: torch_fsdp(work, reshard=False),
    "deepspeed-zero1": lambda work: deepspeed_zero(work, 1),
    "deepspeed-zero2": lambda work: deepspeed_zero(work, 2),
    "deepspeed-zero3": lambda work: deepspeed_zero(work, 3),
    "torch-tp": torch_tp,
    "torch-pp": torch_pp,
}
