from __future__ import annotations
def add_parser(c):
    return c.add_parser("demo")
