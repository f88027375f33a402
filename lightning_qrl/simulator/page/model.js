// The reference model in the browser: `lightning_qrl.simulator.reference`, line for line, so that sums
// are added up in the same order; `dynamics.js` has its equations. Both run bare in V8 too, where the
// tests hold them against Python. No number of the model stands here: `constants` is Python's own value
// as JSON, with `due` and `too_old` of `reference`.

/** Run the model: settings -> an object with the fields of Python's `Trace`. */
function simulate(settings, constants) {
  const run = new Run(settings, constants);
  const ticks = Math.round(run.duration / run.times.tick);
  let now = 0;
  for (let tick = 0; tick < ticks; tick += 1) {
    run.tick(now);
    now += run.times.tick;
  }
  return run.trace();
}

const versionOf = (rollout) => (rollout.ticks ? rollout.total / rollout.ticks : rollout.versions[0][1]);

class Run {
  constructor(settings, constants) {
    Object.assign(this, { settings, constants });
    this.times = constants.times;
    this.floor = floorOf(settings, constants);
    [this.h, this.tail] = this.times.horizons[settings.horizon];
    this.factor = this.times.rollout_factor[settings.precision];
    this.stepTime = this.times.step * this.times.step_factor[settings.precision][settings.backward];
    const slope = this.times.window_slope * (this.h - 1);
    this.duration = Math.floor(this.times.window * (1 + slope) + 0.5);
    const streams = constants.seeds.map((own) => uniform(firstState(own, settings.seed)));
    [this.durations, this.kicks, this.noise] = streams;
    this.busy = new Array(settings.samplers).fill(null);
    this.held = new Array(settings.samplers).fill(0); // the version that each sampler has
    Object.assign(this, { rollouts: [], queue: [], steps: [], broadcasts: [] });
    Object.assign(this, { version: 0, drift: 0, training: false, sending: false });
    Object.assign(this, { next: 0, passed: 0 }); // what is due, and ticks that are not counted yet
  }

  tick(now) {
    this.passed += 1;
    if (now < this.next - this.constants.due) return; // only what was due can change what may begin
    this.endRollouts(now);
    this.endStep(now);
    this.discard(now);
    this.train(now);
    this.startRollouts(now);
    this.next = this.nextDue();
  }

  /** When a rollout, the step or the broadcast ends next. */
  nextDue() {
    let due = Infinity;
    for (const rollout of this.busy) if (rollout !== null) due = Math.min(due, rollout.end);
    if (this.training) due = Math.min(due, this.steps.at(-1).end);
    if (this.sending) due = Math.min(due, this.broadcasts.at(-1).end);
    return due;
  }

  endRollouts(now) {
    this.countTicks();
    this.busy.forEach((rollout, sampler) => {
      if (rollout === null || now < rollout.end - this.constants.due) return;
      Object.assign(rollout, { queued: now, fate: "queued" });
      this.queue.push(rollout);
      this.busy[sampler] = null;
    });
  }

  countTicks() {
    this.busy.forEach((rollout, sampler) => {
      if (rollout === null) return;
      rollout.total += this.held[sampler] * this.passed;
      rollout.ticks += this.passed;
    });
    this.passed = 0;
  }

  /** A step ends, and a broadcast starts; it ends, and all samplers have the weights. */
  endStep(now) {
    const { due } = this.constants;
    if (this.training && now >= this.steps.at(-1).end - due) {
      this.training = false;
      this.version += 1;
      if (this.settings.weight_sync) {
        const end = now + this.times.broadcast_per_bit * this.times.bits[this.settings.precision];
        this.broadcasts.push({ start: now, end, version: this.version });
        this.sending = true;
      }
    }
    if (this.sending && now >= this.broadcasts.at(-1).end - due) {
      this.sending = false;
      this.held.fill(this.version);
      for (const rollout of this.busy) {
        if (rollout !== null) rollout.versions.push([now, this.version]);
      }
    }
  }

  discard(now) {
    if (!this.queue.length) return;
    const limit = this.settings.max_staleness + this.constants.too_old;
    this.queue = this.queue.filter((rollout) => {
      const old = this.version - versionOf(rollout) > limit;
      if (old) Object.assign(rollout, { left: now, fate: "discarded" });
      return !old;
    });
  }

  train(now) {
    const { batch } = this.settings;
    if (this.training || this.sending || this.queue.length < batch || now >= this.duration) return;
    this.queue.sort((one, other) => one.end - other.end);
    const taken = this.queue.splice(0, batch);
    for (const rollout of taken) {
      Object.assign(rollout, { left: now, fate: "consumed", step: this.steps.length });
    }
    this.step(now, taken.map((rollout) => Math.max(0, this.version - versionOf(rollout))));
    this.training = true;
  }

