"""Pictures of schedules: what is drawn is what was simulated."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.pipeline.compare import compare
from shardlib.pipeline.costs import Costs
from shardlib.pipeline.schedules import ALL, build
from shardlib.pipeline.simulate import simulate
from shardlib.report.chrome_trace import chrome_trace
from shardlib.report.gantt import gantt
from shardlib.report.schedule_colors import HUES, fill, ink
from shardlib.report.schedule_grid import plain, timeline
from shardlib.report.schedule_page import schedule_page
from shardlib.report.schedule_summary import comparison_rows, summary, textbook, verdict

SVG = "{http://www.w3.org/2000/svg}"
UNEVEN = Costs.parse("F=1.37,B=2.9,W=1.01,link=0.21,head=0.7,stash=0.9")


def simulation_of(name, costs=None, **options):
    return simulate(build(name, stages=4, microbatches=8), costs, **options)


def test_the_grid_is_the_simulation_drawn_to_scale():
    assert plain(timeline(simulation_of("1f1b"))) == (
        "rank 0 F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--\n"
        "rank 1 ..F0F1F2........B0--F3B1--F4B2--F5B3--F6B4--F7B5--..B6--..B7--\n"
        "rank 2 ....F0F1....B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--..B7--\n"
        "rank 3 ......F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--"
    )


def test_a_blank_between_texts_where_there_is_room():
    assert (
        plain(timeline(simulation_of("1f1b"), width=120)).splitlines()[3].startswith("rank 3 .........F0-B0----F1-B1")
    )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ALL),
    st.sampled_from(["F=1,B=2,W=1", "F=1.37,B=2.9,W=1.01,link=0.21", "F=1,B=1,W=0", "F=1,B=1,W=0.00001"]),
    st.integers(40, 200),
)
def test_no_line_is_wider_than_asked_and_every_action_is_there_once(schedule, costs, width):
    simulation = simulate(schedule.build(stages=4, microbatches=8), Costs.parse(costs))
    text = plain(timeline(simulation, width=width))
    assert max(map(len, text.splitlines())) <= width
    for rank in range(4):
        drawn = "".join(line[7:] for line in text.splitlines() if line.startswith(f"rank {rank}"))
        found = re.findall(r"[FBIWfbiw]\d+(?:\.\d)?", drawn)
        shown = [cell for cell, (start, end) in zip(simulation.table.rows[rank], simulation.spans[rank]) if end > start]
        assert len(found) == len(shown)


@pytest.mark.parametrize("name", [schedule.name for schedule in ALL])
@pytest.mark.parametrize("costs", [None, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("lockstep", [False, True])
def test_the_chart_is_wellformed_the_same_every_time_and_has_every_action(name, costs, lockstep):
    simulation = simulation_of(name, costs, lockstep=lockstep)
    text = gantt(simulation)
    assert text == gantt(simulation)
    root = ElementTree.fromstring(text)
    tips = [group.findtext(f"{SVG}title") for group in root.iter(f"{SVG}g")]
    assert len(tips) == sum(map(len, simulation.table.rows))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for bar in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(bar.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width + 0.1 and y + h <= height + 0.1
    colors = {bar.get("fill") for bar in root.iter(f"{SVG}rect")}
    assert set(HUES.values()) <= colors and "url(#idle)" in colors
    assert len(list(root.iter(f"{SVG}path"))) == 4, "one memory curve per rank"


def test_bars_are_drawn_where_the_simulation_puts_them():
    simulation = simulation_of("1f1b")
    root = ElementTree.fromstring(gantt(simulation))
    for group in root.iter(f"{SVG}g"):
        cell, rank, start, end = re.fullmatch(r"(\w+) rank (\d) stage \d: ([\d.]+) to ([\d.]+)", group.findtext(f"{SVG}title") or "").groups()  # type: ignore[union-attr]  # fmt: skip  # noqa: E501
        bars = group.findall(f"{SVG}rect")
        scale = (1120 - 64 - 24) / 33
        assert float(bars[0].get("x", 0)) == pytest.approx(64 + float(start) * scale, abs=0.01)
        assert sum(float(bar.get("width", 0)) for bar in bars[:-1]) == pytest.approx(
            (float(end) - float(start)) * scale, abs=0.03
        )
        label = group.find(f"{SVG}text")
        assert label is not None and label.text == cell[1:]
        assert float(bars[0].get("y", 0)) == 62 + 31 * int(rank)


def luminance(color):
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def as_seen(color, *, kind):
    """A colour as people with protanopia or deuteranopia see it (Vienot, Brettel, Mollon 1999), in linear RGB."""
    red, green, blue = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (part**2.2 for part in (red, green, blue))
    if kind == "protanopia":
        mixed = 0.11238 * red + 0.88762 * green
        return mixed, mixed, 0.00401 * red - 0.00401 * green + blue
    if kind == "deuteranopia":
        mixed = 0.29275 * red + 0.70725 * green
        return mixed, mixed, -0.02234 * red + 0.02234 * green + blue
    return red, green, blue


@pytest.mark.parametrize("kind", ["normal", "protanopia", "deuteranopia"])
def test_colours_are_told_apart_by_the_colour_blind(kind):
    seen = [as_seen(color, kind=kind) for color in HUES.values()]
    for number, one in enumerate(seen):
        for other in seen[number + 1 :]:
            assert sum((a - b) ** 2 for a, b in zip(one, other)) ** 0.5 > 0.1


def test_text_on_every_colour_has_contrast():
    for kind in HUES:
        for chunk in range(3):
            background = fill(kind, chunk=chunk, num_chunks=3)
            high, low = sorted((luminance(background), luminance(ink(background))), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_the_trace_has_every_action_message_and_counter(name):
    simulation = simulation_of(name, UNEVEN)
    events = json.loads(chrome_trace(simulation))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(map(len, simulation.table.rows))
    for event in slices:
        row = simulation.table.rows[event["tid"]]
        position = [str(cell) for cell in row].index(event["name"])
        start, end = simulation.spans[event["tid"]][position]
        assert (event["ts"], event["dur"]) == (start * 1000, (end - start) * 1000)
    sent, used = ([event for event in events if event["ph"] == phase] for phase in "sf")
    assert len(sent) == len(used) == simulation.num_messages
    assert all(one["id"] == other["id"] and one["ts"] <= other["ts"] for one, other in zip(sent, used))
    peaks = [0.0] * 4
    for event in events:
        if event["ph"] == "C":
            rank = int(event["name"].rsplit(" ", 1)[1])
            peaks[rank] = max(peaks[rank], event["args"]["live"])
    assert tuple(peaks) == simulation.peak_activations
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {f"rank {rank}" for rank in range(4)}


def test_the_page_opens_from_disk_without_network():
    page = schedule_page(simulation_of("zb_h2"))
    assert "<script" not in page and "href=" not in page and "src=" not in page
    assert page.count("<svg") == 1 and "(p-1)(F+I-2W)" in page
    assert len(page) < 2_000_000


def test_names_are_escaped(tmp_path):
    table = build("1f1b", stages=2, microbatches=2)
    evil = type(table)(name="<script>alert(1)</script>", placement=table.placement, rows=table.rows)
    assert "<script>" not in schedule_page(simulate(evil)) + gantt(simulate(evil))


def test_the_textbook_is_quoted_only_where_it_speaks():
    assert textbook(simulation_of("1f1b")) is not None
    assert textbook(simulation_of("1f1b", UNEVEN)) is None
    assert textbook(simulate(build("zb_v", stages=4, microbatches=4))) is None, "fewer than 2p microbatches"
    book = textbook(simulation_of("zb_h1", Costs.parse("F=2,B=3,W=1")))
    assert book is not None and book.bubble == 9 / (9 + 40)


def test_a_summary_names_every_figure():
    text = "\n".join(summary(simulation_of("zb_h1", Costs.parse("F=1,B=2,W=1,message_bytes=10"), lockstep=True)))
    for words in ("27 unit ticks", "in flight F to I", "stash I to W", "40 permutes", "bytes sent by the busiest rank"):
        assert words in text


def test_the_verdict_under_a_limit():
    found = compare(stages=8, microbatches=32, max_activations=4)
    assert verdict(found)[0] == "fastest free-running with at most 4 live activations: v_min, makespan 109.5, peak 4"
    fits = {row[0].split()[0]: row[-1] for row in comparison_rows(found)}
    assert fits["v_min"] == "yes" and fits["gpipe"] == "no"
    assert verdict(compare(stages=8, microbatches=32, max_activations=1))[0] == (
        "none fits free-running with at most 1 live activations: v_min needs least, 4"
    )
