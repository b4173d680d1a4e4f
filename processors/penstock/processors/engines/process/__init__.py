"""The process of a local engine: started, spoken to, measured, and its end noticed."""
