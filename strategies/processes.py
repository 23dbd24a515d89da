"""The part of the strategy that knows processes: launch, process group, mesh, and the collectives Lightning asks for.

It is: everything that needs ranks but no model. It is not: where parallelism is applied or trained
(`strategy.py`).
"""

from __future__ import annotations

import atexit
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.distributed import ReduceOp
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from parallax.plugins.launch import (
    Connection,
    choose_environment,
    init_distributed,
    local_world_size,
    mark_shared,
)
from parallax.plugins.launch.choose import node_count
from parallax.plugins.launch.detect import mpi_launch
from parallax.plugins.launch.order import Order, OrderOptions, settle_order
from parallax.plugins.launch.rank_zero import set_printing_rank
from parallax.plugins.launch.script_launcher import ScriptLauncher
from parallax.strategies.agreement import Agreement
from parallax.strategies.layout import Layout
from parallax.strategies.loaders import process_loader
from parallax.strategies.mesh import Mesh


class ProcessStrategy(ParallelStrategy):
    """Joins the processes of a job into a mesh.

    Args:
        layout: as asked for, not resolved.
        order: what is wanted of the order of the ranks.
        timeout: how long a collective may wait before it fails with the names of those it waits for.
        backend: of the process group; None takes "nccl" on GPU and "gloo" on CPU.
        cluster_environment: None lets Lightning choose, except under mpirun, which it may take for srun.
        options: as Lightning's `ParallelStrategy`.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        order: OrderOptions,
        timeout: timedelta,
        backend: str | None,
        cluster_environment: ClusterEnvironment | None,
        **options: Any,
    ) -> None:
        if cluster_environment is None and mpi_launch() is not None:
            cluster_environment = choose_environment()
        super().__init__(cluster_environment=cluster_environment, **options)
        self.num_nodes = 1
        self.requested_layout = layout
        self._order_options = order
        self._order: Order | None = None
        self._timeout, self._backend = timeout, backend
        self._connection: Connection | None = None
        self._mesh: Mesh | None = None
        self._agreement: Agreement | None = None
        self._agreed: set[str] = set()

    # Processes

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        seen = torch.cuda.device_count() if self.parallel_devices[0].type == "cuda" else 0
        return pick_device(self.parallel_devices, self.local_rank, seen)

    @property
    def num_processes(self) -> int:
        """Processes on this node: what the launcher started, else one per device."""
        assert self.cluster_environment is not None
        started = local_world_size(self.cluster_environment)
        return started or len(self.parallel_devices or [None])

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.num_nodes == 1:  # not given, or on one node: a launcher knows
            self.num_nodes = node_count(self.cluster_environment, 1)
        self._set_world_ranks()
        if not isinstance(self.cluster_environment, LightningEnvironment):  # whose processes are started later
            self._settle_order()
        self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        env = self.cluster_environment
        if not env.creates_processes_externally or local_world_size(env) is None:
            env.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            env.set_world_size(self.num_nodes * self.num_processes)
        set_printing_rank(env.global_rank())

    def _settle_order(self) -> None:
        """Let this process have another rank than the launcher gave it, if that brings its peers closer. Once."""
        assert self.cluster_environment is not None
        if self._order is not None or self._connection is not None:
            return
        self._order = settle_order(
            self.cluster_environment,
            self.requested_layout,
            self._order_options,
            device=None if self.root_device.type == "cpu" else self.root_device.index,
            nodes=self.num_nodes,
            timeout=self._timeout,
        )
        if self._order is not None:
            self.cluster_environment = self._order.environment

    def _join(self, layout: Layout) -> None:
        """Join the process group and build the mesh of the resolved `layout`, once for the life of the strategy."""
        if self._mesh is not None:
            return  # a second fit, or test after fit
        assert self.cluster_environment is not None
        backend = self._backend or ("nccl" if self.root_device.type == "cuda" else "gloo")
        self._connection = init_distributed(self.cluster_environment, backend, self._timeout)
        atexit.register(self._leave)
        self._mesh = Mesh.build(layout, self.global_rank, timeout=self._timeout)
        nonce = self._mesh["control"].broadcast_object(uuid4().hex)
        self._agreement = Agreement(self.global_rank, self.world_size, nonce, self._timeout)

    def _together(self, what: str, *, always: bool = False) -> AbstractContextManager[None]:
        """Around what ranks do alike: an error of some is one of all, in the first round and when all have met it."""
        assert self._agreement is not None
        if always or what not in self._agreed:
            self._agreed.add(what)
            return self._agreement.together(what)
        return self._agreement.if_all(what)

    def _leave(self) -> None:
        """Leave the process group without waiting for anybody, as at the end of the process."""
        atexit.unregister(self._leave)
        if self._mesh is not None and torch.distributed.is_initialized():
            self._mesh.close()
        if self._connection is not None:
            self._connection.close()
            assert self.cluster_environment is not None
            self.cluster_environment.teardown()
        self._connection = self._mesh = None

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's own refusals come before the ranks can talk, and on all of them: print them once."""
        if isinstance(exception, MisconfigurationException) and self._mesh is None:
            mark_shared(exception)

    # What Lightning asks of the processes

    @property
    def mesh(self) -> Mesh:
        """Axes, coordinates and groups of this rank (known once the environment is set up)."""
        if self._mesh is None:
            raise RuntimeError("the mesh is not known before Trainer.fit (or validate, test, predict) has started")
        return self._mesh

    @property
    def place(self) -> str:
        """Host and device of this rank, for people."""
        device = "" if self.root_device.type == "cpu" else f" {self.root_device}"
        return f"{socket.gethostname()}{device}"

    @property
    def is_distributed(self) -> bool:
        """Lightning injects a distributed sampler only where this is true."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that differ only in tp, pp or cp read the same samples."""
        return {"num_replicas": self.mesh.size("dp"), "rank": self.mesh.index("dp")}

    def process_dataloader(self, dataloader: object) -> object:
        """Refuse loaders of different lengths before a rank waits for one that has finished."""
        return process_loader(dataloader, self.mesh, among="model" if self.data_ranks_are_independent else "control")

    @property
    def data_ranks_are_independent(self) -> bool:
        """Whether data ranks may take different numbers of batches, as Lightning's predict lets them."""
        return False

    def reduce(self, tensor: Any, group: Any = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduce over the data axis: ranks that differ only in tp or pp hold the same value."""
        if not isinstance(tensor, Tensor):
            return tensor
        data = self.mesh["data"]
        total = tensor.detach().clone().to(self.root_device)
        operation = getattr(reduce_op, "name", reduce_op) or "sum"
        if str(operation).lower() in ("mean", "avg"):
            if not total.is_floating_point():
                total = total.float()
            data.all_reduce(total)
            return total / data.size
        data.all_reduce(total, op=getattr(torch.distributed.ReduceOp, str(operation).upper()))
        return total

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = self.mesh["control"].gather_objects(bool(decision))
        return min(votes) if all else max(votes)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack over the data axis, where values differ."""
        data = self.mesh["data"]
        if sync_grads and data.size > 1:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(all_gather(tensor, group=data.group))
        return data.all_gather(tensor.unsqueeze(0)).reshape(data.size, *tensor.shape)

    def barrier(self, name: str | None = None) -> None:
        if self._mesh is not None:
            with self.mesh.ledger.during(self.mesh.ledger.phase, f"barrier {name or ''}".strip()):
                self.mesh["control"].barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.mesh["control"].broadcast_object(obj, src=src) if self._mesh is not None else obj


def pick_device(devices: Sequence[torch.device], local_rank: int, seen: int) -> torch.device:
    """The device of the process in slot `local_rank`.

    Args:
        devices: what the Trainer was given, in slot order.
        local_rank: the launcher's slot; it is the physical GPU's, unless the launcher shows each process one GPU only.
        seen: accelerators this process can see.

    Raises:
        ValueError: fewer devices than slots, though more could be seen.
    """
    if devices[0].type == "cpu" or (len(devices) == 1 and seen == 1):
        return devices[0]
    if local_rank >= len(devices):
        raise ValueError(
            f"the launcher started a process in slot {local_rank} of this node, but the Trainer has {len(devices)} "
            f"device(s); use Trainer(devices='auto') or as many devices as processes on a node"
        )
    return devices[local_rank]
