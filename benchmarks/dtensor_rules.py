"""The op rules against DTensor's sharding strategies.

    python benchmarks/dtensor_rules.py [--calls 12]

For random calls of every op that has a rule: how many placements of the operands DTensor takes
without redistribution (two ranks), how many of them graphpar allows with the same results, and
what DTensor allows that graphpar does not, with the verdict of brute force and the reason. Nothing
that graphpar allows is among what brute force refutes: `tests/property/test_rules.py` checks it.
"""

from __future__ import annotations

import argparse
from collections import Counter

from _common import report, table

from graphpar.passes.rules import rule_for
from tests.property.dtensor_gaps import GAPS, OPAQUE, REFUTED
from tests.property.dtensor_rules import REFUTED as WRONG
from tests.property.dtensor_rules import Gap, alike, compare, functional_ops, two_ranks
from tests.property.rule_cases import CASES, makers


def reason(gap: Gap) -> str:
    if gap.verdict == WRONG:
        return REFUTED.get(gap.op, "not listed")
    return GAPS.get(gap.op, {}).get(gap.form, "not listed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=12)
    options = parser.parse_args()
    ops = {op: makers(op) for op in CASES}
    ops |= {op: (alike(op),) for op in functional_ops() if op not in CASES and rule_for(op)}
    counts: Counter[str] = Counter()
    gaps: set[Gap] = set()
    with two_ranks() as mesh:
        for calls in ops.values():
            taken = 0
            for seed in range(options.calls):
                found = compare(calls, seed, mesh)
                taken += found.taken
                counts["shared"] += found.shared
                gaps |= found.gaps
            counts["taken"] += taken
            counts["ops"] += taken > 0
    rows = [(g.op, g.form, g.verdict, reason(g)) for g in sorted(gaps) if g.verdict != WRONG]
    wrong = sorted({(g.op, WRONG, reason(g)) for g in gaps if g.verdict == WRONG})
    opaque = [(", ".join(ops), why) for why, ops in OPAQUE.items()]
    body = (
        f"DTensor takes {counts['taken']} placements of calls of {counts['ops']} ops; "
        f"{counts['shared']} of them graphpar allows too, with the same results.\n\n"
        "## What DTensor allows and graphpar does not\n\n"
        f"{table(('op', 'form', 'by brute force', 'reason'), rows)}\n\n"
        "## What DTensor allows and brute force refutes\n\n"
        f"{table(('op', 'by brute force', 'what is wrong'), wrong)}\n\n"
        "## Ops without a rule\n\n"
        f"{table(('ops', 'reason'), opaque)}"
    )
    report("dtensor_rules", "The op rules against DTensor's", body)


if __name__ == "__main__":
    main()
