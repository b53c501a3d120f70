"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures--data").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  // A finger that drags over a figure wants to scroll the page.
  const touch = matchMedia("(pointer: coarse)").matches;
  const printedWidth = 640;
  let printing = false;

  // The figures take their colours from the style sheet, which knows light, dark and paper.
  function theme() {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    return {
      ink: value("--ink"), quiet: value("--quiet"), rule: value("--rule"), paper: value("--paper"),
      series: value("--series").split(/\s+/), font: value("--sans"),
    };
  }

  function wrap(name, length) {
    const lines = [""];
    for (const word of name.split(" ")) {
      const last = lines[lines.length - 1];
      if (last && last.length + word.length >= length) lines.push(word);
      else lines[lines.length - 1] = last ? `${last} ${word}` : word;
    }
    return lines.join("<br>");
  }

  function traces(data, look, width) {
    return data.map((trace) => {
      const colour = look.series[trace.meta.series % look.series.length];
      if (trace.meta.image) return { ...trace, colorscale: [[0, look.series[1]], [0.5, look.paper], [1, look.series[0]]] };
      if (trace.meta.band) return { ...trace, fillcolor: `${colour}2e`, line: { ...trace.line, color: colour } };
      const styled = { ...trace, marker: { ...trace.marker, color: colour } };
      if (trace.name) styled.name = wrap(trace.name, Math.max(16, Math.floor(width / 8) - 8)) + "\u2002";
      if (trace.line) styled.line = { ...trace.line, color: colour };
      if (trace.error_y) styled.error_y = { ...trace.error_y, color: trace.type === "bar" ? look.ink : colour };
      return styled;
    });
  }

  function axis(given, look, narrow) {
    return {
      ...given,
      title: { ...given.title, font: { size: narrow ? 12 : 13, color: look.quiet }, standoff: 10 },
      automargin: true, gridcolor: look.rule, linecolor: look.quiet, zerolinecolor: look.rule,
      tickfont: { color: look.quiet }, showline: true, ticks: given.showticklabels === false ? "" : "outside", ticklen: 4, tickcolor: look.quiet,
      nticks: narrow ? 6 : 0, showgrid: given.showgrid ?? given.type !== "category",
    };
  }

  // How many lines the legend will take, so that it takes them from the page and not from the plot.
  function legendRows(data, width) {
    let rows = 1, used = 0;
    for (const trace of data.filter((each) => each.name && each.showlegend !== false)) {
      const length = Math.min(width, 52 + 6.6 * trace.name.length);
      if (used && used + length > width - 60) { rows += 1; used = 0; }
      used += length;
    }
    return rows;
  }

  function measure(plot) {
    const { data, layout } = figures[plot.dataset.figure];
    const width = printing ? printedWidth : plot.clientWidth;
    const legend = layout.showlegend ? 12 + 21 * legendRows(data, width) : 0;
    const height = (width < 500 ? 300 : 380) + legend;
    plot.style.minHeight = `${height}px`;
    return { width, height };
  }

  function draw(plot) {
    const { data, layout } = figures[plot.dataset.figure];
    const look = theme();
    const { width, height } = measure(plot);
    const narrow = width < 500;
    return Plotly.react(plot, traces(data, look, width), {
      ...layout,
      xaxis: axis(layout.xaxis, look, narrow), yaxis: axis(layout.yaxis, look, narrow),
      font: { family: look.font, size: narrow ? 11 : 12.5, color: look.ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: narrow ? 8 : 16, t: 28, b: 8 },
      legend: { orientation: "h", x: 0, xanchor: "left", xref: "container", y: 0, yanchor: "bottom", yref: "container" },
      hovermode: "closest",
      hoverlabel: { bgcolor: look.paper, bordercolor: look.quiet, font: { color: look.ink }, namelength: -1 },
      dragmode: touch ? false : "zoom",
      width, height,
    }, { displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
  }

  // One figure at a time, so that the page can be scrolled meanwhile. Their room is made first, so
  // that nothing moves any more and a link into the page arrives where it should.
  async function start() {
    plots.forEach(measure);
    if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
    for (const plot of plots) {
      await draw(plot);
      await new Promise((resume) => setTimeout(resume));
    }
    document.documentElement.dataset.drawn = plots.length;
    const widths = new Map(plots.map((plot) => [plot, plot.clientWidth]));
    const observer = new ResizeObserver((entries) => {
      for (const { target } of entries) {
        if (printing || widths.get(target) === target.clientWidth) continue;
        widths.set(target, target.clientWidth);
        draw(target);
      }
    });
    plots.forEach((plot) => observer.observe(plot));
    dark.addEventListener("change", () => plots.forEach(draw));
    const print = (on) => {
      printing = on;
      document.documentElement.toggleAttribute("data-printing", on);
      for (const details of document.querySelectorAll(on ? "details:not(.data, [open])" : "details.printed")) {
        details.open = on; // on paper nothing can be unfolded
        details.classList.toggle("printed", on);
      }
      plots.forEach(draw);
    };
    addEventListener("beforeprint", () => print(true));
    addEventListener("afterprint", () => print(false));
  }

  function cell(row, tag, text) {
    const element = row.appendChild(document.createElement(tag));
    const isNumber = typeof text === "number";
    element.textContent = isNumber ? String(Number(text.toPrecision(6))) : text ?? "";
    if (isNumber) element.className = "number";
    if (tag === "th") element.scope = "col";
  }

  // The table of a figure is made when it is asked for: it is long, and few do.
  function tabulate(details) {
    const unescape = (text) => typeof text === "string"
      ? text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&") : text;
    const { data, layout } = figures[details.dataset.figure];
    const shown = data.filter((trace) => !trace.meta.band);
    const box = details.appendChild(document.createElement("div"));
    box.className = "scroll";
    box.tabIndex = 0;
    const table = box.appendChild(document.createElement("table"));
    const head = table.createTHead().insertRow();
    const hasError = figures[details.dataset.figure].errors;
    for (const name of ["Series", layout.xaxis.title.text, layout.yaxis.title.text]) cell(head, "th", unescape(name));
    if (hasError) cell(head, "th", "±");
    const body = table.createTBody();
    shown.forEach((trace, index) => trace.x.forEach((x, point) => {
      const row = body.insertRow();
      for (const value of [trace.name, x, trace.y?.[point]]) cell(row, "td", unescape(value));
      if (hasError) cell(row, "td", hasError[index][point]);
    }));
  }
  for (const details of document.querySelectorAll("details.data")) {
    details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) tabulate(details); });
  }

  // The side bar marks the last section that begins above a third of the window.
  const sections = [...document.querySelectorAll("section")];
  const links = new Map([...document.querySelectorAll(".side li a")].map((link) => [link.hash.slice(1), link]));
  function mark() {
    const current = sections.findLast((section) => section.getBoundingClientRect().top < innerHeight / 3);
    for (const [name, link] of links) {
      if (name === current?.id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }
  addEventListener("scroll", mark, { passive: true });
  mark();

  start();
})();
