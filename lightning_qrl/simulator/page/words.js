// A run in words: what is under the pointer, what pictures say to those who do not see them, and the
// table of steps.

function rolloutWords({ sampler, start, end, version, fate, step, versions }) {
  const came = { consumed: `taken by step ${step}`, discarded: "discarded: too old", queued: "still queued at the end", running: "cut by the end" }[fate];
  const weights = versions.length > 1 ? `versions ${versions[0][1]} to ${versions.at(-1)[1]}, mean ${fixed(version, 2)}` : `version ${fixed(version, 0)}`;
  return `sampler ${sampler}, ${fixed(start, 1)} to ${fixed(end, 1)}, weights ${weights}; ${came}`;
}

const stepWords = ({ staleness, mismatch, drift, reward, kick }, number) =>
  `step ${number}: ${fixed(staleness, 2)} versions behind, mismatch ${fixed(mismatch, 4)}, ` +
  `drift ${fixed(drift, 2)}${kick ? ` (kick ${kick})` : ""}, reward ${fixed(reward, 3)}`;

const verdictWords = ({ diverged_at_step }) =>
  diverged_at_step === null ? "stable" : `diverged at step ${diverged_at_step}`;

/** The outcome in a sentence. */
function outcomeWords(summary) {
  const { optimizer_steps, final_reward, final_drift, why_no_step } = summary;
  const numbers = `${optimizer_steps} steps, reward ${fixed(final_reward, 3)}, drift ${fixed(final_drift, 2)}`;
  return why_no_step ?? `${numbers}, ${verdictWords(summary)}`;
}

/** What each picture shows: its label by its id. */
function pictureWords(trace, summary, caps) {
  const { samplers } = trace.settings;
  const last = trace.steps.at(-1);
  const verdict = verdictWords(summary);
  const range = (key) => `from ${fixed(trace.steps[0][key], 3)} to ${fixed(last[key], 3)} in ${trace.steps.length} steps`;
  return {
    timeline:
      `Timeline: ${samplers} sampler${samplers > 1 ? "s" : ""}, ${fixed(100 * trace.sampler_utilization, 0)}% at work; ` +
      `${trace.rollouts.length} rollouts, ${trace.discarded} discarded, consumed ${fixed(trace.mean_staleness, 2)} versions ` +
      `behind; trainer ${fixed(100 * trace.trainer_utilization, 0)}% at work, ${trace.steps.length} steps, ${verdict}`,
    mismatch: last ? `Mismatch ${range("shown")}, floor ${fixed(trace.floor, 4)}` : "Mismatch: no step",
    drift: last ? `Drift ${range("drift")}, diverges above ${PAGE.constants.learning.divergence}: ${verdict}` : "Drift: no step",
    reward: last ? `Reward ${range("reward")}` : "Reward: no step",
    caps: `Final reward at each staleness cap: ${caps
      .map((run, cap) => `${cap}: ${fixed(run.final_reward, 2)}${run.diverged_at_step === null ? "" : ", diverged"}`)
      .join("; ")}`,
  };
}

/** Every step as a row of numbers. */
function stepRows({ steps }) {
  const cells = (step) => [
    fixed(step.start, 1), fixed(step.staleness, 2), fixed(step.mismatch, 4), fixed(step.shown, 4),
    step.kick || "–", fixed(step.drift, 2), fixed(step.reward, 3),
  ];
  return steps
    .map((step, number) => `<tr><th scope="row">${number}</th>${cells(step).map((cell) => `<td>${cell}</td>`).join("")}</tr>`)
    .join("");
}
