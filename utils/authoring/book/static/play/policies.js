// The widgets of chapters 2 and 6: what policies write in a review, after more and more training.
"use strict";

// --- What a review is worth ----------------------------------------------------------------------

const findWords = (text) => text.toLowerCase().match(/[a-z]+/g) ?? [];

/** Return good words minus bad words, by their number: chapter 2's `reward_fn_sentiment`. */
function calcSentiment(text, { positive, negative }) {
  const count = (list) => findWords(text).filter((word) => list.includes(word)).length;
  const [good, bad] = [count(positive), count(negative)];
  return (good - bad) / Math.max(good + bad, 1);
}

/** Return what chapter 6's simulated person thinks of it, `reward_fn_true`: each mood word counts
 * once, and each repetition costs 1. */
function calcTrueReward(text, { positive, negative }) {
  const weights = new Map([
    ...positive.map((word, i) => [word, 1.5 - i / 14]),
    ...negative.map((word, i) => [word, -1.5 + i / 14]),
  ]);
  const moods = findWords(text).filter((word) => weights.has(word));
  const once = new Set(moods);
  return [...once].reduce((sum, word) => sum + weights.get(word), once.size - moods.length);
}

const countStops = (text) => text.split(".").length - 1;

/** Return how a line shows a number: as its mark, in the colour of its sign. */
function markNumber(value, meaning) {
  const kind = value > 0 ? "right" : value < 0 ? "wrong" : "neither";
  return { kind, mark: formatSigned(value), meaning: `${meaning} ${formatSigned(value)}` };
}

/** Return a number with its sign and one digit, and zero without a sign. */
function formatSigned(value) {
  const digits = Math.abs(value).toFixed(1);
  return digits === "0.0" ? digits : `${value > 0 ? "+" : "−"}${digits}`;
}

// --- Parts ---------------------------------------------------------------------------------------

const BEGINNINGS = ["For me the pace", "I found the acting", "To be honest the acting", "The cast"];

const average = (samples, value) => mean(samples.map(value));

/**
 * Add what shows a policy on reviews: a choice of their beginning, what `addControls(root, update)`
 * adds, figures and eight samples. `getJob` says the policy; `measure` and `judge` are addSamples's;
 * `finish` gets the samples and their lines.
 */
function addReviews(root, { beginnings, addControls, names, title, measure, judge, note, ...options }) {
  const { length = 40, drawFirst, finish = () => {} } = options;
  let seed = 0;
  const choices = Object.fromEntries(beginnings.map((text) => [text, `“${text}”`]));
  const prompt = addChoice(root, "Reviews that begin with", choices, update);
  const getJob = addControls(root, update);
  addButton(root, "Sample again", () => { seed += 1; update(); });
  const sample = addSamples(root, { names, count: 8, title, drawFirst });
  root.append(make("p", {}, make("small", {}, note)));

  async function update() {
    const job = { prompt: prompt.value, seed, length, ...getJob() };
    const done = await sample(job, measure, judge);
    if (done) finish(done);
  }

  return update();
}

/** Tint each token of a sample by the KL of the state in which it was chosen, up to 2 nats. */
function tintTokens(line, sampled, texts) {
  const tokens = sampled.map(({ token, kl }) => {
    const span = make("span", { class: "play-token" }, texts[token].replaceAll("\n", "⏎"));
    span.style.setProperty("--kl", Math.min(kl / 2, 1));
    span.title = `KL ${kl.toFixed(2)}`;
    return span;
  });
  line.replaceChildren(line.firstChild, ...tokens);
}

/** Add a plot of two series: {key: [name, lowest, highest]}. The returned function puts in their
 * points at one of `count` places, in place of those that are there. */
function addTrace(root, count, series) {
  const legend = Object.entries(series).map(([key, [name, low, high]]) =>
    make("span", { "data-series": key }, `${name} (${low} to ${high}) `));
  const plot = make("div", { class: "play-trace", "aria-hidden": "true" });
  root.append(make("p", { class: "play-label" }, ...legend), plot);
  return (at, values) => {
    plot.querySelectorAll(`[data-at="${at}"]`).forEach((dot) => dot.remove());
    for (const [key, [, low, high]] of Object.entries(series)) {
      const dot = make("i", { "data-series": key, "data-at": at });
      dot.style.setProperty("--x", at / (count - 1));
      dot.style.setProperty("--y", Math.min(Math.max((values[key] - low) / (high - low), 0), 1));
      plot.append(dot);
    }
  };
}

// --- The widgets ---------------------------------------------------------------------------------

