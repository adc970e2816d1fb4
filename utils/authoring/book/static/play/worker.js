// What the worker does: holds the models, and runs one job after another for the page's widgets.
"use strict";

function work(engine) {
  const newest = {}; // the latest job of each widget: the ones before it stop
  const adapters = {};
  const policies = new Map();
  const directions = new Map();
  let tokenizer, base;

  const readBase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt());

  /** Return the model that a job asks for: {adapter, strength, sites, rank}; the base without. */
  function getPolicy({ adapter = null, ...options } = {}) {
    if (!adapter) return base;
    const key = JSON.stringify([adapter, options]);
    if (!policies.has(key)) {
      if (policies.size > 8) policies.clear();
      policies.set(key, base.withAdapter(adapters[adapter], options));
    }
    return policies.get(key);
  }

  /**
   * Return what steers the base: after the block `layer`, `scale` times the mean difference that
   * the adapter makes there at the last token of these prompts. Null where nothing is asked for.
   */
  function getPush(steer) {
    if (!steer) return null;
    const key = JSON.stringify([steer.adapter, steer.prompts]);
    if (!directions.has(key)) {
      const policy = getPolicy({ adapter: steer.adapter });
      const runs = steer.prompts.map((prompt) => {
        const tokens = tokenizer.encode(prompt);
        return [policy.read(tokens).stream, base.read(tokens).stream];
      });
      const found = base.blocks.map((_, layer) =>
        new Float32Array(base.width).map((_, i) =>
          runs.reduce((sum, [x, y]) => sum + x[layer][i] - y[layer][i], 0) / runs.length));
      directions.set(key, found);
    }
    const vector = directions.get(key)[steer.layer].map((value) => steer.scale * value);
    return { layer: steer.layer, vector };
  }

  /** Return a reward model's standardised reward of a completion, as chapter 6 gives it. */
  function getReward(adapter, prompt, text) {
    const completion = [...tokenizer.encode(text).slice(1), tokenizer.eos];
    const { last } = getPolicy({ adapter }).read([...tokenizer.encode(prompt), ...completion]);
    const get = (name) => adapters[adapter].tensors[name].data;
    const weight = get("reward_head.weight");
    const reward = last.reduce((sum, x, i) => sum + x * weight[i], get("reward_head.bias")[0]);
    return (reward - get("reward_mean")[0]) / get("reward_std")[0];
  }

  const jobs = {
    /** Take the base model, its tokenizer and its config. Returns the text of each token. */
    loadBase({ weights, tokenizer: description, config }) {
      tokenizer = new engine.Tokenizer(description);
      base = new engine.Gpt(engine.readSafetensors(readBase64(weights)).tensors, config);
      return tokenizer.texts;
    },

    loadAdapter({ adapter, weights }) {
      adapters[adapter] = engine.readAdapter(readBase64(weights));
    },

    /** Return the logits after each token of some prompts: for tests. */
    getLogits({ prompts, policy }) {
      const model = getPolicy(policy);
      return prompts.map((prompt) => {
        const cache = model.makeCache();
        return tokenizer.encode(prompt).map((token) => [...model.step(token, cache).logits]);
      });
    },

    /**
     * Give the logits after the prompt, of the policy and of the base, and then `count` samples of
     * up to `length` tokens, one at a time: their tokens, with the exact KL before each, and the
     * reward by the reward model `judge`, if one is named.
     */
    async sample({ prompt, policy, steer, judge, count = 0, length = 40, seed = 0, ...settings }, give, isOld) {
      const model = getPolicy(policy);
      const tokens = tokenizer.encode(prompt);
      const first = model.read(tokens, getPush(steer));
      const baseFirst = base.read(tokens);
      give({ logits: first.logits, baseLogits: baseFirst.logits });
      for (let row = 0; row < count; row++) {
        await new Promise((resolve) => setTimeout(resolve)); // a newer job may have come
        if (isOld()) return;
        const random = engine.makeRandom(1000 * seed + row);
        const [cache, baseCache] = [first.cache, baseFirst.cache].map(engine.forkCache);
        let [{ logits }, { logits: baseLogits }] = [first, baseFirst];
        const sampled = [];
        while (sampled.length < length && sampled.at(-1)?.token !== tokenizer.eos) {
          const token = engine.draw(engine.truncate(logits, settings), random());
          sampled.push({ token, kl: engine.calcKl(logits, baseLogits) });
          if (cache.length === model.context) break;
          ({ logits } = model.step(token, cache));
          ({ logits: baseLogits } = base.step(token, baseCache));
        }
        const text = tokenizer.decode(sampled.map(({ token }) => token));
        give({ row, sampled, text, reward: judge && getReward(judge, prompt, text) });
      }
    },
  };

  onmessage = async ({ data: { id, owner, job, ...options } }) => {
    newest[owner] = id;
    try {
      const isOld = () => newest[owner] !== id;
      const result = await jobs[job](options, (part) => postMessage({ id, part }), isOld);
      postMessage({ id, result });
    } catch (error) {
      postMessage({ id, error: error.message });
    }
  };
}
