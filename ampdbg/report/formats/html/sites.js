// The loss scale to try, what it does to the gradients, and the list of sites.
"use strict";

const ROW = 26;
const list = { shown: [], words: null };

function drawScale() {
  const { scales, window: usable } = page.sites;
  const slider = byId("scale");
  Object.assign(slider, { min: scales.low, max: scales.low + scales.words.length - 1, value: scales.of_run });
  slider.addEventListener("input", () => setPower(Number(slider.value)));
  page.onPower.push(() => {
    slider.value = page.power;
    slider.setAttribute("aria-valuetext", scaleInWords(page.power));
    byId("scale-value").textContent = scaleInWords(page.power);
    sayScale(scales, usable);
    drawScaleChart(scales, usable);
  });
  new ResizeObserver(() => drawScaleChart(scales, usable)).observe(byId("scale-chart"));
}

function sayScale(scales, usable) {
  const at = page.power - scales.low;
  const parts = [];
  if (!scales.gradients) parts.push("The step has no gradients in half precision.");
  else {
    parts.push(
      `${scales.overflow[at].toLocaleString("en")} of ${counted(scales.gradients, "gradient")} ${scales.overflow[at] === 1 ? "overflows" : "overflow"} at this scale, ${scales.lost[at].toLocaleString("en")} ${scales.lost[at] === 1 ? "loses" : "lose"} more than 1 % of ${scales.lost[at] === 1 ? "its" : "their"} energy.`,
    );
    if (usable.floor > usable.ceiling)
      parts.push(
        `No scale works for the whole model: below ${scaleInWords(usable.floor)} a gradient is lost, above ${scaleInWords(usable.ceiling)} one overflows.`,
      );
    else if (usable.ceiling >= 9999)
      parts.push(usable.floor <= -9999 ? "Any scale works." : `Scales from ${scaleInWords(usable.floor)} up work.`);
    else
      parts.push(
        `Scales ${usable.floor <= -9999 ? "up to" : `from ${scaleInWords(usable.floor)} to`} ${scaleInWords(usable.ceiling)} work for the whole model.`,
      );
  }
  byId("scale-says").textContent = parts.join(" ");
}

// Above the slider: at each scale how many gradients overflow (red) and are lost (grey), and the window that works.
function drawScaleChart(scales, usable) {
  const svg = byId("scale-chart");
  const width = svg.clientWidth,
    height = svg.clientHeight;
  if (!width) return;
  const last = scales.words.length - 1,
    thumb = 16;
  const x = (power) => thumb / 2 + ((power - scales.low) / last) * (width - thumb);
  const each = Math.min((width - thumb) / last, 26),
    floor = height - 16;
  const most = Math.max(1, ...scales.overflow, ...scales.lost);
  const tall = (count) => (count ? 3 + (Math.log1p(count) / Math.log1p(most)) * (floor - 8) : 0);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const low = Math.max(scales.low, usable.floor),
    high = Math.min(scales.low + last, usable.ceiling);
  if (low <= high && scales.gradients)
    svg.append(
      drawing("rect", { class: "usable", x: x(low) - each / 2, width: x(high) - x(low) + each, y: 0, height: floor }),
    );
  scales.words.forEach((word, at) => {
    const power = scales.low + at;
    const bar = (count, name) => {
      if (count)
        svg.append(
          drawing("rect", {
            class: name,
            x: x(power) - each * 0.36,
            width: each * 0.72,
            y: floor - tall(count),
            height: tall(count),
          }),
        );
    };
    bar(scales.lost[at], "under");
    bar(scales.overflow[at], "over");
    if (power % 8 === 0) svg.append(drawing("text", { x: x(power), y: height - 3, "text-anchor": "middle" }, word));
  });
  svg.append(drawing("line", { class: "now", x1: x(page.power), x2: x(page.power), y1: 0, y2: floor }));
  const run = drawing("path", { class: "of-run", d: `M${x(scales.of_run)} ${floor}l-4 6h8z` });
  run.append(drawing("title", {}, `this run: ${scaleInWords(scales.of_run)}`));
  svg.append(run);
}

// The list: only the rows in sight are in the page.

