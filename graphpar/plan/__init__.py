"""A training step before it runs: its memory and its timeline on every stage of a pipeline."""

from __future__ import annotations

from graphpar.plan.chrome import chrome_trace
from graphpar.plan.optimizer import ADAMW, MIXED_ADAM, OPTIMIZERS, Optimizer
from graphpar.plan.planner import Planner
from graphpar.plan.schedule import Pipeline, Task
from graphpar.plan.simulate import Event, simulate
from graphpar.plan.step import Setup, Stage, StepPlan
from graphpar.plan.svg import memory_svg

__all__ = [
    "ADAMW",
    "MIXED_ADAM",
    "OPTIMIZERS",
    "Event",
    "Optimizer",
    "Pipeline",
    "Planner",
    "Setup",
    "Stage",
    "StepPlan",
    "Task",
    "chrome_trace",
    "memory_svg",
    "simulate",
]
