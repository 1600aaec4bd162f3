// The range map: sites from left to right, powers of two from bottom to top; gradients move with the loss scale.
"use strict";

const MAP = { top: 24, low: -40, high: 24, gutter: 96 };
const map = { from: 0, to: 0, dark: null, offsets: null, colours: null };

function prepareSites() {
  const { counts } = page.sites;
  map.offsets = new Uint32Array(counts.length + 1);
  for (let site = 0; site < counts.length; site++) map.offsets[site + 1] = map.offsets[site] + counts[site];
  map.to = counts.length;
}

// The share of a site's values (0 to 1) that overflow, are subnormal or are lost at the loss scale that is tried.
function shares(site) {
  const { limits, lowest, phase, per_bit: perBit } = page.sites;
  const shift = phase[site] === "b" ? page.power : 0;
  const found = { over: 0, subnormal: 0, lost: 0 };
  for (let at = map.offsets[site]; at < map.offsets[site + 1]; at++) {
    if (!page.levels[at]) continue;
    const exponent = lowest[site] + at - map.offsets[site] + shift;
    const part = 2 ** ((page.levels[at] - 255) / perBit);
    if (exponent >= limits.overflow) found.over += part;
    else if (exponent < limits.least) found.lost += part;
    else if (exponent < limits.normal) found.subnormal += part;
  }
  return found;
}

function percent(part) {
  if (part <= 0) return "none";
  if (part >= 0.995) return "all";
  return part < 0.001 ? "<0.1%" : `${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%`;
}

function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function readColours() {
  const full = (name) => {
    const hex = colourOf(name);
    return hex.length === 4 ? `#${[...hex.slice(1)].map((one) => one + one).join("")}` : hex;
  };
  map.colours = {
    ground: full("--ground"),
    ink: full("--ink"),
    soft: full("--soft"),
    line: full("--line"),
    focus: full("--focus"),
    zones: ["--lost", "--subnormal", "--normal", "--overflow"].map((name) => rgb(full(name))),
  };
}

function zoneOf(exponent) {
  const { limits } = page.sites;
  if (exponent >= limits.overflow) return 3;
  return exponent >= limits.normal ? 2 : exponent >= limits.least ? 1 : 0;
}

function drawMap() {
  const canvas = byId("map");
  const redraw = () => requestAnimationFrame(paint);
  readColours();
  new ResizeObserver(redraw).observe(canvas);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => {
      readColours();
      paint();
    });
  }
  addEventListener("beforeprint", () => {
    readColours();
    paint();
  });
  addEventListener("afterprint", () => {
    readColours();
    redraw();
  });
  page.onPower.push(redraw);
  page.onChosen.push(() => {
    keepInSight();
    redraw();
    sayChosen();
  });
  page.onPower.push(sayChosen);
  steerMap(canvas);
  drawScale();
  legend();
}

function legend() {
  const parts = [
    ["overflow", "overflows (2^16 and more)"],
    ["normal", "normal"],
    ["subnormal", "subnormal (below 2^-14): loses precision"],
    ["lost", "lost in zero (below 2^-24)"],
  ];
  for (const [name, text] of parts) byId("map-legend").append(element("span", { class: `key ${name}` }, text));
  byId("map-legend").append(element("span", {}, "stronger: more of its values"));
}

function geometry(canvas) {
  const width = canvas.clientWidth,
    height = canvas.clientHeight;
  const cell = (height - MAP.top - 22) / (MAP.high - MAP.low);
  return {
    width,
    height,
    cell,
    left: MAP.gutter,
    room: width - MAP.gutter - 8,
    y: (exponent) => height - 22 - (exponent - MAP.low) * cell,
  };
}

