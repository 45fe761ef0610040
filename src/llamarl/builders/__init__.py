"""From a config to each executor: one file for each role. Builders run in the process where the executor will live."""
