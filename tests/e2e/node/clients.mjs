// The Node clients of TGI and OpenAI against the server that the command line names. One line of JSON for each scenario, as the scripts of
// ../clients print them.

import { InferenceClient } from "@huggingface/inference";
import OpenAI from "openai";

const url = process.argv[2];
const SAID = [{ role: "user", content: "the quick brown hello" }];
const PROMPT = "the quick brown hello";
const SECONDS = 30;
const ENDLESS = 1_000_000;

const openai = () => new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0, timeout: SECONDS * 1000 });
const hub = () => new InferenceClient("-", { endpointUrl: url });

function check(right, what) {
  if (!right) throw new Error(`not so: ${what}`);
}

async function metric(name) {
  const page = await (await fetch(`${url}/metrics`)).text();
  return Number(page.split("\n").find((line) => line.startsWith(`${name} `)).split(" ").pop());
}

async function leftBehind(givenUp) {
  const dropped = 'tgi_request_failure{err="dropped"}';
  const before = await metric(dropped);
  await givenUp();
  const end = Date.now() + SECONDS * 1000;
  while ((await metric("tgi_batch_current_size")) || (await metric(dropped)) === before) {
    check(Date.now() < end, "the row is free when the client left");
    await new Promise((later) => setTimeout(later, 20));
  }
}

async function refused(call, words) {
  try {
    await call();
  } catch (error) {
    check(String(error.message).includes(words), `${JSON.stringify(words)} is in ${error.message}`);
    return error;
  }
  throw new Error("nothing was refused");
}

const scenarios = {
  async openai_chat() {
    const ask = { model: "tgi", messages: SAID, max_tokens: 16, seed: 5 };
    const whole = await openai().chat.completions.create(ask);
    check(whole.choices[0].finish_reason === "length" && whole.usage.completion_tokens === 16, "a whole chat");
    let text = "";
    let usage = null;
    const stream = await openai().chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    check(text === whole.choices[0].message.content && text !== "", "a streamed chat says the same");
    check(usage.total_tokens === whole.usage.total_tokens, "usage");
  },

  async openai_completions() {
    const ask = { model: "tgi", prompt: ["hello", "the quick"], max_tokens: 6, seed: 1 };
    const whole = await openai().completions.create(ask);
    const said = ["", ""];
    for await (const chunk of await openai().completions.create({ ...ask, stream: true }))
      for (const choice of chunk.choices) said[choice.index] += choice.text;
    check(JSON.stringify(said) === JSON.stringify(whole.choices.map((choice) => choice.text)), "a streamed completion says the same");
  },

  async openai_models() {
    const listed = (await openai().models.list()).data;
    check(listed.length === 1 && (await openai().models.retrieve(listed[0].id)).id === listed[0].id, "models");
  },

  async openai_refused() {
    const ask = { model: "tgi", messages: SAID, top_p: 3 };
    for (const stream of [false, true]) {
      const error = await refused(() => openai().chat.completions.create({ ...ask, stream }), "`top_p` must be");
      check(error instanceof OpenAI.UnprocessableEntityError && error.code === "validation" && error.requestID, "the error's class and code");
    }
  },

  async openai_given_up() {
    await leftBehind(async () => {
      const stream = await openai().chat.completions.create({ model: "tgi", messages: SAID, max_tokens: ENDLESS, stream: true });
      for await (const _ of stream) break;
      stream.controller.abort();
    });
  },

  async hub_chat() {
    const ask = { messages: SAID, max_tokens: 16, seed: 5 };
    const whole = await hub().chatCompletion(ask);
    let text = "";
    for await (const chunk of hub().chatCompletionStream(ask)) text += chunk.choices[0]?.delta?.content ?? "";
    check(text === whole.choices[0].message.content && text !== "", "a streamed chat says the same");
  },

  async hub_text() {
    // The client posts to /v1/completions, with TGI's parameters at the top level.
    const ask = { inputs: PROMPT, parameters: { max_new_tokens: 9, max_tokens: 9, seed: 5, temperature: 0.5, return_full_text: false } };
    const whole = await hub().textGeneration(ask);
    check(typeof whole.generated_text === "string" && whole.generated_text !== "", "a text");
    let text = "";
    for await (const chunk of hub().textGenerationStream(ask)) text += chunk.choices?.[0]?.text ?? chunk.token?.text ?? "";
    check(text === whole.generated_text, "a streamed text says the same");
  },

  async hub_refused() {
    // Of an error that is an object this client says only where it is whole that there was one; the words are in its response.
    const error = await refused(() => hub().chatCompletion({ messages: SAID, top_p: 3 }), "HTTP error occurred");
    check(error.httpResponse.status === 422 && error.httpResponse.body.error.message.includes("`top_p` must be"), "the error's words");
    await refused(async () => {
      for await (const _ of hub().chatCompletionStream({ messages: SAID, top_p: 3 })) break;
    }, "`top_p` must be");
  },

  async hub_given_up() {
    await leftBehind(async () => {
      const leave = new AbortController();
      const stream = hub().chatCompletionStream({ messages: SAID, max_tokens: ENDLESS }, { signal: leave.signal });
      try {
        for await (const _ of stream) leave.abort();
      } catch (error) {
        check(error.name === "AbortError", `${error.name} is AbortError`);
      }
    });
  },

  async a_native_stream_given_up() {
    await leftBehind(async () => {
      const leave = new AbortController();
      const body = JSON.stringify({ inputs: PROMPT, parameters: { max_new_tokens: ENDLESS } });
      const headers = { "content-type": "application/json" };
      const response = await fetch(`${url}/generate_stream`, { method: "POST", body, headers, signal: leave.signal });
      const first = new TextDecoder().decode((await response.body.getReader().read()).value);
      check(first.startsWith('data: {"index":1,') || first.startsWith(":"), "an event");
      leave.abort();
    });
  },
};

for (const [name, scenario] of Object.entries(scenarios)) {
  let error = null;
  try {
    await scenario();
  } catch (wrong) {
    error = wrong.stack;
  }
  console.log(JSON.stringify({ name, error }));
}
