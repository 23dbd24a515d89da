"""What a plan's words do to the modules they name, once these hold this rank's parameters.

It is: the walk over all targets of one model. It is not: the layers (`layers.py`), the cut of parameters (`cuts.py`),
or the change of what runs on sequence shards (`sequence.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from parallax.plugins.tensor.attributes import cut_argument, read_size, write_size
from parallax.plugins.tensor.embeddings import become_vocab_parallel, become_width_parallel
from parallax.plugins.tensor.entry import SharedInput
from parallax.plugins.tensor.heads import head_count, regroup, rotary_width, sharers
from parallax.plugins.tensor.layers import (
    become_column,
    become_entering,
    become_mla_keys,
    become_row,
    sum_output,
)
from parallax.plugins.tensor.norms import become_per_head, become_wide_norm
from parallax.plugins.tensor.sequence import Sequence, install
from parallax.plugins.tensor.sequence_plan import Trunk
from parallax.plugins.tensor.shards import vocabulary
from parallax.plugins.tensor.streams import Streams, guard
from parallax.plugins.tensor.styles import Kind
from parallax.plugins.tensor.target import Target
from parallax.strategies.comm import AxisComm
from parallax.strategies.mesh import Mesh


def convert(
    model: nn.Module,
    targets: Mapping[str, Target],
    mesh: Mesh,
    trunk: Trunk | None,
    heads: set[int],
    pieces: int = 1,
) -> None:
    """Change classes and size attributes; column layers of one block share the entry of their region.

    Args:
        model: already with this rank's parameters.
        trunk: what runs on sequence shards; None when nothing does.
        heads: ids of the modules whose logits stay cut over the vocabulary.
        pieces: messages a row layer's output is sent in.
    """
    comm = mesh["tp"]
    streams = Streams(comm.index)
    sequence = Sequence(comm, streams) if trunk is not None else None
    siblings: dict[str, list[Target]] = {}
    done: set[object] = set()
    for target in targets.values():
        key = (id(target.module), target.part)
        if key in done:  # one module under two names
            continue
        done.add(key)
        if target.part:
            _become_part(model, target, comm)
        elif target.style.kind in (Kind.COLUMN, Kind.ENTERING):
            siblings.setdefault(target.block, []).append(target)
        elif target.style.kind is Kind.ROW:
            scatters = trunk is not None and trunk.is_region(target.fqn)
            place = sequence if scatters else None
            become_row(target.module, target.style, comm, streams, sequence=place, pieces=pieces)
        else:
            _become_layer(model, target, comm, enters=trunk is not None)
    for owner, group in siblings.items():
        inside = trunk is not None and trunk.is_region(group[0].fqn)
        last = sequence.last if sequence is not None and inside else None
        entry = SharedInput(comm, sum(not t.style.entered for t in group), last)
        for member, target in enumerate(group):
            if target.style.kind is Kind.ENTERING:
                become_entering(target.module, entry, member, streams)
                continue
            become_column(
                target.module,
                target.style,
                comm,
                None if target.style.entered else entry,
                member,
                streams,
                sequence=sequence if trunk is not None and target.fqn in trunk.direct else None,
                is_head=id(target.module) in heads,
                copies=target.copies,
                sharers=sharers(mesh, target.copies) if target.style.heads and target.copies > 1 else None,
            )
        if not inside:
            guard(model.get_submodule(owner), streams)
    regroup(model, targets)
    if trunk is not None and sequence is not None:
        install(model, trunk, sequence)


def _become_part(model: nn.Module, target: Target, comm: AxisComm) -> None:
    """A number or an argument; a parameter by itself is taken by its module's forward as it is."""
    if target.style.kind is Kind.LOCAL_SIZE:
        size = read_size(target.module, target.part)
        assert size is not None
        write_size(target.module, target.part, size * target.copies // comm.size)
    elif target.style.kind is Kind.LOCAL_HEADS:
        cut_argument(target.module, target.part, head_count(model, target.fqn), comm)


def _become_layer(model: nn.Module, target: Target, comm: AxisComm, *, enters: bool) -> None:
    """`enters`: an embedding's output goes straight to layers that cut it into shards."""
    module, kind = target.module, target.style.kind
    if kind is Kind.EMBEDDING:
        become_vocab_parallel(module, comm, vocabulary(module, comm.size, comm.index), waits=enters)
    elif kind is Kind.EMBEDDING_WIDTH:
        become_width_parallel(module, comm)
    elif kind is Kind.MLA_KEYS:
        become_mla_keys(module, comm, rotary_width(model, target.fqn))
    elif kind is Kind.WIDE_NORM:
        become_wide_norm(module, comm)
    elif kind is Kind.PER_HEAD:
        become_per_head(module, comm)
    elif kind is Kind.SUM_OUTPUT:
        sum_output(module, comm)
