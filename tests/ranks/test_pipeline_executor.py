"""The executor on real ranks: order and overlap as the lists say, what is held and sent to the byte, any structure.

Each set of processes runs many lists one after the other; the right values come from one process, the simulator, or a
closed formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.plugins.data.replicated import ReplicatedEngine
from parallax.plugins.pipeline.actions import placement
from parallax.plugins.pipeline.catalog import find_schedule, make_lists
from parallax.plugins.pipeline.executor import Executor
from parallax.plugins.pipeline.plugin import PipelineParallel
from parallax.plugins.pipeline.routes import incoming, route
from parallax.plugins.pipeline.simulator import simulate
from parallax.plugins.pipeline.timeline import Timeline, gather
from parallax.plugins.pipeline.transfer import DESCRIPTION_BYTES, Transfer
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.procs import run_ranks
from tests.random_schedules import turned_in_disorder
from tests.ranks.saved import Saved

CPU, FP64 = torch.device("cpu"), torch.float64
SCHEDULES = (
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v",
)  # fmt: skip
WIDTH, ROWS = 6, 2


class Layer(nn.Module):
    """Hands on four tensors in a structure: two with gradient, a mask that changes, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, state: tuple[Tensor, dict[str, Any]]) -> tuple[Tensor, dict[str, Any]]:
        x, more = state
        x = x + self.b(torch.tanh(self.a(x))) * more["mask"].unsqueeze(-1)
        age = more["age"] + 1
        return x, {"mask": more["mask"].roll(1, 1), "age": age, "pooled": (more["pooled"][0] + x.mean(1) * age,)}


class Wanderer(nn.Module):
    """A model whose layers return more than hidden states."""

    pp_plan = {"embed": None, "layers": None, "head": None}

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        state: Any = (x, {"mask": ids % 3 != 0, "age": torch.zeros((), dtype=torch.int32), "pooled": (x.mean(1) * 0,)})
        for layer in self.layers:
            state = layer(state)
        x, more = state
        return self.head(torch.cat([x.mean(1), more["pooled"][0]], -1))


def build(depth: int) -> Wanderer:
    torch.manual_seed(2)
    return Wanderer(depth).to(FP64)


def inputs(lengths: Sequence[int]) -> list[Tensor]:
    gen = torch.Generator().manual_seed(5)
    return [torch.randint(0, 11, (ROWS, length), generator=gen) for length in lengths]


class Rank:
    """One rank of a pipeline without a trainer around it."""

    def __init__(self, rank: int, world: int, schedule: Any, v: int | None, *, depth: int, **layout: Any) -> None:
        self.schedule = find_schedule(schedule) if isinstance(schedule, str) else schedule
        named = {"schedule": schedule} if isinstance(schedule, str) else {}
        asked = Layout(pipeline_parallel_size=world, stages_per_rank=v, num_microbatches=4, **named, **layout)
        self.mesh = Mesh.build(asked.resolve(world), rank)
        self.model, plugin = build(depth), PipelineParallel(schedule=self.schedule)
        plugin.check(self.mesh.layout, self.model)
        plugin.apply(self.model, mesh=self.mesh, layout=self.mesh.layout)
        plugin.finish(self.model)
        self.data, self.v, self.placement = ReplicatedEngine(), v, plugin.placement
        self.data.setup(self.model, None, mesh=self.mesh, layout=self.mesh.layout, owned=lambda fqn: True)
        self.transfer = Transfer(self.mesh["pp"], self.mesh["pp_back"], CPU)
        recompute = self.mesh.layout.recompute == "stage"
        self.executor = Executor(self.data, self.mesh.ledger, plugin.state, self.transfer, recompute=recompute)

    def train(self, batches: list[Tensor]) -> dict[str, Any]:
        """One pass; what it held, sent and computed."""
        lists = make_lists(self.schedule, self.mesh.size("pp"), len(batches), self.v)
        way = route(lists, self.placement, self.mesh.index("pp"))
        self.mesh.ledger.reset()
        self.model.zero_grad()
        losses: dict[int, float] = {}

        def loss_of(index: int, output: Tensor) -> Tensor:
            loss = output.square().sum()
            losses[index] = loss.item()
            return loss

        keys = [tuple(batch.shape) for batch in batches]
        with Saved(self.model) as saved:
            self.executor.run(way, lambda i: self.model(batches[i]), keys, loss_of)
        ledger = self.mesh.ledger
        return {
            "losses": losses,
            "grads": {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None},
            "in_flight": self.executor.peak.in_flight,
            "saved": saved.peak,
            "postponed_bytes": self.executor.peak.postponed_bytes,
            "sent": sum(ledger.total(axis, "send").bytes for axis in ("pp", "pp_back")),
        }


