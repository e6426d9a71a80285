// What is shown follows the address after '#'; the page looks for news every few seconds.
"use strict";

const REFRESH_MS = 3000;
const App = { runs: [], turn: 0, overviews: {}, isSameView: false };

function state() {
  const found = Object.fromEntries(new URLSearchParams(window.location.hash.slice(1)));
  const run = Math.min(Math.max(0, Number(found.run) || 0), Math.max(0, App.runs.length - 1));
  const view = ["overview", "layer", "compare"].includes(found.view) ? found.view : "overview";
  return { ...found, view, run };
}

function address(values) {
  const kept = Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return `#${new URLSearchParams(kept)}`;
}

function goToLayer(run) { return (where) => address({ view: "layer", run, ...where }); }

async function overviewOf(run) {
  const known = App.overviews[run];
  if (!known || known.version !== App.runs[run].version) App.overviews[run] = await ask("overview", { run });
  return App.overviews[run];
}

function problem(text) {
  byId("problem").hidden = !text;
  byId("problem").textContent = text || "";
}

// `isSameView`: with newer data.
async function render(isSameView = false) {
  const turn = ++App.turn;
  const s = state();
  const run = App.runs[s.run];
  byId("run").value = String(s.run);
  byId("run").parentElement.hidden = s.view === "compare";
  for (const link of document.querySelectorAll("nav a")) {
    link.href = address({ view: link.dataset.view, run: s.run });
    if (link.dataset.view === s.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  let show;
  try {
    if (s.view === "overview") {
      const data = await overviewOf(s.run);
      show = () => showOverview(run, data, goToLayer(s.run));
    } else if (s.view === "layer") {
      const { layer, step, microbatch, group } = s;
      const data = await ask("detail", { run: s.run, layer: layer ?? (await worstLayer(s.run)), step, microbatch, group });
      show = () => showLayer(run, data, goToLayer(s.run));
    } else {
      const within = (value, other) => Math.min(Number(value ?? other) || 0, App.runs.length - 1);
      const chosen = { a: within(s.a, 0), b: within(s.b, 1) };
      const [a, b] = await Promise.all([overviewOf(chosen.a), overviewOf(chosen.b)]);
      show = () => showCompare(App.runs, chosen, { a, b });
    }
  } catch (error) {
    if (turn !== App.turn) return;
    problem(error.message);
    for (const section of document.querySelectorAll("main > section")) section.hidden = true;
    return;
  }
  if (turn !== App.turn) return; // something else was asked for meanwhile
  problem(run.problem);
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== s.view;
  App.isSameView = isSameView;
  show();
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
  takeOver();
}

async function worstLayer(run) {
  const worst = (await overviewOf(run)).worst;
  return worst.length ? worst[0].layer : 0;
}

// `early`: the overview of the run in the address, asked for at the same time.
async function lookForNews(early = null) {
  try {
    const [answer, overview] = await Promise.all([ask("runs"), early && early.catch(() => null)]);
    const before = JSON.stringify(App.runs.map((run) => [run.version, run.problem]));
    App.runs = answer.runs;
    if (overview) App.overviews[state().run] = overview;
    const changed = JSON.stringify(App.runs.map((run) => [run.version, run.problem])) !== before;
    byId("status").textContent = EMBEDDED ? "exported" : `live · ${new Date().toLocaleTimeString()}`;
    if (changed) render(true);
  } catch (error) {
    byId("status").textContent = "the server does not answer";
  }
}

async function start() {
  Theme.start(() => render());
  const { view, run } = Object.fromEntries(new URLSearchParams(window.location.hash.slice(1)));
  const first = lookForNews(view === undefined || view === "overview" ? ask("overview", { run: run || 0 }) : null);
  await first;
  byId("run").replaceChildren(...App.runs.map((run, i) => make("option", { value: String(i), textContent: run.name })));
  byId("run").value = String(state().run);
  byId("run").addEventListener("change", (event) => { window.location.hash = address({ view: state().view, run: event.target.value }); });
  byId("layer-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const { layer, step, microbatch, group } = Object.fromEntries(new FormData(event.target));
    window.location.hash = goToLayer(state().run)({ layer, step, microbatch, group });
  });
  byId("compare-form").addEventListener("change", (event) => {
    const { a, b } = Object.fromEntries(new FormData(event.currentTarget));
    window.location.hash = address({ view: "compare", run: state().run, a, b });
  });
  window.addEventListener("hashchange", () => render());
  if (!EMBEDDED) setInterval(() => { if (!document.hidden) lookForNews(); }, REFRESH_MS);
}

start();
