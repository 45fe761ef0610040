"""Processes that judge what must not be judged here: they can be killed, are limited, and forget every answer."""
