// API keys and limits of tenants: made and changed while gateways run.
import {useEffect, useRef, useState} from "./vendor/hooks.js";
import {Act, Ago, Due, Facts, Failure, Table, html, local, usePoll} from "./parts.js";
import {call, getPages, now, part} from "./api.js";
import {SchemaField} from "./fields.js";
import {Copy} from "./request.js";

const POLL_MS = 3000;
const SLOW_MS = 30_000;
const ROUTE = "/v1/admin/keys";
const LIMITS = "/v1/admin/limits";
const SCOPES = ["submit", "read", "cancel", "admin"];
const START = {scopes: ["submit", "read", "cancel"], max_priority: 0, rate: null, limits: {}, name: null, expires_at: null};

export function Keys({query, tell, keyed}) {
  const after = query.get("after");
  const [found, error, again] = usePoll(`${ROUTE}?limit=100${after ? `&after=${part(after)}` : ""}`, POLL_MS);
  const [used] = usePoll("/v1/admin/usage?group_by=day,key&limit=100", SLOW_MS, {read: getPages});
  const [secret, setSecret] = useState(null);
  return html`<section aria-labelledby="keys"><h2 id="keys">Keys</h2>
      <${Failure} error=${error} />
      ${found && html`<${List} found=${found.data} used=${used} keyed=${keyed} tell=${tell} again=${again} />
        <p class="row">${after && html`<a href="#/keys">Oldest</a>`}${found.has_more && html`<a href=${`#/keys?after=${part(found.last_id)}`}>Newer</a>`}</p>`}</section>
    ${secret && html`<${Secret} of=${secret} tell=${tell} done=${() => setSecret(null)} />`}
    ${keyed && html`<section aria-labelledby="make"><h2 id="make">Make a key</h2>
      <${Rights} start=${START} path=${ROUTE} label="Make" fresh=${true} tell=${tell} then=${(made) => { setSecret(made); again(); }} />
      <p class="faint">The same by command: <code>penstock keys create --url … --tenant … --scopes …</code></p></section>`}
    <${Limits} tell=${tell} />`;
}

function List({found, used, keyed, tell, again}) {
  const days = new Map((used?.data ?? []).map((one) => [one.key_id, one.day]).reverse());
  const unused = used && !used.has_more ? "none in 30 days" : "not known";
  const rows = found.map((one) => [html`<a href=${`#/keys/${part(one.id)}`}><code>${one.id}</code></a>`, html`<bdi>${one.name ?? ""}</bdi>`, html`<bdi>${one.tenant}</bdi>`,
    rights(one), html`<${Ago} at=${one.created_at} />`, ends(one), days.get(one.id) ?? unused, html`<${Acts} one=${one} tell=${tell} then=${again} />`]);
  return html`<${Table} name="List of keys" columns=${["id", "name", "tenant", "rights", "made", "ends", "last request (day, UTC)", "orders"]} rows=${rows} keys=${found.map((one) => one.id)}
    empty=${keyed ? "None." : "This gateway asks for no key. penstock keys create --scopes admin makes the first one; name its file as auth.keys_file."} />`;
}

/** Scopes and limits of a key in words. */
function rights({scopes, max_priority, rate, limits}) {
  const said = [max_priority > 0 && `priority ${max_priority} and less urgent`, rate && `${rate} submissions/s`, limited(limits)];
  return html`${scopes.join(", ")}${said.filter(Boolean).map((one) => html`<div class="faint"><bdi>${one}</bdi></div>`)}`;
}
const limited = (limits) => Object.entries(limits ?? {}).map(([name, value]) => `${name} ${value === null ? "no limit" : Array.isArray(value) ? value.join(" ") : value}`).join(", ");

function ends({expires_at, former_until}) {
  const former = former_until.at(-1);
  return html`${expires_at ? html`<${Due} at=${expires_at} />` : html`<span class="faint">when it is revoked</span>`}
    ${former && html`<div class="faint">the former secret <${Due} at=${former} /></div>`}`;
}

/** A key of the file is changed there alone. */
function Acts({one, tell, then}) {
  if (one.source === "file") return html`<span class="faint">in the keys file</span>`;
  return html`<${Act} label="revoke" about=${`revoke the key ${one.id}`} method="DELETE" path=${`${ROUTE}/${part(one.id)}`} danger=${true} tell=${tell} then=${then}
    confirm=${`Revoke the key ${one.id}${one.name ? ` (${one.name})` : ""} of ${one.tenant}? Its calls are refused, and its sockets and streams end.`} />`;
}

export function Key({id, tell}) {
  const [one, error, again] = usePoll(`${ROUTE}/${part(id)}`, POLL_MS, {object: true});
  const [secret, setSecret] = useState(null), there = one && !error;
  return html`<section aria-labelledby="key"><h2 id="key">Key <code><bdi>${id}</bdi></code></h2>
      <${Failure} error=${error} />
      ${one && html`<${Facts} of=${{name: one.name && html`<bdi>${one.name}</bdi>`, tenant: html`<bdi>${one.tenant}</bdi>`, rights: rights(one), made: html`<${Ago} at=${one.created_at} />`,
        "made by": one.made_by && html`<a href=${`#/keys/${part(one.made_by)}`}><code>${one.made_by}</code></a>`,
        "changed by": one.updated_by && html`<a href=${`#/keys/${part(one.updated_by)}`}><code>${one.updated_by}</code></a>`, ends: ends(one)}} />`}
      ${there && html`<p class="row"><${Acts} one=${one} tell=${tell} then=${() => { location.hash = "#/keys"; }} /></p>`}
      ${one?.source === "file" && html`<p>It is changed by <code>penstock keys</code> with <code>--file</code>, on the host of its keys file.</p>`}
      <p><a href="#/keys">All keys</a> · <a href=${`#/audit?key_id=${part(id)}`}>What it did</a></p></section>
    ${secret && html`<${Secret} of=${secret} tell=${tell} done=${() => setSecret(null)} />`}
    ${there && one.source === "topic" && html`<section aria-labelledby="rotate"><h2 id="rotate">Rotate</h2>
        <${Rotate} id=${id} tell=${tell} then=${(made) => { setSecret(made); again(); }} /></section>
      <section aria-labelledby="rights"><h2 id="rights">Change rights</h2>
        <${Rights} key=${id} start=${one} path=${`${ROUTE}/${part(id)}`} label="Change" tell=${tell} then=${again} />
        <p class="faint">In force within a second, also for open connections. The tenant of a key never changes.</p></section>`}`;
}

/** A new secret, until the reader has put it away: no route shows it again. It gets the focus. */
function Secret({of, tell, done}) {
  const box = useRef(/** @type {any} */ (null));
  useEffect(() => box.current?.focus(), [of.secret]);
  return html`<section aria-labelledby="secret" tabindex="-1" ref=${box}><h2 id="secret">Secret of the key <code>${of.id}</code></h2>
    <p class="warn">It is shown once. Put it where its holder finds it.</p><pre>${of.secret}</pre>
    <p class="row"><${Copy} label="copy the secret" of=${async () => of.secret} tell=${tell} /><button type="button" onClick=${done}>It is kept</button></p></section>`;
}

/** What sends the body of a form; with the key in its field `own`, if it has one: a session makes and changes no keys, since a key outlives it. */
function useSend(path, tell, then) {
  const [busy, setBusy] = useState(false);
  const send = async (event, body, said) => {
    event.preventDefault();
    if (busy) return;
    const {target} = event, {own} = target.elements;
    setBusy(true);
    try {
      const answer = await call("POST", path, body, own ? {authorization: `Bearer ${own.value.trim()}`} : {});
      tell({text: said(answer)});
      target.reset();
      then(answer);
    } catch (error) {
      tell({error});
    }
    if (own) own.value = "";
    setBusy(false);
  };
  return {busy, send};
}

const OwnKey = () => html`<label>Your key, with the scope admin <span class="faint">Sent once, with this call</span>
  <input name="own" type="password" autocomplete="off" required /></label>`;

function Rotate({id, tell, then}) {
  const {busy, send} = useSend(`${ROUTE}/${part(id)}/rotate`, tell, then);
  const submit = (event) => send(event, {grace_s: 60 * Number(event.target.elements.grace.value)}, () => `rotate ${id}: done`);
  return html`<form onSubmit=${submit}><label>Minutes that the old secret works on <input name="grace" type="number" min="0" max="10080" step="any" required defaultValue="60" /></label>
    <${OwnKey} /><button aria-disabled=${busy}>Rotate</button></form>`;
}

const instant = (text) => text ? new Date(text).toISOString() : null;
const past = (text) => Boolean(text) && new Date(text).getTime() <= now();

/** The form of a new key (`fresh`), or of the rights of one that is there: fields that are not edited follow the key, and are not sent. */
function Rights({start, path, label, fresh = false, tell, then}) {
  const [edited, setEdited] = useState({}), limits = {...start.limits, ...edited};
  const {busy, send} = useSend(path, tell, (answer) => { setEdited({}); then(answer); });
  const submit = (event) => {
    const {elements} = event.target, {name, tenant, max_priority, rate, expires} = elements;
    const scopes = SCOPES.filter((one) => elements[`scope-${one}`].checked);
    elements["scope-submit"].setCustomValidity(scopes.length ? "" : "Choose at least one scope.");
    expires.setCustomValidity(past(expires.value) ? "This time has passed. Choose a later end, or none." : "");
    if (!event.target.reportValidity()) return event.preventDefault();
    const body = {name: name.value.trim() || null, scopes, max_priority: Number(max_priority.value), rate: Number(rate.value) || null, limits,
      expires_at: instant(expires.value), ...fresh && {tenant: tenant.value.trim()}};
    const before = {...start, scopes: SCOPES.filter((one) => start.scopes.includes(one)), expires_at: instant(local(start.expires_at))};
    const changed = Object.entries(body).filter(([field, value]) => JSON.stringify(value) !== JSON.stringify(before[field]));
    send(event, fresh ? body : Object.fromEntries(changed), (answer) => `${fresh ? "made" : "changed"}: ${answer.id}`);
  };
  return html`<form onSubmit=${submit}>
    ${fresh && html`<label>Tenant <input name="tenant" required maxlength="63" pattern="[a-z0-9\\-]+" defaultValue="default" autocomplete="off" /></label>`}
    <label>Name <input name="name" maxlength="200" autocomplete="off" defaultValue=${start.name ?? ""} /></label>
    <fieldset class="choice"><legend>Scopes</legend>${SCOPES.map((one) => html`<label><input type="checkbox" name=${`scope-${one}`} defaultChecked=${start.scopes.includes(one)}
      onChange=${(event) => event.target.form.elements["scope-submit"].setCustomValidity("")} />${one}</label>`)}</fieldset>
    <label>Most urgent priority <input name="max_priority" type="number" min="0" max="1000" step="1" required defaultValue=${start.max_priority} /></label>
    <label>Submissions a second <input name="rate" type="number" min="0.001" step="any" placeholder="no limit" defaultValue=${start.rate ?? ""} /></label>
    <label>Works until ${past(start.expires_at) && html`<span class="warn">It has expired: choose a later end, or none</span>`}
      <input name="expires" type="datetime-local" step="1" defaultValue=${local(start.expires_at)} onInput=${({target}) => target.setCustomValidity("")} /></label>
    <${LimitFields} limits=${limits} onLimit=${(name, value) => setEdited((earlier) => ({...earlier, [name]: value}))} />
    <${OwnKey} /><button aria-disabled=${busy}>${label}</button></form>`;
}

/** Limits by name; one that is left empty is undefined. With `lift` there is a choice of null: no limit. */
function LimitFields({limits, onLimit, lift = false, open = false}) {
  const [found, error] = usePoll("/openapi.json", SLOW_MS, {once: true});
  const {properties = {}} = found?.paths[`${LIMITS}/{tenant}`].post.requestBody.content["application/json"].schema ?? {};
  return html`<details class="whole" open=${open}><summary>Limits</summary><${Failure} error=${error} />
    <div class="fields">${Object.entries(properties).map(([name, schema]) => html`<div key=${name}>${limits[name] === null ? name.replaceAll("_", " ")
      : html`<${SchemaField} name=${name} schema=${schema} schemas=${{}} value=${limits[name]} onValue=${(value) => onLimit(name, value)} />`}
      ${lift && html`<label class="check"><input type="checkbox" aria-label=${`no limit: ${name.replaceAll("_", " ")}`} checked=${limits[name] === null}
        onChange=${({target}) => onLimit(name, target.checked ? null : undefined)} />no limit</label>`}</div>`)}</div></details>`;
}

// -- limits of tenants

function Limits({tell}) {
  const [found, error, again] = usePoll(LIMITS, POLL_MS);
  const [limits, setLimits] = useState({}), [tenant, setTenant] = useState(""), [round, setRound] = useState(0);
  const change = (one) => { setTenant(one.tenant); setLimits(one.ordered); setRound(round + 1); };
  const done = () => { setTenant(""); setLimits({}); setRound(round + 1); again(); };
  const {busy, send} = useSend(`${LIMITS}/${part(tenant.trim())}`, tell, done);
  const rows = (found?.data ?? []).map((one) => [html`<bdi>${one.tenant}</bdi>`, html`<bdi>${limited(one.ordered)}</bdi>`, html`<bdi>${limited(one.in_force)}</bdi>`, html`<${Ago} at=${one.updated_at} />`,
    html`<span class="acts"><button type="button" aria-label=${`change the limits of ${one.tenant}`} onClick=${() => change(one)}>change</button>
      <${Act} label="remove" about=${`remove the order about ${one.tenant}`} method="DELETE" path=${`${LIMITS}/${part(one.tenant)}`} tell=${tell} then=${again}
        confirm=${`Let the configured limits of ${one.tenant} hold again?`} /></span>`]);
  return html`<section aria-labelledby="limits"><h2 id="limits">Limits of tenants</h2>
    <${Failure} error=${error} />
    ${found && html`<${Table} name="List of limits" columns=${["tenant", "ordered", "in force", "since", "orders"]} rows=${rows} keys=${found.data.map((one) => one.tenant)}
      empty="The configured limits hold for all tenants. penstock keys limit changes those of one, as the form below does." />`}
    <form onSubmit=${(event) => send(event, limits, () => `limits of ${tenant}: ordered`)} key=${round}><label>Tenant <input required maxlength="63" pattern="[a-z0-9\\-]+" autocomplete="off" value=${tenant} onInput=${({target}) => setTenant(target.value)} /></label>
      <${LimitFields} limits=${limits} onLimit=${(name, value) => setLimits((earlier) => ({...earlier, [name]: value}))} lift=${true} open=${true} />
      <button aria-disabled=${busy}>Limit</button></form>
    <p class="faint">In force at all gateways within a second. Limits that are left empty are as configured. It replaces an earlier order.</p></section>`;
}
