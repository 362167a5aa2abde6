"""A cluster of unlike nodes: what each node has, which model runs where, which replica is next. Also Ray on one machine."""
