"""Ways to find out what this machine is: one module for each, found by the entry points of `parallax.probes`."""

from parallax.plugins.topology.probes.base import Probe, ProbeError, find_probe, probe_node

__all__ = ["Probe", "ProbeError", "find_probe", "probe_node"]
