// Starts the page: tabs, theme, the API key, and the polling that feeds every view.

import { ApiError, get, getState, useKey, wantKey, whenKeyWanted } from "/page/api.js";
import { $ } from "/page/dom.js";
import { redrawHeat, showExperts, watchHeat } from "/page/experts.js";
import { showLoad } from "/page/load.js";
import { showPlan, watchFilter } from "/page/plan.js";
import { watchPrompt } from "/page/try.js";

const POLL_MS = 1000, EXPERTS_MS = 3000, HIDDEN_MS = 10000;
const THEMES = ["system", "light", "dark"];
let model = "";
let known = false;

// ---- tabs

const tabs = [...document.querySelectorAll("[role=tab]")];

function select(tab, focus) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  history.replaceState(null, "", `#${tab.id.slice(4)}`);
  if (known) {
    poll();
    pollExperts();
  }
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => select(tab, false));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: index + 1, ArrowLeft: index - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(tabs[to % tabs.length], true);
  });
}

// ---- theme

function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("interlock-theme", name);
  $("theme").setAttribute("aria-label", `Theme: ${name === "system" ? "as the system" : name}`);
  $("theme").title = $("theme").getAttribute("aria-label");
  redrawHeat();
}

$("theme").addEventListener("click", () => {
  const now = localStorage.getItem("interlock-theme") || "system";
  theme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawHeat);

// ---- the key

whenKeyWanted((wasSent) => {
  known = false;
  const first = $("key-form").hidden;
  $("key-form").hidden = false;
  if (wasSent) $("key-note").textContent = "The server does not know this key.";
  if (first) $("key").focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  $("key-form").hidden = true;
  begin();
});

// ---- state of the server

function state(name, text) {
  $("lamp").dataset.state = name;
  if ($("state").textContent !== text) $("state").textContent = text;
}

function problem(text) {
  $("problem").hidden = !text;
  if ($("problem").textContent !== text) $("problem").textContent = text;
}

async function askState() {
  const answer = await getState("/ready");
  const texts = { ready: "ready", draining: "draining", unhealthy: "unhealthy" };
  state(answer.status, texts[answer.status] || answer.status);
  problem(answer.reason || "");
}

async function quietly(work) {
  try {
    await work();
    return true;
  } catch (error) {
    if (error instanceof ApiError) return error.status !== 401;
    state("gone", "no answer");
    return true;
  }
}

let timer = 0, expertsTimer = 0;

async function poll() {
  clearTimeout(timer);
  const goOn = await quietly(async () => {
    await askState();
    showLoad(await get("/load"));
  });
  clearTimeout(timer);
  if (goOn) timer = setTimeout(poll, document.hidden ? HIDDEN_MS : POLL_MS);
}

async function pollExperts() {
  clearTimeout(expertsTimer);
  const goOn = await quietly(async () => showExperts(await get("/experts")));
  clearTimeout(expertsTimer);
  if (goOn) expertsTimer = setTimeout(pollExperts, document.hidden ? HIDDEN_MS : EXPERTS_MS);
}

async function begin() {
  await quietly(async () => {
    const { version, api_key_required } = await getState("/version");
    $("version").textContent = `Interlock ${version}`;
    if (api_key_required) wantKey();
    await askState();
  });
  if (!$("key-form").hidden) return;
  await quietly(async () => {
    const answer = await get("/plan");
    model = answer.view.plan.model;
    document.title = `${model} · Interlock`;
    showPlan(answer);
    known = true;
  });
  if (known) {
    poll();
    pollExperts();
  }
}

theme(localStorage.getItem("interlock-theme") || "system");
watchPrompt(() => model);
watchHeat();
watchFilter();
addEventListener("resize", redrawHeat);
const wanted = tabs.find((tab) => `#${tab.id.slice(4)}` === location.hash);
if (wanted) select(wanted, false);
begin();
