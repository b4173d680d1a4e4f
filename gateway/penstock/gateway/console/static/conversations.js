// The caller's conversations, and one of them: its turns as they come, its tree of forks, and what can be done with it.
import {useEffect, useState} from "./vendor/hooks.js";
import {Act, Ago, Due, Facts, Failure, Table, html, times, usePoll} from "./parts.js";
import {call, get, part} from "./api.js";
import {Calls, ModelField, Standing, pretty, useAsk, useFollow} from "./asking.js";

const POLL_MS = 10_000, RUNNING_MS = 2000;
const PAGE = 50;
/** Instead of an item: the page with the first items. */
const START = "start";
const MOST_LIVE = 200;
const AGAIN_MS = 3000;
const SHOWN_CHARS = 20_000;
const MOST_BRANCHES = 200;
const ROUTE = "/v1/conversations";
const link = (id, query = "") => `#/conversations/${part(id)}${query}`;
const at = (seconds) => new Date(1000 * seconds).toISOString();
const time = (seconds) => seconds === null || seconds === undefined ? null : html`<${Ago} at=${at(seconds)} />`;
const due = (seconds) => seconds && html`<${Due} at=${at(seconds)} />`;

export function Conversations({query, may, tell}) {
  const after = query.get("after");
  const [found, error] = usePoll(`${ROUTE}?limit=${PAGE}${after ? `&after=${part(after)}` : ""}`, POLL_MS);
  const rows = (found?.data ?? []).map((one) => [html`<a href=${link(one.id)}><code><bdi>${one.id}</bdi></code></a>`,
    html`<bdi>${one.title ?? ""}</bdi>`, time(one.last_active_at), due(one.expires_at)]);
  const show = (event) => {
    event.preventDefault();
    location.hash = link(event.target.elements.id.value.trim());
  };
  return html`<section aria-labelledby="conversations"><h2 id="conversations">Conversations</h2>
      <form onSubmit=${show}><label>Id <input name="id" size="24" required autocomplete="off" /></label><button>Show</button></form>
      <${Failure} error=${error} />
      ${found && html`<${Table} name="List of conversations" columns=${["id", "title", "newest record", "is deleted"]} rows=${rows}
        empty="None. A request with a conversation_id begins one; so does: penstock chat" />
      <p class="row">${after && html`<a href="#/conversations">First page</a>`}
        ${found.has_more && html`<a href=${`#/conversations?after=${part(found.last_id)}`}>Next page</a>`}</p>`}</section>
    ${may("submit") && html`<${New} tell=${tell} />`}`;
}

function New({tell}) {
  const make = async (event) => {
    event.preventDefault();
    const given = [...new FormData(event.target)].map(([name, value]) => [name, `${value}`.trim()]).filter(([, value]) => value);
    try {
      location.hash = link((await call("POST", ROUTE, Object.fromEntries(given))).id);
    } catch (error) {
      tell({error});
    }
  };
  return html`<section aria-labelledby="new"><h2 id="new">New conversation</h2>
    <form onSubmit=${make}><label>Id <input name="id" size="24" placeholder="chosen by the gateway" pattern="[A-Za-z0-9_\\-]+" autocomplete="off" /></label>
      <label>Title <input name="title" size="24" maxlength="512" autocomplete="off" /></label><button>Create</button></form></section>`;
}

export function Conversation({id, query, may, tell}) {
  const [one, error, again_one] = usePoll(`${ROUTE}/${part(id)}`, POLL_MS, {object: true});
  const [tree, no_tree, again] = usePoll(`${ROUTE}/${part(id)}/tree`, POLL_MS, {object: true});
  const begun = () => { if (error) { again_one(); again(); } };
  const forked = (answer) => { again(); location.hash = link(answer.id); };
  return html`<section aria-labelledby="conversation"><h2 id="conversation">Conversation <code><bdi>${id}</bdi></code></h2>
      <${Failure} error=${error} />
      ${one && html`<${About} one=${one} may=${may} tell=${tell} />`}
      <p><a href="#/conversations">All conversations</a></p></section>
    <${Turns} key=${`${query}`} id=${id} query=${query} may=${may} tell=${tell} forked=${forked} begun=${begun} />
    ${tree?.data.length > 1 && html`<section aria-labelledby="tree"><h2 id="tree">Tree of forks</h2><${Failure} error=${no_tree} />
      <${Branches} of=${tree.data} id=${id} /></section>`}`;
}

function About({one, may, tell}) {
  const from = one.forked_from, path = `${ROUTE}/${part(one.id)}`;
  const [shown, ask] = useAsk(may);
  const facts = {title: one.title && html`<bdi>${one.title}</bdi>`, begun: time(one.created_at), "newest record": time(one.last_active_at),
    expires: one.expires_at && html`${due(one.expires_at)}, if nobody uses it before`,
    "goes on from": from && html`<a href=${link(from.conversation_id, `?before=msg_${from.through + 1}`)}><bdi>${from.conversation_id}</bdi>, offset ${from.through}</a>`,
    metadata: Object.keys(one.metadata).length ? html`<bdi>${JSON.stringify(one.metadata)}</bdi>` : null};
  return html`<${Facts} of=${facts} />
    <p class="row"><a href=${`${path}/export`} download>Export</a>
      ${may("submit") && may("read") && html`<button type="button" aria-disabled=${shown.busy}
        onClick=${() => ask({task: "summarization", conversation_id: one.id, payload: {}})}>Summarize</button>`}
      ${may("cancel") && html`<${Act} label="delete" about=${`delete the conversation ${one.id}`} method="DELETE" path=${path} tell=${tell}
        confirm=${`Delete ${one.id} with all its turns? Its forks keep what they inherited.`} then=${() => { location.hash = "#/conversations"; }} />`}</p>
    ${shown.state && html`<h3>Summary</h3><p class="answer"><bdi>${shown.text}</bdi></p><${Standing} of=${shown} may=${may} tell=${tell} />`}`;
}

/** A page of turns. The newest page goes on as turns are appended. */
function Turns({id, query, may, tell, forked, begun}) {
  const before = query.get("before"), after = query.get("after"), newest = !before && !after;
  const [shown, ask] = useAsk(may);
  const {items, earlier, later, error, state} = useItems(id, before, after, shown.result !== null);
  useEffect(() => { if (items) begun(); }, [items === null]);
  const has = (role) => items?.some((item) => item.request_id === shown.id && (item.role ?? "assistant") === role);
  return html`<section aria-labelledby="turns"><h2 id="turns">Turns</h2>
    <${Failure} error=${error} />
    ${items && html`<nav class="row" aria-label="Pages of turns">${earlier && html`<a href=${link(id, `?after=${START}`)}>Beginning</a>
      <a href=${link(id, `?before=${items[0].id}`)}>Earlier</a>`}${later && items.length > 0 && html`<a href=${link(id, `?after=${items.at(-1).id}`)}>Later</a>`}
      ${newest ? html`<span class="faint" role="status">${state}</span>` : html`<a href=${link(id)}>Newest</a>`}</nav>
    <ol class="turns">${grouped(items).map((turn) => html`<${Turn} key=${turn.offset} turn=${turn} id=${id} may=${may} tell=${tell} forked=${forked} />`)}
</ol>
    ${!items.length && html`<p class="faint">No turns yet. The form below asks; so does: penstock chat -c ${id}</p>`}`}
    ${newest && !shown.busy && html`<${Running} id=${id} asked=${shown.id} />`}
    ${newest && may("submit") && state !== "deleted" && html`<${Ask} id=${id} shown=${shown} ask=${ask} stands=${has("assistant")} may=${may} tell=${tell} />`}</section>`;
}

/** The items of each message together. */
function grouped(items) {
  const turns = new Map();
  for (const item of items) turns.set(item.offset, [...turns.get(item.offset) ?? [], item]);
  return [...turns].map(([offset, some]) => ({offset, items: some}));
}

/** The items of a page, the oldest first; those of the newest page with what comes. `answered`: one that was not there begins. */
function useItems(id, before, after, answered) {
  const [found, setFound] = useState(/** @type {any} */ ({items: null, earlier: false, later: false, error: null, state: ""}));
  const begins = answered && found.error?.status === 404;
  useEffect(() => {
    let ended = false, timer, source, behind = -1;
    const path = `${ROUTE}/${part(id)}`, from = before ?? (after === START ? null : after);
    const change = (changed) => ended || setFound((now) => ({...now, ...changed(now)}));
    const live = () => {
      source?.close();
      source = new EventSource(`${path}/events?after=${behind}`);
      source.addEventListener("following", () => change(() => ({state: "follows what comes", error: null})));
      source.addEventListener("item", ({data}) => {
        const {item} = JSON.parse(data);
        behind = item.offset;
        change(({items, earlier}) => ({items: [...items, item].slice(-MOST_LIVE), earlier: earlier || items.length >= MOST_LIVE}));
      });
      source.addEventListener("deleted", () => { source.close(); source = null; change(() => ({state: "deleted"})); });
      source.onerror = () => {
        change(() => ({state: "the connection has ended"}));
        if (source.readyState === EventSource.CLOSED && !ended) timer = setTimeout(read, AGAIN_MS);
      };
      if (document.hidden) source.close();
    };
    const read = async () => {
      try {
        const page = await get(`${path}/items?limit=${PAGE}&${after ? "order=asc" : "order=desc"}${from ? `&after=${part(from)}` : ""}`);
        const items = after ? page.data : page.data.reverse();
        behind = items.at(-1)?.offset ?? -1;
        change(() => ({items, error: null, earlier: after ? items[0]?.offset > 0 : page.has_more, later: before ? true : after ? page.has_more : false}));
        if (!before && !after && !ended) live();
      } catch (error) {
        change(() => ({error}));
        if (!ended && (begins || error.status !== 404)) timer = setTimeout(read, AGAIN_MS);
      }
    };
    /** A page that is not looked at holds no connection. */
    const seen = () => { if (document.hidden) source?.close(); else if (source?.readyState === EventSource.CLOSED) live(); };
    document.addEventListener("visibilitychange", seen);
    read();
    return () => { ended = true; clearTimeout(timer); source?.close(); document.removeEventListener("visibilitychange", seen); };
  }, [id, before, after, begins]);
  return found;
}

function Turn({turn, id, may, tell, forked}) {
  const [{request_id, created_at}] = turn.items;
  const role = turn.items[0].role ?? (turn.items[0].type === "function_call" ? "assistant" : "tool");
  return html`<li class=${`turn ${role}`}><p class="row faint"><strong>${role}</strong> ${time(created_at)}
      ${request_id && html`<a href=${`#/requests/${part(request_id)}`}>request</a>`}
      ${may("submit") && html`<${Act} label="fork here" about=${`fork behind offset ${turn.offset}`} path=${`${ROUTE}/${part(id)}/fork`}
        body=${{through: turn.offset}} tell=${tell} then=${forked} />`}</p>
    ${turn.items.map((item) => html`<${Item} item=${item} />`)}</li>`;
}

function Item({item}) {
  if (item.type === "function_call") return html`<${Calls} calls=${[item]} />`;
  if (item.type === "function_call_output") return html`<p>answer to <code><bdi>${item.call_id}</bdi></code></p><pre>${pretty(item.output)}</pre>`;
  return item.content.map((piece) => piece.image_url
    ? html`<a href=${piece.image_url}><img src=${piece.image_url} loading="lazy" alt=${`image of offset ${item.offset}`} /></a>`
    : html`<p class="said"><bdi>${piece.text.slice(0, SHOWN_CHARS)}</bdi>${piece.text.length > SHOWN_CHARS && html`<span class="faint"> … ${
      times(piece.text.length - SHOWN_CHARS, "more character")}; the export has all</span>`}</p>`);
}

/** An answer that is being made, whoever asked: also the page's own, when another was shown meanwhile. */
function Running({id, asked}) {
  const [found] = usePoll(`/v1/requests?conversation_id=${part(id)}&limit=1`, RUNNING_MS);
  const one = found?.data[0];
  return one && !one.done && one.request_id !== asked && one.task !== "summarization" && html`<${Answer} key=${one.request_id} id=${one.request_id} />`;
}

function Answer({id}) {
  const of = useFollow(id);
  return html`<div aria-live="polite"><p class="answer"><bdi>${of.text}</bdi></p><${Calls} calls=${of.calls} /></div><${Standing} of=${of} />`;
}

/** A turn that is added; what it answers is shown until the answer stands in the conversation. */
function Ask({id, shown, ask, stands, may, tell}) {
  const submit = (event) => {
    event.preventDefault();
    const {message, model} = event.target.elements;
    ask({task: "text_generation", stream: true, conversation_id: id, model: model.value || null, payload: {messages: [{role: "user", content: message.value}]}});
    if (!shown.busy) message.value = "";
  };
  return html`${shown.state && !stands && html`<div aria-live="polite"><p class="answer"><bdi>${shown.text}</bdi></p><${Calls} calls=${shown.calls} /></div>`}
    <form onSubmit=${submit}><label class="wide">Message <textarea name="message" rows="2" required></textarea></label>
      <${ModelField} task="text_generation" /><button aria-disabled=${shown.busy}>Ask</button></form>
    ${shown.state && html`<${Standing} of=${shown} may=${may} tell=${tell} />`}`;
}

/** The tree as nested lists: each conversation with those that go on from it. */
function Branches({of, id}) {
  const shown = of.slice(0, MOST_BRANCHES), known = new Set(shown.map((one) => one.id));
  const below = (parent) => shown.filter((one) => parent === null ? !known.has(one.forked_from?.conversation_id) : one.forked_from?.conversation_id === parent);
  const list = (parent) => {
    const branches = below(parent);
    return branches.length > 0 && html`<ul>${branches.map((one) => html`<li><${Branch} one=${one} id=${id} />${list(one.id)}</li>`)}</ul>`;
  };
  return html`${list(null)}${of.length > shown.length && html`<p class="faint">${times(of.length - shown.length, "further conversation")}: penstock conversations forks ${id}</p>`}`;
}

function Branch({one, id}) {
  const name = html`<code><bdi>${one.id}</bdi></code>`;
  return html`${one.deleted ? html`<s>${name}</s>` : html`<a href=${link(one.id)} aria-current=${one.id === id ? "page" : null}>${name}</a>`}
    ${" "}<bdi>${one.title ?? ""}</bdi> <span class="faint">${one.forked_from ? `behind offset ${one.forked_from.through}, ` : ""}${
      times(one.messages, "own message")}${one.deleted ? ", deleted" : ""}</span>`;
}
