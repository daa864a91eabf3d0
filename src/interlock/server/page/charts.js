// Line charts of the last minutes, without a library.

import { number, percent, svg } from "/page/dom.js";

const SPAN = 180;

function path(points, x, y) {
  return points.map((point, index) => `${index ? "L" : "M"}${x(point.ago).toFixed(2)} ${y(point.value).toFixed(2)}`).join("");
}

function niceTop(value, least) {
  const wanted = Math.max(value, least);
  const power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= wanted);
}

export function spark(target, points) {
  const width = 100, height = 20;
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.setAttribute("preserveAspectRatio", "none");
  const top = Math.max(...points.map((point) => point.value), 1e-9);
  const x = (ago) => width * (1 - Math.min(ago, SPAN) / SPAN);
  const y = (value) => height - 1.5 - (height - 3) * (value / top);
  const line = path(points, x, y);
  const parts = [];
  if (points.length > 1) {
    const close = `L${x(points.at(-1).ago)} ${height}L${x(points[0].ago)} ${height}Z`;
    parts.push(svg("path", { class: "area", d: line + close }), svg("path", { d: line }));
  }
  target.replaceChildren(...parts);
}

export function chart(target, series, { share = false, least = 1 } = {}) {
  const width = target.clientWidth || 360, height = 170, left = 40, bottom = 20, right = 6, top = 8;
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const highest = Math.max(0, ...series.flatMap((points) => points.map((point) => point.value)));
  const limit = share ? Math.min(1, niceTop(highest, 0.1)) : niceTop(highest, least);
  const x = (ago) => left + (width - left - right) * (1 - Math.min(ago, SPAN) / SPAN);
  const y = (value) => top + (height - top - bottom) * (1 - value / limit);
  const parts = [];
  for (const step of [0, 0.5, 1]) {
    const value = limit * step;
    parts.push(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    parts.push(svg("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, share ? percent(value) : number(value)));
  }
  for (const [ago, text, anchor] of [[180, "3 min ago", "start"], [120, "2 min", "middle"], [60, "1 min", "middle"], [0, "now", "end"]]) {
    parts.push(svg("text", { x: x(ago), y: height - 4, "text-anchor": anchor }, text));
  }
  series.forEach((points, index) => {
    if (points.length < 2) return;
    const line = path(points, x, y);
    if (!index) parts.push(svg("path", { class: "area", d: `${line}L${x(points.at(-1).ago)} ${y(0)}L${x(points[0].ago)} ${y(0)}Z` }));
    parts.push(svg("path", { class: `line s${index + 1}`, d: line }));
  });
  target.replaceChildren(...parts);
}

// Differences of a running sum, per second; smoothed over three points, which are a second apart.
export function rates(series, name) {
  const found = [];
  for (let index = 1; index < series.length; index += 1) {
    const before = series[Math.max(0, index - 3)], after = series[index];
    const seconds = before.ago - after.ago;
    if (seconds > 0) found.push({ ago: after.ago, value: (after[name] - before[name]) / seconds });
  }
  return found;
}

export const values = (series, name) => series.map((point) => ({ ago: point.ago, value: point[name] }));
