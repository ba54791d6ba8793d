"use strict";
const SCORES = DATA.scores, MAPS = DATA.maps, SPECTRA = DATA.spectra, ENSEMBLE = DATA.ensemble;
const MISSING = 255;
const WHOLE = SCORES.whole === "global" ? "globe" : SCORES.whole;  // SCORES.whole: the region that is all of the grid
const LOWER_IS_BETTER = ["rmse", "mse", "mae", "crps", "fair-crps", "seeps"];
// ---- maps ----------------------------------------------------------------------------------------------------------

function startMaps() {
  const height = MAPS.latitude.length, width = MAPS.longitude.length, leads = MAPS.leads.length;
  const many = MAPS.members > 1, kinds = ["truth", "forecast", "error", ...(many ? ["spread"] : [])];
  const tables = Object.fromEntries(Object.entries(MAPS.colours).map(([name, text]) => [name, bytes(text)]));
  const tableOf = (one, kind) => tables[{ error: "RdBu_r", spread: "magma" }[kind] || one.colours];
  const rangeOf = (one, kind, lead) => (kind === "error" ? one.error_ranges[lead] : one[`${kind}_range`] || one.range);
  const slider = $("map-lead"), play = $("map-play"), panels = $("map-panels"), errors = $("map-errors");
  const scale = Math.max(1, Math.round(720 / width));
  const small = new OffscreenCanvas(width, height);
  const coast = coastPaths(width * scale, height * scale, scale);
  const cache = new Map();
  const members = many ? startMembers((one) => tableOf(one, "truth")) : null;
  let timer = null, probe = { row: height >> 1, column: width >> 1 }, probed = false;
  slider.max = leads - 1;
  if (!many) { $("spread-figure").remove(); $("members").remove(); }
  const entry = chooser(MAPS.entries, $("map-variable"), $("map-level"), draw);
  for (const kind of kinds) addDegrees($(`map-${kind}`));

  function fields(one) {
    if (!cache.has(one)) {
      cache.clear();  // one variable at a time stays decoded
      const wanted = many ? [...kinds, "members"] : kinds;
      cache.set(one, Object.fromEntries(wanted.map((kind) => [kind, bytes(one[kind])])));
    }
    return cache.get(one);
  }

  /* The range of the colours: of errors that of the lead, or the largest of all leads. */
  function shownRange(one, kind, lead) {
    if (kind !== "error" || errors.value === "lead") return rangeOf(one, kind, lead);
    return one.error_ranges.reduce((most, range) => (range[1] > most[1] ? range : most));
  }

  /* The colours of the 255 bytes of a field. */
  function shades(one, kind, lead) {
    const table = tableOf(one, kind), ratio = rangeOf(one, kind, lead)[1] / shownRange(one, kind, lead)[1];
    if (kind !== "error" || ratio === 1) return table;
    const found = new Uint8Array(table.length);
    for (let i = 0; i < 255; i++) found.set(table.slice(3 * Math.round(127 + (i - 127) * ratio), 3 * Math.round(127 + (i - 127) * ratio) + 3), 3 * i);
    return found;
  }

  function describe(one, lead) {
    for (const kind of kinds) {
      const [low, high] = shownRange(one, kind, lead);
      $(`bar-${kind}`).replaceChildren(number(low), strip(tableOf(one, kind)), `${number(high)} ${one.unit}`);
    }
  }

  function draw() {
    const one = entry(), lead = Number(slider.value), all = fields(one);
    const from = lead * height * width;
    describe(one, lead);
    for (const kind of kinds) {
      const canvas = $(`map-${kind}`);
      small.getContext("2d").putImageData(imageOf(all[kind], from, width, height, shades(one, kind, lead)), 0, 0);
      if (canvas.width !== width * scale) { canvas.width = width * scale; canvas.height = height * scale; }
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = false;
      const north = MAPS.latitude[0] > MAPS.latitude[height - 1];
      context.setTransform(1, 0, 0, north ? 1 : -1, 0, north ? 0 : canvas.height);
      context.drawImage(small, 0, 0, canvas.width, canvas.height);
      context.lineWidth = 1;
      context.strokeStyle = ["viridis", "magma"].includes(kind === "spread" ? "magma" : kind === "error" ? "" : one.colours) ? "#fff" : "#333";
      context.stroke(coast);
      if (probed) cross(context);
      context.setTransform(1, 0, 0, 1, 0, 0);
      canvas.setAttribute("aria-label", `${kind} of ${one.variable} at ${leadText(MAPS.leads[lead])}`);
    }
    const text = `${leadText(MAPS.leads[lead])} · ${MAPS.valid[lead].slice(0, 16).replace("T", " ")} UTC`;
    $("map-lead-text").textContent = text;
    slider.setAttribute("aria-valuetext", text);
    if (many) members.draw(one, all, lead, probe);
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
      const [low, high] = rangeOf(one, kind, from / height / width), value = all[kind][at];
      return `${kind} ${value === MISSING ? "no data" : number(low + (high - low) * value / 254)}`;
    });
    const place = placeText(MAPS.latitude[probe.row], MAPS.longitude[probe.column]);
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
  errors.addEventListener("change", draw);
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

  const notes = [`From ${MAPS.init.slice(0, 16).replace("T", " ")} UTC.`];
  if (MAPS.members > 1) notes.push(`The forecast is the mean of ${MAPS.members} members.`);
  if (MAPS.stride > 1) notes.push(`One of ${MAPS.stride} points is shown in each direction.`);
  if (MAPS.left_out.leads) notes.push(`${MAPS.left_out.leads} leads are omitted.`);
  if (MAPS.left_out.levels) notes.push(`${MAPS.left_out.levels} levels are omitted.`);
  notes.push(MAPS.coast ? "Coastlines: land-sea mask of the data." : "Coastlines: Natural Earth.");
  $("map-note").textContent = notes.join(" ");
  draw();
}

