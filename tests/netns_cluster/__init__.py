"""A make-believe multi-node cluster on one Linux machine, for tests of mpirun jobs.

Every "node" is a set of kernel namespaces (network, host name, mounts, SysV IPC)
kept alive by one sleeping holder process.  A further holder owns a bridge that
the nodes' virtual cables plug into.  Nothing is ever plugged into the machine's
own network namespace, so no packet of a test can leave this machine, and nothing
of a test can be reached from outside.

        node px-0                 node px-1                 node px-2
   eth0 198.18.77.10        eth0 198.18.77.11        eth0 198.18.77.12
          |  (rate limit)          |  (rate limit)          |
          +----------- bridge inside the hub's own netns ---+

What a process inside a node sees
  * its own host name (``px-0``, ``px-1`` ...), so gethostname() and
    MPI_Get_processor_name() differ and MPI's COMM_TYPE_SHARED splits per node;
  * its own ``lo`` and ``eth0``; traffic between two ranks of one node stays on
    loopback at memory speed, traffic between nodes goes through ``eth0`` and the
    rate set with ``link``;
  * its own /dev/shm and SysV IPC, so shared memory cannot leak between nodes;
  * an /etc/hosts that names the nodes and nothing else;
  * the machine's files otherwise (think "shared filesystem"); ``--private DIR``
    gives each node its own empty DIR;
  * the machine's process ids and all of its cores: nodes are NOT isolated in CPU
    or memory, so compute time must never be part of a measured claim.

The ``ssh`` of this cluster is a generated script (``STATE/rsh``).  Like ssh it
starts the remote command in a nearly empty environment, so forgetting to forward
a variable (mpirun -x) fails here as it would on a real cluster.

Command line (needs root, iproute2 and util-linux; Python's standard library only)
  python -m tests.netns_cluster doctor                          what this kernel can do
  python -m tests.netns_cluster up -n 2 --slots 4 --rate 200mbit
  python -m tests.netns_cluster status
  python -m tests.netns_cluster exec px-1 -- hostname
  python -m tests.netns_cluster link --rate 100mbit             change the speed; "none" lifts it
  python -m tests.netns_cluster link --node px-1 --down          unplug one node ("--up" replugs)
  python -m tests.netns_cluster mpirun -np 8 -x FOO=1 -- python train.py
  python -m tests.netns_cluster down                            remove it and every process in it
  python -m tests.netns_cluster run -n 2 --slots 4 --rate 200mbit -np 8 -- python train.py
                                                   up + mpirun + down in one go
``--name`` (default "px", also the host name prefix) keeps clusters apart; several
may exist at once, each sealed off from the others.

From Python / pytest
  from tests.netns_cluster import Cluster, supported
  @pytest.mark.skipif(supported() is not None, reason=str(supported()))
  def test_x():
      with Cluster("t1", nodes=2, slots=4, rate="200mbit") as c:
          r = c.mpirun([sys.executable, "script.py"], np=8, timeout=120)
          assert r.returncode == 0, r.stdout + r.stderr

Guarantees
  * ``up`` is idempotent: an old cluster of that name is removed first.
  * ``down`` is idempotent, and ends (by pid) only processes that sit in a network
    namespace whose holder is alive and ours, or that carry the cluster's token in
    their environment.
  * if nobody calls ``down``, the holders exit after ``--ttl`` seconds (default
    3600) and the kernel frees namespaces and cables once the last process is gone.

Limits
  * Open MPI's daemon may print "plm:ssh: Warning: setpgid(...) failed": harmless, the
    ssh stand-in is quicker than it expects.
  * no delay unless the kernel has sch_netem (``doctor`` tells); rates need sch_tbf.
  * the rate limit is per node and per direction, as a NIC's line rate is.
"""

from __future__ import annotations

from tests.netns_cluster.cluster import Cluster
from tests.netns_cluster.jobs import find_mpirun
from tests.netns_cluster.kernel import ClusterError, supported

__all__ = ["Cluster", "ClusterError", "find_mpirun", "supported"]
