"""What a run may say: the siblings of `Layout` that make up a configuration.

It is: dataclasses, the one source of every key, its type, its default and (in the docstring below it) its meaning and
unit; OmegaConf's structured configs are made of them (`reading.py`), and `python -m parallax config` lists them
(`keys.py`). It is not: the values of a particular run, which are in the YAML files beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from parallax.strategies.layout import Layout
from parallax.strategies.layout_words import KEYS, SHORT
from parallax.strategies.names import unknown_name

FAMILIES = ("llama", "gpt2", "mixtral", "qwen3_moe", "plain")
STARTERS = ("mpirun", "torchrun")
SIZES = ("tp", "pp", "cp", "ep", "dp")
"""Axes whose sizes a sweep can vary."""


@dataclass
class ModelConf:
    """A causal language model. Keys that its family has no use for must stay unset.

    Raises:
        ValueError: an unknown family, a size below 1, or heads that do not fit.
    """

    family: str = "llama"
    """Which architecture: llama, gpt2, mixtral, qwen3_moe (unmodified transformers classes) or plain (`plain.py`)."""

    weights: Path | None = None
    """A local Hugging Face folder with config.json and safetensors; the numbers below must be its own. Default None:
    random weights."""

    vocab_size: int = 256
    """Different tokens. Unit: tokens. Default 256: one for each byte."""

    hidden_size: int = 128
    """Width of the residual stream. Unit: elements."""

    intermediate_size: int | None = None
    """Width inside an MLP or an expert; qwen3_moe: inside a layer without experts. Unit: elements. Default None: the
    family's own rule, 4 x hidden_size where it has none."""

    num_layers: int = 4
    """Transformer blocks. Unit: layers."""

    num_heads: int = 4
    """Attention heads. Unit: heads."""

    num_kv_heads: int | None = None
    """Heads of keys and values. Unit: heads. Default None: as many as num_heads."""

    head_dim: int | None = None
    """Width of a head. Unit: elements. Default None: hidden_size / num_heads."""

    max_positions: int = 512
    """The longest sequence. Unit: tokens."""

    rope_theta: float | None = None
    """Base of the rotary embedding. Default None: the family's own."""

    norm_eps: float | None = None
    """Added to the variance in a norm. Default None: the family's own."""

    tie_embeddings: bool | None = None
    """Whether the embedding is also the output head. Default None: the family's own rule."""

    num_experts: int | None = None
    """Experts of a layer. Unit: experts. Default None: no experts."""

    experts_per_token: int | None = None
    """Experts that each token visits. Unit: experts. Default None: no experts."""

    expert_intermediate_size: int | None = None
    """qwen3_moe: width inside an expert. Unit: elements. Default None: not used."""

    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the family's transformers configuration, e.g. {attention_bias: true}."""

    def __post_init__(self) -> None:
        _one_of("model.family", self.family, FAMILIES)
        _at_least(self, "model", 1, (f.name for f in fields(self) if str(f.type).startswith("int")))
        if self.head_dim is None and self.hidden_size % self.num_heads:
            near = max(n for n in range(1, self.num_heads + 1) if self.hidden_size % n == 0)
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not divisible by model.num_heads={self.num_heads}; use "
                f"num_heads={near}, hidden_size={-(-self.hidden_size // self.num_heads) * self.num_heads}, or head_dim"
            )
        kv = self.num_kv_heads
        if kv is not None and self.num_heads % kv:
            valid = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            raise ValueError(f"model.num_kv_heads={kv} does not divide num_heads={self.num_heads}; use one of {valid}")


@dataclass
class ClusterConf:
    """The processes of a run.

    Raises:
        ValueError: an unknown starter, a number out of range, or torchrun with several machines.
    """

    ranks: int | None = None
    """Processes in all. A sweep starts so many, a run that a launcher has started must have so many. Unit: ranks.
    Default None: what the launcher started; in a sweep, what the layout needs."""

    starter: str = "mpirun"
    """What starts the processes of a sweep's job: mpirun or torchrun."""

    hostfile: Path | None = None
    """The machines of a sweep's job, one "node1 slots=8" a line (docs/launching.md). Default None: this machine."""

    threads: int = 1
    """Threads of each rank of a sweep's job (OMP_NUM_THREADS). Unit: threads."""

    timeout: float = 600.0
    """How long a collective may wait before it fails with the names of those it waits for. Unit: seconds."""

    reorder_ranks: Any = "auto"
    """Order of the ranks (docs/topology.md): auto, true, false, measure, or a list of new ranks."""

    def __post_init__(self) -> None:
        _one_of("cluster.starter", self.starter, STARTERS)
        _at_least(self, "cluster", 1, ("ranks", "threads", "timeout"))
        if self.starter == "torchrun" and self.hostfile is not None:
            raise ValueError("cluster.starter=torchrun serves this machine only: use mpirun, or no cluster.hostfile")