const PPO_PHASES = [0, 2, 3, 4, 6, 10, 30];
const STOPS_PHASES = [0, 2, 6, 10, 12, 16, 30];
const OVER_PHASES = [0, 3, 6, 12, 21, 30, 60];

Object.assign(WIDGETS, {
  /** Reviews along PPO on their sentiment, each token tinted by its KL. */
  "ch2-mood"(root, { texts, words }) {
    return addReviews(root, {
      beginnings: BEGINNINGS,
      length: 30,
      names: { mood: "mean sentiment" },
      title: "8 reviews, each with its sentiment; the more tinted a token, the larger its KL:",
      note: "The demonstration’s run with seed 0.",
      addControls(parent, update) {
        const getPolicy = addPhases(parent, PPO_PHASES, update);
        return () => ({ policy: getPolicy("ch2_ppo") });
      },
      measure: (samples) => ({
        mood: formatSigned(average(samples, ({ text }) => calcSentiment(text, words))),
      }),
      judge: (text) => markNumber(calcSentiment(text, words), "sentiment"),
      finish: ({ samples, lines }) =>
        samples.forEach(({ sampled }, i) => tintTokens(lines[i], sampled, texts)),
    });
  },

  /** Reviews along PPO on full stops, with a KL term and without. */
  "ch2-stops"(root) {
    return addReviews(root, {
      beginnings: ["This movie is", ...BEGINNINGS],
      length: 24,
      names: { stops: "full stops" },
      title: "8 reviews of up to 24 tokens, each with its full stops:",
      note: "Seed 1 of section 11’s three, trained again for this page.",
      addControls(parent, update) {
        const families = { ch2_stops: "none", ch2_stops_kl: "kl_coef 0.2, in the loss" };
        const family = addChoice(parent, "KL term:", families, update);
        const getPolicy = addPhases(parent, STOPS_PHASES, update);
        return () => ({ policy: getPolicy(family.value) });
      },
      measure: (samples) => ({
        stops: average(samples, ({ text }) => countStops(text)).toFixed(1),
      }),
      judge: (text) => {
        const stops = String(countStops(text));
        return { kind: "neither", mark: stops, meaning: `${stops} full stops` };
      },
    });
  },

  /** What the reward model and the person think of a policy that was trained to please the first. */
  "ch6-over"(root, { words }) {
    const getTruth = ({ text }) => calcTrueReward(text, words);
    const measure = (samples) => ({
      proxy: average(samples, ({ reward }) => reward), truth: average(samples, getTruth),
    });
    let at, trace;
    return addReviews(root, {
      beginnings: BEGINNINGS,
      names: { proxy: "reward model’s reward", truth: "true reward" },
      title: "8 reviews, each with its true reward:",
      note: "Seed 1 of the three recorded, trained again for this page. Each dot is the mean of the 8.",
      drawFirst: (parent) => {
        const series = { proxy: ["● reward model", 0, 1.5], truth: ["◆ truth", 0, 6] };
        trace = addTrace(parent, OVER_PHASES.length, series);
        return () => {};
      },
      addControls(parent, update) {
        const getPolicy = addPhases(parent, OVER_PHASES, update);
        const slider = parent.querySelector("input[type=range]");
        return () => {
          at = slider.valueAsNumber;
          return { judge: "ch6_reward-model", policy: getPolicy("ch6_over") };
        };
      },
      measure: (samples) => {
        const { proxy, truth } = measure(samples);
        return { proxy: formatSigned(proxy), truth: formatSigned(truth) };
      },
      judge: (text) => markNumber(calcTrueReward(text, words), "true reward"),
      finish: ({ samples }) => trace(at, measure(samples)),
    });
  },

  /** Policies trained by DPO with a smaller and smaller beta. */
  "ch6-beta"(root, { words }) {
    const betas = ["base", "1.0", "0.5", "0.2", "0.1", "0.05"];
    return addReviews(root, {
      beginnings: BEGINNINGS,
      names: { truth: "true reward" },
      title: "8 reviews, each with its true reward:",
      note: "Seed 1 of the three recorded, trained again for this page.",
      addControls(parent, update) {
        const slider = addSlider(parent, "β of DPO", {
          min: 0, max: betas.length - 1, step: 1, value: 0,
          format: (i) => betas[i],
          ticks: betas.map((beta, i) => [i, beta]),
        }, update);
        return () => {
          const i = slider.valueAsNumber;
          return { policy: { adapter: i ? `ch6_dpo-${betas[i]}` : null } };
        };
      },
      measure: (samples) => ({
        truth: formatSigned(average(samples, ({ text }) => calcTrueReward(text, words))),
      }),
      judge: (text) => markNumber(calcTrueReward(text, words), "true reward"),
    });
  },
});