/* Latitudes at the left and longitudes at the lower edge of a map. */
function addDegrees(canvas) {
  const frame = document.createElement("div");
  frame.className = "frame";
  canvas.replaceWith(frame);
  frame.append(canvas);
  const add = (values, side, text) => {
    const n = values.length, span = Math.abs(values[n - 1] - values[0]), step = [1, 2, 5, 10, 30, 60].find((s) => span / s <= 7) || 90;
    for (let degrees = -720; degrees <= 720; degrees += step) {
      for (let i = 0; i + 1 < n; i++) {
        const [a, b] = [values[i], values[i + 1]];
        if ((a - degrees) * (b - degrees) > 0 || b === degrees) continue;
        const at = (i + 0.5 + (degrees - a) / (b - a)) / n, tick = document.createElement("span");
        tick.textContent = text(degrees);
        tick.style[side] = `${100 * at}%`;
        tick.className = side;
        frame.append(tick);
      }
    }
  };
  const sided = (x, [up, down]) => (x === 0 ? "0°" : `${Math.abs(x)}°${x > 0 ? up : down}`);
  const north = MAPS.latitude[0] > MAPS.latitude[MAPS.latitude.length - 1];
  add(north ? MAPS.latitude : [...MAPS.latitude].reverse(), "top", (x) => sided(x, "NS"));
  add(MAPS.longitude, "left", (x) => sided(((x + 540) % 360) - 180, "EW").replace(/^180°.$/, "180°"));
}

/* `height` × `width` bytes from position `from` as an image in the colours of `table`. */
function imageOf(values, from, width, height, table) {
  const image = new ImageData(width, height);
  for (let i = 0; i < height * width; i++) {
    const value = values[from + i];
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = value === MISSING ? 190 : table[3 * value + c];
    image.data[4 * i + 3] = 255;
  }
  return image;
}

