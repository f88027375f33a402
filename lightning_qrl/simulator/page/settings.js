// Settings as text: from and to a link, as a command, and which of them have an effect.

const TOLD = 3; // problems of a link that are spelled out

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

/** A link's part after the # -> settings, and what was wrong with it in words, each said once. */
function fromHash(hash) {
  const settings = { ...PAGE.start };
  const problems = new Set();
  const seen = new Set();
  for (const [key, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const spec = PAGE.specs.find((one) => one.key === key);
    try {
      if (!spec) throw new Error(`${shortened(key)} is no setting`);
      if (seen.has(key)) problems.add(`${key} is given more than once, and the last value counts`);
      seen.add(key);
      settings[key] = readValue(spec, text);
    } catch (error) {
      problems.add(error.message);
    }
  }
  return { settings, problems: [...problems] };
}

/** What was wrong with a link, in a line. */
function problemWords(problems) {
  if (!problems.length) return "";
  const told = problems.slice(0, TOLD).join("; ");
  const more = problems.length - TOLD;
  return `In this link ${told}${more > 0 ? `; and ${more} more problems` : ""}. Everything else in it is used.`;
}

const toHash = (settings) => `#${new URLSearchParams(Object.entries(settings))}`;

/** The command that runs the same in a terminal: what is not its default. */
function commandOf(settings) {
  const given = Object.keys(settings).filter((key) => settings[key] !== PAGE.defaults[key]);
  return ["qrl simulate", ...given.map((key) => `${key}=${settings[key]}`)].join(" ");
}

/** Why a setting has no effect beside the others, as Python's `idle` has it; undefined where it has one. */
const whyIdle = (key, { precision }) => PAGE.idle[precision][key];
