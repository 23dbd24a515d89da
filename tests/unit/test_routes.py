"""What a rank asks for, and when: every message once, in its sender's order, no sooner than it can be there."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from parallax.plugins.pipeline.actions import Action, placement
from parallax.plugins.pipeline.buffers import Buffers
from parallax.plugins.pipeline.catalog import make_lists
from parallax.plugins.pipeline.routes import Message, outgoing, route
from parallax.plugins.pipeline.schedules.basic import one_f_one_b
from parallax.plugins.pipeline.schedules.looped import interleaved_1f1b
from parallax.plugins.pipeline.schedules.v_shape import zb_v
from tests.random_schedules import random_lists

LISTS = {
    "1f1b": make_lists(one_f_one_b, 4, 8),
    "interleaved": make_lists(interleaved_1f1b, 2, 5),
    "zb_v": make_lists(zb_v, 4, 6),
    **{f"random{seed}": random_lists([0, 1, 2, 2, 1, 0, 0, 1, 2], 5, seed, 0.5) for seed in range(8)},
}


@pytest.mark.parametrize("name", LISTS)
def test_receives_follow_the_senders_order_and_cover_what_is_sent(name: str) -> None:
    lists = LISTS[name]
    placed = placement(lists)
    routes = [route(lists, placed, rank) for rank in range(len(lists))]
    for source, actions in enumerate(lists):
        for target, way in enumerate(routes):
            sent = [m for a in actions if (m := outgoing(a, placed)) is not None and m.target == target != source]
            assert [m for m in way.receives if m.source == source] == sent


@pytest.mark.parametrize("name", LISTS)
def test_nobody_waits_for_ever_on_links_that_keep_order(name: str) -> None:
    """The lists run to their end when a link delivers only in order and a receive, once posted, blocks those after."""
    lists = LISTS[name]
    placed = placement(lists)
    routes = [route(lists, placed, rank) for rank in range(len(lists))]
    at, sent, moved = [0] * len(lists), set[Message](), True
    while moved:
        moved = False
        for rank, way in enumerate(routes):
            while at[rank] < len(way.steps):
                step = way.steps[at[rank]]
                due = way.receives[: way.due[at[rank]]]
                # All receives due have been posted; the needed one comes through when those before it on its link have.
                needed = step.needs
                if needed is not None and needed.source != rank:
                    link = [m for m in due if m.source == needed.source]
                    if not sent >= set(link[: link.index(needed) + 1]):
                        break
                if step.gives is not None:
                    sent.add(step.gives)
                at[rank] += 1
                moved = True
    assert at == [len(actions) for actions in lists]


def test_the_turn_of_a_v_sends_nothing() -> None:
    way = route(LISTS["zb_v"], placement(LISTS["zb_v"]), 3)
    turn = [s for s in way.steps if s.action == Action("F", 0, 4)]
    assert turn[0].needs is not None and turn[0].needs.source == turn[0].needs.target == 3
    assert not any(m.source == 3 for m in way.receives)


def steps(way: Any) -> list[str]:
    return [f"{s.action}{'/' if s.halves else ''}" for s in way.steps]


def test_halved_backwards_are_marked_where_they_are() -> None:
    lists = [[Action("F", 0, 0), Action("F", 1, 0), Action("B", 0, 0), Action("I", 1, 0), Action("W", 1, 0)]]
    assert steps(route(lists, (0,), 0)) == ["F0@0", "F1@0/", "B0@0", "I1@0/", "W1@0/"]


def test_a_buffer_is_reused_when_nobody_refers_to_its_memory() -> None:
    buffers = Buffers(torch.device("cpu"))
    first = buffers.take((1, 2, 3), torch.float32)
    leaf = first.detach().requires_grad_()
    assert buffers.give([first]) == [first], "a leaf made of it is alive"
    position = torch.nn.Parameter(torch.zeros(2, 3))
    out = leaf * 2 + position.view(1, 2, 3)
    gradient = buffers.take((1, 2, 3), torch.float32)
    assert gradient.data_ptr() != first.data_ptr()
    out.backward(gradient.fill_(1.0))
    assert position.grad is not None and position.grad.data_ptr() == gradient.data_ptr(), "autograd keeps the buffer"
    assert buffers.give([gradient]) == [gradient]
    del out, leaf
    assert buffers.give([first]) == []
    assert buffers.take((1, 2, 3), torch.float32).data_ptr() == first.data_ptr()
    assert position.grad.eq(1.0).all()


def test_buffers_of_shapes_that_are_gone_are_let_go() -> None:
    buffers = Buffers(torch.device("cpu"))
    old = buffers.take((4,), torch.float32)
    buffers.give([old])
    gone = weakref.ref(old)
    del old
    buffers.trim()
    assert gone() is not None, "taken since the last time"
    buffers.trim()
    assert gone() is None
