// GPT-2 in plain JavaScript: reads safetensors, runs the model with a cache, adds adapters to it,
// and samples. Numbers are float32 once they are read; every array is flat, row after row.
//
// All of it is one function, since its text is also the program of a worker (see play.js).
"use strict";

function makeEngine() {
  // --- Files -----------------------------------------------------------------------------------

  /** Return the number that the 16 bits of a float16 stand for. */
  function readHalf(bits) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }

  const FLOATS = Float32Array.from({ length: 2 ** 16 }, (_, bits) => readHalf(bits));

  /** Read a safetensors file of float16: the length of a JSON header, the header, the numbers. */
  function readSafetensors(bytes) {
    const start = 8 + Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
    const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start)));
    const { __metadata__: metadata = {}, ...entries } = header;
    const tensors = {};
    for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(entries)) {
      if (dtype !== "F16") throw new Error(`${name} should be float16, but is ${dtype}`);
      const bits = new Uint16Array(bytes.slice(start + from, start + to).buffer);
      const data = new Float32Array(bits.length);
      for (let i = 0; i < bits.length; i++) data[i] = FLOATS[bits[i]];
      tensors[name] = { shape, data };
    }
    return { tensors, metadata };
  }

  // --- Tokens ----------------------------------------------------------------------------------

  // GPT-2 writes each byte as a printable character: those that are printable as themselves.
  const BYTES = [];
  for (let byte = 0, others = 0; byte < 256; byte++) {
    const isPrintable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    BYTES.push(String.fromCodePoint(isPrintable ? byte : 256 + others++));
  }
  const PIECE = /'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;

  /** Byte-level BPE, with every digit a token of its own, as tokenizer.json describes it. */
  class Tokenizer {
    constructor({ model: { vocab, merges }, added_tokens: special }) {
      this.vocab = vocab;
      this.ranks = new Map(merges.map((pair, rank) => [[pair].flat().join(" "), rank]));
      this.bos = special.find((token) => token.content === "<bos>").id;
      this.eos = special.find((token) => token.content === "<eos>").id;
      const decoder = new TextDecoder();
      const isSpecial = new Set(special.map((token) => token.id));
      this.texts = []; // of each token
      for (const [token, id] of Object.entries(vocab)) {
        const bytes = [...token].map((character) => BYTES.indexOf(character));
        this.texts[id] = isSpecial.has(id) ? "" : decoder.decode(Uint8Array.from(bytes));
      }
    }

    /** Return the tokens of a text, after the one that begins every document. */
    encode(text) {
      const pieces = text.split(/(\p{Nd})/u).flatMap((part) => part.match(PIECE) ?? []);
      return [this.bos, ...pieces.flatMap((piece) => this.merge(piece))];
    }

    /** Join the pair of symbols that was joined first in training, until none is left. */
    merge(piece) {
      let symbols = [...new TextEncoder().encode(piece)].map((byte) => BYTES[byte]);
      for (;;) {
        let best = Infinity;
        let at = -1;
        for (let i = 0; i + 1 < symbols.length; i++) {
          const rank = this.ranks.get(`${symbols[i]} ${symbols[i + 1]}`);
          if (rank < best) [best, at] = [rank, i];
        }
        if (at < 0) return symbols.map((symbol) => this.vocab[symbol]);
        symbols.splice(at, 2, symbols[at] + symbols[at + 1]);
      }
    }

    decode(tokens) {
      return tokens.map((token) => this.texts[token]).join("");
    }
  }

  // --- The model -------------------------------------------------------------------------------

  /** Return x W + b, with W of shape [inputs outputs]; four inputs at a time, which is faster. */
  function applyLinear(x, { weight, bias }) {
    const n = bias.length;
    const y = Float32Array.from(bias);
    for (let i = 0, row = 0; i < x.length; i += 4, row += 4 * n) {
      const [x0, x1, x2, x3] = [x[i], x[i + 1], x[i + 2], x[i + 3]];
      for (let j = 0; j < n; j++)
        y[j] +=
          x0 * weight[row + j] + x1 * weight[row + n + j] +
          x2 * weight[row + 2 * n + j] + x3 * weight[row + 3 * n + j];
    }
    return y;
  }

  function applyLayerNorm(x, { weight, bias }) {
    let mean = 0;
    for (const value of x) mean += value / x.length;
    let variance = 0;
    for (const value of x) variance += (value - mean) ** 2 / x.length;
    const scale = 1 / Math.sqrt(variance + 1e-5);
    return x.map((value, i) => (value - mean) * scale * weight[i] + bias[i]);
  }

  /** GELU by its usual approximation with tanh. */
  function applyGelu(x) {
    const root = Math.sqrt(2 / Math.PI);
    return x.map((z) => 0.5 * z * (1 + Math.tanh(root * (z + 0.044715 * z ** 3))));
  }

  /** Let the newest token attend to all tokens so far; q holds its queries, head after head. */
  function attend(q, keys, values, heads) {
    const size = q.length / heads;
    const out = new Float32Array(q.length);
    const scores = new Float32Array(keys.length);
    for (let start = 0; start < q.length; start += size) {
      for (let t = 0; t < keys.length; t++) {
        let dot = 0;
        for (let i = start; i < start + size; i++) dot += q[i] * keys[t][i];
        scores[t] = dot / Math.sqrt(size);
      }
      const weights = softmax(scores);
      for (let t = 0; t < keys.length; t++)
        for (let i = start; i < start + size; i++) out[i] += weights[t] * values[t][i];
    }
    return out;
  }

  function addTo(x, y, scale = 1) {
    for (let i = 0; i < x.length; i++) x[i] += scale * y[i];
  }

  // Where an adapter's product is added: a weight, and which third of its columns it begins at.
  const SITES = {
    "attn.q": ["attn.c_attn", 0], "attn.k": ["attn.c_attn", 1], "attn.v": ["attn.c_attn", 2],
    "attn.o": ["attn.c_proj", 0], "mlp.in": ["mlp.c_fc", 0], "mlp.out": ["mlp.c_proj", 0],
  };
  const LAYERS = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"];

  class Gpt {
    /** Take the tensors of a GPT2LMHeadModel with tied embeddings, and its config.json. */
    constructor(tensors, config) {
      const get = (name) => tensors[`transformer.${name}`].data;
      const both = (name) => ({ weight: get(`${name}.weight`), bias: get(`${name}.bias`) });
      this.heads = config.n_head;
      this.width = config.n_embd;
      this.context = config.n_positions;
      this.embedding = get("wte.weight");
      this.positions = get("wpe.weight");
      this.norm = both("ln_f");
      this.blocks = Array.from({ length: config.n_layer }, (_, layer) =>
        Object.fromEntries(LAYERS.map((name) => [name, both(`h.${layer}.${name}`)])));
    }

    /**
     * Return this model with W + strength * scaling * A B in place of W, at the adapter's sites.
     * `sites` keeps only those of these full names, such as "blocks.0.attn.q"; `rank` keeps that
     * many of each product's largest singular values. What isn't changed is shared.
     */
    withAdapter(adapter, { strength = 1, sites = null, rank = Infinity } = {}) {
      const model = Object.assign(Object.create(Gpt.prototype), this);
      model.blocks = this.blocks.map((block) => ({ ...block }));
      const copied = new Set(); // q, k and v share a weight
      for (const [site, product] of adapter.products) {
        if (strength === 0 || (sites && !sites.includes(site))) continue;
        const { a, b, size, outputs } = rank < product.size ? orderByValue(product) : product;
        const [, layer, name] = site.match(/^blocks\.(\d+)\.(.+)$/);
        const [linear, third] = SITES[name];
        const block = model.blocks[layer];
        if (!copied.has(block[linear])) {
          block[linear] = { ...block[linear], weight: block[linear].weight.slice() };
          copied.add(block[linear]);
        }
        const { weight, bias } = block[linear];
        for (let i = 0; i < a.length / size; i++)
          for (let r = 0; r < Math.min(rank, size); r++) {
            const scale = strength * adapter.scaling * a[i * size + r];
            const row = i * bias.length + third * this.width;
            for (let j = 0; j < outputs; j++) weight[row + j] += scale * b[r * outputs + j];
          }
      }
      return model;
    }

    makeCache() {
      return { length: 0, keys: this.blocks.map(() => []), values: this.blocks.map(() => []) };
    }

    /**
     * Read one token more, and return the logits of the next one, the residual stream after each
     * block, and `last`, which the logits are read from. `push`, {layer, vector}, is added to the
     * stream after that block.
     */
    step(token, cache, push = null) {
      if (cache.length >= this.context) throw new Error(`the context has ${this.context} tokens`);
      const { width, embedding, positions } = this;
      const position = cache.length++ * width;
      const x = embedding.slice(token * width, (token + 1) * width);
      addTo(x, positions.subarray(position, position + width));
      const stream = [];
      this.blocks.forEach((block, layer) => {
        const qkv = applyLinear(applyLayerNorm(x, block.ln_1), block["attn.c_attn"]);
        const keys = cache.keys[layer];
        const values = cache.values[layer];
        keys.push(qkv.subarray(width, 2 * width));
        values.push(qkv.subarray(2 * width));
        const mixed = attend(qkv.subarray(0, width), keys, values, this.heads);
        addTo(x, applyLinear(mixed, block["attn.c_proj"]));
        const hidden = applyGelu(applyLinear(applyLayerNorm(x, block.ln_2), block["mlp.c_fc"]));
        addTo(x, applyLinear(hidden, block["mlp.c_proj"]));
        if (push?.layer === layer) addTo(x, push.vector);
        stream.push(x.slice());
      });
      const last = applyLayerNorm(x, this.norm);
      const logits = new Float32Array(embedding.length / width);
      for (let v = 0, row = 0; v < logits.length; v++, row += width)
        for (let i = 0; i < width; i++) logits[v] += last[i] * embedding[row + i];
      return { logits, stream, last };
    }

    /** Read several tokens; `push` changes the stream at the last of them alone. */
    read(tokens, push = null) {
      const cache = this.makeCache();
      tokens.slice(0, -1).forEach((token) => this.step(token, cache));
      return { ...this.step(tokens.at(-1), cache, push), cache };
    }
  }

  /** Copy a cache, so that several samples go on from one prompt. */
  function forkCache({ length, keys, values }) {
    const copy = (lists) => lists.map((list) => list.slice());
    return { length, keys: copy(keys), values: copy(values) };
  }

  // --- Adapters --------------------------------------------------------------------------------

  /**
   * Read an adapter: `products` by site, A [inputs size] and B [size outputs], `scaling`, and
   * whatever else its file holds, in `tensors`.
   */
  function readAdapter(bytes) {
    const { tensors, metadata } = readSafetensors(bytes);
    const products = new Map();
    for (const [name, { shape, data }] of Object.entries(tensors)) {
      const [, site] = name.match(/^(.*)\.lora_A$/) ?? [];
      if (!site) continue;
      const b = tensors[`${site}.lora_B`];
      products.set(site, { a: data, b: b.data, size: shape[1], outputs: b.shape[1] });
    }
    return { products, scaling: Number(metadata.scaling), tensors };
  }

  /**
   * Return A and B with the same product, in order of its singular values: the columns of A are
   * then orthonormal, the rows of B orthogonal, and their lengths are the singular values.
   *
   * A = Q R by Gram-Schmidt; then rotations make the rows of R B orthogonal (one-sided Jacobi).
   */
  function orderByValue({ a, b, size, outputs }) {
    const inputs = a.length / size;
    const columns = Array.from({ length: size }, (_, r) =>
      Float64Array.from({ length: inputs }, (_, i) => a[i * size + r]));
    const old = Array.from({ length: size }, (_, r) =>
      Float64Array.from(b.subarray(r * outputs, (r + 1) * outputs)));
    const dot = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
    const rows = old.map(() => new Float64Array(outputs)); // R B
    for (let r = 0; r < size; r++) {
      for (let s = 0; s < r; s++) {
        const overlap = dot(columns[s], columns[r]);
        addTo(columns[r], columns[s], -overlap);
        addTo(rows[s], old[r], overlap);
      }
      const length = Math.sqrt(dot(columns[r], columns[r]));
      columns[r] = columns[r].map((value) => value / length);
      addTo(rows[r], old[r], length);
    }
    for (let sweep = 0; sweep < 12; sweep++)
      for (let r = 0; r < size; r++)
        for (let s = r + 1; s < size; s++) {
          const angle =
            Math.atan2(2 * dot(rows[r], rows[s]), dot(rows[r], rows[r]) - dot(rows[s], rows[s])) / 2;
          for (const list of [rows, columns]) {
            const [x, y] = [list[r], list[s]];
            list[r] = x.map((value, i) => Math.cos(angle) * value + Math.sin(angle) * y[i]);
            list[s] = y.map((value, i) => Math.cos(angle) * value - Math.sin(angle) * x[i]);
          }
        }
    const order = rows.map((row, r) => [dot(row, row), r]).sort((x, y) => y[0] - x[0]);
    const ordered = { a: new Float32Array(a.length), b: new Float32Array(b.length), size, outputs };
    order.forEach(([, from], r) => {
      ordered.b.set(rows[from], r * outputs);
      columns[from].forEach((value, i) => { ordered.a[i * size + r] = value; });
    });
    return ordered;
  }

  // --- Sampling --------------------------------------------------------------------------------

  function softmax(logits) {
    const highest = logits.reduce((x, y) => Math.max(x, y), -Infinity);
    const probs = logits.map((logit) => Math.exp(logit - highest));
    const total = probs.reduce((x, y) => x + y, 0);
    return probs.map((p) => p / total);
  }

  /** Return the probabilities that are drawn from: after temperature, then top-k, then top-p. */
  function truncate(logits, { temperature = 1, topK = Infinity, topP = 1 } = {}) {
    const highest = logits.reduce((x, y) => Math.max(x, y), -Infinity);
    if (temperature === 0) [temperature, topK] = [1, 1];
    const scaled = logits.map((logit) => (logit - highest) / temperature);
    if (topK >= logits.length && topP >= 1) return softmax(scaled);
    const order = [...logits.keys()].sort((i, j) => logits[j] - logits[i]);
    for (const i of order.slice(topK)) scaled[i] = -Infinity;
    const probs = softmax(scaled);
    let before = 0; // the mass of the likelier tokens
    for (const i of order) {
      if (before >= topP && topP < 1) scaled[i] = -Infinity;
      before += probs[i];
    }
    return softmax(scaled);
  }

  /** Return a generator of numbers in [0, 1) that the seed decides (mulberry32). */
  function makeRandom(seed) {
    let state = Math.imul(seed + 1, 0x9e3779b1) >>> 0; // neighbours begin far apart
    return () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let z = Math.imul(state ^ (state >>> 15), state | 1);
      z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
      return ((z ^ (z >>> 14)) >>> 0) / 2 ** 32;
    };
  }

  /** Draw an index with these probabilities, by a number from [0, 1). */
  function draw(probs, number) {
    let total = 0;
    for (let i = 0; i < probs.length; i++) {
      total += probs[i];
      if (number < total) return i;
    }
    return probs.lastIndexOf(Math.max(...probs)); // rounding left the sum below the number
  }

  /** Return KL(p ‖ q) of two rows of logits, in nats. */
  function calcKl(logits, baseLogits) {
    const [p, q] = [softmax(logits), softmax(baseLogits)];
    return p.reduce((sum, value, i) => sum + (value > 0 ? value * Math.log(value / q[i]) : 0), 0);
  }

  return {
    Gpt, Tokenizer, readSafetensors, readAdapter, forkCache, softmax, truncate, makeRandom, draw, calcKl,
  };
}
