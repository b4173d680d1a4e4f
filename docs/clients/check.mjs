// One feature of the openai package for Node, for check.py: node check.mjs URL FEATURE MODEL
import { createRequire } from "node:module";
const OpenAI = createRequire(process.cwd() + "/")("openai");

const [url, feature, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters } }];

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
  tools: async () =>
    (await client.chat.completions.stream({ model, messages, tools }).finalMessage()).tool_calls[0].function.arguments,
  responses: async () =>
    (await client.responses.create({ model, input: "Hello", max_output_tokens: 400 })).output_text,
  "responses, streamed": async () =>
    collected(
      await client.responses.create({ model, input: "Hello", max_output_tokens: 400, stream: true }),
      (event) => (event.type === "response.output_text.delta" ? event.delta : ""),
    ),
  embeddings: async () => (await client.embeddings.create({ model, input: ["a"] })).data[0].embedding.length,
};

console.log(await features[feature]());
