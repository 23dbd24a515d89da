"""One process of `context.py`: every side of the comparison in turn, on the same tensors; rank 0 prints a line of JSON.

A side attends to one causal sequence, forward and backward. The floor is a method with its transfers left out: the same
kernels on blocks of the same size, whose contents are not the right ones. The wire is what the floor leaves out: the
messages of a method, from and to the memory that it used, sent by a thread of their own while the floor computes, so
that neither waits for the other.

Started with python (one process) or torchrun.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_groups import CLOCKS, Recorded, Silent, now, since
from torch import Tensor
from work import Work, build, global_batch, rotate

from parallax.plugins import registry
from parallax.plugins.context.base import AttentionSpec, ContextGroups, SequenceShards
from parallax.plugins.context.traffic import AttentionShape, traffic
from parallax.strategies.comm import AxisComm, Ledger
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh

MARK = "RESULT "
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [batch, local, heads, dim] -> out, likewise: as projections give them."""
Step = Callable[..., tuple[Tensor, ...]]
"""q, k, v and the gradient of the output -> out, dq, dk, dv; or nothing."""


@dataclass
class Side:
    """What a rank does with q, k, v and the gradient of the output, and which part of the sequence it holds.

    `apart`: by clock, what a step has taken that does not count.
    """

    step: Step
    shards: SequenceShards
    right: bool = True
    apart: dict[str, float] = field(default_factory=dict)


def sides(names: list[str], tokens: int, rank: int, world: int) -> dict[str, Side]:
    """The sides called `names`: "alone", "deepspeed-ulysses", or a method, " contiguous", " floor", " floor+wire"."""
    if names == ["alone"]:
        return {"alone": Side(_both_ways(_sdpa), SequenceShards.of(tokens, 1))}
    mesh = Mesh.build(Layout(context_parallel_size=world).resolve(world), rank)
    found = {}
    for name in names:
        order = "contiguous" if "contiguous" in name or "deepspeed" in name else "zigzag"
        shards = SequenceShards.of(tokens, world, order)
        if name == "deepspeed-ulysses":
            found[name] = Side(_both_ways(_deepspeed()), shards)
        else:
            found[name] = _ours(name, shards, mesh["cp"])
    return found


def _both_ways(attend: Attend) -> Step:
    def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out = attend(q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), grad)

    return step


def _ours(name: str, shards: SequenceShards, comm: AxisComm) -> Side:
    method, last = name.split()[0], name.split()[-1]
    if last != "floor+wire":
        return _with(Silent if last == "floor" else AxisComm, method, shards, comm)
    floor, wire = _with(Silent, method, shards, comm), _with(Recorded, method, shards, comm)
    return Side(_at_once(floor.step, wire.step), shards, right=False, apart=floor.apart)


def _with(kind: type[AxisComm], name: str, shards: SequenceShards, comm: AxisComm) -> Side:
    comm = kind(comm.axis, comm.ranks, comm.rank, comm.group, Ledger())
    method = registry.load("parallax.attention", name)(ContextGroups(comm, comm, comm))
    spec = AttentionSpec()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = method(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spec, shards).transpose(1, 2)
        return out

    side = Side(_both_ways(attend), shards, right=kind is AxisComm)
    if isinstance(comm, Silent):
        comm.spent = side.apart
    if isinstance(comm, Recorded):
        side.step = _again(side.step, comm)
    return side


def _again(first: Step, comm: Recorded) -> Step:
    """The messages of `first`, which is done once."""
    comm.messages = []

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        if not comm.messages:
            return first(*tensors)
        for message in comm.messages:
            message().wait()
        return ()

    return step


def _at_once(floor: Step, wire: Step) -> Step:
    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        sender = Thread(target=wire, args=tensors)
        sender.start()
        made = floor(*tensors)
        sender.join()
        return made

    return step


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _deepspeed() -> Attend:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # built for minutes at the first use on a CPU
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    distributed = DistributedAttention(_sdpa, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: distributed(q, k, v, 0)


def peak() -> int:
    """Largest resident set of this process since `forget_peak`, in bytes."""
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+)", file.read())[1]) * 1024  # type: ignore[index]


