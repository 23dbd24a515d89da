"""Which ranks fit on this machine at the same time, and on which GPUs.

It is: a count of slots, and the GPUs of each job when there are any. It is not: a look at the machine (`launcher.py`
does that once).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Places:
    """Slots for ranks.

    Attributes:
        slots: most ranks at the same time.
        devices: one name for each slot ("0", "GPU-4f..."), or none when ranks need no device of their own.
        most: most jobs at the same time.
    """

    slots: int
    devices: tuple[str, ...] = ()
    most: int = 1
    _taken: dict[int, tuple[int, tuple[str, ...]]] = field(default_factory=dict)

    def take(self, job: int, ranks: int) -> tuple[str, ...] | None:
        """Places for `ranks` ranks of `job`: their devices; None when it has to wait.

        A job that needs more ranks than there are slots runs alone, with all devices.
        """
        if len(self._taken) >= self.most:
            return None
        used = sum(count for count, _ in self._taken.values())
        if self._taken and used + ranks > self.slots:
            return None
        busy = {device for _, devices in self._taken.values() for device in devices}
        free = tuple(device for device in self.devices if device not in busy)[:ranks]
        self._taken[job] = (ranks, free)
        return free

    def give_back(self, job: int) -> None:
        """`job` has ended."""
        del self._taken[job]
