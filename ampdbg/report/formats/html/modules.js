// The tree of modules: foldable, searchable, by keyboard.
"use strict";

const MOST_ROWS = 400;
const tree = { data: null, rows: [], folded: new Set(), wanted: "" };

function showModules(data) {
  tree.data = data;
  const has = (column) =>
    data[column].some((value) => value !== null && value !== 0 && value !== "" && value.length !== 0);
  tree.columns = [
    ["module", true],
    ["headroom", has("bits")],
    ["loss scales that work", data.sites.some(Boolean)],
    ["from", data.sites.some(Boolean)],
    ["to", data.sites.some(Boolean)],
    ["sites", data.sites.some(Boolean)],
    ["findings", has("findings")],
    ["in FP32", has("pin")],
  ]
    .filter(([, shown]) => shown)
    .map(([name]) => name);
  foldLevels();
  byId("find-module").addEventListener("input", () => {
    tree.wanted = byId("find-module").value.toLowerCase();
    fillTree();
  });
  byId("unfold").addEventListener("click", () => {
    tree.folded.clear();
    fillTree();
  });
  byId("fold").addEventListener("click", () => {
    foldAll(0);
    fillTree();
  });
  byId("tree").addEventListener("click", clickTree);
  byId("tree").addEventListener("keydown", steerTree);
  page.onPower.push(() => {
    for (const tick of byId("tree").querySelectorAll(".tick")) placeTick(tick);
  });
  fillTree();
}

function hasInside(at) {
  return tree.data.depth[at + 1] > tree.data.depth[at];
}

function foldAll(from) {
  tree.data.depth.forEach((depth, at) => {
    if (depth > from && hasInside(at)) tree.folded.add(at);
  });
}

// As many levels are unfolded as can be looked through.
function foldLevels() {
  for (let depth = 1; ; depth++) {
    const shown = tree.data.depth.filter((one) => one <= depth + 1).length;
    if (shown > MOST_ROWS || shown === tree.data.depth.length) {
      if (shown > MOST_ROWS) foldAll(depth - 1);
      return;
    }
  }
}

function visible() {
  const { depth, name } = tree.data;
  const shown = [];
  if (tree.wanted) {
    const line = [];
    depth.forEach((level, at) => {
      line.length = level;
      line[level] = at;
      if (moduleName(name[at]).toLowerCase().includes(tree.wanted))
        for (const one of line) if (!shown.includes(one)) shown.push(one);
    });
    return shown;
  }
  for (let at = 0; at < depth.length; at++) {
    shown.push(at);
    if (tree.folded.has(at)) {
      const level = depth[at];
      while (depth[at + 1] > level) at++;
    }
  }
  return shown;
}

function fillTree() {
  const shown = visible();
  const head = element(
    "thead",
    {},
    element(
      "tr",
      {},
      ...tree.columns.map((name) =>
        element(
          "th",
          { scope: "col", class: ["headroom", "from", "to", "sites"].includes(name) ? "is-number" : "" },
          name,
        ),
      ),
    ),
  );
  const body = element("tbody", {}, ...shown.map(moduleRow));
  byId("tree").replaceChildren(head, body);
  if (body.firstChild) body.firstChild.tabIndex = 0;
  byId("modules-found").textContent =
    `${shown.length.toLocaleString("en")} of ${counted(tree.data.name.length, "module")}`;
}

function moduleRow(at) {
  const { depth, name } = tree.data;
  const isFolded = tree.folded.has(at) && !tree.wanted;
  const row = element("tr", { role: "row", "aria-level": depth[at] + 1, tabindex: -1, "data-at": at });
  if (hasInside(at)) row.setAttribute("aria-expanded", String(!isFolded));
  const fold = element(
    "button",
    { type: "button", class: "fold", tabindex: -1, "aria-hidden": "true" },
    hasInside(at) ? (isFolded ? "▸" : "▾") : "",
  );
  const text = moduleName(name[at]);
  const start = tree.wanted ? text.toLowerCase().indexOf(tree.wanted) : -1;
  const label = element("span", { class: "module" });
  if (start < 0) label.append(text);
  else
    label.append(
      text.slice(0, start),
      element("mark", {}, text.slice(start, start + tree.wanted.length)),
      text.slice(start + tree.wanted.length),
    );
  const first = element("td", { role: "gridcell" }, fold, label);
  first.style.paddingLeft = `${depth[at] * 1.1}rem`;
  row.append(first, ...tree.columns.slice(1).map((column) => moduleCell(column, at)));
  return row;
}

