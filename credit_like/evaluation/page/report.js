"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const SCORES = DATA.scores, MAPS = DATA.maps, SPECTRA = DATA.spectra;
const MISSING = 255;
const LOWER_IS_BETTER = ["rmse", "mse", "mae", "crps", "fair-crps", "seeps"];
const REFERENCES = { persistence: "6 4", climatology: "2 3" };
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

const $ = (id) => document.getElementById(id);

function bytes(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

const decoded = new WeakMap();
function floats(row) {
  if (!decoded.has(row)) decoded.set(row, new Float32Array(bytes(row.values).buffer));
  return decoded.get(row);
}

function number(x) {
  if (!Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(1);
  return size >= 1000 ? x.toFixed(0) : String(Number(x.toPrecision(3)));
}

function leadText(hours) {
  return `${number(hours)} h`;
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

// ---- maps ----------------------------------------------------------------------------------------------------------

function startMaps() {
  const height = MAPS.latitude.length, width = MAPS.longitude.length, leads = MAPS.leads.length;
  const kinds = ["truth", "forecast", "error"];
  const colours = { truth: bytes(MAPS.colours.field), forecast: bytes(MAPS.colours.field), error: bytes(MAPS.colours.error) };
  const slider = $("map-lead"), play = $("map-play"), panels = $("map-panels");
  const scale = Math.max(1, Math.round(720 / width));
  const small = new OffscreenCanvas(width, height);
  const coast = coastPaths(width * scale, height * scale, scale);
  const cache = new Map();
  let timer = null, probe = { row: height >> 1, column: width >> 1 }, probed = false;
  slider.max = leads - 1;
  const entry = chooser(MAPS.entries, $("map-variable"), $("map-level"), () => { describe(); draw(); });

  function fields(one) {
    if (!cache.has(one)) {
      cache.clear();  // one variable at a time stays decoded
      cache.set(one, Object.fromEntries(kinds.map((kind) => [kind, bytes(one[kind])])));
    }
    return cache.get(one);
  }

  function describe() {
    const one = entry();
    for (const kind of kinds) {
      const [low, high] = kind === "error" ? one.error_range : one.range;
      const table = colours[kind];
      const stops = Array.from({ length: 17 }, (_, i) => {
        const at = 3 * Math.round((254 * i) / 16);
        return `rgb(${table.slice(at, at + 3)})`;
      });
      const strip = document.createElement("i");
      strip.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
      $(`bar-${kind}`).replaceChildren(number(low), strip, `${number(high)} ${one.unit}`);
    }
  }

  function draw() {
    const one = entry(), lead = Number(slider.value), all = fields(one);
    const from = lead * height * width;
    for (const kind of kinds) {
      const canvas = $(`map-${kind}`), values = all[kind], table = colours[kind];
      const image = new ImageData(width, height);
      for (let i = 0; i < height * width; i++) {
        const value = values[from + i];
        for (let c = 0; c < 3; c++) image.data[4 * i + c] = value === MISSING ? 190 : table[3 * value + c];
        image.data[4 * i + 3] = 255;
      }
      small.getContext("2d").putImageData(image, 0, 0);
      if (canvas.width !== width * scale) { canvas.width = width * scale; canvas.height = height * scale; }
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = false;
      const north = MAPS.latitude[0] > MAPS.latitude[height - 1];
      context.setTransform(1, 0, 0, north ? 1 : -1, 0, north ? 0 : canvas.height);
      context.drawImage(small, 0, 0, canvas.width, canvas.height);
      context.lineWidth = 1;
      context.strokeStyle = kind === "error" ? "#333" : "#fff";
      context.stroke(coast);
      if (probed) cross(context);
      context.setTransform(1, 0, 0, 1, 0, 0);
      canvas.setAttribute("aria-label", `${kind} of ${one.variable} at ${leadText(MAPS.leads[lead])}`);
    }
    const text = `${leadText(MAPS.leads[lead])} · ${MAPS.valid[lead].slice(0, 16).replace("T", " ")}`;
    $("map-lead-text").textContent = text;
    slider.setAttribute("aria-valuetext", text);
    if (probed) tell(one, all, from);
  }

  function cross(context) {
    const x = (probe.column + 0.5) * scale, y = (probe.row + 0.5) * scale;
    for (const [line, colour] of [[3, "#000"], [1, "#fff"]]) {
      context.lineWidth = line;
      context.strokeStyle = colour;
      context.strokeRect(x - 6, y - 6, 12, 12);
    }
  }

  function tell(one, all, from) {
    const at = from + probe.row * width + probe.column;
    const said = kinds.map((kind) => {
      const [low, high] = kind === "error" ? one.error_range : one.range, value = all[kind][at];
      return `${kind} ${value === MISSING ? "no data" : number(low + (high - low) * value / 254)}`;
    });
    const latitude = MAPS.latitude[probe.row], longitude = ((MAPS.longitude[probe.column] + 540) % 360) - 180;
    const side = (x, [up, down]) => `${number(Math.abs(x))}° ${x < 0 ? down : up}`;
    const place = `${side(latitude, "NS")}, ${side(longitude, "EW")}`;
    $("map-probe").textContent = `${place}: ${said.join(", ")} ${one.unit}`;
  }

  function step(by) {
    slider.value = (Number(slider.value) + by + leads) % leads;
    draw();
  }

  function toggle() {
    if (timer === null) timer = setInterval(() => step(1), Math.max(120, 4000 / leads));
    else { clearInterval(timer); timer = null; }
    play.textContent = timer === null ? "▶ Play" : "❚❚ Stop";
    play.setAttribute("aria-pressed", String(timer !== null));
  }

  function moveTo(row, column) {
    probe = { row: Math.min(height - 1, Math.max(0, row)), column: (column + width) % width };
    probed = true;
    draw();
  }

  slider.addEventListener("input", draw);
  play.addEventListener("click", toggle);
  for (const kind of kinds) {
    $(`map-${kind}`).addEventListener("pointermove", (event) => {
      const box = event.target.getBoundingClientRect();
      let row = Math.floor(((event.clientY - box.top) / box.height) * height);
      if (MAPS.latitude[0] < MAPS.latitude[height - 1]) row = height - 1 - row;
      moveTo(row, Math.floor(((event.clientX - box.left) / box.width) * width));
    });
  }
  panels.addEventListener("keydown", (event) => {
    const southward = MAPS.latitude[0] > MAPS.latitude[height - 1] ? 1 : -1;
    const by = { ArrowUp: [-southward, 0], ArrowDown: [southward, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    const far = event.shiftKey ? 10 : 1;
    moveTo(probe.row + by[0] * far, probe.column + by[1] * far);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === " " && !["BUTTON", "SELECT", "INPUT"].includes(event.target.tagName)) { event.preventDefault(); toggle(); }
    if (event.target.tagName === "SELECT") return;
    if (event.key === ".") step(1);
    if (event.key === ",") step(-1);
  });

  const notes = [`From ${MAPS.init.slice(0, 16).replace("T", " ")}.`];
  if (MAPS.members > 1) notes.push(`The forecast is the mean of ${MAPS.members} members.`);
  if (MAPS.stride > 1) notes.push(`Every ${MAPS.stride}th point is shown.`);
  if (MAPS.left_out.leads) notes.push(`${MAPS.left_out.leads} leads are omitted.`);
  if (MAPS.left_out.levels) notes.push(`${MAPS.left_out.levels} levels are omitted.`);
  notes.push(MAPS.coast ? "Coastlines: land-sea mask of the data." : "Coastlines: Natural Earth.");
  $("map-note").textContent = notes.join(" ");
  describe();
  draw();
}

/* Coastlines as one path on a canvas whose rows and columns are the grid's. */
function coastPaths(across, down, scale) {
  const latitude = MAPS.latitude, longitude = MAPS.longitude, height = latitude.length, width = longitude.length;
  const lines = MAPS.coast || NATURAL_EARTH.map((line) => line.map((x) => x / 10));
  const east = (longitude[width - 1] - longitude[0]) / Math.max(1, width - 1);
  const row = (value) => {  // rows may lie unevenly, and go either way
    const down = latitude[0] > latitude[height - 1];
    let low = 0, high = height - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (down ? latitude[middle] >= value : latitude[middle] <= value) low = middle; else high = middle;
    }
    return low + (value - latitude[low]) / (latitude[high] - latitude[low] || 1);
  };
  const path = new Path2D();
  for (const line of lines) {
    let pen = false, before = 0;
    for (let i = 0; i < line.length; i += 2) {
      const column = ((((line[i] - longitude[0]) / east + 0.5) * Math.sign(east) % (360 / Math.abs(east))) + 360 / Math.abs(east)) % (360 / Math.abs(east));
      const x = column * scale, y = (row(line[i + 1]) + 0.5) * scale;
      const inside = x <= across && y >= -scale && y <= down + scale;
      if (!inside || Math.abs(x - before) > across / 2) pen = false;
      if (inside) { if (pen) path.lineTo(x, y); else path.moveTo(x, y); pen = true; }
      before = x;
    }
  }
  return path;
}

// ---- scores --------------------------------------------------------------------------------------------------------

function score(row, source, metric, region, lead) {
  const m = SCORES.metrics.indexOf(metric);
  if (m < 0) return NaN;
  const s = SCORES.sources.indexOf(source), r = SCORES.regions.indexOf(region);
  return floats(row)[((s * SCORES.metrics.length + m) * SCORES.regions.length + r) * SCORES.leads.length + lead];
}

function plainMetrics() {
  return SCORES.metrics.filter((name) => !/_(low|high)$/.test(name));
}

/* Positions of leads at regular intervals: the shortest common interval that gives at most `most` of them. */
function someLeads(most) {
  for (const every of [1, 3, 6, 12, 24, 48, 72, 120, 240]) {
    const found = SCORES.leads.map((_, i) => i).filter((i) => SCORES.leads[i] % every === 0);
    if (found.length > 1 && found.length <= most) return found;
  }
  const n = SCORES.leads.length, count = Math.min(n, most);
  return [...new Set(Array.from({ length: count }, (_, i) => Math.round((i * (n - 1)) / Math.max(1, count - 1))))];
}

function startCard() {
  const metric = $("card-metric"), source = $("card-source"), baseline = $("card-baseline"), region = $("card-region");
  fill(metric, plainMetrics().filter((name) => name === "acc" || LOWER_IS_BETTER.includes(name)));
  fill(source, SCORES.sources);
  fill(baseline, SCORES.sources);
  fill(region, SCORES.regions);
  baseline.value = SCORES.sources[1] || SCORES.sources[0];
  const leads = someLeads(12);

  function draw() {
    const head = document.createElement("thead"), body = document.createElement("tbody");
    head.append(tableRow("variable", leads.map((lead) => [leadText(SCORES.leads[lead]), "th"])));
    for (const row of SCORES.channels) body.append(tableRow(row.title, leads.map((lead) => [cell(row, lead), "td"])));
    $("card-table").replaceChildren(head, body);
    const kind = metric.value === "acc" ? "difference of the correlation, × 100" : "difference in percent";
    const sure = SCORES.metrics.includes(`${metric.value}_low`) ? " Bold: the 95 % intervals do not overlap." : "";
    $("card-note").textContent =
      `${metric.value.toUpperCase()} of ${source.value} against ${baseline.value}: ${kind}; blue is better, red is worse.${sure}`;
  }

  function cell(row, lead) {
    const at = (name, suffix = "") => score(row, name, metric.value + suffix, region.value, lead);
    const ours = at(source.value), theirs = at(baseline.value);
    const gain = metric.value === "acc" ? 100 * (ours - theirs) : 100 * (1 - ours / theirs);
    const td = document.createElement("td");
    if (!Number.isFinite(gain)) { td.textContent = "–"; return td; }
    const shown = metric.value === "acc" ? gain : -gain;
    td.textContent = `${shown > 0 ? "+" : shown < 0 ? "−" : ""}${Math.abs(shown).toFixed(Math.abs(shown) < 10 ? 1 : 0)}`;
    td.title = `${number(ours)} against ${number(theirs)}`;
    const strength = Math.tanh(Math.abs(gain) / 40) * 0.8;  // a scale that tells 40 % from 80 %
    td.style.background = gain > 0 ? `rgba(33, 102, 172, ${strength})` : `rgba(178, 24, 43, ${strength})`;
    if (strength > 0.45) td.style.color = "#fff";
    const apart = at(source.value, "_high") < at(baseline.value, "_low") || at(source.value, "_low") > at(baseline.value, "_high");
    if (apart) td.className = "sure";
    return td;
  }

  for (const select of [metric, source, baseline, region]) select.addEventListener("change", draw);
  draw();
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

function startCurves() {
  const metric = $("curve-metric"), region = $("curve-region");
  fill(metric, plainMetrics());
  fill(region, SCORES.regions);
  const row = chooser(SCORES.channels, $("curve-variable"), $("curve-level"), draw);
  function draw() {
    const one = row(), series = [];
    const at = (source, suffix) => SCORES.leads.map((_, lead) => score(one, source, metric.value + suffix, region.value, lead));
    for (const source of SCORES.sources) {
      const y = at(source, "");
      if (!y.some(Number.isFinite)) continue;
      series.push({ name: source, x: SCORES.leads, y, low: at(source, "_low"), high: at(source, "_high") });
    }
    const same = ["rmse", "mae", "bias", "activity", "crps", "fair-crps", "spread"].includes(metric.value) && one.unit;
    plot($("curve-plot"), series, {
      x: "lead time (h)", y: metric.value + (same ? ` (${one.unit})` : ""), label: `${metric.value} of ${one.title}`,
      zero: LOWER_IS_BETTER.includes(metric.value) || ["spread", "activity"].includes(metric.value),
    });
    const shaded = SCORES.metrics.includes(`${metric.value}_low`) ? " Shaded: 95 % from bootstrapping the initial times." : "";
    $("curve-note").textContent = `Mean over ${DATA.initial_times} initial times.${shaded}`;
  }
  metric.addEventListener("change", draw);
  region.addEventListener("change", draw);
  draw();
}

function startSpectra() {
  if (!SPECTRA.channels.length) {
    $("spectra").querySelector(".controls").remove();
    $("spectrum-plot").remove();
    $("spectrum-note").textContent = "Not computed: add spectrum to evaluation.metrics.";
    return;
  }
  const lead = $("spectrum-lead");
  fill(lead, SPECTRA.leads.map((_, i) => i), SPECTRA.leads.map(leadText));
  const rows = SPECTRA.channels.map((one) => ({ ...SCORES.channels.find((row) => row.name === one.name), ...one }));
  const row = chooser(rows, $("spectrum-variable"), $("spectrum-level"), draw);
  function draw() {
    const one = row(), n = one.wavenumbers, values = floats(one), series = [];
    SCORES.sources.forEach((source, s) => {
      const from = (s * SPECTRA.leads.length + Number(lead.value)) * n;
      const y = Array.from(values.slice(from + 1, from + n), (v) => (v > 0 ? v : NaN));
      if (y.some(Number.isFinite)) series.push({ name: source, x: y.map((_, k) => k + 1), y });
    });
    plot($("spectrum-plot"), series, { x: "zonal wavenumber", y: "energy", label: `spectrum of ${one.title}`, log: true });
  }
  lead.addEventListener("change", draw);
  $("spectrum-note").textContent =
    "Mean over the globe and the initial times. Persistence is the truth at the initial time and serves as the reference spectrum.";
  draw();
}

// ---- curves --------------------------------------------------------------------------------------------------------

function ticks(low, high, log) {
  if (log) {
    const exponents = [];
    for (let e = Math.ceil(low); e <= Math.floor(high); e++) exponents.push(e);
    const every = Math.ceil(exponents.length / 7) || 1;
    return exponents.filter((_, i) => i % every === 0);
  }
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((size) => size >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
  return found;
}

function plot(svg, series, options) {
  const box = { left: 70, right: 610, top: 14, bottom: 310 };
  const on = (v) => (options.log ? Math.log10(v) : v);
  const every = (key) => series.flatMap((one) => one[key] || []).map(on).filter(Number.isFinite);
  const xs = every("x"), ys = [...every("y"), ...(options.log ? [] : [...every("low"), ...every("high")])];
  svg.replaceChildren();
  svg.setAttribute("aria-label", options.label);
  if (!ys.length) return void text(svg, 340, 160, "no data", "middle");
  let [west, east] = [Math.min(...xs), Math.max(...xs)], [south, north] = [Math.min(...ys), Math.max(...ys)];
  if (options.zero) south = Math.min(0, south);
  if (options.log) south = Math.max(south, north - 10);  // ten decades: what lies below is rounding
  if (west === east) { west -= 0.5; east += 0.5; }
  const room = (north - south || Math.abs(north) || 1) * 0.06;
  north += room;
  if (!(options.zero && south === 0)) south -= room;
  const X = (v) => box.left + ((on(v) - west) / (east - west)) * (box.right - box.left);
  const Y = (v) => box.bottom - Math.max(-0.02, (on(v) - south) / (north - south)) * (box.bottom - box.top);
  const back = (v) => (options.log ? 10 ** v : v);
  for (const tick of ticks(south, north, options.log)) {
    const y = Y(back(tick));
    element(svg, "line", { x1: box.left, x2: box.right, y1: y, y2: y, class: "axis" });
    text(svg, box.left - 6, y + 4, options.log ? `1e${tick}` : number(tick), "end");
  }
  for (const tick of ticks(west, east, options.log)) {
    const x = X(back(tick));
    element(svg, "line", { x1: x, x2: x, y1: box.top, y2: box.bottom, class: "axis" });
    text(svg, x, box.bottom + 16, number(back(tick)), "middle");
  }
  text(svg, (box.left + box.right) / 2, box.bottom + 38, options.x, "middle");
  const label = text(svg, 0, 0, options.y, "middle");
  label.setAttribute("transform", `translate(16 ${(box.top + box.bottom) / 2}) rotate(-90)`);
  let coloured = 0;
  series.forEach((one, i) => {
    const dash = REFERENCES[one.name], colour = dash ? "#808080" : COLOURS[coloured++ % COLOURS.length];
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
      if (there && one.x.length < 25) {
        const dot = element(svg, "circle", { cx: X(x), cy: Y(one.y[k]), r: 3, fill: colour });
        element(dot, "title", {}).textContent = `${one.name}: ${number(one.y[k])} at ${number(x)}`;
      }
    });
    element(svg, "path", { d, fill: "none", stroke: colour, "stroke-width": 2, ...(dash ? { "stroke-dasharray": dash } : {}) });
    const y = box.top + 14 + 20 * i;
    element(svg, "line", { x1: 622, x2: 648, y1: y, y2: y, stroke: colour, "stroke-width": 2, ...(dash ? { "stroke-dasharray": dash } : {}) });
    text(svg, 654, y + 4, one.name);
  });
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

// ---- the page ------------------------------------------------------------------------------------------------------

$("summary").textContent = `${DATA.initial_times} initial times, ${SCORES.channels.length} channels, ${SCORES.sources.join(", ")}; ${DATA.made}.`;
SCORES.sources.forEach((source, i) => {
  const term = document.createElement("dt"), what = document.createElement("dd");
  term.textContent = source;
  what.textContent = SCORES.provenance[i];
  $("provenance").append(term, what);
});
startMaps();
startCard();
startCurves();
startSpectra();
document.documentElement.dataset.ready = "true";
