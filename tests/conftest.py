"""Hypothesis profiles: `ci` (default; fixed seed, minutes) and `deep` (random, long), chosen by MINITS_PROFILE."""
import os

import torch
from hypothesis import HealthCheck, settings

COMMON = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("ci", derandomize=True, max_examples=40, print_blob=False, database=None, **COMMON)
settings.register_profile("deep", max_examples=1000, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("MINITS_PROFILE", "ci"))
torch.set_num_threads(2)
