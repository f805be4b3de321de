"""The pictures of docs/pipeline_schedules.md, drawn by the code they explain.

In: nothing. Out: docs/pictures/*.svg, the same bytes every time; a test compares them with what is committed.

    python docs/make_pictures.py
"""

from collections.abc import Iterator
from pathlib import Path

from shardlib.pipeline.costs import Costs
from shardlib.pipeline.schedules import ALL, build
from shardlib.pipeline.simulate import simulate
from shardlib.pipeline.synthesize import synthesize
from shardlib.report.gantt import gantt

PICTURES = Path(__file__).parent / "pictures"
STAGES, MICROBATCHES = 4, 8
UNEVEN = "F=1,B=2.2,W=0.8,link=0.2,head=0.2"


def pictures() -> Iterator[tuple[str, str]]:
    """(file name, SVG text) of every picture in the tutorial."""
    for schedule in ALL:
        table = schedule.build(stages=STAGES, microbatches=MICROBATCHES)
        yield f"{schedule.name}.svg", gantt(simulate(table))
    table = build("1f1b", stages=STAGES, microbatches=MICROBATCHES)
    yield "1f1b_lockstep.svg", gantt(simulate(table, lockstep=True))
    costs = Costs.parse(UNEVEN)
    found = synthesize(costs, 3, stages=STAGES, microbatches=MICROBATCHES)
    yield "v_half_uneven.svg", gantt(simulate(build("v_half", stages=STAGES, microbatches=MICROBATCHES), costs))
    yield "synthesized.svg", gantt(simulate(found.table, costs))


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures():
        (PICTURES / name).write_text(text, encoding="utf-8")
        print(f"wrote {PICTURES / name}")
