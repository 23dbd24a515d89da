"""The order of events in backward and forward: what is computed while a collective is on its way.

A collective's start and the wait for it are noted around the real calls on a real axis, products as torch dispatches
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallax.strategies import products
from parallax.strategies.comm import AxisComm
from tests.procs import run_ranks
from tests.ranks.test_tensor import _cut, _whole_grads
from tests.tensor_models import BATCH, HIDDEN, SEQ, Gated, build, loss_of, token_ids

LAYERS, WORLD, MLP, HEAD_DIM = 2, 2, 64, 4
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::linear")
Event = tuple[str, Any]


class Events(TorchDispatchMode):
    """What happens, in order: ("start", kind), ("wait", kind), ("product", shape of the result)."""

    def __init__(self, comm: AxisComm) -> None:
        super().__init__()
        self.seen: list[Event] = []
        for kind, name in (
            ("all_reduce", "all_reduce"), ("all_gather", "all_gather_into"), ("reduce_scatter", "reduce_scatter_into"),
        ):  # fmt: skip
            setattr(comm, name, self._noted(kind, getattr(comm, name)))

    def _noted(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            work = call(*args, **kwargs)
            if work is None:
                self.seen.append(("at once", kind))
                return None
            self.seen.append(("start", kind))
            wait = work.wait

            def waited() -> None:
                self.seen.append(("wait", kind))
                wait()

            work.wait = waited
            return work

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in PRODUCTS:
            self.seen.append(("product", tuple(out.shape)))
        return out

    def during(self, kind: str) -> list[list[tuple[int, ...]]]:
        """For each collective of `kind` that was started: shapes of the products before the wait for it."""
        found = []
        for i, event in enumerate(self.seen):
            if event == ("start", kind):
                end = self.seen.index(("wait", kind), i)
                found.append([shape for what, shape in self.seen[i:end] if what == "product"])
        return found


def _run(model: nn.Module, comm: AxisComm) -> tuple[Events, Events]:
    """Events of a forward and of its backward."""
    forward = Events(comm)
    with forward:
        loss = loss_of(model, token_ids())
    backward = Events(comm)
    with backward:
        loss.backward()
    return forward, backward


def _backward(rank: int, world: int, sequence: bool) -> dict[str, list[list[tuple[int, ...]]]]:
    model = build("llama")
    _, mesh = _cut(model, rank, world, sequence=sequence)
    _, backward = _run(model, mesh["tp"])
    return {kind: backward.during(kind) for kind in ("all_reduce", "reduce_scatter", "all_gather")}


def test_gradients_of_weights_are_computed_while_those_of_inputs_are_summed() -> None:
    """Head, then MLP and attention of each layer: the one product under way is that of the leader's own weight."""
    leaders = [(-(-101 // WORLD), HIDDEN)] + [(MLP // WORLD, HIDDEN), (8 * HEAD_DIM // WORLD, HIDDEN)] * LAYERS
    for found in run_ranks(WORLD, _backward, False):
        assert found == {"all_reduce": [[shape] for shape in leaders], "reduce_scatter": [], "all_gather": []}
    for found in run_ranks(WORLD, _backward, True):
        assert found["all_reduce"] == []
        assert found["reduce_scatter"] == [[shape] for shape in leaders]
        # the second gathering of a block's input: the input gradient of the layer that needs it first meanwhile; the
        # gathering of a row layer's gradient: that of its input for this rank's tokens
        again, mine = (BATCH * SEQ, HIDDEN), BATCH * SEQ // WORLD
        rows = [[(mine, MLP // WORLD)], [again]], [[(mine, 8 * HEAD_DIM // WORLD)], [again]]
        assert found["all_gather"] == [[again], *(sum(rows, []) * LAYERS)]


class _GatedOtherwise(Gated):
    """From its second call on it changes its input, so that what was begun for the first one's layers is of no use."""

    changes = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5).add_(0.25) if self.changes else x)


def _second_forward(rank: int, world: int) -> dict[str, list[list[tuple[int, ...]]]]:
    """Products while inputs are gathered, once a first forward of another length has shown who reads them; the second
    one's loss and gradients, of an odd number of tokens and of weights changed in place, against one process."""
    found = {}
    for name in ("llama", "gpt2", "modular"):
        losses: list[Tensor] = []
        model, want = build(name), build(name)
        if name == "modular":
            model.layers[0].mlp.__class__ = want.layers[0].mlp.__class__ = _GatedOtherwise
        plugin, mesh = _cut(model, rank, world, sequence=True)
        for each in (want, model):
            loss_of(each, token_ids()).backward()
            each.zero_grad()
            with torch.no_grad():
                for param in each.parameters():
                    param.mul_(1.25)
            if name == "modular":
                each.layers[0].mlp.changes = True
            with Events(mesh["tp"]) as events:
                losses.append(loss_of(each, token_ids()[:1]))
            found[name] = events.during("all_gather")
            losses[-1].backward()
        plugin.finalize_grads(model, mesh=mesh)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
        grads = {fqn: p.grad for fqn, p in want.named_parameters()}
        for fqn, grad in _whole_grads(model, plugin, mesh).items():
            torch.testing.assert_close(grad, grads[fqn], rtol=1e-9, atol=1e-12, msg=f"{fqn} of {name}")
    return found


def test_own_tokens_are_multiplied_while_those_of_others_arrive() -> None:
    """Five tokens over two ranks are three and two: the products of these by whatever reads the gathered input."""
    head, own = -(-101 // WORLD), (3, 2)
    for rank, found in enumerate(run_ranks(WORLD, _second_forward)):
        at = lambda *widths, own=own[rank]: [(own, width) for width in widths]  # noqa: E731
        attention, mlp = at(8 * HEAD_DIM // WORLD, *[4 * HEAD_DIM // WORLD] * 2), at(MLP // WORLD, MLP // WORLD)
        assert found["llama"] == [attention, mlp] * LAYERS + [at(head)]
        assert found["gpt2"] == [at(3 * HIDDEN // WORLD), at(4 * HIDDEN // WORLD)] * LAYERS + [at(head)]
        qkv = at((8 + 4 + 4) * HEAD_DIM // WORLD)
        assert found["modular"] == [qkv, at(48 // WORLD, 48 // WORLD), qkv, at(64 // WORLD), []]  # its norm reads it


def _pieces(rank: int, world: int) -> tuple[list[Event], list[Event]]:
    model = build("llama")
    _, mesh = _cut(model, rank, world, sequence=True, chunks=2)
    forward, backward = _run(model, mesh["tp"])
    return forward.seen, backward.seen


def test_a_piece_is_sent_while_the_next_is_computed() -> None:
    """Ten tokens over two ranks are runs of three and two of each rank's; the other rank's tokens come first where they
    are sent, this rank's where others' arrive."""
    first, second = ("product", (3, HIDDEN)), ("product", (2, HIDDEN))
    start, wait = ("start", "reduce_scatter"), ("wait", "reduce_scatter")
    sent = [first, first, start, second, second, start, wait, wait]
    start, wait = ("start", "all_gather"), ("wait", "all_gather")
    got: Callable[[int], list[Event]] = lambda width: [  # noqa: E731
        start, start, ("product", (3, width)), wait, ("product", (3, width)), ("product", (HIDDEN, width)),
        ("product", (2, width)), wait, ("product", (2, width)), ("product", (HIDDEN, width)),
    ]  # fmt: skip
    for forward, backward in run_ranks(WORLD, _pieces):
        assert _count(forward, sent) == 2 * LAYERS
        assert _count(backward, got(MLP // WORLD)) == LAYERS
        assert _count(backward, got(8 * HEAD_DIM // WORLD)) == LAYERS


def _count(seen: list[Event], part: list[Event]) -> int:
    """How often `part` happened, without anything in between."""
    return sum(seen[i : i + len(part)] == part for i in range(len(seen)))


def _narrow(rank: int, world: int) -> list[tuple[str, list[Event]]]:
    """In fp32, as if no product were too small for oneDNN; gradients against one process in fp64."""
    products.SMALLEST = 0
    out = []
    for name in ("llama", "gpt2"):
        want = build(name)
        loss_of(want, token_ids()).backward()
        grads = {fqn: p.grad for fqn, p in want.named_parameters()}
        for sequence, chunks in ((False, 1), (False, 2), (True, 1), (True, 2)):
            model = build(name).float()
            plugin, mesh = _cut(model, rank, world, sequence=sequence, chunks=chunks)
            forward, backward = _run(model, mesh["tp"])
            plugin.finalize_grads(model, mesh=mesh)
            for fqn, grad in _whole_grads(model, plugin, mesh).items():
                torch.testing.assert_close(grad.double(), grads[fqn], rtol=1e-5, atol=1e-6, msg=f"{fqn} of {name}")
            out.append((name, forward.seen + backward.seen))
    return out


def test_products_in_fp32_go_through_onednn() -> None:
    """Of every cut layer and the head: forward, gradient of the input, gradient of the weight, on every path."""
    for found in run_ranks(WORLD, _narrow):
        for name, seen in found:
            assert ("product" in [what for what, _ in seen]) is not products.is_faster(torch.ones(1)), name