@pytest.fixture(scope="module")
def reference() -> Callable[..., tuple[list[float], dict[str, Tensor]]]:
    """One process."""

    def run(depth: int, batches: list[Tensor]) -> tuple[list[float], dict[str, Tensor]]:
        model = build(depth)
        losses = [model(batch).square().sum() for batch in batches]
        torch.stack(losses).sum().backward()
        return [loss.item() for loss in losses], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return run


def assert_same(ranks: list[dict[str, Any]], want: tuple[list[float], dict[str, Tensor]]) -> None:
    losses = {i: loss for rank in ranks for i, loss in rank["losses"].items()}
    assert [losses[i] for i in sorted(losses)] == pytest.approx(want[0], rel=1e-12)
    grads = {name: grad for rank in ranks for name, grad in rank["grads"].items()}
    assert grads.keys() == want[1].keys()
    for name, grad in want[1].items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-11, atol=1e-11, msg=name)


LENGTHS = [5, 5, 9, 5, 9]


def many_shapes(rank: int, world: int) -> dict[Any, Any]:
    out = {}
    for name, v in (("1f1b", None), ("interleaved_1f1b", 2), ("zb_v", None), ("disorder", 3)):
        one = Rank(rank, world, turned_in_disorder if name == "disorder" else name, v, depth=6)
        out[name] = [one.train(inputs(lengths)) for lengths in (LENGTHS, LENGTHS, [7])]
        out[name, "edges"] = sum(a != b for a, b in zip(one.placement, one.placement[1:], strict=False))
        made = [one.transfer.buffers.made]
        for _ in range(2):
            one.train(inputs(LENGTHS))
            made.append(one.transfer.buffers.made)
        out[name, "made"] = made
        out[name, "kept"] = kept_aliases(one)
        one.mesh.close()
    return out


@pytest.fixture(scope="module")
def shapes() -> list[dict[Any, Any]]:
    return run_ranks(2, many_shapes, timeout=90)


def kept_aliases(one: Rank) -> tuple[int, int]:
    """(hidden states of layers that somebody keeps over three runs, how many of them still have their values)."""
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(layer: nn.Module, args: Any) -> None:
        kept.append((args[0][0].detach(), args[0][0].detach().clone()))

    here = [layer for layer in one.model.layers if isinstance(layer, Layer)]
    hooks = [layer.register_forward_pre_hook(keep) for layer in here]
    for _ in range(3):
        one.train(inputs(LENGTHS))
    for hook in hooks:
        hook.remove()
    return len(kept), sum(torch.equal(alias, copy) for alias, copy in kept)


NAMES = ("1f1b", "interleaved_1f1b", "zb_v", "disorder")


@pytest.mark.parametrize("name", NAMES)
def test_any_structure_and_shapes_that_vary_over_micro_batches(name: str, shapes: Any, reference: Any) -> None:
    for at, lengths in enumerate((LENGTHS, LENGTHS, [7])):
        assert_same([rank[name][at] for rank in shapes], reference(6, inputs(lengths)))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_sent_are_the_closed_formula(name: str, shapes: Any) -> None:
    """Per edge between ranks and micro-batch: hidden, mask, counter and pooled one way, two gradients the other.

    What tensors look like travels once per edge and new shape, and never again.
    """
    edges = shapes[0][name, "edges"]

    def expected(lengths: Sequence[int], new: int) -> int:
        with_gradient = sum(ROWS * length * WIDTH * 8 + ROWS * WIDTH * 8 for length in lengths)
        others = sum(ROWS * length * 1 + 4 for length in lengths)
        return edges * (2 * with_gradient + others + new * DESCRIPTION_BYTES)

    sent = [sum(rank[name][at]["sent"] for rank in shapes) for at in range(3)]
    assert sent == [expected(LENGTHS, 2), expected(LENGTHS, 0), expected([7], 1)]


@pytest.mark.parametrize("name", NAMES)
def test_what_somebody_keeps_of_received_tensors_is_never_written_over(name: str, shapes: Any) -> None:
    for rank in shapes:
        kept, same = rank[name, "kept"]
        assert kept >= 3 * len(LENGTHS) and same == kept


