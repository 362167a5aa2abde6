"""The console: a page that shows the cluster and tries the API (docs/console.md)."""
