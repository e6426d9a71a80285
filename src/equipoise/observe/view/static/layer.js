// One layer of one step.
"use strict";

const NO_MATRICES = "This step was recorded without matrices.";

function largestOf(values) { return values.reduce((a, b) => Math.max(a, b), 0); }

function ratio(loads) {
  const total = loads.reduce((a, b) => a + b, 0);
  return total ? (largestOf(loads) * loads.length) / total : 1;
}

function showLayer(run, data, goTo) {
  const form = byId("layer-form").elements;
  for (const name of ["layer", "step", "microbatch", "group"]) form[name].value = data[name];
  for (const [name, most] of [["layer", run.info.num_layers], ["microbatch", run.info.num_microbatches], ["group", run.info.num_groups]]) {
    form[name].max = most - 1;
    form[name].parentElement.hidden = most <= 1;
  }
  for (const name of ["previous", "next"]) {
    byId(name).disabled = data[name] === null;
    byId(name).onclick = () => { window.location.hash = goTo({ ...place(data), step: data[name] }); };
  }
  byId("layer-note").textContent = data.first === data.last ? "" : `recorded from step ${number(data.first)} to ${number(data.last)}`;
  const mean = data.rank_load.reduce((a, b) => a + b, 0) / data.rank_load.length;
  showTiles("layer-tiles", [
    ["imbalance before", fixed(ratio(data.rank_load)), ratio(data.rank_load), "before"],
    ["imbalance after", fixed(ratio(data.rank_load_after)), ratio(data.rank_load_after), "after"],
    ["rows per rank, mean", number(Math.round(mean)), mean],
    ["fullest rank, before", number(largestOf(data.rank_load)), largestOf(data.rank_load), "before"],
    ["fullest rank, after", number(largestOf(data.rank_load_after)), largestOf(data.rank_load_after), "after"],
    ["replicas", number(data.copies), data.copies],
    ["weights copied", bytes(data.copied_bytes), data.copied_bytes],
  ]);
  showStacks(data, mean);
  showReplicas(data);
  showTraffic(data);
  showPhases(data);
  showLayers(data, goTo);
}

function place(data) { return { layer: data.layer, microbatch: data.microbatch, group: data.group }; }

function showStacks(data, mean) {
  const P = data.num_ranks;
  const M = data.num_experts / P;
  byId("stack-note").textContent = data.stacks
    ? "a colour for each home rank, hatched where a replica computes; numbers are experts" : NO_MATRICES;
  const plainBars = (loads, axes, name) => ({ type: "bar", x: loads.map((_, i) => i), y: loads, width: 0.82, ...axes,
    marker: { color: Theme.color(name) }, hovertemplate: "rank %{x}: %{y:,} rows<extra></extra>" });
  const left = { xaxis: "x", yaxis: "y" };
  const right = { xaxis: "x2", yaxis: "y2" };
  const top = 1.08 * Math.max(1, largestOf(data.rank_load), largestOf(data.rank_load_after));
  const traces = data.stacks
    ? [...stack(data.stacks.before, P, M, top, left), ...stack(data.stacks.after, P, M, top, right)]
    : [plainBars(data.rank_load, left, "before"), plainBars(data.rank_load_after, right, "after")];
  const label = (text, x) => ({ text, x, y: 1.0, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 13 } });
  const meanLine = (xref, yref) => ({ type: "line", xref: `${xref} domain`, yref, x0: 0, x1: 1, y0: mean, y1: mean,
    line: { color: Theme.color("text"), width: 1.2, dash: "dash" } });
  const meanLabel = { text: "mean", x: 1, y: mean, xref: "x2 domain", yref: "y2", xanchor: "left", showarrow: false, xshift: 3 };
  const arrangement = layout(rankAxis("rank", P, { domain: [0, 0.485], showgrid: false }), axis("rows (tokens x experts per token)", { range: [0, top] }), {
    xaxis2: rankAxis("rank", P, { domain: [0.515, 1], showgrid: false, anchor: "y2" }),
    yaxis2: axis("", { range: [0, top], anchor: "x2", showticklabels: false }),
    barmode: "overlay",
    shapes: [meanLine("x", "y"), meanLine("x2", "y2")],
    annotations: [label("before balancing", 0), label("after balancing, as delivered", 0.515), meanLabel] }, { r: 46, t: 28 });
  draw("stacks", traces, arrangement);
}

