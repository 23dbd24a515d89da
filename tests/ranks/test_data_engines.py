"""Data engines on real ranks: every ZeRO stage equals the one-process loop, with several forwards in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.plugins.data.base import Clip, DataEngine
from parallax.plugins.data.deepspeed import DeepSpeedEngine
from parallax.plugins.data.replicated import ReplicatedEngine
from parallax.strategies.layout import Layout
from parallax.strategies.precision import LossScale
from tests.procs import run_ranks
from tests.ranks import data_cases as cases
from tests.ranks.data_cases import (
    CLIP,
    FSDP,
    MICRO,
    STAGES,
    TOLERANCE,
    Seen,
    adamw,
    engine_run,
    engine_step,
    mesh_of,
    net,
)


def _each_stage(rank: int, world: int, case: Any, *args: Any) -> None:
    """One case at every stage; the message of a failure begins with the stage."""
    for stage in STAGES:
        try:
            case(rank, world, stage, *args)
        except AssertionError as error:
            kind = f"FSDP at ZeRO-{stage - FSDP}" if stage >= FSDP else f"ZeRO-{stage}"
            raise AssertionError(f"{kind}: {error}") from error


# Equality with one process


def _equals_plain(rank: int, world: int, stage: int, pp: int) -> None:
    mesh = mesh_of(rank, stage, dp=world // pp, pp=pp)
    for dtype in (torch.float64, torch.float32):
        reference, module = net(dtype), net(dtype)
        expected = cases.plain_run(reference, adamw(reference), world // pp)
        assert all(norm > CLIP.value for norm in expected.norms)  # clipping is at work in every step
        engine = cases.make_engine(stage, module, adamw(module), mesh, owned=lambda name: mesh["pp"].is_first)
        seen = engine_run(engine, module, mesh)
        cases.assert_same(seen, expected, TOLERANCE[dtype])
        if stage == 3:
            assert all(p.numel() == 0 for p in module.parameters()), "weights are still whole after a step"
        engine.teardown()
        assert {n: p.shape for n, p in module.named_parameters()} == {
            n: p.shape for n, p in reference.named_parameters()
        }
        after = Seen(seen.norms, seen.grads, {n: p.detach() for n, p in module.named_parameters()})
        cases.assert_same(after, expected, TOLERANCE[dtype])
        module(torch.zeros(1, cases.WIDTH, dtype=dtype)).sum().backward()  # an ordinary module again


@pytest.mark.parametrize(("world", "pp"), [(2, 1), (4, 1), (2, 2)])
def test_five_clipped_steps_equal_one_process(world: int, pp: int) -> None:
    """Two and four data ranks; and two model ranks with one data rank, where the first owns everything."""
    run_ranks(world, _each_stage, _equals_plain, pp, timeout=100)


# A model in two parts, whose first part ends inside a container


class _Leave(BaseException):
    pass


class _Stage(nn.Module):
    """Half of a model: the container of `head` is left by an exception when there is no tail."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.body = cases.Scaled() if first else nn.Linear(13, cases.CLASSES)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 13)) if first else None
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if not self.first:
            return self.body(x)
        raise _Leave(self.body(x) * self.weight)  # the backward needs the weight, although forward never ends


