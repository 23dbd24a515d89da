"""What the tensor axis sends in one step, as closed formulas over a plan and the shapes of one process.

It is: the table of docs/tensor.md for any plan: what each word of it sends, times the calls and tokens that one process
saw. It is not: a count; `parallax verify --bytes` holds the ledger against it.

With N tokens of h elements in a micro-batch, t ranks, and a shard's N' = t ceil(N / t) (Shoeybi et al. 2019, section 3;
Korthikanti et al. 2022, section 4.2.2):

| what | forward | backward |
|---|---|---|
| column layers that read one tensor | | all-reduce of N h |
| row layer, vocabulary embedding | all-reduce of N h | |
| column layer whose output is gathered | all-gather of N out | |
| row layer whose input is sliced | | all-gather of N in |
| on shards: a block | all-gather of N' h | all-gather (its input again) and reduce-scatter of N' h |
| on shards: a row layer | reduce-scatter of N' h | all-gather of N' h |
| on shards: what every rank repeats | all-gather of N' h | all-gather of N' h |
| on shards: entry, exit | all-gather (exit) | all-gather (entry) |
| on shards: vocabulary embedding that the first layer reads | reduce-scatter of N' h | |
| on shards: router logits in the model's output | all-gather of N' experts | |
| loss over a cut vocabulary | all-reduce of N and of 2 N numbers (3 N with label smoothing) | |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import nn

from parallax.plugins.tensor.heads import rotary_width
from parallax.plugins.tensor.plans import vocabularies, vocabulary_heads
from parallax.plugins.tensor.sequence_plan import Trunk
from parallax.plugins.tensor.styles import CUTTING, Kind
from parallax.plugins.tensor.target import Target
from parallax.strategies.comm import Traffic
from parallax.strategies.theory import Call, Case, Expected, Seen


def _unseen(case: Case, fqn: str) -> int:
    """Micro-batches in which the head does not know that its input was gathered: where weight gradients are postponed,
    and under DeepSpeed's ZeRO-3."""
    return case.microbatches if _hooked(case) else case.halved(fqn)


def _hooked(case: Case) -> bool:
    """Whether DeepSpeed's ZeRO-3, by its hooks, hands each layer a tensor of its own."""
    return case.layout.zero_stage == 3 and case.layout.resolved_data_engine == "deepspeed"


