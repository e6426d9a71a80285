// Light and dark, for the page and the figures.
"use strict";

const Theme = {
  name: "light",

  start(onChange) {
    const preferred = window.matchMedia("(prefers-color-scheme: dark)");
    const stored = () => { try { return localStorage.getItem("equipoise-theme"); } catch { return null; } };
    const choose = (name) => {
      this.name = name;
      document.documentElement.dataset.theme = name;
      byId("theme").textContent = name === "dark" ? "Light" : "Dark";
    };
    choose(stored() || (preferred.matches ? "dark" : "light"));
    preferred.addEventListener("change", () => { if (!stored()) { choose(preferred.matches ? "dark" : "light"); onChange(); } });
    byId("theme").addEventListener("click", () => {
      choose(this.name === "dark" ? "light" : "dark");
      try { localStorage.setItem("equipoise-theme", this.name); } catch { /* a file without storage */ }
      onChange();
    });
  },

  color(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); },

  // From even (1) to the worst.
  imbalanceScale() {
    return this.name === "dark"
      ? [[0, "#20262f"], [0.25, "#5b3a24"], [0.5, "#a85a1f"], [0.75, "#e8913a"], [1, "#ffe2b0"]]
      : [[0, "#f3f4f6"], [0.25, "#fbd9ae"], [0.5, "#f0a04b"], [0.75, "#c65c12"], [1, "#6b2400"]];
  },

  // From nothing to many rows.
  rowsScale() {
    return this.name === "dark"
      ? [[0, "#20262f"], [0.5, "#1f6a94"], [1, "#a9dcf7"]]
      : [[0, "#f3f4f6"], [0.5, "#7db9d8"], [1, "#0d4a6b"]];
  },

  // Colour of a rank's experts; `shade` from 0 to 1 tells neighbours in a stack apart.
  rank(rank, numRanks, shade = 0) {
    const hues = [[211, 62], [32, 80], [152, 48], [345, 62], [268, 45], [186, 60], [48, 62], [315, 45], [95, 45], [12, 60]];
    const [hue, saturation] = numRanks <= hues.length ? hues[rank] : [(360 * rank) / numRanks, 58];
    const light = this.name === "dark" ? 62 - 16 * shade : 46 + 18 * shade;
    return `hsl(${hue.toFixed(0)}, ${saturation}%, ${light.toFixed(0)}%)`;
  },
};
