"""What a program costs: time, memory and communication, from its sizes alone."""

from __future__ import annotations

from graphpar.cost.calibrate import calibrate_cpu
from graphpar.cost.dry_run import GraphRun, Step, Storage, dry_run, replayed_kernels
from graphpar.cost.hardware import HARDWARE, Hardware, Link, find_hardware
from graphpar.cost.kernels import Kernel
from graphpar.cost.partition import CostModel, is_contraction
from graphpar.cost.saved import SavedTensor, SavedTensors, saved_tensors
from graphpar.cost.times import ConstantTimes, Roofline, TableTimes, Times, total_us

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
    "find_hardware",
    "is_contraction",
    "replayed_kernels",
    "saved_tensors",
    "total_us",
]
