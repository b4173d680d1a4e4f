"""Topics that were brought back from a backup or a mirror: `penstock topics reconcile` (decisions/0094)."""
