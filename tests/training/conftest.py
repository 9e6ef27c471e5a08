"""What several files share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from training_helpers import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    with closing(Processes()) as found:
        yield found


@pytest.fixture
def graphs(monkeypatch) -> Iterator[list]:
    """The graphs that dynamo makes of compiled layers; their operations run as they are."""
    made, compile_with = [], torch.nn.Module.compile

    def count(graph, _inputs):
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer: compile_with(layer, backend=count)
    )
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()
