// The overview of one run.
"use strict";

const NO_TRACE = "No load trace. Train with a [trace] section to record one.";
const RATIO = "largest / mean rank load";

function aboutRun(run) {
  const parts = [run.path];
  const info = run.info;
  if (info) {
    parts.push(`${info.num_layers} MoE layers`, `${info.num_experts} experts, top ${info.num_experts_per_tok}`,
      `EP ${info.ep_size}${info.num_groups > 1 ? ` x ${info.num_groups} groups` : ""}`,
      info.num_slots ? `${info.num_slots} replica slot${info.num_slots > 1 ? "s" : ""} per rank` : "balancing off");
    for (const [name, text] of [["workload", "routing laid down: "], ["device", ""], ["planner", "planner "]]) {
      if (info[name]) parts.push(text + info[name]);
    }
    if (info.source !== "equipoise") parts.push(`imported from ${info.source}`);
  }
  return parts.join(" · ");
}

function showOverview(run, data, goTo) {
  byId("about").textContent = aboutRun(run);
  const s = data.summary;
  showTiles("overview-tiles", [
    ["optimizer step", number(s.step), s.step],
    ["loss, nats per token", fixed(s.loss), s.loss],
    ["tokens/s, mean", number(s.tokens_per_second), s.tokens_per_second],
    ["imbalance before, mean", fixed(s.imbalance_before), s.imbalance_before, "before"],
    ["imbalance after, mean", fixed(s.imbalance_after), s.imbalance_after, "after"],
    ["replicas per step", number(s.copies, 3), s.copies],
  ]);
  const curves = data.curves;
  showCurve("loss", [["training", curves, "loss", Theme.color("after")]], "nats per token", curves.eval_loss);
  showCurve("throughput", [["tokens/s", curves, "tokens_per_second", Theme.color("after")]], "tokens/s", null, true);
  showImbalance(data.imbalance);
  showHeat("heat-before", data.heat, "before", goTo);
  showHeat("heat-after", data.heat, "after", goTo);
  showTable("worst", ["layer", "mean before", "mean after", "worst before", "worst after", "in step"], data.worst.map((row) => [
    make("a", { href: goTo({ layer: row.layer, step: row.worst_step }), textContent: `layer ${row.layer}` }),
    fixed(row.before), fixed(row.after), fixed(row.worst_before), fixed(row.worst_after), number(row.worst_step),
  ]), "No load of single layers is recorded.");
  showProfiles(data.profiles);
}

// Series of [name, curves, field, colour, style]; held-out loss as marks.
function showCurve(id, series, title, held = null, fromZero = false) {
  const traces = series.filter(([, curves, field]) => curves[field]).map(([name, curves, field, color, style]) =>
    line(name, curves.step, curves[field], color, style));
  if (held && held.step.length) {
    traces.push({ ...line("held out", held.step, held.value, Theme.color("before"), { mode: "lines+markers", width: 1, dash: "dot" }) });
  }
  if (!traces.length) return drawNothing(id, "Not recorded in this run.");
  return draw(id, traces, layout(stepAxis(traces), axis(title, { range: valueRange(traces, fromZero) }), { showlegend: traces.length > 1 }));
}

function showImbalance(data) {
  byId("imbalance-note").textContent = data ? [`from ${data.source === "trace" ? "the load trace" : "metrics.jsonl"}`,
    perPoint(data.per_point, "mean, worst")].filter(Boolean).join("; ") : "";
  if (!data) return drawNothing("imbalance", NO_TRACE);
  const before = Theme.color("before");
  const after = Theme.color("after");
  const traces = [
    line("before: worst layer", data.step, data.worst_before, before, { dash: "dot", width: 1.2, opacity: 0.75 }),
    line("before: mean of layers", data.step, data.before, before),
  ];
  if (data.after) {
    traces.push(line("after: worst layer", data.step, data.worst_after, after, { dash: "dot", width: 1.2, opacity: 0.75 }),
      line("after: mean of layers", data.step, data.after, after));
  }
  return draw("imbalance", traces, layout(stepAxis(traces), axis(RATIO, { range: valueRange(traces) }),
    { showlegend: true }));
}

function showHeat(id, heat, which, goTo) {
  if (!heat) return drawNothing(id, NO_TRACE);
  if (!heat[which]) return drawNothing(id, "Not in metrics.jsonl. A load trace records it by layer.");
  const largest = Math.max(1.05, ...heat.before.flat().filter((v) => v !== null), ...(heat.after || []).flat());
  const layers = heat[which].map((_, layer) => layer);
  const spans = heat[which].map(() => heat.step.map((first, i) => (heat.last[i] > first ? `${first} to ${heat.last[i]}` : `${first}`)));
  const trace = { type: "heatmap", x: heat.step, y: layers, z: heat[which], text: spans, zmin: 1, zmax: largest, colorscale: Theme.imbalanceScale(),
    colorbar: { thickness: 10, outlinewidth: 0, title: { text: RATIO, side: "right" } },
    hovertemplate: "layer %{y}, step %{text}<br>%{z:.3f}<extra></extra>" };
  const edges = edgesOf(heat.step);
  return draw(id, [trace], layout(axis("optimizer step", { showgrid: false, range: [edges[0], edges[edges.length - 1]] }),
    axis("MoE layer", { showgrid: false, range: [layers.length - 0.5, -0.5], ...(layers.length <= 12 ? { dtick: 1 } : {}) }), {}, { r: 84 }),
    (point) => {
      const column = heat.step.indexOf(point.x);
      window.location.hash = goTo({ layer: point.y, step: heat.worst_step[point.y][column] });
    });
}

function showProfiles(profiles) {
  const last = profiles[profiles.length - 1];
  byId("profile-note").textContent = last ? `${last.name}: ${number(last.step_ms)} ms per step` : "";
  if (!last) return showTable("profile", [], [], "Not profiled. Train with a [profiler] section.");
  const head = ["phase", "forward ms", "backward ms", "share"];
  if (last.has_device) head.push("device ms", "exposed ms", "share");
  const share = (ms) => `${((100 * ms) / last.step_ms).toFixed(1)} %`;
  const rows = Object.entries(last.phases).map(([name, t]) => {
    const row = [name, fixed(t.forward_ms, 2), fixed(t.backward_ms, 2), share(t.forward_ms + t.backward_ms)];
    if (last.has_device) row.push(fixed(t.device_ms, 2), fixed(t.exposed_ms, 2), share(t.exposed_ms));
    return row;
  });
  const other = ["everything else", fixed(last.other_host_ms, 2), "", share(last.other_host_ms)];
  if (last.has_device) other.push("", fixed(last.other_device_ms, 2), share(last.other_device_ms));
  return showTable("profile", head, [...rows, other], "");
}