class _Part(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.model = _Stage(first)


def _run_part(part: nn.Module, x: Tensor) -> Tensor:
    try:
        return part.model(x)
    except _Leave as left:
        return left.args[0]


def _two_parts() -> tuple[_Part, _Part]:
    torch.manual_seed(0)
    return _Part(True).double(), _Part(False).double()


def _pp2_dp2(rank: int, world: int, stage: int) -> None:
    """Stages are played in turn: what crosses the boundary is computed by plain copies of the other half."""
    mesh = mesh_of(rank, stage, dp=2, pp=2)
    first, second = _two_parts()
    mine = first if mesh["pp"].is_first else second
    optimizer = torch.optim.AdamW(
        [
            {"params": list(mine.model.body.parameters())},
            {"params": [mine.model.weight] if mesh["pp"].is_first else []},
        ],
        lr=1e-2,
    )
    plain_first, plain_second = _two_parts()
    plain = torch.optim.AdamW([*plain_first.parameters(), *plain_second.parameters()], lr=1e-2)
    engine = cases.make_engine(stage, mine, optimizer, mesh)
    assert len(optimizer.param_groups) == 2
    for step in range(3):
        plain.zero_grad()
        outs: list[Tensor] = []
        backs: list[Tensor] = []
        for data in range(2):
            for micro in range(MICRO):
                x, y = cases.batch(step, data, micro, torch.float64)
                hidden = _run_part(plain_first, x)
                hidden.retain_grad()
                loss = nn.functional.cross_entropy(_run_part(plain_second, hidden), y) / (2 * MICRO)
                loss.backward()
                if data == mesh["data"].index:
                    outs.append(hidden.detach())
                    assert hidden.grad is not None
                    backs.append(hidden.grad * 2)  # the mean over data ranks is the engine's
        flying = []
        forwards = iter(range(MICRO))
        for action in cases.INTERLEAVED:
            if action == "F":
                micro = next(forwards)
                x, y = cases.batch(step, mesh["data"].index, micro, torch.float64)
                if mesh["pp"].is_first:
                    out = engine.forward(_run_part, mine, x)
                    flying.append((out, backs[micro]))
                else:
                    got = engine.forward(_run_part, mine, outs[micro].clone().requires_grad_())
                    flying.append((nn.functional.cross_entropy(got, y) / MICRO, None))
            else:
                out, back = flying.pop(0)
                engine.backward(out if back is None else (out * back).sum())
        engine.reduce()
        result = engine.step(CLIP)
        held = [p for group in plain.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(held, CLIP.value)
        cases.near(result.grad_norm, norm, 1e-9, f"norm of both parts in step {step}")
        plain.step()
        theirs = plain_first if mesh["pp"].is_first else plain_second
        for name, want in theirs.named_parameters():
            cases.near(engine.full_param(name), want.detach(), 1e-9, f"{name} after step {step}")
    if stage == 3:
        _nothing_left_behind(engine)
        assert mesh.ledger.total("data", "gather_objects").calls == 0  # orders are compared where they repeat only
    engine.teardown()


def _nothing_left_behind(engine: DataEngine) -> None:
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    assert isinstance(engine, DeepSpeedEngine)
    assert [engine.step_module] == FWD_MODULE_STACK
    assert not any(m._parameters._in_forward for m in engine.step_module.modules())  # type: ignore[attr-defined]
    assert all(p.numel() == 0 for p in engine.module.parameters())


def test_two_parts_on_two_data_ranks_left_in_the_middle_of_a_container() -> None:
    """The norm is that of both parts; a part without parameters of a group works; nothing piles up in ZeRO-3."""
    run_ranks(4, _each_stage, _pp2_dp2, timeout=100)


def _nothing_to_train(rank: int, world: int, stage: int) -> None:
    """The second of two stages has a frozen layer only."""
    mesh = mesh_of(rank, stage, dp=1, pp=2)
    torch.manual_seed(0)
    module = nn.Linear(2, 2).double().requires_grad_(mesh["pp"].is_first)
    optimizer = torch.optim.AdamW([{"params": [p for p in module.parameters() if p.requires_grad]}], lr=0.1)
    engine = cases.make_engine(stage, module, optimizer, mesh)
    before = engine.full_param("weight")
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    engine.backward(engine.forward(module, x).sum())
    engine.reduce()
    result = engine.step(Clip())
    assert result.grad_norm.item() == pytest.approx(6**0.5, rel=1e-12)  # four ones in the weight, two in the bias
    assert torch.equal(engine.full_param("weight"), before) != mesh["pp"].is_first
    engine.teardown()


def test_a_stage_with_nothing_to_train() -> None:
    run_ranks(2, _each_stage, _nothing_to_train, timeout=60)


# Clipping by value, loss scale, unused parameters


def _by_value(rank: int, world: int, stage: int) -> None:
    clip = Clip(0.01, "value")
    mesh, reference, module = mesh_of(rank, stage, dp=world), net(torch.float64), net(torch.float64)
    expected = cases.plain_run(reference, adamw(reference), world, clip=clip, steps=3)
    engine = cases.make_engine(stage, module, adamw(module), mesh)
    cases.assert_same(engine_run(engine, module, mesh, clip=clip, steps=3), expected, 1e-9)
    engine.teardown()


def _overflow(rank: int, world: int, stage: int) -> None:
    """Step 1 has an infinite gradient on one data rank; it is left out everywhere, and the scale is halved."""
    mesh, reference, module = mesh_of(rank, stage, dp=world), net(torch.float64), net(torch.float64)
    scale = LossScale(2.0**10)
    plain = adamw(reference)
    expected = cases.plain_run(reference, plain, world, steps=1)
    after = cases.plain_run(reference, plain, world, steps=2, first=2)
    engine = cases.make_engine(stage, module, adamw(module), mesh, scale=scale)
    seen = engine_run(engine, module, mesh, steps=1, scale=scale)
    cases.assert_same(seen, expected, 1e-9)
    out = engine.forward(cases.loss_of, module, *cases.batch(1, rank, 0, torch.float64))
    engine.backward(out * (float("inf") if rank == world - 1 else scale.value))
    engine.reduce()
    result = engine.step(CLIP)
    assert result.skipped and not torch.isfinite(result.grad_norm)
    assert scale.value == 2.0**9
    for name, weight in seen.weights.items():
        assert torch.equal(engine.full_param(name), weight), f"{name} changed in a step that was left out"
    seen = engine_run(engine, module, mesh, steps=2, first=2, scale=scale)
    cases.assert_same(seen, after, 1e-9)
    assert seen.skipped == [False, False] and scale.value == 2.0**9 and scale.good_steps == 2
    engine.teardown()


def _not_finite_without_a_scale(rank: int, world: int, stage: int) -> None:
    """Without a loss scale nothing is left out silently: as in plain torch the weights become nan."""
    mesh, module = mesh_of(rank, stage, dp=world), net(torch.float32)
    engine = cases.make_engine(stage, module, adamw(module), mesh)
    engine.backward(engine.forward(cases.loss_of, module, *cases.batch(0, rank, 0, torch.float32)) * float("inf"))
    engine.reduce()
    assert not engine.step(CLIP).skipped
    assert engine.full_param("last.weight").isnan().all()
    engine.teardown()


def _sometimes_unused(rank: int, world: int, stage: int) -> None:
    """`spare` is used on one data rank in step 0, on none in step 1, on all in step 2.

    ZeRO-3 gathers each module in its forward, so there data ranks must run the same modules.
    """
    mesh, reference, module = mesh_of(rank, stage, dp=world), net(torch.float64), net(torch.float64)
    plain, optimizer = adamw(reference), adamw(module)
    engine = cases.make_engine(stage, module, optimizer, mesh)
    for step in range(3):
        used = [step == 2 or (step == 0 and (data == world - 1 or stage == 3)) for data in range(world)]
        plain.zero_grad()
        for data in range(world):
            reference.use_spare = used[data]
            cases.loss_of(reference, *cases.batch(step, data, 0, torch.float64)).div(world).backward()
        if not any(used) and stage:  # documented: a zero gradient under ZeRO
            reference.spare.weight.grad = torch.zeros_like(reference.spare.weight)
        plain.step()
        module.use_spare = used[rank]
        engine.backward(engine.forward(cases.loss_of, module, *cases.batch(step, rank, 0, torch.float64)))
        engine.reduce()
        if step == 1 and stage == 0:
            assert engine.full_grad("spare.weight") is None
        engine.step(Clip())
        for name, want in reference.named_parameters():
            cases.near(engine.full_param(name), want.detach(), 1e-9, f"{name} after step {step}")
    engine.teardown()


@pytest.mark.parametrize("case", [_by_value, _overflow, _not_finite_without_a_scale, _sometimes_unused])
def test_step(case: Any) -> None:
    run_ranks(2, _each_stage, case, timeout=60)


# What goes around a step: learning rates, states, dtypes, other optimizers


def _learning_rate(rank: int, world: int, stage: int) -> None:
    """A scheduler made before set-up drives both groups; the optimizer object is still the user's."""
    mesh, reference, module = mesh_of(rank, stage, dp=world), net(torch.float64), net(torch.float64)
    plain, optimizer = adamw(reference), adamw(module)
    plain_lr = torch.optim.lr_scheduler.LambdaLR(plain, [lambda s: 0.5**s, lambda s: 1.0 + s])
    lr = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 0.5**s, lambda s: 1.0 + s])
    engine = cases.make_engine(stage, module, optimizer, mesh)
    for step in range(3):
        expected = cases.plain_run(reference, plain, world, steps=1, first=step)
        cases.assert_same(engine_run(engine, module, mesh, steps=1, first=step), expected, 1e-9)
        with torch.no_grad():  # a validation in between
            x, y = cases.batch(100, rank, 0, torch.float64)
            cases.near(engine.forward(cases.loss_of, module, x, y), cases.loss_of(reference, x, y), 1e-9, "loss")
        plain_lr.step()
        lr.step()
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in plain.param_groups]
    engine.teardown()


