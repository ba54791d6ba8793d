"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const REFERENCES = { persistence: "6 4", climatology: "2 3" };
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];


const $ = (id) => document.getElementById(id);

function bytes(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

const decoded = new WeakMap();
function floats(row, key = "values") {
  if (!decoded.has(row)) decoded.set(row, {});
  const of = decoded.get(row);
  if (!(key in of)) of[key] = new Float32Array(bytes(row[key]).buffer);
  return of[key];
}

function number(x) {
  if (!Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    const [digits, exponent] = x.toExponential(2).split("e");
    return minus(`${Number(digits)} × ${power(exponent)}`);
  }
  return minus(size >= 1000 ? x.toFixed(0) : String(Number(x.toPrecision(3))));
}

/* The label of a tick on an axis whose ticks are `step` apart (NaN of a single one): two of them never have the same. */
function tickText(tick, step) {
  if (Number.isNaN(step)) return number(tick);
  const digits = Math.ceil(-Math.log10(step) - 1e-9), size = Math.abs(tick);
  if (size < 1e-9 * step) return "0";
  if (step >= 1e-3 && size < 1e6) return minus(tick.toFixed(Math.max(0, digits)));
  const exponent = Math.floor(Math.log10(size) + 1e-9);
  return minus(`${Number((tick / 10 ** exponent).toFixed(Math.max(0, exponent + digits)))} × ${power(exponent)}`);
}

function minus(text) {
  return text.replace("-", "−");
}

function power(exponent) {
  return "10" + [...String(Number(exponent))].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");
}

function leadText(hours) {
  return `${Number(hours.toFixed(2))} h`;
}

function fill(select, values, texts = values) {
  const before = select.value;
  select.replaceChildren(...values.map((value, i) => new Option(texts[i], value)));
  if (values.map(String).includes(before)) select.value = before;
  select.disabled = values.length < 2;
}

/* A pair of selects for rows that have `variable` and `level`; `changed(row)` at every choice. */
function chooser(rows, variable, level, changed) {
  const names = [...new Set(rows.map((row) => row.variable))];
  const chosen = () => rows.find((row) => row.variable === variable.value && String(row.level) === level.value);
  const levels = () => {
    const there = rows.filter((row) => row.variable === variable.value);
    fill(level, there.map((row) => String(row.level)), there.map((row) => row.level_text || "surface"));
  };
  fill(variable, names);
  levels();
  variable.addEventListener("change", () => { levels(); changed(chosen()); });
  level.addEventListener("change", () => changed(chosen()));
  return chosen;
}

/* A strip of the colours of a table. */
function strip(table) {
  const stops = Array.from({ length: 17 }, (_, i) => {
    const at = 3 * Math.round((254 * i) / 16);
    return `rgb(${table.slice(at, at + 3)})`;
  });
  const made = document.createElement("i");
  made.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  return made;
}

/* Colour a cell and write in black or white: one of them has a contrast of at least 4.5 with any colour (WCAG 2.1). */
function shade(cell, rgb) {
  const linear = [...rgb].map((c) => (c <= 10 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  cell.style.background = `rgb(${[...rgb]})`;
  cell.style.color = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 ? "#000" : "#fff";
}

/* Lines of at most `length` characters, broken after a space, a hyphen, an underscore or a slash where there is one. */
function folded(name, length) {
  const lines = [];
  for (let rest = name; rest; rest = rest.slice(lines.at(-1).length)) {
    const end = rest.length > length ? rest.slice(0, length).search(/[\s_/-][^\s_/-]*$/) + 1 : length;
    lines.push(rest.slice(0, end || length));
  }
  return lines;
}

function tableRow(name, cells) {
  const row = document.createElement("tr"), first = document.createElement("th");
  first.scope = "row";
  first.textContent = name;
  row.append(first, ...cells.map(([content, tag]) => {
    if (content instanceof Node) return content;
    const made = document.createElement(tag);
    made.textContent = content;
    if (tag === "th") made.scope = "col";
    return made;
  }));
  return row;
}

// ---- curves --------------------------------------------------------------------------------------------------------

function ticks(low, high, log, hours) {
  if (log) {
    const exponents = [];
    for (let e = Math.ceil(low); e <= Math.floor(high); e++) exponents.push(e);
    const every = Math.ceil(exponents.length / 7) || 1;
    return exponents.filter((_, i) => i % every === 0);
  }
  const rough = (high - low) / 5, scale = 10 ** Math.floor(Math.log10(rough));
  const days = hours && [1, 3, 6, 12, 24, 48, 72, 120, 240].find((size) => size >= (high - low) / 8);
  const step = days || [1, 2, 5, 10].map((k) => k * scale).find((size) => size >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
  return found;
}

const BOX = { left: 70, right: 610, top: 14, bottom: 310 };

/* Exponents of 1, 2, 5, 10, 20, … between two exponents, for an axis of few decades along which numbers have room. */
function fineTicks(low, high) {
  const found = [];
  for (let e = Math.floor(low); e <= high; e++) found.push(...[1, 2, 5].map((k) => e + Math.log10(k)));
  return found.filter((tick) => tick >= low - 1e-9 && tick <= high + 1e-9);
}

/* Draw the axes of a diagram and return its scales; `log`: the limits are exponents, `whole`: only whole ticks along x. */
function axes(svg, { west, east, south, north, x, y, log, whole }) {
  const on = (v) => (log ? Math.log10(v) : v), back = (v) => (log ? 10 ** v : v);
  const X = (v) => BOX.left + ((on(v) - west) / (east - west)) * (BOX.right - BOX.left);
  const Y = (v) => BOX.bottom - Math.max(-0.02, (on(v) - south) / (north - south)) * (BOX.bottom - BOX.top);
  svg.replaceChildren();
  const up = ticks(south, north, log);
  for (const tick of up) {
    const at = Y(back(tick));
    element(svg, "line", { x1: BOX.left, x2: BOX.right, y1: at, y2: at, class: "axis" });
    text(svg, BOX.left - 6, at + 4, log ? power(tick) : tickText(tick, up[1] - up[0]), "end");
  }
  const along = log && east - west <= 3 ? fineTicks(west, east) : ticks(west, east, log, x.endsWith("(h)"));
  for (const tick of along) {
    if (whole && !Number.isInteger(tick)) continue;
    const at = X(back(tick));
    element(svg, "line", { x1: at, x2: at, y1: BOX.top, y2: BOX.bottom, class: "axis" });
    text(svg, at, BOX.bottom + 16, log ? number(back(tick)) : tickText(tick, along[1] - along[0]), "middle");
  }
  text(svg, (BOX.left + BOX.right) / 2, BOX.bottom + 38, x, "middle");
  const label = text(svg, 0, 0, y, "middle");
  label.setAttribute("transform", `translate(16 ${(BOX.top + BOX.bottom) / 2}) rotate(-90)`);
  return { X, Y };
}

/* Curves of `series` (name, x, y; perhaps low, high, colour, dash, thin); `options.level` is a line to compare them with. */
function plot(svg, series, options) {
  const on = (v) => (options.log ? Math.log10(v) : v);
  const every = (key) => series.flatMap((one) => one[key] || []).map(on).filter(Number.isFinite);
  const xs = every("x"), ys = [...every("y"), ...(options.log ? [] : [...every("low"), ...every("high")])];
  svg.setAttribute("aria-label", options.label);
  if (!ys.length) { svg.replaceChildren(); return void text(svg, 340, 160, "no data", "middle"); }
  if (options.level !== undefined) ys.push(options.level);
  let [west, east] = [Math.min(...xs), Math.max(...xs)], [south, north] = [Math.min(...ys), Math.max(...ys)];
  if (options.zero) south = Math.min(0, south);
  if (options.log) south = Math.max(south, north - 10);  // ten decades: what lies below is rounding
  if (west === east) { west -= 0.5; east += 0.5; }
  const room = (north - south || Math.abs(north) || 1) * 0.06;
  north += room;
  if (!(options.zero && south === 0)) south -= room;
  const { X, Y } = axes(svg, { west, east, south, north, x: options.x, y: options.y, log: options.log });
  if (options.level !== undefined) {
    element(svg, "line", { x1: BOX.left, x2: BOX.right, y1: Y(options.level), y2: Y(options.level), class: "reference" });
  }
  let coloured = 0, below = BOX.top + 14;
  for (const one of series) {
    const dash = one.dash ?? REFERENCES[one.name];
    const colour = one.colour ?? (dash ? "#808080" : COLOURS[coloured++ % COLOURS.length]);
    const stroke = { ...(colour ? { stroke: colour } : { class: "truth" }), ...(dash ? { "stroke-dasharray": dash } : {}) };
    if (one.low && one.low.some(Number.isFinite)) {
      const there = one.x.map((_, k) => k).filter((k) => Number.isFinite(one.low[k]) && Number.isFinite(one.high[k]));
      const edge = [...there.map((k) => [one.x[k], one.high[k]]), ...there.reverse().map((k) => [one.x[k], one.low[k]])];
      element(svg, "polygon", { points: edge.map(([x, y]) => `${X(x)},${Y(y)}`).join(" "), fill: colour, opacity: 0.18 });
    }
    let d = "", pen = false;
    one.x.forEach((x, k) => {
      const there = Number.isFinite(one.y[k]);
      if (there) d += `${pen ? "L" : "M"}${X(x).toFixed(1)} ${Y(one.y[k]).toFixed(1)}`;
      pen = there;
      if (there && one.x.length < 25 && !one.thin && colour) {
        const dot = element(svg, "circle", { cx: X(x), cy: Y(one.y[k]), r: 3, fill: colour });
        element(dot, "title", {}).textContent = `${one.name}: ${number(one.y[k])} at ${number(x)}`;
      }
    });
    element(svg, "path", { d, fill: "none", "stroke-width": one.thin ? 1 : 2, ...stroke });
    if (!one.name) continue;
    element(svg, "line", { x1: 622, x2: 648, y1: below, y2: below, "stroke-width": 2, ...stroke });
    for (const line of folded(one.name, 13)) {
      text(svg, 654, below + 4, line);
      below += 14;
    }
    below += 6;
  }
}

function element(parent, tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

function text(parent, x, y, content, anchor = "start") {
  const made = element(parent, "text", { x, y, "text-anchor": anchor });
  made.textContent = content;
  return made;
}
