"""One rank's attention: kernels, dtypes, refusals, and the choice of a method."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallax.plugins import registry
from parallax.plugins.context import diagonal, kernels, local
from parallax.plugins.context.base import AttentionMethod, AttentionSpec, ContextGroups, SequenceShards
from parallax.plugins.context.blocked import Blocked
from parallax.plugins.context.choose import Machine, choose
from parallax.plugins.context.exchange import replication
from parallax.plugins.context.methods import domain_of
from parallax.plugins.context.scores import Scoring
from parallax.plugins.context.traffic import AttentionShape
from parallax.strategies.comm import AxisComm, Ledger
from tests.context_cases import MASKS, Case, Shape, expected, make


def _methods() -> dict[str, type[AttentionMethod]]:
    return {name: registry.load("parallax.attention", name) for name in registry.names("parallax.attention")}


# Kernels


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_fused_kernel_and_the_plain_one_agree(kv_heads: int, dtype: torch.dtype, limit: float) -> None:
    """On tiles with, without and partly with masks, down to rows that see nothing; value dims of their own."""
    draw = torch.Generator().manual_seed(3)
    q, k, v, grad = (
        torch.randn(2, heads, 24, dim, generator=draw, dtype=torch.float64).to(dtype)
        for heads, dim in ((4, 8), (kv_heads, 8), (kv_heads, 5), (4, 5))
    )
    hidden = torch.rand(2, 1, 24, 24, generator=draw) < 0.6
    hidden[0, :, 5], hidden[1] = True, False
    bias = torch.zeros(2, 1, 24, 24, dtype=dtype).masked_fill(hidden, float("-inf"))
    assert kernels.choose(q, True, None).name == "aten flash for cpu"
    for how in (Scoring(0.4), Scoring(0.4, causal=True), Scoring(0.4, bias=bias)):
        out, lse = kernels.forward(q, k, v, how)
        right, right_lse = kernels.PLAIN.forward(q.double(), k.double(), v.double(), how)
        torch.testing.assert_close(lse.double(), right_lse, rtol=limit, atol=limit)
        torch.testing.assert_close(out.double(), right, rtol=limit, atol=limit)
        blind = torch.isneginf(right_lse)
        assert bool(blind.any()) == (how.bias is not None) and not out[blind].any()
        lse = lse.masked_fill(blind, 0)
        got = kernels.backward(grad, q, k, v, out, lse, how)
        wanted = kernels.PLAIN.backward(grad, q, k, v, out, lse, how)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=limit, atol=10 * limit)


@pytest.mark.parametrize(
    ("rows", "columns", "heads", "kv_heads", "dims", "causal"),
    [(600, 600, 4, 2, (16, 24), True), (513, 1100, 2, 2, (32, 16), False), (1024, 1024, 1, 1, (64, 64), True)],
)
def test_the_kernel_in_blocks_and_the_plain_one_agree(
    rows: int, columns: int, heads: int, kv_heads: int, dims: tuple[int, int], causal: bool
) -> None:
    """Ragged blocks, grouped keys, value dims of their own, and a log-sum-exp that other tiles have a share in."""
    draw = torch.Generator().manual_seed(4)
    q, k, v, grad = (
        torch.randn(2, *size, generator=draw)
        for size in (
            (heads, rows, dims[0]), (kv_heads, columns, dims[0]), (kv_heads, columns, dims[1]), (heads, rows, dims[1])
        )
    )  # fmt: skip
    how, exact = Scoring(0.2, causal=causal), [x.double() for x in (grad, q, k, v)]
    found = Blocked().forward(q, k, v, how)
    right = kernels.PLAIN.forward(*exact[1:], how)
    for a, b in zip(found, right, strict=True):
        assert a.dtype is torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    others = torch.rand(right[1].shape, generator=draw, dtype=torch.float64)
    lse = (right[1].exp() + others).log()
    got = Blocked().backward(grad, q, k, v, found[0], lse.float(), how)
    wanted = kernels.PLAIN.backward(*exact, right[0], lse, how)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("rows", "area"), [(512, 512 * 576 / 2), (1536, 1536 * 1600 / 2), (1300, 1024 * 1088 / 2 + 276 * 1300)]
)
def test_a_causal_backward_in_pieces_is_exact_and_computes_less(rows: int, area: float) -> None:
    """Area: rows + 64 of rows + rows scores are computed in pieces; what is left over of 512 rows goes whole."""
    draw, how = torch.Generator().manual_seed(3), Scoring(0.4, causal=True)
    q, k, v, grad = (
        torch.randn(2, rows, heads, dim, generator=draw, dtype=torch.float64).transpose(1, 2)
        for heads, dim in ((4, 3), (2, 3), (2, 5), (4, 5))
    )
    out, lse = kernels.forward(q, k, v, how)
    computed = 0

    def call(rows: diagonal.Rows, keys: tuple[Tensor, Tensor], causal: bool) -> diagonal.Grads:
        nonlocal computed
        computed += rows[3].numel() * keys[0].shape[2]
        return kernels.PLAIN.backward(rows[0], rows[1], *keys, *rows[2:], Scoring(0.4, causal=causal))

    wanted = kernels.PLAIN.backward(grad, q, k, v, out, lse, how)
    in_pieces = diagonal.in_pieces(call, (grad, q, out, lse), (k, v))
    assert diagonal.worth(q) and computed == 2 * 4 * area
    for got in (in_pieces, kernels.backward(grad, q, k, v, out, lse, how)):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_soft_capped_scores_are_never_a_whole_matrix() -> None:
    """The plain kernel gets tiles of the blocking, whatever the length."""
    length, rows, columns = 1024, *local.BLOCKING["cpu"]
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    q = torch.randn(1, 1, length, 4)
    with Watch():
        _attend(q, q, q, AttentionSpec(softcap=3.0), SequenceShards.of(length, 1))
    assert length * 4 < largest <= rows * min(columns, length) < length**2


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, shards: SequenceShards) -> Tensor:
    alone = AxisComm("cp", (0,), 0, None, Ledger())
    method = registry.load("parallax.attention", "ring")(ContextGroups(alone, alone, alone))
    return method(q, k, v, spec, shards)


def test_autocast_casts_first_and_does_not_reach_inside() -> None:
    """As torch's own attention: bf16 queries; the sums inside stay fp32, also where the scores are written out."""
    spec, shards, whole = make(Case("softcap", dtype=torch.float32), 1)
    q, k, v = (whole[name] for name in "qkv")
    with torch.autocast("cpu", torch.bfloat16):
        out = _attend(q, k.bfloat16(), v, spec, shards)
        assert F.scaled_dot_product_attention(q, k, v).dtype is out.dtype is torch.bfloat16
        assert _attend(*(x.double() for x in (q, k, v)), spec, shards).dtype is torch.float64
    assert torch.equal(out, _attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), spec, shards))


