// A figure drawn on a canvas at once, from the series and the layout that plotly gets: as much of both as this page uses.
// It lies over the figure until plotly has drawn it (charts.js).
"use strict";

const SKETCH_FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
const DASHES = { solid: [], dot: [3, 3], dash: [9, 9] };

function sketch(place, traces, arrangement, onClick) {
  const [width, height] = [place.clientWidth, place.clientHeight];
  const { l, r, t, b } = arrangement.margin;
  const frame = { left: l, top: t, width: Math.max(1, width - l - r), height: Math.max(1, height - t - b) };
  const sharpness = window.devicePixelRatio || 1;
  const canvas = make("canvas", { className: "sketch", width: Math.round(width * sharpness), height: Math.round(height * sharpness) });
  const pen = canvas.getContext("2d");
  pen.scale(sharpness, sharpness);
  const panels = [["x", "y"], ["x2", "y2"]].filter(([x]) => arrangement[`xaxis${x.slice(1)}`])
    .map(([x, y]) => sketchPanel(pen, traces, arrangement, frame, x, y));
  if (arrangement.showlegend) sketchLegend(pen, traces, frame);
  for (const trace of traces) if (trace.colorbar) sketchColorbar(pen, trace, frame, width);
  for (const note of arrangement.annotations || []) sketchAnnotation(pen, note, frame, panels);
  canvas.addEventListener("click", (event) => {
    const point = onClick && pointAt(traces, panels[0], event.offsetX, event.offsetY);
    if (point) onClick(point);
  });
  clearAway(place);
  place.append(canvas);
}

// Axes, then everything that is drawn inside of them.
function sketchPanel(pen, traces, arrangement, frame, x, y) {
  const own = traces.filter((trace) => (trace.xaxis || "x") === x);
  const panel = { x, y, across: lineOf(arrangement[`xaxis${x.slice(1)}`], frame.left, frame.width, false),
    up: lineOf(arrangement[`yaxis${y.slice(1)}`], frame.top, frame.height, true) };
  const { across, up } = panel;
  const isHeat = own.some((trace) => trace.type === "heatmap");
  sketchAxes(pen, across, up, frame, isHeat ? 5 : 0);
  pen.save();
  pen.beginPath();
  pen.rect(across.start, up.start, across.length, up.length);
  pen.clip();
  const bars = own.filter((trace) => trace.type === "bar");
  if (bars.length) sketchBars(pen, bars, arrangement, panel);
  for (const trace of own) {
    if (trace.type === "heatmap") sketchHeat(pen, trace, panel);
    if (trace.type === "scatter") sketchLine(pen, trace, panel);
  }
  for (const shape of arrangement.shapes || []) {
    if (shape.xref !== `${x} domain`) continue;
    stroke(pen, shape.line, () => {
      pen.moveTo(across.start + shape.x0 * across.length, up.at(shape.y0));
      pen.lineTo(across.start + shape.x1 * across.length, up.at(shape.y1));
    });
  }
  pen.restore();
  return panel;
}

// An axis in pixels. `isUp`: its range goes from the bottom to the top.
function lineOf(axis, start, length, isUp) {
  const [from, to] = axis.domain || [0, 1];
  const begin = start + from * length;
  const size = (to - from) * length;
  const [first, last] = axis.range;
  const at = (value) => { const part = (value - first) / (last - first); return begin + size * (isUp ? 1 - part : part); };
  const valueAt = (place) => { const part = (place - begin) / size; return first + (last - first) * (isUp ? 1 - part : part); };
  return { axis, start: begin, length: size, at, valueAt, ticks: ticksOf(axis, size, isUp) };
}