def _round_trip(rank: int, world: int, stage: int, tmp: str) -> None:
    """Two steps, save, load into new objects, three more: bit for bit the same as five."""
    for dtype in (torch.float32, torch.bfloat16):
        mesh, module = mesh_of(rank, stage, dp=world), net(dtype)
        engine = cases.make_engine(stage, module, adamw(module), mesh)
        engine_run(engine, module, mesh, steps=2)
        path = f"{tmp}/{stage}-{rank}.pt"
        torch.save({"module": engine.module_state(), "optimizer": engine.optimizer_state()}, path)
        straight = engine_run(engine, module, mesh, steps=3, first=2)
        engine.teardown()

        saved = torch.load(path, weights_only=True)
        for tensor in _tensors(saved):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if stage == 3:
            whole = sum(p.numel() for p in net(dtype).parameters())
            assert sum(t.numel() for t in _tensors(saved["module"])) < whole
        other = net(dtype, seed=1)
        again = cases.make_engine(stage, other, adamw(other), mesh)
        again.load_module_state(saved["module"])
        again.load_optimizer_state(saved["optimizer"])
        cases.assert_same(engine_run(again, other, mesh, steps=3, first=2), straight, 0.0)
        again.teardown()


def _small_parameters_stay_whole(rank: int, world: int) -> None:
    """ZeRO-3 keeps a bias of 5 in a model of 22005 whole: it must follow its shares after a step and after a load."""

    def wide() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(cases.WIDTH, 2000, bias=False), nn.Tanh(), nn.Linear(2000, cases.CLASSES))
        return layers.double()

    mesh, reference, module, other = mesh_of(rank, 3, dp=world), wide(), wide(), wide()
    expected = cases.plain_run(reference, adamw(reference), world, steps=3)
    engine = cases.make_engine(3, module, adamw(module), mesh)
    seen = engine_run(engine, module, mesh, steps=3)
    assert [n for n, p in module.named_parameters() if p.numel()] == ["2.bias"]
    cases.assert_same(seen, expected, 1e-9)
    again = cases.make_engine(3, other, adamw(other), mesh)
    again.load_module_state(engine.module_state())
    assert torch.equal(other.get_parameter("2.bias"), seen.weights["2.bias"])
    again.load_optimizer_state(engine.optimizer_state())
    more = [engine_run(e, m, mesh, steps=1, first=3) for e, m in ((engine, module), (again, other))]
    cases.assert_same(more[1], more[0], 0.0)
    engine.teardown()
    again.teardown()