@dataclass
class TrainerConf:
    """Keyword arguments of lightning.pytorch.Trainer."""

    accelerator: str = "auto"
    """cpu, gpu or auto."""

    devices: int | str = "auto"
    """Processes of each machine. Default auto: those that a launcher (mpirun, torchrun) started, else 1; a number:
    Lightning starts so many."""

    num_nodes: int = 1
    """Machines. Unit: machines."""

    precision: str = "32-true"
    """Lightning's word for the types of weights and computation: 32-true, bf16-mixed, bf16-true, 16-mixed, 64-true."""

    max_steps: int = 80
    """Optimizer steps. Unit: steps."""

    accumulate_grad_batches: int = 1
    """Batches of one optimizer step. Unit: batches."""

    val_check_interval: int | float | None = None
    """Steps between two validations. Unit: batches. Default None: at the end of an epoch."""

    limit_val_batches: int | float = 4
    """Batches of a validation; 0 for none. Unit: batches."""

    gradient_clip_val: float | None = 1.0
    """Largest norm of the gradient; null for no clipping."""

    log_every_n_steps: int = 1
    """Steps between two lines of metrics. Unit: steps."""

    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of Trainer, e.g. {benchmark: true}."""

    def __post_init__(self) -> None:
        _at_least(self, "trainer", 1, ("num_nodes", "max_steps", "accumulate_grad_batches", "log_every_n_steps"))


@dataclass
class DataConf:
    """Text of a folder as windows of bytes."""

    path: Path | None = None
    """A folder, or one file. Default None: the source files of this Python's standard library."""

    patterns: list[str] | None = None
    """Names of the files to read. Default None: *.py of the standard library, any text of another folder."""

    max_bytes: int = 8_000_000
    """Read no more than this, from files spread over the whole folder. Unit: bytes."""

    seq_len: int = 128
    """Length of a sample. Unit: tokens."""

    global_batch_size: int = 16
    """Samples of one batch over all data-parallel ranks. Unit: samples."""

    val_fraction: float = 0.05
    """Share of the windows kept for validation."""

    def __post_init__(self) -> None:
        _at_least(self, "data", 1, ("max_bytes", "seq_len", "global_batch_size"))
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction={self.val_fraction} must lie between 0 and 1, for example 0.05")


@dataclass
class OptimConf:
    """AdamW with a warm-up, then a cosine."""

    lr: float = 2.5e-3
    """Highest learning rate."""

    min_lr_ratio: float = 0.1
    """Share of lr at which the cosine ends."""

    warmup_steps: int = 8
    """Steps in which the learning rate rises. Unit: steps."""

    weight_decay: float = 0.1
    """Decay of weights."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of the running means of gradient and squared gradient."""


@dataclass
class SweepConf:
    """Which layouts a sweep tries: every way to divide the ranks over `sizes`, times every value in `vary`.

    Raises:
        ValueError: an unknown axis or layout key, or nothing to vary.
    """

    ranks: int = 1
    """Processes of each layout. Unit: ranks."""

    sizes: list[str] = field(default_factory=lambda: ["tp", "pp", "dp"])
    """Axes that are divided, of tp, pp, cp, ep, dp; the others have size 1."""

    vary: dict[str, list[Any]] = field(default_factory=dict)
    """Any other layout key and the values to try, e.g. {zero_stage: [0, 1]}."""

    def __post_init__(self) -> None:
        _at_least(self, "sweep", 1, ("ranks",))
        for axis in self.sizes:
            _one_of("sweep.sizes", axis, SIZES)
        for key, values in self.vary.items():
            _one_of("sweep.vary", key, KEYS)
            if key in SIZES or SHORT.get(key, key) in (SHORT[axis] for axis in SIZES):
                raise ValueError(f"sweep.vary.{key}: sizes of axes are divided by sweep.sizes, not varied on their own")
            if not values:
                raise ValueError(f"sweep.vary.{key} has no value to try")


@dataclass
class RunConf:
    """One training run."""

    model: ModelConf = field(default_factory=ModelConf)
    """The model; group `model`."""

    layout: Layout = field(default_factory=Layout)
    """What runs where; group `layout`, whose options are also layouts in words: 'layout=tp2 pp2 zero1'."""

    cluster: ClusterConf = field(default_factory=ClusterConf)
    """The processes; group `cluster`."""

    trainer: TrainerConf = field(default_factory=TrainerConf)
    """Lightning's Trainer; group `trainer`."""

    data: DataConf = field(default_factory=DataConf)
    """The text; group `data`."""

    optim: OptimConf = field(default_factory=OptimConf)
    """The optimizer."""

    sweep: SweepConf = field(default_factory=SweepConf)
    """Layouts of a sweep; group `sweep`."""

    seed: int = 1234
    """Of the initial weights and of the order of the data."""

    output_dir: Path | None = None
    """Where results go. Default None: outputs/<script>/<date and time>; in a sweep, the job's folder."""

    save: bool = True
    """Whether the run keeps a checkpoint and draws its losses."""


def _one_of(key: str, value: str, valid: Iterable[str]) -> None:
    valid = list(valid)
    if value not in valid:
        raise unknown_name(key, str(value), valid)


def _at_least(conf: Any, where: str, low: int, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(conf, name)
        if value is not None and value < low:
            raise ValueError(f"{where}.{name}={value!r} must be at least {low}")