function ticksOf(axis, length, isUp) {
  const [low, high] = [Math.min(...axis.range), Math.max(...axis.range)];
  const rough = (high - low) / (Math.min(9, Math.max(4, length / (isUp ? 40 : 80))) + 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = axis.dtick || power * [2, 5, 10].find((times) => times * power >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const [divisor, unit] = [[1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([one]) => Math.max(-low, high) >= (one === 1e3 ? 1e4 : one)) || [1, ""];
  const text = (value) => String(Number((value / divisor).toFixed(unit ? 6 : digits))).replace("-", "\u2212") + (value ? unit : "");
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i += 1) ticks.push({ value: i * step, text: text(i * step) });
  return ticks;
}

function write(pen, text, x, y, { size = 12, align = "left", base = "middle", color = Theme.color("text"), turn = 0 } = {}) {
  pen.save();
  pen.font = `${size}px ${SKETCH_FONT}`;
  pen.fillStyle = color;
  pen.textAlign = align;
  pen.textBaseline = base;
  pen.translate(x, y);
  pen.rotate(turn);
  pen.fillText(text, 0, 0);
  pen.restore();
}

function widthOf(pen, text, size = 12) {
  pen.font = `${size}px ${SKETCH_FONT}`;
  return pen.measureText(text).width;
}

function stroke(pen, { color, width = 1, dash = "solid" }, path) {
  pen.strokeStyle = color;
  pen.lineWidth = width;
  pen.setLineDash(DASHES[dash]);
  pen.beginPath();
  path();
  pen.stroke();
  pen.setLineDash([]);
}

function sketchAxes(pen, across, up, frame, tickLength) {
  const bottom = up.start + up.length;
  const grid = { color: Theme.color("grid") };
  const line = { color: Theme.color("line") };
  for (const { value, text } of across.ticks) {
    const x = across.at(value);
    if (across.axis.showgrid !== false) stroke(pen, grid, () => { pen.moveTo(x, up.start); pen.lineTo(x, bottom); });
    if (tickLength) stroke(pen, line, () => { pen.moveTo(x, bottom); pen.lineTo(x, bottom + tickLength); });
    write(pen, text, x, bottom + 3 + tickLength, { align: "center", base: "top" });
  }
  write(pen, across.axis.title.text, across.start + across.length / 2, bottom + 31 + tickLength, { size: 14, align: "center" });
  let widest = 0;
  for (const { value, text } of up.ticks) {
    const y = up.at(value);
    if (up.axis.showgrid !== false) stroke(pen, grid, () => { pen.moveTo(across.start, y); pen.lineTo(across.start + across.length, y); });
    if (up.axis.showticklabels === false) continue;
    if (tickLength) stroke(pen, line, () => { pen.moveTo(across.start - tickLength, y); pen.lineTo(across.start, y); });
    write(pen, text, across.start - 3 - tickLength, y, { align: "right" });
    widest = Math.max(widest, widthOf(pen, text));
  }
  const aside = across.start - widest - tickLength - 20;
  write(pen, up.axis.title.text, Math.max(9, aside), up.start + up.length / 2, { size: 14, align: "center", turn: -Math.PI / 2 });
}

function sketchLine(pen, trace, { across, up }) {
  const known = trace.x.map((x, i) => [x, trace.y[i]]).filter(([, y]) => y !== null && y !== undefined);
  pen.globalAlpha = trace.opacity;
  if (trace.mode.includes("lines")) {
    stroke(pen, trace.line, () => known.forEach(([x, y], i) => (i ? pen.lineTo(across.at(x), up.at(y)) : pen.moveTo(across.at(x), up.at(y)))));
  }
  if (trace.mode.includes("markers")) known.forEach(([x, y]) => dot(pen, across.at(x), up.at(y), trace.marker));
  pen.globalAlpha = 1;
}

function dot(pen, x, y, { color, size }) {
  pen.fillStyle = color;
  pen.beginPath();
  pen.arc(x, y, size / 2, 0, 2 * Math.PI);
  pen.fill();
}

// Bars beside each other, on each other (`base` says where), or stacked sideways.
function sketchBars(pen, bars, arrangement, { across, up }) {
  const share = 1 - (arrangement.bargap ?? 0.2);
  const reached = {};
  bars.forEach((trace, index) => {
    const sideways = trace.orientation === "h";
    const grouped = arrangement.barmode === "group";
    const width = trace.width || (grouped ? share / bars.length : share);
    const shift = grouped ? (index - (bars.length - 1) / 2) * width : 0;
    pen.globalAlpha = trace.opacity ?? 1;
    (sideways ? trace.y : trace.x).forEach((place, i) => {
      const size = (sideways ? trace.x : trace.y)[i];
      if (size === null || size === undefined) return;
      const given = Array.isArray(trace.base) ? trace.base[i] : trace.base ?? 0;
      const base = arrangement.barmode === "stack" ? reached[place] || 0 : given;
      reached[place] = base + size;
      const [side, end] = sideways ? [up, across] : [across, up];
      const [a, b] = [side.at(place + shift - width / 2), side.at(place + shift + width / 2)];
      const [c, d] = [end.at(base), end.at(base + size)];
      const box = sideways ? [Math.min(c, d), Math.min(a, b), Math.abs(d - c), Math.abs(b - a)]
        : [Math.min(a, b), Math.min(c, d), Math.abs(b - a), Math.abs(d - c)];
      sketchBar(pen, box, trace, i);
    });
    pen.globalAlpha = 1;
  });
}

function sketchBar(pen, box, trace, i) {
  const { color, line, pattern } = trace.marker;
  pen.fillStyle = Array.isArray(color) ? color[i] : color;
  pen.fillRect(...box);
  const border = line && (Array.isArray(line.width) ? line.width[i] : line.width);
  if (border) stroke(pen, { color: line.color, width: border }, () => pen.rect(...box));
  if (pattern) hatch(pen, box, pattern);
  if (trace.text && trace.text[i]) {
    const { size, color: ink } = trace.textfont;
    write(pen, trace.text[i], box[0] + box[2] / 2, box[1] + box[3] / 2, { size, align: "center", color: ink });
  }
}

function hatch(pen, [x, y, width, height], { size, solidity, fgcolor, fgopacity }) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.globalAlpha *= fgopacity;
  stroke(pen, { color: fgcolor, width: size * solidity }, () => {
    const first = Math.floor((x + y) / size);
    for (let i = first; i * size <= x + y + width + height; i += 1) {
      pen.moveTo(i * size - y + 1, y - 1);
      pen.lineTo(i * size - y - height - 1, y + height + 1);
    }
  });
  pen.restore();
}

// Borders of cells: half way between their middles.
function edgesOf(middles) {
  if (middles.length === 1) return [middles[0] - 0.5, middles[0] + 0.5];
  const inner = middles.slice(1).map((value, i) => (value + middles[i]) / 2);
  const [first, last] = [middles[0], middles[middles.length - 1]];
  return [2 * first - inner[0], ...inner, 2 * last - inner[inner.length - 1]];
}

function cellsOf(trace) {
  const count = (values, size) => values || Array.from({ length: size }, (_, i) => i);
  return { x: count(trace.x, trace.z[0].length), y: count(trace.y, trace.z.length) };
}

function channels(color) { return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)); }

