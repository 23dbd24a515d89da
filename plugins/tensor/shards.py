"""Where the cuts of one module's parameters fall.

It is: arithmetic from (module, style, axis size, axis index) to one `ParamShard` per parameter, and the
conditions under which the cut is even. It is not: anything that touches tensors or communicates.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from parallax.plugins.base import ParamShard
from parallax.plugins.tensor.norms import is_rms_norm
from parallax.plugins.tensor.styles import Kind, Style


def conv1d_type() -> type[nn.Module] | None:
    """`transformers.pytorch_utils.Conv1D` if transformers is in use, else None (it is never imported here)."""
    found: Any = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return found if isinstance(found, type) else None


def is_linear(kind: type) -> bool:
    """Exactly `nn.Linear`, or Falcon's own, which computes the same."""
    return kind is nn.Linear or (kind.__name__ == "FalconLinear" and issubclass(kind, nn.Linear))


def is_embedding(kind: type) -> bool:
    """Exactly `nn.Embedding`, or transformers' scaled ones, whose forward multiplies that of `nn.Embedding`."""
    scaled = kind.__module__.startswith("transformers.") and kind.__name__.endswith("ScaledWordEmbedding")
    return kind is nn.Embedding or (scaled and issubclass(kind, nn.Embedding))


@dataclass(frozen=True)
class Cut:
    """How a style cuts one module.

    Attributes:
        dims: parameter name -> tensor dim that is cut; parameters not named stay whole.
        size: length of the cut dim.
        label: attribute that holds it, for messages ("out_features").
        blocks: lengths of the fused blocks along it, in order.
    """

    dims: dict[str, int]
    size: int
    label: str
    blocks: tuple[int, ...]


def cut_of(fqn: str, module: nn.Module, style: Style) -> Cut:
    """The cut of `module` under a column, row or embedding style.

    Raises:
        ValueError: the module's exact type is not one that can be cut this way, or its blocks do not fit.
    """
    kind = type(module)
    if is_embedding(kind):
        assert isinstance(module, nn.Embedding)
        if style.kind is Kind.EMBEDDING:
            return Cut({"weight": 0}, module.num_embeddings, "num_embeddings", (module.num_embeddings,))
        if style.kind is Kind.EMBEDDING_WIDTH:
            return Cut({"weight": 1}, module.embedding_dim, "embedding_dim", (module.embedding_dim,))
    if style.kind is Kind.WIDE_NORM and is_rms_norm(module):
        size = module.get_parameter("weight").numel()
        return Cut({"weight": 0}, size, "weight", (size,))
    column = style.kind is Kind.COLUMN
    if style.kind in (Kind.COLUMN, Kind.ROW):
        if is_linear(kind):
            assert isinstance(module, nn.Linear)
            size = module.out_features if column else module.in_features
            label = "out_features" if column else "in_features"
            dims = {"weight": 0, "bias": 0} if column else {"weight": 1}
            return Cut(dims, size, label, _blocks(fqn, label, size, style))
        if kind is conv1d_type():  # y = x W + b with W stored [in, out]
            size = int(getattr(module, "nf" if column else "nx"))
            label = "nf" if column else "nx"
            dims = {"weight": 1, "bias": 0} if column else {"weight": 0}
            return Cut(dims, size, label, _blocks(fqn, label, size, style))
    raise ValueError(
        f"{fqn!r} is a {kind.__module__}.{kind.__qualname__}, which style {style.word!r} cannot cut; column and row "
        "styles take exactly torch.nn.Linear or transformers' Conv1D, embedding styles exactly torch.nn.Embedding, "
        "'colwise_norm' an RMS norm"
    )


