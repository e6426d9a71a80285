"""The viewer in headless Chromium: what it shows equals what is in the files."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser.conftest import Looker, viewing
from browser.sample import EXPERTS, LAYERS, RANKS, SampleRun, make_run, write_metrics
from equipoise.observe.view.export import export
from equipoise.observe.view.runs import Runs as ViewedRuns

Runs = dict[str, SampleRun]


def test_overview_shows_the_numbers_of_the_files(look: Looker, address: str, runs: Runs) -> None:
    run = runs["balanced"]
    look.open(address)
    assert look.tile("optimizer step") == 80
    assert look.tile("loss, nats per token") == pytest.approx(run.records[-1]["loss"])
    speeds = [record["tokens_per_second"] for record in run.records]
    assert look.tile("tokens/s, mean") == pytest.approx(np.mean(speeds[8:]))
    assert look.tile("imbalance before, mean") == pytest.approx(run.before_SL[8:].mean(), rel=1e-5)
    assert look.tile("imbalance after, mean") == pytest.approx(run.after_SL[8:].mean(), rel=1e-5)
    assert look.tile("replicas per step") == pytest.approx((run.slots_SLS[8:] >= 0).sum((1, 2)).mean())
    loss, held_out = look.data("loss")
    assert loss["x"] == run.steps
    assert loss["y"] == pytest.approx([record["loss"] for record in run.records], rel=1e-5)
    assert held_out["x"] == [20, 40, 60, 80]
    curves = {series["name"]: series["y"] for series in look.data("imbalance")}
    assert curves["before: mean of layers"] == pytest.approx(run.before_SL.mean(1), rel=1e-4)
    assert curves["before: worst layer"] == pytest.approx(run.before_SL.max(1), rel=1e-4)
    assert curves["after: mean of layers"] == pytest.approx(run.after_SL.mean(1), rel=1e-4)
    assert curves["after: worst layer"] == pytest.approx(run.after_SL.max(1), rel=1e-4)
    for figure, values_SL in (("heat-before", run.before_SL), ("heat-after", run.after_SL)):
        (heat,) = look.data(figure)
        assert np.array(heat["z"]) == pytest.approx(values_SL.T, rel=1e-3)
    worst = look.table("worst")
    order = np.argsort(-run.before_SL.mean(0))
    assert [row[0] for row in worst] == [f"layer {layer}" for layer in order[:8]]
    assert worst[0][1:] == [
        *(f"{x:.3f}" for x in (run.before_SL[:, order[0]].mean(), run.after_SL[:, order[0]].mean())),
        *(f"{x:.3f}" for x in (run.before_SL[:, order[0]].max(), run.after_SL[:, order[0]].max())),
        str(1 + run.before_SL[:, order[0]].argmax()),
    ]
    assert ["experts", "21.30", "43.80", "49.7 %"] in look.table("profile")


def test_nothing_is_asked_of_any_other_host(look: Looker, address: str) -> None:
    look.open(address)
    look.point()
    assert len(look.requested) >= 4
    assert {url for url in look.requested if not url.startswith((address, "data:"))} == set()


def test_a_click_on_a_layer_looks_inside_its_worst_step(look: Looker, address: str, runs: Runs) -> None:
    run = runs["balanced"]
    look.open(address)
    drawn = look.drawn
    look.page.locator("#worst a").first.click()
    look.wait(drawn)
    layer = int(run.before_SL.mean(0).argmax())
    step = int(1 + run.before_SL[:, layer].argmax())
    assert f"layer={layer}&step={step}" in look.page.url
    assert look.tile("imbalance before") == pytest.approx(run.before_SL[step - 1, layer])
    look.page.go_back()
    look.page.wait_for_selector("#overview:not([hidden])")
    look.point()
    look.page.locator("#heat-before").scroll_into_view_if_needed()
    drawn = look.drawn
    box = look.page.locator("#heat-before .nsewdrag").bounding_box()
    look.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] * 2.5 / LAYERS)
    look.wait(drawn)
    assert "layer=2&" in look.page.url


WITHOUT_PLOTLY = "() => { plotlyAsked = true }"
"""It is then never asked for, so that the sketches stay."""


def test_a_first_page_is_sketched_before_plotly_is_asked_for(look: Looker, address: str, runs: Runs) -> None:
    run = runs["balanced"]
    look.open(address)
    assert look.page.locator("#overview .chart > canvas.sketch").count() == 5
    assert [url for url in look.requested if "plotly" in url] == []
    highest = run.before_SL.max()
    cells = look.page.evaluate("""(values) => {
        const place = document.getElementById("heat-before");
        const [trace] = place.figure[0];
        const { l, r, t, b } = place.figure[1].margin;
        const canvas = place.querySelector("canvas");
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return values.map(([x, y]) => {
            const left = Math.floor(l + (canvas.width - l - r) * (x + 0.5) / trace.x.length);
            const top = Math.floor(t + (canvas.height - t - b) * (y + 0.5) / trace.z.length);
            return [...pixels.slice(4 * (top * canvas.width + left)).slice(0, 3)];
        });
    }""", [[step, layer] for step in (0, 41, 79) for layer in range(LAYERS)])  # fmt: skip
    scale = [(0, "f3f4f6"), (0.25, "fbd9ae"), (0.5, "f0a04b"), (0.75, "c65c12"), (1, "6b2400")]
    places, colors = [place for place, _ in scale], np.array([list(bytes.fromhex(color)) for _, color in scale])
    expected = [
        [np.interp((run.before_SL[step, layer] - 1) / (highest - 1), places, colors[:, c]) for c in range(3)]
        for step in (0, 41, 79)
        for layer in range(LAYERS)
    ]
    assert np.abs(np.array(cells) - np.array(expected)).max() <= 3
    look.point()
    assert len([url for url in look.requested if "plotly" in url]) == 1
    assert look.page.locator("canvas.sketch").count() == 0


def test_a_sketch_answers_to_a_click_while_plotly_starts(look: Looker, address: str, runs: Runs) -> None:
    look.open(address)
    look.page.evaluate(WITHOUT_PLOTLY)
    look.page.locator("#heat-before").scroll_into_view_if_needed()
    drawn = look.drawn
    box = look.page.locator("#heat-before canvas").bounding_box()
    top, height = box["y"] + 8, box["height"] - 8 - 46
    look.page.mouse.click(box["x"] + 62 + (box["width"] - 62 - 84) / 2, top + height * 2.5 / LAYERS)
    look.wait(drawn)
    assert "layer=2&" in look.page.url
    look.page.locator("#layers").scroll_into_view_if_needed()
    drawn = look.drawn
    box = look.page.locator("#layers canvas").bounding_box()
    look.page.mouse.click(box["x"] + 62 + (box["width"] - 62 - 14) * 7.5 / LAYERS, box["y"] + box["height"] / 2)
    look.wait(drawn)
    assert "layer=7&" in look.page.url


DIFFERENCE = """async ([id, sketched]) => {
    const place = document.getElementById(id);
    const [width, height] = [place.clientWidth, place.clientHeight];
    const { l, r, t, b } = place.figure[1].margin;
    const pixels = async (url) => {
        const image = new Image();
        image.src = url;
        await image.decode();
        const small = document.createElement("canvas");
        [small.width, small.height] = [Math.ceil((width - l - r) / 4), Math.ceil((height - t - b) / 4)];
        const pen = small.getContext("2d");
        pen.fillStyle = Theme.color("card");
        pen.fillRect(0, 0, small.width, small.height);
        pen.drawImage(image, l, t, width - l - r, height - t - b, 0, 0, small.width, small.height);
        return pen.getImageData(0, 0, small.width, small.height).data;
    };
    const drawn = await Plotly.toImage(place, { format: "png", width, height, scale: 1 });
    const [one, other] = [await pixels(sketched), await pixels(drawn)];
    let different = 0;
    for (let i = 0; i < one.length; i += 4) {
        different += [0, 1, 2].some((c) => Math.abs(one[i + c] - other[i + c]) > 48);
    }
    return different / (one.length / 4);
}"""


VIEWS = ("view=overview", "view=layer&run=0&layer=5&step=80", "view=compare&a=1&b=0")


def check_page(look: Looker) -> None:
    """Every figure is drawn, and nothing is wider than the window."""
    look.point()
    assert look.page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    assert look.page.locator("section:not([hidden]) .chart:not(.js-plotly-plot)").count() == 0


def test_every_view_is_sketched_as_plotly_draws_it_and_fills_the_page(look: Looker, address: str, picture: Any) -> None:
    taken = []
    for view in VIEWS:
        look.leave()
        look.open(f"{address}#{view}")
        sketched = look.page.evaluate("""() => [...document.querySelectorAll("section:not([hidden]) canvas.sketch")]
            .map((canvas) => [canvas.parentElement.id, canvas.toDataURL()])""")
        assert len(sketched) >= 5
        check_page(look)
        found = {figure: look.page.evaluate(DIFFERENCE, [figure, image]) for figure, image in sketched}
        assert {figure: share for figure, share in found.items() if share > 0.03} == {}, found
        taken.append(picture(look, "view-" + view[5:].split("&")[0]))
    assert len(set(taken)) == 3


def test_dark_pages_are_dark(look: Looker, address: str, picture: Any) -> None:
    look.page.emulate_media(color_scheme="dark")
    look.open(address)
    assert look.page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    check_page(look)
    picture(look, "view-overview-dark")


def test_drill_down_shows_loads_replicas_and_traffic_of_the_trace(look: Looker, address: str, runs: Runs) -> None:
    run, step, layer = runs["balanced"], 37, 5
    look.open(f"{address}#view=layer&run=0&layer={layer}&step={step}")
    load_PE, delivered_Pm = run.load_SLPE[step - 1, layer], run.delivered_SLPm[step - 1, layer]
    slots_PR = run.slots_SLS[step - 1, layer].reshape(RANKS, -1)
    M = EXPERTS // RANKS
    before, _, after, hatched = look.data("stacks")
    shown = {(rank, data[0]): rows for rank, data, rows in zip(before["x"], before["customdata"], before["y"])}
    load_E = load_PE.sum(0)
    assert shown == {(e // M, e): load_E[e] for e in range(EXPERTS) if load_E[e]}
    shown = {(rank, data[0]): rows for rank, data, rows in zip(after["x"], after["customdata"], after["y"])}
    expected = {(p, p * M + m): delivered_Pm[p, m] for p in range(RANKS) for m in range(M) if delivered_Pm[p, m]}
    hosted = [(p, slot) for p, slot in np.argwhere(slots_PR >= 0)]
    expected |= {(p, slots_PR[p, s]): delivered_Pm[p, M + s] for p, s in hosted}
    assert shown == expected
    assert sum(hatched["y"]) == sum(delivered_Pm[p, M + s] for p, s in hosted)
    tops = np.zeros(RANKS)
    for rank, base, rows in zip(after["x"], after["base"], after["y"]):
        tops[rank] = max(tops[rank], base + rows)
    assert tops.tolist() == delivered_Pm.sum(1).tolist()
    replicas = {tuple(row[:3]): int(row[3].replace(",", "")) for row in look.table("replicas")}
    assert replicas == {
        (f"expert {slots_PR[p, s]}", str(slots_PR[p, s] // M), str(p)): delivered_Pm[p, M + s] for p, s in hosted
    }
    assert np.sum(look.data("hosted")[0]["z"]) == sum(replicas.values())
    traffic = np.array(look.data("traffic-before")[0]["z"])
    assert traffic.tolist() == load_PE.reshape(RANKS, RANKS, M).sum(2).tolist()
    traffic = np.array(look.data("traffic-after")[0]["z"])
    assert traffic.sum(1).tolist() == load_PE.sum(1).tolist()
    assert traffic.sum(0).tolist() == delivered_Pm.sum(1).tolist()
    experts_ms = next(series for series in look.data("phases") if series["name"] == "experts")["x"]
    assert experts_ms == pytest.approx(5e-5 * delivered_Pm.sum(1), rel=1e-4)
    for series, values in zip(look.data("layers"), (run.before_SL, run.after_SL)):
        assert series["customdata"] == pytest.approx(values[step - 1], rel=1e-4)


def test_a_narrow_window_has_everything_in_one_column(look: Looker, address: str) -> None:
    look.page.set_viewport_size({"width": 420, "height": 800})
    look.open(f"{address}#view=layer&run=0&layer=5&step=80")
    assert look.page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    left = {look.page.locator(f"#{figure}").bounding_box()["x"] for figure in ("stacks", "traffic-before", "hosted")}
    assert len(left) == 1


def test_steps_are_turned_over_and_the_nearest_recorded_one_is_shown(look: Looker, address: str) -> None:
    look.open(f"{address}#view=layer&run=0&layer=1&step=9999")
    assert look.page.locator("#next").is_disabled()
    assert look.page.locator("[name=step]").input_value() == "80"
    drawn = look.drawn
    look.page.locator("#previous").click()
    look.wait(drawn)
    assert look.page.locator("[name=step]").input_value() == "79"
    look.page.locator("[name=layer]").fill("3")
    drawn = look.drawn
    look.page.locator("#layer-form [type=submit]").click()
    look.wait(drawn)
    assert "layer=3&step=79" in look.page.url


def test_a_layer_that_is_not_there_is_a_message(context: Any, address: str) -> None:
    page = context.new_page()
    page.goto(f"{address}#view=layer&run=0&layer=77")
    page.wait_for_selector("#problem:not([hidden])")
    assert "layer 77" in page.locator("#problem").text_content()
    page.close()


def test_two_runs_are_compared(look: Looker, address: str, runs: Runs) -> None:
    look.open(f"{address}#view=compare")
    values = {
        (side, field): float(look.page.locator(f'[data-side={side}][data-field="{field}"]').get_attribute("data-value"))
        for side in "ab"
        for field in ("tokens_per_second", "imbalance_after", "loss")
    }
    for side, run in (("a", runs["balanced"]), ("b", runs["off"])):
        speeds = [record["tokens_per_second"] for record in run.records[8:]]
        assert values[side, "tokens_per_second"] == pytest.approx(np.mean(speeds))
        assert values[side, "imbalance_after"] == pytest.approx(run.after_SL[8:].mean(), rel=1e-5)
        assert values[side, "loss"] == run.records[-1]["loss"]
    rows = {row[0]: row for row in look.table("compared")}
    ratio = values["b", "tokens_per_second"] / values["a", "tokens_per_second"]
    assert rows["tokens/s"][3] == f"{ratio:.3f}"
    assert [series["name"] for series in look.data("compare-after")] == ["A: balanced", "B: off"]
    drawn = look.drawn
    look.page.locator("#compare-form [name=b]").select_option("0")
    look.wait(drawn)
    assert [series["name"] for series in look.data("compare-after")] == ["A: balanced", "B: balanced"]


def test_the_page_follows_a_run_that_goes_on(look: Looker, tmp_path: Path) -> None:
    run = make_run(tmp_path / "growing", [1, 2, 3])
    with viewing(run.path) as opened:
        look.open(opened)
        assert (look.tile("optimizer step"), look.data("imbalance")[0]["x"]) == (3, [1, 2, 3])
        later = make_run(tmp_path / "later", [4, 5])
        for path in (later.path / "trace").iterdir():
            path.rename(run.path / "trace" / path.name)
        write_metrics(run.path, later.records, mode="a")
        look.page.wait_for_function("() => document.getElementById('imbalance').data[0].x.length === 5", timeout=90_000)
        assert look.tile("optimizer step") == 5
        assert look.data("loss")[0]["x"] == [1, 2, 3, 4, 5]
        look.leave()


WRITER = """
import sys
from pathlib import Path
from browser.sample import make_run, write_trace
from equipoise.observe import writer
writer.FIRST_WAIT_S = 0.0
run = make_run(Path(sys.argv[1]), [1])
real = writer.pq.write_table
def slow(table, file, **options):
    real(table.slice(0, 1), file, **options)
    file.flush()
    print("half", flush=True)
    sys.stdin.read()
