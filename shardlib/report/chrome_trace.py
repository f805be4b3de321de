"""A simulated schedule as a Chrome trace, which Perfetto (https://ui.perfetto.dev) opens from disk.

In: a `Simulation`. Out: JSON text in the Trace Event Format: one track per rank, an arrow per message, a counter
of live activations per rank. One unit of cost is one millisecond.

    Path("zb_h1.json").write_text(chrome_trace(simulation))
"""

import json
from typing import Any, Final

from shardlib.pipeline.graph import build_graph
from shardlib.pipeline.simulate import Simulation, memory_steps

MICROSECONDS: Final = 1000.0
CATEGORIES: Final = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def chrome_trace(simulation: Simulation) -> str:
    """The trace as text."""
    table, process = simulation.table, 0
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{table.name} (simulated)"}}
    ]
    for rank, row in enumerate(table.rows):
        events.append({"ph": "M", "pid": process, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events.append(
            {"ph": "M", "pid": process, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}
        )
        for cell, (start, end) in zip(row, simulation.spans[rank]):
            events.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": rank,
                    "name": str(cell),
                    "cat": CATEGORIES[cell.kind],
                    "ts": start * MICROSECONDS,
                    "dur": (end - start) * MICROSECONDS,
                    "args": {
                        "microbatch": cell.microbatch,
                        "chunk": cell.chunk,
                        "stage": table.placement.stage(rank, chunk=cell.chunk),
                    },
                }
            )
        for time, live in memory_steps(simulation, rank):
            name = f"live activations, rank {rank}"
            events.append({"ph": "C", "pid": process, "name": name, "ts": time * MICROSECONDS, "args": {"live": live}})
    events += _arrows(simulation, process=process)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"costs": str(simulation.costs)}})


def _arrows(simulation: Simulation, *, process: int) -> list[dict[str, Any]]:
    """A flow from the end of what sends to the start of what uses the message."""
    graph = build_graph(simulation.table)
    spans = [span for row in simulation.spans for span in row]
    events = list[dict[str, Any]]()
    for index, needs in enumerate(graph.needs):
        for need in needs:
            if graph.ranks[need] != graph.ranks[index]:
                flow = {"pid": process, "name": "message", "cat": "message", "id": len(events) // 2}
                sent, used = spans[need], spans[index]
                inside = max(sent[0], sent[1] - (sent[1] - sent[0]) / 1000)  # a flow must begin within its slice
                events.append({**flow, "ph": "s", "tid": graph.ranks[need], "ts": inside * MICROSECONDS})
                events.append({**flow, "ph": "f", "bp": "e", "tid": graph.ranks[index], "ts": used[0] * MICROSECONDS})
    return events
