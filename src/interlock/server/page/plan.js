// The launch plan with who set each item, why, and what the ranks observed: what /plan says.

import { $, cell, make, track } from "/page/dom.js";

const SOURCES = { user: "you", rule: "a rule", model: "the checkpoint", launcher: "the launcher", default: "the default" };

export function showPlan(answer) {
  const { plan, items, memory, capacities, mismatches } = answer.view;
  $("model").textContent = plan.model;
  $("shape").textContent = plan.shape;
  const verdict = $("verdict");
  verdict.className = `verdict ${mismatches ? "bad" : "good"}`;
  verdict.textContent = mismatches ? `${mismatches} receipts differ` : "Every receipt agrees";
  const sources = new Map();
  for (const item of items) sources.set(item.source, (sources.get(item.source) || 0) + 1);
  $("plan-sources").replaceChildren("Set by", ...[...sources].sort((a, b) => b[1] - a[1]).map(
    ([source, count]) => make("span", `source ${source}`, `${SOURCES[source] || source} ${count}`),
  ));
  const rows = [];
  let group = "";
  for (const item of items) {
    if (item.group !== group) {
      group = item.group;
      const head = cell(group);
      head.colSpan = 5;
      rows.push(make("tr", "group", head));
    }
    rows.push(itemRow(item));
  }
  $("items").tBodies[0].replaceChildren(...rows);
  const most = Math.max(...memory.map((part) => part.bytes), 1);
  $("memory").replaceChildren(...memory.map((part) => make(
    "div", part.name === "together" || part.name === "available" ? "line total" : "line",
    make("span", "", part.name), track(part.bytes / most), make("b", "", part.text),
  )));
  $("capacities").tBodies[0].replaceChildren(...capacities.map(
    ([name, value, note]) => make("tr", "", cell(name), cell(value, "n"), cell(note, "quiet")),
  ));
  filter();
}

function itemRow(item) {
  const row = make(
    "tr", "item", cell(item.item), cell(item.value, "value"),
    make("td", "", make("span", `source ${item.source}`, SOURCES[item.source] || item.source)),
    cell(item.reason, "why"), cell(item.observed, `receipt ${item.verdict}`),
  );
  row.dataset.words = `${item.item} ${item.value} ${item.source} ${item.reason}`.toLowerCase();
  return row;
}

function filter() {
  const wanted = $("filter").value.trim().toLowerCase();
  let head = null;
  for (const row of $("items").tBodies[0].rows) {
    if (row.classList.contains("group")) {
      head = row;
      head.hidden = true;
      continue;
    }
    row.hidden = !row.dataset.words.includes(wanted);
    if (!row.hidden && head) head.hidden = false;
  }
}

export function watchFilter() {
  $("filter").addEventListener("input", filter);
}
