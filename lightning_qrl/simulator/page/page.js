// What connects the page: controls -> settings -> a run -> pictures and numbers; time; the link.

const $ = (id) => document.getElementById(id);
const form = $("controls");
const pictures = ["strip", "timeline", "mismatch", "drift", "reward"].map($);
const DIGITS = { final_reward: 3, final_drift: 2, mean_staleness: 2, quantization_floor: 4 };
const CAP_MOST = PAGE.specs.find(({ key }) => key === "max_staleness").most;
const CAPS = Math.min(8, CAP_MOST);
const dark = matchMedia("(prefers-color-scheme: dark)");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const narrow = matchMedia("(max-width: 40rem)");
const now = { settings: { ...PAGE.start }, trace: null, summary: null, caps: [], time: Infinity, playing: false, held: null };

const model = (settings) => simulate(settings, PAGE.constants);
const later = (milliseconds, act) => {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, milliseconds);
  };
};

// ---- controls

function readControls() {
  return Object.fromEntries(
    PAGE.specs.map(({ key, choices }) => {
      const input = form.elements[key];
      if (!choices) return [key, input.valueAsNumber];
      return [key, input.type === "checkbox" ? input.checked : input.value];
    }),
  );
}

function showControls() {
  for (const { key, choices } of PAGE.specs) {
    const input = form.elements[key];
    const value = now.settings[key];
    if (input.type === "checkbox") input.checked = value;
    else input.value = value;
    const control = form.querySelector(`[data-key="${key}"]`);
    if (!choices) control.querySelector("output").value = value;
    const idle = whyIdle(key, now.settings);
    control.classList.toggle("idle", idle !== undefined);
    const about = $(`${key}-about`);
    about.textContent = idle ? `No effect: ${idle}.` : about.dataset.about;
  }
  const plan = (settings) => PAGE.plan.filter((key) => !whyIdle(key, settings));
  for (const button of document.querySelectorAll("button[data-preset]")) {
    const preset = PAGE.presets[button.dataset.preset].settings;
    const pressed = plan(preset).every((key) => preset[key] === now.settings[key]);
    button.setAttribute("aria-pressed", pressed);
  }
}

// ---- a run

function rerun(settings) {
  const ended = now.trace === null || now.time >= now.trace.duration;
  now.settings = settings;
  now.caps = runsByCap(settings);
  now.trace = now.caps[settings.max_staleness] ?? model(settings);
  now.summary = summarize(now.trace, PAGE.constants);
  now.time = ended ? now.trace.duration : Math.min(now.time, now.trace.duration);
  $("time").max = now.trace.duration;
  showControls();
  showOutcome();
  $("command").textContent = commandOf(settings);
  $("link").textContent = location.href.split("#")[0] + toHash(settings);
  draw();
  showSteps();
  announce();
}

/**
 * A run for every cap of the strip; the cap alone changes none of them. Where a cap above 0 discards
 * nothing, a higher one changes nothing.
 */
function runsByCap(settings) {
  const others = JSON.stringify({ ...settings, max_staleness: null });
  if (others === now.others) return now.caps;
  now.others = others;
  const runs = [];
  for (let cap = 0; cap <= CAPS; cap += 1) {
    const own = { ...settings, max_staleness: cap };
    const lower = cap > 1 ? runs.at(-1) : null;
    runs.push(lower?.discarded === 0 ? { ...lower, settings: own } : model(own));
  }
  return runs;
}

function change(settings) {
  performance.clearMeasures("reaction");
  const start = performance.now();
  rerun(settings);
  performance.measure("reaction", { start });
  $("problem").hidden = true;
  keepLink();
}

const keepLink = later(250, () => history.replaceState(null, "", toHash(now.settings)));

function verdictOf({ diverged_at_step, why_no_step }) {
  if (why_no_step) return "no step";
  return diverged_at_step === null ? "stable" : `diverged at ${diverged_at_step}`;
}

