// The whole page: who looks, and what is shown for the address behind `#`.
import {render} from "./vendor/preact.js";
import {useEffect, useState} from "./vendor/hooks.js";
import {Failure, html, usePoll} from "./parts.js";
import {logIn, logOut} from "./api.js";
import {Audit} from "./audit.js";
import {Chat} from "./chat.js";
import {Conversation, Conversations} from "./conversations.js";
import {DeadLetter, DeadLetters} from "./dead_letters.js";
import {Key, Keys} from "./keys.js";
import {Models} from "./models.js";
import {Overview} from "./overview.js";
import {Playground} from "./playground.js";
import {Request} from "./request.js";
import {Newest, Requests} from "./requests.js";
import {Usage} from "./usage.js";
import {OwnWaiting} from "./waiting.js";
import {Workers} from "./workers.js";

const LOOK_MS = 10_000;
/** What was done is shown so long; errors, and what is to be copied by hand, until they are closed. */
const TOAST_MS = 6000;

/** The pages by the first word behind `#/`: the scope that a key needs, and what is shown. */
const PAGES = {
  "": {name: "Overview", show: Home},
  requests: {name: "Requests", scope: "read", show: (shown) => shown.id ? html`<${Request} ...${shown} />` : html`<${Requests} ...${shown} />`},
  models: {name: "Models", scope: "admin", show: (shown) => html`<${Models} ...${shown} />`},
  conversations: {name: "Conversations", scope: "read", show: (shown) => shown.id ? html`<${Conversation} ...${shown} />` : html`<${Conversations} ...${shown} />`},
  playground: {name: "Playground", scope: "submit", show: (shown) => html`<${Playground} ...${shown} />`},
  "dead-letters": {name: "Dead letters", scope: "admin", show: (shown) => shown.id ? html`<${DeadLetter} ...${shown} />` : html`<${DeadLetters} ...${shown} />`},
  usage: {name: "Usage", scope: "read", show: (shown) => html`<${Usage} ...${shown} />`},
  keys: {name: "Keys and limits", scope: "admin", show: (shown) => shown.id ? html`<${Key} ...${shown} />` : html`<${Keys} ...${shown} />`},
  audit: {name: "Audit", scope: "admin", show: (shown) => html`<${Audit} ...${shown} />`},
  workers: {name: "Workers and gateways", scope: "admin", show: () => html`<${Workers} />`},
};

function App() {
  const [stats, error] = usePoll("/v1/stats", LOOK_MS);
  const [hash, setHash] = useState(location.hash);
  const [toast, setToast] = useState(null);
  useEffect(() => {
    const moved = () => setHash(location.hash);
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    if (typeof toast?.text !== "string") return;
    const timer = setTimeout(() => setToast(null), TOAST_MS);
    return () => clearTimeout(timer);
  }, [toast]);
  const place = parse(hash);
  useEffect(() => { document.title = title(place); }, [hash]);
  if (error?.status === 401) return html`<${LogIn} said=${error} />`;
  const scopes = stats?.scopes ?? error?.details?.scopes, unread = !stats && scopes;
  const may = (scope) => Boolean(scopes) && (!scope || scopes.includes(scope) || scopes.includes("admin"));
  const shown = {id: place.id, query: place.query, may, tell: setToast, tenant: stats?.tenant, keyed: stats?.key_id !== null};
  return html`<${Header} stats=${stats} keyed=${stats?.key_id || unread} place=${place} may=${may} tell=${setToast} />
    <main>${unread ? html`<section><p>The session's key has ${scopes.length ? html`the scope <code>${scopes.join(", ")}</code>` : "no scope"}, and may call
      <a href="/docs">the routes</a> that need no other. What the system does is shown to keys with the scope <code>read</code>.</p></section>`
        : error && html`<section><${Failure} error=${error} /></section>`}
      ${scopes && (may(place.page.scope) ? html`<${place.page.show} key=${place.kind + (place.id ?? "")} ...${shown} />`
        : html`<section><p>This page needs a key with the scope <code>${place.page.scope}</code>.</p></section>`)}</main>
    <div role="status">${toast && html`<div class="toast">${toast.error ? html`<${Failure} error=${toast.error} />` : toast.text}
      <button type="button" onClick=${() => setToast(null)}>Close</button></div>`}</div>`;
}

/** `#/KIND/ID?QUERY`, as it stands if it is not escaped well. An unknown kind is the first page. */
function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [named, raw] = path.split(/\/(.*)/s);
  const kind = Object.hasOwn(PAGES, named) ? named : "";
  let id = kind && raw ? raw : null;
  try { id &&= decodeURIComponent(id); } catch { /* shown as it stands */ }
  return {kind, page: PAGES[kind], id, query: new URLSearchParams(query)};
}

function title({kind, page, id}) {
  if (!kind) return "Penstock";
  return `${id ? `${page.name.replace(/s( and .*)?$/, "")} ${id}` : page.name} – Penstock`;
}

function Home({may, tell, keyed}) {
  return html`${may("admin") ? html`<${Overview} tell=${tell} />` : may("read") && html`<${OwnWaiting} />`}
    ${may("read") && html`<${Newest} may=${may} tell=${tell} />`}
    ${may("submit") && html`<${Chat} short=${true} keyed=${keyed} may=${may} tell=${tell} />`}`;
}

function Header({stats, keyed = false, place, may, tell}) {
  const leave = async () => {
    try {
      await logOut();
      location.reload();
    } catch (error) {
      tell({error: Object.assign(error, {message: `You are still logged in: ${error.message}`})});
    }
  };
  return html`<header><h1><a href="#/">Penstock</a></h1>
    ${stats && html`<span>tenant <bdi>${stats.tenant}</bdi></span>`}
    <nav aria-label="Pages">${may && Object.entries(PAGES).filter(([, page]) => may(page.scope)).map(([kind, page]) =>
        html`<a href=${`#/${kind}`} aria-current=${kind === place.kind ? "page" : null}>${page.name}</a>`)}
      <a href="/docs">HTTP routes</a><a href="/metrics">Metrics</a>
      ${keyed && html`<button type="button" onClick=${leave}>Log out</button>`}</nav></header>`;
}

/** A log-in loads the page anew, as a log-out does: no module keeps what another key has read. */
function LogIn({said}) {
  const [error, setError] = useState(null);
  const enter = async (event) => {
    event.preventDefault();
    const field = event.target.elements.key;
    try {
      await logIn(field.value.trim());
      location.reload();
    } catch (failure) {
      setError(failure);
    }
    field.value = "";
  };
  return html`<${Header} /><main><section aria-labelledby="login"><h2 id="login">This gateway asks for a key</h2>
    <form onSubmit=${enter}><label class="wide">Key
      <input name="key" type="password" autocomplete="off" required /></label><button>Log in</button></form>
    <${Failure} error=${error} />
    <p class="faint">The key is sent once, and no script keeps it. The session ends after an hour, when you log out, or when the key is
      revoked. <code>penstock keys create</code> makes a key; the first screen needs one with the scope admin.</p>
    ${said.message.startsWith("send a key") ? "" : html`<p class="faint">${said.message}</p>`}</section></main>`;
}

render(html`<${App} />`, document.getElementById("app"));
