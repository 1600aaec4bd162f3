// Loss, loss scale and gradient norm over the steps: three curves above one axis.
"use strict";

const TIMELINE = { width: 1100, left: 74, right: 16, top: 18, panel: 92, gap: 26 };

function drawTimeline(data) {
  const { width, left, right, top, panel, gap } = TIMELINE;
  const count = data.step.length;
  const first = data.step[0];
  const span = Math.max(1, data.step[count - 1] - first);
  const x = (at) => left + ((data.step[at] - first) / span) * (width - left - right);
  const shown = data.series.filter((one) => one.words.some((word) => word !== "-"));
  const bottom = top + shown.length * (panel + gap) - gap;
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${bottom + 24}`, role: "img", tabindex: "0" });
  svg.setAttribute(
    "aria-label",
    `${shown.map((one) => one.title).join(", ")} over ${counted(count, "step")}. Left and right move the pointer.`,
  );
  for (let at = 0; at < count; at++) {
    if (data.skipped[at]) svg.append(drawing("line", { class: "skipped", x1: x(at), x2: x(at), y1: top, y2: bottom }));
  }
  shown.forEach((one, number) => drawCurve(svg, one, top + number * (panel + gap), x, count));
  drawSteps(svg, data, x, bottom);
  drawFlags(svg, data, left, span, first, bottom);
  const cross = drawing("line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
  svg.append(cross);
  byId("timeline-chart").append(svg);
  pointAtSteps(svg, cross, data, x);
}

// The logarithm where the values span more than two powers of ten, and always of the loss scale.
function axis(one) {
  const values = one.values.filter((value) => value !== null);
  const positive = values.length > 0 && values.every((value) => value > 0);
  let least = Infinity,
    most = -Infinity;
  for (const value of values) {
    least = Math.min(least, value);
    most = Math.max(most, value);
  }
  const isLog = positive && (one.name === "scale" || most / least > 100);
  const of = isLog ? Math.log2 : (value) => value;
  let low = of(least),
    high = of(most);
  if (high - low <= 1e-9 * Math.abs(high)) {
    const around = Math.max(1, Math.abs(high) / 2);
    low -= around;
    high += around;
  }
  return { isLog, of, low, high, least, most, values };
}

function drawCurve(svg, one, top, x, count) {
  const { width, left, right, panel } = TIMELINE;
  const { isLog, of, low, high, least, most, values } = axis(one);
  // In halves: the whole span may be beyond what a number holds.
  const y = (value) => top + panel - ((of(value) / 2 - low / 2) / (high / 2 - low / 2)) * panel;
  svg.append(
    drawing(
      "text",
      { class: "title", x: left, y: top - 6 },
      one.title + (one.name === "scale" ? " (log₂)" : isLog ? " (log)" : ""),
    ),
  );
  for (const value of values.length ? new Set([least, most]) : []) {
    svg.append(drawing("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(
      drawing("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, one.words[one.values.indexOf(value)]),
    );
  }
  let path = "",
    isDown = false;
  for (let at = 0; at < count; at++) {
    const value = one.values[at];
    if (value === null && one.words[at] === "-") continue; // not taken: the curve goes on to the next that was
    if (value === null) {
      isDown = false;
      svg.append(drawing("circle", { class: "lost", cx: x(at), cy: top + 2, r: 2 }));
      continue;
    }
    const point = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    if (isDown && one.name === "scale") path += `H${x(at).toFixed(1)}V${y(value).toFixed(1)}`;
    else path += (isDown ? "L" : "M") + point;
    if (!isDown && (at + 1 === count || one.values[at + 1] === null)) path += "h.8";
    isDown = true;
  }
  svg.append(drawing("path", { class: "curve", d: path }));
}

function drawSteps(svg, data, x, bottom) {
  const count = data.step.length;
  for (const at of new Set([0, count >> 1, count - 1])) {
    const anchor = at === 0 ? "start" : at === count - 1 ? "end" : "middle";
    svg.append(
      drawing(
        "text",
        { x: x(at), y: bottom + 16, "text-anchor": anchor },
        at === 0 ? `step ${data.step[at]}` : String(data.step[at]),
      ),
    );
  }
  const legend = {
    subnormal: [data.skipped.filter(Boolean).length, "skipped"],
    overflow: [data.series[0].values.filter((value) => value === null).length, "with a loss of inf or NaN"],
  };
  for (const [name, [steps, what]] of Object.entries(legend)) {
    if (steps)
      byId("timeline-legend").append(element("span", { class: `key ${name}` }, `${counted(steps, "step")} ${what}`));
  }
}

// The steps at which findings begin.
function drawFlags(svg, data, left, span, first, bottom) {
  const seen = new Set();
  for (const [step, code] of data.findings) {
    if (seen.has(step) || step < first || step > first + span) continue;
    seen.add(step);
    const at = left + ((step - first) / span) * (TIMELINE.width - left - TIMELINE.right);
    const flag = drawing("path", { class: "flag", d: `M${at} ${bottom + 2}l-4 7h8z` });
    flag.append(drawing("title", {}, `${code} at step ${step}`));
    svg.append(drawing("line", { class: "flag-line", x1: at, x2: at, y1: TIMELINE.top, y2: bottom }), flag);
  }
}

function pointAtSteps(svg, cross, data, x) {
  const readout = byId("timeline-readout");
  let now = data.step.length - 1;
  const show = (at) => {
    now = Math.max(0, Math.min(data.step.length - 1, at));
    cross.setAttribute("x1", x(now));
    cross.setAttribute("x2", x(now));
    cross.setAttribute("visibility", "visible");
    const parts = data.series
      .filter((one) => one.words[now] !== "-")
      .map((one) => `${one.title.toLowerCase()} ${one.words[now]}`);
    const codes = data.findings.filter(([step]) => step === data.step[now]).map(([, code]) => code);
    readout.replaceChildren(element("b", {}, `step ${data.step[now]}`), ` · ${parts.join(" · ")}`);
    if (data.skipped[now]) readout.append(" · skipped");
    if (codes.length) readout.append(` · ${codes.join(", ")}`);
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = ((event.clientX - box.left) / box.width) * TIMELINE.width;
    let low = 0,
      high = data.step.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x(middle) < wanted) low = middle + 1;
      else high = middle;
    }
    show(low > 0 && wanted - x(low - 1) < x(low) - wanted ? low - 1 : low);
  });
  svg.addEventListener("keydown", (event) => {
    const moves = {
      ArrowLeft: now - 1,
      ArrowRight: now + 1,
      PageUp: now - 10,
      PageDown: now + 10,
      Home: 0,
      End: data.step.length - 1,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}
