"""Words that few plans use, in a plain module on real ranks: loss and gradients equal one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.procs import run_ranks
from tests.ranks.model_parity import cut, require_close, whole_grads

H, HEADS, IDS = 6, 4, 7


class Biased(nn.Module):
    """Scores of heads with an argument for all of them, and a sink of each head by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.out = nn.Linear(H, HEADS), nn.Linear(HEADS, H)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor, bias: Tensor, flat: Tensor) -> Tensor:
        """x [b, s, h], bias [b, heads, s, 1], flat [b heads, 1, s]."""
        keys = self.keys(x).transpose(1, 2)  # [b, heads here, s]
        keys = keys + bias.squeeze(-1) + flat.view(*keys.shape[:2], -1) + self.sinks[:, None]
        return self.out(torch.tanh(keys).transpose(1, 2))


class Partial(nn.Module):
    """A gated layer whose weights are parameters by themselves: its output is partial on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(2 * 8, H))
        self.down = nn.Parameter(torch.randn(H, 8))
        self.enter = nn.Linear(H, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up * self.enter(x), self.down)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads = HEADS
        self.embed = nn.Embedding(IDS, H + 1)  # padded on two ranks
        self.first = nn.Linear(H + 1, H)
        self.attention, self.mix = Biased(), Partial()
        self.tp_plan = {
            "embed": "embedding_colwise",
            "attention": "local_params",
            "attention.keys": "colwise",
            "attention.sinks": "colwise",
            "attention.bias": "local_heads",
            "attention.flat": "local_heads",
            "attention.out": "rowwise",
            "mix": "all_reduce",
            "mix.enter": "colwise",
            "mix.gate_up": "packed_colwise",
            "mix.down": "rowwise",
        }

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embed(ids))
        b, s = ids.shape
        bias = torch.linspace(-1, 1, HEADS * s, dtype=x.dtype).view(1, HEADS, s, 1).expand(b, -1, -1, -1)
        flat = torch.linspace(0, 2, b * HEADS * s, dtype=x.dtype).view(b * HEADS, 1, s)
        x = x + self.attention(x, bias, flat=flat)  # one by position, one by name
        with torch.no_grad():
            frozen = x.clone()
        return x + self.mix(frozen)  # parameters by themselves do not take their input into the region


def _parity(rank: int, world: int) -> None:
    torch.manual_seed(0)
    reference, ids = Model().double(), torch.tensor([[0, 3, 6], [1, 1, 5]])
    torch.manual_seed(0)
    model = Model().double()
    expected = reference(ids).square().sum()
    expected.backward()
    mesh = Mesh.build(Layout(tensor_parallel_size=world, sequence_parallel=False).resolve(world), rank)
    plugins = cut(model, mesh)
    assert model.attention.sinks.shape == (HEADS // world,) and model.mix.gate_up.shape == (16 // world, H)
    assert model.embed.weight.shape == (IDS, -(-(H + 1) // world))
    loss = model(ids).square().sum()
    loss.backward()
    for plugin in plugins:
        plugin.finalize_grads(model, mesh=mesh)
    require_close(loss.detach(), expected.detach(), "loss")
    found = whole_grads(model, plugins, mesh)
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        assert wanted[name] is not None and bool(wanted[name].any())
        require_close(grad, wanted[name], f"gradient of {name}")


def test_rare_words_equal_one_process() -> None:
    run_ranks(2, _parity)
    run_ranks(4, _parity)