def test_small_parameters_stay_whole() -> None:
    run_ranks(2, _small_parameters_stay_whole, timeout=60)


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [t for v in values for t in _tensors(v)]


def _weights_only(rank: int, world: int, stage: int) -> None:
    """Loading weights alone also replaces the masters: the next step starts from them."""
    mesh, module, other = mesh_of(rank, stage, dp=world), net(torch.bfloat16), net(torch.bfloat16, seed=1)
    engine = cases.make_engine(stage, module, torch.optim.SGD(module.parameters(), lr=0.0), mesh)
    source = cases.make_engine(stage, other, torch.optim.SGD(other.parameters(), lr=0.0), mesh)
    engine.load_module_state(source.module_state())
    engine_step(engine, module, mesh, 0)
    for name, _ in module.named_parameters():
        assert torch.equal(engine.full_param(name), source.full_param(name)), name
    engine.teardown()
    source.teardown()


def _bf16_masters(rank: int, world: int, stage: int) -> None:
    """Updates far below bf16's resolution add up in the masters: 64 x 2^-12 is seen, one is not."""
    mesh = mesh_of(rank, stage, dp=world)
    module = nn.Linear(3, 1, bias=False).bfloat16()
    nn.init.ones_(module.weight)
    engine = cases.make_engine(stage, module, torch.optim.SGD(module.parameters(), lr=2.0**-12), mesh)
    for _ in range(64):
        engine.backward(engine.forward(lambda: module(torch.ones(1, 3, dtype=torch.bfloat16)).sum()))
        engine.reduce()
        engine.step(Clip())
    assert torch.equal(engine.full_param("weight"), torch.full((1, 3), 1 - 64 * 2.0**-12, dtype=torch.bfloat16))
    engine.teardown()


