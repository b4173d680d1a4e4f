"""Dead letters that are run again and purged, by gateways that are killed at any place, from one seed."""