/* Stamps of the members, and their values at the chosen point against lead time. */
function startMembers(tableOf) {
  const { members, stride } = MAPS.stamps, leads = MAPS.leads.length;
  const height = Math.ceil(MAPS.latitude.length / stride), width = Math.ceil(MAPS.longitude.length / stride);
  const north = MAPS.latitude[0] > MAPS.latitude[MAPS.latitude.length - 1];
  const stamps = ["truth", ...members.map((member) => `member ${member}`)].map((name) => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const canvas = document.createElement("canvas");
    caption.textContent = name;
    canvas.width = width * 2;
    canvas.height = height * 2;
    canvas.setAttribute("role", "img");
    figure.append(caption, canvas);
    $("stamps").append(figure);
    return canvas;
  });
  const small = new OffscreenCanvas(width, height);

  function draw(one, all, lead, probe) {
    stamps.forEach((canvas, i) => {
      const values = i ? all.members.subarray(((i - 1) * leads + lead) * height * width) : truthOf(all, lead);
      small.getContext("2d").putImageData(imageOf(values, 0, width, height, tableOf(one)), 0, 0);
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = false;
      context.setTransform(1, 0, 0, north ? 1 : -1, 0, north ? 0 : canvas.height);
      context.drawImage(small, 0, 0, canvas.width, canvas.height);
      context.setTransform(1, 0, 0, 1, 0, 0);
      const name = i ? `member ${members[i - 1]}` : "truth";
      canvas.setAttribute("aria-label", `${name} of ${one.variable} at ${leadText(MAPS.leads[lead])}`);
    });
    plume(one, all, probe);
  }

  /* The points of the truth at which the members are shown. */
  function truthOf(all, lead) {
    const rows = MAPS.latitude.length, columns = MAPS.longitude.length, found = new Uint8Array(height * width);
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) found[y * width + x] = all.truth[(lead * rows + y * stride) * columns + x * stride];
    }
    return found;
  }

  function plume(one, all, probe) {
    const [low, high] = one.range, value = (byte) => (byte === MISSING ? NaN : low + ((high - low) * byte) / 254);
    const rows = MAPS.latitude.length, columns = MAPS.longitude.length;
    const y = Math.floor(probe.row / stride), x = Math.floor(probe.column / stride);
    const at = (values) => MAPS.leads.map((_, lead) => value(values[(lead * rows + y * stride) * columns + x * stride]));
    const series = members.map((_, m) => ({
      name: m ? "" : "members", x: MAPS.leads, colour: COLOURS[5], thin: true,
      y: MAPS.leads.map((_, lead) => value(all.members[((m * leads + lead) * height + y) * width + x])),
    }));
    series.push({ name: "mean", x: MAPS.leads, y: at(all.forecast), colour: COLOURS[0] });
    series.push({ name: "truth", x: MAPS.leads, y: at(all.truth), colour: "", dash: "6 4" });
    const place = placeText(MAPS.latitude[y * stride], MAPS.longitude[x * stride]);
    plot($("plume-plot"), series, {
      x: "lead time (h)", y: one.variable + (one.unit ? ` (${one.unit})` : ""), label: `members of ${one.variable} at ${place}`,
    });
    const shown = members.length < MAPS.members ? `${members.length} of ${MAPS.members} members are shown. ` : "";
    const sparse = stride > 1 ? `Stamps show one of ${stride} points of the maps in each direction. ` : "";
    $("members-note").textContent = `${shown}${sparse}The curves are at ${place}, the point chosen on the maps; their values are rounded to 1/254 of the colour scale.`;
  }
  return { draw };
}

function placeText(latitude, longitude) {
  const side = (x, [up, down]) => `${number(Math.abs(x))}° ${x < 0 ? down : up}`;
  return `${side(latitude, "NS")}, ${side(((longitude + 540) % 360) - 180, "EW")}`;
}

/* The column of a longitude, the left edge of the first being 0, on longitudes of equal steps in either direction. */
function columnOf(value, longitude) {
  const step = (longitude[longitude.length - 1] - longitude[0]) / Math.max(1, longitude.length - 1), around = 360 / Math.abs(step);
  return ((((value - longitude[0]) / step + 0.5) % around) + around) % around;
}

