import gc
from collections.abc import Iterator

import pytest
import torch
from _pytest.config import parse_warning_filter
from hypothesis import HealthCheck, settings

from tests.ranks import Pool, WarningFilter

# One thread a rank: four ranks share two cores. Only the loopback interface: no test may depend on the machine's network.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
# How long an example takes says nothing on a machine that others use too.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("shared machine"), max_examples=500, print_blob=True)
settings.load_profile("shared machine")
# The reference runs in this process, next to the ranks, and is small.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def warning_filters(pytestconfig: pytest.Config) -> list[WarningFilter]:
    """The filters that pytest applies in this process, for the ranks' processes."""
    from_command_line = pytestconfig.getoption("pythonwarnings") or []
    from_file = [parse_warning_filter(line, escape=False) for line in pytestconfig.getini("filterwarnings")]
    return from_file + [parse_warning_filter(line, escape=True) for line in from_command_line]


@pytest.fixture(scope="session")
def ranks(warning_filters: list[WarningFilter]) -> Iterator[Pool]:
    pool = Pool(warning_filters, ENVIRONMENT)
    yield pool
    pool.close()


def pytest_collection_finish() -> None:
    """What is imported stays: the collector need not look at it again and again while tests compile."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", dest="rewrite_golden", help="write tests/golden anew, to be read as a diff")