function showReplicas(data) {
  if (!data.stacks) {
    byId("replica-note").textContent = "";
    drawNothing("hosted", NO_MATRICES);
    showTable("replicas", [], [], NO_MATRICES);
    return;
  }
  byId("replica-note").textContent = data.replicas.length ? `${data.replicas.length}, largest first` : "";
  const rows = data.replicas.map((r) => [`expert ${r.expert}`, String(r.home), String(r.host), number(r.rows)]);
  showTable("replicas", ["replica of", "home rank", "hosted by rank", "rows computed"], rows, "No replicas: every expert is at home.");
  if (!data.hosted) drawNothing("hosted", "Too many ranks to draw.");
  else if (!rows.length) drawNothing("hosted", "No replicas: every expert is at home.");
  else square("hosted", data.hosted, { x: "hosting rank", y: "home rank" }, largestOf(data.hosted.flat()), false);
}

function showTraffic(data) {
  const traffic = data.traffic;
  const titles = { x: "computing rank", y: "source rank" };
  byId("traffic-note").textContent = traffic && traffic.after ? "same colours" : "";
  if (!traffic) {
    for (const id of ["traffic-before", "traffic-after"]) drawNothing(id, data.stacks ? "Too many ranks to draw." : NO_MATRICES);
    return;
  }
  const largest = Math.max(largestOf(traffic.before.flat()), traffic.after ? largestOf(traffic.after.flat()) : 0);
  square("traffic-before", traffic.before, titles, largest);
  if (traffic.after) square("traffic-after", traffic.after, titles, largest);
  else drawNothing("traffic-after", "Not known for an imported trace.");
}

function showPhases(data) {
  if (!data.phases) return drawNothing("phases", "The time of phases was not recorded.");
  const colors = { router: "#8d99ae", balance: "#c879b2", dispatch: "#e9a23b", experts: "#2f8fc4", combine: "#57a773" };
  const ranks = data.phases.seconds.map((_, rank) => rank);
  const longest = largestOf(data.phases.seconds.map((row) => 1e3 * row.reduce((a, b) => a + (b || 0), 0)));
  const traces = data.phases.names.map((name, i) => ({ type: "bar", orientation: "h", name, y: ranks,
    x: data.phases.seconds.map((row) => (row[i] === null ? 0 : 1e3 * row[i])), marker: { color: colors[name] || "#888" },
    hovertemplate: `rank %{y}, ${name}: %{x:.3f} ms<extra></extra>` }));
  return draw("phases", traces, layout(axis("ms", { range: [0, 1.05 * longest || 1] }), rankAxis("rank", ranks.length, { range: [ranks.length - 0.4, -0.6], showgrid: false }),
    { barmode: "stack", showlegend: true, legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", traceorder: "normal" } }));
}

function showLayers(data, goTo) {
  const layers = data.layers.before.map((_, layer) => layer);
  const bars = (name, y, color) => ({ type: "bar", name, x: layers, y: y.map((v) => (v === null ? null : v - 1)), base: 1, marker: { color,
    line: { color: Theme.color("text"), width: layers.map((l) => (l === data.layer ? 1.5 : 0)) } }, customdata: y,
    hovertemplate: `layer %{x}, ${name}: %{customdata:.3f}<extra></extra>` });
  const highest = Math.max(1.1, ...data.layers.before.filter((v) => v !== null));
  draw("layers", [bars("before", data.layers.before, Theme.color("before")), bars("after", data.layers.after, Theme.color("after"))],
    layout(layerAxis(layers.length),
      axis(RATIO, { range: [1, 1 + 1.08 * (highest - 1)] }), { barmode: "group", bargap: 0.25, showlegend: true }),
    (point) => { window.location.hash = goTo({ ...place(data), layer: point.x, step: data.step }); });
}