/* Coastlines as one path on a canvas whose rows and columns are the grid's. */
function coastPaths(across, down, scale) {
  const latitude = MAPS.latitude, longitude = MAPS.longitude, height = latitude.length;
  const lines = MAPS.coast || NATURAL_EARTH.map((line) => line.map((x) => x / 10));
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
      const column = columnOf(line[i], longitude);
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

/* Abbreviations are in capitals, as in figures and tables. */
function metricName(name) {
  return name.replace(/\b(rmse|mae|mse|acc|crps|seeps)\b/g, (word) => word.toUpperCase());
}

function fillMetrics(select, names) {
  fill(select, names, names.map(metricName));
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
  fillMetrics(metric, plainMetrics().filter((name) => name === "acc" || LOWER_IS_BETTER.includes(name)));
  fill(source, SCORES.sources);
  fill(baseline, SCORES.sources);
  fill(region, SCORES.regions);
  baseline.value = SCORES.sources[1] || SCORES.sources[0];
  const leads = someLeads(12), colours = bytes(MAPS.colours.RdBu_r);
  const strengthOf = (gain) => Math.min(1, Math.abs(gain) / 100) ** 0.75;  // differs up to 100 %, most where gains are small

  function draw() {
    const head = document.createElement("thead"), body = document.createElement("tbody");
    head.append(tableRow("variable", leads.map((lead) => [leadText(SCORES.leads[lead]), "th"])));
    for (const row of SCORES.channels) body.append(tableRow(row.title, leads.map((lead) => [cell(row, lead), "td"])));
    $("card-table").replaceChildren(head, body);
    const kind = metric.value === "acc" ? "difference of the correlation, × 100" : "difference in percent";
    const sure = SCORES.metrics.includes(`${metric.value}_low`) ? " Bold: the 95 % intervals do not overlap." : "";
    $("card-note").textContent =
      `${metricName(metric.value)} of ${source.value} against ${baseline.value}: ${kind}; blue is better, red is worse.${sure}`;
    const legend = [100, 50, 20, 0, -20, -50, -100].map((gain) => {
      const swatch = document.createElement("span"), at = 3 * Math.round(127 - 127 * Math.sign(gain) * strengthOf(gain));
      const shown = metric.value === "acc" ? gain : -gain;
      swatch.textContent = shown > 0 ? `+${shown}` : String(shown).replace("-", "−");
      shade(swatch, colours.slice(at, at + 3));
      return swatch;
    });
    $("card-legend").replaceChildren(...legend);
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
    const at255 = 3 * Math.round(127 - 127 * Math.sign(gain) * strengthOf(gain));
    shade(td, colours.slice(at255, at255 + 3));
    const apart = at(source.value, "_high") < at(baseline.value, "_low") || at(source.value, "_low") > at(baseline.value, "_high");
    if (apart) td.className = "sure";
    return td;
  }

  for (const select of [metric, source, baseline, region]) select.addEventListener("change", draw);
  draw();
}

function startCurves() {
  const metric = $("curve-metric"), region = $("curve-region");
  fillMetrics(metric, plainMetrics());
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
    const same = ["rmse", "mae", "bias", "activity", "crps", "fair-crps", "spread"].includes(metric.value);
    const unit = one.unit && (same ? one.unit : metric.value === "mse" ? `(${one.unit})²` : "");
    plot($("curve-plot"), series, {
      x: "lead time (h)", y: metricName(metric.value) + (unit ? ` (${unit})` : ""), label: `${metricName(metric.value)} of ${one.title}`,
      zero: LOWER_IS_BETTER.includes(metric.value) || ["spread", "activity"].includes(metric.value),
    });
    const shaded = SCORES.metrics.includes(`${metric.value}_low`) ? " Shaded: 95 % from bootstrapping the initial times." : "";
    $("curve-note").textContent = `Mean over ${DATA.times_text}.${shaded}`;
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
      const y = Array.from(values.slice(from + 1, from + one.last + 1), (v) => (v > 0 ? v : NaN));
      if (y.some(Number.isFinite)) series.push({ name: source, x: y.map((_, k) => k + 1), y });
    });
    $("spectrum-note").textContent =
      `Mean over the ${WHOLE} and the initial times. ` +
      "Persistence is the truth at the initial time: its spectrum is the reference." +
      (one.last < n - 1 ? ` The data have no waves above wavenumber ${one.last}, where the curves end.` : "");
    plot($("spectrum-plot"), series, { x: "zonal wavenumber", y: `energy${one.unit ? ` (${one.unit})` : ""}`, label: `spectrum of ${one.title}`, log: true });
  }
  lead.addEventListener("change", draw);
  draw();
}

// ---- ensemble ------------------------------------------------------------------------------------------------------

