"""Machines by name: data sheets and published measurements, or this one."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from zerofx.calibrate import this_machine
from zerofx.groups import Group
from zerofx.machine import Hardware as Hardware
from zerofx.machine import Link as Link
from zerofx.presets import PRESETS as PRESETS
from zerofx.presets import THIS_MACHINE as THIS_MACHINE
from zerofx.presets import check_hardware


def hardware(named: str | Hardware, mesh: DeviceMesh | None = None, group: Group | None = None) -> Hardware:
    """Return a machine by its name: a preset, or ``"this_machine"``, calibrated once; a Hardware is returned as it is.

    ``mesh`` and ``group`` are the ranks that calibrate together: all of them must call. Raises ConfigError for an unknown name.
    """
    check_hardware(named, "zerofx.hardware")
    if isinstance(named, Hardware):
        return named
    return this_machine(mesh, group) if named == THIS_MACHINE else PRESETS[named]
