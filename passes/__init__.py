"""The passes, one line per stage."""

from zerofx.passes.bucket import Bucket
from zerofx.passes.lower import Lower
from zerofx.passes.preserve import Preserve
from zerofx.passes.recompute import Recompute
from zerofx.passes.reduce import Reduce
from zerofx.passes.refresh import Refresh
from zerofx.passes.release import Release
from zerofx.passes.schedule import Schedule
from zerofx.passes.unshard import Unshard
from zerofx.pipeline import Pipeline

STAGES = {
    0: Pipeline(Unshard(), Preserve(), Reduce(), Bucket(), Schedule(), Lower()),
    1: Pipeline(Unshard(), Preserve(), Reduce(), Refresh(), Bucket(), Schedule(), Lower()),
    2: Pipeline(Unshard(), Preserve(), Reduce(), Refresh(), Bucket(), Schedule(), Lower()),
    3: Pipeline(Unshard(), Preserve(), Recompute(), Release(), Reduce(), Refresh(), Bucket(), Schedule(), Lower()),
}
