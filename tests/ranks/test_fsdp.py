"""FSDP2 as the data engine: what a rank holds and when, and modules that are not tidy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallax.plugins.data.base import Clip
from parallax.plugins.data.fsdp import FSDPEngine
from tests.procs import run_ranks
from tests.ranks import data_cases as cases
from tests.ranks.data_cases import FSDP

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