// Colours of 256 steps of a scale of [place from 0 to 1, "#rrggbb"].
function shades(scale) {
  return Array.from({ length: 256 }, (_, i) => {
    const part = i / 255;
    const next = Math.max(1, scale.findIndex(([place]) => place >= part));
    const [[a, from], [b, to]] = [scale[next - 1], scale[next]];
    return channels(from).map((value, c) => Math.round(value + ((part - a) / (b - a)) * (channels(to)[c] - value)));
  });
}

function sketchHeat(pen, trace, { across, up }) {
  const cells = cellsOf(trace);
  const [xs, ys] = [edgesOf(cells.x).map(across.at), edgesOf(cells.y).map(up.at)];
  const scale = shades(trace.colorscale);
  const [right, lower] = [(trace.xgap || 0) / 2, (trace.ygap || 0) / 2];
  trace.z.forEach((row, j) => row.forEach((value, i) => {
    if (value === null) return;
    const part = (value - trace.zmin) / (trace.zmax - trace.zmin);
    const color = scale[Math.round(255 * Math.min(1, Math.max(0, part)))];
    const [x, end] = right ? [xs[i] + right, xs[i + 1] - right] : [Math.round(xs[i]), Math.round(xs[i + 1])];
    const [y, foot] = lower ? [ys[j] + lower, ys[j + 1] - lower] : [Math.round(ys[j]), Math.round(ys[j + 1])];
    pen.fillStyle = `rgb(${color})`;
    pen.fillRect(x, y, end - x, foot - y);
    if (!trace.texttemplate) return;
    const isDark = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] < 140;
    write(pen, trace.text[j][i], (x + end) / 2, (y + foot) / 2, { size: trace.textfont.size, align: "center", color: isDark ? "#fff" : "#444" });
  }));
}