@dataclass
class _Sums:
    """One rank's formulas: adds what a call of a module sends, for all micro-batches."""

    case: Case
    out: Expected
    trunk: Trunk | None
    chunks: int = 1

    def in_pieces(self, kind: str, phase: str, nbytes: int, rows: int, fqn: str, times: int | None = None) -> None:
        """A row layer's output of `rows` tokens: one message, or `chunks`, where its product may be cut (in backwards
        of two halves it may not)."""
        times, pieces = self.case.microbatches if times is None else times, -(-rows // -(-rows // self.chunks))
        halved = min(self.case.halved(fqn), times)
        self.out.add_all({("tp", kind, phase): Traffic(pieces, nbytes)}, times - halved)
        self.each(kind, phase, nbytes, halved)

    def forward(self, kind: str, nbytes: int, fqn: str, *, ending: bool = False) -> None:
        """In every forward of module `fqn`, also where it is recomputed; `ending`: after its own work is done."""
        self.each(kind, "forward", nbytes)
        self.each(kind, "backward", nbytes, self.case.again(fqn, ending=ending))

    def row(self, kind: str, nbytes: int, rows: int, fqn: str) -> None:
        """A row layer's output, likewise. In pieces it saves what it needs when all of them are sent."""
        self.in_pieces(kind, "forward", nbytes, rows, fqn)
        self.in_pieces(kind, "backward", nbytes, rows, fqn, self.case.again(fqn, ending=self.chunks == 1))

    def each(self, kind: str, phase: str, nbytes: int, times: int | None = None) -> None:
        self.out.add("tp", kind, phase, nbytes, self.case.microbatches if times is None else times)

    def rows(self, seen: Seen) -> int:
        """Bytes of all tokens of an activation [..., tokens, h], padded to equal shards."""
        size, tokens = self.case.mesh.size("tp"), prod(seen.shape[:-1])
        return -(-tokens // size) * size * seen.shape[-1] * seen.element

    def padded(self, seen: Seen) -> int:
        """Bytes of [..., width] whose last dim is padded to equal parts."""
        size = self.case.mesh.size("tp")
        return prod(seen.shape[:-1]) * -(-seen.shape[-1] // size) * size * seen.element


def add_traffic(case: Case, out: Expected, targets: Mapping[str, Target], trunk: Trunk | None, chunks: int = 1) -> None:
    """Add what this rank sends over "tp" because of `targets` and `trunk`, of the whole model.

    Args:
        chunks: messages in which a row layer's output is sent.
    """
    sums = _Sums(case, out, trunk, chunks)
    unique = {(id(t.module), t.part): t for t in targets.values() if case.here(t.fqn) and not t.part}
    here = list(unique.values())
    heads = vocabulary_heads(case.model, targets.values(), vocabularies(targets.values()))
    for target in here:
        for call in case.calls(target.module):
            _add_call(sums, target, call, is_head=id(target.module) in heads)
    _add_entries(sums, here)
    if trunk is not None:
        _add_shards(sums, trunk, here)
    if heads and case.ends_here:
        _add_losses(sums, {t.module for t in here if id(t.module) in heads})
    _add_gradient_sums(sums, targets.values())


def _add_call(sums: _Sums, target: Target, call: Call, *, is_head: bool) -> None:
    kind, whole = target.style.kind, target.style.whole_outside
    inside = sums.trunk is not None and sums.trunk.is_region(target.fqn)
    result, hidden = call.outputs[0], call.inputs[0]
    if kind is Kind.EMBEDDING and _enters(sums, result):
        sums.forward("reduce_scatter", sums.rows(result), target.fqn, ending=True)
    elif kind in (Kind.EMBEDDING, Kind.SUM_OUTPUT):
        sums.forward("all_reduce", result.bytes, target.fqn, ending=True)
    if kind is Kind.EMBEDDING_WIDTH or (kind is Kind.COLUMN and whole and not is_head):
        sums.forward("all_gather", sums.padded(result), target.fqn, ending=True)
    if kind is Kind.ROW and whole and hidden.grad:
        sums.each("all_gather", "backward", sums.padded(hidden))
    if kind is Kind.ROW:
        tokens = prod(result.shape[:-1])
        each = -(-tokens // sums.case.mesh.size("tp"))
        if not inside:
            sums.row("all_reduce", result.bytes, tokens, target.fqn)
        else:
            sums.row("reduce_scatter", sums.rows(result), each, target.fqn)
            if hidden.grad:
                sums.in_pieces("all_gather", "backward", sums.rows(result), each, target.fqn)
    if kind is Kind.WIDE_NORM:
        squares = prod(result.shape[:-1]) * max(result.element, 4)
        sums.forward("all_reduce", squares, target.fqn)
        sums.each("all_reduce", "backward", squares, sums.case.microbatches * result.grad)
    if kind is Kind.COLUMN and target.style.heads and target.copies > 1:
        key_and_value = 2 * result.shape[-1] * target.style.heads // sum(target.style.blocks)
        each = prod(result.shape[:-1]) * key_and_value * result.element * target.copies // sums.case.mesh.size("tp")
        group = _sharers(sums.case, target.copies)
        sums.out.add(group, "all_gather", "forward", each, sums.case.microbatches)
        sums.out.add(group, "all_gather", "backward", each, sums.case.again(target.fqn, ending=True))
        sums.out.add(group, "reduce_scatter", "backward", each, sums.case.microbatches * result.grad)
    if kind is Kind.MLA_KEYS and result.grad:
        rotary = rotary_width(sums.case.model, target.fqn)
        sums.each("all_reduce", "backward", result.bytes // result.shape[-1] * rotary)


def _enters(sums: _Sums, seen: Seen) -> bool:
    """Whether the first layer reads just this tensor."""
    if sums.trunk is None:
        return False
    return any(call.hidden.number == seen.number for _, call in _called(sums.case, f"{sums.trunk.layers}.0"))


def _readers(case: Case, targets: Iterable[Target]) -> dict[str, dict[object, Seen]]:
    """Block -> every tensor its column layers read, once; under DeepSpeed's ZeRO-3 once for each layer."""
    found: dict[str, dict[object, Seen]] = {}
    for target in targets:
        if target.style.kind not in (Kind.COLUMN, Kind.ENTERING) or target.style.entered:
            continue
        for at, call in enumerate(case.calls(target.module)):
            seen = call.inputs[0]
            key: object = (target.fqn, at) if _hooked(case) else seen.number
            if seen.grad:
                found.setdefault(target.block, {})[key] = seen
    return found


def _add_entries(sums: _Sums, here: list[Target]) -> None:
    """Input gradients of column layers, of whole sequences."""
    trunk = sums.trunk
    outside = [t for t in here if trunk is None or not (trunk.is_region(t.fqn) or _reads_exit(sums, trunk, t))]
    for readers in _readers(sums.case, outside).values():
        for seen in readers.values():
            sums.each("all_reduce", "backward", seen.bytes)


def _exit_numbers(case: Case, trunk: Trunk) -> set[int]:
    return {call.outputs[0].number for call in case.calls(case.model.get_submodule(trunk.end))}


def _reads_exit(sums: _Sums, trunk: Trunk, target: Target) -> bool:
    """Whether a column layer (the head) reads what was gathered at the trunk's exit."""
    if target.style.kind is not Kind.COLUMN or trunk.contains(target.fqn):
        return False
    numbers = _exit_numbers(sums.case, trunk)
    return any(call.inputs[0].number in numbers for call in sums.case.calls(target.module))


def _called(case: Case, *fqns: str) -> Iterator[tuple[str, Call]]:
    """Calls of those of the modules that are on this rank."""
    for fqn in filter(case.here, fqns):
        for call in case.calls(case.model.get_submodule(fqn)):
            yield fqn, call


def _add_shards(sums: _Sums, trunk: Trunk, here: list[Target]) -> None:
    """What the residual stream of this rank's layers sends as shards."""
    case = sums.case
    columns = [t for t in here if t.style.kind in (Kind.COLUMN, Kind.ENTERING) and not t.style.entered]
    for _, call in _called(case, f"{trunk.layers}.0"):
        if call.hidden.grad:
            sums.each("all_gather", "backward", sums.rows(call.hidden))
    for _, call in _called(case, trunk.end):
        sums.each("all_gather", "forward", sums.rows(call.outputs[0]))
    directly = [t.fqn for t in columns if t.fqn in trunk.direct]
    for fqn, call in _called(case, *trunk.blocks, *directly):
        sums.forward("all_gather", sums.rows(call.hidden), fqn)
        _add_gathered(sums, fqn, call.hidden, [t for t in columns if f"{t.fqn}.".startswith(f"{fqn}.")])
    for fqn, call in _called(case, *trunk.opaque):
        sums.forward("all_gather", sums.rows(call.hidden), fqn)
        if call.outputs[0].grad:
            sums.each("all_gather", "backward", sums.rows(call.outputs[0]))
    recorded = [seen for call in case.calls(case.model.get_submodule(trunk.owner)) for seen in call.outputs]
    scores = case.scores() if case.ends_here else ()
    for logits in (seen for seen in recorded if seen.number in scores):
        sums.each("all_gather", "forward", sums.rows(logits))
    for target in (t for t in columns if _reads_exit(sums, trunk, t)):
        for call in case.calls(target.module):
            _add_reader(sums, target, call.inputs[0])


def _add_gathered(sums: _Sums, fqn: str, hidden: Seen, columns: list[Target]) -> None:
    """Backward of a gathered input: scattered, and gathered again for the weights, of which only a shard was saved; a
    recomputed layer saves all of it."""
    if not hidden.grad:
        return
    sums.each("reduce_scatter", "backward", sums.rows(hidden))
    reads = [t for t in columns if any(c.inputs[0].number == hidden.number for c in sums.case.calls(t.module))]
    if any(_trains(t.module) for t in reads) and sums.case.recomputed_layer(fqn) is None:
        whole = sums.case.halved(fqn)  # where weight gradients are postponed products save all of it, too
        sums.each("all_gather", "backward", sums.rows(hidden), sums.case.microbatches - whole)


def _add_reader(sums: _Sums, target: Target, seen: Seen) -> None:
    """The head on shards; where it does not know that its input was gathered it enters its region as on whole
    sequences."""
    if not seen.grad:
        return
    unseen = _unseen(sums.case, target.fqn)
    whole = sums.case.microbatches - unseen
    sums.each("reduce_scatter", "backward", sums.rows(seen), whole)
    if _trains(target.module):
        sums.each("all_gather", "backward", sums.rows(seen), whole)
    sums.each("all_reduce", "backward", seen.bytes, unseen)


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False) if p.dim() > 1)


def _add_losses(sums: _Sums, heads: set[nn.Module]) -> None:
    """Cross-entropy of logits that stay cut."""
    widths = {call.outputs[0].shape[-1] for head in heads for call in sums.case.calls(head)}
    for loss in sums.case.trace.losses:
        if loss.classes in widths:
            sums.each("all_reduce", "forward", loss.rows * loss.element)
            sums.each("all_reduce", "forward", loss.rows * max(loss.element, 4) * (3 if loss.smoothed else 2))


def _add_gradient_sums(sums: _Sums, targets: Iterable[Target]) -> None:
    """Once per step: parameters whose gradients are partial, in one message for each group of ranks and dtype."""
    case, trunk = sums.case, sums.trunk
    trained = case.trained()
    names: dict[int, list[str]] = {}
    for fqn, param in trained.items():
        names.setdefault(id(param), []).append(fqn)
    summed = dict[str, set[str]]()

    def note(group: str, fqns: Iterable[str]) -> None:
        summed.setdefault(group, set()).update(fqns)

    for target in targets:
        module, part = target.module, target.part
        held = module.parameters() if not part else filter(None, [module._parameters.get(part)])
        own = [fqn for p in held for fqn in names.get(id(p), ())]
        if target.style.kind in (Kind.SUM_GRAD, Kind.PER_HEAD, Kind.ENTERING):
            note("tp", own)
        if target.copies > 1 and target.style.kind in CUTTING and not target.style.heads:
            note(_sharers(case, target.copies), own)
    if trunk is not None:
        note("tp", (f for f in trained if trunk.is_sharded(f) and _is_whole(case, f)))
    for group, fqns in summed.items():
        by_element: dict[int, int] = {}
        for fqn in fqns:
            element = trained[fqn].element_size()
            by_element[element] = by_element.get(element, 0) + case.elements(fqn) * element
        for nbytes in by_element.values():
            sums.out.add(group, "all_reduce", "step", nbytes)


def _sharers(case: Case, copies: int) -> str:
    """The group of ranks that share a head."""
    return "tp" if copies == case.mesh.size("tp") else f"tp_run{copies}"


def _is_whole(case: Case, fqn: str) -> bool:
    shard = case.shards[fqn]
    return shard is None or shard.dim is None