  step(now, ages) {
    const { learning } = this.constants;
    const of = mismatchOf(ages, this.floor, learning);
    const kick = this.kick();
    this.drift = Math.min(nextDrift(this.drift, of.effective, learning) + kick, learning.drift_limit);
    this.steps.push({
      start: now,
      end: now + this.stepTime,
      version: this.version,
      ages,
      staleness: ages.reduce((sum, age) => sum + age, 0) / ages.length,
      mismatch: of.mean,
      dynamic: of.dynamic,
      effective: of.effective,
      kick,
      drift: this.drift,
      shown: of.mean + learning.drift_in_mismatch * this.drift,
      reward: null,
    });
  }

  /** One draw, always; FP4 alone uses it. */
  kick() {
    const draw = this.kicks();
    const { precision, backward, four_over_six } = this.settings;
    const { high_precision_kick, plain_kick } = this.constants;
    let bound = 0;
    for (const [kick, may] of [
      [high_precision_kick, backward === "high_precision"],
      [plain_kick, !four_over_six],
    ]) {
      if (precision !== "fp4" || !may) continue;
      if (bound <= draw && draw < bound + kick.probability) return kick.size;
      bound += kick.probability;
    }
    return 0;
  }

  startRollouts(now) {
    const { batch, samplers, max_staleness, weight_sync } = this.settings;
    if (this.duration - now < this.times.last_start || this.queue.length >= batch) return;
    let waiting = this.queue.length;
    for (const rollout of this.busy) if (rollout !== null) waiting += 1;
    for (let sampler = 0; sampler < samplers; sampler += 1) {
      if (this.busy[sampler] !== null) continue;
      if (max_staleness === 0 && (this.training || this.sending || waiting >= batch)) return;
      if (!weight_sync) this.held[sampler] = this.version;
      const rollout = {
        sampler,
        start: now,
        end: Math.min(now + this.rolloutTime(), this.duration),
        versions: [[now, this.held[sampler]]],
        total: 0, // of versions, over its ticks
        ticks: 0,
        queued: null,
        fate: "running",
        left: null,
        step: null,
      };
      this.busy[sampler] = rollout;
      this.rollouts.push(rollout);
      waiting += 1;
    }
  }

  rolloutTime() {
    const { draw_share, rollout_least, rollout_extra_limit } = this.times;
    const extra = -this.tail * Math.log(1 - draw_share * this.durations());
    return (rollout_least + Math.min(rollout_extra_limit, extra)) * this.factor * this.h;
  }

  trace() {
    this.countTicks();
    const { learning } = this.constants;
    const diverged = divergenceStep(this.steps, learning);
    this.reward(diverged);
    const ages = this.steps.flatMap((step) => step.ages);
    return {
      settings: this.settings,
      duration: this.duration,
      floor: this.floor,
      rollouts: this.rollouts.map(({ total, ticks, ...rollout }) => ({
        ...rollout,
        version: ticks ? total / ticks : rollout.versions[0][1],
      })),
      steps: this.steps,
      broadcasts: this.broadcasts,
      diverged_at_step: diverged,
      final_reward: this.steps.length ? this.steps.at(-1).reward : learning.reward_start,
      final_drift: this.drift,
      mean_staleness: ages.length ? ages.reduce((sum, age) => sum + age, 0) / ages.length : 0,
      discarded: this.rollouts.filter((rollout) => rollout.fate === "discarded").length,
      sampler_utilization: this.sampling() / this.duration / this.settings.samplers,
      trainer_utilization: this.trained() / this.duration,
      why_no_step: this.steps.length ? null : this.whyNoStep(),
      optimizer_steps: this.steps.length,
    };
  }

  /** Rewards are known at the end: whether a run has diverged is. */
  reward(diverged) {
    const { learning } = this.constants;
    let reward = learning.reward_start;
    this.steps.forEach((step, number) => {
      reward =
        diverged !== null && number >= diverged
          ? collapsedReward(reward, learning)
          : nextReward(reward, step.mismatch, step.drift, learning);
      reward += (this.noise() - 0.5) * learning.reward_noise;
      step.reward = reward;
    });
  }

  /** Time that samplers were at work, all together. */
  sampling() {
    return this.rollouts.reduce((time, { start, queued }) => time + ((queued ?? this.duration) - start), 0);
  }

  trained() {
    return this.steps.reduce((time, { start, end }) => time + (Math.min(end, this.duration) - start), 0);
  }

  whyNoStep() {
    const ended = this.rollouts.filter((rollout) => rollout.queued !== null).length;
    return (
      `no optimizer step: ${ended} rollouts end in ${this.duration} units of time, and a ` +
      `batch has ${this.settings.batch}; take a smaller batch, more samplers, a faster ` +
      "precision or a shorter horizon"
    );
  }
}
