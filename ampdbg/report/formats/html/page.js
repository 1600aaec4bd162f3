// A report of ampdbg. Every text of the user's world reaches the page by textContent alone.
"use strict";

const page = {
  names: [],
  sites: null,
  levels: null,
  findings: [],
  power: 0, // the exponent of the loss scale that is tried
  chosen: -1, // the site that is looked at
  onPower: [],
  onChosen: [],
};

function byId(id) {
  return document.getElementById(id);
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function drawing(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

async function unpacked(id) {
  const packed = Uint8Array.from(atob(byId(id).textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function setPower(power) {
  page.power = power;
  for (const notify of page.onPower) notify();
}
function choose(site) {
  page.chosen = site;
  for (const notify of page.onChosen) notify();
}

// A loss scale in words; beyond those that can be tried as a power.
function scaleInWords(power) {
  const { low, words } = page.sites.scales;
  return words[power - low] ?? `2^${power}`;
}

// Whether a gradient overflows at the loss scale that is tried, or is lost in zero; a forward value overflows at any.
function state(site) {
  const { phase, overflow, ceiling, floor } = page.sites;
  if (phase[site] === "f") return overflow[site] === "-" ? "" : "over";
  if (page.power > ceiling[site]) return "over";
  return page.power < floor[site] ? "under" : "";
}

function mark(site) {
  const overflow = page.sites.overflow[site];
  const now = state(site);
  if (page.sites.phase[site] === "f" && now) return overflow === "s" ? "✗" : "↳";
  if (now) return now === "over" ? "✗" : "↓";
  return page.sites.phase[site] === "f" && page.sites.bits[site] !== null && page.sites.bits[site] < 2 ? "!" : "";
}

function bitsInWords(bits) {
  if (bits === null) return "∞";
  return bits <= -9999 ? "−∞" : bits.toFixed(bits !== 0 && Math.abs(bits) < 0.1 ? 2 : 1).replace("-", "−");
}

// The headroom that is left of a gradient at the loss scale that is tried.
function room(site) {
  const { bits, phase } = page.sites;
  return bits[site] === null || bits[site] <= -9999 || phase[site] === "f" ? bits[site] : bits[site] - page.power;
}

function moduleName(number) {
  return page.names[number] || "(root)";
}

function placeOf(site) {
  const { file, line } = page.sites;
  return file[site] < 0 ? "" : `${page.names[file[site]]}:${line[site]}`;
}

function copyFrom(button) {
  const text = button.parentElement.querySelector("code").textContent;
  const done = () => {
    button.textContent = "Copied";
    setTimeout(() => {
      button.textContent = "Copy";
    }, 1600);
  };
  const byHand = () => {
    const range = document.createRange();
    range.selectNodeContents(button.parentElement.querySelector("code"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    if (document.execCommand("copy")) done();
  };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, byHand);
  else byHand();
}

// A folded finding is unfolded by what leads to it, and all are for printing.
function unfoldTargets() {
  const unfold = () => {
    const target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
    const around = target && target.closest("details");
    if (around && !around.open) {
      around.open = true;
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", unfold);
  addEventListener("beforeprint", () => {
    for (const one of document.querySelectorAll("details.rest")) one.open = true;
  });
  unfold();
}

function followScroll() {
  const links = [...document.querySelectorAll(".top li a")];
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) continue;
        for (const link of links) {
          if (link.hash === `#${target.id}`) link.setAttribute("aria-current", "true");
          else link.removeAttribute("aria-current");
        }
      }
    },
    { rootMargin: "-20% 0px -70% 0px" },
  );
  for (const link of links) {
    const part = document.querySelector(link.hash);
    if (part) seen.observe(part);
  }
}

async function start() {
  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", () => copyFrom(button));
  }
  try {
    const data = JSON.parse(new TextDecoder().decode(await unpacked("data")));
    Object.assign(page, {
      names: data.names,
      sites: data.sites,
      findings: data.findings,
      levels: await unpacked("levels"),
    });
    document.documentElement.classList.add("ready");
    if (data.timeline) drawTimeline(data.timeline);
    if (byId("source")) showSource(data.files);
    if (byId("ranges")) {
      prepareSites();
      drawMap();
      listSites();
    }
    if (byId("modules")) showModules(data.modules);
    if (byId("ranges")) setPower(page.sites.scales.of_run);
  } catch (error) {
    byId("trouble").hidden = false;
    byId("trouble").textContent =
      `The timeline, the range map, the modules and the source cannot be drawn in this browser: ${error.message}`;
    throw error;
  } finally {
    document.documentElement.dataset.done = "true";
  }
  followScroll();
  unfoldTargets();
}

addEventListener("DOMContentLoaded", start);
