// Short functions that build elements; text is always set as text, never as markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// A bar of one or more parts; shares are 0 to 1.
export function track(...shares) {
  const bar = make("span", "track");
  shares.forEach((share, index) => {
    const part = make("i", index ? "cached" : "");
    part.style.width = `${Math.min(1, Math.max(0, share)) * 100}%`;
    bar.append(part);
  });
  return bar;
}

export function cell(text, className = "") {
  return make("td", className, text);
}

export function number(value) {
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

export const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
