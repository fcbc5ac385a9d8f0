import gc
import os

# Before torch is imported, which reads them once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1"  # kernels run in Triton's interpreter

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile("dev", max_examples=20, deadline=None)
settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # it measures seconds: a busy machine fails it
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev")
)


def pytest_collection_finish() -> None:
    """What is imported stays, and need not be looked through by every collection of garbage."""
    gc.collect()
    gc.freeze()