def forget_peak() -> int:
    """Start anew with the largest resident set; returns the present one."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak()


def leaves(side: Side, sizes: dict[str, int], rank: int) -> list[Tensor]:
    """This rank's q, k, v and the gradient of the output: parts of tensors that are the same on every side."""
    out = []
    for number, heads in enumerate((sizes["heads"], sizes["kv_heads"], sizes["kv_heads"], sizes["heads"])):
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(1, sizes["tokens"], heads, sizes["dim"], generator=generator)
        out.append(side.shards.take(whole, rank, 1).clone().requires_grad_(number < 3))
    return out


def attention(names: list[str], sizes: dict[str, int], rounds: int, rank: int, world: int) -> dict[str, Any]:
    """Seconds, CPU seconds and memory of every side, in rounds; and numbers that must agree between them."""
    found = sides(names, sizes["tokens"], rank, world)
    results: dict[str, Any] = {name: {clock: [] for clock in CLOCKS} | {"check": None} for name in found}
    for at in range(max(rounds, 1) + 1):  # the first is for warming up
        for name in list(found) if at % 2 else list(found)[::-1]:
            side, mine = found[name], results[name]
            before = forget_peak()
            tensors = leaves(side, sizes, rank)
            side.apart.update(dict.fromkeys(CLOCKS, 0.0))
            if world > 1:
                dist.barrier()
            start = now()
            made = side.step(*tensors)
            took = since(start)
            if world > 1:
                dist.barrier()
            took["seconds"] = since(start)["seconds"]  # of the slowest rank
            if at:
                for clock in CLOCKS:
                    mine[clock].append(took[clock] - side.apart[clock])
            mine["memory"] = peak() - before
            if side.right:
                out, *grads = made
                squares = [float(g.double().square().sum()) for g in grads]
                mine["check"] = [float((out.double() * tensors[3]).sum()), *squares]
                del out, grads
            del tensors, made
    return results


def decoder(name: str, sizes: dict[str, int], rank: int, world: int) -> int:
    """Bytes that one forward and backward of a decoder adds to a rank that holds 1/world of the sequence."""
    work = Work(layers=sizes["layers"], dim=sizes["width"], heads=8, ffn=4 * sizes["width"], vocab=1024,
                seq=sizes["tokens"], batch=1)  # fmt: skip
    model, (tokens, targets) = build(work), global_batch(work)
    tables = model.cos, model.sin
    method: Any = None
    if world > 1:
        groups = ContextGroups.of(Mesh.build(Layout(context_parallel_size=world).resolve(world), rank))
        method = registry.load("parallax.attention", name)(groups)

    def step(length: int) -> None:
        shards = SequenceShards.of(length, world)
        mine, wanted = (shards.take(x[:, :length], rank, 1) for x in (tokens, targets))
        model.cos, model.sin = (shards.take(x[:length], rank, 0) for x in tables)
        for block in model.blocks if world > 1 else ():
            block.attn.forward = _cut(block.attn, lambda q, k, v: method(q, k, v, AttentionSpec(), shards))
        F.cross_entropy(model(mine).flatten(0, 1), wanted.flatten(), reduction="sum").backward()

    step(64)  # what libraries and connections take once is no part of the answer
    before = forget_peak()
    step(work.seq)
    return peak() - before


def _cut(attn: Any, attend: Attend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for p in (attn.q, attn.k, attn.v))
        return attn.o(attend(rotate(q, cos, sin), rotate(k, cos, sin), v).transpose(1, 2).flatten(2))

    return forward


def formulas(names: list[str], sizes: dict[str, int], world: int) -> dict[str, Any]:
    """Payload bytes of each method by formula: tests hold the ledger against them."""
    shape = AttentionShape(1, sizes["heads"], sizes["kv_heads"], sizes["dim"], sizes["dim"])
    return {
        name: sum(t.bytes for (_, kind, _), t in traffic(name, shape, AttentionSpec(),
                  SequenceShards.of(sizes["tokens"], world)).items() if kind != "recv")
        for name in names if name in ("ring", "ulysses", "all_gather")
    }  # fmt: skip


def main(what: str, names: list[str], sizes: dict[str, int], rounds: int) -> None:
    """Run `what` ("attention" or "decoder") and print what all ranks found from rank 0."""
    warnings.filterwarnings("ignore")
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    whole = what == "decoder"
    found: Any = decoder(names[0], sizes, rank, world) if whole else attention(names, sizes, rounds, rank, world)
    everyone = [found]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, found)
    if rank == 0:
        payload = {} if whole else formulas(names, sizes, world)
        print(MARK + json.dumps({"ranks": everyone, "payload": payload}), flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))
