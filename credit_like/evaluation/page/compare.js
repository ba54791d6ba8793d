"use strict";
const NAMES = DATA.names;

function startFacts() {
  const head = document.createElement("thead"), body = document.createElement("tbody");
  head.append(tableRow("", NAMES.map((name) => [name, "th"])));
  for (const [label, ...values] of DATA.facts) body.append(tableRow(label, values.map((value) => [value, "td"])));
  $("facts").replaceChildren(head, body);
}

function startLosses() {
  for (const { title, runs } of DATA.curves) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const svg = element(figure, "svg", { class: "plot", role: "img", viewBox: "0 0 760 360" });
    caption.textContent = title;
    figure.prepend(caption);
    $("losses").append(figure);
    const series = runs.map((run, i) => ({ name: NAMES[i], x: run.x, y: run.y.map((y) => y ?? NaN), colour: COLOURS[i] }));
    plot(svg, series.filter((one) => one.x.length), { x: "step", y: title, label: title });
  }
}

function startScores() {
  if (!DATA.scores) {
    for (const id of ["ratio-table", "score-controls", "score-plot", "difference-plot"]) $(id).remove();
    $("ratio-note").textContent = `No scores in ${DATA.lacking.join(", ")}; run credit-like evaluate.`;
    return;
  }
  const { leads, times, note, channels } = DATA.scores;
  const head = document.createElement("thead"), body = document.createElement("tbody");
  head.append(tableRow("variable", leads.map((lead) => [leadText(lead), "th"])));
  for (const row of channels) body.append(tableRow(row.title, row.ratios.map((ratio) => [ratioCell(...ratio), "td"])));
  $("ratio-table").replaceChildren(head, body);
  $("ratio-note").textContent =
    `RMSE of ${NAMES[1]} over that of ${NAMES[0]}: below 1, in blue, ${NAMES[1]} is better. ` + note[0].toUpperCase() + note.slice(1).replace("* the", "bold: the") + ".";
  if (!times) $("difference-plot").remove();
  if (!channels.length) { for (const id of ["score-controls", "score-plot", "difference-plot"]) $(id)?.remove(); return; }
  const row = chooser(channels, $("score-variable"), $("score-level"), draw);
  function draw() {
    const one = row(), values = (list) => (list || []).map((y) => y ?? NaN);
    const series = one.runs.map((run, i) => ({
      name: NAMES[i], x: leads, y: values(run.y), low: values(run.low), high: values(run.high), colour: COLOURS[i],
    }));
    const label = `RMSE${one.unit ? ` (${one.unit})` : ""}`;
    plot($("score-plot"), series, { x: "lead time (h)", y: label, label: `RMSE of ${one.title}`, zero: true });
    const shaded = one.runs.some((run) => run.low) ? " Shaded: 95 % from bootstrapping the initial times." : "";
    $("score-note").textContent = "Each run over all of its own initial times." + shaded;
    if (!times) return;
    const { y, low, high } = one.difference;
    const difference = { name: `${NAMES[1]} − ${NAMES[0]}`, x: leads, y: values(y), low: values(low), high: values(high), colour: COLOURS[0] };
    plot($("difference-plot"), [difference], { x: "lead time (h)", y: `difference of ${label}`, label: `Difference of the RMSE of ${one.title}`, level: 0 });
    $("difference-note").textContent = "Over the common initial times. Shaded: the 95 % interval of the difference; where it excludes 0, the difference is significant.";
  }
  draw();
}

function ratioCell(ratio, half, significant, digits) {
  const td = document.createElement("td");
  td.textContent = ratio === null ? "–" : ratio.toFixed(digits) + (half === null ? "" : ` ±${half.toFixed(digits)}`);
  if (ratio === null) return td;
  const strength = Math.min(0.75, 2 * Math.abs(Math.log(ratio)));
  shade(td, (ratio < 1 ? [33, 102, 172] : [178, 24, 43]).map((c) => Math.round(255 + strength * (c - 255))));
  if (significant) td.className = "sure";
  return td;
}

$("summary").textContent = `Two runs side by side; ${DATA.made}.`;
startFacts();
startLosses();
startScores();
document.documentElement.dataset.ready = "true";