function sketchColorbar(pen, trace, frame, width) {
  const bar = { range: [trace.zmin, trace.zmax] };
  const line = lineOf(bar, frame.top + 10, frame.height - 20, true);
  const x = frame.left + frame.width + 19;
  const scale = shades(trace.colorscale);
  for (let i = 0; i < line.length; i += 1) {
    pen.fillStyle = `rgb(${scale[Math.round(255 * (1 - i / line.length))]})`;
    pen.fillRect(x, line.start + i, trace.colorbar.thickness, Math.min(1.5, line.length - i));
  }
  for (const { value, text } of line.ticks) write(pen, text, x + trace.colorbar.thickness + 3, line.at(value));
  write(pen, trace.colorbar.title.text, width - 9, line.start + line.length / 2, { size: 14, align: "center", turn: -Math.PI / 2 });
}

// In lines, from the figure's top; a new one where the width ends.
function sketchLegend(pen, traces, frame) {
  const entries = traces.map((trace) => ({ trace, text: trace.name.replaceAll("&lt;", "<").replaceAll("&amp;", "&") }));
  const widths = entries.map(({ text }) => 46 + widthOf(pen, text));
  const perLine = widths.reduce((a, b) => a + b, 0) <= frame.width ? entries.length : 1;
  const lines = Math.ceil(entries.length / perLine);
  let x = frame.left;
  entries.forEach(({ trace, text }, i) => {
    if (i % perLine === 0) x = frame.left;
    const y = frame.top - 17 - 19 * (lines - 1 - Math.floor(i / perLine));
    pen.globalAlpha = trace.opacity ?? 1;
    if (trace.type === "bar") {
      pen.fillStyle = trace.marker.color;
      pen.fillRect(x + 14, y - 6, 12, 12);
    } else {
      if (trace.mode.includes("lines")) stroke(pen, trace.line, () => { pen.moveTo(x + 5, y); pen.lineTo(x + 35, y); });
      if (trace.mode.includes("markers")) dot(pen, x + 20, y, trace.marker);
    }
    pen.globalAlpha = 1;
    write(pen, text, x + 40, y);
    x += widths[i];
  });
}

function sketchAnnotation(pen, note, frame, panels) {
  const panel = panels.find(({ x }) => note.xref === `${x} domain`);
  const x = panel ? panel.across.start + note.x * panel.across.length : frame.left + note.x * frame.width;
  const y = panel ? panel.up.at(note.y) : frame.top + (1 - note.y) * frame.height - 3;
  write(pen, note.text, x + (note.xshift || 0), y, { size: (note.font || {}).size, base: note.yanchor === "bottom" ? "bottom" : "middle" });
}

// The cell or bar under a pointer, as plotly names it.
function pointAt(traces, { across, up }, left, top) {
  const [x, y] = [across.valueAt(left), up.valueAt(top)];
  const nearest = (values, value) => values.reduce((best, v) => (Math.abs(v - value) < Math.abs(best - value) ? v : best));
  if (left < across.start || left > across.start + across.length || top < up.start || top > up.start + up.length) return null;
  const [trace] = traces;
  if (trace.type === "heatmap") { const cells = cellsOf(trace); return { x: nearest(cells.x, x), y: nearest(cells.y, y) }; }
  return { x: nearest(trace.x, x), y };
}