writer.pq.write_table = slow
make_run(Path(sys.argv[1]), [2])
"""


def test_after_kill_9_in_the_middle_of_a_file_the_complete_ones_are_shown(look: Looker, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    writing = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writing.stdout is not None
    assert writing.stdout.readline() == "half\n"
    writing.send_signal(signal.SIGKILL)
    writing.wait(60)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')  # what it was writing here
    assert len(list((folder / "trace").glob("*.tmp"))) == 1
    with viewing(folder) as opened:
        look.open(opened)
        assert look.data("imbalance")[0]["x"] == [1]
        assert look.tile("optimizer step") == 1
        look.go("view=layer&run=0&layer=0")
        assert look.tile("imbalance before") > 1
        look.leave()


def test_an_exported_file_shows_the_same_without_a_server(look: Looker, runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "shared.html"
    export(ViewedRuns([run.path for run in runs.values()]), file)
    look.open(file.as_uri())
    assert {url.split(":")[0] for url in look.requested} <= {"file", "data"}
    run = runs["off"]
    assert look.tile("loss, nats per token") == pytest.approx(run.records[-1]["loss"])
    assert np.array(look.data("heat-before")[0]["z"]) == pytest.approx(run.before_SL.T, rel=1e-3)
    layer = int(runs["balanced"].before_SL.mean(0).argmax())
    look.go(f"view=layer&run=1&layer={layer}&step=80")
    assert look.tile("imbalance after") == pytest.approx(runs["balanced"].after_SL[-1, layer])
    look.go("view=compare&a=0&b=1")
    assert [series["name"] for series in look.data("compare-before")] == ["A: off", "B: balanced"]


def test_names_of_folders_are_text_and_not_markup(look: Looker, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    make_run(folder, [1, 2])
    file = tmp_path / "named.html"
    with viewing(folder, folder) as opened:
        look.open(f"{opened}#view=compare")
        assert look.page.locator("img").count() == 0
        assert "<img" in look.page.locator("#run option").first.text_content()
        look.leave()
    export(ViewedRuns([folder]), file)
    look.open(file.as_uri())
    assert look.tile("optimizer step") == 2


def test_the_theme_can_be_switched_and_is_remembered(look: Looker, address: str) -> None:
    look.open(address)
    light = look.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    drawn = look.drawn
    look.page.locator("#theme").click()
    look.wait(drawn)
    assert look.page.evaluate("() => getComputedStyle(document.body).backgroundColor") != light
    look.page.reload()
    look.wait()
    assert look.page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    look.page.evaluate("() => localStorage.clear()")


def test_a_server_that_ends_is_noticed(context: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "run", [1])
    page = context.new_page()
    with viewing(tmp_path / "run") as opened:
        page.goto(opened)
        page.wait_for_function("() => Number(document.body.dataset.drawn || 0) > 0")
    page.wait_for_function(
        "() => document.getElementById('status').textContent.includes('does not answer')", timeout=60_000
    )
    page.close()
