"""The Lightning strategy: `Trainer(strategy="parallax_4d")`.

It is: the adapter between Lightning's hooks and Parallax's parts, in the order Lightning calls them. It is not:
where parallelism is applied (`assemble.py`) or where a step runs (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from parallax.plugins.base import ParallelPlugin
from parallax.plugins.data.base import DataEngine
from parallax.plugins.launch import same_on_every_rank
from parallax.plugins.launch.order import OrderOptions
from parallax.plugins.pipeline.catalog import Schedule, find_schedule, name_of
from parallax.plugins.pipeline.partition import Asked
from parallax.strategies import callbacks, recompute, refusals
from parallax.strategies.announce import announce, summarize_sharded
from parallax.strategies.assemble import assemble, averaged_lookup, make_data_engine, make_plugins, owned_lookup
from parallax.strategies.deferred import Recording, deferred_init
from parallax.strategies.engine import Engine
from parallax.strategies.layout import Layout
from parallax.strategies.other_lightning import hint
from parallax.strategies.precision import ParallaxPrecision
from parallax.strategies.steps import StepStrategy


class ParallaxStrategy(StepStrategy):
    """Trains a plain LightningModule with tensor, pipeline and data parallelism (ZeRO 0-3).

    Args:
        layout: what runs where: a string (`"tp2 pp2 zero1"`), a mapping, a YAML path or a `Layout`. None puts every
            rank on the data axis.
        tp_plan: tensor-parallel plan relative to the LightningModule; None reads the one the model carries.
        tp_chunks: messages in which attention and MLP send their output, so that one is on its way while the next is
            computed. One when None.
        pp_plan: pipeline plan, likewise.
        ep_plan: expert-parallel plan, likewise.
        expert_balance: "microbatch" or "global": the tokens over which the auxiliary loss of a mixture of experts is
            computed, those of a data rank's micro-batch (as DDP does) or those of all data ranks.
        expert_chunks: parts of a micro-batch's tokens that are sent to experts one after the other, each while the one
            before is computed; all at once when None.
        expert_capacity_factor: choices an expert takes of one rank's micro-batch, over the mean; those beyond are
            dropped. None drops nothing.
        expert_router_fp32: compute routers of experts in fp32 in half precision too, whatever the model's code does.
        cp_plan: entries of a batch that have tokens, and at which dim; None reads the model's, else the batch's shapes.
        pp_partition: which layers go to which pipeline stage: "cost" (the default: the dearest stage as cheap as can
            be, by estimated cost), "parameters", "uniform", costs by module name as `measure_layer_costs` gives them
            (or a .json file of them), the number of layers of each stage, or names of layers (docs/pipeline.md).
        zero3_prefetch: whether DeepSpeed's ZeRO-3 gathers weights ahead of the layers that use them, and keeps those
            used again soon, by the order of the first step. None does where there is neither a pipeline nor expert
            parallelism; False gathers each layer's weights when it runs.
        schedule: the pipeline schedule, as in a layout: a name, the path of a .csv file, "module:function"; or the
            function itself, `(num_ranks, num_microbatches, stages_per_rank) -> lists of actions` (docs/pipeline.md).
        precision: overrides the Trainer's; the only way to get 16-mixed on CPU, where Lightning replaces it.
        timeout: how long a collective may wait before it fails with the names of those it waits for.
        process_group_backend: "nccl" on GPU and "gloo" on CPU when None.
        reorder_ranks: give the ranks to the processes so that those that talk most are closest. "auto" looks at the
            machines where there are several or accelerators are used; True always, and it is an error when they cannot
            be described; "measure" also measures the network; False keeps the launcher's order. Or the new rank of each
            of the launcher's ranks.
        topology: "warn", "error" or "off" when tp or ep leaves the fast domain (NVLink or the like; else the node).
        layout_options: layout fields by keyword, e.g. `num_microbatches=4`; they may not contradict `layout`.

    Raises:
        ValueError: an unknown or impossible layout.
    """

    strategy_name = "parallax_4d"

    def __init__(
        self,
        layout: str | Mapping[str, Any] | Layout | None = None,
        *,
        tp_plan: Mapping[str, str] | None = None,
        tp_chunks: int | None = None,
        pp_plan: Mapping[str, Any] | None = None,
        ep_plan: Mapping[str, str] | None = None,
        expert_balance: str | None = None,
        expert_capacity_factor: float | None = None,
        expert_chunks: int | None = None,
        expert_router_fp32: bool | None = None,
        cp_plan: Mapping[str, int] | None = None,
        pp_partition: Asked | None = None,
        zero3_prefetch: bool | None = None,
        schedule: str | Schedule | None = None,
        precision: str | None = None,
        timeout: timedelta = timedelta(minutes=10),
        process_group_backend: str | None = None,
        reorder_ranks: bool | str | Sequence[int] = "auto",
        topology: str = "warn",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: Any = None,
        **layout_options: Any,
    ) -> None:
        with same_on_every_rank():
            if schedule is not None:
                layout_options["schedule"] = schedule if isinstance(schedule, str) else name_of(schedule)
            asked = Layout.from_any(layout, **layout_options)
            order = OrderOptions(reorder_ranks, topology)
            precision_plugin = ParallaxPrecision(precision) if precision is not None else None
        super().__init__(
            layout=asked,
            order=order,
            timeout=timeout,
            backend=process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._options: dict[str, dict[str, Any]] = {
            "tp": {"plan": tp_plan, "chunks": tp_chunks, "ep_plan": ep_plan},
            "pp": {"plan": pp_plan, "schedule": schedule if callable(schedule) else None, "partition": pp_partition},
            "ep": {
                "plan": ep_plan,
                "balance": expert_balance,
                "capacity_factor": expert_capacity_factor,
                "chunks": expert_chunks,
                "router_fp32": expert_router_fp32,
            },
            "cp": {"plan": cp_plan},
            "data": {"prefetch": zero3_prefetch},
        }
        self._recording: Recording | None = None

    def __repr__(self) -> str:
        """Says whose strategy it is: the Trainer of another package, which refuses it, prints this."""
        return f"<ParallaxStrategy {str(self.requested_layout)!r}, a strategy of lightning.pytorch.Trainer{hint()}>"

    # What Lightning asks

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or ParallaxPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        with same_on_every_rank():
            self._precision_plugin = None if plugin is None else ParallaxPrecision.from_lightning(plugin)

    @property
    def ep_plan(self) -> Mapping[str, str] | None:
        """The expert-parallel plan that was given; None when the model's own counts."""
        return self._options["ep"]["plan"]

    def new_plugins(self, layout: Layout) -> list[ParallelPlugin]:
        """Fresh plugins for a resolved `layout`, with the options this strategy was given, in order of application."""
        return make_plugins(layout, self._options)

    def new_data_engine(self, layout: Layout) -> DataEngine:
        """A fresh data engine, likewise."""
        return make_data_engine(layout, self._options["data"])

    # Set-up

    def setup_environment(self) -> None:
        """Settle the layout, join the process group and build the mesh."""
        assert self.cluster_environment is not None
        self._set_world_ranks()
        self._settle_order()
        super().setup_environment()
        with same_on_every_rank():
            layout = self.requested_layout.resolve(self.world_size)
            plugins = self.new_plugins(layout)
            self.new_data_engine(layout)  # refuses what cannot work
            self._schedule = self._options["pp"]["schedule"] or find_schedule(layout.schedule)
        if self._mesh is None:
            self._plugins = plugins
        self._join(layout)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around the user's `configure_model`: what it builds stays on the meta device until it is this rank's part."""
        with deferred_init() as recording:
            yield
        self._recording = recording

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        """Apply parallelism, make the optimizer, hand both to the data engine."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        training = trainer.state.fn == TrainerFn.FITTING
        self._precision.device_type = self.root_device.type
        self._precision.engine = lambda: self
        fresh = self._is_fresh()
        if fresh and self._engine is not None:  # another module than before: nothing of the old one fits
            self._engine.teardown()
            self._engine, self._plugins = None, self.new_plugins(self.mesh.layout)
        with self._together("the checks of the model", always=True):
            refusals.check(self.lightning_module, training=training, fresh=fresh)
            if training:
                resumes = trainer.ckpt_path is not None
                callbacks.check(trainer.callbacks, self.lightning_module, layout=self.mesh.layout, resumes=resumes)
            for plugin in self._plugins if fresh else ():
                plugin.check(self.mesh.layout, self.lightning_module)
            recompute.check(self.mesh.layout, self.lightning_module)
        if fresh:
            assemble(
                self.lightning_module,
                self._plugins,
                mesh=self.mesh,
                recording=self._recording,
                precision=self._precision,
                device=self.root_device,
                together=lambda what: self._together(what, always=True),
            )
            self._recording = None
            refusals.mark_part(self.lightning_module, self.mesh.layout)
            if training:
                callbacks.copy_again(trainer.callbacks, self.lightning_module)
        if (training or fresh) and self._engine is not None:
            self._engine.teardown()  # before an optimizer is made of its parameters
        if training:
            with (
                self._together("configure_optimizers", always=True),
                refusals.explained(self.lightning_module, self.mesh),
            ):
                self.setup_optimizers(trainer)
                refusals.check_optimizers(self.lightning_module, self.optimizers)
        if training or fresh:
            with self._together("the set-up of the data engine", always=True):
                self._engine = self._make_engine(self.lightning_module, training=training)
            self._agreed.clear()
            summarize_sharded(trainer.callbacks, zero_stage=self.mesh.layout.zero_stage if training else 0)
            announce(
                self.mesh,
                self._plugins,
                self.lightning_module,
                self.shard_of,
                self.averaged_over,
                self.place,
                self._order,
            )

    @property
    def _precision(self) -> ParallaxPrecision:
        plugin = self.precision_plugin
        assert isinstance(plugin, ParallaxPrecision)
        return plugin

    def _is_fresh(self) -> bool:
        """Whether the module has yet to be cut: a first or another one, or one that `configure_model` built anew."""
        if self._engine is None or self._engine.module is not self.lightning_module:
            return True
        return any(p.is_meta for p in self._module.parameters())

    @property
    def _module(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module

    def _make_engine(self, module: nn.Module, *, training: bool) -> Engine:
        layout = self.mesh.layout
        data = self.new_data_engine(layout)
        data.completed_by_plugins = any(p.completes_grads for p in self._plugins)
        data.setup(
            module,
            self.optimizers[0] if training else None,
            mesh=self.mesh,
            layout=layout,
            owned=owned_lookup(self.shard_of),
            averaged_over=averaged_lookup(self._plugins),
            scale=self._precision.scale if training else None,
        )
        if training:
            # Lightning clears gradients between training_step and backward, where ours already hold the result.
            self.optimizers[0].zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        return Engine(
            module,
            mesh=self.mesh,
            data=data,
            plugins=self._plugins,
            schedule=self._schedule,
            autocast=self._precision.forward_context,
            scale=self._precision.scale if training else None,
            device=self.root_device,
            fixed_microbatches=self.requested_layout.num_microbatches is not None,
        )

    @property
    def data_ranks_are_independent(self) -> bool:
        """In prediction, unless weights are gathered over the data axis."""
        assert self.lightning_module is not None
        sharded = self.mesh.layout.shards_weights and bool(self.optimizers)  # only training shards
        return self.lightning_module.trainer.predicting and not sharded

    # End

    def teardown(self) -> None:
        """After one fit, validate, test or predict. Model, engine and processes stay for the next one."""
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def close(self) -> None:
        """Make the module an ordinary one again as far as its axes allow, and leave the process group. Collective."""
        if self._engine is not None:
            self._engine.teardown()
            for plugin in self._plugins:
                plugin.restore(self._engine.module)
            refusals.mark_whole(self._engine.module)
        self._leave()

    def _leave(self) -> None:
        super()._leave()
        self._engine = None
