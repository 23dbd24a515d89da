"""Bytes per axis of one training step equal the textbook: one activation per boundary and micro-batch each way,
one all-reduce of the gradients over the data axis, two all-reduces per layer each way over the tensor axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from parallax import ParallaxStrategy
from parallax.strategies.comm import AxisComm, Ledger, Traffic, wire_bytes
from parallax.strategies.mesh import coordinates
from parallax.strategies.verify.given import Given
from tests.parity.harness import Lit, loader
from tests.parity.models import BATCH, SEQ
from tests.procs import run_ranks

HIDDEN, LAYERS, FP32 = 32, 4, 4


class Count(Callback):
    """The ledger of the second step alone: the first one also exchanges descriptions."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.mesh.ledger.reset()


def traffic_rank(rank: int, world: int, layout: str) -> Any:
    strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, callbacks=[Count()],
    )  # fmt: skip
    module = Lit("plain", torch.float32)
    sizes = strategy.requested_layout.resolve(world).axis_sizes()
    trainer.fit(module, loader("plain", sizes["dp"], coordinates(rank, sizes)["dp"]))
    counts = dict(strategy.mesh.ledger.counts)
    elements = sum(p.numel() for p in module.parameters())
    tensors = sum(1 for _ in module.parameters())
    strategy.close()
    return counts, elements, tensors


def bytes_of(counts: dict[tuple[str, str, str], Traffic], axis: str, kind: str, phase: str) -> Traffic:
    return counts.get((axis, kind, phase), Traffic())


def test_pipeline_and_data_axis() -> None:
    microbatches, dp = 4, 2
    activation = BATCH // dp * SEQ * HIDDEN * FP32  # of all micro-batches of one data rank
    ranks = run_ranks(4, traffic_rank, f"pp2 dp2 mb{microbatches}", timeout=60)
    for rank, (counts, elements, tensors) in enumerate(ranks):
        first = rank < 2  # pp is the outer axis
        sent = "forward" if first else "backward"
        assert bytes_of(counts, "pp" if first else "pp_back", "send", sent) == Traffic(microbatches, activation)
        received = ("pp_back", "recv", "backward") if first else ("pp", "recv", "forward")
        assert bytes_of(counts, *received) == Traffic(microbatches, activation)
        # the gradients, and one number per parameter: whether any data rank used it
        assert bytes_of(counts, "data", "all_reduce", "step").bytes == (elements + tensors) * FP32
        # the number of valid tokens, which weighs the losses of the last stage; the loss, logged with sync_dist
        assert bytes_of(counts, "data", "all_reduce", "forward") == Traffic(2, 16)
        assert ("tp", "all_reduce", "forward") not in counts


def test_tensor_axis() -> None:
    region = BATCH * SEQ * HIDDEN * FP32
    for counts, _, _ in run_ranks(2, traffic_rank, "tp2", timeout=60):
        # attention and MLP of every layer, and the vocabulary: embedding forward, head backward
        regions = Traffic(2 * LAYERS + 1, (2 * LAYERS + 1) * region)
        # the loss over the cut vocabulary: a maximum, then a sum and the target's logit, of each token
        forward = Traffic(regions.calls + 2, regions.bytes + 3 * BATCH * SEQ * FP32)
        assert bytes_of(counts, "tp", "all_reduce", "forward") == forward
        assert bytes_of(counts, "tp", "all_reduce", "backward") == regions
        assert ("tp", "all_gather", "forward") not in counts, "logits stay cut"
        assert {axis for axis, _, _ in counts} <= {"tp", "model", "data", "pp"}


def test_wire_bytes_are_the_ring_algorithms() -> None:
    assert wire_bytes("all_reduce", 8_000, 4) == 12_000
    assert wire_bytes("all_gather", 8_000, 4) == wire_bytes("reduce_scatter", 8_000, 4) == 6_000
    assert wire_bytes("send", 8_000, 4) == 8_000
    assert wire_bytes("all_reduce", 8_000, 1) == 0


def exchanging_rank(rank: int, world: int, dtype: torch.dtype) -> None:
    comm = AxisComm("tp", range(world), rank, dist.group.WORLD, Ledger())
    everyones = [(torch.arange(6.0 * world).view(-1, 2) * (r + 1) - 7).to(dtype) for r in range(world)]
    summed = torch.stack(everyones).sum(0, dtype=torch.float64).to(dtype)
    mine = everyones[rank].clone()
    asked: list[slice] = []

    def fill(ranks: slice) -> None:
        asked.append(ranks)
        given.view(world, -1)[ranks] = mine.view(world, -1)[ranks]

    for async_op in (False, True):
        given = torch.full_like(mine, torch.nan)
        parts, part = torch.empty(world, *mine.shape, dtype=dtype), torch.empty(3, 2, dtype=dtype)
        with torch.profiler.profile() as found:
            for work in (
                comm.all_gather_into(parts, mine, async_op=async_op),
                comm.reduce_scatter_into(part, given, async_op=async_op, fill=fill),
            ):
                if work is not None:
                    work.wait()
        assert torch.equal(parts, torch.stack(everyones)) and torch.equal(part, summed.chunk(world)[rank])
        assert torch.equal(mine, everyones[rank])
        assert asked.pop() == slice(rank, rank + 1), "what stays here is computed last"
        names = [e.name for e in found.events() if e.name.startswith("gloo:")]
        assert sorted(names) == 2 * (world - 1) * ["gloo:recv"] + 2 * (world - 1) * ["gloo:send"]


def test_collectives_over_gloo_send_no_more_than_the_textbook_counts() -> None:
    """gloo's own reduce-scatter is an all-reduce: twice the bytes."""
    run_ranks(3, exchanging_rank, torch.bfloat16)


def zero_rank(rank: int, world: int) -> Any:
    return {stage: traffic_rank(rank, world, f"dp4 zero{stage}") for stage in (1, 2, 3)}


def test_zero_stages_send_what_their_paper_says() -> None:
    """Rajbhandari et al. 2020, section 7: stages 1 and 2 reduce the gradients and gather the weights; stage 3 gathers
    the weights for forward and for backward and scatters the gradients' sum."""
    for counts_by_stage in run_ranks(4, zero_rank, timeout=120):
        whole = counts_by_stage[1][1] * FP32
        for stage in (1, 2):
            counts = counts_by_stage[stage][0]
            assert bytes_of(counts, "data", "all_reduce", "step").bytes == whole + 8  # and the norm
            assert bytes_of(counts, "data", "all_gather", "step") == Traffic(1, whole)
        counts = counts_by_stage[3][0]
        assert bytes_of(counts, "data", "reduce_scatter", "step") == Traffic(1, whole)
        for phase in ("forward", "backward"):  # DeepSpeed keeps small weights, and those that are needed again soon
            assert 0.5 * whole < bytes_of(counts, "data", "all_gather", phase).bytes <= whole
        assert not [key for key in counts if key[0] == "world"]
