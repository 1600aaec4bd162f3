// The code line by line, coloured by the headroom of what runs there, with the findings at their lines.
"use strict";

const code = { files: [], open: -1 };

function showSource(files) {
  code.files = files.map(marked).sort((one, other) => one.rank - other.rank);
  code.files.forEach((file, at) => {
    const bits = file.worst === null ? "" : `${bitsInWords(file.worst)}`;
    const tone = toneOf(file.worst);
    const button = element(
      "button",
      {
        type: "button",
        role: "tab",
        id: `file-${at}`,
        "aria-selected": "false",
        tabindex: -1,
        "aria-controls": "code",
      },
      element("bdi", {}, ...breakable(page.names[file.file])),
      element("span", { class: tone === "over" ? "tone-bad" : "tone-faint" }, bits),
    );
    button.addEventListener("click", () => openFile(at));
    byId("files").append(button);
  });
  byId("files").addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    openFile((code.open + move + code.files.length) % code.files.length);
    byId(`file-${code.open}`).focus();
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-line]");
    if (link && openLine(link.dataset.file, Number(link.dataset.line))) event.preventDefault();
  });
  openFile(0);
  showWorst();
}

// The first line with a finding, else the one with the least headroom, is in sight when the page opens.
function showWorst() {
  const lines = [...code.files[0].lines];
  const room = ([, line]) => (line.findings.length ? -1e6 : (line.bits ?? 1e6));
  if (!lines.length) return;
  const [number] = lines.reduce((one, other) => (room(other) < room(one) ? other : one));
  const row = byId("code").querySelector(`.row[data-line="${number}"]`);
  if (row) scrollCodeTo(row);
}

function scrollCodeTo(row) {
  byId("code").scrollTop = row.offsetTop - byId("code").offsetTop - byId("code").clientHeight / 3;
}

// A path may be broken behind its slashes.
function breakable(path) {
  return path.split(/(?<=\/)/).flatMap((part) => [part, element("wbr")]);
}

// What is known of each line: the least headroom, the sites, the findings.
function marked(file) {
  const lines = new Map();
  const at = (number) => {
    if (!lines.has(number)) lines.set(number, { bits: null, sites: [], seen: [], findings: [] });
    return lines.get(number);
  };
  const lower = (line, bits) => {
    if (bits !== null && (line.bits === null || bits < line.bits)) line.bits = bits;
  };
  const sites = page.sites;
  for (let site = 0; site < sites.line.length; site++) {
    if (sites.file[site] !== file.file) continue;
    at(sites.line[site]).sites.push(site);
    lower(at(sites.line[site]), sites.bits[site]);
  }
  for (const [number, bits, words] of file.seen) {
    at(number).seen.push(words);
    lower(at(number), bits);
  }
  page.findings.forEach((finding, index) => {
    if (finding.file === file.file) at(finding.line).findings.push(index);
  });
  let worst = null,
    hits = 0;
  for (const line of lines.values()) {
    hits += line.findings.length;
    if (line.bits !== null && (worst === null || line.bits < worst)) worst = line.bits;
  }
  return { ...file, lines, worst, rank: (hits ? -1e6 : 0) + (worst === null ? 1e5 : worst) };
}

function toneOf(bits) {
  if (bits === null) return "";
  return bits < 0 ? "over" : bits < 2 ? "near" : bits < 6 ? "some" : "fine";
}

function openFile(at) {
  if (code.open !== at) {
    code.open = at;
    const file = code.files[at],
      rows = [];
    let next = 1;
    for (const [first, texts] of file.pieces) {
      if (first > next) rows.push(element("div", { class: "gap" }, `${counted(first - next, "line")} not shown`));
      texts.forEach((text, index) => rows.push(...lineRows(file, first + index, text)));
      next = first + texts.length;
    }
    byId("code").replaceChildren(...rows);
    byId("code").scrollTop = 0;
    byId("code").setAttribute("aria-labelledby", `file-${at}`);
  }
  for (const [index, button] of [...byId("files").children].entries()) {
    button.setAttribute("aria-selected", String(index === at));
    button.tabIndex = index === at ? 0 : -1;
  }
}

function lineRows(file, number, text) {
  const line = file.lines.get(number);
  const tone = line ? toneOf(line.bits) : "";
  const row = element(
    "div",
    { class: `row ${tone}`, "data-line": number },
    element("span", { class: "n" }, String(number)),
    element("span", { class: "room" }, line && line.bits !== null ? bitsInWords(line.bits) : ""),
    element("span", { class: "text" }, text || " "),
  );
  if (!line) return [row];
  const said = line.sites.length
    ? [
        `${counted(line.sites.length, "site")}: ${[...new Set(line.sites.map((site) => page.names[page.sites.op[site]]))].slice(0, 8).join(", ")}`,
      ]
    : [];
  row.title = [...said, ...line.seen].join("\n");
  const notes = line.findings.map((at) => {
    const { code: name, severity, step, module, message } = page.findings[at];
    const where = module && !message.includes(module) ? ` in ${module}` : "";
    return element(
      "div",
      { class: `said ${severity}` },
      element("a", { href: `#finding-${at}` }, name),
      `${where} at step ${step}: ${message}`,
    );
  });
  return [row, ...notes];
}

// Shows a line; false where the file is not in the page.
function openLine(name, number) {
  const at = code.files.findIndex((file) => page.names[file.file] === name);
  if (at < 0) return false;
  openFile(at);
  for (const other of byId("code").querySelectorAll(".here")) other.classList.remove("here");
  const row = byId("code").querySelector(`.row[data-line="${number}"]`);
  byId("source").scrollIntoView({ block: "start" });
  if (row) {
    row.classList.add("here");
    scrollCodeTo(row);
  }
  byId("code").focus({ preventScroll: true });
  history.replaceState(null, "", "#source");
  return true;
}