def _other_optimizers(rank: int, world: int, stage: int) -> None:
    """Adagrad makes its state when created (and DeepSpeed makes a new one); SGD keeps none at first."""
    mesh = mesh_of(rank, stage, dp=world)
    for make in (
        lambda m: torch.optim.Adagrad(
            [p for p in m.parameters() if p.requires_grad], lr=0.1, initial_accumulator_value=0.5
        ),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    ):
        reference, module = net(torch.float64), net(torch.float64)
        plain, optimizer = make(reference), make(module)
        engine = cases.make_engine(stage, module, optimizer, mesh)
        plain.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.05
        expected = cases.plain_run(reference, plain, world, steps=3)
        cases.assert_same(engine_run(engine, module, mesh, steps=3), expected, 1e-9)
        engine.teardown()


def _evaluation_only(rank: int, world: int, stage: int) -> None:
    mesh, module = mesh_of(rank, stage, dp=world), net(torch.float64)
    engine = cases.make_engine(stage, module, None, mesh)
    x, y = cases.batch(0, 0, 0, torch.float64)
    with torch.no_grad():
        got = engine.forward(cases.loss_of, module, x, y)
        assert torch.equal(got, cases.loss_of(net(torch.float64), x, y))
    state = engine.module_state()
    engine.load_module_state(state)
    assert engine.optimizer_state() == {}
    engine.teardown()


def _autocast(rank: int, world: int, stage: int) -> None:
    """bf16-mixed: an autocast around the engine's forward reaches the model; parameters and gradients stay fp32."""
    mesh, module = mesh_of(rank, stage, dp=world), net(torch.float32)
    engine = cases.make_engine(stage, module, adamw(module), mesh)
    x, y = cases.batch(0, 0, 0, torch.float32)
    torch.set_autocast_enabled("cuda", True)  # the flag that makes DeepSpeed switch autocast off, on any device
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = engine.forward(module, x)
    torch.set_autocast_enabled("cuda", False)
    assert out.dtype == torch.bfloat16
    engine.backward(nn.functional.cross_entropy(out.float(), y))
    assert module.last.weight.grad is not None and module.last.weight.grad.dtype == torch.float32
    engine.reduce()
    engine.step(CLIP)
    engine.teardown()


@pytest.mark.parametrize(
    "case", [_learning_rate, _weights_only, _bf16_masters, _other_optimizers, _evaluation_only, _autocast]
)
def test_around_a_step(case: Any) -> None:
    run_ranks(2, _each_stage, case, timeout=60)


def test_saved_states_continue_bit_for_bit(tmp_path: Any) -> None:
    run_ranks(2, _each_stage, _round_trip, str(tmp_path), timeout=60)


