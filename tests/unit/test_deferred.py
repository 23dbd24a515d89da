"""Deferred initialisation: recorded on meta, replayed per tensor, the same whatever else is computed."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parallax.plugins.base import ParamShard
from parallax.strategies.deferred import deferred_init
from parallax.strategies.materialize import materialize
from parallax.strategies.recording import Recording


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, Recording]:
    with deferred_init() as recording:
        module = make()
    recording.capture(module)
    return module, recording


def real(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    module, recording = build(make)
    materialize(module, recording, shard_of=lambda fqn: None, seed=seed, device="cpu")
    return module


def holder(**tensors: Callable[[], Tensor]) -> Callable[[], nn.Module]:
    """A module whose parameters are what the given functions return under the context."""

    def make() -> nn.Module:
        module = nn.Module()
        for name, value in tensors.items():
            setattr(module, name, nn.Parameter(value(), requires_grad=False))
        return module

    return make


def std_of(value: Tensor, expected: float) -> None:
    """The sample's standard deviation is within 5 standard errors (sigma / sqrt(2 n)) of the expected one."""
    assert value.std().item() == pytest.approx(expected, abs=5 * expected / math.sqrt(2 * value.numel()))


class Everything(nn.Module):
    """The ways modules make their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 48)
        self.embedding = nn.Embedding(50, 16, padding_idx=3)
        self.conv = nn.Conv2d(8, 16, 3)
        self.norm = nn.LayerNorm(16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.scaled = nn.Parameter(torch.randn(100, 90) * 0.02)
        self.truncated = nn.Parameter(torch.empty(120, 100))
        nn.init.trunc_normal_(self.truncated, std=0.02, a=-0.04, b=0.04)
        self.orthogonal = nn.Parameter(torch.empty(8, 16))
        nn.init.orthogonal_(self.orthogonal, gain=2.0)
        self.legacy = nn.Parameter(torch.Tensor(100, 100))
        self.legacy.data.normal_(0.0, 3.0)
        self.assigned = nn.Linear(16, 16)
        self.assigned.weight.data = torch.full((16, 16), 0.5)
        self.constant = nn.Parameter(torch.tensor([1.0, -2.0, 3.5]))
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.original_inv_freq = frequencies
        self.tables = [torch.outer(torch.arange(5), frequencies).cos(), {"sin": frequencies.sin()}]
        self.rotation = torch.polar(torch.ones(4), frequencies)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False)
        with torch.no_grad():
            self.scaled[2:4] = 7.0
            self.scaled[[0, 5]] = torch.ones(90)


def test_everything_is_on_meta_until_it_is_materialised() -> None:
    module, recording = build(Everything)
    assert all(t.is_meta for t in [*module.parameters(), *module.buffers(), module.original_inv_freq])
    materialize(module, recording, shard_of=lambda fqn: None, seed=0, device="cpu")
    assert not any(t.is_meta for t in [*module.parameters(), *module.buffers(), *module.tables[1].values()])


def test_distributions_follow_their_formulas() -> None:
    module = real(Everything)
    for weight, fan_in in ((module.linear.weight, 64), (module.linear.bias, 64), (module.conv.weight, 72)):
        bound = 1 / math.sqrt(fan_in)  # kaiming_uniform_(a=sqrt(5))
        assert weight.abs().max() <= bound
        std_of(weight, bound / math.sqrt(3))
    std_of(module.embedding.weight[4:], 1.0)
    std_of(module.scaled[6:], 0.02)
    std_of(module.legacy, 3.0)
    alpha = 2.0  # a normal cut at +- 2 sigma
    density = math.exp(-(alpha**2) / 2) / math.sqrt(2 * math.pi)
    std_of(module.truncated, 0.02 * math.sqrt(1 - 2 * alpha * density / math.erf(alpha / math.sqrt(2))))
    assert module.truncated.abs().max() <= 0.04
    torch.testing.assert_close(module.orthogonal @ module.orthogonal.T, 4 * torch.eye(8))


def test_values_without_randomness_are_those_of_a_real_construction() -> None:
    module, eager = real(Everything), Everything()
    assert torch.equal(module.embedding.weight[3], torch.zeros(16))
    assert torch.equal(module.norm.weight, torch.ones(16)) and torch.equal(module.norm.bias, torch.zeros(16))
    assert torch.equal(module.batch_norm.running_var, torch.ones(16)) and module.batch_norm.num_batches_tracked == 0
    assert torch.equal(module.assigned.weight, torch.full((16, 16), 0.5))
    assert torch.equal(module.constant, torch.tensor([1.0, -2.0, 3.5]))
    assert torch.equal(module.scaled[2:4], torch.full((2, 90), 7.0))
    assert torch.equal(module.scaled[[0, 5]], torch.ones(2, 90))
    for name in ("inv_freq", "original_inv_freq", "rotation"):
        assert torch.equal(getattr(module, name), getattr(eager, name))
    assert torch.equal(module.tables[0], eager.tables[0]) and torch.equal(
        module.tables[1]["sin"], eager.tables[1]["sin"]
    )
    assert module.original_inv_freq is module.inv_freq  # one tensor, two places
    assert "inv_freq" not in module.state_dict()


def test_a_value_is_the_same_whatever_else_is_computed() -> None:
    whole = {name: value.clone() for name, value in real(Everything, seed=5).state_dict().items()}
    module, recording = build(Everything)
    for fqn in reversed(list(whole)):
        assert torch.equal(recording.replay(fqn, seed=5, device="cpu"), whole[fqn]), fqn
    del module.blocks, module.linear, module.legacy  # another rank's part
    materialize(module, recording, shard_of=lambda fqn: None, seed=5, device="cpu")
    for fqn, value in module.state_dict().items():
        assert torch.equal(value, whole[fqn]), fqn
    assert not torch.equal(recording.replay("scaled", seed=6, device="cpu"), whole["scaled"])


def test_seed_is_a_hash_of_base_seed_name_and_ordinal() -> None:
    def drawn(fqn: str, ordinal: int) -> Tensor:
        digest = hashlib.sha256(f"7\0{fqn}\0{ordinal}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randn(4, 3, generator=generator)

    _, recording = build(holder(a=lambda: torch.randn(4, 3), b=lambda: torch.randn(4, 3) - torch.randn(4, 3)))
    assert torch.equal(recording.replay("a", seed=7, device="cpu"), drawn("a", 0))
    assert torch.equal(recording.replay("b", seed=7, device="cpu"), drawn("b", 0) - drawn("b", 1))


def test_parameters_that_share_a_draw_agree() -> None:
    def make() -> nn.Module:
        base = torch.randn(6, 4)
        top, bottom = base.chunk(2)
        return holder(twice=lambda: base * 2, top=lambda: top, bottom=lambda: bottom)()

    _, recording = build(make)
    bottom = recording.replay("bottom", seed=1, device="cpu")
    twice = recording.replay("twice", seed=1, device="cpu")
    assert torch.equal(twice, 2 * torch.cat([recording.replay("top", seed=1, device="cpu"), bottom]))
    assert bottom.untyped_storage().nbytes() == bottom.numel() * 4  # does not hold on to the shared memory


def test_process_random_state_is_untouched_and_unused() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = real(Everything)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(real(Everything).legacy, first.legacy)


def test_an_earlier_value_is_seen_by_who_read_it_then() -> None:
    def make() -> nn.Module:
        base = torch.ones(3)
        early = base + 1
        base.mul_(10)
        late = base + 1
        base.fill_(5)
        return holder(base=lambda: base, early=lambda: early, late=lambda: late)()

    module = real(make)
    assert [module.base[0].item(), module.early[0].item(), module.late[0].item()] == [5, 2, 11]


def test_tied_parameters_stay_tied_and_keep_what_they_carry() -> None:
    def make() -> nn.Module:
        module = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
        module["head"].weight = module["embed"].weight
        module["embed"].weight.requires_grad_(False)
        module["embed"].weight.model_parallel = True
        return module

    module, recording = build(make)
    alone = recording.replay("head.weight", seed=0, device="cpu")
    materialize(module, recording, shard_of=lambda fqn: None, seed=0, device="cpu")
    assert module["head"].weight is module["embed"].weight
    assert torch.equal(alone, module["embed"].weight)
    assert not module["head"].weight.requires_grad and module["head"].weight.model_parallel


def test_shards_are_cut_from_the_whole() -> None:
    def local_meta(module: nn.Module, shard: ParamShard) -> None:
        module.linear.weight = nn.Parameter(shard.take(module.linear.weight))

    shard = ParamShard((48, 64), dim=0, ranges=((8, 16), (40, 48)), pad=2)
    module, recording = build(Everything)
    whole = recording.replay("linear.weight", seed=0, device="cpu")
    local_meta(module, shard)
    materialize(module, recording, shard_of={"linear.weight": shard}.get, seed=0, device="cpu")
    expected = torch.cat([whole[8:16], whole[40:48], torch.zeros(2, 64)])
    assert torch.equal(module.linear.weight, expected)

    module, recording = build(Everything)
    local_meta(module, shard)
    with pytest.raises(ValueError, match=r"linear.weight: .*\(48, 64\), the module expects \(18, 64\)"):
        materialize(module, recording, shard_of=lambda fqn: None, seed=0, device="cpu")


def test_dtype_is_cast_for_parameters_and_kept_for_buffers() -> None:
    module, recording = build(Everything)
    materialize(module, recording, shard_of=lambda fqn: None, seed=0, device="cpu", dtype=torch.bfloat16)
    assert module.linear.weight.dtype == torch.bfloat16 and module.inv_freq.dtype == torch.float32
    assert recording.replay("scaled", seed=0, device="cpu", dtype=torch.float64).dtype == torch.float64


def test_default_dtype_of_the_construction_is_used() -> None:
    def make() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return holder(ratio=lambda: torch.arange(1, 4) / 3)()
        finally:
            torch.set_default_dtype(torch.float32)

    ratio = real(make).ratio
    assert ratio.dtype == torch.float64 and torch.equal(ratio, torch.tensor([1 / 3, 2 / 3, 1.0], dtype=torch.float64))


def test_real_tensors_from_outside_are_kept_by_reference() -> None:
    table, row = torch.arange(12.0).view(3, 4), torch.tensor([2, 0])
    module, recording = build(holder(kept=lambda: table, mixed=lambda: torch.ones(2, 4) * table[row]))
    materialize(module, recording, shard_of=lambda fqn: None, seed=0, device="cpu")
    assert module.kept.data_ptr() == table.data_ptr()
    assert torch.equal(module.mixed, table[[2, 0]])

    _, recording = build(holder(mixed=lambda: torch.ones(3, 4) * table))
    table.add_(1)
    with pytest.raises(ValueError, match=r"shape \(3, 4\) from outside configure_model .* changed in place"):
        recording.replay("mixed", seed=0, device="cpu")


@pytest.mark.filterwarnings("error")  # torch would warn that copying into meta parameters does nothing
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_loaded_in_configure_model_is_used(assign: bool) -> None:
    state = nn.Linear(3, 2).state_dict()

    def make() -> nn.Module:
        module = nn.Linear(3, 2)
        module.load_state_dict(state, assign=assign)
        return module

    module = real(make)
    assert torch.equal(module.weight, state["weight"]) and torch.equal(module.bias, state["bias"])


def test_values_without_randomness_may_be_read() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = torch.linspace(0, 1, 5).tolist()
            self.one_by_one = [x.item() for x in torch.linspace(0, 1, 5)]
            self.array = (torch.arange(4) * 2).numpy()
            self.branch = bool((torch.eye(3) > 0).any())
            self.where = torch.eye(3).nonzero()
            self.picked = torch.arange(6.0)[torch.arange(6) > 3]

    module = real(Reads)
    assert module.rates == module.one_by_one == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert module.array.tolist() == [0, 2, 4, 6] and module.branch is True
    assert module.where.tolist() == [[0, 0], [1, 1], [2, 2]] and module.picked.tolist() == [4.0, 5.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: torch.equal(x, x),
        lambda x: x[x > 0],
    ],
)
def test_reading_a_random_value_is_refused(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"random \(aten::randn\).*in `__init__` instead"), deferred_init():
        read(torch.randn(4))


def test_what_cannot_be_honoured_is_refused() -> None:
    elsewhere = torch.empty(3, device="meta")
    with pytest.raises(ValueError, match="torch.Generator"), deferred_init():
        torch.randn(3, generator=torch.Generator())
    with pytest.raises(ValueError, match="torch.Generator"), deferred_init():
        nn.init.trunc_normal_(torch.empty(3), generator=torch.Generator())
    with pytest.raises(ValueError, match="made on the meta device elsewhere"), deferred_init():
        _ = elsewhere * 2
    module, recording = build(holder(mine=lambda: torch.ones(2), foreign=lambda: elsewhere))
    with pytest.raises(ValueError, match="'foreign' is on the meta device but was not created in configure_model"):
        materialize(module, recording, shard_of=lambda fqn: None, seed=0, device="cpu")
    with pytest.raises(ValueError, match="no recorded tensor 'other'"):
        recording.replay("other", seed=0, device="cpu")


def test_nothing_stays_patched() -> None:
    hooks = list(sys.meta_path)
    with pytest.raises(RuntimeError, match="boom"), deferred_init():
        assert torch.ones(2).is_meta
        raise RuntimeError("boom")
    assert not torch.ones(2).is_meta and sys.meta_path == hooks


def test_transformers_is_not_imported_and_may_come_late() -> None:
    script = """
import sys, torch
from parallax.strategies.deferred import deferred_init
heavy = "transformers.modeling_utils"
assert heavy not in sys.modules
with deferred_init():
    torch.nn.Linear(2, 2)
assert heavy not in sys.modules
with deferred_init() as recording:
    from transformers import LlamaConfig, LlamaForCausalLM
    small = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=11)
    model = LlamaForCausalLM(LlamaConfig(**small))
recording.capture(model)
norm = recording.replay("model.norm.weight", seed=0, device="cpu")
head = recording.replay("lm_head.weight", seed=0, device="cpu")
assert torch.equal(norm, torch.ones(8)) and 0 < head.std() < 0.04, head.std()  # N(0, 0.02), not kaiming's 0.2
import transformers.modeling_utils as modeling
assert modeling.PreTrainedModel.from_pretrained.__func__.__module__ == "transformers.modeling_utils"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