function startEnsemble() {
  const wanted = ["spread", "spread-error", "spread-skill", "fair-crps", "crps"].filter((name) => SCORES.metrics.includes(name));
  const has = (kind) => ENSEMBLE.channels.some((row) => kind in row);
  const single = (s) => SCORES.channels.every((row) => !hasMembers(row, SCORES.sources[s]));
  const ensembles = SCORES.sources.filter((_, s) => !single(s));
  if (!ensembles.length || (!wanted.length && !ENSEMBLE.channels.length)) return void $("ensemble").remove();
  const remove = (id) => $(id).closest("figure").remove();
  const ratio = ["spread-error", "spread-skill"].find((name) => wanted.includes(name));
  const crps = ["fair-crps", "crps"].find((name) => wanted.includes(name));
  if (!wanted.includes("spread")) remove("spread-plot");
  if (!ratio) remove("ratio-plot");
  if (!crps) remove("crps-plot");
  for (const [kind, id] of [["rank", "rank-plot"], ["reliability", "reliability-plot"], ["brier", "brier-plot"]]) if (!has(kind)) remove(id);
  const source = $("ensemble-source"), lead = $("ensemble-lead"), event = $("ensemble-event");
  fill(source, ensembles);
  fill(lead, ENSEMBLE.leads.map((_, i) => i), ENSEMBLE.leads.map(leadText));
  lead.selectedIndex = ENSEMBLE.leads.length - 1;
  fill(event, ENSEMBLE.events.map((_, i) => i), ENSEMBLE.events);
  event.parentElement.hidden = !ENSEMBLE.events.length;
  const extra = Object.fromEntries(ENSEMBLE.channels.map((row) => [row.name, row]));
  const row = chooser(SCORES.channels, $("ensemble-variable"), $("ensemble-level"), draw);

  function draw() {
    const one = row(), more = extra[one.name] || {}, unit = one.unit ? ` (${one.unit})` : "";
    const over = (name, metric) => SCORES.leads.map((_, i) => score(one, name, metric, SCORES.whole, i));
    const s = SCORES.sources.indexOf(source.value), x = SCORES.leads, options = { x: "lead time (h)", zero: true };
    if (wanted.includes("spread")) {
      const series = [
        { name: "error", x, y: over(source.value, "rmse"), colour: COLOURS[0] },
        { name: "spread", x, y: over(source.value, "spread"), colour: COLOURS[1] },
      ];
      plot($("spread-plot"), series, { ...options, y: `RMSE and spread${unit}`, label: `spread and error of ${one.title}` });
    }
    if (ratio) {
      const series = ensembles.map((name) => ({ name, x, y: over(name, ratio) }));
      plot($("ratio-plot"), series, { ...options, y: ratio, label: `${ratio} of ${one.title}`, level: 1 });
    }
    if (crps) {
      const series = SCORES.sources.map((name) => ({ name: ensembles.includes(name) ? `${name}, CRPS` : name, x, y: over(name, crps), dash: REFERENCES[name] }));
      if (SCORES.metrics.includes("mae")) series.splice(1, 0, { name: "mean, MAE", x, y: over(source.value, "mae") });
      plot($("crps-plot"), series, { ...options, y: `${crps}, MAE${unit}`, label: `CRPS of ${one.title}` });
    }
    if (has("rank")) {
      const n = ENSEMBLE.ranks, at = (s * ENSEMBLE.leads.length + Number(lead.value)) * n;
      const values = more.rank ? Array.from(floats(more, "rank").subarray(at, at + n)).filter(Number.isFinite) : [];
      bars($("rank-plot"), values, `rank histogram of ${one.title}`);
    }
    const e = Number(event.value), events = ENSEMBLE.events.length;
    if (has("reliability")) {
      const size = ENSEMBLE.bins * 3, at = ((s * ENSEMBLE.leads.length + Number(lead.value)) * events + e) * size;
      const values = more.reliability ? floats(more, "reliability").subarray(at, at + size) : [];
      diagram($("reliability-plot"), values, `reliability of ${one.title} ${ENSEMBLE.events[e]}`);
    }
    if (has("brier")) {
      const series = SCORES.sources.map((name, k) => ({
        name, x, y: x.map((_, i) => (more.brier ? floats(more, "brier")[(k * x.length + i) * events + e] : NaN)),
      })).filter((each) => each.y.some(Number.isFinite));
      plot($("brier-plot"), series, { ...options, y: "Brier score", label: `Brier score of ${one.title} ${ENSEMBLE.events[e]}` });
    }
  }
  for (const select of [source, lead, event]) select.addEventListener("change", draw);
  $("ensemble-note").textContent =
    `Over the ${WHOLE}. ` +
    "A reliable ensemble has a ratio of 1, a flat rank histogram, and events as frequent as their probability: " +
    "the dashed lines. The CRPS of a source with one member is its mean absolute error. Bars in the reliability diagram: how " +
    "often a probability is forecast.";
  draw();
}

