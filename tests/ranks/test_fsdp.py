"""FSDP2 as the data engine: what it sends to the byte, what a rank holds and when, and modules that are not tidy."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallax import ParallaxStrategy
from parallax.plugins.data.base import Clip
from parallax.plugins.data.fsdp import FSDPEngine
from parallax.strategies.comm import Traffic
from parallax.strategies.mesh import coordinates
from parallax.strategies.verify.exact import KeepDouble
from parallax.strategies.verify.given import Given
from tests.parity.harness import Lit, loader
from tests.procs import run_ranks
from tests.ranks import data_cases as cases
from tests.ranks.data_cases import FSDP
from tests.ranks.test_traffic import Count

# Bytes

BYTES = [
    ("plain", "dp4 fsdp"),
    ("plain", "dp4 fsdp mb2"),
    ("plain", "dp4 zero2 fsdp mb2"),
    ("plain", "pp2 dp2 fsdp mb4"),
    ("plain", "pp2 dp2 zero2 fsdp mb4"),
    ("plain_moe", "dp4 ep2 fsdp"),
]


def traffic_rank(rank: int, world: int) -> Any:
    found = {}
    for name, layout in BYTES:
        strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world))
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", devices=world, max_steps=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, callbacks=[Count()],
        )  # fmt: skip
        module = Lit(name, torch.float32)
        sizes = strategy.requested_layout.resolve(world).axis_sizes()
        with KeepDouble() if name == "plain_moe" else nullcontext():
            trainer.fit(module, loader(name, sizes["dp"], coordinates(rank, sizes)["dp"]))
        counts, mesh = dict(strategy.mesh.ledger.counts), strategy.mesh
        groups = {g: mesh.size(g) for g in ("data", "edp")}
        over = {n: strategy.averaged_over(n) for n, _ in module.named_parameters()}
        strategy.close()
        found[name, layout] = counts, groups, [(n, tuple(p.shape), over[n]) for n, p in module.named_parameters()]
    return found


def padded(shape: tuple[int, ...], size: int) -> int:
    """Elements of a parameter in a collective over `size` ranks: its rows filled up to a multiple of `size`."""
    if shape[0] < size and any(length % size == 0 for length in shape):
        return math.prod(shape)
    return math.ceil(shape[0] / size) * size * math.prod(shape[1:])


def test_bytes_are_those_of_the_formula() -> None:
    """ZeRO-3: layers' weights gathered in each forward and backward, the rest once a step, gradients scattered in each
    backward, or once where a pipeline may have to complete them. ZeRO-2: everything gathered once and scattered once.
    """
    for ranks in run_ranks(4, traffic_rank, timeout=100):
        for (name, layout), (counts, groups, params) in ranks.items():
            many = int(layout.split("mb")[1]) if "mb" in layout else 1
            want: dict[tuple[str, str, str], list[Traffic]] = {}
            for group, size in groups.items():
                if size == 1:
                    continue
                ours = [(n, 4 * padded(shape, size)) for n, shape, over in params if over == group]
                units: dict[str, int] = {}
                for n, nbytes in ours:
                    unit = n.split("layers.")[1].split(".")[0] if "layers." in n else "root"
                    units[unit] = units.get(unit, 0) + nbytes
                for unit, nbytes in units.items():
                    keeps, early = unit == "root" or "zero2" in layout, "zero2" not in layout and "pp" not in layout
                    forward, backward = (1, 0) if keeps else (many, many)
                    for phase, times in (("forward", forward), ("backward", backward)):
                        want.setdefault((group, "all_gather", phase), []).append(Traffic(times, times * nbytes))
                    phase, times = ("backward", many) if early else ("step", 1)
                    want.setdefault((group, "reduce_scatter", phase), []).append(Traffic(times, times * nbytes))
            totals = {k: Traffic(sum(t.calls for t in ts), sum(t.bytes for t in ts)) for k, ts in want.items()}
            got = {k: t for k, t in counts.items() if k[0] in groups and k[1] != "all_reduce"}
            assert got == {k: t for k, t in totals.items() if t.calls}, f"{name} at {layout}"
            assert counts["data", "all_reduce", "step"] == Traffic(1, 8), "the norm, and nothing else is reduced whole"


# What a rank holds


class Stack(nn.Module):
    """Blocks in a ModuleList, and what models do that FSDP has to be kept from falling over.

    A scalar parameter; a block that shares its weight with another; a weight that is not contiguous; a block with fewer
    rows than ranks; `peek`, called in the middle.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight  # type: ignore[union-attr]
        self.blocks[1].weight = nn.Parameter(self.blocks[1].weight.detach().t())  # type: ignore[union-attr]
        self.narrow = nn.ModuleList([nn.Linear(6, 2), nn.Linear(2, 6, bias=False)])
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.peek: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.narrow):
            x = x + block(x) if block in self.blocks else block(x)
        self.peek()
        return torch.tanh(x * self.frozen) * self.temperature


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack().double()


