// Drawing: the timeline, the panels below it on the same axis of time, and the strip of caps. Each is
// an SVG in units of CSS pixels, with one path for all that has one colour, so that a redraw is a
// handful of elements. Colours are classes of `page.css`. Text goes in by `escaped` alone.

const LEFT = 50; // px beside every picture, for names and ticks
const RIGHT = 8;
const LANES = 132; // px of all samplers
const BEHIND = 6; // colours

const escaped = (text) =>
  String(text).replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
const px = (value) => Math.round(value * 10) / 10;
const box = (x, y, width, height) => `M${px(x)} ${px(y)}h${px(Math.max(0.5, width))}v${px(height)}h-${px(Math.max(0.5, width))}z`;
const path = (kind, d) => (d ? `<path class="${kind}" d="${d}"/>` : "");
const text = (x, y, words, kind = "") => `<text class="${kind}" x="${px(x)}" y="${px(y)}">${escaped(words)}</text>`;

/** From time to px, for a picture that is so wide. */
const scaleOf = (duration, width) => (time) => LEFT + (Math.min(time, duration) / duration) * (width - LEFT - RIGHT);

/** A few round numbers from 0 to `most`. */
function ticksTo(most, wanted) {
  const raw = most / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw - 1e-12) * power;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, number) => number * step);
}

/** What is drawn, a veil over what is in the future, what it must not hide, and a line at the present. */
function put(svg, width, height, parts, labels = []) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.innerHTML =
    parts.join("") +
    `<rect class="veil" x="${LEFT}" y="0" width="0" height="${height}"/>` +
    labels.join("") +
    `<line class="present" y1="0" y2="${height}"/>`;
}

/** Move the veil and the line of a picture to a time. */
function movePresent(svg, width, x) {
  const [veil, line] = [svg.querySelector(".veil"), svg.querySelector(".present")];
  veil.setAttribute("x", px(x));
  veil.setAttribute("width", x < width - RIGHT ? px(width - x) : 0);
  line.setAttribute("x1", px(x));
  line.setAttribute("x2", px(x));
}

const endOf = (rollout, duration) => rollout.queued ?? Math.min(rollout.end, duration);
const movesOf = (trace) => trace.steps.map((step) => step.end).filter((end) => end < trace.duration);

/** What a rollout was sampled with: stretches of [from, to, versions behind the trainer]. */
function stretches(rollout, moves, duration) {
  const end = endOf(rollout, duration);
  const cuts = [...moves, ...rollout.versions.map(([time]) => time)]
    .filter((time) => time > rollout.start && time < end)
    .sort((one, other) => one - other);
  let from = rollout.start;
  let trainer = 0;
  return [...cuts, end].map((to) => {
    const middle = (from + to) / 2;
    while (moves[trainer] <= middle) trainer += 1;
    const held = rollout.versions.findLast(([time]) => time <= middle)[1];
    const stretch = [from, to, Math.max(0, trainer - held)];
    from = to;
    return stretch;
  });
}