/* Whether a source has scores that only an ensemble has. */
function hasMembers(row, source) {
  const only = ["spread", "spread-error", "spread-skill"].filter((name) => SCORES.metrics.includes(name));
  if (only.some((name) => SCORES.leads.some((_, lead) => Number.isFinite(score(row, source, name, SCORES.whole, lead))))) return true;
  const more = ENSEMBLE.channels.find((each) => each.name === row.name);
  if (!more || !more.rank) return false;
  const s = SCORES.sources.indexOf(source), n = ENSEMBLE.ranks * ENSEMBLE.leads.length;
  return floats(more, "rank").subarray(s * n, (s + 1) * n).some(Number.isFinite);
}

/* A histogram of ranks, with the frequency of a flat one. */
function bars(svg, values, label) {
  svg.setAttribute("aria-label", label);
  const n = values.length, north = Math.max(2 / n, ...values) * 1.06;
  const frame = n && axes(svg, { west: -0.5, east: n - 0.5, south: 0, north, x: "rank of the truth", y: "frequency", whole: true });
  if (!frame) { svg.replaceChildren(); return void text(svg, 340, 160, "no data", "middle"); }
  values.forEach((value, rank) => {
    const x = frame.X(rank - 0.45), y = frame.Y(value);
    const bar = element(svg, "rect", { x, y, width: frame.X(rank + 0.45) - x, height: frame.Y(0) - y, fill: COLOURS[0] });
    element(bar, "title", {}).textContent = `rank ${rank}: ${number(value)}`;
  });
  element(svg, "line", { x1: frame.X(-0.5), x2: frame.X(n - 0.5), y1: frame.Y(1 / n), y2: frame.Y(1 / n), class: "reference" });
}

/* Observed frequency against forecast probability; `values` are (fraction, probability, frequency) of each bin. */
function diagram(svg, values, label) {
  svg.setAttribute("aria-label", label);
  const bins = [];
  for (let i = 0; i < values.length; i += 3) bins.push({ share: values[i], p: values[i + 1], o: values[i + 2] });
  const there = bins.filter((bin) => bin.share > 0);
  svg.replaceChildren();
  if (!there.length) return void text(svg, 340, 160, "no data", "middle");
  const { X, Y } = axes(svg, { west: -0.05, east: 1.05, south: 0, north: 1.03, x: "forecast probability", y: "observed frequency" });
  bins.forEach((bin, i) => {
    const at = i / (bins.length - 1), top = Y(bin.share);
    element(svg, "rect", { x: X(at - 0.035), y: top, width: X(at + 0.035) - X(at - 0.035), height: Y(0) - top, fill: COLOURS[5], opacity: 0.35 });
  });
  const climate = there.reduce((sum, bin) => sum + bin.share * bin.o, 0) / there.reduce((sum, bin) => sum + bin.share, 0);
  element(svg, "line", { x1: X(0), y1: Y(0), x2: X(1), y2: Y(1), class: "reference" });
  element(svg, "line", { x1: X(-0.05), y1: Y(climate), x2: X(1.05), y2: Y(climate), class: "axis" });
  element(svg, "path", { d: there.map((bin, i) => `${i ? "L" : "M"}${X(bin.p)} ${Y(bin.o)}`).join(""), fill: "none", stroke: COLOURS[0], "stroke-width": 2 });
  for (const bin of there) {
    const dot = element(svg, "circle", { cx: X(bin.p), cy: Y(bin.o), r: 4, fill: COLOURS[0] });
    element(dot, "title", {}).textContent = `probability ${number(bin.p)}: observed ${number(bin.o)}, ${number(100 * bin.share)} % of the forecasts`;
  }
}

// ---- the page ------------------------------------------------------------------------------------------------------

const [scored, ...others] = SCORES.sources, fields = SCORES.channels.length;
const beside = others.length ? ` compared with ${others.slice(0, -1).join(", ")}${others.length > 1 ? " and " : ""}${others.at(-1)}` : "";
$("summary").textContent =
  `${DATA.initial_times} initial time${DATA.initial_times === 1 ? "" : "s"}, ${fields} variable${fields === 1 ? "" : "s and levels"}; ` +
  `${scored}${beside}. Made by ${DATA.made}.`;
SCORES.sources.forEach((source, i) => {
  const term = document.createElement("dt"), what = document.createElement("dd");
  term.textContent = source;
  what.textContent = SCORES.provenance[i];
  $("provenance").append(term, what);
});
startMaps();
startCard();
startCurves();
startEnsemble();
startSpectra();
document.documentElement.dataset.ready = "true";