def storages(engine: Any) -> dict[str, int]:
    """Bytes of each whole weight that is there now."""
    return {n: r.unsharded_param.untyped_storage().nbytes() for n, r in engine.sharded.params.items()}


def held_rank(rank: int, world: int) -> None:
    for stage, early in ((FSDP + 2, False), (FSDP + 3, False), (FSDP + 3, True)):
        mesh, module, reference = cases.mesh_of(rank, stage, dp=world), stack(), stack()
        optimizer = cases.adamw(module)
        engine: Any = FSDPEngine()
        engine.completed_by_plugins = not early
        cases.attach(engine, module, optimizer, mesh)
        plain = cases.adamw(reference)
        assert len(engine.sharded._units) == 2 + 2 + 1, "two blocks alone, two narrow ones, the root with the tied ones"
        with torch.inference_mode():  # a sanity check of the validation comes first
            engine.forward(cases.loss_of, module, *cases.batch(9, 0, 0, torch.float64))
        assert not any(storages(engine).values())
        seen: list[dict[str, int]] = []
        module.peek = lambda found=seen, of=engine: found.append(storages(of))
        for step in range(3):
            plain.zero_grad()
            for data in range(world):
                for micro in range(2):
                    x, y = cases.batch(step, data, micro, torch.float64)
                    (cases.loss_of(reference, x, y) / (2 * world)).backward()
            for micro in range(2):
                loss = engine.forward(cases.loss_of, module, *cases.batch(step, rank, micro, torch.float64))
                engine.backward(loss / 2)
                assert bool(storages(engine)["blocks.1.weight"]) == (stage == FSDP + 2)
                record = engine.sharded.params["blocks.1.weight"]
                assert (record.unsharded_param.grad is None) == early, "gradients are reduced in backward, or whole"
            engine.reduce()
            assert not any(storages(engine).values()), "weights are whole after a step"
            want = torch.nn.utils.clip_grad_norm_(reference.parameters(), cases.CLIP.value)
            for name, p in reference.named_parameters():
                got = engine.full_grad(name)
                if p.grad is not None and got is not None:
                    scale = torch.clamp(cases.CLIP.value / (want + 1e-6), max=1.0)
                    cases.near(got * scale, p.grad, 1e-9, f"gradient of {name}")
            cases.near(engine.step(cases.CLIP).grad_norm, want, 1e-9, "norm")
            plain.step()
            for name, p in reference.named_parameters():
                cases.near(engine.full_param(name), p.detach(), 1e-9, f"{name} after step {step}")
        whole = seen[-1]
        assert whole["blocks.0.weight"] and bool(whole["blocks.1.weight"]) == (stage == FSDP + 2)
        share = engine.sharded.share("narrow.0.weight")
        assert share.numel() == 12 // world, "two rows on three ranks are cut along the other dim"
        engine.teardown()
        assert module.blocks[3].weight is module.blocks[0].weight
        assert not any(isinstance(p, DTensor) for p in module.parameters())


def test_what_a_rank_holds_and_modules_that_are_not_tidy() -> None:
    run_ranks(3, held_rank, timeout=60)


def torch_checkpoint_rank(rank: int, world: int, folder: str) -> None:
    """The module's own state dict holds DTensors, so torch's distributed checkpoint cuts them anew by itself."""
    mesh, module = cases.mesh_of(rank, FSDP + 3, dp=world), stack()
    engine = cases.make_engine(FSDP + 3, module, cases.adamw(module), mesh)
    engine.backward(engine.forward(cases.loss_of, module, *cases.batch(0, rank, 0, torch.float64)))
    engine.reduce()
    engine.step(Clip())
    want = {n: engine.full_param(n) for n, _ in module.named_parameters()}
    dcp.save({"model": module.state_dict()}, checkpoint_id=folder)
    engine.teardown()
    half = cases.mesh_of(rank, FSDP + 3, dp=world // 2, pp=2)  # another number of shares
    other = stack()
    again = cases.make_engine(FSDP + 3, other, cases.adamw(other), half)
    dcp.load({"model": other.state_dict()}, checkpoint_id=folder)
    for name, tensor in want.items():
        assert torch.equal(again.full_param(name), tensor), name
    again.teardown()


def test_torch_distributed_checkpoint_reads_and_writes_the_module(tmp_path: Path) -> None:
    run_ranks(4, torch_checkpoint_rank, str(tmp_path), timeout=60)