def test_a_nan_of_the_model_is_not_hidden() -> None:
    spec, shards, whole = make(Case("window"), 1)
    whole["k"][0, 0, 3, 0] = float("nan")
    out = _attend(whole["q"], whole["k"], whole["v"], spec, shards)
    assert out[0, 0, 3].isnan().all() and not out[1].isnan().any()


def test_tensors_that_are_not_a_shard_are_refused() -> None:
    q, shards = torch.zeros(1, 2, 8, 4), SequenceShards.of(8, 1)
    with pytest.raises(ValueError, match=r"k \(1, 2, 6, 4\) .* are not this rank's 8 of 8 positions over 1 ranks"):
        _attend(q, q[:, :, :6], q[:, :, :6], AttentionSpec(), shards)
    with pytest.raises(ValueError, match="over 2 ranks; there are 1 context ranks"):
        _attend(q, q, q, AttentionSpec(), SequenceShards.of(16, 2))
    with pytest.raises(ValueError, match="one dtype, they have torch.float32, torch.float64 and torch.float32"):
        _attend(q, q.double(), q, AttentionSpec(), shards)


# Refusals


@pytest.mark.parametrize(("spec", "heads", "kv_heads", "message"), [
    (AttentionSpec(dropout_p=1.0), 4, 4, "attention dropout must be at least 0 and below 1, got 1"),
    (AttentionSpec(), 6, 4, "6 query heads are not a multiple of 4"),
    (AttentionSpec(window=0), 4, 4, "window of 0 positions sees nothing"),
    (AttentionSpec(softcap=-1.0), 4, 4, "soft cap .* must be positive, got -1"),
    (AttentionSpec(sinks=torch.zeros(3)), 4, 4, r"sinks of shape \(3,\) for 4 query heads"),
    (AttentionSpec(alibi_slopes=torch.zeros(4, requires_grad=True)), 4, 4, "ALiBi slopes that are trained"),
])  # fmt: skip
def test_what_no_method_can_do_is_refused_by_all(spec: AttentionSpec, heads: int, kv_heads: int, message: str) -> None:
    for method in _methods().values():
        with pytest.raises(ValueError, match=message):
            method.check(spec, heads, kv_heads, size=4, inner=2)


