"""The smaller worlds beside the cluster, each with plans and planted defects of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from simulation.keys import plants as key_plants
from simulation.keys import seeds as key_seeds
from simulation.redrives import plants as redrive_plants
from simulation.redrives import seeds as redrive_seeds
from simulation.webhooks import plants as webhook_plants
from simulation.webhooks import seeds as webhook_seeds

WORLDS = {
    "webhooks": (webhook_seeds, webhook_plants),
    "redrives": (redrive_seeds, redrive_plants),
    "keys": (key_seeds, key_plants),
}
PLANTS = {*webhook_plants.PLANTS, *redrive_plants.PLANTS, *key_plants.PLANTS}


def simulate_world(world: str, seeds: Iterable[int], plant: str | None) -> int:
    """Run seeds until one fails; the exit status. The last line of stdout is JSON."""
    histories, plants = WORLDS[world]
    if plant is not None and plant not in plants.PLANTS:
        print(f"{world} has no plant {plant}; it has {', '.join(plants.PLANTS)}", file=sys.stderr)
        return 2
    done = violations = 0
    for seed in seeds:
        with plants.planted(plant):
            outcome = histories.run(seed)
        done += 1
        if outcome.violation is not None:
            print(f"seed {seed} violates: {outcome.violation}", file=sys.stderr, flush=True)
            violations = 1
            break
    print(json.dumps({"world": world, "seeds": done, "violations": violations}), flush=True)
    return violations
