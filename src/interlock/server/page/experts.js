// The heat map of layers and experts, and the table of ranks: what /experts says.

import { $, cell, make, number, percent, track } from "/page/dom.js";

const TOP = 3;
const LEFT = 34, HEAD = 18, RIGHT = 42;
let shown = null;
let cursor = { layer: 0, expert: 0 };

function ramp() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  return dark
    ? [[24, 32, 40], [18, 74, 84], [34, 128, 118], [120, 186, 110], [240, 226, 120]]
    : [[240, 243, 246], [190, 222, 214], [96, 178, 160], [22, 118, 112], [12, 50, 74]];
}

function colour(stops, share) {
  const place = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const mixed = stops[low].map((value, channel) => Math.round(value + (stops[low + 1][channel] - value) * (place - low)));
  return `rgb(${mixed.join(" ")})`;
}

export function showExperts(data) {
  shown = data;
  $("tile-balance").textContent = data.balancedness ? data.balancedness.toFixed(2) : "–";
  if ($("view-experts").hidden) return;
  draw();
  describe();
  $("ranks").tBodies[0].replaceChildren(...data.ranks.map((rank) => rankRow(rank, data.ranks)));
  $("ranks-note").textContent = data.ranks.length
    ? `Means of one layer's exchange; waiting for slower ranks is part of it. One step in ${data.sample_every} is counted. T is the capacity: tokens that a rank may dispatch in one step.`
    : "";
}

function geometry() {
  const room = Math.max(260, $("heat").parentElement.clientWidth - LEFT - RIGHT);
  const width = Math.max(4, Math.min(44, Math.floor(room / Math.max(1, shown.experts))));
  const height = Math.max(7, Math.min(20, width, Math.floor(480 / Math.max(1, shown.layers.length))));
  return { width, height, gap: width > 8 ? 1 : 0 };
}

function draw() {
  const canvas = $("heat");
  const stops = ramp(), { width, height, gap } = geometry();
  const across = LEFT + shown.experts * width + RIGHT, down = HEAD + shown.layers.length * height + 1;
  const scale = window.devicePixelRatio || 1;
  canvas.hidden = !shown.layers.length;
  canvas.width = across * scale;
  canvas.height = down * scale;
  canvas.style.width = `${across}px`;
  canvas.style.height = `${down}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  shown.rows.forEach((row, layer) => {
    const mean = row.reduce((sum, value) => sum + value, 0) / Math.max(1, row.length);
    row.forEach((value, expert) => {
      context.fillStyle = colour(stops, mean ? value / mean / TOP : 0);
      context.fillRect(LEFT + expert * width, HEAD + layer * height, width - gap, height - gap);
    });
  });
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = style.getPropertyValue("--muted");
  const every = Math.max(1, Math.ceil(13 / height));
  shown.layers.forEach((layer, index) => {
    if (index % every) return;
    const baseline = HEAD + index * height + Math.min(height - 1, (height + 9) / 2);
    context.fillText(String(layer), 4, baseline);
    context.fillText(`${shown.imbalance[index].toFixed(1)}×`, LEFT + shown.experts * width + 6, baseline);
  });
  context.strokeStyle = style.getPropertyValue("--fg");
  for (const rank of shown.ranks.filter((one) => !one.is_slice)) {
    const x = LEFT + rank.first_expert * width;
    context.fillText(shown.ranks.length > 1 ? `rank ${rank.rank}` : "expert", x + 3, 12);
    if (rank.first_expert) {
      context.globalAlpha = 0.55;
      context.fillRect(x - 1, 2, 1, down);
      context.globalAlpha = 1;
    }
  }
  if (document.activeElement === canvas && shown.rows.length) {
    context.lineWidth = 2;
    context.strokeRect(LEFT + cursor.expert * width - 1, HEAD + cursor.layer * height - 1, width + 1, height + 1);
  }
  scaleBar(stops);
}

function scaleBar(stops) {
  const canvas = $("heat-scale"), context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x += 1) {
    context.fillStyle = colour(stops, x / canvas.width);
    context.fillRect(x, 0, 1, canvas.height);
  }
}

function describe() {
  const rows = shown.rows;
  if (!rows.length || !rows.some((row) => row.some(Boolean))) {
    $("heat-note").textContent = "No rows were counted in the last minute. Send a prompt.";
    return;
  }
  cursor.layer = Math.min(cursor.layer, rows.length - 1);
  cursor.expert = Math.min(cursor.expert, shown.experts - 1);
  const row = rows[cursor.layer], value = row[cursor.expert];
  const mean = row.reduce((sum, each) => sum + each, 0) / row.length;
  const holder = shown.ranks.find((rank) => cursor.expert >= rank.first_expert && cursor.expert < rank.first_expert + rank.experts);
  $("heat-note").textContent = `Layer ${shown.layers[cursor.layer]}, expert ${cursor.expert} on rank ${holder ? holder.rank : "?"}: `
    + `${number(value)} rows, ${mean ? (value / mean).toFixed(2) : 0}× the layer's mean. `
    + `The layer's busiest expert has ${shown.imbalance[cursor.layer].toFixed(2)}×.`;
}

function rankRow(rank, all) {
  const total = (one) => one.rows.reduce((sum, value) => sum + value, 0);
  const most = Math.max(1, ...all.map(total));
  const time = (value) => (value === null ? "–" : value < 1 ? `${(value * 1000).toFixed(0)} µs` : `${value.toFixed(2)} ms`);
  const use = (phase) => (phase.steps ? percent(phase.capacity_use) : "–");
  const last = rank.first_expert + rank.experts - 1;
  const experts = `${rank.first_expert} to ${last}${rank.is_slice ? ", a slice" : ""}`;
  return make(
    "tr", "", cell(rank.rank), cell(experts),
    make("td", "", make("span", "meter", track(total(rank) / most), make("span", "quiet", number(total(rank))))),
    cell(time(rank.prefill.dispatch_ms), "n"), cell(time(rank.prefill.combine_ms), "n"),
    cell(time(rank.decode.dispatch_ms), "n"), cell(time(rank.decode.combine_ms), "n"),
    cell(use(rank.prefill), "n"), cell(use(rank.decode), "n"),
  );
}

export function watchHeat() {
  const canvas = $("heat");
  const moved = (layer, expert) => {
    if (!shown || !shown.rows.length) return;
    cursor = {
      layer: Math.min(Math.max(0, layer), shown.rows.length - 1), expert: Math.min(Math.max(0, expert), shown.experts - 1),
    };
    draw();
    describe();
  };
  canvas.addEventListener("pointermove", (event) => {
    if (!shown) return;
    const { width, height } = geometry();
    moved(Math.floor((event.offsetY - HEAD) / height), Math.floor((event.offsetX - LEFT) / width));
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    moved(cursor.layer + step[0], cursor.expert + step[1]);
  });
  canvas.addEventListener("focus", () => shown && draw());
  canvas.addEventListener("blur", () => shown && draw());
}

export function redrawHeat() {
  if (shown && !$("view-experts").hidden) draw();
}
