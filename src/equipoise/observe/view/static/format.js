// Numbers to text, elements, and the data of the page: from the server, or embedded in an exported file.
"use strict";

const MISSING = "–";

function number(value, digits = 4) {
  if (value === null || value === undefined) return MISSING;
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

function fixed(value, digits = 3) {
  return value === null || value === undefined ? MISSING : value.toFixed(digits);
}

function bytes(value) {
  if (value === null || value === undefined) return MISSING;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${number(value, 3)} ${units[unit]}`;
}

function byId(id) { return document.getElementById(id); }

// An element with properties and children; texts are never markup.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(element.dataset, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

// Tiles of [label, text, exact value, class].
function showTiles(id, tiles) {
  byId(id).replaceChildren(...tiles.map(([label, text, value, kind]) =>
    make("div", { className: `tile ${kind || ""}` },
      make("b", { textContent: text, data: { name: label, value: String(value ?? "") } }), make("span", { textContent: label }))));
}

// A table; cells are texts or elements.
function showTable(id, head, rows, empty) {
  if (!rows.length) {
    byId(id).replaceChildren(make("p", { className: "empty", textContent: empty }));
    return;
  }
  const cells = (tag, values) => values.map((value) => make(tag, {}, value));
  byId(id).replaceChildren(make("table", {},
    make("thead", {}, make("tr", {}, ...cells("th", head))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row))))));
}

const EMBEDDED = byId("embedded") ? JSON.parse(byId("embedded").textContent) : null;

function nearestDetail(details, { layer, step }) {
  const keys = Object.keys(details).map((key) => key.split("/").map(Number));
  const layers = [...new Set(keys.map(([l]) => l))];
  if (!layers.length) throw new Error("This file holds no layers to look into: the run's trace had no matrices.");
  const wanted = Number(layer ?? layers[0]);
  if (!layers.includes(wanted)) {
    throw new Error(`This file holds layers ${layers.sort((a, b) => a - b).join(", ")}; layer ${wanted} was not exported.`);
  }
  const steps = keys.filter(([l]) => l === wanted).map(([, s]) => s).sort((a, b) => a - b);
  const target = step === undefined || step === "" ? steps[steps.length - 1] : Number(step);
  const at = steps.reduce((best, s, i) => (Math.abs(s - target) < Math.abs(steps[best] - target) ? i : best), 0);
  return { ...details[`${wanted}/${steps[at]}`], previous: steps[at - 1] ?? null, next: steps[at + 1] ?? null };
}

async function ask(request, parameters = {}) {
  if (EMBEDDED) {
    if (request === "runs") return EMBEDDED.runs;
    if (request === "overview") return EMBEDDED[`overview/${parameters.run || 0}`];
    return nearestDetail(EMBEDDED[`details/${parameters.run || 0}`], parameters);
  }
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== "");
  const query = new URLSearchParams(given);
  const answer = await fetch(`api/${request}?${query}`);
  const content = await answer.json().catch(() => ({ error: `The server answered ${answer.status}.` }));
  if (!answer.ok) throw new Error(content.error);
  return content;
}
