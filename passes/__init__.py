"""The passes, one line per stage."""

from zerofx.passes.bucket import Bucket
from zerofx.passes.lower import Lower
from zerofx.passes.offload import Offload
from zerofx.passes.preserve import Preserve
from zerofx.passes.recompute import Recompute
from zerofx.passes.reduce import Reduce
from zerofx.passes.refresh import Refresh
from zerofx.passes.regather import Regather
from zerofx.passes.release import Release
from zerofx.passes.schedule import Schedule
from zerofx.passes.stash import Stash
from zerofx.passes.unshard import Unshard
from zerofx.pipeline import Pipeline

STAGES = {
    0: Pipeline(Unshard(), Recompute(), Preserve(), Stash(), Reduce(), Bucket(), Schedule(), Offload(), Lower()),
    1: Pipeline(Unshard(), Recompute(), Preserve(), Stash(), Reduce(), Refresh(), Bucket(), Schedule(), Offload(), Lower()),
    2: Pipeline(Unshard(), Recompute(), Preserve(), Stash(), Reduce(), Refresh(), Bucket(), Schedule(), Offload(), Lower()),
    3: Pipeline(
        Unshard(), Recompute(), Preserve(), Regather(), Release(), Stash(), Reduce(), Refresh(), Bucket(), Schedule(), Offload(), Lower()
    ),
}
