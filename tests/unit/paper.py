"""The example ``paper_gpt`` as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).parents[2] / "examples" / "paper_gpt.py"


def load() -> ModuleType:
    if "paper_gpt" in sys.modules:
        return sys.modules["paper_gpt"]
    spec = importlib.util.spec_from_file_location("paper_gpt", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper_gpt"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


paper = load()
