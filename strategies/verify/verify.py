"""`python -m parallax verify` as a function: run, compare, judge.

It is: the order of a verification (one process twice, the layout, one process on the layout's batches) and its
verdicts. It is not: the runs or the comparison themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from parallax.strategies import refusals
from parallax.strategies.layout import Layout
from parallax.strategies.verify.bytes import Row, compare_bytes
from parallax.strategies.verify.compare import TOLERANCE, Comparison, Difference
from parallax.strategies.verify.dropout import LEAST_STEPS, judge
from parallax.strategies.verify.dropout_runs import dropout_alone, dropout_at
from parallax.strategies.verify.expect import Asked, Theory
from parallax.strategies.verify.observe import Observation
from parallax.strategies.verify.pool import Pool, RankFailed
from parallax.strategies.verify.runs import RankResult, Settings, batches_read, follows, joined, run_layout, run_one
from parallax.strategies.verify.target import Target


@dataclass(frozen=True)
class Verdict:
    """What was found about one layout.

    Attributes:
        layout: resolved, as text.
        ranks: number of processes.
        differences: everything that differs from one process, in the order it arises; empty when the layout is right.
        largest: largest relative difference that counted as rounding.
        refused: why the layout does not fit the module; None when it does.
        failed: what a rank raised, or that it was not done in time; None when it ran.
        rows: with `check_bytes`, what each rank sent in each step, counted and by formula.
        no_formula: plugins and data engines that state none.
        notes: what was not compared, and why.
    """

    layout: str
    ranks: int
    differences: Sequence[Difference] = ()
    largest: float = 0.0
    refused: str | None = None
    failed: str | None = None
    rows: Sequence[Row] = ()
    no_formula: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def wrong_rows(self) -> list[Row]:
        """Rows whose counted bytes or calls differ from the formula's."""
        return [row for row in self.rows if not row.right]

    @property
    def passed(self) -> bool:
        stopped = self.refused is not None or self.failed is not None
        return not (stopped or self.differences or self.wrong_rows or self.no_formula)

    def to_dict(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "ranks": self.ranks,
            "passed": self.passed,
            "largest": self.largest,
            "refused": self.refused,
            "failed": self.failed,
            "notes": list(self.notes),
            "differences": [d.to_dict() for d in self.differences],
            "traffic": [{**row.to_dict(), "right": row.right} for row in self.rows],
            "no_formula": list(self.no_formula),
        }


def verify(
    target: str | Target,
    layouts: str | Sequence[str],
    *,
    steps: int = 3,
    dtype: str = "fp64",
    shrink: bool = False,
    clip: float = 0.1,
    world: int | None = None,
    timeout: float = 600.0,
    report: Callable[[Verdict], None] = lambda verdict: None,
    options: dict[str, Any] | None = None,
    prepare: Callable[[], None] | None = None,
    repeat: bool = True,
    check_bytes: bool = False,
    dropout: int = 0,
) -> list[Verdict]:
    """Train `target` for a few steps at each layout, on processes of this machine, and compare with one process.

    Args:
        target: "script.py:Lit" or a `Target`.
        layouts: one or several.
        steps: optimizer steps; the right weights of step n need the right update of step n-1. 0 compares no values,
            which leaves `dropout`.
        dtype: "fp64" (differences above 1e-9 count), "fp32" (1e-5) or "bf16" (5e-2).
        shrink: build Hugging Face models small.
        clip: gradient_clip_val of both runs; small, so that a wrong norm shows in the weights.
        world: ranks for layouts that leave dp open; None takes the fewest.
        timeout: seconds for one run.
        report: called with each verdict as it comes.
        options: further arguments of ParallaxStrategy.
        prepare: a module-level function called first on each rank of a layout.
        repeat: check first that one process gives the same twice.
        check_bytes: also compare what every rank sent in each step with closed formulas. ZeRO-3 then runs with
            `zero3_prefetch=False`, unless `options` say otherwise.
        dropout: also run so many steps with dropout on, for the mean loss, the rate and which ranks share masks; 0 for
            none, else at least 8.

    Raises:
        ValueError: the script does not import, the only layout is impossible or fails, or the module gives different
            results when one process runs it twice.
    """
    if dtype not in TOLERANCE:
        raise ValueError(f"dtype {dtype!r} is not known; use one of {', '.join(TOLERANCE)}")
    if dropout and dropout < LEAST_STEPS:
        raise ValueError(f"dropout={dropout} steps are too few for statistics; use at least {LEAST_STEPS}")
    parsed = Target.parse(target) if isinstance(target, str) else target
    module, _ = parsed.build()  # what is wrong with the script is said here, before any rank starts
    refusals.check(module, training=True, fresh=True)
    settings = Settings(parsed, steps, dtype, clip, shrink=shrink, options=options or {}, prepare=prepare)
    asked = [Layout.from_any(la) for la in ([layouts] if isinstance(layouts, str) else layouts)]
    resolved = [la.resolve(world or la.ranks_needed) for la in asked]
    pool, verdicts, repeatable = Pool(timeout, _imports(resolved)), list[Verdict](), not repeat
    for wanted, layout in zip(asked, resolved, strict=True):
        text = str(replace(wanted, data_parallel_size=layout.data_parallel_size))
        verdict = Verdict(str(layout), layout.world_size)
        try:
            if steps:
                how = _accountable(settings, layout) if check_bytes else settings
                verdict = _values(pool, how, layout, text, check_bytes=check_bytes, repeat=not repeatable)
                if how is not settings:
                    verdict = replace(verdict, notes=[*verdict.notes, "accounted with zero3_prefetch=False"])
                repeatable = True
            if dropout:
                verdict = _with_dropout(verdict, pool, replace(settings, steps=dropout, dropout=True), layout, text)
        except RankFailed as error:
            if len(resolved) == 1:
                raise ValueError(str(error)) from None
            why = str(error)
            verdict = replace(verdict, refused=why) if error.user else replace(verdict, failed=why)
        verdicts.append(verdict)
        report(verdict)
    return verdicts


