"""Records become requests that wait: screened, queued, passed on to who serves their model; and commands about them."""