def test_heads_that_cannot_be_dealt_out_are_refused() -> None:
    methods, spec = _methods(), AttentionSpec()
    with pytest.raises(ValueError, match="'ulysses' deals 6 query heads to 4 ranks.*'ring', or .*_size 1, 2, 3, 6"):
        methods["ulysses"].check(spec, 6, 6, size=4)
    with pytest.raises(ValueError, match="'hybrid' deals 3 query heads to 2 ranks"):
        methods["hybrid"].check(spec, 3, 3, size=4, inner=2)
    with pytest.raises(ValueError, match="between 1 and 4, it is 1; possible: 2"):
        methods["hybrid"].check(spec, 4, 4, size=4, inner=1)
    for name in ("ring", "all_gather"):
        methods[name].check(spec, 1, 1, size=4)


def test_every_rank_gets_the_heads_of_its_queries() -> None:
    """Copies make kv heads even for the ranks, and rank r's run of them are those of its run of queries."""
    for size, kv_heads, group in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6), (1, 2, 4, 6)):
        heads, copies = kv_heads * group, replication(kv_heads, size)
        if heads % size:
            continue
        assert kv_heads * copies % size == 0 and heads % (kv_heads * copies) == 0
        mine, own = heads // size, kv_heads * copies // size
        for rank in range(size):
            for i in range(mine):
                kv = (rank * own + i // (mine // own)) // copies
                assert kv == (rank * mine + i) // group


# Choice


def test_auto_prefers_what_fits_the_machine() -> None:
    methods = _methods()

    def best(tokens: int, size: int, heads: int, kv_heads: int, inner: int, machine: Machine) -> str:
        shape = AttentionShape(1, heads, kv_heads, 128, 128, 2)
        return choose(methods, shape, AttentionSpec(), SequenceShards.of(tokens, size), inner, machine).name

    node = Machine(domain=8)
    assert best(4096, 8, 32, 8, 1, node) == "ulysses"  # short: nothing for the ring to hide its transfers behind
    assert best(1 << 20, 8, 32, 8, 1, node) == "ring"  # long: all of it hidden
    assert best(65536, 16, 32, 8, 8, node) == "hybrid"  # two nodes: the all-to-all stays inside
    assert best(65536, 8, 6, 2, 1, node) in ("ring", "all_gather")  # six heads cannot be dealt to eight ranks


def test_a_domain_is_the_neighbours_on_one_host() -> None:
    assert domain_of(["a"] * 4) == 4
    assert domain_of(["a", "a", "b", "b"]) == 2
    assert domain_of(["a", "a", "a", "b", "b", "b"]) == 3
    assert domain_of(["a", "b", "b", "a"]) == domain_of(["a", "a", "a", "b"][::-1]) == 1


def test_auto_says_why_nothing_fits() -> None:
    with pytest.raises(ValueError, match="no attention method can do this: .*ring: attention dropout"):
        choose(_methods(), AttentionShape(1, 4, 4, 8, 8), AttentionSpec(dropout_p=1.5), SequenceShards.of(64, 4))


@pytest.mark.parametrize("mask", MASKS)
def test_one_rank_alone_equals_the_reference(mask: str) -> None:
    spec, shards, whole = make(Case(mask, Shape(tokens=21, kv_heads=2)), 1)
    out = _attend(whole["q"], whole["k"], whole["v"], replace(spec, sinks=whole.get("sinks")), shards)
    torch.testing.assert_close(out, expected(spec, shards, whole)["out"], rtol=1e-9, atol=1e-9)