/** Samplers, queue and trainer. */
function drawTimeline(svg, trace, width) {
  const { samplers, batch } = trace.settings;
  const x = scaleOf(trace.duration, width);
  const lane = LANES / samplers;
  const bar = Math.min(lane * 0.8, 30);
  const top = (sampler) => 14 + sampler * lane + (lane - bar) / 2;
  const queue = 14 + LANES + 8;
  const trainer = queue + 34 + 10;
  const moves = movesOf(trace);
  const behind = Array(BEHIND).fill("");
  let gone = "";
  for (const rollout of trace.rollouts) {
    const parts = stretches(rollout, moves, trace.duration);
    for (const [from, to, versions] of parts) {
      const last = to === parts.at(-1)[1] ? 1 : 0; // a gap to the next rollout
      behind[Math.min(versions, BEHIND - 1)] += box(x(from), top(rollout.sampler), x(to) - x(from) - 1.4 * last, bar);
    }
    if (rollout.fate !== "discarded") continue;
    gone += box(x(rollout.start), top(rollout.sampler), x(parts.at(-1)[1]) - x(rollout.start) - 1.4, bar);
  }
  const idle = Array.from({ length: samplers }, (_, sampler) =>
    box(LEFT, top(sampler), width - LEFT - RIGHT, bar),
  ).join("");
  const every = Math.ceil(12 / lane);
  const names = Array.from({ length: samplers }, (_, sampler) =>
    sampler % every ? "" : text(LEFT - 6, top(sampler) + bar / 2 + 4, sampler, "end"),
  );
  put(svg, width, trainer + 26 + 18, [
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">' +
      '<rect class="hatched" width="2.2" height="5"/></pattern></defs>',
    path("wait", idle + box(LEFT, trainer, width - LEFT - RIGHT, 26)),
    path("move", moves.map((time) => `M${px(x(time))} 12V${trainer + 26}`).join("")),
    text(2, 10, samplers > 1 ? "samplers" : "sampler", "head"),
    ...names,
    ...behind.map((d, versions) => path(`behind-${versions}`, d)),
    path("gone", gone),
    ...drawQueue(trace, x, queue, batch),
    ...drawTrainer(trace, x, trainer),
  ], drawTimes(trace, x, trainer + 26, width));
  return { top, bar, trainer };
}

/** How many rollouts wait, as a stepped area. */
function drawQueue(trace, x, top, batch) {
  const changes = trace.rollouts
    .filter((rollout) => rollout.queued !== null)
    .flatMap((rollout) => [
      [rollout.queued, 1],
      [rollout.left ?? trace.duration, -1],
    ])
    .sort(([one, up], [other, down]) => one - other || down - up);
  let waiting = 0;
  let most = batch;
  const points = changes.map(([time, change]) => {
    waiting += change;
    most = Math.max(most, waiting);
    return [time, waiting];
  });
  const y = (count) => px(top + 34 - (count / most) * 32);
  const area = points.map(([time, count]) => `H${px(x(time))}V${y(count)}`).join("");
  return [
    text(LEFT - 6, top + 30, "queue", "end"),
    path("queue", `M${LEFT} ${y(0)}${area}H${px(x(trace.duration))}V${y(0)}z`),
    path("limit thin", `M${LEFT} ${y(batch)}H${px(x(trace.duration))}`),
  ];
}

/** Optimizer steps and broadcasts. */
function drawTrainer(trace, x, top) {
  const { steps, broadcasts, diverged_at_step: diverged } = trace;
  const late = (number) => diverged !== null && number >= diverged;
  const bars = steps.map(({ start, end }) => box(x(start), top, x(end) - x(start) - 1, 26));
  const numbers = steps.map(({ start, end }, number) => {
    const middle = (x(start) + x(end)) / 2;
    const room = x(end) - x(start) - 4;
    return room < 6.5 * `${number}`.length ? "" : text(middle, top + 17, number, "mid onbar");
  });
  const sends = broadcasts.map(({ start, end }) => box(x(start), top, x(end) - x(start), 26));
  return [
    text(LEFT - 6, top + 17, "trainer", "end"),
    path("step", bars.filter((_, number) => !late(number)).join("")),
    path("late", bars.filter((_, number) => late(number)).join("")),
    path("send", sends.join("")),
    ...numbers,
  ];
}

function drawTimes(trace, x, top, width) {
  return ticksTo(trace.duration, Math.max(3, width / 110)).map((time) => {
    const last = x(time) > width - RIGHT - 8;
    return text(x(time), top + 14, px(time), last ? "end tick" : "mid tick");
  });
}

/**
 * One number of every step over time. `lines` are levels, with or without a name; `line` is drawn
 * through the steps and `dots` on them: both give a step's number. `marks` tells of a kick. `held` is
 * another run, with a line of its own.
 */
