// Time: what goes on at a moment, the player, and what is under the pointer. `now`, `room` and `lanes`
// are the page's state, in `page.js`.

function showTime() {
  const { trace, time } = now;
  const x = scaleOf(trace.duration, room.width)(time);
  for (const picture of pictures) movePresent(picture, room.width, x);
  $("time").value = time;
  $("clock").value = `${fixed(time, 1)} of ${trace.duration}`;
  const moment = momentOf(trace, time);
  $("now").innerHTML = moment.map((part) => `<span>${part}</span>`).join("");
  if (now.playing) return; // a reader would say every frame
  const [, , trainer, , so] = moment.map((part) => part.replace(/<[^>]*>/g, ""));
  $("time").setAttribute("aria-valuetext", `${$("clock").value}, ${trainer}, ${so}`);
}

/** What goes on at a time, in a few parts; at the end, with the numbers of the outcome. */
function momentOf({ settings, rollouts, steps, broadcasts, duration }, at) {
  const over = at >= duration;
  const time = Math.min(at, duration - PAGE.constants.times.tick);
  const during = ({ start, end }) => start <= time && time < end;
  const busy = rollouts.filter((one) => one.start <= time && time < endOf(one, duration)).length;
  const queued = rollouts.filter((one) => one.queued !== null && one.queued <= time && time < (one.left ?? Infinity));
  const step = steps.findIndex(during);
  const done = steps.filter((one) => one.end <= time);
  const sends = broadcasts.some(during);
  const trainer = step >= 0 ? `step ${step}${over ? ", cut" : ""}` : sends ? "weights on their way" : "waits";
  const last = over ? steps.length - 1 : done.length - 1;
  const so = last < 0 ? "no step yet" : `after step ${last}: drift <b>${fixed(steps[last].drift, 2)}</b>, reward <b>${fixed(steps[last].reward, 3)}</b>`;
  return [
    `samplers: <b>${busy}</b> of ${settings.samplers} write`,
    `queue: <b>${queued.length}</b>, batch ${settings.batch}`,
    `trainer: <b>${trainer}</b>`,
    `weights: version <b>${done.length}</b>`,
    so,
  ];
}

function seek(time) {
  now.time = Math.min(Math.max(0, time), now.trace.duration);
  showTime();
}

function play(on) {
  if (on && now.time >= now.trace.duration) now.time = 0;
  now.playing = on;
  $("play").setAttribute("aria-label", on ? "Pause" : "Play");
  $("play").querySelector("path").setAttribute("d", on ? "M2 1h3v10h-3zM7 1h3v10h-3z" : "M2.5 1l8 5-8 5z");
  let before = null;
  const frame = (at) => {
    if (!now.playing || now.run !== run) return;
    before ??= at;
    if (at - before >= (calm.matches ? 500 : 0)) {
      seek(now.time + ((at - before) / 1000) * Number($("speed").value));
      before = at;
    }
    if (now.time >= now.trace.duration) play(false);
    else requestAnimationFrame(frame);
  };
  if (!on) showTime();
  const run = {}; // a later call of play ends this one
  now.run = run;
  if (on) requestAnimationFrame(frame);
}

/** The time under a pointer on a picture. */
const timeAt = (event) => {
  const { left, width } = event.currentTarget.getBoundingClientRect();
  return ((event.clientX - left - LEFT) / (width - LEFT - RIGHT)) * now.trace.duration;
};

/** What is under a pointer on the timeline, in words. */
function underPointer(event) {
  const { rollouts, steps, duration } = now.trace;
  const time = timeAt(event);
  const y = event.clientY - event.currentTarget.getBoundingClientRect().top;
  if (y >= lanes.trainer) {
    const number = steps.findIndex(({ start, end }) => start <= time && time < end);
    return number < 0 ? "" : stepWords(steps[number], number);
  }
  const under = rollouts.find(
    (one) =>
      one.start <= time && time < endOf(one, duration) &&
      lanes.top(one.sampler) <= y && y <= lanes.top(one.sampler) + lanes.bar,
  );
  return under ? rolloutWords(under) : "";
}

function showTip(event, words) {
  const tip = $("tip");
  tip.hidden = words === "";
  tip.textContent = words;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, room))}px`;
  tip.style.top = `${event.clientY + 16}px`;
}

/** Buttons, keys and pointers that move time. */
function listenForTime() {
  $("play").addEventListener("click", () => play(!now.playing));
  $("time").addEventListener("input", () => seek($("time").valueAsNumber));
  for (const picture of pictures) {
    picture.addEventListener("pointerdown", (event) => {
      picture.setPointerCapture(event.pointerId);
      seek(timeAt(event));
    });
    picture.addEventListener("pointermove", (event) => {
      if (event.buttons) seek(timeAt(event));
      else if (picture.id === "timeline") showTip(event, underPointer(event));
    });
  }
  $("timeline").addEventListener("pointerleave", (event) => showTip(event, ""));
  document.addEventListener("keydown", (event) => {
    const free = event.target === document.body || event.target.closest("svg, .wide");
    if (event.key !== " " || !free) return;
    event.preventDefault();
    play(!now.playing);
  });
}
