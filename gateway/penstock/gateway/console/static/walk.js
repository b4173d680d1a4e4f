// A call that handles many things in parts, repeated until none is left. It goes on whichever page of the console is shown.
import {useEffect, useState} from "./vendor/hooks.js";
import {Failure, count, html} from "./parts.js";
import {call} from "./api.js";

/**
 * The newest walk, or null. `done` counts what was done, `skipped` has {number, message} by code of what was not.
 * @type {any}
 */
let walk = null;
const watchers = new Set();
const change = (changed) => { walk = {...walk, ...changed}; watchers.forEach((told) => told(walk)); };

/** The newest walk, and each of its steps. */
export function useWalk() {
  const [shown, setShown] = useState(walk);
  useEffect(() => { watchers.add(setShown); setShown(walk); return () => { watchers.delete(setShown); }; }, []);
  return shown;
}

/**
 * Begin a walk, unless one runs. `counted`: the field of an answer that says how many were done; `about`: whatever tells
 * walks apart, and `name` says it in words; `said`: what is shown of a number that was done, or only counted;
 * `of`: how many there are, where answers do not tell how many are left.
 */
export async function start({path, body, counted, about, name, said, of = 0}) {
  if (walk?.busy) return;
  walk = {path, body, counted, about, name, said, of, done: 0, skipped: {}, left: null, after: null};
  await go();
}

/** Go on with a walk that was stopped or has failed. */
async function go() {
  change({busy: true, stopping: false, error: null});
  try {
    while (!walk.stopping) {
      const answer = await call("POST", walk.path, {...walk.body, ...walk.after && {after: walk.after}});
      const done = walk.done + answer[walk.counted];
      const left = answer.remaining ?? (answer.has_more ? Math.max(1, walk.of - done) : 0);
      const stuck = walk.left !== null && left >= walk.left;
      change({done, left, skipped: more(walk.skipped, answer.skipped ?? []), after: answer.last_id, newest: answer, error: answer.error ?? null});
      if (!answer.has_more || answer.error || stuck) break;
    }
  } catch (error) {
    change({error});
  }
  change({busy: false});
}

function more(before, skipped) {
  const found = {...before};
  for (const {code, message} of skipped) found[code] = {number: (found[code]?.number ?? 0) + 1, message};
  return found;
}

const stop = () => change({stopping: true});
const skipped = (walk) => Object.values(walk.skipped).reduce((sum, {number}) => sum + number, 0);

/**
 * How far the newest walk has come, what it left out, and one button that goes with it, so that the focus stays:
 * `next`, {label, act, kind}, begins what was counted if that is `about`; then it stops and continues.
 */
export function Walk({walk, about = "", next = null}) {
  const done = walk.done + skipped(walk), all = done + (walk.left ?? 0);
  const said = [walk.said(walk.done, walk.body.dry_run), ...Object.entries(walk.skipped).map(([code, {number, message}]) =>
    `${count(number)} skipped, ${code}: ${message}`), walk.left ? `${count(walk.left)} left` : ""].filter(Boolean).join("; ");
  const counts = walk.body.dry_run, counted = counts && walk.done > 0 && walk.about === about;
  const button = walk.busy ? !counts && {label: "Stop", act: stop} : walk.left !== 0 ? {label: "Continue", act: go}
    : counted ? next : !counts && {label: "Done", act: null};
  return html`<p class="row">${button && html`<button type="button" class=${button.kind} aria-disabled=${!button.act || walk.busy && walk.stopping}
        onClick=${() => button.act?.()}>${button.label}</button>`}
      ${walk.busy && html`<progress aria-label="Done" max=${all || 1} value=${walk.left === null ? undefined : done}></progress>
      <span class="faint">It continues while the console is open in this tab.</span>`}</p>
    <p role="status">${walk.about !== about && html`<bdi>${walk.name}</bdi>: `}${said}</p>
    <${Failure} error=${walk.error} />`;
}