function drawPanel(svg, trace, width, { most, lines = [], line, dots, marks = () => false, held }) {
  const height = 112;
  const bottom = height - 4;
  const x = scaleOf(trace.duration, width);
  const y = (value) => px(bottom - (Math.min(value, most) / most) * (bottom - 14));
  const { steps, diverged_at_step: diverged } = trace;
  const points = steps.map((step, number) => [x(step.end), step, number]);
  const drawn = (of, all) =>
    all.map((step, number) => `${number ? "L" : "M"}${px(x(step.end))} ${y(of(step))}`).join("");
  const dot = (at, value) => `M${px(at - 2.4)} ${y(value)}a2.4 2.4 0 1 0 4.8 0a2.4 2.4 0 1 0 -4.8 0`;
  const onSteps = (late) =>
    points
      .filter(([, , number]) => late === (diverged !== null && number >= diverged))
      .map(([at, step]) => dot(at, dots(step)))
      .join("");
  const kicks = points
    .filter(([, step]) => marks(step))
    .map(([at, step]) => `M${px(at - 4)} ${y(dots(step)) - 5}h8l-4 -7z`);
  put(svg, width, height, [
    diverged === null ? "" : path("after", box(x(steps[diverged].end), 10, width - RIGHT - x(steps[diverged].end), bottom - 10)),
    ...ticksTo(most, 3).map((tick) => path("grid", `M${LEFT} ${y(tick)}H${width - RIGHT}`) +
        text(LEFT - 6, y(tick) + 4, Number(tick.toPrecision(3)), "end tick")),
    ...lines.map(({ at, kind }) => (at <= most ? path(kind, `M${LEFT} ${y(at)}H${width - RIGHT}`) : "")),
    path("held", drawn(line, held?.trace.steps.filter(({ start }) => start < trace.duration) ?? [])),
    path("line", drawn(line, steps)),
    path("dots", onSteps(false)),
    path("dots late", onSteps(true)),
    path("kick", kicks.join("")),
  ], lines.map(({ at, name }) => (name && at <= most ? text(LEFT + 5, y(at) - 4, name, "haloed") : "")));
}

/** Steps and drift, thin: what stays in sight over the controls where the screen is narrow. */
function drawStrip(svg, trace, width, most, limit) {
  const { steps, diverged_at_step: diverged } = trace;
  const x = scaleOf(trace.duration, width);
  const y = (value) => px(34 - (Math.min(value, most) / most) * 32);
  const bars = steps.map(({ start, end }) => box(x(start), 38, x(end) - x(start) - 1, 6));
  const from = diverged ?? steps.length;
  put(svg, width, 48, [
    path("limit", `M${LEFT} ${y(limit)}H${width - RIGHT}`),
    path("line", steps.map((step, number) => `${number ? "L" : "M"}${px(x(step.end))} ${y(step.drift)}`).join("")),
    path("step", bars.slice(0, from).join("")),
    path("late", bars.slice(from).join("")),
  ], [text(LEFT - 6, 23, "drift", "end tick"), text(LEFT - 6, 45, "steps", "end tick")]);
}

/** Final reward at each cap, above the stops of the slider. */
function drawCaps(svg, runs, cap, { width, most, ceiling }) {
  const inset = 8; // half of the slider's thumb
  const step = (width - 2 * inset) / Math.max(1, most);
  const bar = Math.min(15, step * 0.66);
  const bars = runs.map((run, number) => {
    const height = Math.max(1.5, (run.final_reward / ceiling) * 34);
    const kind = run.diverged_at_step === null ? "stable" : "lost";
    const chosen = number === cap ? " chosen" : "";
    const middle = inset + number * step;
    return (
      path(`${kind}${chosen}`, box(middle - bar / 2, 48 - height, bar, height)) +
      (step < 20 ? "" : text(middle, 44 - height, fixed(run.final_reward, 2).replace("0.", "."), `mid tick${chosen}`)) +
      (kind === "lost" ? text(middle, 60, "×", "mid cross") : "")
    );
  });
  svg.setAttribute("viewBox", `0 0 ${width} 62`);
  svg.setAttribute("height", 62);
  svg.innerHTML = bars.join("");
}
