// A first request from the page, and the same from elsewhere.
import {useState} from "./vendor/hooks.js";
import {html} from "./parts.js";
import {Standing, useAsk} from "./asking.js";

const QUESTION = "In one sentence, what is a river?";
const TOKENS = 200;

export function TryOut({keyed}) {
  const [prompt, setPrompt] = useState(QUESTION);
  const [shown, ask] = useAsk();
  const submit = (event) => {
    event.preventDefault();
    ask({task: "text_generation", stream: true, payload: {messages: [{role: "user", content: prompt}], max_tokens: TOKENS}});
  };
  return html`<section aria-labelledby="try"><h2 id="try">Try it</h2>
    <form onSubmit=${submit}><label class="wide">Question
      <input value=${prompt} onInput=${(event) => setPrompt(event.target.value)} required /></label>
      <button aria-disabled=${shown.busy}>Ask</button></form>
    <p class="answer" aria-live="polite"><bdi>${shown.text}</bdi></p>
    <${Standing} of=${shown} />
    <details><summary>The same by curl, Python and Kafka</summary>${snippets(prompt, keyed).map(([name, text]) =>
      html`<h3>${name}</h3><pre>${text}</pre>`)}</details></section>`;
}

function snippets(prompt, keyed) {
  const body = {task: "text_generation", payload: {messages: [{role: "user", content: prompt}], max_tokens: TOKENS}};
  const quoted = (value) => `'${JSON.stringify(value).replaceAll("'", "'\\''")}'`;
  return [
    ["curl", `curl '${location.origin}/v1/requests?wait=60' -H 'content-type: application/json' ${
      keyed ? `-H "authorization: Bearer $PENSTOCK_API_KEY" ` : ""}-d ${quoted(body)}`],
    ["Python, with the package openai", `${keyed ? "import os\n\n" : ""}from openai import OpenAI\n\n`
      + `client = OpenAI(base_url="${location.origin}/v1", api_key=${keyed ? `os.environ["PENSTOCK_API_KEY"]` : `"none"`})\n`
      + `messages = [{"role": "user", "content": ${JSON.stringify(prompt)}}]\n`
      + `print(client.chat.completions.create(model="default", messages=messages).choices[0].message.content)`],
    ["Kafka, with kcat", `# KAFKA: the broker's address. A topic prefix, if there is one, stands before the topic's name.\n`
      + `echo ${quoted({request_id: "a-new-id", ...body})} |\n  kcat -P -b KAFKA:9092 -t inference.request.medium`],
  ];
}
