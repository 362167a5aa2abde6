// Computes rates from counts. Each process counts its own requests, and HAProxy sends each request of the page to any process. So
// the page keeps the counts of each process that has answered it, and adds up their rates.

const WINDOW_S = 30, FORGET_S = 60, HISTORY = 150;

export class Rates {
  #heard = new Map();  // by process: its states of the last half minute
  history = [];

  take(state) {
    const states = this.#heard.get(state.process) ?? [];
    states.push({ at: state.at, counts: state.counts });
    while (states.length > 2 && states[1].at < state.at - WINDOW_S) states.shift();
    this.#heard.set(state.process, states);
    for (const [process, each] of this.#heard) if (each.at(-1).at < state.at - FORGET_S) this.#heard.delete(process);
    this.history.push(this.figures());
    if (this.history.length > HISTORY) this.history.shift();
  }

  get numProcesses() {
    return this.#heard.size;
  }

  figures() {
    const sum = { requests: 0, failed: 0, refused: 0, generated: 0, inFlight: 0, streams: 0 };
    let request = [], first = [], queue = [], bounds = [];
    for (const states of this.#heard.values()) {
      const { at, counts } = states.at(-1), before = states[0];
      sum.inFlight += counts.in_flight;
      sum.streams += counts.streams;
      bounds = counts.bounds_s;
      const passed = at - before.at;
      if (passed <= 0) continue;
      const rate = (now, then) => Math.max(0, now - then) / passed;
      for (const [status, number] of Object.entries(counts.requests)) {
        const perSecond = rate(number, before.counts.requests[status] ?? 0);
        sum.requests += perSecond;
        if (status.startsWith("5") || status === "424") sum.failed += perSecond;
      }
      sum.refused += rate(counts.rejected, before.counts.rejected);
      sum.generated += rate(counts.generated_tokens, before.counts.generated_tokens);
      const add = (total, name) => counts[name].map((each, i) => (total[i] ?? 0) + each - before.counts[name][i]);
      request = add(request, "request_seconds");
      first = add(first, "first_token_seconds");
      queue = add(queue, "queue_seconds");
    }
    return {
      ...sum,
      p50: quantile(request, bounds, 0.5), p95: quantile(request, bounds, 0.95),
      firstP95: quantile(first, bounds, 0.95), queueP95: quantile(queue, bounds, 0.95),
    };
  }
}

// The quantile of a histogram. `upTo` counts the observations up to each bound, and at last all of them. Null without any.
export function quantile(upTo, bounds, share) {
  const total = upTo.at(-1) ?? 0;
  if (!total) return null;
  const wanted = share * total, index = upTo.findIndex((each) => each >= wanted);
  if (index >= bounds.length) return bounds.at(-1);
  const low = index ? bounds[index - 1] : 0, before = index ? upTo[index - 1] : 0;
  return low + (bounds[index] - low) * (wanted - before) / Math.max(1, upTo[index] - before);
}
