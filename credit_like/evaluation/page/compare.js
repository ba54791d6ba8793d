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
    for (const id of ["ratio-table", "score-controls", "score-plot"]) $(id).remove();
    $("ratio-note").textContent = `No scores in ${DATA.lacking.join(", ")}; run credit-like evaluate.`;
    return;
  }
  const { leads, bounded, channels } = DATA.scores;
  const head = document.createElement("thead"), body = document.createElement("tbody");
  head.append(tableRow("variable", leads.map((lead) => [leadText(lead), "th"])));
  for (const row of channels) body.append(tableRow(row.title, row.ratios.map(([ratio, apart]) => [ratioCell(ratio, apart), "td"])));
  $("ratio-table").replaceChildren(head, body);
  $("ratio-note").textContent =
    `RMSE of ${NAMES[1]} over that of ${NAMES[0]}: below 1, in blue, ${NAMES[1]} is better. ` +
    (bounded ? "Bold: the 95 % intervals do not overlap." : "Set evaluation.bootstrap in both for intervals.");
  if (!channels.length) { $("score-controls").remove(); $("score-plot").remove(); return; }
  const row = chooser(channels, $("score-variable"), $("score-level"), draw);
  function draw() {
    const one = row(), values = (list) => (list || []).map((y) => y ?? NaN);
    const series = one.runs.map((run, i) => ({
      name: NAMES[i], x: leads, y: values(run.y), low: values(run.low), high: values(run.high), colour: COLOURS[i],
    }));
    const label = `RMSE${one.unit ? ` (${one.unit})` : ""}`;
    plot($("score-plot"), series, { x: "lead time (h)", y: label, label: `RMSE of ${one.title}`, zero: true });
  }
  $("score-note").textContent = bounded ? "Shaded: 95 % from bootstrapping the initial times." : "";
  draw();
}

function ratioCell(ratio, apart) {
  const td = document.createElement("td");
  td.textContent = ratio === null ? "–" : ratio.toFixed(2);
  if (ratio === null) return td;
  const strength = Math.min(0.75, 2 * Math.abs(Math.log(ratio)));
  td.style.background = ratio < 1 ? `rgba(33, 102, 172, ${strength})` : `rgba(178, 24, 43, ${strength})`;
  if (strength > 0.45) td.style.color = "#fff";
  if (apart) td.className = "sure";
  return td;
}

$("summary").textContent = `Two runs side by side; ${DATA.made}.`;
startFacts();
startLosses();
startScores();
document.documentElement.dataset.ready = "true";
