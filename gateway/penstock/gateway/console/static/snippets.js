// The same request by curl, Python and Kafka.
import {html, usePoll} from "./parts.js";

const WAIT_S = 60, CLUSTER_MS = 60_000;
const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export const curl = (request, keyed) => `curl '${location.origin}/v1/requests?wait=${WAIT_S}' -H 'content-type: application/json' ${
  keyed ? `-H "authorization: Bearer $PENSTOCK_API_KEY" ` : ""}-d ${shell(JSON.stringify(request))}`;
export const python = (request, keyed) => isChat(request) ? byOpenai(request, keyed) : byHttp(request, keyed);

/** @param {any} of */
export function Snippets({request, keyed, may}) {
  const name = isChat(request) ? "Python, with the package openai" : "Python";
  return html`<details><summary>The same by curl, Python and Kafka</summary><h3>curl</h3><pre>${curl(request, keyed)}</pre>
    <h3>${name}</h3><pre>${python(request, keyed)}</pre>
    <h3>Kafka, with kcat</h3>${may("admin") ? html`<${OfCluster} request=${request} />` : html`<pre>${kcat(request)}</pre>`}</details>`;
}

/** With the address that the gateway uses, which operators alone are told. */
function OfCluster({request}) {
  const [stats] = usePoll("/v1/admin/stats", CLUSTER_MS, {once: true});
  return html`<pre>${kcat(request, stats?.kafka)}</pre>`;
}

/** By `printf`: the `echo` of some shells changes backslashes. */
function kcat(request, cluster = null) {
  const {conversation_id: key} = request, {bootstrap_servers: servers, topic_prefix: prefix} = cluster ?? {bootstrap_servers: "KAFKA:9092", topic_prefix: ""};
  return (cluster ? "" : `# KAFKA: the broker's address. A topic prefix, if there is one, stands before the topic's name.\n`)
    + `printf '%s\\n' ${shell(JSON.stringify({request_id: "a-new-id", ...request}))} |\n  kcat -P -b ${servers} -t ${prefix}${topic(request)}`
    + (key ? ` -k ${key} -X partitioner=murmur2_random` : "");
}

/** Whether it is one question and nothing that OpenAI's clients have no field for. */
const isChat = ({task, model, stream, payload, ...more}) => task === "text_generation" && !Object.keys(more).length
  && payload.messages?.length === 1 && typeof payload.messages[0].content === "string" && Object.keys(payload).every((name) => OPENAI.includes(name));
/** Fields of a payload that OpenAI's clients call the same. */
const OPENAI = ["messages", "max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty"];

function byOpenai({model, payload: {messages, ...payload}}, keyed) {
  const given = Object.entries({model: model ?? "default", ...payload}).map(([name, value]) => `${name}=${literal(value)}, `).join("");
  return `${keyed ? "import os\n\n" : ""}from openai import OpenAI\n\n`
    + `client = OpenAI(base_url="${location.origin}/v1", api_key=${keyed ? `os.environ["PENSTOCK_API_KEY"]` : `"none"`})\n`
    + `messages = ${literal(messages)}\n`
    + `print(client.chat.completions.create(${given}messages=messages).choices[0].message.content)`;
}

function byHttp(request, keyed) {
  return `${keyed ? "import os\n\n" : ""}import httpx\n\nrequest = ${literal(request)}\n`
    + `url = "${location.origin}/v1/requests?wait=${WAIT_S}"\n`
    + `${keyed ? `headers = {"authorization": f"Bearer {os.environ['PENSTOCK_API_KEY']}"}\n` : ""}`
    + `print(httpx.post(url, json=request, ${keyed ? "headers=headers, " : ""}timeout=90).json())`;
}

/** JSON as Python writes it. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

/** The topic of a request, without a prefix. */
function topic({task, priority = 5, pool}) {
  const kind = task === "embedding" ? "embedding" : task.startsWith("image_") ? "image" : "";
  const name = kind ? `inference.${kind}.request` : `inference.request.${priority < 4 ? "high" : priority < 8 ? "medium" : "low"}`;
  return pool ? `${name}.${pool}` : name;
}
