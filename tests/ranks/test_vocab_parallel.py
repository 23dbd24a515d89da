"""Vocabulary-parallel logits: every operation gives what whole logits give, and those that need not never gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from parallax import ParallaxStrategy
from parallax.plugins.tensor import TensorParallel
from parallax.plugins.tensor.logits import VocabParallelLogits
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.verify.given import Given
from tests.procs import RankError, run_ranks
from tests.tensor_models import VOCAB, build, token_ids

B, S, H, V = 2, 3, 8, 9  # 9 ids over 4 ranks: three each, and none on the last
IGNORE = -100
TARGET = torch.tensor([[0, 8, IGNORE], [3, 2, 6]])
OTHER = torch.linspace(-1, 1, B * S * V, dtype=torch.float64).view(B, S, V)


class Cube(Function):
    """An operation of the user's own that knows nothing of pieces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def _soft_cap(z: Tensor) -> Tensor:
    return torch.tanh(z / 3.0) * 3.0


def _shifted(z: Tensor) -> Tensor:
    return F.cross_entropy(z[..., :-1, :].contiguous().view(-1, V), TARGET[..., 1:].reshape(-1))


def _entropy(z: Tensor) -> Tensor:
    logs = z.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean()


def _scaled_in_place(z: Tensor) -> Tensor:
    z = z.clone()
    z.div_(2.0)
    z *= 3.0
    return F.cross_entropy(z.flatten(0, 1), TARGET.flatten())


def _overwritten(z: Tensor) -> Tensor:
    z = z.clone()
    z[:, 1, 2:4] = 0.5
    return Cube.apply(z).sum()


def _chunked(z: Tensor) -> Tensor:
    parts = [F.cross_entropy(p.reshape(-1, V), t.reshape(-1), reduction="sum") for p, t in zip(
        z.split(1, dim=1), TARGET.split(1, dim=1), strict=True)]  # fmt: skip
    return torch.stack(parts).sum()


def _weighted(z: Tensor, v: Tensor) -> Tensor:
    """A learned temperature, and a learned bias of every id."""
    return F.cross_entropy((z * v[0] + v).transpose(1, 2), TARGET, label_smoothing=0.1)


Case = Callable[..., Any]
CUT: dict[str, Case] = {
    "mean": lambda z: F.cross_entropy(z.view(-1, V), TARGET.view(-1)),
    "sum": lambda z: F.cross_entropy(z.flatten(0, 1), TARGET.flatten(), reduction="sum"),
    "none": lambda z: F.cross_entropy(z.reshape(-1, V), TARGET.reshape(-1), reduction="none"),
    "transposed": lambda z: F.cross_entropy(z.transpose(1, 2), TARGET),
    "permuted": lambda z: nn.CrossEntropyLoss(ignore_index=3)(z.permute(0, 2, 1), TARGET.clamp(min=0)),
    "mt": lambda z: F.cross_entropy(z.mT, TARGET),
    "smoothed": lambda z: F.cross_entropy(z.view(-1, V), TARGET.view(-1), label_smoothing=0.3),
    "one token": lambda z: F.cross_entropy(z[0, 1], TARGET[0, 1]),
    "shifted": _shifted,
    "masked rows": lambda z: F.cross_entropy(z[TARGET >= 0], TARGET[TARGET >= 0]),
    "soft cap": lambda z: F.cross_entropy(_soft_cap(z).view(-1, V), TARGET.view(-1)),
    "scaled": lambda z: F.cross_entropy((0.25 * z / 3 + 1).view(-1, V), TARGET.view(-1)),
    "learned": _weighted,
    "z-loss": lambda z: z.logsumexp(-1).square().mean() + torch.logsumexp(z, dim=2, keepdim=True).sum(),
    "log_softmax and nll": lambda z: F.nll_loss(F.log_softmax(z, dim=-1).view(-1, V), TARGET.view(-1)),
    "log_softmax and gather": lambda z: z.log_softmax(-1).gather(-1, TARGET.clamp(min=0).unsqueeze(-1)).sum(),
    "softmax": lambda z: (torch.softmax(z, -1) * OTHER).sum(-1).square().sum(),
    "entropy": _entropy,
    "argmax": lambda z: z.argmax(-1),
    "max": lambda z: (lambda found: found[0] * found.indices)(z.max(dim=-1)),
    "max, kept": lambda z: z.max(2, keepdim=True).values,
    "topk": lambda z: z.topk(1).values,
    "masked ids": lambda z: z.masked_fill(torch.tensor([0, 1, 0, 0, 1, 0, 0, 0, 1]).bool(), -9.0).logsumexp(-1),
    "where": lambda z: torch.where(OTHER > 0, z, OTHER).logsumexp(-1),
    "in place": _scaled_in_place,
    "chunks": _chunked,
    "cat": lambda z: torch.cat([z[:, :1], z[:, 1:]], dim=1).unsqueeze(0).logsumexp(-1),
    "used twice": lambda z: F.cross_entropy(z.view(-1, V), TARGET.view(-1)) + z.float().double().logsumexp(-1).sum(),
    "iterated": lambda z: sum(row.logsumexp(-1).sum() for row in z),
    "scores of the last token": lambda z: z[:, -1].argmax(dim=-1),
}
WHOLE: dict[str, Case] = {
    "class weights": lambda z: F.cross_entropy(z.view(-1, V), TARGET.view(-1), weight=OTHER[0, 0].abs()),
    "soft targets": lambda z: F.cross_entropy(z.view(-1, V), OTHER.view(-1, V).softmax(-1)),
    "matmul": lambda z: z @ OTHER[0].mT,
    "some ids": lambda z: z[..., [0, 3]],
    "first ids": lambda z: z[..., :3].sum(),
    "mean": lambda z: z.square().mean(),
    "view": lambda z: z.view(-1).cumsum(0),
    "own function": lambda z: Cube.apply(z).sum(),
    "overwritten": _overwritten,
    "kl": lambda z: F.kl_div(z.log_softmax(-1), OTHER.softmax(-1), reduction="batchmean"),
    "sorted": lambda z: z.sort(-1).values[..., -1],
    "numpy": lambda z: torch.from_numpy(z.detach().numpy().copy()),
}


