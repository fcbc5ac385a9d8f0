"""From a loaded model to the stages of its program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from graphpar.cli.loading import Loaded
from graphpar.collector import collector_paused
from graphpar.errors import GraphparError
from graphpar.interpret import model_state
from graphpar.pipeline import Pipeline, format_pipeline, run_pipeline
from graphpar.program import Program
from graphpar.trace import trace
from graphpar.verify import verify


def build_stages(
    loaded: Loaded, pipeline: Pipeline, seen: Callable[[str, Program], None]
) -> Program:
    """The last stage; ``seen`` gets the name and program of each as soon as it is verified.

    A fault's notes get the pipeline as text, for a bug report.
    """
    names = iter([each.name for each in pipeline])
    try:
        with collector_paused():
            program = trace(loaded.module, loaded.args, loaded.kwargs)
            verify(program)
            seen("trace", program)
            stages = run_pipeline(program, pipeline, [lambda _, made, __: seen(next(names), made)])
    except Exception as error:
        if not isinstance(error, GraphparError):
            error.add_note(f"pipeline: {format_pipeline(pipeline)}")
        raise
    return list(stages.values())[-1]


def with_weights(pipeline: Pipeline, module: nn.Module) -> Pipeline:
    """The pipeline, with the values of the model's state where a pass measures them."""
    return tuple(
        replace(each, options=replace(each.options, weights=model_state(module)))
        if each.name == "lower-recurrences"
        else each
        for each in pipeline
    )