@pytest.mark.parametrize("name", NAMES)
def test_receive_buffers_are_used_again(name: str, shapes: Any) -> None:
    for rank in shapes:
        before, first, second = rank[name, "made"]
        assert first == second > before, "those of one run do for the next; others of before are gone"
    if name == "1f1b":  # on the last stage one micro-batch in work and one asked for, not five
        before, first, _ = shapes[1][name, "made"]
        assert first - before <= 2 * (2 + 2 + 1 + 1), "two hidden states and masks of each length, counters, pooled"


def every_schedule(rank: int, world: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in SCHEDULES:
        one = Rank(rank, world, name, None, depth=2 * world)
        one.train(inputs([4] * 6))
        one.executor.timeline = Timeline(CPU)
        found = one.train(inputs([4] * 6))
        out[name] = {**found, "trace": gather(one.executor.timeline, one.mesh["pp"])}
        again = Rank(rank, world, name, None, depth=2 * world, recompute="stage")
        again.train(inputs([4] * 6))
        out[f"{name} recomputed"] = {**again.train(inputs([4] * 6)), "one": again.train(inputs([4]))["saved"]}
        one.mesh.close()
        again.mesh.close()
    return out


@pytest.fixture(scope="module")
def traced() -> list[dict[str, Any]]:
    return run_ranks(3, every_schedule, timeout=170)


@pytest.mark.limit(200)
@pytest.mark.parametrize("name", SCHEDULES)
def test_actions_run_in_the_order_of_the_lists_and_after_what_they_need(name: str, traced: Any) -> None:
    lists, starts, ends = traced[0][name]["trace"]
    want = make_lists(find_schedule(name), 3, 6)
    assert lists == want
    placed = placement(want)
    end_of = {a: end for actions, times in zip(lists, ends, strict=True) for a, end in zip(actions, times, strict=True)}
    for actions, times in zip(lists, starts, strict=True):
        for before, action, start in zip([None, *actions], actions, times, strict=False):
            assert before is None or end_of[before] <= start
            needed = incoming(action, placed)
            if needed is not None:
                made = [a for k in ("F" if needed.kind == "F" else "BI") for a in end_of
                        if (a.kind, a.microbatch, a.stage) == (k, needed.microbatch, needed.stage)]  # fmt: skip
                assert len(made) == 1 and end_of[made[0]] <= start, f"{action} started before {made[0]} had ended"


@pytest.mark.limit(200)
@pytest.mark.parametrize("name", SCHEDULES)
def test_activations_held_are_the_simulators(name: str, traced: Any) -> None:
    want = simulate(make_lists(find_schedule(name), 3, 6)).peak_in_flight
    assert tuple(rank[name]["in_flight"] for rank in traced) == want


@pytest.mark.limit(200)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_with_and_without_recomputed_stages(name: str, traced: Any, reference: Any) -> None:
    want = reference(6, inputs([4] * 6))
    assert_same([rank[name] for rank in traced], want)
    assert_same([rank[f"{name} recomputed"] for rank in traced], want)
    assert sum(r[name]["sent"] for r in traced) == sum(r[f"{name} recomputed"]["sent"] for r in traced)


@pytest.mark.limit(200)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_recomputed_stages_hold_activations_of_one_micro_batch(name: str, traced: Any) -> None:
    """Not those of all in flight; the last stage is not recomputed."""
    for rank in traced:
        one = rank[f"{name} recomputed"]["one"]
        assert one > 0 and rank[name]["saved"] == rank[name]["in_flight"] * one
        again = rank[f"{name} recomputed"]
        assert again["saved"] == (rank[name]["saved"] if rank is traced[-1] else one)


@pytest.mark.limit(200)
def test_what_waits_for_the_weights_is_counted_to_the_byte(traced: Any) -> None:
    """ZB-H1: of each waiting micro-batch the inputs of its products and the gradients of their outputs."""
    lists = make_lists(find_schedule("zb_h1"), 3, 6)
    tokens = ROWS * 4
    a, b = tokens * (WIDTH + 2 * WIDTH) * 8, tokens * (2 * WIDTH + WIDTH) * 8  # x and dy of the two products
    layers, head = 2 * (a + b), ROWS * (2 * WIDTH + 3) * 8
    for rank, actions in enumerate(lists):
        waiting = most = 0
        for action in actions:
            waiting += {"I": 1, "W": -1}.get(action.kind, 0)
            most = max(most, waiting)
        each = layers + (head if rank == 2 else 0)
        assert traced[rank]["zb_h1"]["postponed_bytes"] == most * each
    assert all(rank["1f1b"]["postponed_bytes"] == 0 for rank in traced)
