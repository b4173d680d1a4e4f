// A first request from the page, and the same from elsewhere.
import {useEffect, useRef, useState} from "./vendor/hooks.js";
import {html} from "./parts.js";
import {follow, part} from "./api.js";

const QUESTION = "In one sentence, what is a river?";
const TOKENS = 200;

export function TryOut({keyed}) {
  const [prompt, setPrompt] = useState(QUESTION);
  const [shown, setShown] = useState({text: "", state: "", id: null, busy: false});
  const end = useRef(() => {});
  useEffect(() => () => end.current(), []);
  const ask = (event) => {
    event.preventDefault();
    if (shown.busy) return;
    setShown({text: "", state: "sent", id: null, busy: true});
    const payload = {messages: [{role: "user", content: prompt}], max_tokens: TOKENS};
    end.current = follow({task: "text_generation", stream: true, payload}, (frame) => setShown((now) => told(now, frame)));
  };
  return html`<section aria-labelledby="try"><h2 id="try">Try it</h2>
    <form onSubmit=${ask}><label class="wide">Question
      <input value=${prompt} onInput=${(event) => setPrompt(event.target.value)} required /></label>
      <button aria-disabled=${shown.busy}>Ask</button></form>
    <p class="answer" aria-live="polite"><bdi>${shown.text}</bdi></p>
    <p class="faint">${shown.state} ${shown.id && html`<a href=${`#/requests/${part(shown.id)}`}>the request</a>`}</p>
    <details><summary>The same by curl, Python and Kafka</summary>${snippets(prompt, keyed).map(([name, text]) =>
      html`<h3>${name}</h3><pre>${text}</pre>`)}</details></section>`;
}

/** What is shown after one more frame. */
function told(now, frame) {
  const id = frame.request_id ?? now.id;
  switch (frame.type) {
    case "chunk": return {...now, id, text: now.text + frame.text, state: "running"};
    case "snapshot": return {...now, id, text: frame.text};
    case "restarted": return {...now, id, text: "", state: "it runs again"};
    case "status": return {...now, id, state: frame.detail ?? frame.status};
    case "result": return {...now, id, busy: false, state: frame.error?.message ?? frame.status};
    case "error": return {...now, id, busy: false, state: `${frame.error.message} (${frame.error.code})`};
    case "away": return {...now, state: `the connection has ended (${frame.code}${frame.reason && `: ${frame.reason}`})`};
    default: return {...now, id};
  }
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
