"""A local web page on which one sees memory work: `compressive serve`. Needs the extra `web`."""
