// Ask the model, show its tokens as they come, shaded by their probability, with the alternatives of each.

import { stream } from "/page/api.js";
import { $, make, track } from "/page/dom.js";

const ALTERNATIVES = 5;
let running = null;
let tokens = [];
let current = -1;

const mode = () => document.querySelector("input[name=mode]:checked").value;

function body(model) {
  const common = {
    model, stream: true, stream_options: { include_usage: true },
    max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value), top_p: Number($("top-p").value),
  };
  if ($("seed").value !== "") common.seed = Number($("seed").value);
  if (mode() === "completion") return { ...common, prompt: $("prompt").value, logprobs: ALTERNATIVES };
  const messages = [{ role: "user", content: $("prompt").value }];
  if ($("system").value.trim()) messages.unshift({ role: "system", content: $("system").value });
  return { ...common, messages, logprobs: true, top_logprobs: ALTERNATIVES };
}

// Tokens of one chunk, the same for both endpoints: text, logprob and alternatives.
function read(choice) {
  if (!choice.logprobs) return [];
  if (choice.logprobs.content) {
    return choice.logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      text: token, logprob, others: top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  const { tokens: texts, token_logprobs: logprobs, top_logprobs: tops } = choice.logprobs;
  return texts.map((text, index) => ({
    text, logprob: logprobs[index], others: Object.entries(tops[index] || {}).sort((a, b) => b[1] - a[1]),
  }));
}

function shade(logprob) {
  const probability = Math.exp(logprob);
  const step = [0.8, 0.5, 0.2, 0.05].findIndex((limit) => probability >= limit);
  return step < 0 ? 4 : step;
}

// A token that is only part of a character has no text of its own.
function visible(text) {
  return text.startsWith("bytes:") ? "◌" : text;
}

function spelled(text) {
  return text.startsWith("bytes:") ? text.slice(6) : JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣") || "(empty)";
}

function add(token) {
  const index = tokens.push(token) - 1;
  const span = make("span", `token p${shade(token.logprob)}`, visible(token.text));
  if (token.text.startsWith("bytes:")) span.classList.add("bytes");
  span.tabIndex = index ? -1 : 0;
  span.setAttribute("aria-label", `${token.text.trim() || "space"}, ${percent(token.logprob)}`);
  span.addEventListener("pointerenter", () => show(index, false));
  span.addEventListener("focus", () => show(index, false));
  const box = $("answer");
  const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  box.append(span);
  if (follows) box.scrollTop = box.scrollHeight;
}

function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  return share >= 10 ? `${share.toFixed(0)} %` : share >= 0.01 ? `${share.toPrecision(2)} %` : "< 0.01 %";
}

function show(index, focus) {
  const spans = $("answer").querySelectorAll(".token");
  if (!spans[index]) return;
  if (spans[current]) {
    spans[current].classList.remove("shown");
    spans[current].tabIndex = -1;
  }
  current = index;
  spans[index].classList.add("shown");
  spans[index].tabIndex = 0;
  if (focus) spans[index].focus();
  const token = tokens[index];
  const rows = token.others.some(([text]) => text === token.text) ? token.others : [[token.text, token.logprob], ...token.others];
  $("alternatives").replaceChildren(...rows.slice(0, ALTERNATIVES + 1).map(([text, logprob]) => make(
    "div", text === token.text ? "choice taken" : "choice",
    make("code", "", spelled(text)), track(Math.exp(logprob)), make("span", "n", percent(logprob)),
  )));
}

function walk(event) {
  const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: tokens.length - 1 };
  if (!(event.key in moves) || !tokens.length) return;
  event.preventDefault();
  show(Math.min(Math.max(0, moves[event.key]), tokens.length - 1), true);
}

function note(begun, first, usage, reason) {
  const now = performance.now(), count = usage ? usage.completion_tokens : tokens.length;
  const parts = [`${count} tokens`];
  if (first) parts.push(`first after ${(first - begun).toFixed(0)} ms`);
  if (first && count > 1) parts.push(`${((count - 1) / Math.max(1e-3, (now - first) / 1000)).toFixed(1)} tokens/s`);
  if (tokens.length) {
    const mean = tokens.reduce((sum, token) => sum + token.logprob, 0) / tokens.length;
    parts.push(`perplexity ${Math.exp(-mean).toFixed(2)}`);
  }
  if (usage) parts.push(`prompt ${usage.prompt_tokens}${usage.prompt_tokens_details?.cached_tokens ? `, ${usage.prompt_tokens_details.cached_tokens} cached` : ""}`);
  if (reason) parts.push(`ended by ${reason}`);
  $("answer-note").textContent = parts.join(" · ");
}

async function send(model) {
  if (running) return;
  running = new AbortController();
  tokens = [];
  current = -1;
  $("answer").replaceChildren();
  $("answer").setAttribute("aria-busy", "true");
  $("alternatives").replaceChildren();
  $("answer-note").textContent = "waiting for the first token";
  $("send").disabled = true;
  $("stop").disabled = false;
  const begun = performance.now();
  let first = null, usage = null, reason = null;
  try {
    const path = mode() === "chat" ? "/v1/chat/completions" : "/v1/completions";
    for await (const chunk of stream(path, body(model), running.signal)) {
      usage = chunk.usage || usage;
      for (const choice of chunk.choices) {
        for (const token of read(choice)) {
          first = first || performance.now();
          add(token);
        }
        reason = choice.finish_reason || reason;
      }
      if (first) note(begun, first, usage, reason);
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "you";
    else $("answer").append(make("span", "cut", error.message));
  }
  note(begun, first, usage, reason);
  running = null;
  $("answer").setAttribute("aria-busy", "false");
  $("send").disabled = false;
  $("stop").disabled = true;
}

export function watchPrompt(modelName) {
  const form = $("prompt-form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(modelName());
  });
  form.addEventListener("change", () => { $("system-field").hidden = mode() !== "chat"; });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
  $("stop").addEventListener("click", () => running && running.abort());
  $("answer").addEventListener("keydown", walk);
}
