// Every task of the gateway to be tried: a chat, and a form for each that is made from the schema of its request.
import {useEffect, useState} from "./vendor/hooks.js";
import {Failure, html, usePoll} from "./parts.js";
import {get} from "./api.js";
import {ModelField, useAsk} from "./asking.js";
import {Chat} from "./chat.js";
import {SchemaField} from "./fields.js";
import {Result} from "./result.js";
import {Snippets} from "./snippets.js";

const POLL_MS = 5000;
const LOOPBACK = ["127.0.0.1", "localhost", "[::1]"];

/** Of a task the fields that are shown first, and what they begin with. */
const FIRST = {
  image_generation: {prompt: "a lighthouse at night", inference_steps: 8, previews: 2, width: undefined, height: undefined, seed: undefined},
  image_editing: {image: undefined, prompt: "in winter", inference_steps: 8, previews: 2, strength: undefined, mask: undefined},
  image_to_text: {image: undefined, prompt: undefined, max_tokens: undefined},
  image_processing: {image: undefined, operations: [{op: "resize", width: 64, height: 64}, {op: "rotate", degrees: 90}]},
  embedding: {input: ["a river", "a stream of water", "a stone"]},
  summarization: {text: undefined, max_tokens: 100},
  text_generation: {prompt: "Once upon a time", max_tokens: 50, temperature: undefined, seed: undefined},
  conversation_items: {messages: [{role: "user", content: "Hello"}]},
};
/** Fields that the page sets, or that are the payload by another name. */
const OWN = ["task", "payload", "model", "stream"];

/** @type {Promise<any> | null} */
let document_read = null;
/** The schemas of requests by task, and all that they refer to: what the gateway publishes of `POST /v1/requests`. */
function useSchemas() {
  const [found, setFound] = useState(/** @type {any} */ ({tasks: null, schemas: null, error: null}));
  useEffect(() => {
    document_read ??= get("/openapi.json");
    document_read.then(({paths, components: {schemas}}) => {
      const {anyOf} = paths["/v1/requests"].post.requestBody.content["application/json"].schema;
      const bodies = anyOf.map((one) => schemas[one.$ref.split("/").at(-1)]);
      setFound({tasks: Object.fromEntries(bodies.map((one) => [one.properties.task.const, one])), schemas, error: null});
    }, (error) => { document_read = null; setFound({tasks: null, schemas: null, error}); });
  }, []);
  return found;
}

export function Playground({id, query, may, tell, keyed}) {
  const {tasks, schemas, error} = useSchemas();
  const schema = id && tasks?.[id];
  return html`<nav class="row" aria-label="Tasks"><a href="#/playground" aria-current=${id ? null : "page"}>chat</a>
      ${Object.keys(tasks ?? {}).map((task) => html`<a href=${`#/playground/${task}`} aria-current=${task === id ? "page" : null}>${task.replaceAll("_", " ")}</a>`)}</nav>
    <${Failure} error=${error} />
    ${!id && html`<${Chat} keyed=${keyed} may=${may} tell=${tell} />
      ${may("admin") && LOOPBACK.includes(location.hostname) && html`<${Kill} />`}`}
    ${schema && html`<${Task} key=${id + query} task=${id} body=${schema} schemas=${schemas} query=${query} keyed=${keyed} may=${may} tell=${tell} />`}
    ${id && tasks && !schema && html`<section><p>There is no task <bdi>${id}</bdi>.</p></section>`}`;
}

/** The form of a task: the model, the payload's first fields, and the others behind a click. */
function Task({task, body, schemas, query, keyed, may, tell}) {
  const first = FIRST[task] ?? {};
  const image = query.get("image");
  const [payload, setPayload] = useState(() => ({...first, ...image && {image: {artifact_id: image}}}));
  const [top, setTop] = useState(/** @type {any} */ ({}));
  const [shown, ask] = useAsk(may);
  const of = schemas[(body.properties.payload.anyOf?.[0] ?? body.properties.payload).$ref.split("/").at(-1)];
  const request = {task, ...given(top), payload: given(payload)};
  const submit = (event) => { event.preventDefault(); ask({...request, stream: task !== "embedding"}); };
  const field = (properties, required, values, setValues) => (name) => html`<${SchemaField} key=${name} name=${name} schema=${properties[name]} schemas=${schemas}
    required=${required?.includes(name)} value=${values[name]} onValue=${(value) => setValues((now) => ({...now, [name]: value}))} />`;
  const inside = field(of.properties, of.required, payload, setPayload), around = field(body.properties, [], top, setTop);
  const begins = Object.keys(first).filter((name) => of.properties[name]);
  const texts = [payload.input ?? []].flat();
  return html`<section aria-labelledby="task"><h2 id="task">${words(task)}</h2>
    <form onSubmit=${submit}>${begins.map(inside)}
      <${ModelField} task=${task} onChange=${(model) => setTop((now) => ({...now, model: model || undefined}))} />
      <button aria-disabled=${shown.busy}>Submit</button>
      <details class="whole"><summary>All fields of the payload</summary><div class="fields">${Object.keys(of.properties).filter((name) => !begins.includes(name)).map(inside)}</div></details>
      <details class="whole"><summary>Fields of any request</summary><div class="fields">${Object.keys(body.properties).filter((name) => !OWN.includes(name) && name !== task).map(around)}</div></details></form>
    <${Result} of=${shown} texts=${texts} may=${may} tell=${tell} />
    <${Snippets} request=${request} keyed=${keyed} may=${may} /></section>`;
}

const words = (task) => `${task[0].toUpperCase()}${task.slice(1).replaceAll("_", " ")}`;
const given = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));

/** How to kill a worker while an answer comes. No route of a gateway ends a process: it would do so in production too. */
function Kill() {
  const [stats] = usePoll("/v1/admin/stats", POLL_MS);
  const workers = (stats?.workers ?? []).filter((one) => one.state !== "stopped");
  return html`<section aria-labelledby="kill"><h2 id="kill">Kill the worker while it answers</h2>
    <p>Ask for a long answer, then run this on the worker's machine. The answer goes on when <code>penstock up</code> has started the worker again,
      and the text that was shown stays.</p>
    ${workers.map((one) => html`<pre>kill -9 ${one.pid || "PID"}   # ${one.worker_id}</pre>`)}
    <p class="faint"><code>penstock status</code> shows the pid too. The page has no button for it: no route of a gateway ends a process.</p></section>`;
}
