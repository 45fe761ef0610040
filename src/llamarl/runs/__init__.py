"""Reading runs: what a run folder holds, as data, while the job runs or afterwards. Imports no torch and changes nothing."""