function moduleCell(column, at) {
  const { bits, findings, sites, pin } = tree.data;
  const made = element("td", {
    role: "gridcell",
    class: ["headroom", "from", "to", "sites"].includes(column) ? "is-number" : "",
  });
  if (column === "headroom" && bits[at] !== null) {
    made.append(
      element(
        "span",
        { class: bits[at] < 0 ? "bad" : bits[at] < 2 ? "doubtful" : "" },
        `${bitsInWords(bits[at])} bits`,
      ),
    );
  } else if (column === "sites") made.append(sites[at] ? sites[at].toLocaleString("en") : "");
  else if (column === "from" || column === "to") made.append(hasWindow(at) ? tree.data[column][at] : "");
  else if (column === "loss scales that work" && hasWindow(at)) made.append(windowBar(at));
  else if (column === "findings") made.append(...findingLinks(findings[at]));
  else if (column === "in FP32") {
    made.classList.add("pin");
    made.append(pin[at]);
  }
  return made;
}

function hasWindow(at) {
  return tree.data.ceiling[at] < 9999 || tree.data.floor[at] > -9999;
}

// Each code once, with how often it was found there.
function findingLinks(all) {
  const byCode = new Map();
  for (const at of all) {
    const finding = page.findings[at];
    if (finding) byCode.set(finding.code, [...(byCode.get(finding.code) ?? []), at]);
  }
  return [...byCode].flatMap(([name, places]) => {
    const link = element(
      "a",
      { href: `#finding-${places[0]}`, class: page.findings[places[0]].severity === "error" ? "bad" : "" },
      name,
    );
    return [link, places.length > 1 ? ` ×${places.length} ` : " "];
  });
}

function windowX(power) {
  const { low, words } = page.sites.scales;
  return 2 + (156 * (Math.max(low, Math.min(low + words.length - 1, power)) - low)) / Math.max(1, words.length - 1);
}

function windowBar(at) {
  const { floor, ceiling } = tree.data;
  const svg = drawing("svg", { viewBox: "0 0 160 14", "aria-hidden": "true" });
  const [from, to] = [windowX(Math.min(floor[at], ceiling[at])), windowX(Math.max(floor[at], ceiling[at]))];
  svg.append(
    drawing("rect", {
      class: floor[at] <= ceiling[at] ? "span" : "span closed",
      x: from,
      y: 4,
      width: Math.max(2, to - from),
      height: 6,
      rx: 2,
    }),
  );
  const tick = drawing("line", { class: "tick", y1: 0, y2: 14 });
  placeTick(tick);
  svg.append(tick);
  return svg;
}

function placeTick(tick) {
  for (const end of ["x1", "x2"]) tick.setAttribute(end, windowX(page.power));
}

function toggle(at, folded) {
  if (!hasInside(at) || tree.wanted) return;
  if (folded) tree.folded.add(at);
  else tree.folded.delete(at);
  fillTree();
  focusRow(at);
}

function focusRow(at) {
  for (const row of byId("tree").querySelectorAll("tbody tr")) {
    row.tabIndex = Number(row.dataset.at) === at ? 0 : -1;
    if (row.tabIndex === 0) row.focus();
  }
}

function clickTree(event) {
  const row = event.target.closest("tbody tr");
  if (!row || event.target.closest("a")) return;
  const at = Number(row.dataset.at);
  if (event.target.closest(".fold")) toggle(at, !tree.folded.has(at));
  else focusRow(at);
}

function steerTree(event) {
  const row = event.target.closest("tbody tr");
  if (!row || event.target.closest("a")) return;
  const at = Number(row.dataset.at);
  const beside = {
    ArrowUp: row.previousElementSibling,
    ArrowDown: row.nextElementSibling,
    Home: row.parentElement.firstChild,
    End: row.parentElement.lastChild,
  }[event.key];
  if (beside) focusRow(Number(beside.dataset.at));
  else if (event.key === "ArrowRight" && tree.folded.has(at)) toggle(at, false);
  else if (event.key === "ArrowLeft" && hasInside(at) && !tree.folded.has(at)) toggle(at, true);
  else if (event.key === "Enter" && byId("find")) {
    byId("find").value = page.names[tree.data.name[at]];
    filterSites();
    byId("find").focus();
  } else return;
  event.preventDefault();
}
