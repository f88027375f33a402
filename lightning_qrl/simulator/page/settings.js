// Settings as text: from and to a link, as a command, and which of them have an effect.

/** The value that a text stands for; throws what is wrong with it. */
function readValue(spec, text) {
  const { key, choices, least, most } = spec;
  if (choices) {
    const value = choices.find((choice) => String(choice) === text);
    if (value === undefined) throw new Error(`${key} is ${choices.join(" or ")}, got ${shortened(text)}`);
    return value;
  }
  if (!/^\d{1,10}$/.test(text)) throw new Error(`${key} is a whole number, got ${shortened(text)}`);
  const value = Number(text);
  if (value < least || value > most) {
    throw new Error(`${key} goes from ${least} to ${most} on this page, got ${shortened(text)}`);
  }
  return value;
}

const shortened = (text) => (text.length > 24 ? `${text.slice(0, 24)}…` : text || "nothing");

/** A link's part after the # -> settings, and what was wrong with it in words. */
function fromHash(hash) {
  const settings = { ...PAGE.start };
  const problems = [];
  for (const [key, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const spec = PAGE.specs.find((one) => one.key === key);
    try {
      if (!spec) throw new Error(`${shortened(key)} is no setting`);
      settings[key] = readValue(spec, text);
    } catch (error) {
      problems.push(error.message);
    }
  }
  return { settings, problems };
}

const toHash = (settings) => `#${new URLSearchParams(Object.entries(settings))}`;

/** The command that runs the same in a terminal: what is not its default. */
function commandOf(settings) {
  const given = Object.keys(settings).filter((key) => settings[key] !== PAGE.defaults[key]);
  return ["qrl simulate", ...given.map((key) => `${key}=${settings[key]}`)].join(" ");
}

/** Why a setting has no effect beside the others; an empty text where it has one. */
function whyIdle(key, settings, constants) {
  const { precision } = settings;
  if (key === "four_over_six" && precision !== "fp4") return "No effect outside of FP4.";
  if (precision === "bf16" && (key === "bf16_tail" || key === "shared_experts")) {
    return "No effect: all of it is BF16.";
  }
  const { high_precision, dequantized } = constants.times.step_factor[precision];
  if (key === "backward" && precision === "bf16" && high_precision === dequantized) {
    return "No effect: nothing was quantized.";
  }
  return "";
}
