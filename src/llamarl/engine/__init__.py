"""Where executors live and how messages reach them, and the driver that carries out the controller's commands."""