/** The numbers of the row of outcomes, as text. */
function outcomeTexts({ trace, summary }) {
  const texts = { ...summary, verdict: verdictOf(summary) };
  for (const [key, digits] of Object.entries(DIGITS)) texts[key] = fixed(summary[key], digits);
  for (const key of ["sampler_utilization", "trainer_utilization"]) texts[key] = `${fixed(100 * trace[key], 0)}%`;
  return texts;
}

/** Keep this run beside the next ones, or let go of the one that is kept. */
function hold() {
  const { trace, summary, settings, held } = now;
  now.held = held ? null : { trace, summary };
  $("hold").setAttribute("aria-pressed", !held);
  $("held-as").hidden = Boolean(held);
  $("held-as").querySelector("code").textContent = commandOf(settings);
  showOutcome();
  draw();
}

function showOutcome() {
  const { summary, held } = now;
  const shown = outcomeTexts(now);
  const was = held && outcomeTexts(held);
  for (const cell of $("outcome").querySelectorAll("dd")) {
    const { outcome } = cell.dataset;
    cell.textContent = outcome ? shown[outcome] : was?.[cell.dataset.was];
    cell.hidden = !outcome && !held;
  }
  $("outcome").classList.toggle("lost", summary.diverged_at_step !== null);
  $("outcome").classList.toggle("none", summary.why_no_step !== null);
}

const announce = later(700, () => ($("said").textContent = outcomeWords(now.summary)));

/** The table of steps, where it is open. */
function showSteps() {
  if ($("steps").open) $("steps").querySelector("tbody").innerHTML = stepRows(now.trace);
}

// ---- pictures

let lanes = null;
let room = null; // px: asking for them while the page changes would lay it out once more each time
const measure = () => (room = { width: $("timeline").clientWidth, caps: $("caps").clientWidth });
const above = (value, stops) => stops.find((stop) => stop >= value) ?? value;

function draw() {
  const { trace, summary, settings, held } = now;
  const { learning } = PAGE.constants;
  const { width } = room;
  lanes = drawTimeline($("timeline"), trace, width);
  const all = [...trace.steps, ...(held?.trace.steps ?? [])];
  const peak = (key) => Math.max(0, ...all.map((step) => step[key]));
  const floor = trace.floor;
  drawPanel($("mismatch"), trace, width, {
    most: above(1.05 * Math.max(peak("shown"), floor), [0.05, 0.1, 0.2, 0.5, 1, 2, 5]),
    lines: [{ at: floor, kind: "floor" }],
    line: (step) => step.mismatch,
    dots: (step) => step.shown,
    held,
  });
  const rest = summary.drift_plateau;
  const limit = learning.divergence;
  const drifts = [1.4, 2.8, 4].map((factor) => factor * limit);
  const most = above(1.02 * Math.max(peak("drift"), limit), drifts);
  drawStrip($("strip"), trace, width, most, limit);
  drawPanel($("drift"), trace, width, {
    most,
    lines: [
      { at: limit, kind: "limit", name: `diverges above ${limit}` },
      ...(rest === null || !trace.steps.length ? [] : [{ at: rest, kind: "rest" }]),
    ],
    line: (step) => step.drift,
    dots: (step) => step.drift,
    held,
    marks: (step) => step.kick > 0,
  });
  drawPanel($("reward"), trace, width, {
    most: Math.max(1, peak("reward")),
    lines: [{ at: learning.reward_ceiling, kind: "floor", name: `ceiling ${learning.reward_ceiling}` }],
    line: (step) => step.reward,
    dots: (step) => step.reward,
    held,
  });
  showNotes();
  drawCaps($("caps"), now.caps, settings.max_staleness, {
    width: room.caps,
    most: CAP_MOST,
    ceiling: learning.reward_ceiling,
  });
  showTime();
}

