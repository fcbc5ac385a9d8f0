"""What a program costs: time, memory and communication, from its sizes alone."""

from __future__ import annotations

from graphpar.cost.calibrate import calibrate_cpu
from graphpar.cost.dry_run import GraphRun, Step, Storage, dry_run
from graphpar.cost.hardware import HARDWARE, Hardware, Link, find_hardware
from graphpar.cost.kernels import Kernel
from graphpar.cost.partition import CostModel, is_contraction
from graphpar.cost.saved import SavedTensor, SavedTensors, saved_tensors
from graphpar.cost.state import is_trained, local_nbytes, training_nbytes
from graphpar.cost.times import ConstantTimes, Roofline, TableTimes, Times, elapsed_us, total_us

__all__ = [
    "HARDWARE",
    "ConstantTimes",
    "CostModel",
    "GraphRun",
    "Hardware",
    "Kernel",
    "Link",
    "Roofline",
    "SavedTensor",
    "SavedTensors",
    "Step",
    "Storage",
    "TableTimes",
    "Times",
    "calibrate_cpu",
    "dry_run",
    "elapsed_us",
    "find_hardware",
    "is_contraction",
    "is_trained",
    "local_nbytes",
    "saved_tensors",
    "total_us",
    "training_nbytes",
]
