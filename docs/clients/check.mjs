// One feature of the openai package for Node, for check.py: node check.mjs URL FEATURE MODEL WHERE
import { createRequire } from "node:module";
const require = createRequire(process.cwd() + "/");
const OpenAI = require("openai");
const { zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const [url, feature, model, where] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const parameters = { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const forced = { model, messages, tools, tool_choice: { type: "function", function: { name: "weather" } }, max_tokens: 60, temperature: 0 };
const read = () => require("node:fs").readFileSync(0); // the picture

async function collected(stream, textOf) {
  let text = "";
  for await (const event of stream) text += textOf(event) ?? "";
  return text;
}

const features = {
  chat: async () => (await client.chat.completions.create({ model, messages, max_tokens: 8 })).choices[0].message.content,
  stream: async () =>
    collected(
      await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true }),
      (chunk) => chunk.choices[0]?.delta?.content,
    ),
  tools: async () => {
    const { message } = (await client.chat.completions.create(forced)).choices[0];
    const told = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
    const answer = await client.chat.completions.create({ model, messages: [...messages, message, told], tools, max_tokens: 8 });
    return answer.usage.completion_tokens;
  },
  "tools, three turns": async () => {
    const said = [...messages];
    for (const _ of "ab") {
      const { message } = (await client.chat.completions.create({ ...forced, messages: said })).choices[0];
      said.push(message, ...message.tool_calls.map((one) => ({ role: "tool", tool_call_id: one.id, content: "sunny" })));
    }
    return (await client.chat.completions.create({ model, messages: said, tools, max_tokens: 8 })).usage.completion_tokens;
  },
  "unknown fields, both modes": async () => {
    const asked = { model, messages, max_tokens: 8, use_beam_search: true, whim: 1 };
    const refused = await client.chat.completions.create(asked).catch((error) => error);
    const lenient = new OpenAI({ baseURL: process.env.LENIENT_URL, apiKey: "unused", maxRetries: 0 });
    const { response } = await lenient.chat.completions.create(asked).withResponse();
    return refused.param === "use_beam_search" && response.headers.get("penstock-ignored-fields");
  },
  "tools, streamed": async () => {
    let pieces = 0;
    const stream = client.chat.completions.stream(forced);
    stream.on("tool_calls.function.arguments.delta", () => pieces++);
    const call = (await stream.finalMessage()).tool_calls[0];
    return pieces > 1 && call.id && call.function.arguments;
  },
  "JSON schema": async () => {
    const City = z.object({ city: z.string().max(12), people: z.number().int().min(0).max(99999) });
    const asked = { model, messages, response_format: zodResponseFormat(City, "city"), max_tokens: 60, temperature: 0 };
    return JSON.stringify((await client.chat.completions.parse(asked)).choices[0].message.parsed);
  },
  "n, logprobs": async () =>
    (await client.chat.completions.create({ model, messages, n: 2, logprobs: true, max_tokens: 6 })).choices[1].logprobs.content.length,
  responses: async () => (await client.responses.create({ model, input: "Hello", max_output_tokens: 400, temperature: 0 })).output_text,
  "responses, streamed": async () =>
    collected(
      await client.responses.create({ model, input: "Hello", max_output_tokens: 400, temperature: 0, stream: true }),
      (event) => (event.type === "response.output_text.delta" ? event.delta : ""),
    ),
  background: async () => {
    const asked = { model, input: "Hello", background: true, max_output_tokens: 400, temperature: 0 };
    const events = (await client.responses.create({ ...asked, stream: true }))[Symbol.asyncIterator]();
    const first = (await events.next()).value;
    await events.return(); // its connection closes
    const id = first.response.id;
    let last;
    for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: first.sequence_number })) last = event;
    const whole = await client.responses.retrieve(id);
    const items = (await client.responses.inputItems.list(id)).data;
    await client.responses.delete(id);
    const ended = await client.responses.cancel((await client.responses.create(asked)).id);
    const told = (response) => response.output[0].content[0].text;
    return told(last.response) === told(whole) && items.length === 1 && ended.status === "cancelled" && told(whole);
  },
  "prompt lists, echo, logprobs": async () => {
    const asked = { model, prompt: ["The sky is", "Two and two"], max_tokens: 4, logprobs: 2 };
    const { choices } = await client.completions.create({ ...asked, echo: true });
    const seen = new Set();
    for await (const chunk of await client.completions.create({ ...asked, stream: true })) seen.add(chunk.choices[0].index);
    return choices.every((one, i) => one.text.startsWith(asked.prompt[i]) && one.logprobs.token_logprobs[0] === null) && seen.size === 2;
  },
  embeddings: async () => (await client.embeddings.create({ model, input: ["a"] })).data[0].embedding.length,
  "embeddings, default batches": async () => {
    const input = Array.from({ length: 1000 }, (_, i) => `${i} ${"x".repeat(1000)}`.slice(0, 1000));
    const { data } = await client.embeddings.create({ model, input });
    return data.length === 1000 && data[999].embedding.length;
  },
  images: async () => (await client.images.generate({ model: "tiny-image-generation", prompt: "a square", size: "64x64", response_format: "b64_json" })).data[0].b64_json.length,
  "image edits": async () => edited(read()),
  "chat with images": async () => seen(read()),
  "image of 5 MB": async () => {
    const picture = read();
    return (await seen(picture)) && edited(picture);
  },
};

async function edited(picture) {
  const image = await OpenAI.toFile(picture, "a.png", { type: "image/png" });
  return (await client.images.edit({ model: "tiny-image-editing", image, prompt: "blue", size: "64x64" })).data.length;
}

async function seen(picture) {
  const url = `data:image/png;base64,${picture.toString("base64")}`;
  const content = [{ type: "text", text: "What is this?" }, { type: "image_url", image_url: { url } }];
  const asked = { model: "tiny-image-to-text", messages: [{ role: "user", content }], max_tokens: 8 };
  return (await client.chat.completions.create(asked)).usage.completion_tokens;
}

const here = ["images", "image edits", "chat with images", "image of 5 MB"]; // no server that is asked remotely makes or reads them
console.log(where === "remote" && here.includes(feature) ? "here only" : (await features[feature]()) || "");
