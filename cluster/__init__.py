"""Where models run: Ray on this machine now, placement over many nodes to come."""
