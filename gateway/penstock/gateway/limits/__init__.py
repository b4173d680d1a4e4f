"""What tenants and their keys may have at one time and in a while. Pure, but for the settings."""
