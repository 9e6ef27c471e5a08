"""Hypothesis profiles: `ci` (default; fixed seed, minutes) and `deep` (random, long), chosen by MINITS_PROFILE."""

import os
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

sys.path.insert(
    0, str(Path(__file__).parent.parent)
)  # `pytest` alone does not put the project on the path
COMMON = dict(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile(
    "ci", derandomize=True, max_examples=40, print_blob=False, database=None, **COMMON
)
settings.register_profile("deep", max_examples=1000, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("MINITS_PROFILE", "ci"))
torch.set_num_threads(1)  # the models are so small that a second thread costs more than it gives
