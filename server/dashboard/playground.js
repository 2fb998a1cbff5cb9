// Streams one generation and colours each token by how it came. What the model wrote is only ever text here, never markup.
import { duration, element, percent, plural, short } from "./format.js";

export class Playground {
  constructor($) {
    this.$ = $;
    this.abort = null;
    $("ask").addEventListener("submit", event => { event.preventDefault(); this.start(); });
    $("ask").addEventListener("keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.start(); } });
    $("stop").addEventListener("click", () => this.abort?.abort());
  }

  secured(needed) { this.$("key-field").hidden = !needed; }

  async start() {
    if (this.abort) return;
    this.abort = new AbortController();
    this.buttons();
    this.$("answer").replaceChildren();
    Object.assign(this, { began: performance.now(), first: null, tokens: 0, guessed: 0, steps: 0 });
    this.say("Waiting for the first token …");
    try {
      const [path, body] = this.request();
      const key = this.$("key").value, headers = { "content-type": "application/json", ...(key && { authorization: "Bearer " + key }) };
      const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal: this.abort.signal });
      if (!response.ok) throw new Error(await reason(response));
      for await (const event of events(response.body)) this.hear(event);
      this.say(this.sum());
    } catch (error) {
      const stopped = error.name === "AbortError", lost = error instanceof TypeError;
      this.say(stopped ? `Stopped. ${this.sum()}` : lost ? `The connection was lost. ${this.sum()}` : error.message, !stopped);
    }
    this.abort = null;
    this.buttons();
  }

  request() {
    const value = id => this.$(id).value, guesses = value("guesses") === "" ? {} : { speculate: Number(value("guesses")) };
    const most = Number(value("most")), temperature = Number(value("temperature"));
    if (value("mode") === "chat") {
      const messages = [{ role: "user", content: value("prompt") }];
      return ["v1/chat/completions", { messages, stream: true, max_tokens: most, temperature, origins: true, stream_options: { include_usage: true }, ...guesses }];
    }
    const parameters = { max_new_tokens: most, temperature, details: true, origins: true, ...guesses };
    return ["generate_stream", { inputs: value("prompt"), parameters }];
  }

  hear(event) {
    if (event.error) throw new Error(event.error.message ?? event.error);
    const choice = event.choices?.[0], origin = event.origin ?? choice?.origin;
    if (event.usage) this.tokens = event.usage.completion_tokens;
    if (!origin) return;
    const thought = choice?.delta.reasoning_content, text = event.token ? event.token.special ? "" : event.token.text : choice.delta.content ?? thought ?? "";
    this.first ??= performance.now();
    this.tokens += 1;
    this.guessed += origin.guessed;
    this.steps = origin.step;
    if (text) this.write(text, origin, thought);
    this.say(this.sum());
  }

  write(text, origin, thought) {
    const answer = this.$("answer"), low = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
    const how = origin.guessed ? "guessed" : "computed";
    answer.append(element("span", { className: thought ? how + " thought" : how, textContent: text, title: `step ${origin.step}: ${origin.guessed ? "guessed and accepted" : "computed"}` }));
    if (low) answer.scrollTop = answer.scrollHeight;
  }

  sum() {
    if (!this.tokens) return "Nothing was generated.";
    const took = (performance.now() - this.first) / 1000, rate = this.tokens > 1 && took > 0 ? ` · ${short((this.tokens - 1) / took)} tokens/s` : "";
    return `${plural(this.tokens, "token")} in ${plural(this.steps, "step")} · ${percent(this.guessed / this.tokens)} guessed · first after ${duration((this.first - this.began) / 1000)}${rate}`;
  }

  say(text, bad = false) {
    this.$("told").textContent = text;
    this.$("told").dataset.bad = bad;
  }

  buttons() {
    this.$("told").ariaLive = this.abort ? "off" : "polite";
    this.$("go").disabled = Boolean(this.abort);
    this.$("stop").disabled = !this.abort;
  }
}

async function reason(response) {
  const body = await response.json().catch(() => ({}));
  const said = body.error?.message ?? body.error ?? response.statusText;
  return response.status === 401 ? "The server wants its API key: fill in the field above." : `${response.status}: ${said}`;
}

// The JSON of each server-sent event.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part; !(part = await reader.read()).done;) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}
