"""What several files share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from training_helpers import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    with closing(Processes()) as found:
        yield found
