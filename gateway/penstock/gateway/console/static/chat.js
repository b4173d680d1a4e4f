// A chat: the first question of the first screen, and with images, tools and a conversation in the playground.
import {useState} from "./vendor/hooks.js";
import {html} from "./parts.js";
import {part} from "./api.js";
import {ModelField, useAsk} from "./asking.js";
import {ImagesField, JsonField} from "./fields.js";
import {Result} from "./result.js";
import {Snippets} from "./snippets.js";

const QUESTION = "In one sentence, what is a river?";
const TOKENS = 200;
const CHOICES = ["auto", "required", "none"];
const TOOLS = [{type: "function", function: {name: "weather", description: "The weather in a city",
  parameters: {type: "object", properties: {city: {type: "string"}}, required: ["city"]}}}];

/** @param {any} shown `short`: a question and its answer alone */
export function Chat({short = false, keyed, may, tell}) {
  const [given, setGiven] = useState(/** @type {any} */ ({prompt: QUESTION, images: [], model: "", conversation_id: "", tools: undefined, choice: "auto"}));
  const [shown, ask] = useAsk(may);
  const put = (name) => (value) => setGiven((now) => ({...now, [name]: value}));
  const request = asked(given);
  const submit = (event) => { event.preventDefault(); ask({...request, stream: true}); };
  const field = (name) => (event) => put(name)(event.target.value);
  return html`<section aria-labelledby="try"><h2 id="try">${short ? "Try it" : "Chat"}</h2>
    <form onSubmit=${submit}><label class="wide">Question
      <input value=${given.prompt} onInput=${field("prompt")} required /></label>
      ${!short && html`<${ModelField} task="text_generation" onChange=${put("model")} />
        <label>Conversation id <input value=${given.conversation_id} pattern="[A-Za-z0-9_\\-]+" placeholder="none" autocomplete="off" onInput=${field("conversation_id")} /></label>`}
      <button aria-disabled=${shown.busy}>Ask</button>
      ${!short && html`<${More} given=${given} put=${put} />`}</form>
    <${Result} of=${shown} may=${may} tell=${tell} />
    ${given.conversation_id && may("read") && html`<p><a href=${`#/conversations/${part(given.conversation_id)}`}>The conversation</a></p>`}
    ${short && html`<p><a href="#/playground">With images, tools and other tasks</a></p>`}
    <${Snippets} request=${request} keyed=${keyed} may=${may} /></section>`;
}

function More({given, put}) {
  return html`<details class="whole"><summary>Images and tools</summary>
    <${ImagesField} label="image" ids=${given.images} onIds=${put("images")} many=${true} />
    <${JsonField} label="Tools" hint="A list of functions, as OpenAI has them" start=${given.tools} onValue=${put("tools")} />
    <label>Tool choice <select onChange=${(event) => put("choice")(event.target.value)}>${CHOICES.map((one) => html`<option>${one}</option>`)}</select></label>
    <p class="faint">A model that knows tools calls them; the calls are shown, and not carried out. As this: <code>${JSON.stringify(TOOLS)}</code></p></details>`;
}

/** The request as the gateway takes it. */
function asked({prompt, images, model, conversation_id, tools, choice}) {
  const content = images.length ? [...images.map((id) => ({type: "image", image: {artifact_id: id}})), {type: "text", text: prompt}] : prompt;
  return {task: "text_generation", ...model && {model}, ...conversation_id && {conversation_id},
    payload: {messages: [{role: "user", content}], max_tokens: TOKENS, ...tools && {tools, tool_choice: choice}}};
}
