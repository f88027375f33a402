// The equations of the reference model, without the simulation: `lightning_qrl.simulator.dynamics` and
// `streams`, in the same order of operations.

/** `streams`: uniform numbers. The products stay below 2^53, so doubles hold them exactly. */
function uniform(state) {
  return () => {
    state = (1664525 * state + 1013904223) % 2 ** 32;
    return state / 2 ** 32;
  };
}

/** `streams`: the state that a stream starts in. */
function firstState(own, seed) {
  let x = Math.imul(own, seed);
  x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
  return (own + ((x ^ (x >>> 16)) >>> 0)) % 2 ** 32;
}

function floorOf(settings, { floors }) {
  const fp4 = settings.precision === "fp4";
  const base = floors.precision.bf16;
  const own = fp4 && settings.four_over_six ? floors.four_over_six : floors.precision[settings.precision];
  let factor = floors.no_tail;
  factor *= settings.bf16_tail ? floors.tail : 1;
  factor *= settings.shared_experts ? floors.shared_experts : 1;
  const plain = fp4 && !settings.four_over_six ? floors.plain_fp4 : 0;
  return base + (own - base) * factor + plain;
}

function mismatchOf(ages, floor, learning) {
  let total = 0;
  let cost = 0;
  for (const age of ages) {
    const own = learning.staleness_scale * age ** learning.staleness_power;
    total += own + floor;
    cost += own;
  }
  const dynamic = cost / ages.length + learning.floor_share * floor;
  const effective = (dynamic * dynamic) / (dynamic + learning.half);
  return { mean: total / ages.length, dynamic, effective };
}

function nextDrift(drift, effective, learning) {
  const grown = learning.gain * effective + learning.feedback * effective * drift * drift;
  return Math.max(0, drift + grown - learning.decay * drift);
}

function nextReward(reward, mean, drift, learning) {
  const kept = Math.max(learning.least_progress, 1 - (mean / learning.mismatch_limit) ** 2);
  const lost = Math.min(learning.drift_cost_limit, learning.drift_cost * drift);
  return reward + learning.reward_rate * (learning.reward_ceiling - reward) * kept * (1 - lost);
}

function collapsedReward(reward, learning) {
  return Math.max(learning.reward_least, learning.collapse * reward - learning.collapse_loss);
}

function divergenceStep(steps, learning) {
  let first = steps.length;
  while (first > 0 && steps[first - 1].drift > learning.divergence) first -= 1;
  return first < steps.length ? first : null;
}
