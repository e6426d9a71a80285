// Figures: what all of them share, and the kinds that the page needs.
"use strict";

// Plotly's script takes a second to start, so it waits until somebody points at a figure. And it takes half a second to
// draw a view. So figures are sketched first, and plotly takes them over one by one.
let plotlyAsked = false;
const CALM_MS = 150;

function pause(ms) { return new Promise((resolve) => { setTimeout(resolve, ms); }); }

function loadPlotly() {
  if (plotlyAsked) return;
  plotlyAsked = true;
  const inside = byId("plotly-script"); // of an exported file
  if (!inside) return document.head.append(make("script", { src: "plotly.js", onload: takeOver, onerror: () => { plotlyAsked = false; } }));
  document.head.append(make("script", { textContent: inside.textContent }));
  takeOver();
}

async function takeOver() {
  const turn = App.turn;
  if (!window.Plotly) return;
  await pause(CALM_MS); // the sketches are painted, and who turns over steps quickly is not held up
  for (const place of document.querySelectorAll("section:not([hidden]) .chart")) {
    if (!place.figure || place.figure === place.taken) continue;
    await pause(0); // whatever the user does comes first
    if (turn !== App.turn) return;
    const figure = place.figure;
    const [traces, arrangement, onClick] = figure;
    await Plotly.react(place, traces, arrangement, CONFIG);
    if (figure !== place.figure) return;
    place.removeAllListeners("plotly_click");
    if (onClick) place.on("plotly_click", (event) => onClick(event.points[0]));
    place.taken = figure;
    clearAway(place);
  }
  if (turn === App.turn) document.body.dataset.interactive = document.body.dataset.drawn;
}

function clearAway(place) { for (const old of place.querySelectorAll(":scope > .sketch, :scope > .empty")) old.remove(); }

document.addEventListener("pointerover", (event) => { if (event.target.closest(".chart")) loadPlotly(); });

const Resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const canvas = target.querySelector("canvas.sketch");
    const width = Math.round(target.clientWidth * (window.devicePixelRatio || 1));
    if (canvas && width && canvas.width !== width) sketch(target, ...target.figure);
  }
});

const CONFIG = { responsive: true, displaylogo: false, displayModeBar: "hover",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"] };

function axis(title, more = {}) {
  return { title: { text: title, standoff: 8 }, gridcolor: Theme.color("grid"), zeroline: false, linecolor: Theme.color("line"),
    ...more };
}

// In a narrow window a legend takes a line for each series.
function legendHeight() { return window.innerWidth < 700 ? 92 : 30; }

// Margins are given, since plotly would draw everything twice to find them.
function layout(x, y, more = {}, margin = {}) {
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 62, r: 14, t: more.showlegend ? legendHeight() : 8, b: 46, autoexpand: false, ...margin },
    font: { family: "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", size: 12, color: Theme.color("text") },
    xaxis: x, yaxis: y, uirevision: "kept", hovermode: "closest", showlegend: false,
    legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom" },
    hoverlabel: { bgcolor: Theme.color("card"), bordercolor: Theme.color("line"), font: { color: Theme.color("text") } }, ...more };
}

// Draws, or says why there is nothing to draw. `onClick` gets the point that was clicked. What plotly shows of the same
// view is left to it, since it may be zoomed.
function draw(id, traces, arrangement, onClick) {
  const place = byId(id);
  place.figure = [traces, arrangement, onClick];
  if (place.taken && App.isSameView) return;
  sketch(place, ...place.figure);
  Resized.observe(place);
}

function drawNothing(id, reason) {
  const place = byId(id);
  if (place.data) Plotly.purge(place);
  place.figure = place.taken = null;
  place.replaceChildren(make("p", { className: "empty", textContent: reason }));
}

// Of the values of all series, with some room. Ranges are always given, so that sketches and plotly agree.
function valueRange(traces, fromZero = false) {
  const values = traces.flatMap((trace) => trace.y).filter((y) => y !== null && y !== undefined);
  if (!values.length) return [0, 1];
  const [low, high] = [fromZero ? 0 : Math.min(...values), Math.max(...values)];
  const room = 0.06 * (high - low) || 0.5 * Math.abs(high) || 0.5;
  return [fromZero ? 0 : low - room, high + room];
}

// Names of series may hold anything that a folder's name may.
function plainName(text) { return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); }

