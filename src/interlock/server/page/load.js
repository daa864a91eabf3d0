// Tiles, charts and the table of replicas: what /load says.

import { chart, rates, spark, values } from "/page/charts.js";
import { $, cell, make, number, percent, track } from "/page/dom.js";

export function showLoad(load) {
  $("tile-rate").textContent = number(load.generated_tokens_per_second);
  $("tile-running").replaceChildren(String(load.running), make("small", "", ` / ${load.max_running_requests}`));
  $("tile-waiting").textContent = String(load.waiting);
  $("tile-kv").textContent = percent(load.kv_usage);
  $("tile-hits").textContent = percent(load.prefix_hit_rate);
  const generated = rates(load.series, "generated_tokens");
  spark($("spark-rate"), generated);
  spark($("spark-running"), values(load.series, "running"));
  spark($("spark-waiting"), values(load.series, "waiting"));
  spark($("spark-kv"), values(load.series, "kv_usage"));
  if ($("view-load").hidden) return;
  chart($("chart-rate"), [generated], { least: 10 });
  chart($("chart-requests"), [values(load.series, "running"), values(load.series, "waiting")], { least: 4 });
  chart($("chart-kv"), [values(load.series, "kv_usage")], { share: true });
  $("replicas").tBodies[0].replaceChildren(...load.replicas.map(row));
  const moving = load.replicas.filter((replica) => replica.transfer);
  $("transfers").hidden = !moving.length;
  $("transfers-role").textContent = load.role;
  $("transfers").querySelector("tbody").replaceChildren(...moving.map(transferRow));
}

function transferRow({ replica, transfer }) {
  const states = Object.entries(transfer.states).map(([state, count]) => `${count} ${state}`);
  const rate = transfer.seconds_total ? number(transfer.bytes_total / transfer.seconds_total / 1e6) : "–";
  const held = `${number(transfer.pages_held)}, ${number(transfer.pages_quarantined)} of ended requests`;
  return make(
    "tr", "", cell(replica), cell(transfer.peers, "n"), cell(states.join(", ") || "none"), cell(held, "n"),
    cell(number(transfer.handed_over_total), "n"), cell(number(transfer.failed_total), "n"),
    cell(number(transfer.tokens_total), "n"), cell(transfer.copies_pending, "n"), cell(rate, "n"),
  );
}

function row(replica) {
  return make(
    "tr", "", cell(replica.replica), cell(replica.running, "n"), cell(replica.waiting, "n"),
    make("td", "", pages(replica.pages.full)), make("td", "", pages(replica.pages.window)),
  );
}

function pages({ total, used, cached }) {
  if (!total) return make("span", "quiet", "none");
  const text = `${number(used)} used, ${number(cached)} cached of ${number(total)}`;
  return make("span", "meter", track(used / total, cached / total), make("span", "quiet", text));
}
