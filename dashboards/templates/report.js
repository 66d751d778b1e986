"use strict";
(() => {
  const root = document.documentElement;
  const figures = [...document.querySelectorAll("script.figure-data")].map((node) => ({
    target: document.getElementById(node.dataset.plot),
    data: JSON.parse(node.textContent),
  }));
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const coarse = matchMedia("(pointer: coarse)");
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // The page's theme on a figure: text, grid and hover colours, tighter margins where there is little room.
  function themed(figure, width) {
    const layout = structuredClone(figure.layout);
    const small = width < 520;
    layout.font = { family: getComputedStyle(document.body).fontFamily, size: small ? 12 : 13, color: color("--ink") };
    layout.hoverlabel = {
      bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") }, align: "left",
    };
    layout.autosize = true;
    layout.dragmode = false;
    if (small) layout.margin = { ...layout.margin, l: 44, r: 8 };
    for (const key of Object.keys(layout).filter((k) => /^[xy]axis\d*$/.test(k))) {
      const axis = layout[key];
      Object.assign(axis, { gridcolor: color("--grid"), zerolinecolor: color("--line"), linecolor: color("--line"), tickcolor: color("--line") });
      axis.fixedrange = coarse.matches;
      if (axis.title) axis.title.font = { size: layout.font.size, color: color("--muted") };
    }
    if (!coarse.matches) layout.dragmode = "zoom";
    return { data: structuredClone(figure.data), layout };
  }

  const config = {
    responsive: true, displaylogo: false, displayModeBar: coarse.matches ? false : "hover", doubleClick: "reset",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "pan2d", "zoom2d"],
  };
  const draw = () => Promise.all(figures.map(({ target, data }) => {
    const { data: traces, layout } = themed(data, target.clientWidth);
    return Plotly.react(target, traces, layout, config);
  }));

  draw().then(() => { root.dataset.drawn = String(figures.length); });
  dark.addEventListener("change", draw);

  let closed = [];
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const node of closed) node.open = true;
    draw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    for (const node of closed) node.open = false;
    draw();
  });
})();