function line(name, x, y, color, style = {}) {
  const { dash = "solid", width = 2, opacity = 1, mode = x.length === 1 ? "markers" : "lines" } = style;
  return { type: "scatter", mode, name: plainName(name), x, y, opacity, line: { color, dash, width }, marker: { color, size: 6 },
    connectgaps: true, hovertemplate: "step %{x}<br>%{y:.4~g}<extra>%{fullData.name}</extra>" };
}

// Steps from the first to the last of all series, so that figures beside each other agree.
function stepAxis(traces) {
  const steps = traces.flatMap((trace) => [trace.x[0], trace.x[trace.x.length - 1]]);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const room = Math.max(0.5, 0.015 * (last - first));
  return axis("optimizer step", { range: [first - room, last + room] });
}

function perPoint(size, what) { return size > 1 ? `each point: ${what} of ${size} steps` : ""; }

// Bars on top of each other in one trace, which stays quick with thousands of them, and a trace that hatches the replicas.
function stack(pieces, numRanks, mastersPerRank, top, axes) {
  const height = new Array(numRanks).fill(0);
  const order = new Array(numRanks).fill(0);
  const bars = { x: [], y: [], base: [], text: [], customdata: [] };
  const hatched = { x: [], y: [], base: [], text: [] };
  const color = [];
  pieces.rows.forEach((rows, i) => {
    const rank = pieces.rank[i];
    const expert = pieces.expert[i];
    const home = Math.floor(expert / mastersPerRank);
    const text = rows > 0.042 * top ? String(expert) : "";
    const isReplica = home !== rank;
    for (const part of isReplica ? [bars, hatched] : [bars]) {
      part.x.push(rank);
      part.y.push(rows);
      part.base.push(height[rank]);
    }
    bars.text.push(isReplica ? "" : text);
    if (isReplica) hatched.text.push(text);
    bars.customdata.push([expert, home, isReplica ? "replica" : "master"]);
    color.push(Theme.rank(home, numRanks, (order[rank] % 2) * 0.75));
    height[rank] += rows;
    order[rank] += 1;
  });
  const common = { type: "bar", ...axes, textposition: "inside", insidetextanchor: "middle", textangle: 0, constraintext: "none",
    textfont: { size: 10, color: "#fff" }, width: 0.82 };
  return [
    { ...common, ...bars, marker: { color, line: { color: Theme.color("card"), width: 0.6 } },
      hovertemplate: "expert %{customdata[0]} (%{customdata[2]}, home rank %{customdata[1]})<br>rank %{x}: %{y:,} rows<extra></extra>" },
    { ...common, ...hatched, hoverinfo: "skip", marker: { color: "rgba(0,0,0,0)",
      pattern: { shape: "/", fillmode: "replace", bgcolor: "rgba(0,0,0,0)", fgcolor: Theme.color("card"), fgopacity: 0.55, size: 7, solidity: 0.22 } } },
  ];
}

function rankAxis(title, numRanks, more = {}) {
  return axis(title, { range: [-0.6, numRanks - 0.4], ...(numRanks <= 16 ? { dtick: 1 } : {}), ...more });
}

function layerAxis(numLayers) {
  return axis("MoE layer", { range: [-0.5, numLayers - 0.5], showgrid: false, ...(numLayers <= 20 ? { dtick: 1 } : {}) });
}

// A square of rows by [y rank, x rank], with its numbers where there is room for them.
function square(id, z, titles, largest, showsZeros = true) {
  const numRanks = z.length;
  const trace = { type: "heatmap", z, colorscale: Theme.rowsScale(), zmin: 0, zmax: largest || 1, xgap: 1, ygap: 1,
    colorbar: { thickness: 10, outlinewidth: 0, title: { text: "rows", side: "right" } },
    hovertemplate: `${titles.y} %{y}, ${titles.x} %{x}<br>%{z:,} rows<extra></extra>` };
  if (numRanks <= 10) {
    const text = z.map((row) => row.map((rows) => (rows || showsZeros ? rows.toLocaleString("en-US") : "")));
    Object.assign(trace, { text, texttemplate: "%{text}", textfont: { size: 11 } });
  }
  draw(id, [trace], layout(rankAxis(titles.x, numRanks, { range: [-0.5, numRanks - 0.5], showgrid: false }),
    rankAxis(titles.y, numRanks, { range: [numRanks - 0.5, -0.5], showgrid: false }), {}, { r: 84 }));
}
