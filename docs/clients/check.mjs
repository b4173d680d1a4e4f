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
const picture = process.env.PICTURE; // a data: URL

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
  responses: async () => (await client.responses.create({ model, input: "Hello", max_output_tokens: 400 })).output_text,
  "responses, streamed": async () =>
    collected(
      await client.responses.create({ model, input: "Hello", max_output_tokens: 400, stream: true }),
      (event) => (event.type === "response.output_text.delta" ? event.delta : ""),
    ),
  embeddings: async () => (await client.embeddings.create({ model, input: ["a"] })).data[0].embedding.length,
  images: async () => (await client.images.generate({ model: "tiny-image-generation", prompt: "a square", size: "64x64", response_format: "b64_json" })).data[0].b64_json.length,
  "image edits": async () => {
    const image = await OpenAI.toFile(Buffer.from(picture.split(",")[1], "base64"), "a.png", { type: "image/png" });
    return (await client.images.edit({ model: "tiny-image-editing", image, prompt: "blue" })).data.length;
  },
  "chat with images": async () => {
    const content = [{ type: "text", text: "What is this?" }, { type: "image_url", image_url: { url: picture } }];
    const asked = { model: "tiny-image-to-text", messages: [{ role: "user", content }], max_tokens: 8 };
    return (await client.chat.completions.create(asked)).usage.completion_tokens;
  },
};

const here = ["images", "image edits", "chat with images"]; // no server that is asked remotely makes or reads them
console.log(where === "remote" && here.includes(feature) ? "here only" : await features[feature]());
