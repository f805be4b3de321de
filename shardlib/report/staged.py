"""A pipeline on a terminal: what was cut, a line per stage, what waits and what travels.

In: `StagingFacts`. Out: text on an open page.

    print_pipeline(out, explanation.pipeline)
"""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlib.explanation import layers_text, pipeline_rows
from shardlib.staging_facts import StagingFacts


def print_pipeline(out: Console, facts: StagingFacts, *, title: str = "pipeline") -> None:
    """The sentences of a pipeline, then its stages as a table."""
    out.print(f"\n{title}", style="bold")
    words = Table.grid(padding=(0, 2, 0, 0))
    words.add_column(overflow="fold")
    words.add_column(overflow="fold")
    for name, sentence in pipeline_rows(facts):
        words.add_row(Text(name), Text(sentence))
    out.print(words)
    out.print(_stages(facts))


def print_stages(out: Console, facts: StagingFacts, *, title: str) -> None:
    """What tells two pipelines apart: idle share, balance and memory in one line each."""
    shown = ("balance", "memory", "ticks", "messages")
    for name, sentence in pipeline_rows(facts):
        if name in shown:
            out.print(Text(f"{name} ({title}): {sentence}"), overflow="fold")


def _stages(facts: StagingFacts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "layers"):
        table.add_column(heading, overflow="fold")
    for heading in ("load in layers", "parameters of layers", "live microbatches"):
        table.add_column(heading, justify="right", overflow="fold")
    for rank, stage in enumerate(facts.stages):
        numbers = (f"{stage.load:.2f}", f"{stage.layer_parameters:,}", f"{stage.live_microbatches}")
        table.add_row(*map(Text, (f"{rank}", layers_text(stage), *numbers)))
    return table