def _whole_grad(mesh: Mesh, plugin: TensorParallel, head: nn.Linear) -> Tensor:
    out = torch.full((V, H), float("nan"), dtype=torch.float64)
    shard = plugin.param_shard("head.weight")
    assert shard is not None
    for grad, part in mesh["tp"].gather_objects((head.weight.grad, shard)):
        part.put(out, grad)
        assert not grad[grad.shape[0] - part.pad :].any(), "padding has a gradient"
    return out


def _model() -> nn.ModuleDict:
    torch.manual_seed(3)
    model = nn.ModuleDict({"embed": nn.Embedding(V, H), "head": nn.Linear(H, V)}).double()
    model.tp_plan = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}  # type: ignore[assignment]
    return model


def _cut(model: nn.Module, rank: int, world: int) -> tuple[TensorParallel, Mesh]:
    layout = Layout(tensor_parallel_size=world).resolve(world)
    mesh, plugin = Mesh.build(layout, rank), TensorParallel()
    plugin.check(layout, model)
    plugin.apply(model, mesh=mesh, layout=layout)
    return plugin, mesh


def _run(case: Case, model: nn.ModuleDict) -> tuple[Tensor, Tensor, Tensor | None]:
    """Result, gradient of the hidden states and of the learned operand (None if the case has none)."""
    model.zero_grad()
    hidden = torch.linspace(-2, 2, B * S * H, dtype=torch.float64).view(B, S, H).sin().requires_grad_()
    learned = torch.linspace(0.5, 2, V, dtype=torch.float64).requires_grad_() if case is _weighted else None
    logits = model["head"](hidden)
    assert logits.shape == (B, S, V)
    out = case(logits, learned) if learned is not None else case(logits)
    if isinstance(out, Tensor) and out.requires_grad:
        (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    gradient = torch.zeros(()) if hidden.grad is None else hidden.grad
    return out.detach(), gradient, None if learned is None else learned.grad


def _operations(rank: int, world: int) -> None:
    reference, model = _model(), _model()
    plugin, mesh = _cut(model, rank, world)
    for name, case in {**CUT, **{f"whole {k}": v for k, v in WHOLE.items()}}.items():
        wanted = _run(case, reference)
        mesh.ledger.reset()
        found = _run(case, model)
        gathered = mesh.ledger.total("tp", "all_gather").bytes
        needs_all = name.startswith("whole") or (name == "topk" and world == 4)  # a rank without ids has no best one
        assert (gathered >= B * S * V * 8) is needs_all, f"{name}: {gathered} bytes gathered"
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        if wanted[1].dim():
            torch.testing.assert_close(
                _whole_grad(mesh, plugin, model["head"]), reference["head"].weight.grad, rtol=1e-9, atol=1e-12,
                msg=lambda m, n=name: f"{n}, weight: {m}",
            )  # fmt: skip


def _autograd(rank: int, world: int) -> None:
    """The logits take part in autograd as an ordinary tensor does."""
    reference, model = _model(), _model()
    _cut(model, rank, world)
    results = []
    for net in (reference, model):
        hidden = torch.linspace(-2, 2, B * S * H, dtype=torch.float64).view(B, S, H).sin().requires_grad_()
        logits = net["head"](hidden)
        seen: list[Tensor] = []
        logits.retain_grad()
        logits.register_hook(lambda g, s=seen: s.append(g + 0))
        loss = F.cross_entropy(logits.view(-1, V), TARGET.view(-1))
        (alone,) = torch.autograd.grad(loss, logits, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()  # a graph that was kept can be used again
        again = checkpoint(lambda h, n=net: F.log_softmax(n["head"](h), -1), hidden, use_reentrant=True)
        first = hidden.grad.clone()
        again.gather(-1, TARGET.clamp(min=0).unsqueeze(-1)).sum().backward()
        kept = logits.grad
        results.append([x + 0 for x in (alone, seen[0], kept, first, hidden.grad)])
    for mine, wanted in zip(results[1], results[0], strict=True):
        mine = mine.whole() if hasattr(mine, "whole") else mine.reshape(-1).view(mine.shape)
        torch.testing.assert_close(mine * torch.ones_like(wanted), wanted, rtol=1e-9, atol=1e-12)
    with torch.inference_mode():
        assert torch.equal(model["head"](hidden).argmax(-1), reference["head"](hidden).argmax(-1))
    assert "ids" in repr(logits) and isinstance(logits, VocabParallelLogits)
    with pytest.raises(RuntimeError, match="out of bounds"):
        F.cross_entropy(logits.view(-1, V), TARGET.view(-1).clamp(min=0) + 3)


def test_two_ranks_every_operation() -> None:
    run_ranks(2, _operations)


def test_four_ranks_every_operation_the_last_of_which_holds_padding_only() -> None:
    run_ranks(4, _operations)


def test_the_logits_take_part_in_autograd_like_a_plain_tensor() -> None:
    run_ranks(2, _autograd)


class LargestTensor(TorchDispatchMode):
    """Notes the numbers of elements of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and type(x) is Tensor:
                self.numels.append(x.numel())
        return out


def _memory(rank: int, world: int, name: str) -> tuple[int, int, int, list[int]]:
    model, ids = build(name).float(), token_ids().repeat(8, 1)
    _cut(model, rank, world)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with LargestTensor() as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        rows = -(-VOCAB // world)
        pieces = [x.data_ptr() for x in saved if x.numel() == ids.numel() * rows]
        loss.backward()
    return max(seen.numels), ids.numel() * rows, ids.numel() * VOCAB, pieces


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_no_rank_makes_a_tensor_of_the_size_of_whole_logits_and_one_piece_is_kept(name: str) -> None:
    for largest, piece, whole, kept in run_ranks(2, _memory, name):
        assert largest <= piece < whole
        assert len(set(kept)) == 1


def _narrow(rank: int, world: int) -> None:
    """bf16 logits: sums in fp32, as whole logits have them after an upcast."""
    reference, model = _model().bfloat16(), _model().bfloat16()
    _cut(model, rank, world)
    hidden = torch.linspace(-2, 2, B * S * H).view(B, S, H).sin().bfloat16()
    grads = []
    for net in (reference, model):
        h = hidden.clone().requires_grad_()
        loss = F.cross_entropy(net["head"](h).float().view(-1, V), TARGET.view(-1))
        loss.backward()
        grads.append((loss.detach(), h.grad))
    torch.testing.assert_close(grads[1][0], grads[0][0], rtol=1e-5, atol=0)
    torch.testing.assert_close(grads[1][1], grads[0][1], rtol=2e-2, atol=2e-3)  # the all-reduce rounds to bf16
    assert F.cross_entropy(model["head"](hidden).view(-1, V), TARGET.view(-1)).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert F.cross_entropy(model["head"](hidden).view(-1, V), TARGET.view(-1)).dtype is torch.float32


def test_narrow_logits() -> None:
    run_ranks(2, _narrow)


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = build("llama")

    def training_step(self, batch: Tensor, index: int) -> dict[str, Tensor]:
        out = self.net(input_ids=batch, labels=batch, use_cache=False)
        assert isinstance(out.logits, VocabParallelLogits)
        return {"loss": out.loss.double(), "logits": out.logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.seen = outputs["logits"]

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(input_ids=batch, use_cache=False).logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _leaves_the_step(rank: int, world: int, zero: int) -> None:
    strategy = ParallaxStrategy(f"tp2 zero{zero}", cluster_environment=Given(rank, world))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world, precision="64-true", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    module, data = Lit(), DataLoader(token_ids(), batch_size=2)  # type: ignore[arg-type]
    wanted = build("llama")(input_ids=token_ids(), use_cache=False).logits
    trainer.fit(module, data)
    assert type(module.seen) is Tensor
    torch.testing.assert_close(module.seen, wanted.detach(), rtol=1e-9, atol=1e-9)
    (found,) = trainer.predict(module, data)
    assert type(found) is Tensor
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-9, atol=1e-9)
    strategy.close()


@pytest.mark.parametrize("zero", [0, 1])
def test_logits_that_leave_the_step_are_whole(zero: int) -> None:
    run_ranks(2, _leaves_the_step, zero)


def _unknown_id(rank: int, world: int) -> None:
    model = _model()
    _cut(model, rank, world)
    F.cross_entropy(model["head"](torch.ones(1, H, dtype=torch.float64)), torch.tensor([V]))


def test_every_rank_refuses_a_target_outside_the_vocabulary() -> None:
    with pytest.raises(RankError, match="out of bounds") as failed:
        run_ranks(2, _unknown_id)
    assert len(failed.value.errors) == 2