function listSites() {
  const { module, op } = page.sites;
  list.words = page.sites.line.map((_, site) =>
    `${moduleName(module[site])} ${page.names[op[site]]} ${placeOf(site)}`.toLowerCase(),
  );
  const box = byId("sites");
  box.append(element("div", { class: "spacer" }));
  let wait = 0;
  byId("find").addEventListener("input", () => {
    clearTimeout(wait);
    wait = setTimeout(filterSites, 60);
  });
  byId("only-marked").addEventListener("change", filterSites);
  box.addEventListener("scroll", () => requestAnimationFrame(fillList));
  box.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) choose(Number(row.dataset.site));
  });
  box.addEventListener("dblclick", () => {
    if (page.chosen >= 0) openSite(page.chosen);
  });
  box.addEventListener("keydown", steerList);
  new ResizeObserver(fillList).observe(box);
  page.onPower.push(() => (byId("only-marked").checked ? filterSites() : fillList()));
  page.onChosen.push(() => {
    showChosen();
    fillList();
  });
  filterSites();
}

function filterSites() {
  const wanted = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const marked = byId("only-marked").checked;
  list.shown = [];
  for (let site = 0; site < list.words.length; site++) {
    if (wanted.every((word) => list.words[site].includes(word)) && (!marked || mark(site))) list.shown.push(site);
  }
  byId("found").textContent = `${list.shown.length.toLocaleString("en")} of ${counted(list.words.length, "site")}`;
  byId("sites").setAttribute("aria-rowcount", list.shown.length);
  byId("sites").firstChild.style.height = `${list.shown.length * ROW}px`;
  fillList();
}

function fillList() {
  const box = byId("sites");
  const start = Math.max(0, Math.floor(box.scrollTop / ROW) - 4),
    end = Math.min(list.shown.length, start + Math.ceil(box.clientHeight / ROW) + 8);
  const rows = [];
  for (let at = start; at < end; at++) rows.push(siteRow(at, list.shown[at]));
  box.replaceChildren(box.firstChild, ...rows);
  const chosen = list.shown.indexOf(page.chosen);
  if (chosen >= start && chosen < end) box.setAttribute("aria-activedescendant", `site-${page.chosen}`);
  else box.removeAttribute("aria-activedescendant");
}

function siteRow(at, site) {
  const { module, op, max, phase } = page.sites;
  const sign = mark(site),
    left = room(site);
  const tone = state(site) ? "bad" : left !== null && left < 2 ? "doubtful" : "";
  const cell = (text, name = "") => element("span", { role: "gridcell", class: name, title: text }, text);
  const row = element(
    "div",
    {
      class: "row",
      role: "row",
      id: `site-${site}`,
      "aria-rowindex": at + 1,
      "aria-selected": String(site === page.chosen),
      "data-site": site,
      "data-state": state(site),
    },
    cell(sign, tone),
    cell(bitsInWords(left), `number ${tone}`),
    cell(max[site], "number spare"),
    cell(phase[site] === "f" ? "fwd" : "bwd", "spare"),
    cell(moduleName(module[site])),
    cell(page.names[op[site]]),
    cell(placeOf(site), "spare"),
  );
  row.style.top = `${at * ROW}px`;
  return row;
}

function steerList(event) {
  const moves = { ArrowUp: -1, ArrowDown: 1, PageUp: -12, PageDown: 12, Home: -Infinity, End: Infinity };
  if (event.key in moves && list.shown.length) {
    const now = list.shown.indexOf(page.chosen);
    choose(list.shown[Math.max(0, Math.min(list.shown.length - 1, now + moves[event.key]))]);
  } else if (event.key === "Enter" && page.chosen >= 0) openSite(page.chosen);
  else return;
  event.preventDefault();
}

function showChosen() {
  const box = byId("sites"),
    at = list.shown.indexOf(page.chosen);
  if (at < 0) return;
  if (at * ROW < box.scrollTop) box.scrollTop = at * ROW;
  else if ((at + 1) * ROW > box.scrollTop + box.clientHeight) box.scrollTop = (at + 1) * ROW - box.clientHeight;
}

function openSite(site) {
  const { file, line } = page.sites;
  if (file[site] >= 0) openLine(page.names[file[site]], line[site]);
}