function paint() {
  const canvas = byId("map"),
    ratio = devicePixelRatio || 1;
  const box = geometry(canvas);
  if (!box.width) return;
  canvas.width = Math.round(box.width * ratio);
  canvas.height = Math.round(box.height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  paintGround(pen, box);
  paintSites(pen, box, canvas, ratio);
  paintLabels(pen, box);
}

function paintGround(pen, box) {
  const { limits } = page.sites;
  pen.fillStyle = map.colours.ground;
  pen.fillRect(0, 0, box.width, box.height);
  const zones = [
    [MAP.low, limits.least, 0],
    [limits.least, limits.normal, 1],
    [limits.overflow, MAP.high, 3],
  ];
  for (const [low, high, zone] of zones) {
    pen.fillStyle = `rgba(${map.colours.zones[zone].join(",")},.09)`;
    pen.fillRect(box.left, box.y(high), box.room, box.y(low) - box.y(high));
  }
}

// A column of pixels holds several sites where there are many: it shows their average, but the worst beyond a limit.
function paintSites(pen, box, canvas, ratio) {
  const { phase, lowest } = page.sites;
  const columns = Math.max(1, Math.min(Math.round(box.room * ratio), map.to - map.from));
  const rows = MAP.high - MAP.low;
  const picture = new OffscreenCanvas(columns, rows);
  const inner = picture.getContext("2d");
  const image = inner.createImageData(columns, rows);
  const most = new Uint8Array(rows),
    sum = new Uint32Array(rows);
  const each = (map.to - map.from) / columns;
  for (let column = 0; column < columns; column++) {
    most.fill(0);
    sum.fill(0);
    const start = map.from + Math.floor(column * each),
      end = Math.max(start + 1, map.from + Math.floor((column + 1) * each));
    for (let site = start; site < end; site++) {
      const shift = lowest[site] + (phase[site] === "b" ? page.power : 0) - MAP.low;
      for (let at = map.offsets[site]; at < map.offsets[site + 1]; at++) {
        const row = Math.min(rows - 1, Math.max(0, shift + at - map.offsets[site]));
        if (page.levels[at] > most[row]) most[row] = page.levels[at];
        sum[row] += page.levels[at];
      }
    }
    for (let row = 0; row < rows; row++) {
      if (!most[row]) continue;
      const zone = zoneOf(row + MAP.low);
      const at = 4 * ((rows - 1 - row) * columns + column);
      image.data.set(map.colours.zones[zone], at);
      const level = (zone === 2 ? sum[row] / (end - start) : most[row]) / 255;
      image.data[at + 3] = Math.round(255 * (zone === 3 ? 0.55 + 0.45 * level : 0.12 + 0.88 * level ** 1.6));
    }
  }
  inner.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(picture, box.left, box.y(MAP.high), box.room, box.y(MAP.low) - box.y(MAP.high));
  paintMarks(pen, box);
}

// Under the heat, a stroke for each site that overflows or is lost; the chosen one and the border of the passes.
function paintMarks(pen, box) {
  const width = Math.max(1, box.room / (map.to - map.from));
  const at = (site) => box.left + ((site - map.from) / (map.to - map.from)) * box.room;
  for (let site = map.from; site < map.to; site++) {
    const now = state(site);
    if (!now) continue;
    pen.fillStyle = `rgb(${map.colours.zones[now === "over" ? 3 : 0].join(",")})`;
    pen.fillRect(at(site), now === "over" ? MAP.top - 6 : box.height - 21, width, 5);
  }
  const turn = page.sites.phase.indexOf("b");
  if (turn >= map.from && turn < map.to) {
    pen.fillStyle = map.colours.ink;
    pen.fillRect(at(turn), MAP.top - 8, 1, box.height - MAP.top - 12);
  }
  if (page.chosen >= map.from && page.chosen < map.to) {
    pen.strokeStyle = map.colours.focus;
    pen.lineWidth = 2;
    pen.strokeRect(at(page.chosen) - 1, MAP.top, Math.max(3, width + 2), box.height - MAP.top - 22);
  }
}

function paintLabels(pen, box) {
  const { limits, phase } = page.sites;
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const [exponent, text] of [
    [limits.overflow, "overflow 2^16"],
    [0, "1"],
    [limits.normal, "normal 2^-14"],
    [limits.least, "zero 2^-24"],
  ]) {
    const isLimit = exponent !== 0;
    pen.fillStyle = isLimit ? map.colours.ink : map.colours.soft;
    pen.fillText(text, MAP.gutter - 6, box.y(exponent));
    pen.globalAlpha = isLimit ? 0.75 : 0.25;
    pen.fillRect(box.left, box.y(exponent) - 0.5, box.room, 1);
    pen.globalAlpha = 1;
  }
  pen.textAlign = "left";
  pen.fillStyle = map.colours.soft;
  const turn = phase.indexOf("b");
  const at = (site) => box.left + ((site - map.from) / (map.to - map.from)) * box.room;
  if (map.from < (turn < 0 ? Infinity : turn)) pen.fillText("forward", box.left + 2, 8);
  if (turn >= 0 && turn < map.to)
    pen.fillText(
      `backward, at a loss scale of ${scaleInWords(page.power)}`,
      Math.max(box.left + (map.from < turn ? 60 : 2), Math.min(at(turn) + 4, box.width - 220)),
      8,
    );
  pen.fillText(
    `sites ${(map.from + 1).toLocaleString("en")} to ${map.to.toLocaleString("en")} of ${phase.length.toLocaleString("en")}`,
    box.left,
    box.height - 7,
  );
}

