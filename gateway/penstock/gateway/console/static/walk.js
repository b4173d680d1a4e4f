// A call that handles many things in parts, repeated until none is left. It goes on whichever page of the console is shown.
import {useEffect, useState} from "./vendor/hooks.js";
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

/** Begin a walk, unless one runs. `counted`: the field of an answer that says how many were done; `about`: whatever tells walks apart. */
export async function start({path, body, counted, about}) {
  if (walk?.busy) return;
  walk = {path, body, counted, about, done: 0, skipped: {}, left: null, after: null};
  await go();
}

/** Go on with a walk that was stopped or has failed. */
export async function go() {
  change({busy: true, stopping: false, error: null});
  try {
    while (!walk.stopping) {
      const answer = await call("POST", walk.path, {...walk.body, after: walk.after});
      const stuck = walk.left !== null && answer.remaining >= walk.left;
      change({done: walk.done + answer[walk.counted], skipped: more(walk.skipped, answer.skipped), left: answer.remaining,
        after: answer.last_id, error: answer.error ?? null});
      if (!answer.has_more || answer.error || stuck) break;
    }
  } catch (error) {
    change({error});
  }
  change({busy: false});
}

export const stop = () => change({stopping: true});

function more(before, skipped) {
  const found = {...before};
  for (const {code, message} of skipped) found[code] = {number: (found[code]?.number ?? 0) + 1, message};
  return found;
}
