// The whole page: who looks, and what is shown for the address behind `#`.
import {render} from "./vendor/preact.js";
import {useEffect, useState} from "./vendor/hooks.js";
import {Failure, html, usePoll} from "./parts.js";
import {logIn, logOut} from "./api.js";
import {Overview} from "./overview.js";
import {Request, Requests} from "./requests.js";
import {TryOut} from "./tryout.js";

const LOOK_MS = 10_000;
const TOAST_MS = 6000;

function App() {
  const [stats, error, again] = usePoll("/v1/stats", LOOK_MS);
  const [place, setPlace] = useState(location.hash);
  const [toast, setToast] = useState(null);
  useEffect(() => {
    const moved = () => setPlace(location.hash);
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    const timer = setTimeout(() => setToast(null), TOAST_MS);
    return () => clearTimeout(timer);
  }, [toast]);
  const id = requestOf(place);
  useEffect(() => { document.title = id ? `Request ${id} – Penstock` : "Penstock"; }, [id]);
  if (error?.status === 401) return html`<${LogIn} said=${error} then=${again} />`;
  const may = (scope) => stats !== null && (stats.scopes.includes(scope) || stats.scopes.includes("admin"));
  return html`<${Header} stats=${stats} then=${again} tell=${setToast} />
    <main>${error && html`<section><${Failure} error=${error} /></section>`}
      ${stats && html`<${View} id=${id} keyed=${stats.key_id !== null} may=${may} tell=${setToast} />`}</main>
    <div role="status">${toast && html`<div class="toast">${toast.error ? html`<${Failure} error=${toast.error} />` : toast.text}</div>`}</div>`;
}

/** The id in `#/requests/ID`, as it stands if it is not escaped well. */
function requestOf(place) {
  const [, kind, id] = place.split("/");
  if (kind !== "requests" || !id) return null;
  try { return decodeURIComponent(id); } catch { return id; }
}

function View({id, keyed, may, tell}) {
  if (id) return html`<${Request} id=${id} may=${may} tell=${tell} />`;
  return html`${may("admin") && html`<${Overview} tell=${tell} />`}
    ${may("read") && html`<${Requests} />`}
    ${may("submit") && may("read") && html`<${TryOut} keyed=${keyed} />`}`;
}

function Header({stats, then, tell}) {
  const leave = async () => {
    try {
      await logOut();
      then();
    } catch (error) {
      tell({text: `You are still logged in: ${error.message}`});
    }
  };
  return html`<header><h1><a href="#/">Penstock</a></h1>
    ${stats && html`<span>tenant <bdi>${stats.tenant}</bdi></span>`}
    <nav aria-label="Pages"><a href="/docs">HTTP routes</a><a href="/metrics">Metrics</a>
      ${stats?.key_id && html`<button type="button" onClick=${leave}>Log out</button>`}</nav></header>`;
}

function LogIn({said, then}) {
  const [error, setError] = useState(null);
  const enter = async (event) => {
    event.preventDefault();
    const field = event.target.elements.key;
    try {
      await logIn(field.value.trim());
      then();
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
