"""One module for each op; see CONTRIBUTING.md for how to add one."""
