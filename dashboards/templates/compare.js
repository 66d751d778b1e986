"use strict";
(() => {
  const buttons = [...document.querySelectorAll(".key button")];
  const plots = [...document.querySelectorAll(".plot")];

  // One run in full, the others faint; the same button again shows all.
  function show(chosen) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.run === chosen));
    for (const plot of plots) {
      if (!plot.data) continue;
      const own = plot.data.map((trace) => (chosen === null ? (trace.line.width > 4 ? 0.6 : 1) : String(trace.meta) === chosen ? 1 : 0.12));
      Plotly.restyle(plot, { opacity: own });
    }
  }
  for (const button of buttons) {
    button.addEventListener("click", () => show(button.getAttribute("aria-pressed") === "true" ? null : button.dataset.run));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(null));
})();