def _recomputed(rank: int, world: int, stage: int) -> None:
    """With activation recomputation, which runs and leaves modules in the middle of a backward."""
    mesh, reference, module = mesh_of(rank, stage, dp=world), net(torch.float64), net(torch.float64)
    module.remember = "my own"
    expected = cases.plain_run(reference, adamw(reference), world, steps=2)
    engine = cases.make_engine(stage, module, adamw(module), mesh)
    module.added_later = "also mine"
    module.recompute = True
    cases.assert_same(engine_run(engine, module, mesh, steps=2), expected, 1e-9)
    if stage == 3:
        _nothing_left_behind(engine)
    engine.teardown()
    assert (module.remember, module.added_later) == ("my own", "also mine")
    for name, p in module.named_parameters():
        assert p.untyped_storage().nbytes() == p.numel() * 8 and not vars(p), f"{name} still has {list(vars(p))}"


def test_activation_recomputation() -> None:
    run_ranks(2, _each_stage, _recomputed, timeout=60)


def _whole_gradients_until_reduce(rank: int, world: int, stage: int) -> None:
    """Between backward and reduce `param.grad` is this rank's own sum, whole: plugins complete it there."""
    mesh, module, reference = mesh_of(rank, stage, dp=world), net(torch.float64), net(torch.float64)
    engine = cases.make_engine(stage, module, adamw(module), mesh)
    at_once: list[Any] = []
    if engine.accumulation is not None:
        plain = engine.accumulation.added
        engine.accumulation.added = lambda p: (at_once.append(p), plain(p))  # type: ignore[assignment, func-returns-value]
    for micro in range(2):
        cases.loss_of(reference, *cases.batch(0, rank, micro, torch.float64)).backward()
        engine.backward(engine.forward(cases.loss_of, module, *cases.batch(0, rank, micro, torch.float64)))
    for name, p in module.named_parameters():
        want = reference.get_parameter(name).grad
        if want is not None:
            assert p.grad is not None
            cases.near(p.grad, want, 1e-9, name)
            p.grad.mul_(2.0)
    assert sum(p is module.last.weight for p in at_once) == (2 if stage < 3 else 0), "by the product that makes it"
    engine.reduce()
    own = reference.last.weight.grad
    assert own is not None
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own)
    got = engine.full_grad("last.weight")
    assert got is not None
    cases.near(got, 2 * torch.stack(parts).mean(0), 1e-9, "last.weight")
    engine.teardown()  # in the middle of a step: no rank waits for another


def test_gradients_are_whole_until_they_are_reduced() -> None:
    run_ranks(2, _each_stage, _whole_gradients_until_reduce, timeout=60)


# Refusals


def _refusals(rank: int, world: int) -> list[str]:
    mesh = mesh_of(rank, 2, dp=1)
    half, mixed, single = net(torch.float16), net(torch.float32), net(torch.float32)
    mixed.norm.double()
    stranger = nn.Parameter(torch.ones(2))
    used = adamw(single)
    cases.loss_of(single, *cases.batch(0, 0, 0, torch.float32)).backward()
    used.step()
    out = []
    for module, optimizer in (
        (half, adamw(half)),
        (mixed, adamw(mixed)),
        (single, torch.optim.Adafactor(single.parameters())),
        (single, torch.optim.SGD([*single.parameters(), stranger])),
        (single, used),
    ):
        with pytest.raises(ValueError) as error:
            cases.make_engine(2, module, optimizer, mesh)
        out.append(str(error.value))
    return out


def test_what_zero_cannot_train_is_refused() -> None:
    half, mixed, adafactor, stranger, used = run_ranks(1, _refusals)[0]
    assert "torch.float16" in half and "'16-mixed'" in half
    assert "float32" in mixed and "float64" in mixed and "norm.weight" in mixed
    assert "Adafactor" in adafactor and "zero_stage 0" in adafactor
    assert "not part of the module" in stranger and "(2,)" in stranger
    assert "already holds state" in used


def test_each_engine_refuses_the_other_stages() -> None:
    with pytest.raises(ValueError, match="zero_stage 2"):
        ReplicatedEngine.check(Layout(zero_stage=2))
    with pytest.raises(ValueError, match="use data_engine='ddp'"):
        DeepSpeedEngine.check(Layout(zero_stage=0))
