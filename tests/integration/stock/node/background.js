// Follows a response at one gateway until enough events came, and behind them at another one:
// node background.js URL OTHER_URL KEY MODEL. It says when the first gateway may be killed, and waits for a line.
const OpenAI = require("openai");
const readline = require("node:readline/promises");

async function main([url, other, apiKey, model]) {
  const options = { apiKey, maxRetries: 0 };
  const stream = await new OpenAI({ ...options, baseURL: `${url}/v1` }).responses.create({
    model,
    input: "go",
    background: true,
    stream: true,
  });
  const events = [];
  for await (const event of stream) {
    events.push(event);
    if (events.length === 20) break;
  }
  console.log("kill");
  const input = readline.createInterface({ input: process.stdin });
  await new Promise((resolve) => input.once("line", resolve));
  input.close();
  const { id } = events[0].response;
  const starting_after = events.at(-1).sequence_number;
  const rest = await new OpenAI({ ...options, baseURL: `${other}/v1` }).responses.retrieve(id, { stream: true, starting_after });
  for await (const event of rest) events.push(event);
  const text = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
  const last = events.at(-1);
  console.log(JSON.stringify({
    numbers: events.map((event) => event.sequence_number),
    text: text.join(""),
    last: last.type,
    output: last.response.output[0].content[0].text,
  }));
}

main(process.argv.slice(2));
