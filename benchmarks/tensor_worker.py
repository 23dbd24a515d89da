"""One process of one side of `tensor.py`: runs its steps, counts what it keeps and sends; rank 0 prints a line of JSON.

Started by `tensor.py` with python (one process) or torchrun.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from work import Work, global_batch, loss_fn, optimizer

MARK = "RESULT "
Forward = Callable[[], Tensor]


class Kept:
    """Storages that autograd saves, without those of parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._own = {_local(p).untyped_storage().data_ptr() for p in parameters}
        self._found: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no address is used twice

    def __call__(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        if storage.data_ptr() not in self._own:
            self._found[storage.data_ptr()] = storage.nbytes()
            self._alive.append(tensor)
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self._found.values())


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; what torch's collectives return holds the memory in `elem` until waited for."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "elem", tensor)


class Meter:
    """Seconds, processor seconds, losses, kept bytes and collectives of a side's steps."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.total = warmup, warmup + steps
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []
        self.kept, self.calls = 0, 0
        self.formula = 1.0
        self.bytes = 1.0
        self._last = (0.0, 0.0)

    def tick(self, loss: float) -> None:
        """A step has ended."""
        self.losses.append(loss)
        now = time.perf_counter(), time.process_time()
        if len(self.losses) > self.warmup:
            self.seconds.append(now[0] - self._last[0])
            self.cpu.append(now[1] - self._last[1])
        self._last = now

    def summary(self) -> dict[str, Any]:
        """Times of this rank, processor seconds summed and kept bytes of the largest over ranks. Collective."""
        mine = {"cpu": self.cpu, "kept": self.kept}
        ranks: list[Any] = [mine]
        if dist.is_initialized():
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
        cpu = [sum(step) for step in zip(*(r["cpu"] for r in ranks), strict=True)]
        kept = max(r["kept"] for r in ranks)
        return {"seconds": self.seconds, "cpu": cpu, "losses": self.losses, "kept": kept, "calls": self.calls,
                "bytes": self.bytes, "formula": self.formula}  # fmt: skip


def count_calls(step: Callable[[], object]) -> int:
    """Collectives that gloo runs in a step."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return sum(event.name.startswith("gloo:") for event in found.events())


def loop(meter: Meter, forward: Forward, update: Callable[[], None], parameters: list[Tensor]) -> None:
    """A peer's bare training loop, then one step that is watched."""

    def step() -> float:
        loss = forward()
        loss.backward()
        update()
        return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

    for _ in range(meter.total):
        meter.tick(step())
    kept = Kept(parameters)
    with kept():
        loss = forward()
    meter.kept = kept.bytes
    loss.backward()
    update()
    meter.calls = count_calls(step)


def dtensor(work: Work, meter: Meter, *, sp: bool) -> None:
    """torch's parallelize_module, the loss on sharded logits."""
    from tensor_model import decoder
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = decoder(work, fused=True)
    stream: Any = Shard(1) if sp else Replicate()
    plan: dict[str, Any] = {
        "emb": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": tp.ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"):
        plan[f"blocks.*.{name}"] = tp.ColwiseParallel()
    for name in ("attn.o", "mlp.down"):
        plan[f"blocks.*.{name}"] = tp.RowwiseParallel(output_layouts=stream)
    if sp:
        for name in ("norm", "blocks.*.norm1", "blocks.*.norm2"):
            plan[name] = tp.SequenceParallel()
        whole = Replicate()
        plan["blocks.*.attn"] = tp.PrepareModuleInput(
            input_layouts=(stream, None, None), desired_input_layouts=(whole, None, None)
        )
        plan["blocks.*.mlp"] = tp.PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,))
    tp.parallelize_module(model, mesh, plan)
    tokens, targets = global_batch(work)
    adamw = optimizer(model, work)

    def update() -> None:
        adamw.step()
        adamw.zero_grad()

    with tp.loss_parallel():
        loop(meter, lambda: loss_fn(model(tokens), targets), update, list(model.parameters()))


def parallax(work: Work, meter: Meter, *, fused: bool, sp: bool) -> None:
    """A Trainer with `ParallaxStrategy`."""
    from tensor_model import decoder
    from tensor_ours import train

    world = int(os.environ.get("WORLD_SIZE", "1"))
    layout = f"tp{world} sp{int(sp)}" if world > 1 else "dp1"
    train(work, meter, decoder(work, fused=fused), layout)


def megatron(work: Work, meter: Meter, *, sp: bool) -> None:
    from tensor_megatron import train

    train(work, meter, sp=sp)


SIDES: dict[str, Callable[[Work, Meter], None]] = {
    "parallax unfused": lambda work, meter: parallax(work, meter, fused=False, sp=False),
    "parallax unfused sp": lambda work, meter: parallax(work, meter, fused=False, sp=True),
    "parallax fused": lambda work, meter: parallax(work, meter, fused=True, sp=False),
    "parallax fused sp": lambda work, meter: parallax(work, meter, fused=True, sp=True),
    "megatron": lambda work, meter: megatron(work, meter, sp=False),
    "megatron sp": lambda work, meter: megatron(work, meter, sp=True),
    "dtensor": lambda work, meter: dtensor(work, meter, sp=False),
    "dtensor sp": lambda work, meter: dtensor(work, meter, sp=True),
}


def main(side: str, warmup: int, steps: int, sizes: dict[str, int]) -> None:
    """Run `side` and print what it measured from rank 0."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    meter = Meter(warmup, steps)
    SIDES[side](Work(**sizes), meter)
    found = meter.summary()
    if int(os.environ.get("RANK", "0")) == 0:
        print(MARK + json.dumps(found), flush=True)
    sys.stdout.flush()
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