def _imports(layouts: Sequence[Layout]) -> list[str]:
    """Slow imports of many layouts, to be made once."""
    engines = {layout.resolved_data_engine for layout in layouts}
    models = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
    return [*(["deepspeed"] if "deepspeed" in engines and find_spec("deepspeed") else []), *models]


def _values(pool: Pool, settings: Settings, layout: Layout, text: str, *, check_bytes: bool, repeat: bool) -> Verdict:
    """The layout's run against one process; with `repeat` that process runs twice, and must give the same."""
    ranks = pool.run(layout.world_size, run_layout, settings, text)
    read = batches_read([r.coordinates["dp"] for r in ranks], [r.seen.batches for r in ranks])
    sizes = _asked(layout, ranks, read) if check_bytes else None
    weights = [[(r.seen.weights[i], r.shards) for r in ranks] for i in range(len(read))]
    follow = weights if follows(settings.dtype) else None
    one, theories = pool.run(1, run_one, settings, joined(read), sizes, follow)[0]
    if repeat:
        again = pool.run(1, run_one, settings, joined(read), None, follow)[0][0]
        require_repeatable(one, again, TOLERANCE[settings.dtype])
    return _judge(layout, ranks, one, theories, settings.dtype)


def _accountable(settings: Settings, layout: Layout) -> Settings:
    """`settings` under which what is sent at `layout` has a formula: what ZeRO-3 gathers ahead has none."""
    ahead = layout.zero_stage == 3 and layout.resolved_data_engine == "deepspeed"
    if not ahead or not layout.may_gather_ahead or "zero3_prefetch" in settings.options:
        return settings
    return replace(settings, options={**settings.options, "zero3_prefetch": False})


def _asked(layout: Layout, ranks: list[RankResult], read: list[list[Any]]) -> Asked:
    return Asked(layout, read, [r.shards for r in ranks], [r.averaged_over for r in ranks])


def _with_dropout(verdict: Verdict, pool: Pool, settings: Settings, layout: Layout, text: str) -> Verdict:
    """`verdict`, with what was found with dropout on."""
    ranks, batches = zip(*pool.run(layout.world_size, dropout_at, settings, text), strict=True)
    read = batches_read([r.coordinates["dp"] for r in ranks], batches)
    one, whole = pool.run(1, dropout_alone, settings, layout, joined(read), read[0][0])[0]
    if not whole:
        return replace(verdict, notes=[*verdict.notes, "the module has no dropout"])
    found = [
        Difference(f.what, f.name, 0, "forward, dropout on", f.error, f.ranks, f.cause)
        for f in judge(ranks, one, whole)
    ]
    return replace(verdict, differences=[*verdict.differences, *found])


def _judge(
    layout: Layout, ranks: list[RankResult], one: Observation, theories: list[list[Theory]], dtype: str
) -> Verdict:
    sizes = {**layout.axis_sizes(), "ep": layout.expert_parallel_size, "m": layout.num_microbatches or 1}
    found = Comparison(ranks, one, sizes, TOLERANCE[dtype], by_step=follows(dtype))
    return Verdict(
        str(layout),
        layout.world_size,
        found.differences,
        found.largest,
        rows=compare_bytes(ranks, theories),
        no_formula=sorted({text for step in theories for theory in step for text in theory.missing}),
        notes=sorted(found.notes),
    )


def require_repeatable(first: Observation, second: Observation, tolerance: float) -> None:
    """Refuse a module whose losses or gradients differ between two runs of one process.

    Raises:
        ValueError: naming the first that does.
    """
    for step, (a, b) in enumerate(zip(first.losses, second.losses, strict=True)):
        if a != b:
            raise ValueError(f"{_TWICE}, its loss at step {step} is {a!r} and then {b!r}. {_LOOK}")
        for name in (n for n in [*first.order, *first.grads[step]] if n in first.grads[step]):
            right, found = first.grads[step][name], second.grads[step][name]
            off = float((found - right).abs().max()) / (float(right.abs().max()) or 1.0)
            if not off <= tolerance:
                raise ValueError(f"{_TWICE}, the gradient of {name} at step {step} differs by {off:.1e}. {_LOOK}")


_TWICE = "the module is not deterministic: run twice in one process"
_LOOK = (
    "Nothing can be proven about it; look for random numbers outside torch's default generator, time-dependent values, "
    "or data augmentation in the loader"
)
