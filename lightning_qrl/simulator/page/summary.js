// What came of a run, in a few numbers: `lightning_qrl.simulator.summary`, the fixed point of
// `closed_forms`, and numbers as text. The tests hold it against Python with the model.

/** The effective mismatch above which drift has no fixed point. */
function criticalEffective({ gain, feedback, decay }) {
  return gain * feedback ? decay / (2 * Math.sqrt(gain * feedback)) : Infinity;
}

/** Where the drift comes to rest at a constant effective mismatch; null if nowhere. */
function plateau(effective, { gain, feedback, decay }) {
  const under = decay ** 2 - 4 * gain * feedback * effective ** 2;
  return under < 0 ? null : (2 * gain * effective) / (decay + Math.sqrt(under));
}

/** A number with so many digits as Python writes it: a tie goes to the even digit. */
function fixed(value, digits) {
  const shown = value.toFixed(digits);
  const all = Math.abs(value).toFixed(60); // exact
  const tie = /^50*$/.test(all.slice(all.indexOf(".") + 1 + digits));
  if (!tie || Number(shown.at(-1)) % 2 === 0) return shown;
  return (value - Math.sign(value) * 10 ** -digits / 4).toFixed(digits);
}

/** A trace -> what the page shows of Python's `Summary`. */
function summarize(trace, constants) {
  let effective = 0;
  for (const step of trace.steps) effective += step.effective;
  const meanEffective = effective / Math.max(1, trace.steps.length);
  return {
    optimizer_steps: trace.optimizer_steps,
    final_reward: trace.final_reward,
    final_drift: trace.final_drift,
    diverged_at_step: trace.diverged_at_step,
    quantization_floor: trace.floor,
    mean_effective: meanEffective,
    critical_effective: criticalEffective(constants.learning),
    drift_plateau: plateau(meanEffective, constants.learning),
    mean_staleness: trace.mean_staleness,
    discarded: trace.discarded,
    why_no_step: trace.why_no_step,
  };
}