function showNotes() {
  const { trace, summary } = now;
  const { mean_effective: mean, critical_effective: critical, drift_plateau: rest } = summary;
  const against = `effective mismatch ${fixed(mean, 4)}, critical ${fixed(critical, 4)}`;
  $("drift-note").textContent = trace.steps.length
    ? `${against}: ${rest === null ? "no fixed point" : `fixed point ${fixed(rest, 2)} (dashed)`}`
    : "";
  $("drift-note").classList.toggle("lost", rest === null);
  $("mismatch-note").textContent = `floor ${fixed(trace.floor, 4)} (dashed)`;
  $("why").textContent = trace.why_no_step ?? "";
  for (const [id, words] of Object.entries(pictureWords(trace, summary, now.caps))) {
    $(id).setAttribute("aria-label", words);
  }
}

// ---- the link, and what Python said

function openLink() {
  const { settings, problems } = fromHash(location.hash);
  rerun(settings);
  $("problem").hidden = problems.length === 0;
  $("problem").textContent = problemWords(problems);
}

/** Run every recipe as Python did, and say whether the two agree. */
function compareWithPython() {
  const same = (ours, theirs) =>
    ours === theirs || (ours !== null && theirs !== null && Math.abs(ours - theirs) <= 1e-9 * Math.abs(ours));
  let agree = 0;
  for (const row of $("presets").querySelectorAll("tr[data-preset]")) {
    const { settings, outcome } = PAGE.presets[row.dataset.preset];
    const ours = summarize(model(settings), PAGE.constants);
    for (const cell of row.querySelectorAll(".ours")) {
      const value = ours[cell.dataset.outcome];
      cell.textContent = value === null ? "–" : fixed(value, Number(cell.dataset.digits));
    }
    const equal = PAGE.outcome.every((key) => same(ours[key], outcome[key]));
    agree += equal;
    row.querySelector(".same").textContent = equal ? "✓ yes" : "✗ no";
    row.classList.toggle("lost", !equal);
  }
  const all = Object.keys(PAGE.presets).length;
  $("agreement").textContent = agree === all ? `All ${all} agree.` : `${all - agree} of ${all} differ: this page is broken.`;
  $("agreement").classList.toggle("lost", agree !== all);
}

async function copy(button) {
  const words = $(button.dataset.copy);
  getSelection().selectAllChildren(words);
  try {
    await navigator.clipboard.writeText(words.textContent);
    button.textContent = "copied";
  } catch {
    button.textContent = "selected"; // the browser forbids it: the rest is one key
  }
  setTimeout(() => (button.textContent = "copy"), 1500);
}

/** Light or dark: what was chosen, else what the system prefers. */
function showTheme() {
  const { value } = document.querySelector("input[name=theme]:checked");
  document.documentElement.dataset.theme = value === "auto" ? (dark.matches ? "dark" : "light") : value;
}

// ---- events

listenForTime();
form.addEventListener("input", () => change(readControls()));
form.addEventListener("submit", (event) => event.preventDefault());
$("reset").addEventListener("click", () => change({ ...PAGE.start }));
for (const button of document.querySelectorAll("button[data-preset]")) {
  const preset = PAGE.presets[button.dataset.preset].settings;
  const plan = Object.fromEntries(PAGE.plan.map((key) => [key, preset[key]]));
  button.addEventListener("click", () => change({ ...now.settings, ...plan }));
}
$("hold").addEventListener("click", hold);
$("steps").addEventListener("toggle", showSteps);
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.addEventListener("click", () => copy(button));
}
for (const input of document.getElementsByName("theme")) input.addEventListener("change", showTheme);
dark.addEventListener("change", showTheme);
addEventListener("hashchange", openLink);
addEventListener("beforeprint", () => seek(Infinity));
const fit = later(30, () => {
  measure();
  draw();
});
new ResizeObserver(fit).observe($("timeline"));

const { max_staleness, batch, horizon, samplers, weight_sync, seed } = PAGE.start;
$("system").textContent =
  `cap ${max_staleness}, batch ${batch}, ${horizon} horizon, ${samplers} samplers, ` +
  `weight sync ${weight_sync ? "on" : "off"}, seed ${seed}`;
if (narrow.matches) $("Precision").open = false; // the recipes set it
showTheme();
measure();
openLink();
play(false);
setTimeout(compareWithPython, 0);
