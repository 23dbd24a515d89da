"""How the ranks are divided: the sizes of the axes and the few choices that go with them.

It is: a frozen dataclass, the OmegaConf schema of the `layout` part of a configuration, made from a string,
YAML, keywords or all of these, and resolved against a number of ranks. It is not: the place of one rank
(see `mesh.py`), and it knows nothing of the model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from math import gcd
from typing import Any

from parallax.strategies.layout_nearest import nearest_layouts
from parallax.strategies.layout_sources import names_of, read_source, words
from parallax.strategies.layout_words import (
    BOOL_FIELDS,
    SHORT,
    TEXT_FIELDS,
    is_own_schedule,
    put,
    read_mapping,
    read_text,
)
from parallax.strategies.names import unknown_name


@dataclass(frozen=True)
class Layout:
    """Sizes are numbers of ranks along an axis; `tp x pp x cp x dp` is the world size.

    Raises:
        ValueError: a value of the wrong type or out of range, or sizes that contradict each other.
    """

    tensor_parallel_size: int = 1
    """Ranks that share every matrix of a layer (`tp`). Unit: ranks. Default 1: matrices are whole."""

    pipeline_parallel_size: int = 1
    """Stages the layers are cut into (`pp`). Unit: ranks. Default 1: every rank holds all layers."""

    context_parallel_size: int = 1
    """Ranks that share every sequence (`cp`). Unit: ranks. Default 1: sequences are whole."""

    expert_parallel_size: int = 1
    """Ranks that share the experts of a layer (`ep`), folded over `dp x cp x tp/etp`, which it must divide; it takes no
    ranks of its own. Unit: ranks. Default 1: every rank holds all experts."""

    expert_tensor_parallel_size: int | None = None
    """Ranks of `tp` that share every matrix of an expert (`etp`), a divisor of `tp`; where it is smaller, experts and
    their tokens spread over the rest of `tp` too. Unit: ranks. Default None: `tensor_parallel_size`."""

    data_parallel_size: int | None = None
    """Copies of the model that see different samples (`dp`). Unit: ranks. Default None: the rest of the world."""

    zero_stage: int = 0
    """What is sharded over `dp x cp` (Rajbhandari et al. 2020): 0 nothing, 1 optimizer states, 2 gradients too,
    3 parameters too. Default 0."""

    data_engine: str = "auto"
    """Name of the data engine: who reduces gradients and steps. "fsdp" is torch's FSDP2, at ZeRO stage 3 (the default
    with it) or 2. Default "auto": see `resolved_data_engine`."""

    schedule: str = "1f1b"
    """The pipeline schedule, the order of forwards and backwards: its name, or a user's own as the path of a .csv file
    or as "module:function". Default "1f1b"."""

    stages_per_rank: int | None = None
    """Parts of the model on each rank of `pp` (`v`), one after the other in the model or turned around, as the schedule
    has it. Unit: virtual stages per rank. Default None: the schedule's own, 1 for 1f1b, 2 for interleaved_1f1b."""

    num_microbatches: int | None = None
    """Parts a batch is cut into in one pass of the schedule (`mb`). Unit: micro-batches per batch and data rank.
    Default None: `pipeline_parallel_size`."""

    context_inner_size: int = 1
    """Neighbouring ranks of `cp` that exchange heads (Ulysses) inside a ring over the rest (`inner`): the 2-D hybrid.
    Must divide `context_parallel_size`. Unit: ranks. Default 1: one ring."""

    context_method: str = "auto"
    """Name of the attention over sequences that are cut. Default "auto": chosen from heads, length and network."""

    context_sharding: str = "zigzag"
    """How a sequence is cut over `cp`: "zigzag" gives every rank the same work under a causal mask, "contiguous" every
    rank one run of neighbouring tokens. Default "zigzag"."""

    sequence_parallel: bool | None = None
    """Whether norms, dropouts and residuals, too, work on a share of the tokens on each tensor-parallel rank (`sp1`,
    `sp0`; Korthikanti et al. 2022). Default None: when `tensor_parallel_size` > 1 and the model's plan allows."""

    recompute: str = "none"
    """Activations that are computed again in backward: "none", "full" (all of each layer), "selective" (the scores of
    attention; Korthikanti et al. 2022) or "stage" (all of each pipeline stage but the last). Default "none": what the
    model itself does."""

    def __post_init__(self) -> None:
        self.validate()

    # Ways to write one

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `"tp2 pp4 cp2 ep2 dp2 zero1 mb8 gpipe"`: tokens in any order, separated by spaces, `x` or `*`.

        A token is a short key and a number, the name of a schedule, data engine or context method, or `key=value` with
        a short or long key. "auto" and the empty string leave everything at its default.

        Raises:
            ValueError: an unknown token (with the nearest one), one field set to two values, an impossible value.
        """
        return cls._checked(read_text(text, words()))

    @classmethod
    def from_any(cls, source: Any = None, **overrides: Any) -> Layout:
        """Make a layout of whatever a user has: nothing, a string, a path to YAML, a mapping or a layout.

        Args:
            source: None, a string for `parse`, a path to .yaml or .yml, a mapping, an OmegaConf config or a Layout.
            overrides: more settings, with short (`tp=2`) or long names. They complete `source`: a field that `source`
                sets to another value is an error, not overridden. What a `Layout` (or a structured config of it)
                leaves at its default counts as not set.

        Raises:
            ValueError: as in `parse`; or no such file, or a `source` of another type.
        """
        found = read_source(source, cls)
        for field, value in read_mapping(overrides).items():
            put(found, field, value)
        return cls._checked(found)

    @classmethod
    def _checked(cls, found: dict[str, Any]) -> Layout:
        """A layout of `found`, whose names are known. The word "fsdp" alone means what it means everywhere: stage 3."""
        if found.get("data_engine") == "fsdp":
            found.setdefault("zero_stage", 3)
        for field in (name for name in TEXT_FIELDS if name in found):
            if field == "schedule" and is_own_schedule(found[field]):
                continue
            valid = names_of(field)
            if found[field] not in valid:
                raise unknown_name(field.replace("_", " "), str(found[field]), valid)
        return cls(**found)

    # What must hold

    def validate(self) -> None:
        """Check types, ranges and what can be said before the number of ranks is known. See the class for errors."""
        for field in fields(self):
            value, name = getattr(self, field.name), field.name
            if name in TEXT_FIELDS:
                if not isinstance(value, str) or not value:
                    raise ValueError(f"{name} must be a name, got {value!r}")
                continue
            if value is None and field.default is None:
                continue
            if name in BOOL_FIELDS:
                if not isinstance(value, bool):
                    raise ValueError(f"{name} must be on or off (true or false, 1 or 0); got {value!r}")
                continue
            low, high = (0, 3) if name == "zero_stage" else (1, None)
            if type(value) is not int or value < low or (high is not None and value > high):
                limits = f"{low} to {high}" if high is not None else f"at least {low}"
                raise ValueError(f"{name} must be a whole number, {limits}; got {value!r}")
        cp, inner = self.context_parallel_size, self.context_inner_size
        if cp % inner:
            valid = ", ".join(str(n) for n in range(1, cp + 1) if cp % n == 0)
            raise ValueError(
                f"context_inner_size {inner} does not divide context_parallel_size {cp}; use one of {valid}"
            )
        if (self.stages_per_rank or 1) > 1 and self.pipeline_parallel_size == 1:
            raise ValueError(
                f"stages_per_rank {self.stages_per_rank} cuts the model of each rank of a pipeline, but "
                f"pipeline_parallel_size is 1; set it to at least 2 or leave stages_per_rank out"
            )
        if self.recompute == "stage" and self.pipeline_parallel_size == 1:
            raise ValueError(
                "recompute 'stage' keeps of each pipeline stage what it received, but pipeline_parallel_size is 1; use "
                "recompute=full, or at least 2 stages"
            )
        self._check_expert_fold()

    def _check_expert_fold(self) -> None:
        tp, etp = self.tensor_parallel_size, self.experts_cut_over
        if tp % etp:
            valid = ", ".join(str(n) for n in range(1, tp + 1) if tp % n == 0)
            raise ValueError(
                f"expert_tensor_parallel_size {etp} does not divide tensor_parallel_size {tp}; use one of {valid}"
            )
        if self.data_parallel_size is None:
            return  # the size of dp x cp is not known yet: `resolve` looks again
        fold = self.data_parallel_size * self.context_parallel_size * (tp // etp)
        if fold % self.expert_parallel_size:
            valid = ", ".join(str(n) for n in range(1, fold + 1) if fold % n == 0)
            tensor = ("", "") if etp == tp else (" x tp/etp", f" x {tp // etp}")
            raise ValueError(
                f"expert_parallel_size {self.expert_parallel_size} does not divide dp x cp{tensor[0]} = "
                f"{self.data_parallel_size} x {self.context_parallel_size}{tensor[1]} = {fold}, over which experts are "
                f"folded; use one of {valid}"
            )

    @property
    def experts_cut_over(self) -> int:
        """Ranks that share every matrix of an expert: `expert_tensor_parallel_size`, or that of attention and MLP."""
        return self.expert_tensor_parallel_size or self.tensor_parallel_size

    @property
    def experts_apart(self) -> bool:
        """Whether replicas of experts are on other ranks than replicas of the rest: "edp" instead of "data"."""
        return self.expert_parallel_size > 1 or self.experts_cut_over < self.tensor_parallel_size

    @property
    def ranks_needed(self) -> int:
        """The smallest world this layout fits: the world is this (`data_parallel_size` set) or a multiple of it."""
        model = self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size
        if self.data_parallel_size is not None:
            return model * self.data_parallel_size
        beside = self.context_parallel_size * (self.tensor_parallel_size // self.experts_cut_over)
        return model * self.expert_parallel_size // gcd(self.expert_parallel_size, beside)

    def resolve(self, world_size: int) -> Layout:
        """This layout on `world_size` ranks, with `data_parallel_size` and `num_microbatches` known.

        Raises:
            ValueError: it does not fit, with the nearest layouts and world sizes that do.
        """
        if world_size < 1:
            raise ValueError(f"a layout needs at least 1 rank, there are {world_size}")
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "sequence_parallel=True shares a sequence among the ranks of tensor parallelism, and "
                "tensor_parallel_size is 1; set it to 2 or more, or leave sequence_parallel out"
            )
        open_ended = self.data_parallel_size is None
        if world_size % self.ranks_needed if open_ended else world_size != self.ranks_needed:
            raise ValueError(self._misfit(world_size))
        model = self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size
        return replace(
            self,
            data_parallel_size=world_size // model,
            num_microbatches=self.num_microbatches or self.pipeline_parallel_size,
        )

    def _misfit(self, world_size: int) -> str:
        needed, open_ended = self.ranks_needed, self.data_parallel_size is None
        asked = {axis: getattr(self, SHORT[axis]) for axis in ("tp", "pp", "cp", "dp", "ep")}
        close = []
        for sizes in nearest_layouts(asked, world_size, etp=self.expert_tensor_parallel_size):
            changes: dict[str, Any] = {SHORT[axis]: size for axis, size in sizes.items()}
            changes["context_inner_size"] = gcd(self.context_inner_size, sizes["cp"])
            if self.expert_tensor_parallel_size is not None:
                changes["expert_tensor_parallel_size"] = gcd(self.experts_cut_over, sizes["tp"])
            close.append(f"`{replace(self, **changes)}`")
        below = world_size // needed * needed
        worlds = [str(n) for n in (below, below + needed) if n] if open_ended else [str(needed)]
        why = ""
        if self.expert_parallel_size > 1 and open_ended:
            fold = "dp x cp" if self.experts_cut_over == self.tensor_parallel_size else "dp x cp x tp/etp"
            why = f" (tp x pp x cp, and ep{self.expert_parallel_size} must divide {fold})"
        return (
            f"layout `{self}` needs {'a multiple of' if open_ended else 'exactly'} {needed} ranks{why}, "
            f"there are {world_size}; nearest: {', '.join(close)}; or run with {' or '.join(worlds)} ranks"
        )

    # What others read

    @property
    def resolved_data_engine(self) -> str:
        """Name of the engine that runs: for "auto", "ddp" at ZeRO stage 0 and "deepspeed" at 1 to 3."""
        if self.data_engine != "auto":
            return self.data_engine
        return "deepspeed" if self.zero_stage else "ddp"

    @property
    def may_gather_ahead(self) -> bool:
        """Whether ZeRO-3 may gather by the order of earlier forwards; why not with experts: docs/architecture.md."""
        return self.pipeline_parallel_size == 1 and self.expert_parallel_size == 1

    @property
    def shards_weights(self) -> bool:
        """Whether a data rank holds only its share of each weight between steps: at ZeRO stage 3, and with FSDP."""
        return self.zero_stage == 3 or self.data_engine == "fsdp"

    @property
    def world_size(self) -> int:
        """Number of ranks; `data_parallel_size` counts as 1 while it is open."""
        sizes = self.axis_sizes()
        return sizes["pp"] * sizes["dp"] * sizes["cp"] * sizes["tp"]

    def axis_sizes(self) -> dict[str, int]:
        """Size of each mesh axis, outermost first."""
        return {
            "pp": self.pipeline_parallel_size,
            "dp": self.data_parallel_size or 1,
            "cp": self.context_parallel_size,
            "tp": self.tensor_parallel_size,
        }

    def to_dict(self) -> dict[str, int | str | None]:
        """Field name -> value; `Layout(**layout.to_dict())` is the same layout."""
        return asdict(self)

    def __str__(self) -> str:
        """The short form, which `parse` reads: sizes of 1 and defaults left out, e.g. "tp2 pp2 dp2 zero1 1f1b mb4"."""
        parts = [
            f"{axis}{size}" for axis in ("tp", "pp", "cp", "ep", "dp") if (size := getattr(self, SHORT[axis]) or 1) > 1
        ]
        parts += [f"etp{etp}"] if (etp := self.expert_tensor_parallel_size) is not None else []
        parts += [f"sp{int(self.sequence_parallel)}"] if self.sequence_parallel is not None else []
        parts += [self.recompute] if self.recompute != type(self).recompute else []
        parts += [f"inner{self.context_inner_size}"] if self.context_inner_size > 1 else []
        parts += [self.context_method] if self.context_method != "auto" else []
        parts += [self.context_sharding] if self.context_sharding != type(self).context_sharding else []
        parts += [f"zero{self.zero_stage}"] if self.zero_stage else []
        parts += [self.data_engine] if self.data_engine != "auto" else []
        pipelined = self.pipeline_parallel_size > 1 and self.num_microbatches is not None
        named = f"schedule={self.schedule}" if ":" in self.schedule else self.schedule
        parts += [named] if pipelined or self.schedule != type(self).schedule else []
        parts += [f"v{self.stages_per_rank}"] if self.stages_per_rank is not None else []
        parts += [f"mb{self.num_microbatches}"] if pipelined or (self.num_microbatches or 1) > 1 else []
        return " ".join(parts) or ("auto" if self.data_parallel_size is None else "dp1")