def _blocks(fqn: str, label: str, size: int, style: Style) -> tuple[int, ...]:
    parts = sum(style.blocks)
    if size % parts:
        raise ValueError(
            f"{fqn}.{label}={size} does not divide into blocks in the proportions {style.blocks} of {style.word!r}"
        )
    return tuple(size // parts * share for share in style.blocks)


def shard(shape: tuple[int, ...], dim: int, blocks: tuple[int, ...], size: int, index: int) -> ParamShard:
    """Rank `index`'s part of a tensor whose `dim` is made of `blocks`, each cut evenly over `size` ranks.

    One block that does not divide is padded: every rank holds ceil(block / size) rows, the last ones zero.
    """
    ranges, at, pad = [], 0, 0
    for block in blocks:
        rows = -(-block // size)
        start, stop = min(index * rows, block), min((index + 1) * rows, block)
        ranges.append((at + start, at + stop))
        pad += rows - (stop - start)
        at += block
    return ParamShard(shape, dim, tuple(ranges), pad)


def parameter_shard(fqn: str, param: Tensor, style: Style, size: int, index: int) -> ParamShard | None:
    """Rank `index`'s part of a parameter that a plan names by itself; None when the style leaves it whole.

    Raises:
        ValueError: the style does not cut parameters, or the cut is uneven.
    """
    if style.kind not in (Kind.COLUMN, Kind.ROW) or style.whole_outside:
        raise ValueError(
            f"{fqn!r} is a parameter by itself, which style {style.word!r} cannot cut; use 'colwise' or 'rowwise', or "
            "name the module it is in"
        )
    if style.kind is Kind.ROW and param.dim() == 1:
        return None
    dim = max(param.dim() - 2, 0) if style.kind is Kind.COLUMN else param.dim() - 1
    blocks = _blocks(fqn, f"shape[{dim}]", param.shape[dim], style)
    if any(block % size for block in blocks):
        raise ValueError(f"{fqn}.shape[{dim}]={param.shape[dim]} (blocks of {blocks}) is not divisible by {size}")
    return shard(tuple(param.shape), dim, blocks, size, index)


def module_shards(
    fqn: str, module: nn.Module, style: Style, size: int, index: int, copies: int = 1
) -> dict[str, ParamShard]:
    """Parameter name -> shard, for the parameters of `module` that `style` cuts; `copies` neighbours hold the same.

    Raises:
        ValueError: as `cut_of`, or the cut is uneven and the style does not pad.
    """
    cut, make = cut_of(fqn, module, style), _grouped if style.grouped else shard
    owner, index, size = index % copies == 0, index // copies, size // copies
    blocks = tuple(sum(cut.blocks[i::3]) for i in range(3)) if style.grouped else cut.blocks
    if not style.pads and any(block % size for block in blocks):
        raise ValueError(f"{fqn}.{cut.label}={cut.size} (blocks of {blocks}) is not divisible by {size}")
    out = {}
    for name, dim in cut.dims.items():
        param = getattr(module, name, None)
        if param is not None:
            out[name] = replace(make(tuple(param.shape), dim, cut.blocks, size, index), owner=owner)
    return out


def _grouped(shape: tuple[int, ...], dim: int, blocks: tuple[int, ...], size: int, index: int) -> ParamShard:
    """Rank `index`'s part of groups of three blocks (query heads, their key, their value): whole groups, or where ranks
    are more than groups an even part of each block of one group."""
    groups = len(blocks) // 3
    if size <= groups:
        return shard(shape, dim, (sum(blocks),), size, index)
    copies = size // groups
    first = index // copies * 3
    part, at = shard(shape, dim, blocks[first : first + 3], copies, index % copies), sum(blocks[:first])
    return replace(part, ranges=tuple((at + start, at + stop) for start, stop in part.ranges))


def vocabulary(module: nn.Module, size: int, index: int) -> tuple[int, int]:
    """[start, stop) of the ids whose vectors rank `index` of an embedding holds, without padding."""
    assert isinstance(module, nn.Embedding)
    rows = module.num_embeddings
    return shard((rows,), 0, (rows,), size, index).ranges[0]