// Zoom and choice

function zoom(factor, around) {
  const all = page.sites.line.length;
  const size = Math.max(Math.min(8, all), Math.min(all, Math.round((map.to - map.from) * factor)));
  const part = (around - map.from) / Math.max(1, map.to - map.from);
  map.from = Math.max(0, Math.min(all - size, Math.round(around - part * size)));
  map.to = map.from + size;
  paint();
}

function keepInSight() {
  const size = map.to - map.from;
  if (page.chosen < 0 || (page.chosen >= map.from && page.chosen < map.to)) return;
  map.from = Math.max(0, Math.min(page.sites.line.length - size, page.chosen - (size >> 1)));
  map.to = map.from + size;
}

function steerMap(canvas) {
  const all = page.sites.line.length;
  const siteAt = (event) => {
    const box = geometry(canvas);
    const part = (event.clientX - canvas.getBoundingClientRect().left - box.left) / box.room;
    return Math.max(map.from, Math.min(map.to - 1, map.from + Math.floor(part * (map.to - map.from))));
  };
  const middle = () => (page.chosen >= 0 ? page.chosen : (map.from + map.to) >> 1);
  canvas.addEventListener("click", (event) => choose(siteAt(event)));
  canvas.addEventListener("pointermove", (event) => {
    if (event.pointerType === "mouse") describe(siteAt(event));
  });
  canvas.addEventListener("pointerleave", sayChosen);
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, siteAt(event));
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50, Home: -all, End: all };
    if (event.key in moves)
      choose(Math.max(0, Math.min(all - 1, (page.chosen < 0 ? map.from - 1 : page.chosen) + moves[event.key])));
    else if (event.key === "+" || event.key === "=") zoom(0.5, middle());
    else if (event.key === "-") zoom(2, middle());
    else if (event.key === "0") zoom(all, middle());
    else if (event.key === "Enter" && page.chosen >= 0) openSite(page.chosen);
    else return;
    event.preventDefault();
  });
  byId("zoom-in").addEventListener("click", () => zoom(0.5, middle()));
  byId("zoom-out").addEventListener("click", () => zoom(2, middle()));
  byId("zoom-all").addEventListener("click", () => zoom(all, middle()));
}

function sayChosen() {
  if (page.chosen >= 0) describe(page.chosen);
  else byId("map-readout").textContent = "Point at a site, or choose one with the arrow keys.";
}

function describe(site) {
  const { module, op, file, line, max, phase, calls, call, bad, size } = page.sites;
  const { over, subnormal, lost } = shares(site);
  const where = [" · ", phase[site] === "f" ? "forward" : "backward", " · ", page.names[op[site]], " · "];
  if (file[site] >= 0)
    where.push(
      element("a", { href: "#source", "data-file": page.names[file[site]], "data-line": line[site] }, placeOf(site)),
      " · ",
    );
  const facts = [
    `largest ${max[site]}${phase[site] === "b" ? " at a loss scale of 1" : ""}`,
    `${bitsInWords(room(site))} bits to the limit`,
  ];
  if (calls[site] > 1) facts.push(`${calls[site]} calls${call[site] > 0 ? `, call ${call[site]} largest` : ""}`);
  if (bad[site]) facts.push(`${bad[site]} of ${size[site]}`);
  facts.push(`overflow: ${percent(over)}`, `subnormal: ${percent(subnormal)}`, `lost: ${percent(lost)}`);
  byId("map-readout").replaceChildren(element("b", {}, moduleName(module[site])), ...where, facts.join(" · "));
}
