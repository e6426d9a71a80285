// Two runs beside each other.
"use strict";

const DASH = { a: {}, b: { dash: "dash" } }; // so that equal curves can both be seen

const FIGURES = [
  ["last step", "step", number],
  ["loss, nats per token (last)", "loss", fixed],
  ["held-out loss, nats per token (last)", "eval_loss", fixed],
  ["tokens/s", "tokens_per_second", number],
  ["step, s", "time_step_s", number],
  ["imbalance before", "imbalance_before", fixed],
  ["imbalance after", "imbalance_after", fixed],
  ["replicas per step", "copies", number],
  ["counts and planning, s per step", "balance_plan_s", number],
  ["waiting for replicas, s per step", "balance_sync_s", number],
];

function showCompare(runs, chosen, data) {
  const form = byId("compare-form").elements;
  for (const side of ["a", "b"]) {
    form[side].replaceChildren(...runs.map((run, i) => make("option", { value: String(i), textContent: run.name })));
    form[side].value = String(chosen[side]);
  }
  const [a, b] = [data.a, data.b];
  const rows = FIGURES.filter(([, field]) => ![a.summary[field], b.summary[field]].every((v) => v === null || v === undefined));
  showTable("compared", ["", "A", "B", "B / A"], rows.map(([title, field, show]) => {
    const [x, y] = [a.summary[field], b.summary[field]];
    const cell = (side, value) => make("span", { textContent: show(value), data: { side, field, value: String(value ?? "") } });
    const known = x !== null && y !== null && x !== undefined && y !== undefined && x !== 0 && field !== "step";
    return [title, cell("a", x), cell("b", y), known ? fixed(y / x) : ""];
  }), "Neither run has recorded anything yet.");
  const names = { a: `A: ${runs[chosen.a].name}`, b: `B: ${runs[chosen.b].name}` };
  const series = (field) => ["a", "b"].map((side) => [names[side], data[side].curves, field, Theme.color(side), DASH[side]]);
  showCurve("compare-loss", series("loss"), "nats per token");
  showCurve("compare-throughput", series("tokens_per_second"), "tokens/s", null, true);
  for (const which of ["before", "after"]) {
    const known = ["a", "b"].filter((side) => data[side].imbalance && data[side].imbalance[which]);
    const traces = known.map((side) => line(names[side], data[side].imbalance.step, data[side].imbalance[which], Theme.color(side), DASH[side]));
    if (!traces.length) drawNothing(`compare-${which}`, "Not recorded in either run.");
    else draw(`compare-${which}`, traces, layout(stepAxis(traces), axis(RATIO, { range: valueRange(traces) }), { showlegend: true }));
  }
  showCompareLayers(names, data);
}

function showCompareLayers(names, data) {
  const mean = (row) => { const known = row.filter((v) => v !== null); return known.length ? known.reduce((x, y) => x + y, 0) / known.length : null; };
  const traces = [];
  for (const side of ["a", "b"]) {
    const heat = data[side].heat;
    for (const [which, opacity] of [["before", 0.35], ["after", 1]]) {
      if (!heat || !heat[which]) continue;
      const y = heat[which].map(mean);
      traces.push({ type: "bar", name: plainName(`${names[side]}, ${which}`), x: y.map((_, layer) => layer), y: y.map((v) => (v === null ? null : v - 1)), base: 1,
        customdata: y, opacity, marker: { color: Theme.color(side) }, hovertemplate: "layer %{x}: %{customdata:.3f}<extra>%{fullData.name}</extra>" });
    }
  }
  if (!traces.length) return drawNothing("compare-layers", "No load of single layers is recorded.");
  const highest = Math.max(1.1, ...traces.flatMap((t) => t.customdata.filter((v) => v !== null)));
  return draw("compare-layers", traces, layout(layerAxis(Math.max(...traces.map((t) => t.x.length))),
    axis(RATIO, { range: [1, 1 + 1.08 * (highest - 1)] }), { barmode: "group", bargap: 0.25, showlegend: true }));
}
